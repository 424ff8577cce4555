"""What a training script may call beside torch's own API.

In: the user's model or its parameters. Out: results that take all ranks into account. Functions that are collective say so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn

from rannc_backend.backend import REGISTRY
from rannc_backend.deployment_file import read_plan, write_text
from rannc_backend.errors import UserInputError
from rannc_backend.ir.plan import Plan
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


def save_deployment(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the plan of a model, compiled or not, as JSON: rank 0 writes, the others do nothing.

    Raises:
        UserInputError: no call of the compiled model has been planned yet, or the file cannot be written.
    """
    plan = REGISTRY.plan_of(model)
    if plan is None:
        raise UserInputError(
            "the model has no deployment yet", cure="call the compiled model once before save_deployment."
        )
    if bootstrap.start().rank == 0:
        write_text(path, plan.to_json(), what="plan")


def load_deployment(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file, to look at. options={"load_deployment": True, "deployment_file": path} runs a model under it.

    Raises:
        PlanError: the file cannot be read, or holds no plan whose parts agree with each other.
    """
    return read_plan(path)


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
