"""Several ranks in one process, each with a played device whose queues really wait: what synchronises a
device may hang, and that is seen.

In: what each rank does, as a function. Out: nothing, or `Hang`, with what each rank waited for. Each rank is
a thread. Its device runs as `tests/fake_device.py` has it: an operation starts when everything before it has
ended; a message ends when both of its ends have started, and a communicator (a group of ranks) runs its
operations one after the other. `PlayedDevice.synchronize` waits on the host for all that is queued. When
every rank waits and no device can go on, nothing ever will: that is noticed at once, without a clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.fake_device import FakeDevice, FakeEvent, FakeLinks, FakePosted, MailGroup


class Hang(Exception):
    """All ranks wait for each other."""


@dataclass(eq=False)
class _Operation:
    """One end of a message, or one rank's part of a collective."""

    rank: int
    bit: int
    before: int  # bits of the operations of this device that must have ended
    key: tuple[Any, ...]  # both ends have the same
    num_ends: int
    text: str
    payload: torch.Tensor | None
    target: torch.Tensor | None


class Fabric:
    """What lies between the ranks."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.devices = [PlayedDevice(self, rank) for rank in range(size)]
        self.waiting: dict[
            int, tuple[str, Callable[[], bool]]
        ] = {}  # by rank: in what the host waits, and until when
        self.num_running = size
        self.hung: str | None = None
        self.error: BaseException | None = None
        self.num_at_barrier = 0
        self.num_barriers = 0
        self.started: dict[tuple[Any, ...], list[_Operation]] = {}
        self.counts: dict[tuple[Any, ...], int] = {}
        self.seen: dict[int, list[torch.Tensor]] = {}  # for tests: what ranks were given

    def add(self, operation: _Operation) -> None:
        with self.changed:
            self.devices[operation.rank].queued.append(operation)
            self._go_on()

    def number(self, rank: int, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """The key with a number: the first of a rank meets the first of the other."""
        count = self.counts.get((rank, key), 0)
        self.counts[rank, key] = count + 1
        return (*key, count)

    def _go_on(self) -> None:
        moved = True
        while moved:
            moved = False
            for device in self.devices:
                for operation in [o for o in device.queued if not o.before & device.unfinished]:
                    device.queued.remove(operation)
                    self.started.setdefault(operation.key, []).append(operation)
                    moved |= self._end(operation.key, operation.num_ends)
        self.changed.notify_all()

    def _end(self, key: tuple[Any, ...], num_ends: int) -> bool:
        ends = self.started[key]
        if len(ends) < num_ends:
            return False
        del self.started[key]
        payload = next((end.payload for end in ends if end.payload is not None), None)
        for end in ends:
            self.devices[end.rank].unfinished &= ~end.bit
            if end.target is not None and payload is not None:
                end.target.copy_(payload)
        return True

    def wait(self, rank: int, what: str, until: Callable[[], bool]) -> None:
        """The host of a rank waits."""
        with self.changed:
            self.waiting[rank] = what, until
            while not until() and self.hung is None:
                self._look()
                if self.hung is None and not self.changed.wait(60):
                    raise TimeoutError(f"rank {rank}: {what}")
            del self.waiting[rank]
            if self.hung is not None:
                raise Hang(self.hung)

    def _look(self) -> None:
        if len(self.waiting) == self.num_running and not any(until() for _, until in self.waiting.values()):
            parts = [
                f"rank {rank} in {what}, for {self.devices[rank].left()}"
                for rank, (what, _) in sorted(self.waiting.items())
            ]
            self.hung = "; ".join(parts)
            self.changed.notify_all()

    def barrier(self, rank: int) -> None:
        """Ranks agree on something."""
        with self.changed:
            number = self.num_barriers
            self.num_at_barrier += 1
            if self.num_at_barrier == len(self.devices):
                self.num_at_barrier, self.num_barriers = 0, number + 1
                self.changed.notify_all()
        self.wait(rank, "an agreement", lambda: self.num_barriers > number)

    def run(self, body: Callable[[int], None]) -> None:
        """Run ``body(rank)`` on every rank; raises what one of them raises."""

        def main(rank: int) -> None:
            try:
                body(rank)
            except BaseException as error:  # noqa: BLE001
                with self.changed:
                    if self.error is None or isinstance(self.error, Hang):
                        self.error = error
                    self.hung = self.hung or f"rank {rank}: {error!r}"
            with self.changed:
                self.num_running -= 1
                if self.waiting and self.hung is None:
                    self._look()
                self.changed.notify_all()

        threads = [
            threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(len(self.devices))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error


class PlayedDevice(FakeDevice):
    """See the module docstring."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        super().__init__()
        self.fabric = fabric
        self.rank = rank
        self.queued: list[_Operation] = []
        self.unfinished = 0

    def message(
        self,
        name: str,
        key: tuple[Any, ...],
        num_ends: int,
        stream: Any,
        *,
        payload: Any = None,
        target: Any = None,
    ) -> None:
        """Queue one end of a message."""
        before = stream.seen
        self._num_operations += 1
        bit = 1 << self._num_operations
        stream.seen |= bit
        numbered = self.fabric.number(self.rank, key)
        with self.fabric.changed:
            self.unfinished |= bit
        self.fabric.add(_Operation(self.rank, bit, before, numbered, num_ends, name, payload, target))

    def synchronize(self, what: str) -> None:
        """Wait on the host for everything that is queued."""
        self.fabric.wait(self.rank, what, lambda: not self.unfinished)

    def left(self) -> str:
        """What has not ended."""
        texts = [o.text for o in self.queued] + [
            o.text for ends in self.fabric.started.values() for o in ends if o.rank == self.rank
        ]
        return ", ".join(texts) or "nothing"


@dataclass(eq=False)
class _Posted(FakePosted):
    def wait(self) -> None:
        self.device.compute().wait_event(self.event)


class PlayedLinks(FakeLinks):
    """Stands for `transport_nccl.NcclCalls`."""

    def __init__(self, device: PlayedDevice) -> None:
        super().__init__(device)
        self.device = device

    def make_group(self, ranks: tuple[int, ...]) -> MailGroup | None:
        return MailGroup(ranks, len(self.created)) if self.device.rank in ranks else None

    def exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
        group: Any,
    ) -> FakePosted:
        inner, device = self._inner[id(group)], self.device
        inner.wait_event(device.compute().record_event())
        before, seen = inner.seen, inner.seen
        for tensor, peer in sends:
            inner.seen = before  # a batch starts as one
            device.message(
                f"send to {peer}", (group.number, device.rank, peer), 2, inner, payload=tensor.clone()
            )
            seen |= inner.seen
        for tensor, peer in receives:
            inner.seen = before
            device.message(f"receive from {peer}", (group.number, peer, device.rank), 2, inner, target=tensor)
            seen |= inner.seen
        inner.seen = seen
        return _Posted(device, FakeEvent(seen, device=device))

    def _queue(self, name: str, tensor: torch.Tensor, group: Any, root: int | None) -> FakePosted:
        stream, device = self.device.compute(), self.device
        # One communicator runs its collectives one after the other, whatever the stream.
        stream.seen |= self._inner[id(group)].seen
        device.message(name, (group.number, name), len(group.ranks), stream)
        self._inner[id(group)].seen |= stream.seen
        return _Posted(device, stream.record_event())
