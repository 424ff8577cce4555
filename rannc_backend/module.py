"""What a training script may call beside torch's own API.

In: the user's model or its parameters. Out: results that take all ranks into account. Functions that are collective say so.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from rannc_backend.backend import REGISTRY
from rannc_backend.runtime import bootstrap
from rannc_backend.runtime.clipping import clip_gradients


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` over all stages: collective, the same norm on every rank, tied parameters counted once.

    Args:
        parameters: the model (compiled or not), or parameters of it.
        max_norm: largest norm that is left as it is.
        norm_type: order of the norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: raise instead of scaling by something that is not finite.

    Returns:
        The norm before clipping, a 0-dim tensor.

    Raises:
        UserInputError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    return clip_gradients(parameters, REGISTRY.tables(), max_norm, norm_type, error_if_nonfinite)


def get_rank() -> int:
    """This process's rank. Collective the first time: joins the job."""
    return bootstrap.start().rank


def get_world_size() -> int:
    """Number of ranks. Collective the first time: joins the job."""
    return bootstrap.start().size


def barrier() -> None:
    """Wait until every rank has called it."""
    world = bootstrap.start()
    world.monitor.begin_call()
    world.control.barrier(what="rannc_backend.barrier")
