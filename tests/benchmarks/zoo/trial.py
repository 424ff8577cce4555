"""One model of the zoo on one rank: built, trained alone, trained over all ranks, compared.

In: an entry, this rank. Out: a `Trial`. Two forced stages, two micro-batches, uneven rows, float64; where the
model has no float64 (`torch._grouped_mm`), float32. Where that is so, or where the model computes parts in float32
itself, exact is no further from float64 than twice as far as one process is.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.benchmarks.zoo import diffusion_models, image_models, plain_models, text_models
from tests.benchmarks.zoo.entries import Entry
from tests.default_dtype import float64

EXACT, NARROW = 1e-12, 1e-6
ROWS_OF_RANK = ((0, 3), (3, 5))
NUM_ROWS = 5
_NO_DOUBLE = "Expected mat_a to be Float32"
OPTIONS = {
    "pipeline_num": 2,
    "partition_num": 2,
    "batch_norm": "global",
    "stage_compiler": "eager",
    "costs": "rules",
    "cluster": "generic-cpu",
    "step_timeout_seconds": 60.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one rank found.

    Members:
        outcome: "exact", "narrow" (within 1e-6: the model computes in float32 itself), "differs", "refused",
            "crashed" or "not built" (the plain model does not run in this configuration).
        error: the largest relative error.
        own_error: how far plain float32 is from float64; 0 for a model in float64.
        names: parameters whose gradient this rank has; expected_names: those of one process.
    """

    outcome: str
    detail: str = ""
    error: float = 0.0
    own_error: float = 0.0
    cpu_seconds: float = 0.0
    has_batch_norm: bool = False
    names: frozenset[str] = field(default_factory=frozenset)
    expected_names: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    model: nn.Module
    values: dict[str, Any]
    steps: list[tuple[float, dict[str, torch.Tensor]]]
    own_error: float = 0.0


def make(entry: Entry) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training mode without dropout, and the arguments of its forward."""
    torch.manual_seed(0)
    makers: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
        "transformers": lambda: text_models.make(entry.name, entry.task, entry.kind),
        "timm": lambda: image_models.make_timm(entry.name),
        "torchvision": lambda: image_models.make_torchvision(entry.name),
        "diffusers": lambda: diffusion_models.make(entry.name),
        "plain": lambda: plain_models.make(entry.name),
    }
    model, values = makers[entry.library]()
    for part in model.modules():
        if any(word in type(part).__name__ for word in ("Dropout", "StochasticDepth")):
            part.p = 0.0
        for name in ("drop_prob", "drop_rate", "attn_drop", "dropout", "dropout_prob"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return model, values


def _loss(found: Any) -> torch.Tensor:
    if isinstance(found, torch.Tensor):
        return found
    return found.loss if hasattr(found, "loss") else found[0]


def _steps(
    model: nn.Module, call: Callable[..., Any], values: dict[str, Any]
) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of each of two steps, then the parameters; of those that this rank has."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        loss = _loss(call(**values))
        loss.backward()
        yield (
            float(loss.detach()),
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        )
        optimizer.step()
    yield 0.0, dict(_parameters(model))


def _parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    import rannc_backend

    # A copy of a parameter that is elsewhere is no error yet: using it is.
    for name, parameter in model.named_parameters():
        if rannc_backend.is_held(parameter):
            yield name, parameter.detach().clone()


def _error(found: list[Any], expected: list[Any]) -> float:
    """The largest difference, relative to the largest value of its kind."""
    worst = 0.0
    for (loss, tensors), (loss_alone, alone) in zip(found, expected, strict=True):
        worst = max(worst, abs(loss - loss_alone) / max(1.0, abs(loss_alone)))
        scale = max((float(value.abs().max()) for value in alone.values() if value.numel()), default=0.0)
        for name, value in tensors.items():
            if value.numel():
                # None where no sample took part: a graph gives zeros.
                expected_value = alone.get(name, torch.zeros_like(value))
                difference = float((value - expected_value).abs().max()) / (scale or 1.0)
                worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def _as(values: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in values.items()
    }


def _local(values: dict[str, Any], rank: int) -> dict[str, Any]:
    start, stop = ROWS_OF_RANK[rank]
    return {
        key: value[start:stop].clone()
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == NUM_ROWS
        else value
        for key, value in values.items()
    }


class _AllDouble(TorchDispatchMode):
    """What code computes in float32 of its own accord (`x.float()`, `softmax(dtype=torch.float32)`) is float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(
            lambda item: torch.float64 if item is torch.float32 else item, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _steps_in_double(entry: Entry) -> list[Any] | None:
    """What one process finds where all of the model is float64; None if it cannot be."""
    model, values = make(entry)
    model, values = model.double(), _as(values, torch.float64)
    try:
        with _AllDouble(), float64():
            return list(_steps(model, model, values))
    except Exception:  # of the model's code: it is as before
        return None


def _reference(entry: Entry) -> _Reference:
    model, values = make(entry)
    model, values = model.double(), _as(values, torch.float64)
    alone = copy.deepcopy(model)
    try:
        return _Reference(model=model, values=values, steps=list(_steps(alone, alone, values)))
    except RuntimeError as error:
        if _NO_DOUBLE not in str(error):
            raise
    alone = copy.deepcopy(model)
    alone.set_experts_implementation("eager")
    expected = list(_steps(alone, alone, values))
    model, values = model.float(), _as(values, torch.float32)
    alone = copy.deepcopy(model)
    own_error = _error(list(_steps(alone, alone, values)), expected)
    return _Reference(model=model, values=values, steps=expected, own_error=own_error)


def tried(entry: Entry, rank: int, capture: str, built: Callable[[], object]) -> Trial:
    """Train it. ``built``: told that the plain model has run."""
    try:
        reference = _reference(entry)
        if not all(loss == loss for loss, _ in reference.steps):
            return Trial(outcome="not built", detail="its loss is no number")
    except Exception as error:  # the plain model: not ours
        return Trial(outcome="not built", detail=f"{type(error).__name__}: {error}"[:200])
    built()
    from rannc_backend.errors import InternalError, RanncError

    model = reference.model
    begin = time.process_time()
    try:
        compiled = torch.compile(model, backend="rannc", options={**OPTIONS, "capture": capture})
        running = _steps(model, compiled, _local(reference.values, rank))
        steps = [next(running)]
        cpu_seconds = time.process_time() - begin
        steps += list(running)
        error, own_error = _error(steps, reference.steps), reference.own_error
        if EXACT < error <= NARROW and not own_error and (double := _steps_in_double(entry)):
            # As a model without float64 is judged: by how far one process is from it.
            error, own_error = _error(steps, double), _error(reference.steps, double)
    except InternalError as failure:
        return Trial(outcome="crashed", detail=str(failure)[:600])
    except RanncError as failure:
        text = f"{type(failure).__name__}: {failure}".replace("\n", " | ")
        return Trial(outcome="refused", detail=text[:600])
    except Exception as failure:
        return Trial(outcome="crashed", detail=f"{type(failure).__name__}: {failure}"[:600])
    limit = max(EXACT, 2 * own_error)
    return Trial(
        outcome="exact" if error <= limit else "narrow" if error <= NARROW else "differs",
        error=error,
        own_error=own_error,
        cpu_seconds=cpu_seconds,
        has_batch_norm=any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()),
        names=frozenset(steps[0][1]),
        expected_names=frozenset(reference.steps[0][1]),
    )
