"""Captures of one module without Dynamo, each for the calls that it holds for.

In: a module and the arguments of a call. Out: a `Capture` that serves it: one that was made before, where its
guards hold, or a new one. A forward may fill a cache the first time (a value that is no tensor); one that
changes something each time is refused, and what it has changed put back.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rannc_backend.capture.analysis import SumsError, keeps_rows_apart, mixed_batch_error
from rannc_backend.capture.graph import CapturedGraph, lengths_hold
from rannc_backend.capture.inputs import TensorInput
from rannc_backend.capture.nonstrict.arguments import (
    ALONE,
    AttributePlace,
    BatchDims,
    Call,
    Changing,
    Place,
    Ranks,
    call_of,
    inputs_of,
    places_of,
)
from rannc_backend.capture.nonstrict.guards import Change, Guards
from rannc_backend.capture.nonstrict.kept_modules import WHOLE_MODEL, KeptModules, computes_rows_apart
from rannc_backend.capture.nonstrict.reachable import Reachable
from rannc_backend.capture.nonstrict.read_values import ReadValue
from rannc_backend.capture.nonstrict.reads import Reads, Unknown
from rannc_backend.capture.nonstrict.swapping import attributes_of, changed_error
from rannc_backend.capture.nonstrict.trace import PROBED_ROWS, Recorded, record, sizes_after_run
from rannc_backend.errors import ModelError, RanncError, UnclearBatchDimError
from rannc_backend.ir.graph_input import BatchInput
from rannc_backend.passes.batch.operator_call import ADVICE
from rannc_backend.passes.kept_functions import operator_code
from rannc_backend.passes.pipeline import PassError
from rannc_backend.passes.plain_numbers import hints_in

logger = logging.getLogger(__name__)

_MAX_CHOICES = 16
_MAX_CAPTURES = 4  # a first one fills caches, others show attributes that are written and not read


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
    dims: tuple[int, ...]  # of samples, of these tensors

    def seen(self, call: Call) -> Call:
        """A call with samples along the dimensions of this capture."""
        return call.moved(self.dims)

    def serves(self, call: Call) -> str:
        """Why it does not serve a call; "" if it does."""
        call = self.seen(call)
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
        return replace(
            self,
            guards=Guards.of(module, self.guards.unread).without(self.guards.skipped),
            kept=_kept(self.recorded.places),
        )

    def tensors(self, call: Call) -> list[torch.Tensor]:
        """The inputs of the graph for a call, by their positions."""
        return [*(place.tensor() for place in self.recorded.places), *self.seen(call).tensors]


def capture_call(
    module: nn.Module,
    call: Call,
    ranks: Ranks = ALONE,
    changing: Changing = frozenset(),
    *,
    all_rows: bool = False,
) -> Capture:
    """Capture a call. Collective as `record` is; ``changing`` and ``all_rows`` as there.

    Where it fails, inputs of which another dimension is as long as that of the samples of others, whatever that is, have
    their samples there (hidden states [layers, batch, width] beside [batch, length, width], masks [batch, length] beside
    [length, batch, width]).

    Raises:
        UnsupportedModelError: the forward changes something beside its tensors; or, as the errors of
            `record`.
    """
    refusal: Exception
    capture = None
    try:
        capture = _captured(module, call, ranks, changing, all_rows)
        if WHOLE_MODEL not in capture.recorded.kept_modules:
            return capture
    except RanncError as error:
        if not isinstance(error, ModelError):
            raise
        refusal = error
    except Exception as error:  # noqa: BLE001 - torch's own: a layer has found a size that is none of a hidden state
        refusal = error
    dims = _tied_dims(module, call, ranks)
    if dims != call.dims:
        other = call.moved(dims)
        places = {
            (index, other.dim_of_tensor(index, call.dim_of_given(index, dim))) for index, dim in changing
        }
        try:
            return _captured(module, other, ranks, {place for place in places if place[1] > 0}, all_rows)
        except ModelError as error:
            logger.debug("samples along the dimensions %s of the inputs: %s", dims, error)
    if capture is None:
        raise refusal
    return capture


def _tied_dims(module: nn.Module, call: Call, ranks: Ranks) -> tuple[int, ...]:
    """The dimensions of samples, where the forward asks for the second dimension of inputs to be as long as the first one
    of others, with samples first, and that may be any number: the second of these. Else those of the call.
    """
    inputs = inputs_of(places_of(module), call)
    own = len(inputs) - len(call.tensors)
    sizes = {
        (own + index, dim): int(size)
        for index, tensor in enumerate(call.tensors)
        for dim, size in enumerate(tensor.shape[:2])
        if size > 0
    }
    ones = [place for place, size in sizes.items() if size == 1]
    tries = [{place: size for place, size in sizes.items() if size > 1}]
    # Of one sample: which of the sizes of 1 are that is not known, but it is one of each input.
    by_input = [
        [place for place in ones if place[0] == position] for position in sorted({at for at, _ in ones})
    ]
    chosen = itertools.islice(itertools.product(*by_input), _MAX_CHOICES) if by_input else iter(())
    tries += [dict.fromkeys(places, PROBED_ROWS) for places in chosen]
    guards = Guards.of(module)
    for tried in tries:
        tied = _tied_to_first(module, call, inputs, ranks, tried)
        _undo_all(guards)
        if tied:
            return tuple(
                call.dim_of_given(index, 1) if own + index in tied else dim
                for index, dim in enumerate(call.dims)
            )
    return call.dims


def _tied_to_first(
    module: nn.Module,
    call: Call,
    inputs: Sequence[TensorInput],
    ranks: Ranks,
    hints: Mapping[tuple[int, int], int],
) -> list[int]:
    """The positions of inputs whose dimension 1 must be as long as dimension 0 of others, if that may be any number.

    ``hints``: by position and dimension, sizes of the run that may be other ones.
    """
    try:
        found, _ = sizes_after_run(module, inputs, call, ranks, Reads(), KeptModules(module), hints)
    except Exception as error:  # noqa: BLE001 - whatever a forward raises: its dimensions stay unknown
        logger.debug("sizes of the inputs are not known to be tied: %s", error)
        return []
    first = {size for (_, dim), size in found.items() if dim == 0 and size.is_Symbol}
    if any(call.dims):
        # What the option says of all inputs is said of those with most dimensions: [length, batch, width].
        most = max(tensor.dim() for tensor in call.tensors)
        first &= {found.get((item.position, 0)) for item in inputs if item.tensor.dim() == most}
    tied = [[at for (at, dim), other in found.items() if dim == 1 and other == size] for size in first]
    several = [positions for positions in tied if positions]
    return several[0] if len(several) == 1 else []


def _captured(module: nn.Module, call: Call, ranks: Ranks, changing: Changing, all_rows: bool) -> Capture:
    undone: list[Change] = []
    unread = _unread_tensors(module)
    for _ in range(_MAX_CAPTURES):
        guards = Guards.of(module, unread)
        try:
            undo = functools.partial(_undo_all, guards)
            recorded = record(module, call, ranks, undo, changing, all_rows=all_rows, unread=unread)
        except BaseException:
            _undo([*undone, *guards.changes()])
            raise
        guards = guards.without(recorded.kept_attributes)
        changes = list(guards.changes())
        # What torch's own layers keep, and not what the model's code has put there.
        by_user = guards.written({change.key for change in changes if change.is_of_torch})
        _undo([change for change in changes if change.is_of_torch and change.key not in by_user])
        changes = [change for change in changes if not change.is_of_torch or change.key in by_user]
        if not changes:
            return _capture(recorded, guards, call)
        undone += changes
        logger.debug("the forward has changed %s", ", ".join(change.place for change in changes))
        if written := _only_written(module, guards, changes):
            _undo(undone)
            unread, undone = unread | written, []
        elif any(_holds_value(change.now) for change in changes):
            break
    _undo(undone)
    raise changed_error(changes[0].place, changes[0].now)


def _unread_tensors(module: nn.Module) -> frozenset[str]:
    """The names of plain attributes that hold tensors and that the forward writes and does not read."""
    names = {place.key for place in places_of(module) if isinstance(place, AttributePlace)}
    return Reachable(module).only_written(names) if names else frozenset()


def _only_written(module: nn.Module, guards: Guards, changes: Sequence[Change]) -> frozenset[str]:
    """Of attributes of modules that hold tensors or numbers of the call now: the names of those that the forward does not
    read.
    """
    names = {change.key for change in changes if isinstance(change.key, str) and _holds_value(change.now)}
    of_modules = {(id(holder), key) for holder, key, _ in attributes_of(module, names)}
    return guards.only_written(
        {change.key for change in changes if (id(change.holder), change.key) in of_modules} & names
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
        dims=call.dims,
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


def refuse_other_dim(
    captured: CapturedGraph,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ranks: Ranks,
    error: PassError,
) -> None:
    """For a call whose samples meet along the first dimension of its inputs: if nothing meets along the second, that
    could be the one of the samples (`batch_first=False`), and ranks would put pieces of sequences together.

    What a module that runs as written mixes is seen in a run of it; what another operator does that is not known, or what
    happens in such a module along the second dimension, is taken for no mixing where layers say `batch_first=False`.

    ``module``: is called, and graph ``captured`` is that of its call. ``ranks``: what does not ask other ranks.
    ``error``: says what meets.

    Raises:
        UnclearBatchDimError: if so.
    """
    node = error.node
    is_kept = node is not None and operator_code(node.target) is not None
    hints = hints_in(captured.fake_mode.shape_env)
    if node is not None and is_kept and computes_rows_apart(node, captured.rows_symbol, hints):
        return
    call = call_of(module, args, kwargs)
    other = call_of(module, args, kwargs, BatchDims(otherwise=1))
    guards = Guards.of(module)
    undo = functools.partial(_undo_all, guards)
    try:
        recorded = record(module, other, ranks, undo, unread=_unread_tensors(module))
    except Exception as failure:  # noqa: BLE001 - whatever a forward raises: no other dimension is that of samples
        logger.debug("samples along the second dimension of the inputs: %s", failure)
        return
    finally:
        undo()
    own, inputs = len(recorded.places), recorded.captured.inputs
    found = [item.position - own for item in inputs if isinstance(item, BatchInput)]
    moved = [index for index in found if other.dims[index]]
    by_layers = bool(recorded.kept_modules) or not (error.is_known or is_kept)
    if by_layers:
        is_second = any(getattr(part, "batch_first", None) is False for part in module.modules())
    else:
        is_second = keeps_rows_apart(recorded.captured, with_sums=not isinstance(error, SumsError))
    if not moved or not is_second:
        return
    shapes = ", ".join(f"{call.labels[index]} {list(call.given[index].shape)}" for index in moved)
    reason = error.reason.replace(ADVICE, "").strip(". ")
    raise UnclearBatchDimError(
        reason, inputs=shapes, by_layers=by_layers, location=mixed_batch_error(error).location
    )


def _holds_value(value: object) -> bool:
    """Whether it holds what is another one in each call: tensors, sizes, numbers that are read."""
    leaves = pytree.tree_leaves(value, is_leaf=lambda item: isinstance(item, torch.Size))
    members = getattr(value, "__dict__", {}).values()
    return any(
        isinstance(part, torch.Tensor | torch.SymInt | torch.SymFloat | Unknown)
        for leaf in (*leaves, *members)
        for part in (leaf if isinstance(leaf, torch.Size) else (leaf,))
    )
