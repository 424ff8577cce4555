"""The norm of all gradients of a model whose parameters are spread over ranks, and clipping by it.

In: the tables of ownership, and parameters or gradients. Out: the same norm on every rank; tied parameters
count once. torch's own `clip_grad_norm_` and `get_total_norm` do the same for such models once there is one:
of the gradients that a rank has, each rank would take another norm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from rannc_backend.errors import UserInputError
from rannc_backend.runtime.agreement import agree, exchanging
from rannc_backend.runtime.gradients.sparse_rows import numbers_of
from rannc_backend.runtime.parameters import ParameterTable, is_spread
from rannc_backend.runtime.torch_internals import (
    ClipGradNorm,
    ClipGradValue,
    GetTotalNorm,
    replace_clip_grad_norm,
    replace_clip_grad_value,
    replace_get_total_norm,
)
from rannc_backend.settings import hooks

Tables = Callable[[], Sequence[ParameterTable]]


def norms_over_ranks(tables: Tables) -> Callable[[], None]:
    """From now on torch's own clipping and norms take all ranks' gradients into account; returns a function
    that ends this.

    Norms are collective then where they are given a parameter, or a gradient, of one of the ``tables``, or
    nothing; others are left to torch.
    """

    def make_clip(original: ClipGradNorm) -> ClipGradNorm:
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
            if all(parameter.grad is None for parameter in given):
                return torch.zeros(())  # torch's own would ask for the norm of nothing
            return original(given, max_norm, norm_type, error_if_nonfinite, foreach)

        return clip

    def make_norm(original: GetTotalNorm) -> GetTotalNorm:
        def norm(
            tensors: torch.Tensor | Iterable[torch.Tensor],
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> torch.Tensor:
            given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            parameters = _parameters_of(given, tables())
            if tables() and (parameters or not given):
                known = {id(parameter.grad) for parameter in parameters}
                others = [tensor for tensor in given if id(tensor) not in known]
                return _norm(parameters, others, tables(), float(norm_type), error_if_nonfinite)
            return original(given, norm_type, error_if_nonfinite, foreach)

        return norm

    def make_clip_value(original: ClipGradValue) -> ClipGradValue:
        def clip_value_(
            parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float, foreach: bool | None = None
        ) -> None:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            _require_reduced(given, tables())
            if any(parameter.grad is not None for parameter in given):  # torch's own asks for one at least
                original(given, clip_value, foreach)

        return clip_value_

    return hooks.together(
        replace_clip_grad_norm(make_clip),
        replace_clip_grad_value(make_clip_value),
        replace_get_total_norm(make_norm),
    )


def clip_gradients(
    parameters: Iterable[torch.Tensor],
    tables: Sequence[ParameterTable],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of ``parameters`` so that their norm over all ranks is at most ``max_norm``;
    returns the norm before.

    All ranks call it. A parameter counts once however many ranks hold it; one that no table knows, which all
    ranks have, counts once too.

    Raises:
        UserInputError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    parameters = list(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    known = [p for p in parameters if any(table.name_of(p) is not None for table in tables)]
    of_tables = {id(parameter) for parameter in known}
    others = [p.grad for p in parameters if p.grad is not None and id(p) not in of_tables]
    total = _norm(known, others, tables, norm_type, error_if_nonfinite)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    # Nothing to clip to: an infinite norm must not make NaN of what is finite.
    for grad in () if math.isinf(max_norm) else grads:
        grad.mul_(factor.to(dtype=grad.dtype, device=grad.device))
    return total


def _norm(
    parameters: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    tables: Sequence[ParameterTable],
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """The norm of the gradients of ``parameters`` over all ranks, and of ``others``, which every rank has
    alike.
    """
    _require_reduced(parameters, tables)
    world = tables[0].world if tables else None
    counted = [
        p.grad for p in parameters if p.grad is not None and any(table.answers_for(p) for table in tables)
    ]
    tensors = [*counted, *others]
    device = world.device if world is not None else (tensors[0].device if tensors else torch.device("cpu"))
    own = _power(
        [torch.linalg.vector_norm(numbers_of(grad), norm_type).double() for grad in counted],
        norm_type,
        device,
    )
    if world is not None and world.size > 1:
        own = _over_ranks(own, tables[0], norm_type, _given(parameters, tables))
    rest = _power(
        [torch.linalg.vector_norm(numbers_of(tensor), norm_type).double() for tensor in others],
        norm_type,
        device,
    )
    total = torch.maximum(own, rest) if math.isinf(norm_type) else (own + rest).pow(1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise UserInputError(
            f"the norm of order {norm_type} of the gradients is {float(total)}",
            cure="look for the step in which the loss became infinite, or clip without error_if_nonfinite",
        )
    # A rank without gradients, or parameters, answers in the same dtype as the others.
    known = itertools.chain(
        parameters, *(module.parameters() for table in tables if (module := table.root()) is not None), others
    )
    return total.to(next((tensor.dtype for tensor in known), torch.float32))


def _require_reduced(parameters: Sequence[torch.Tensor], tables: Sequence[ParameterTable]) -> None:
    for table in tables:
        if any(table.name_of(parameter) is not None for parameter in parameters):
            table.require_reduced_gradients("gradients were to be clipped")


def _power(norms: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """What norms of parts are added up to: their powers, or the largest; 0 for none."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    both = torch.stack([norm.to(device) for norm in norms])
    return both.max() if math.isinf(norm_type) else both.pow(norm_type).sum()


def _given(
    parameters: Sequence[torch.Tensor], tables: Sequence[ParameterTable]
) -> tuple[list[str], int, bool]:
    """What ranks compare of the parameters of a norm: the name of one, how many there are, and whether others of their models
    have gradients here.
    """
    if len(parameters) != 1:
        return [], len(parameters), False
    (own,) = parameters
    touched = [table for table in tables if table.name_of(own) is not None]
    modules = [module for table in touched if (module := table.root()) is not None]
    others = (p for module in modules for p in module.parameters() if p is not own)
    is_part = any(p.grad is not None and any(table.answers_for(p) for table in touched) for p in others)
    return [str(table.name_of(own)) for table in touched[:1]], 1, is_part


def _refuse_one_by_one(given_by_rank: Sequence[tuple[list[str], int, bool]]) -> None:
    """Where each rank gives one parameter, and not the same: a loop over what each rank has, whose norms are no one's."""
    names = {name for first, _, _ in given_by_rank for name in first}
    if (
        len(names) > 1
        and all(number <= 1 for _, number, _ in given_by_rank)
        and any(is_part for _, _, is_part in given_by_rank)
    ):
        first, second = sorted(names)[:2]
        raise UserInputError(
            f"gradients are clipped one parameter at a time, and not the same on all ranks ({first!r}, {second!r}): each norm "
            "would be that of several parameters",
            cure="let all ranks clip all parameters of the model one by one, also those that they do not have: for p in "
            "model.parameters(): torch.nn.utils.clip_grad_norm_(p, max_norm); or all together.",
        )


def _over_ranks(
    own: torch.Tensor, table: ParameterTable, norm_type: float, given: tuple[list[str], int, bool]
) -> torch.Tensor:
    world = table.world
    _refuse_one_by_one(agree(world, "the norm of all gradients", given))
    # A maximum by a sum, too: every rank fills its own place.
    places = torch.zeros(world.size, dtype=torch.float64, device=world.device)
    places[world.rank] = own
    with exchanging(world):
        world.transport.allreduce(places, table.everyone).wait()
    return places.max() if math.isinf(norm_type) else places.sum()


def _parameters_of(gradients: Sequence[torch.Tensor], tables: Sequence[ParameterTable]) -> list[torch.Tensor]:
    """The parameters of the tables whose gradients these are."""
    wanted = {id(gradient) for gradient in gradients}
    modules = [module for table in tables if (module := table.root()) is not None]
    return [
        p for module in modules for p in module.parameters() if p.grad is not None and id(p.grad) in wanted
    ]
