"""The options validate_comm, display_comm_value, sync_allreduce, verify_recomp and display_act_value, each on
its own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.errors import CommunicationError, GradientsDifferError
from rannc_backend.kernels.record_table import CopyReport
from rannc_backend.runtime.comm.checked import WatchedTransport, describe_values, watch_transport
from rannc_backend.runtime.comm.gloo import SingleTransport
from rannc_backend.runtime.gradients.bucket_layout import plan_buckets
from rannc_backend.runtime.gradients.bucket_reductions import DeferredReductions
from rannc_backend.runtime.gradients.buckets import BucketMemory, PendingGradients
from rannc_backend.settings.options import Config
from rannc_backend.stages.checked_stage import DisplayedStage, VerifiedStage, relative_difference
from rannc_backend.stages.gradient_sink import GradientSink, ScratchGradients


@dataclass
class Wire:
    """Messages of one pair of ranks, by channel; `change` is done to each on its way."""

    change: Callable[[torch.Tensor], None] = lambda message: None
    messages: dict[str, deque[torch.Tensor]] = field(default_factory=dict)


class Arrival:
    def __init__(self, wire: Wire, channel: str, tensor: torch.Tensor) -> None:
        self.wire, self.channel = wire, channel
        self.tensor: torch.Tensor | None = tensor

    def wait(self, limit_seconds: float | None = None) -> None:
        tensor, self.tensor = self.tensor, None
        if tensor is not None:  # a work may be waited for more than once
            tensor.view(-1).view(torch.uint8).copy_(self.wire.messages[self.channel].popleft())


class End(SingleTransport):
    """One end of a wire."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Any:
        message = tensor.clone().view(-1).view(torch.uint8)
        self.wire.change(message)
        self.wire.messages.setdefault(channel, deque()).append(message)
        return SimpleNamespace(wait=lambda limit_seconds=None: None)

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> Any:
        return Arrival(self.wire, channel, tensor)


def ends(
    wire: Wire, *, checks: bool = True, displays: bool = False
) -> tuple[WatchedTransport, WatchedTransport]:
    return tuple(
        WatchedTransport(inner=End(wire), rank=rank, checks=checks, displays=displays) for rank in (0, 1)
    )  # type: ignore[return-value]


def carry(wire: Wire, messages: Sequence[torch.Tensor], channel: str = "0>1 F") -> list[torch.Tensor]:
    sender, receiver = ends(wire)
    for message in messages:
        sender.isend(message, 1, channel).wait()
    arrived = []
    for message in messages:
        arrived.append(torch.zeros_like(message))
        receiver.irecv(arrived[-1], 0, channel).wait()
    return arrived


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
def test_checked_messages_arrive(dtype: torch.dtype) -> None:
    messages = [torch.randint(0, 2, shape).to(dtype) for shape in ((3, 4), (1,), (0, 4), ())]
    assert all(torch.equal(a, b) for a, b in zip(carry(Wire(), messages), messages, strict=True))


@given(st.integers(0, 47), st.integers(1, 255))
def test_every_changed_byte_is_found(position: int, change: int) -> None:
    def flip(message: torch.Tensor) -> None:
        if message.numel() == 48:  # not the notes
            message[position] ^= change

    with pytest.raises(
        CommunicationError, match=r"message 0 of '0>1 F' is not what was sent(.|\n)*at rank 1, with rank 0"
    ):
        carry(Wire(flip), [torch.randn(3, 4)])


def test_messages_in_another_order_are_found() -> None:
    wire = Wire()
    sender, receiver = ends(wire)
    for _ in range(2):
        sender.isend(torch.ones(3), 1, "0>1 F")
    wire.messages["0>1 F"].rotate(2)
    first = receiver.irecv(torch.zeros(3), 0, "0>1 F")
    with pytest.raises(CommunicationError, match="message 0"):
        first.wait()


def test_what_is_displayed(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire()
    sender, receiver = ends(wire, checks=False, displays=True)
    with caplog.at_level(logging.INFO, logger="rannc_backend.runtime.comm.checked"):
        sender.isend(torch.tensor([1.0, 2.0, 6.0]), 1, "0>1 F").wait()
        work = receiver.irecv(torch.zeros(3), 0, "0>1 F")
        work.wait()
        work.wait()
        sender.allreduce(torch.ones(2), (0,)).wait()
    values = "float32 [3]: least 1, mean 3, largest 6"
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 0 sends 0>1 F number 0 to rank 1: {values}",
        f"rank 1 has 0>1 F number 0 of rank 0: {values}",
        "rank 0 adds to the all-reduce over ranks [0]: float32 [2]: least 1, mean 1, largest 1",
    ]
    assert describe_values(torch.zeros(0, 2)) == "float32 [0, 2]"
    assert describe_values(torch.zeros(2, dtype=torch.uint8)) == "uint8 [2]"


def test_nothing_is_watched_without_the_options() -> None:
    world: Any = SimpleNamespace(size=2, rank=0, transport=None)
    assert watch_transport(world, Config()) is world
    world.size = 1
    assert watch_transport(world, Config(validate_comm=True)) is world


def test_limits_and_new_groups_reach_the_transport_that_is_watched() -> None:
    calls: list[Any] = []
    inner: Any = SimpleNamespace(limit_waits=calls.append, recreate=lambda: calls.append("recreate"))
    watched = WatchedTransport(inner=inner, rank=0, checks=True, displays=False)
    watched.limit_waits(3.0)
    watched.recreate()
    assert calls == [3.0, "recreate"]


@pytest.mark.parametrize("late", [False, True])
def test_deferred_reductions_start_after_the_last_backward(late: bool) -> None:
    parameters = [(name, torch.zeros(4)) for name in "abc"]
    layout = plan_buckets(parameters, dict.fromkeys("abc", (0, 1)), (0, 1), capacity_bytes=16)
    events: list[str] = []

    def start(buffer: torch.Tensor, ranks: tuple[int, ...], takers: tuple[int, ...] = ()) -> Any:
        number = sum(event.startswith("start") for event in events)
        events.append(f"start {number}")
        return SimpleNamespace(wait=lambda: events.append(f"wait {number}"))

    def gradients() -> PendingGradients:
        return PendingGradients(
            layout=layout,
            memory=[BucketMemory(torch.zeros(4), {}) for _ in layout.buckets],
            start_reduce=DeferredReductions(start) if late else start,
        )

    for _ in range(2):
        events.clear()
        pending = gradients()
        pending.begin_last_micro_batch()
        for name in "abc":
            pending.made(name)
            events.append(f"gradient {name}")
        pending.finish()
        backward = [event for event in events if event.startswith(("start", "gradient"))]
        expected = ["gradient a", "gradient b", "gradient c", "start 0", "start 1", "start 2"]
        assert backward == (expected if late else [expected[i] for i in (3, 0, 4, 1, 5, 2)])
        assert events[-3:] == ["wait 0", "wait 1", "wait 2"]


class FakeStage:
    """Doubles its input; `error` is added to its gradients."""

    inputs = (SimpleNamespace(name="w", kind="parameter"), SimpleNamespace(name="x", kind="batch"))
    outputs = (SimpleNamespace(name="y", kind="boundary"),)
    grad_outputs, grad_inputs, grad_parameters = (0,), (1,), (0,)
    stored_outputs = stored_gradients = ()
    gradient_copies = CopyReport()

    def __init__(self, error: float = 0.0, num_saved: int = 1) -> None:
        self.error, self.num_saved = error, num_saved

    def forward(
        self, args: Sequence[torch.Tensor], destinations: Any = None
    ) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        return [2 * args[1]], (len(args[1]), *[args[1]] * self.num_saved)

    def scratch_gradients(self) -> ScratchGradients:
        return ScratchGradients({0: torch.empty(4)})

    def parameter_dtype(self, position: int) -> torch.dtype:
        return torch.float32

    def backward(
        self, saved: Any, grads: Sequence[Any], sink: GradientSink, destinations: Any = None
    ) -> list[torch.Tensor]:
        assert len(saved) == 1 + self.num_saved
        if isinstance(saved, list):
            saved.clear()
        sink.target(0)[0].copy_(grads[0] + self.error)
        sink.made(0)
        return [2 * grads[0] + self.error]

    def infer(self, args: Sequence[torch.Tensor], destinations: Any = None) -> list[torch.Tensor]:
        return [2 * args[1]]


@pytest.mark.parametrize(("error", "found"), [(0.0, []), (1e-7, []), (1e-3, ["parameter w", "input x"])])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_backward_with_recompute_is_compared(
    caplog: pytest.LogCaptureFixture, error: float, found: list[str], as_list: bool
) -> None:
    stage: Any = VerifiedStage(FakeStage(error, 1), FakeStage(0.0, 3), 2)  # type: ignore[arg-type]
    outputs, saved = stage.forward([torch.ones(1), torch.ones(4)])
    assert torch.equal(outputs[0], torch.full((4,), 2.0))
    taken = ScratchGradients({0: torch.empty(4)})
    results = stage.backward(list(saved) if as_list else saved, [torch.ones(4)], taken)
    assert torch.equal(results[0], torch.full((4,), 2.0) + error) and torch.equal(
        taken.gradients[0], torch.ones(4) + error
    )
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split("gradient of ")[1].split(":")[0] for message in messages] == found
    assert all(message.startswith("verify_recomp: stage 2") for message in messages)


def test_the_first_step_is_refused_where_gradients_differ_and_later_ones_are_not_looked_at() -> None:
    step = [4]
    stage: Any = VerifiedStage(
        FakeStage(1e-3, 1),  # type: ignore[arg-type]
        FakeStage(0.0, 3),  # type: ignore[arg-type]
        2,
        rank=5,
        step=lambda: step[0],
        logs=False,
        refuses=True,
    )
    first, second = (stage.forward([torch.ones(1), torch.ones(4)])[1] for _ in range(2))
    step[0] = 5
    later = stage.forward([torch.ones(1), torch.ones(4)])[1]
    for saved, micro_batch in ((first, 0), (second, 1)):
        with pytest.raises(GradientsDifferError, match=r"parameter w differs by 0.001 ") as raised:
            stage.backward(saved, [torch.ones(4)], ScratchGradients({0: torch.empty(4)}))
        assert (raised.value.rank, raised.value.stage, raised.value.micro_batch) == (5, 2, micro_batch)
    taken = ScratchGradients({0: torch.empty(4)})
    results = stage.backward(list(later), [torch.ones(4)], taken)
    assert len(later) < len(first) and torch.equal(results[0], torch.full((4,), 2.001))
    assert torch.equal(taken.gradients[0], torch.full((4,), 1.001))


def test_differences_of_gradients() -> None:
    nan, infinity = float("nan"), float("inf")
    a = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_difference(a, a.clone()) == 0.0
    assert relative_difference(a + torch.tensor([0.0, 0.05]), a) == pytest.approx(0.01)
    assert relative_difference(torch.tensor([nan, 4.0]), torch.tensor([nan, 4.0])) == 0.0
    assert relative_difference(torch.tensor([nan, 4.0]), a) == infinity
    assert relative_difference(torch.tensor([infinity, 4.0]), a) == infinity
    assert relative_difference(torch.ones(2), torch.zeros(2)) == pytest.approx(2**0.5)


def test_outputs_are_displayed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rannc_backend.stages.checked_stage"):
        stage: Any = DisplayedStage(FakeStage(), 1, describe_values)  # type: ignore[arg-type]
        stage.forward([torch.ones(1), torch.ones(2)])
        stage.infer([torch.ones(1), torch.ones(2)])
    assert [record.getMessage() for record in caplog.records] == 2 * [
        "stage 1 makes boundary y: float32 [2]: least 2, mean 2, largest 2"
    ]
