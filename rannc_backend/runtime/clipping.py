"""The norm of all gradients of a model whose parameters are spread over ranks, and clipping by it.

In: the tables of ownership and the parameters. Out: the same norm on every rank; tied parameters count once. torch's own
`clip_grad_norm_` does the same for such models once there is one: of the gradients that a rank has, each rank would scale by another norm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from rannc_backend.errors import UserInputError
from rannc_backend.runtime.parameters import ParameterTable, is_spread
from rannc_backend.runtime.torch_internals import ClipGradNorm, replace_clip_grad_norm


def clip_over_ranks(tables: Callable[[], Sequence[ParameterTable]]) -> Callable[[], None]:
    """From now on `torch.nn.utils.clip_grad_norm_` takes all ranks' gradients into account; returns a function that ends this.

    It is collective then where it is given a parameter of one of the ``tables``; other parameters' gradients are left to torch.
    """

    def make(original: ClipGradNorm) -> ClipGradNorm:
        def clip(
            parameters: torch.Tensor | Iterable[torch.Tensor],
            max_norm: float,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> torch.Tensor:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if is_spread(given, tables()):
                return clip_gradients(given, tables(), float(max_norm), float(norm_type), error_if_nonfinite)
            return original(given, max_norm, norm_type, error_if_nonfinite, foreach)

        return clip

    return replace_clip_grad_norm(make)


def clip_gradients(
    parameters: Iterable[torch.Tensor],
    tables: Sequence[ParameterTable],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of ``parameters`` so that their norm over all ranks is at most ``max_norm``; returns the norm before.

    All ranks call it. A parameter counts once however many ranks hold it; one that no table knows counts on every rank's own.

    Raises:
        UserInputError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    parameters = list(parameters)
    for table in tables:
        if any(table.name_of(parameter) is not None for parameter in parameters):
            table.require_reduced_gradients("gradients were to be clipped")
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    counted = [p.grad for p in parameters if p.grad is not None and _counts(p, tables)]
    world = tables[0].world if tables else None
    device = world.device if world is not None else (grads[0].device if grads else torch.device("cpu"))
    norms = [torch.linalg.vector_norm(grad.detach(), norm_type).double() for grad in counted]
    everyone = tuple(range(world.size)) if world is not None else (0,)
    if math.isinf(norm_type):
        # A maximum over ranks by a sum: every rank fills its own place.
        places = torch.zeros(len(everyone), dtype=torch.float64, device=device)
        if norms:
            places[world.rank if world is not None else 0] = torch.stack(norms).max()
        if world is not None and world.size > 1:
            world.transport.allreduce(places, everyone).wait()
        total = places.max()
    else:
        power = torch.zeros((), dtype=torch.float64, device=device)
        if norms:
            power = torch.stack(norms).pow(norm_type).sum()
        if world is not None and world.size > 1:
            power = power.reshape(1)
            world.transport.allreduce(power, everyone).wait()
            power = power.reshape(())
        total = power.pow(1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise UserInputError(
            f"the norm of order {norm_type} of the gradients is {float(total)}",
            cure="look for the step in which the loss became infinite, or clip without error_if_nonfinite",
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    # Nothing to clip to: an infinite norm must not make NaN of what is finite.
    for grad in () if math.isinf(max_norm) else grads:
        grad.mul_(factor.to(dtype=grad.dtype, device=grad.device))
    # A rank without gradients, or parameters, answers in the same dtype as the others.
    known = itertools.chain(parameters, *(module.parameters() for table in tables if (module := table.root()) is not None))
    return total.to(next((parameter.dtype for parameter in known), torch.float32))


def _counts(parameter: torch.Tensor, tables: Sequence[ParameterTable]) -> bool:
    for table in tables:
        name = table.name_of(parameter)
        if name is not None:
            return table.counts(name)
    return True
