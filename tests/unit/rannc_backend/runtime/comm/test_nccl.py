"""Messages and reductions on streams, judged by a device that notices every race; two or more ranks in one
process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rannc_backend.errors import CommunicationError
from rannc_backend.runtime.comm.device_watch import DeviceWatch
from rannc_backend.runtime.comm.gloo import OwnedGroups
from rannc_backend.runtime.comm.nccl import MessageWork, NcclCalls, NcclTransport
from rannc_backend.runtime.comm.receive_buffers import PinnedBuffers, ReceiveBuffers
from rannc_backend.runtime.comm.staged import StagedTransport
from rannc_backend.runtime.comm.streams import unrecorded_alias
from rannc_backend.runtime.torch_internals import is_finished
from rannc_backend.runtime.world import QueuedMessage, Route
from tests.fake_device import FakeDevice, FakeEvent, MailLinks, OnDevice, Reporter


class Rank:
    """One rank with its device and transport."""

    def __init__(self, rank: int, size: int, local_messages: dict[Any, list[torch.Tensor]]) -> None:
        self.device = FakeDevice()
        self.links = MailLinks(self.device, rank, local_messages)
        watch = DeviceWatch(Reporter(), rank=rank, limit_seconds=10, start_thread=False)
        self.transport = NcclTransport(
            rank=rank,
            size=size,
            limit_seconds=10,
            layer=self.device,
            calls=self.links,  # type: ignore[arg-type]
            watch=watch,
            groups=OwnedGroups(owns_default_group=False),
        )


def make_ranks(size: int, routes: list[Route], groups: list[tuple[int, ...]] | None = None) -> list[Rank]:
    local_messages: dict[Any, list[torch.Tensor]] = {}
    ranks = [Rank(rank, size, local_messages) for rank in range(size)]
    for rank in ranks:
        rank.transport.prepare(channels=["state"], routes=routes, groups=groups or [])
    local_messages.clear()
    return ranks


ROUTE = Route("0F1", (0,), (1,))


def test_a_message_is_made_before_it_is_sent_and_used_after_it_has_come() -> None:
    first, second = make_ranks(2, [ROUTE])
    with OnDevice(first.device):
        value = torch.arange(8.0) * 2
        work = first.transport.isend(value, 1, "0F1")
        del value
        work.wait()
    with OnDevice(second.device):
        buffer = second.transport.acquire(32).view(torch.float32)
        receive = second.transport.irecv(buffer, 0, "0F1")
        receive.wait()
        result = buffer + 1
    assert result.tolist() == [2 * i + 1 for i in range(8)]
    del work, receive, buffer, result
    assert not first.device.races and not second.device.races


def test_a_receive_does_not_wait_for_what_is_being_computed() -> None:
    """It waits for its buffer's last use, and for nothing that was queued later."""
    first, second = make_ranks(2, [ROUTE])
    device, transport = second.device, second.transport
    link_stream: Any = transport._messages[0, 1].stream
    for number in range(4):
        first.transport.isend(torch.full((4,), float(number)), 1, "0F1").wait()
    last_addition: list[int] = []
    with OnDevice(device):
        for _ in range(4):
            buffer = transport.acquire(16).view(torch.float32)
            work = transport.irecv(buffer, 0, "0F1")
            # Posted behind the last multiplication, whose buffer it takes, but not behind the addition after
            # that.
            assert not any(link_stream.seen & bit for bit in last_addition)
            work.wait()
            used = buffer * 2
            del buffer, work
            transport.after_compute()
            later = used + 1
            last_addition = [1 << len(device.log)]
        assert later.tolist() == [7.0] * 4
    assert transport.buffers.num_bytes == 512, "one buffer was enough"
    assert not device.races


def test_planted_faults_are_found() -> None:
    """What the transport does is needed: without it there is a race."""
    first, second = make_ranks(2, [ROUTE])
    with OnDevice(second.device):
        buffer = second.transport.acquire(32).view(torch.float32)
        second.transport.irecv(buffer, 0, "0F1")
        assert (buffer + 1).numel() == 8  # used without waiting
    assert any("does not wait for receive from 0" in race for race in second.device.races)

    first, second = make_ranks(2, [ROUTE])
    with OnDevice(first.device):
        value = torch.arange(8.0) * 2
        work = first.transport.isend(value, 1, "0F1")
        value.add_(1)  # overwritten while it is sent
        work.wait()
    assert any("add_" in race and "send to 1" in race for race in first.device.races)

    first, second = make_ranks(2, [ROUTE])
    first.transport.isend(torch.ones(8), 1, "0F1").wait()
    with OnDevice(second.device):
        buffer = second.transport.acquire(32).view(torch.float32)
        second.transport.irecv(buffer, 0, "0F1").wait()
        used = buffer + 1
        del buffer
        second.transport.after_compute()
        again = second.transport.acquire(32).view(torch.float32)
        second.transport.buffers._acquired[next(iter(second.transport.buffers._acquired))].ready = FakeEvent(
            0
        )  # forgets the last use
        second.transport.irecv(again, 0, "0F1")
    assert used.numel() == 8 and any(
        "receive from 0" in race and "add" in race for race in second.device.races
    )


def test_memory_dropped_too_early_is_found() -> None:
    (first, _) = make_ranks(2, [ROUTE])
    with OnDevice(first.device):
        value = torch.arange(8.0) * 2
        work = first.transport.isend(value, 1, "0F1")
        del value, work  # nobody waited
        gc.collect()
    assert any("memory was dropped while send to 1" in race for race in first.device.races)


@pytest.mark.parametrize(
    ("takers", "queued"), [((), "all-reduce"), ((0, 1), "all-reduce"), ((0,), "reduce on")]
)
def test_reductions_run_beside_compute(takers: tuple[int, ...], queued: str) -> None:
    """Sums for all, and for the one rank that needs them."""
    first, _ = make_ranks(2, [], [(0, 1)])
    device, transport = first.device, first.transport
    with OnDevice(device):
        bucket = torch.ones(16)
        other = torch.ones(16)
        work = transport.allreduce(bucket, (0, 1), takers)
        assert queued in device.log[-1]
        other.mul_(3)  # the rest of the backward
        link = transport._reductions[(0, 1), 0].stream
        assert link is not None
        multiplied = 1 << len(device.log)
        assert not link.seen & multiplied, "the reduction waits for what was queued after it"  # type: ignore[attr-defined]
        work.wait()
        total = bucket + other
    assert total.tolist() == [5.0] * 16 and not device.races
    with OnDevice(device):
        transport.allreduce(bucket, (0, 1), takers)
        bucket.add_(1)
    assert any("add_" in race and queued in race for race in device.races)


def test_communicators_of_one_group_have_streams_of_their_own() -> None:
    first, second = make_ranks(2, [], [(0, 1)])
    for rank in (first, second):
        rank.transport.prepare(groups=[(0, 1)], num_communicators=2)
    assert first.transport.created == second.transport.created
    assert first.transport.created[-2:] == ["reductions of (0, 1)", "reductions of (0, 1), communicator 1"]
    one, other = (first.transport._reductions[(0, 1), number].stream for number in (0, 1))
    assert one is not other
    with OnDevice(first.device):
        buckets = [torch.ones(4), torch.ones(4)]
        works = [first.transport.allreduce(bucket, (0, 1), (), turn) for turn, bucket in enumerate(buckets)]
        for work in works:
            work.wait()
        total = buckets[0] + buckets[1]
    assert total.tolist() == [4.0] * 4 and not first.device.races


def test_links_are_shared_and_made_in_one_order_everywhere() -> None:
    routes = [
        Route("-1F0", (0, 1, 2, 3), (0, 1)),
        Route("0F1", (0, 1), (2, 3)),
        Route("1B0", (2, 3), (0, 1)),
        Route("0F0", (2,), (2,)),
    ]
    groups = [(0, 1), (0, 1, 2, 3), (2, 3), (1,)]
    ranks = make_ranks(4, routes, groups)
    assert len({tuple(rank.transport.created) for rank in ranks}) == 1
    # One for all messages between the same ranks, whatever their channel and direction; then the reductions.
    assert all(rank.links.created == [(0, 1, 2, 3), (0, 1), (0, 1, 2, 3), (2, 3)] for rank in ranks)
    pairs = [("-1F0", 3, 0), ("0F1", 0, 3), ("1B0", 2, 1), ("1B0", 3, 0)]
    for rank in ranks:
        rank.transport.connect(pairs)
    # All ranks of a link begin it together, and every pair is connected in one batch per link with both ends
    # in it.
    begun = [(index, number) for index, rank in enumerate(ranks) for number, _, _ in rank.links.exchanges]
    assert {(index, 1) for index in range(4)} <= set(begun)
    exchanges = [(index, *exchange) for index, rank in enumerate(ranks) for exchange in rank.links.exchanges]
    sends = sorted((number, index, peer) for index, number, out, _ in exchanges for peer in out)
    receives = sorted((number, peer, index) for index, number, _, come in exchanges for peer in come)
    assert sends == receives and {(1, 0, 3), (1, 2, 1), (1, 3, 0)} <= set(sends)
    before, num_exchanges = list(ranks[0].transport.created), len(ranks[0].links.exchanges)
    ranks[0].transport.prepare(channels=["state"], routes=routes, groups=groups)
    ranks[0].transport.connect(pairs)
    assert ranks[0].transport.created == before and len(ranks[0].links.exchanges) == num_exchanges, (
        "nothing is made twice"
    )


def test_stages_of_two_models_on_other_ranks_have_links_of_their_own() -> None:
    """A channel is named after two stages; which ranks they have differs between models of one process."""
    ranks = make_ranks(4, [Route("1F2", (1,), (1,)), Route("0F1", (0,), (1,))])
    for rank in ranks:
        rank.transport.prepare(routes=[Route("1F2", (1,), (0,)), Route("0F1", (0, 1), (2, 3))])
    for rank in ranks:
        rank.transport.connect([("1F2", 1, 0), ("0F1", 0, 1), ("0F1", 0, 2), ("0F1", 1, 3)])
    for channel, source, destination in (("1F2", 1, 0), ("0F1", 0, 1), ("0F1", 0, 2), ("0F1", 1, 3)):
        values = torch.full((4,), 1.0 + destination)
        sent = ranks[source].transport.isend(values, destination, channel)
        buffer = ranks[destination].transport.acquire(16)
        received = ranks[destination].transport.irecv(buffer, source, channel)
        links = [work.link for work in (sent, received) if isinstance(work, MessageWork)]
        assert len({link.ranks for link in links}) == 1 and {source, destination} <= set(links[0].ranks)
        sent.wait()
        received.wait()
        assert buffer.view(torch.float32).tolist() == values.tolist()


def test_what_is_made_anew_is_connected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make_ranks(2, [ROUTE], [(0, 1)])
    for rank in ranks:
        monkeypatch.setattr(rank.transport._groups, "destroy", lambda: None)
        rank.transport.prepare(groups=[(0, 1)], num_communicators=2)
        rank.transport.connect([("0F1", 0, 1)])
        rank.links.exchanges.clear()
        rank.transport.recreate()
        names = ["messages of (0, 1)", "reductions of (0, 1)", "reductions of (0, 1), communicator 1"]
        assert rank.transport.created == names * 2
        assert {peer for _, out, come in rank.links.exchanges for peer in (*out, *come)} == {
            1 - rank.links._rank
        }
    ranks[0].transport.isend(torch.ones(4), 1, "0F1").wait()


def test_messages_are_queued_at_their_turn() -> None:
    first, _ = make_ranks(2, [ROUTE, Route("1B0", (1,), (0,))])
    transport, exchanges = first.transport, first.links.exchanges
    exchanges.clear()
    queued = [
        QueuedMessage(1, "0F1", 1, True),
        QueuedMessage(2, "0F1", 1, True),
        QueuedMessage(2, "1B0", 1, False),
        QueuedMessage(3, "0F1", 1, True),
    ]
    transport.begin_step(queued)
    receive = transport.irecv(transport.acquire(16), 1, "1B0")
    works = [
        transport.isend(torch.ones(4), 1, "0F1"),
        transport.isend(torch.ones(4), 1, "0F1"),
        transport.isend(torch.ones(0), 1, "0F1"),
    ]
    transport.reach(0)
    assert not exchanges, "posted, and kept until its place"
    with pytest.raises(AssertionError, match="before it is queued"):
        receive.wait()
    transport.reach(1)
    assert exchanges == [(1, (1,), ())]
    transport.reach(2)
    assert exchanges == [(1, (1,), ()), (1, (1,), ()), (1, (), (1,))]
    transport.reach(3)
    assert len(exchanges) == 3, "an empty tensor has a place and no message"
    for work in [receive, *works]:
        work.wait()
    transport.isend(torch.ones(4), 1, "0F1").wait()
    assert len(exchanges) == 4, "outside of steps at once"
    transport.begin_step([QueuedMessage(1, "0F1", 1, True)])
    with pytest.raises(AssertionError, match="has not posted"):
        transport.reach(1)


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_every_collective_gives_a_work_that_can_be_asked(dtype: torch.dtype) -> None:
    calls, values = NcclCalls(), torch.ones(4, dtype=dtype)
    group = dist.group.WORLD
    for work in (
        calls.all_reduce(values, group),
        calls.reduce(values, 0, group),
        calls.broadcast(values.view(torch.uint8), 0, group),
    ):
        work.wait()
        assert is_finished(work)
    assert values.tolist() == [1] * 4


def test_work_that_has_failed_is_not_taken_for_done() -> None:
    """Torch says of it that it is completed."""
    first, _ = make_ranks(2, [ROUTE], [(0, 1)])
    transport = first.transport
    reporter: Any = transport._watch._reporter
    transport.check()
    transport.irecv(transport.acquire(16), 1, "state")
    link = transport._messages[0, 1]
    posted: Any = link.latest
    posted.failure = RuntimeError("NCCL error: remote process exited\nmore")
    assert posted.is_completed()
    with pytest.raises(
        CommunicationError, match=r"messages of \(0, 1\) broke: NCCL error: remote process exited"
    ):
        transport.check()
    with pytest.raises(CommunicationError, match="broke"):
        transport.recreate()
    transport._watch.look()
    (error,) = reporter.errors
    assert (
        "receive of 'state', queued in: step 3, stage 1, micro-batch 2, broke: NCCL error" in str(error)
        and error.rank == 0
    )
    with pytest.raises(CommunicationError, match="micro-batch 2"):
        transport.check()


def test_a_reduction_that_has_failed_is_noticed_too() -> None:
    first, _ = make_ranks(2, [ROUTE], [(0, 1)])
    first.transport.allreduce(torch.ones(4), (0, 1))
    posted: Any = first.transport._reductions[(0, 1), 0].latest
    posted.failure = RuntimeError("network")
    posted.event.passed = True
    first.transport._watch.look()
    reporter: Any = first.transport._watch._reporter
    assert "all-reduce over ranks [0, 1]" in str(reporter.errors[0])
    with pytest.raises(CommunicationError, match="all-reduce"):
        first.transport.check()


def test_receive_buffers_are_bounded_and_given_back() -> None:
    device = FakeDevice()
    pool = ReceiveBuffers(device)
    held = [pool.take(1000), pool.take(1000)]
    pool.after_compute()
    assert pool.num_bytes == 2048
    kept = held.pop()[10:20]
    del held
    pool.after_compute()
    third = pool.take(600)
    assert pool.num_bytes == 2048, "the one that nobody holds is used again, for less"
    assert third.untyped_storage().data_ptr() != kept.untyped_storage().data_ptr(), "a view keeps it lent"
    del third
    pool.after_compute()
    others = [pool.take(600), pool.take(40_000), pool.take(1000)]
    assert len({other.untyped_storage().data_ptr() for other in others}) == 3, (
        "buffers of different sizes beside each other"
    )
    del others
    large = pool.take(100_000)
    assert large.numel() == 100_000 and large.data_ptr() % 64 == 0
    del kept, large
    for _ in range(6):
        pool.begin_step()
    assert pool.num_bytes == 0, "what no step has used goes back"


def test_pinned_buffers_wait_for_the_device() -> None:
    pool = PinnedBuffers(FakeDevice())
    memory, event = pool.take(100), FakeEvent(0)
    pool.give_back(memory, event)
    other = pool.take(100)
    assert other.data_ptr() != memory.data_ptr(), "the device still copies from it"
    event.passed = True
    assert pool.take(100).data_ptr() == memory.data_ptr()


def test_an_alias_that_the_allocator_does_not_know() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        tensor = torch.zeros(4, 6).to(dtype)
        alias = unrecorded_alias(tensor[1:3])
        is_known = dtype in (torch.float32, torch.bfloat16)  # to NCCL; the others travel as bytes
        assert (
            alias.dtype is (dtype if is_known else torch.uint8) and alias.data_ptr() == tensor[1:].data_ptr()
        )
        assert alias.nbytes == 12 * dtype.itemsize
        assert alias.untyped_storage()._cdata != tensor.untyped_storage()._cdata
        del tensor
        alias.fill_(0)  # the memory is still there


class Socket:
    """Gloo's part of a staged transport: notes what is handed to it, delivers zeros."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def wait(self, limit: object) -> None:
        self.started.append("waited")


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> tuple[StagedTransport, FakeDevice, Socket]:
    device, socket = FakeDevice(), Socket()
    transport = StagedTransport(
        layer=device,
        rank=0,
        size=2,
        device=torch.device("cpu"),
        limit_seconds=10,
        message_group=None,
        groups=OwnedGroups(owns_default_group=False),
        watch=Reporter(),
    )
    transport.prepare(channels=["a"])

    def start_send(tensor: torch.Tensor, peer: int, channel: str) -> Socket:
        socket.started.append(f"send {tensor.view(torch.float32)[0].item():g}")
        return socket

    def start_receive(tensor: torch.Tensor, peer: int, channel: str) -> Socket:
        socket.started.append("receive")
        tensor.zero_()
        return socket

    monkeypatch.setattr(transport, "_start_send", start_send)
    monkeypatch.setattr(transport, "_start_receive", start_receive)
    return transport, device, socket


def test_staged_sends_leave_when_they_are_copied_or_before_a_wait(
    staged: tuple[StagedTransport, FakeDevice, Socket],
) -> None:
    transport, device, socket = staged
    with OnDevice(device, allowed_reads=10):
        first = transport.isend(torch.full((4,), 1.0) + 0, 1, "a")
        second = transport.isend(torch.full((4,), 2.0) + 0, 1, "a")
        assert socket.started == [], "the host does not wait for the copies"
        receive = transport.irecv(torch.empty(4), 1, "a")
        receive.wait()
        assert socket.started == ["receive", "send 1", "send 2", "waited"], (
            "everything leaves before this rank waits"
        )
        second.wait()
        first.wait()
    assert not device.races


def test_staged_sends_keep_their_order(staged: tuple[StagedTransport, FakeDevice, Socket]) -> None:
    transport, device, socket = staged
    with OnDevice(device, allowed_reads=10):
        works = [transport.isend(torch.full((4,), float(number)) + 0, 1, "a") for number in range(3)]
        transport._unsent[1]._copied.passed = True  # type: ignore[attr-defined]
        transport.after_compute()
        assert socket.started == [], "the second one waits for the first"
        transport._unsent[0]._copied.passed = True  # type: ignore[attr-defined]
        transport.after_compute()
        assert socket.started == ["send 0", "send 1"]
        for work in works:
            work.wait()
    assert socket.started[2] == "send 2" and not device.races
    addresses = {memory.data_ptr() for memory, _ in transport.pinned._free}
    again = transport.isend(torch.ones(4), 1, "a")
    again.wait()
    assert {memory.data_ptr() for memory, _ in transport.pinned._free} == addresses, (
        "pinned memory is used again"
    )
