"""Messages written where their values are computed: places, reuse after the send only, and the count of what
was copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rannc_backend.errors import UserInputError
from rannc_backend.ir.action import INPUT, OUTPUT, Action, ActionKind, Channel
from rannc_backend.ir.exchange import Edge, Value
from rannc_backend.kernels.message_layout import ALIGNMENT_BYTES, Wire
from rannc_backend.kernels.record_table import CopyReport
from rannc_backend.runtime.comm.gloo import SingleTransport
from rannc_backend.runtime.rows import Piece, RowTable
from rannc_backend.runtime.step.executor import Executor
from rannc_backend.runtime.step.messages import boundary_wire, layout_of, make_incoming, wires_of
from rannc_backend.runtime.step.send_buffers import SendBuffers, stored_names
from rannc_backend.runtime.step.step_state import StepState
from rannc_backend.runtime.step_counts import StepCounts
from rannc_backend.runtime.trace.copy_report import BUCKETS, MESSAGES, CopyLog, StepCopies, plan_copies
from tests.played_steps import shapes_of

ROUTE = Channel(0, 1, "F")


def value(name: str, *shape: int, dim: int = 0, **members: Any) -> Value:
    return Value(name=name, dtype=torch.float32, shape=shape, dim=dim, **members)


WIDE, NARROW, TURNED = value("wide", -1, 5), value("narrow", -1, 2), value("turned", 3, -1, dim=1)


def test_a_value_may_be_stored_that_travels_in_one_message_with_others() -> None:
    once, twice = value("once", -1, 2), value("twice", -1, 2)
    edges = {
        (0, 1): Edge(src=0, dst=1, forward=(once, twice, TURNED), gradient=(once, twice)),
        (0, 2): Edge(src=0, dst=2, forward=(twice,), gradient=(twice,)),
        (0, OUTPUT): Edge(src=0, dst=OUTPUT, forward=(WIDE, NARROW)),
        (1, 2): Edge(src=1, dst=2, forward=(WIDE, NARROW), gradient=(WIDE, NARROW)),
    }
    assert stored_names(edges, 0, ["once", "twice", "turned"]) == ({"once"}, frozenset())
    assert stored_names(edges, 1, ["wide", "narrow", "wide"]) == ({"narrow"}, {"once", "twice"})
    assert stored_names(edges, 2, []) == (frozenset(), {"wide", "narrow"})


def test_nothing_is_stored_in_messages_that_are_rounded() -> None:
    ids = Value(name="ids", dtype=torch.int64, shape=(-1, 3), dim=0)
    edges = {
        (0, 1): Edge(src=0, dst=1, forward=(WIDE, ids), gradient=(WIDE, NARROW)),
        (0, 2): Edge(src=0, dst=2, forward=(value("other", -1, 2), ids)),
        (0, OUTPUT): Edge(src=0, dst=OUTPUT, forward=(WIDE, NARROW)),
    }
    integers = {(0, 1): Edge(src=0, dst=1, forward=(ids, replace(ids, name="more")))}
    for wire in (Wire.BFLOAT16, Wire.FLOAT16, Wire.FLOAT8):
        assert stored_names(edges, 0, ["wide", "ids", "other"], wire) == (frozenset(), frozenset())
        assert stored_names(edges, 1, [], wire) == (frozenset(), frozenset())
        assert stored_names(integers, 0, ["ids", "more"], wire) == ({"ids", "more"}, frozenset())


def test_a_rounded_message_is_packed_once_and_unpacked_once() -> None:
    """Also that of one value, whose memory would be the message else."""
    for values in ((WIDE,), (WIDE, TURNED, NARROW)):
        layout = layout_of(values, 4, wires_of(ROUTE, values, Wire.BFLOAT16))
        rows = [torch.randn(4, each.elements_per_row) for each in values]
        rows = [row.view(each.rows_shape(4)) for row, each in zip(rows, values, strict=True)]
        buffers = SendBuffers(torch.device("cpu"))
        packed = buffers.pack(ROUTE, 0, 1, rows, layout)
        assert packed.report.bytes_copied == sum(row.numel() * 2 for row in rows)
        incoming = make_incoming(layout, Piece(1, 0, 4), SingleTransport().acquire_message)
        assert incoming.views == [] and incoming.buffer.numel() == packed.message.numel()
        incoming.buffer.copy_(packed.message)
        unpacked = incoming.unpacked(buffers.tables)
        for got, row in zip(unpacked.tensors, rows, strict=True):
            assert got.dtype == row.dtype and torch.equal(got, row.to(torch.bfloat16).float())
        incoming.fill(values, {"wide": torch.full((1, 5), 3.0)})
        filled = incoming.unpacked(buffers.tables).tensors
        assert bool((filled[0] == 3).all()) and not any(each.any() for each in filled[1:])


def test_what_travels_to_and_from_the_user_is_exact() -> None:
    for channel in (Channel(INPUT, 0, "F"), Channel(0, INPUT, "B"), Channel(1, OUTPUT, "F")):
        assert wires_of(channel, (WIDE,), Wire.FLOAT8) == (Wire.SAME,)
    assert wires_of(ROUTE, (WIDE,), Wire.FLOAT8) == (Wire.FLOAT8,)
    assert wires_of(Channel(1, 0, "B"), (WIDE,), Wire.FLOAT8) == (Wire.BFLOAT16,)


def test_float8_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserInputError, match="(?s)8.9.*boundary_dtype to 'bf16'"):
        boundary_wire("fp8", torch.device("cuda"))
    assert boundary_wire("bf16", torch.device("cuda")) == Wire.BFLOAT16


def test_what_lies_in_the_message_is_not_packed() -> None:
    buffers = SendBuffers(torch.device("cpu"))
    views = buffers.destinations(ROUTE, 0, 1, (WIDE, TURNED, NARROW), 4, {"wide": 7, "narrow": 2})
    assert set(views) == {7, 2} and views[7].shape == (4, 5) and views[2].shape == (4, 2)
    assert all(view.is_contiguous() and view.data_ptr() % 16 == 0 for view in views.values())
    wide, narrow, turned = torch.randn(4, 5), torch.randn(4, 2), torch.randn(3, 4)
    views[7].copy_(wide)
    views[2].copy_(narrow)
    packed = buffers.pack(
        ROUTE,
        0,
        1,
        [views[7], TURNED.to_rows(turned).contiguous(), views[2]],
        layout_of((WIDE, TURNED, NARROW), 4),
    )
    assert packed.report == CopyReport(
        bytes_copied=turned.nbytes, bytes_without_copy=wide.nbytes + narrow.nbytes, launches=1
    )
    message = packed.message.view(torch.float32)
    step = ALIGNMENT_BYTES // 4
    assert torch.equal(message[:20].view(4, 5), wide) and torch.equal(
        message[step : step + 12].view(4, 3), turned.t()
    )
    assert torch.equal(message[2 * step : 2 * step + 8].view(4, 2), narrow)


def test_one_value_is_its_own_message() -> None:
    rows = torch.randn(4, 5)
    packed = SendBuffers(torch.device("cpu")).pack(ROUTE, 0, 1, [rows], layout_of((WIDE,), 4))
    assert packed.message is rows and packed.report == CopyReport(bytes_without_copy=rows.nbytes)


def test_a_buffer_is_free_when_its_send_is_done() -> None:
    buffers = SendBuffers(torch.device("cpu"))

    def acquire(micro_batch: int, num_rows: int = 4, peer: int = 1) -> int:
        return buffers.destinations(ROUTE, micro_batch, peer, (WIDE, NARROW), num_rows, {"wide": 0})[
            0
        ].data_ptr()

    first, second = acquire(0), acquire(1)
    assert first != second
    buffers.done(ROUTE, 0)
    assert acquire(2, num_rows=3) == first, "a smaller message fits"
    buffers.done(ROUTE, 1)
    buffers.done(ROUTE, 2)
    assert buffers.num_buffers == {ROUTE: 2}
    acquire(3, num_rows=400)
    assert buffers.num_buffers == {ROUTE: 2}, "a larger one takes the place of one that is too small"
    acquire(4, peer=1)
    acquire(4, peer=2)
    assert buffers.num_buffers == {ROUTE: 3}
    with pytest.raises(AssertionError, match="on its way already"):
        acquire(4, peer=2)
    buffers.begin()
    assert buffers.num_buffers == {ROUTE: 0}, "what a failed program has left on its way is not used again"


def test_only_the_buffers_of_the_micro_batch_that_was_sent_are_free() -> None:
    buffers = SendBuffers(torch.device("cpu"))

    def acquire(micro_batch: int, peer: int = 1) -> int:
        return buffers.destinations(ROUTE, micro_batch, peer, (WIDE, NARROW), 4, {"wide": 0})[0].data_ptr()

    sent, under_way = {acquire(0), acquire(0, peer=2)}, {acquire(1), acquire(2)}
    buffers.done(ROUTE, 0)
    assert {acquire(3), acquire(4)} == sent, "both messages of the micro-batch"
    assert acquire(5) not in sent | under_way


class Transport:
    """Sends that are under way until they are waited for: their memory must be as it was until then."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def begin_step(self, turns: Sequence[Any]) -> None:
        return

    def reach(self, place: int) -> None:
        return

    def after_compute(self) -> None:
        return

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Any:
        copy = tensor.clone()
        self.sent.append(copy)

        def wait(limit_seconds: float) -> None:
            assert torch.equal(tensor, copy), (
                f"message on {channel} to rank {peer} was written while it was sent"
            )

        return SimpleNamespace(wait=wait)


class Stage:
    """Gives 2 x as "wide", which it stores itself where it may, and -x[:, :2] as "narrow"."""

    inputs = (SimpleNamespace(name="x", kind="batch"),)
    outputs = (SimpleNamespace(name="wide", kind="boundary"), SimpleNamespace(name="narrow", kind="boundary"))
    grad_outputs = grad_inputs = grad_parameters = stored_gradients = ()
    stored_outputs = (0,)
    gradient_copies = CopyReport()

    def infer(
        self, args: Sequence[torch.Tensor], destinations: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        wide = 2 * args[0]
        return [destinations[0].copy_(wide) if destinations else wide, -args[0][:, :2]]


def run_stage(
    stage_ranks: tuple[tuple[int, ...], ...], num_rows: int
) -> tuple[Executor, StepState, list[torch.Tensor], torch.Tensor]:
    """Stage 0 on rank 0 sends three micro-batches, of which two are on their way at a time."""
    transport = Transport()
    world: Any = SimpleNamespace(
        rank=0,
        device=torch.device("cpu"),
        transport=transport,
        monitor=SimpleNamespace(phase=lambda text: None),
    )
    stage: Any = Stage()
    executor = Executor(
        world=world,
        stages={0: stage},
        edges={(0, 1): Edge(src=0, dst=1, forward=(WIDE, NARROW))},
        tensors={},
        buffers={},
        parameter_names={},
        updated_buffers=frozenset(),
        limit_seconds=1.0,
        send_buffers=SendBuffers(torch.device("cpu")),
    )
    local = (num_rows,) + (0,) * sum(map(len, stage_ranks[1:]))
    rows = RowTable(local_rows=local, num_micro_batches=3, stage_ranks=stage_ranks)
    state = StepState(
        number=1, rows=rows, shapes=shapes_of(executor.edges), inputs={}, scalars={}, training=False
    )
    x = torch.randn(num_rows, 5)
    for m in range(3):
        start, stop = rows.interval(0, 0, m)
        state.inbox[0, "x", m] = x[start:stop]

    def act(kind: ActionKind, m: int) -> Action:
        return Action(0, kind, m) if kind is ActionKind.FORWARD else Action(0, kind, m, 1)

    forward, send, done = ActionKind.FORWARD, ActionKind.SEND_FORWARD, ActionKind.DONE_FORWARD
    order = [
        (forward, 0),
        (send, 0),
        (forward, 1),
        (send, 1),
        (done, 0),
        (forward, 2),
        (send, 2),
        (done, 1),
        (done, 2),
    ]
    executor.run(tuple(act(kind, m) for kind, m in order), [""] * len(order), state)
    return executor, state, transport.sent, x


def test_messages_of_a_program_and_their_count() -> None:
    executor, state, sent, x = run_stage(((0,), (1,)), 9)
    assert executor.send_buffers.num_buffers == {ROUTE: 2}, "as many as there are sends under way"
    step = ALIGNMENT_BYTES // 4
    for message, part in zip(sent, x.split(3), strict=True):
        numbers = message.view(torch.float32)
        assert torch.equal(numbers[:15].view(3, 5), 2 * part) and torch.equal(
            numbers[step : step + 6].view(3, 2), -part[:, :2]
        )
    # "narrow" is made by something that stores nowhere itself.
    assert state.copies.counts == {
        (MESSAGES, m): CopyReport(bytes_copied=24, bytes_without_copy=60, launches=1) for m in range(3)
    }


def test_rows_for_two_ranks_are_packed_for_each() -> None:
    executor, state, sent, x = run_stage(((0,), (1, 2)), 9)
    assert len(sent) == 6
    firsts = torch.cat([message.view(torch.float32)[:10].view(2, 5) for message in sent[::2]])
    assert torch.equal(firsts, 2 * torch.cat([part[:2] for part in x.split(3)]))
    assert all(
        report.bytes_without_copy == 0 and report.launches == 4 for report in state.copies.counts.values()
    )


def test_a_buffer_that_is_used_again_too_soon_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = SendBuffers.pack

    def hasty(self: SendBuffers, channel: Channel, micro_batch: int, peer: int, *rows: Any) -> Any:
        packed = pack(self, channel, micro_batch, peer, *rows)
        self.done(channel, micro_batch)
        return packed

    monkeypatch.setattr(SendBuffers, "pack", hasty)
    with pytest.raises(AssertionError, match="written while it was sent"):
        run_stage(((0,), (1,)), 9)


def test_counts_of_all_ranks_make_the_plan() -> None:
    ranks = [StepCopies() for _ in range(3)]
    for rank, copies in enumerate(ranks):
        copies.add(MESSAGES, 0, CopyReport(10 * rank, 1, 1))
        copies.add(MESSAGES, 0, CopyReport(0, 2, 0))
        copies.add(BUCKETS, 1, CopyReport(0, 2**20, 0))
    plan = plan_copies(((0, 1), (2,)), 2, [copies.words() for copies in ranks])
    assert plan.stages[0].messages == (CopyReport(10, 6, 2), CopyReport())
    assert plan.stages[1].messages == (CopyReport(20, 3, 1), CopyReport())
    assert plan.total(BUCKETS) == CopyReport(0, 3 * 2**20, 0)
    assert "stage 0, micro-batch 1: messages 0.000 + 0.000, 0; gradients 0.000 + 2.000, 0" in str(plan)


def test_the_first_step_is_told_once_and_by_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []

    def allgather(words: list[Any], *, what: str, limit_seconds: float | None, kind: str) -> list[Any]:
        asked.append(what)
        return [words, words]

    monitor, control = SimpleNamespace(begin_call=lambda: None), SimpleNamespace(allgather=allgather)
    world: Any = SimpleNamespace(
        monitor=monitor, control=control, counts=StepCounts(), transport=SingleTransport()
    )
    first, second = StepCopies(), StepCopies()
    first.add(BUCKETS, 0, CopyReport(0, 2**20, 0))
    quiet = CopyLog(label="graph 0", world=world, stage_ranks=((0,), (1,)), verbose=False)
    quiet.take(first, 1)
    assert quiet.own is first and quiet.plan is None and not asked
    told = CopyLog(label="graph 0", world=world, stage_ranks=((0,), (1,)), verbose=True)
    with caplog.at_level("INFO", logger="rannc_backend.runtime.trace.copy_report"):
        told.take(first, 1)
        told.take(second, 1)
    assert told.own is first and asked == ["count of copies of graph 0"]
    assert told.plan is not None and told.plan.total(BUCKETS) == CopyReport(0, 2**21, 0)
    assert "in all: messages 0.000 + 0.000, 0; gradients 0.000 + 2.000, 0" in caplog.text
