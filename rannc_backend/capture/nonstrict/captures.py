"""Captures of one module without Dynamo, each for the calls that it holds for.

In: a module and the arguments of a call. Out: a `Capture` that serves it: one that was made before, where its
guards hold, or a new one. A forward may fill a cache the first time (a value that is no tensor); one that
changes something each time is refused, and what it has changed put back.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rannc_backend.capture.graph import lengths_hold
from rannc_backend.capture.nonstrict.arguments import ALONE, Call, Place, Ranks
from rannc_backend.capture.nonstrict.guards import Change, Guards
from rannc_backend.capture.nonstrict.read_values import ReadValue
from rannc_backend.capture.nonstrict.reads import Unknown
from rannc_backend.capture.nonstrict.trace import Changing, Recorded, record
from rannc_backend.errors import UnsupportedModelError
from rannc_backend.ir.graph_input import BatchInput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The arguments that a capture serves: tensors by shape without rows, everything else by value."""

    structure: pytree.TreeSpec
    constants: tuple[tuple[int, type, Any], ...]
    indices: tuple[tuple[int, int], ...]
    tensors: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, call: Call, batch: frozenset[int], lengths: Changing = frozenset()) -> Signature:
        """Of a call of which the tensors with these indices have rows, and whose sizes there are lengths."""
        return cls(
            structure=call.structure,
            constants=tuple((position, type(leaf), leaf) for position, leaf in call.constants().items()),
            indices=tuple(call.index_of_leaf.items()),
            tensors=tuple(
                (
                    tensor.dtype,
                    tensor.device,
                    tensor.requires_grad,
                    tensor.dim(),
                    tuple(None if (index, dim) in lengths else size for dim, size in enumerate(tensor.shape))[
                        index in batch :
                    ],
                )
                for index, tensor in enumerate(call.tensors)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A captured forward and what it holds for."""

    recorded: Recorded
    guards: Guards
    signature: Signature
    kept: tuple[tuple[Any, ...], ...]  # of the tensors of the module: see `_kept`
    batch: frozenset[int]  # among the tensors of the call

    def serves(self, call: Call) -> str:
        """Why it does not serve a call; "" if it does."""
        if Signature.of(call, self.batch, self._length_places) != self.signature:
            return "other arguments"
        if not self._has_lengths(call):
            return "other lengths"
        if _kept(self.recorded.places) != self.kept:
            return "other parameters or buffers"
        return self.guards.broken()

    @property
    def _length_places(self) -> Changing:
        own = len(self.recorded.places)
        return {(position - own, dim) for position, dim in self.recorded.lengths.sizes}

    def _has_lengths(self, call: Call) -> bool:
        recorded, own = self.recorded, len(self.recorded.places)
        lengths = recorded.lengths.lengths_of(
            lambda position, dim: int(call.tensors[position - own].shape[dim])
        )
        return lengths is not None and lengths_hold(recorded.captured, lengths)

    def renewed(self, module: nn.Module) -> Capture:
        """The same capture, which takes for granted what has changed since: by this package, which puts hooks
        on the modules that it has planned.
        """
        return replace(self, guards=Guards.of(module), kept=_kept(self.recorded.places))

    def tensors(self, call: Call) -> list[torch.Tensor]:
        """The inputs of the graph for a call, by their positions."""
        return [*(place.tensor() for place in self.recorded.places), *call.tensors]


def capture_call(
    module: nn.Module,
    call: Call,
    ranks: Ranks = ALONE,
    changing: Changing = frozenset(),
    *,
    all_rows: bool = False,
) -> Capture:
    """Capture a call. Collective as `record` is; ``changing`` and ``all_rows`` as there.

    Raises:
        UnsupportedModelError: the forward changes something beside its tensors; or, as the errors of
            `record`.
    """
    undone: list[Change] = []
    for _ in range(2):
        guards = Guards.of(module)
        try:
            undo = functools.partial(_undo_all, guards)
            recorded = record(module, call, ranks, undo, changing, all_rows=all_rows)
        except BaseException:
            _undo([*undone, *guards.changes()])
            raise
        changes = list(guards.changes())
        _undo([change for change in changes if change.is_of_torch])
        changes = [change for change in changes if not change.is_of_torch]
        if not changes:
            return _capture(recorded, guards, call)
        undone += changes
        if any(_holds_tensor(change.now) for change in changes):
            break
        logger.debug("the forward has changed %s", ", ".join(change.place for change in changes))
    _undo(undone)
    is_number = isinstance(changes[0].now, Unknown)
    raise UnsupportedModelError(
        f"the forward changes {changes[0].place} ({'a number' if is_number else type(changes[0].now).__name__}), which "
        "a graph does not",
        cure="keep the tensor there (value.detach()) and read it with .item() after the call, or give it as an output."
        if is_number
        else "make it a buffer (self.register_buffer), give it as an output, or change it outside of the "
        "compiled model.",
    )


def _undo_all(guards: Guards) -> None:
    _undo(list(guards.changes()))


def _undo(changes: Sequence[Change]) -> None:
    """Put back what was there, the latest first."""
    for change in reversed(changes):
        change.undo()


def _capture(recorded: Recorded, guards: Guards, call: Call) -> Capture:
    own = len(recorded.places)
    batch = frozenset(
        item.position - own for item in recorded.captured.inputs if isinstance(item, BatchInput)
    )
    return Capture(
        recorded=recorded,
        guards=guards,
        signature=Signature.of(call, batch, {(at - own, dim) for at, dim in recorded.lengths.sizes}),
        kept=_kept(recorded.places),
        batch=batch,
    )


def _kept(places: Sequence[Place]) -> tuple[tuple[Any, ...], ...]:
    """Whether each of the module's tensors is trained, and its type and shape."""
    tensors = [place.holder.get(place.key) for place in places]
    return tuple(
        (tensor.requires_grad, tensor.dtype, tensor.shape) if isinstance(tensor, torch.Tensor) else ()
        for tensor in tensors
    )


def find_capture(captures: Sequence[Capture], call: Call, ranks: Ranks = ALONE) -> Capture | None:
    """The last one that serves a call. Collective where values choose the path."""
    known: dict[str, Any] = {}  # values that several paths are chosen by
    for capture in reversed(captures):
        reason = capture.serves(call) or _other_path(capture, call, ranks, known)
        if not reason:
            return capture
        logger.debug("a capture does not serve a call: %s", reason)
    return None


def _other_path(capture: Capture, call: Call, ranks: Ranks, known: dict[str, Any]) -> str:
    """Where the call takes another path than a capture; "" if nowhere."""
    decisions = capture.recorded.decisions
    if not decisions:
        return ""
    tensors = [None if ranks.is_absent(tensor) else tensor for tensor in capture.tensors(call)]

    def evaluate(value: ReadValue) -> Any:
        if value.key not in known:
            known[value.key] = value.evaluate(tensors, ranks.exchange)
        return known[value.key]

    for decision in decisions:
        answer = decision.answer_from(evaluate)
        if answer != decision.answer:
            return f"a value is {answer} at {decision.location}"
    return ""


def _holds_tensor(value: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)) or any(
        isinstance(member, torch.Tensor) for member in getattr(value, "__dict__", {}).values()
    )
