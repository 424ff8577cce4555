"""CUDA graphs for compiled stages: the launches of a forward or backward recorded once and replayed as one.

In: a boxed callable (one list of inputs), its FX graph. Out: a boxed callable that gives the same. Terms: a *slot* is one recording with
the memory of its results, which are overwritten when it is replayed; it is *free* when nobody refers to them any more. Several
micro-batches are in flight at a time, so a stage has several slots. A *key* is what a recording holds for: the numbers among the inputs
(of rows), and the addresses of those that are *pinned*: written to by the graph, saved by a forward, or the same at every call so far
(parameters). All other inputs are copied into the slot before it is replayed.

Recording does not wait for the device: a wait for messages under way, whose senders wait for this rank, would never end. All slots share
one pool of memory, which is safe because replays follow one another on one stream, and results are kept, so that no later recording uses
their memory. In "auto" a callable is recorded only if launching it takes the host about as long as running it takes the device.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

logger = logging.getLogger(__name__)

BoxedCallable = Callable[[list[Any]], Sequence[Any]]

WARM_UP_CALLS = 3
TIMED_CALLS = 3
MOST_SLOTS = 32
# Below this part of the device's time the host is far enough ahead, and copies of inputs would cost more than launches.
HOST_SHARE = 0.7


class GraphLayer(Protocol):
    """What is asked of CUDA, so that tests can put something else in its place."""

    def capture(self, function: BoxedCallable, arguments: list[Any]) -> tuple[Callable[[], None], Sequence[Any]]:
        """Record a call of ``function``: what replays it, and its results (not computed yet)."""
        ...

    def mark(self) -> Any:
        """An event in the current stream."""
        ...

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Between two marks; None while the device has not passed them."""
        ...


class CudaGraphLayer:
    """The real one. `torch.cuda.graph` would wait for the whole device before it records."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def capture(self, function: BoxedCallable, arguments: list[Any]) -> tuple[Callable[[], None], Sequence[Any]]:
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Other threads look after messages meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                results = function(arguments)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay, results

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        return begin.elapsed_time(end) / 1e3 if end.query() else None


@dataclass(slots=True, kw_only=True)
class GraphRecorder:
    """Records the callables of one rank. ``mode``: "auto" or "on"."""

    mode: str
    layer: GraphLayer = field(default_factory=CudaGraphLayer)

    def wrapper(self, name: str, graph_module: fx.GraphModule, num_saved: int = 0) -> Callable[[BoxedCallable], BoxedCallable]:
        """Wraps the callable of ``graph_module``, whose first ``num_saved`` inputs a forward has saved."""
        pinned = frozenset(range(num_saved)) | written_inputs(graph_module)
        announces = _announces(graph_module)
        return lambda function: RecordedCallable(name=name, function=function, recorder=self, pinned=pinned, announces=announces)


# Set while a stage is compiled, for the code that compiles its graphs; None: nothing is recorded.
_RECORDER: ContextVar[GraphRecorder | None] = ContextVar("recorder of CUDA graphs", default=None)


@contextlib.contextmanager
def recording(recorder: GraphRecorder | None) -> Iterator[None]:
    """Within it, callables that are compiled are recorded."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def recorder_of(name: str, graph_module: fx.GraphModule, num_saved: int = 0) -> Callable[[BoxedCallable], BoxedCallable]:
    """What wraps the callable that ``graph_module`` is about to be compiled to, as `GraphRecorder.wrap`; nothing outside of `recording`.

    Asked for before compilation, which changes the graph.
    """
    recorder = _RECORDER.get()
    return _unchanged if recorder is None else recorder.wrapper(name, graph_module, num_saved)


def _unchanged(function: BoxedCallable) -> BoxedCallable:
    return function


def written_inputs(graph_module: fx.GraphModule) -> frozenset[int]:
    """Positions of the placeholders that some operator writes to, or to a view of."""
    owner = {node: index for index, node in enumerate(graph_module.graph.find_nodes(op="placeholder"))}
    written = set()
    for node in graph_module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is None:
                continue
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            owners = [owner[value] for value in (given if isinstance(given, (list, tuple)) else [given]) if value in owner]
            if argument.alias_info.is_write:
                written.update(owners)
            elif owners:
                owner[node] = owners[0]  # a view
    return frozenset(written)


def _announces(graph_module: fx.GraphModule) -> bool:
    return any("gradients_made_" in str(node.target) for node in graph_module.graph.nodes if node.op == "call_function")


@dataclass(slots=True, eq=False)
class _Slot:
    inputs: dict[int, torch.Tensor]  # copies by position
    replay: Callable[[], None]
    results: Sequence[Any]
    own: list[torch.Tensor]  # results and copies whose memory is the slot's
    users_when_free: list[int] = field(default_factory=list)
    announced: list[int] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        return [_num_users(tensor) for tensor in self.own] == self.users_when_free


@dataclass(slots=True, kw_only=True)
class RecordedCallable:
    """One boxed callable and its recordings."""

    name: str
    function: BoxedCallable
    recorder: GraphRecorder
    pinned: frozenset[int]
    announces: bool
    slots: dict[tuple[Any, ...], list[_Slot]] = field(default_factory=dict)
    _num_calls: int = 0
    _state: str = "warming up"  # then "timing", "deciding", "recording", or "plain" for good
    _constant: dict[int, int] | None = None  # address by position of inputs that have not moved so far
    _timed: list[tuple[float, Any, Any]] = field(default_factory=list)

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        if self._state == "plain":
            return self.function(values)
        if self._state != "recording":
            return self._call_before(values)
        return self._call_recorded(values)

    def _call_before(self, values: list[Any]) -> Sequence[Any]:
        self._num_calls += 1
        self._note_addresses(values)
        timing = self._num_calls > WARM_UP_CALLS and self.recorder.mode == "auto" and len(self._timed) < TIMED_CALLS
        begin, started = (self.recorder.layer.mark(), time.perf_counter()) if timing else (None, 0.0)
        results = self.function(values)
        if timing:
            self._timed.append((time.perf_counter() - started, begin, self.recorder.layer.mark()))
        if self._num_calls >= WARM_UP_CALLS:
            self._decide()
        return results

    def _note_addresses(self, values: Sequence[Any]) -> None:
        found = {index: value.data_ptr() for index, value in enumerate(values) if isinstance(value, torch.Tensor)}
        if self._constant is None:
            self._constant = found
        else:
            self._constant = {index: address for index, address in self._constant.items() if found.get(index) == address}

    def _decide(self) -> None:
        if self.recorder.mode == "on":
            self._state = "recording"
            return
        if len(self._timed) < TIMED_CALLS:
            return
        device_seconds = [self.recorder.layer.seconds(begin, end) for _, begin, end in self._timed]
        if any(seconds is None for seconds in device_seconds):
            return
        host, device = sum(host for host, _, _ in self._timed), sum(seconds or 0.0 for seconds in device_seconds)
        self._state = "recording" if host > HOST_SHARE * device else "plain"
        logger.info("CUDA graphs of %s: %s (launching %.3g ms, running %.3g ms)", self.name, self._state, host * 1e3, device * 1e3)

    def _call_recorded(self, values: list[Any]) -> Sequence[Any]:
        assert self._constant is not None, "recorded before it was called"
        moved = [index for index, address in self._constant.items() if index not in self.pinned and values[index].data_ptr() != address]
        if moved:
            # Not constant after all: from now on it is copied.
            for index in moved:
                del self._constant[index]
            self.slots.clear()
        key = self._key_of(values)
        slot = next((slot for slot in self.slots.get(key, ()) if slot.is_free), None)
        if slot is None:
            slot = self._record(key, values)
        if slot is None:
            return self.function(values)
        for index, copy in slot.inputs.items():
            copy.copy_(values[index])
        values.clear()
        slot.replay()
        if slot.announced:
            _announce(slot.announced)
        # New objects, so that their users can be counted.
        return [result.detach() if isinstance(result, torch.Tensor) else result for result in slot.results]

    def _is_by_address(self, index: int) -> bool:
        return index in self.pinned or (self._constant is not None and index in self._constant)

    def _key_of(self, values: Sequence[Any]) -> tuple[Any, ...]:
        parts: list[Any] = []
        for index, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                parts.append(value)
            elif self._is_by_address(index):
                parts.append(value.data_ptr())
            else:
                parts.append((tuple(value.shape), value.stride()))
        return tuple(parts)

    def _record(self, key: tuple[Any, ...], values: Sequence[Any]) -> _Slot | None:
        if sum(map(len, self.slots.values())) >= MOST_SLOTS:
            logger.warning("CUDA graphs of %s: more than %d kinds of calls; going on without", self.name, MOST_SLOTS)
            self._state = "plain"
            return None
        copies = {i: v.clone() for i, v in enumerate(values) if isinstance(v, torch.Tensor) and not self._is_by_address(i)}
        arguments = [copies.get(index, value) for index, value in enumerate(values)]
        given = {v.untyped_storage().data_ptr() for i, v in enumerate(values) if isinstance(v, torch.Tensor) and i not in copies}
        announced: list[int] = []
        try:
            with _hearing(announced) if self.announces else contextlib.nullcontext():
                replay, results = self.recorder.layer.capture(self.function, arguments)
        except RuntimeError as error:
            logger.warning("CUDA graphs of %s: cannot be recorded, going on without: %s", self.name, str(error).splitlines()[0])
            self._state = "plain"
            return None
        tensors = [*(result for result in results if isinstance(result, torch.Tensor)), *copies.values()]
        slot = _Slot(copies, replay, results, [t for t in tensors if t.untyped_storage().data_ptr() not in given], announced=announced)
        del arguments, tensors
        slot.users_when_free = [_num_users(tensor) for tensor in slot.own]
        self.slots.setdefault(key, []).append(slot)
        return slot


def _num_users(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def _hearing(announced: list[int]) -> Iterator[None]:
    """Within it, gradients that are announced are noted, not handed on: nothing has been computed yet."""
    from rannc_backend.kernels.gradient_writes import listening

    class Note:
        def made(self, position: int) -> None:
            announced.append(position)

    with listening(Note()):
        yield


def _announce(positions: Sequence[int]) -> None:
    """Tell who listens to this call."""
    from rannc_backend.kernels.gradient_writes import gradients_made

    gradients_made([], positions)
