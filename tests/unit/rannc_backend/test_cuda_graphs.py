"""Recorded callables give what plain ones give, while several results are in use, for any number of rows; recording is played on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.compile_cuda_graphs import (
    MOST_SLOTS,
    WARM_UP_CALLS,
    BoxedCallable,
    GraphRecorder,
    RecordedCallable,
    recorder_of,
    recording,
    written_inputs,
)


def unowned(value: Any) -> Any:
    """A tensor over the same memory that does not keep it alive: a recording knows addresses only."""
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage()
    memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=value.dtype)
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())


class PlayedGraphs:
    """A recording computes into the memory of its results when it is replayed, from the inputs that it was recorded with."""

    def __init__(self, host_share: float = 2.0) -> None:
        self.num_captures = 0
        self.num_replays = 0
        self.host_share = host_share
        self.fails = False

    def capture(self, function: BoxedCallable, arguments: list[Any]) -> tuple[Callable[[], None], Sequence[Any]]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.num_captures += 1
        inputs = [unowned(value) for value in arguments]
        before = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
        results = function(list(arguments))
        # Nothing is computed, and nothing is written, while it is recorded.
        for value, old in zip(inputs, before, strict=True):
            if isinstance(value, Tensor):
                value.copy_(old)
        given = {value.data_ptr() for value in inputs if isinstance(value, Tensor)}
        made = [isinstance(result, Tensor) and result.data_ptr() not in given for result in results]
        for result, is_made in zip(results, made, strict=True):
            if is_made:
                result.fill_(float("nan"))

        def replay() -> None:
            self.num_replays += 1
            for old, new, is_made in zip(results, function(list(inputs)), made, strict=True):
                if is_made:
                    old.copy_(new)

        return replay, results

    def mark(self) -> float:
        return 0.0

    def seconds(self, begin: float, end: float) -> float:
        return 1e-9 if self.host_share > 1 else 1e9


def graph_of(function: Callable[..., Any], *values: Any) -> fx.GraphModule:
    return make_fx(function)(*values)


def make(
    function: Callable[..., Sequence[Any]], *examples: Any, mode: str = "on", num_saved: int = 0, **played: Any
) -> tuple[Any, PlayedGraphs]:
    def boxed(values: list[Any]) -> Sequence[Any]:
        return function(*values)

    layer = PlayedGraphs(**played)
    recorder = GraphRecorder(mode=mode, layer=layer)
    return recorder.wrapper("stage 0", graph_of(function, *examples), num_saved)(boxed), layer


def layer_function(rows: int, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    return y, torch.tanh(y)


def test_results_are_those_of_plain_calls() -> None:
    weight = torch.randn(4, 4)
    call, layer = make(layer_function, 2, weight, torch.randn(2, 4))
    held = []
    for step in range(12):
        x = torch.randn(2 + step % 2, 4)
        results = call([x.shape[0], weight, x])
        held.append((x, results))
        for old_x, old_results in held:
            expected = layer_function(0, weight, old_x)
            assert all(torch.equal(a, b) for a, b in zip(old_results, expected, strict=True)), "a later call has overwritten this"
        held = held[-3:]
    assert layer.num_replays == 12 - WARM_UP_CALLS
    # At most four are in use at a time, of each number of rows at most three.
    assert layer.num_captures <= 6


def test_a_parameter_that_moves_is_noticed() -> None:
    weight = torch.randn(4, 4)
    call, layer = make(layer_function, 2, weight, torch.randn(2, 4))
    x = torch.randn(2, 4)
    for _ in range(6):
        # The same batch each time: it seems to be constant, and is not.
        call([2, weight, x])
    other, moved = torch.randn(2, 4), weight.clone() + 1
    assert torch.equal(call([2, weight, other])[0], other @ weight)
    assert torch.equal(call([2, moved, x])[0], x @ moved)
    weight.add_(1)
    assert torch.equal(call([2, weight, x])[0], x @ weight)


def test_what_is_written_to_is_never_copied() -> None:
    def write(rows: int, saved: Tensor, bucket: Tensor, tangent: Tensor) -> tuple[Tensor]:
        bucket.view(-1).add_((saved * tangent).view(-1))
        return (tangent * 2,)

    graph = graph_of(write, 2, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2))
    assert written_inputs(graph) == {2}
    call, layer = make(write, 2, torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2), num_saved=2)
    buckets = [torch.zeros(2, 2), torch.zeros(2, 2)]
    expected = [torch.zeros(2, 2), torch.zeros(2, 2)]
    held = [torch.randn(2, 2), torch.randn(2, 2)]
    for step in range(WARM_UP_CALLS + 6):
        saved, tangent = held[step % 2], torch.randn(2, 2)
        (result,) = call([2, saved, buckets[step % 2], tangent])
        expected[step % 2] += saved * tangent
        assert torch.allclose(buckets[step % 2], expected[step % 2], atol=1e-5), step
        assert torch.equal(result, tangent * 2)
        del result
    assert layer.num_captures == 2, "one for each pair of addresses"


def test_saved_values_select_the_recording() -> None:
    weight = torch.randn(4, 4)
    forward, forward_layer = make(layer_function, 2, weight, torch.randn(2, 4))

    def backward(saved: Tensor, tangent: Tensor) -> tuple[Tensor]:
        return ((1 - saved * saved) * tangent,)

    call, layer = make(backward, torch.ones(2, 4), torch.ones(2, 4), num_saved=1)
    for _ in range(6):
        xs = [torch.randn(2, 4) for _ in range(3)]
        saved = [forward([2, weight, x])[1] for x in xs]
        for x, value in zip(xs, saved, strict=True):
            tangent = torch.randn(2, 4)
            assert torch.equal(call([value, tangent])[0], (1 - torch.tanh(x @ weight) ** 2) * tangent)
        del saved, value
    assert forward_layer.num_captures == layer.num_captures == 3 and layer.num_replays == 18 - WARM_UP_CALLS


@pytest.mark.parametrize(("host_share", "replays"), [(2.0, True), (0.1, False)])
def test_auto_records_where_the_host_is_the_slower_one(host_share: float, replays: bool) -> None:
    weight = torch.randn(4, 4)
    call, layer = make(layer_function, 2, weight, torch.randn(2, 4), mode="auto", host_share=host_share)
    for _ in range(12):
        call([2, weight, torch.randn(2, 4)])
    assert (layer.num_replays > 0) is replays and (layer.num_captures > 0) is replays


def test_a_recording_that_fails_leaves_the_plain_call(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.randn(4, 4)
    call, layer = make(layer_function, 2, weight, torch.randn(2, 4))
    layer.fails = True
    with caplog.at_level("WARNING"):
        for _ in range(6):
            x = torch.randn(2, 4)
            assert torch.equal(call([2, weight, x])[0], x @ weight)
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA graphs of stage 0: cannot be recorded, going on without: operation not permitted when stream is capturing"
    ]


def test_too_many_kinds_of_calls_end_it() -> None:
    weight = torch.randn(4, 4)
    call, layer = make(layer_function, 2, weight, torch.randn(2, 4))
    for rows in range(1, MOST_SLOTS + 10):
        x = torch.randn(rows, 4)
        assert torch.equal(call([rows, weight, x])[0], x @ weight)
    assert layer.num_captures == MOST_SLOTS


def test_nothing_is_recorded_unless_asked_for() -> None:
    def boxed(values: list[Any]) -> Sequence[Any]:
        return values

    graph = graph_of(lambda x: (x,), torch.ones(1))
    assert recorder_of("a", graph)(boxed) is boxed
    with recording(GraphRecorder(mode="on", layer=PlayedGraphs())):
        assert isinstance(recorder_of("a", graph)(boxed), RecordedCallable)
    assert recorder_of("a", graph)(boxed) is boxed
