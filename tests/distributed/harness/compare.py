"""Compare tensors and keep a list of what differs, so that no rank leaves a case before the others.

In: pairs of tensors. Out: `Findings`: failures as text, and the worst relative error per kind of value.
Terms: the *relative error* of a tensor is ||a - b|| / max(||b||, floor); the *floor* stands for tensors whose
true value is zero (the gradient of an attention's key bias) and is a fraction of the largest norm of the same
kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

SMALLEST = 1e-30
FLOOR_FRACTION = 1e-3


def relative_error(actual: Tensor, expected: Tensor, floor: float = SMALLEST) -> float:
    """||actual - expected|| / max(||expected||, floor) in float64; infinity for NaN or for another shape."""
    if actual.shape != expected.shape:
        return math.inf
    difference = (actual.detach().double() - expected.detach().double()).norm().item()
    error = difference / max(expected.detach().double().norm().item(), floor)
    return error if math.isfinite(error) else math.inf


def floor_of(tensors: Mapping[str, Tensor]) -> float:
    """The floor for a family of tensors, such as all gradients of a model."""
    return max([FLOOR_FRACTION * t.detach().double().norm().item() for t in tensors.values()] + [SMALLEST])


class Findings:
    """What one rank found in one case. Never raises: the ranks must stay together until the end of the case.

    Members:
        failures: texts, in the order found.
        worst: largest relative error seen per kind of value ("loss", "gradient", ...).
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.worst: dict[str, float] = {}

    def that(self, condition: bool, text: str) -> None:
        """Note a failure unless the condition holds."""
        if not condition:
            self.failures.append(text)

    def close(
        self, kind: str, name: str, actual: Any, expected: Tensor, tolerance: float, floor: float = SMALLEST
    ) -> None:
        """Note a failure unless actual is a tensor of expected's shape and dtype within the tolerance."""
        if not isinstance(actual, Tensor):
            self.failures.append(f"{kind} {name}: got {type(actual).__name__} instead of a tensor")
            return
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            self.failures.append(
                f"{kind} {name}: got {tuple(actual.shape)} {actual.dtype}, "
                f"expected {tuple(expected.shape)} {expected.dtype}"
            )
            return
        error = relative_error(actual, expected, floor)
        self.worst[kind] = max(self.worst.get(kind, 0.0), error)
        if not error <= tolerance:
            self.failures.append(f"{kind} {name}: relative error {error:.2e} above {tolerance:.0e}")

    def raises(self, text: str, kinds: tuple[str, ...], action: Callable[[], Any]) -> BaseException | None:
        """Note a failure unless the action raises an error whose class (or a base, or a cause) has one of the
        names.
        """
        try:
            action()
        except Exception as error:  # noqa: BLE001 - any class: the name decides
            link: BaseException | None = error
            while link is not None:
                if {base.__name__ for base in type(link).__mro__} & set(kinds):
                    return link
                link = link.__cause__ or link.__context__
            self.failures.append(
                f"{text}: raised {type(error).__name__}({str(error)[:500]}) instead of {kinds}"
            )
            return None
        self.failures.append(f"{text}: raised nothing instead of {kinds}")
        return None


def torch_dtype(name: str) -> torch.dtype:
    """torch.float64 for "float64"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} is no dtype"
    return dtype
