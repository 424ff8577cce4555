"""Compares values of the ranks with those of the reference, and keeps what differs.

In: pairs of tensors. Out: `Difference`s in the order in which they came to be, and the largest relative
difference per kind.

Terms: a tensor's *scale* is the largest absolute value in the reference's; but at least a thousandth of the
largest of its kind, as a value that is zero but for rounding (the gradient of an attention's key bias) has no
scale of its own. What may differ: two thirds of the digits of the dtype with the fewest digits in which the
model computes must agree; see `tolerance_of`.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rannc_backend.errors.base import user_location
from rannc_backend.verify.leaves import tensors_of
from rannc_backend.verify.settings import Difference, Largest, StepResult, ValueKind

_FLOOR_FRACTION = 1e-3
_MAX_KEPT = 20
# An update of a parameter is rounded to the parameter's own digits, a few times.
_ROUNDINGS = 8


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest relative difference that rounding may explain: two thirds of the digits agree."""
    return float(torch.finfo(dtype).eps ** (2 / 3))


def largest_in(tensors: Iterable[Tensor]) -> float:
    """The largest finite absolute value."""
    return max((_finite_largest(tensor) for tensor in tensors), default=0.0)


def floor_of(largest: float) -> float:
    """The least scale where the largest value of the kind is this."""
    return _FLOOR_FRACTION * largest


def _finite_largest(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    return float(_exact(tensor).abs().nan_to_num(nan=0.0, posinf=0.0).max())


def _exact(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()


class NarrowestDtype(TorchFunctionMode):
    """While active, notes the floating dtype with the fewest digits that an operator gives, and where."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.dtype = dtype
        self.location = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, Tensor)
            and result.is_floating_point()
            and torch.finfo(result.dtype).eps > torch.finfo(self.dtype).eps
        ):
            self.dtype = result.dtype
            self.location = _place_of_caller()
        return result


def _place_of_caller() -> str:
    return user_location("".join(traceback.format_list(traceback.extract_stack()[:-2])))


@dataclass(slots=True)
class Comparison:
    """What has been compared so far. ``tolerance``: of everything but parameters, whose updates have their
    own dtype's.
    """

    tolerance: float = tolerance_of(torch.float64)
    step: StepResult = StepResult(number=1)
    call: int = 0
    steps: list[StepResult] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    num_differences: int = 0

    def value(
        self, kind: ValueKind, name: str, rank: int, here: Tensor, there: Tensor, *, floor: float = 0.0
    ) -> bool:
        """Compare a value of a rank with the reference's; whether it agrees."""
        if here.shape != there.shape:
            problem = f"shape {list(here.shape)} in place of {list(there.shape)}"
            return self._note(
                Difference(
                    **self._where(kind, name, rank), largest=math.inf, scale=1.0, allowed=0.0, problem=problem
                )
            )
        scale = max(_finite_largest(there), floor)
        return self._judge(kind, name, rank, here, there, scale=scale, allowed=self.tolerance * scale)

    def update(
        self, kind: ValueKind, name: str, rank: int, here: Tensor, there: Tensor, before: Tensor
    ) -> bool:
        """Compare a parameter or buffer after a step, of which the same was there ``before``; whether it
        agrees.
        """
        if here.shape != there.shape:
            return self.value(kind, name, rank, here, there)
        scale = _finite_largest(there)
        allowed = 0.0
        if there.is_floating_point() or there.is_complex():
            change = _finite_largest(_exact(there) - _exact(before))
            allowed = tolerance_of(there.dtype) * change + _ROUNDINGS * torch.finfo(there.dtype).eps * max(
                scale, _finite_largest(before)
            )
        return self._judge(kind, name, rank, here, there, scale=scale, allowed=allowed)

    def missing(self, kind: ValueKind, name: str, what: str) -> None:
        """No rank has the value at all."""
        self._note(
            Difference(**self._where(kind, name, -1), largest=math.inf, scale=1.0, allowed=0.0, problem=what)
        )

    def end_step(self) -> None:
        """What comes next belongs to the next step."""
        self.steps.append(self.step)
        self.step = StepResult(number=self.step.number + 1)

    def loss(self, here: float, there: float) -> None:
        """What the table shows of a step."""
        self.step = self.step.model_copy(update={"loss": (here, there)})

    def _where(self, kind: ValueKind, name: str, rank: int) -> dict[str, Any]:
        return {"step": self.step.number, "call": self.call, "kind": kind, "name": name, "rank": rank}

    def _judge(
        self,
        kind: ValueKind,
        name: str,
        rank: int,
        here: Tensor,
        there: Tensor,
        *,
        scale: float,
        allowed: float,
    ) -> bool:
        mine, theirs = _exact(here).flatten(), _exact(there).flatten()
        counts = dict(self.step.num_compared)
        counts[kind] = counts.get(kind, 0) + 1
        self.step = self.step.model_copy(update={"num_compared": counts})
        if not mine.numel():
            return True
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        differences = torch.where(same, 0.0, (mine - theirs).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        at = int(differences.argmax())
        found = Difference(
            **self._where(kind, name, rank),
            largest=float(differences[at]),
            scale=scale,
            allowed=allowed,
            index=_index(at, theirs.numel(), there),
            here=float(mine[at]),
            there=float(theirs[at]),
        )
        known = self.step.largest.get(kind, Largest())
        if found.relative > known.relative or not known.name:
            largest: Mapping[str, Largest] = {
                **self.step.largest,
                kind: Largest(relative=found.relative, name=name),
            }
            self.step = self.step.model_copy(update={"largest": dict(largest)})
        return found.largest <= allowed or self._note(found)

    def _note(self, difference: Difference) -> bool:
        self.num_differences += 1
        if len(self.differences) < _MAX_KEPT:
            self.differences.append(difference)
        return False


def _index(at: int, numel: int, tensor: Tensor) -> tuple[int, ...]:
    """The index of a flat element, of a complex number without the part."""
    position = at // max(1, numel // max(1, tensor.numel()))
    return (
        tuple(int(index) for index in torch.unravel_index(torch.tensor(position), tensor.shape))
        if tensor.dim()
        else ()
    )


def first_scalar(value: Any) -> int | None:
    """Which tensor of an output is the loss: the first floating one without a dimension; None: there is
    none.
    """
    tensors = [tensor for _, tensor in tensors_of(value)]
    return next(
        (index for index, tensor in enumerate(tensors) if tensor.dim() == 0 and tensor.is_floating_point()),
        None,
    )
