"""A device that works behind the host, played on the CPU: it finds races and host waits in code that was
written for CUDA.

In: CPU tensors that stand for device memory. Out: `FakeDevice`, which is the runtime's `DeviceLayer`, and a
list of what was wrong. Numbers are computed at once, as the host comes along; what is checked is whether a
device that starts each queue's work as late, and different queues' work in as strange an order, as events
allow would have computed the same.

Terms. An *operation* reads and writes storages on one stream. Operation a is *before* b when a's stream is
b's and a was queued first, or b's stream had waited for an event behind a. Two operations that touch one
storage, one of them writing, must be one before the other. Torch's allocator gives memory of the compute
stream out again in that stream's order: when a storage dies, whatever other streams do with it must be before
what is queued on the compute stream next. Everything else is a *race*.

`FakeLinks` play NCCL's part, with a stream of its own in each group, as torch has it: over gloo between
processes, by mail within one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rannc_backend.runtime.comm.streams import byte_view

aten = torch.ops.aten

# Reading a value on the host, or a shape that depends on values.
HOST_READS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
}


@dataclass
class FakeEvent:
    """A place in a stream: the operations before it (bits), and what is to be finished on the host once
    somebody waits.
    """

    seen: int
    finish: tuple[Callable[[], None], ...] = ()
    passed: bool = False
    device: FakeDevice | None = None

    def query(self) -> bool:
        if self.passed and self.device is not None:
            self.device.host_seen |= self.seen
        return self.passed

    def synchronize(self) -> None:
        for finish in self.finish:
            finish()
        self.passed = True
        self.query()


@dataclass
class FakeStream:
    """A queue. ``seen``: bits of the operations that are before whatever is queued next."""

    name: str
    device: FakeDevice
    seen: int = 0
    finish: list[Callable[[], None]] = field(default_factory=list)

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.seen, tuple(self.finish), device=self.device)

    def wait_event(self, event: FakeEvent) -> None:
        for finish in event.finish:
            finish()
        self.seen |= event.seen


@dataclass
class _Uses:
    """Last write of a storage and the reads since: (bit, text)."""

    write: tuple[int, str] | None = None
    reads: list[tuple[int, str]] = field(default_factory=list)
    is_watched: bool = False  # we hear when it dies


class FakeDevice:
    """Streams, memory, and a record of who touches what when."""

    def __init__(self) -> None:
        self.main = FakeStream("compute", self)
        self.host_seen = 0  # operations that the host knows to be done
        self.races: list[str] = []
        self.host_waits: list[str] = []
        self.log: list[str] = []
        self.posted: list[FakePosted] = []
        self._current = [self.main]
        self._streams: list[FakeStream] = []
        self._num_operations = 0
        self._uses: dict[int, _Uses] = {}

    def compute(self) -> FakeStream:
        return self._current[-1]

    def new_stream(self) -> FakeStream:
        self._streams.append(FakeStream(f"stream {len(self._streams)}", self))
        return self._streams[-1]

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def operation(
        self,
        name: str,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        stream: Any = None,
    ) -> None:
        """Queue an operation on ``stream`` (None: the current one)."""
        stream = self.compute() if stream is None else stream
        self._num_operations += 1
        bit, text = 1 << self._num_operations, f"{name} on {stream.name}"
        self.log.append(text)
        for tensor in (*reads, *writes):
            uses = self._uses_of(tensor)
            if uses.write is not None:
                self._expect_before(uses.write, stream, text)
        for tensor in writes:
            for read in self._uses_of(tensor).reads:
                self._expect_before(read, stream, text)
        for tensor in reads:
            self._uses_of(tensor).reads.append((bit, text))
        for tensor in writes:
            uses = self._uses_of(tensor)
            uses.write, uses.reads = (bit, text), []
        stream.seen |= bit

    def num_under_way(self) -> int:
        """Messages that nobody has waited for yet: what synchronises the device would wait for them."""
        self.posted = [posted for posted in self.posted if not posted.event.passed]
        return len(self.posted)

    def _expect_before(self, earlier: tuple[int, str], stream: FakeStream, text: str) -> None:
        if not (stream.seen | self.host_seen) & earlier[0]:
            self.races.append(f"{text} does not wait for {earlier[1]}")

    def _uses_of(self, tensor: torch.Tensor) -> _Uses:
        storage = tensor.untyped_storage()
        # By address: an alias made through DLPack has a storage object of its own over the same memory.
        key = storage.data_ptr()
        uses = self._uses.setdefault(key, _Uses())
        # An alias lives as long as one call; it is not the memory's owner.
        if not uses.is_watched and storage.resizable():
            uses.is_watched = True
            weakref.finalize(storage, self._died, key, uses)
        return uses

    def _died(self, key: int, uses: _Uses) -> None:
        if self._uses.get(key) is uses:
            del self._uses[key]
        for use in [*uses.reads, *([uses.write] if uses.write else [])]:
            if not (self.main.seen | self.host_seen) & use[0]:
                self.races.append(f"memory was dropped while {use[1]} may still use it")


def _storages(values: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    ]


class OnDevice(TorchDispatchMode):
    """Within it, every ATen operator is an operation of the device's current stream; reading a value on the
    host is noted.

    Args:
        allowed_reads: how many values may be read (the seed of a step is drawn on the host's own generator).
    """

    def __init__(self, device: FakeDevice, *, allowed_reads: int = 0) -> None:
        super().__init__()
        self._device = device
        self._allowed_reads = allowed_reads
        self._methods: dict[str, Any] = {}

    def __enter__(self) -> OnDevice:
        # These read values without an ATen operator on a CPU.
        for name in ("tolist", "numpy", "cpu"):
            self._methods[name] = getattr(torch.Tensor, name)
            setattr(torch.Tensor, name, self._noting(name, self._methods[name]))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, method in self._methods.items():
            setattr(torch.Tensor, name, method)

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._note_read(name)
            return method(tensor, *args, **kwargs)

        return read

    def _note_read(self, name: str) -> None:
        if self._allowed_reads == 0:
            self._device.host_waits.append(name)
        self._allowed_reads = max(0, self._allowed_reads - 1)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in HOST_READS:
            self._note_read(str(func))
        result = func(*args, **kwargs)
        given = _storages((args, kwargs))
        keys = {tensor.untyped_storage().data_ptr() for tensor in given}
        made = [tensor for tensor in _storages(result) if tensor.untyped_storage().data_ptr() not in keys]
        mutated = _mutated(func, args, kwargs)
        factory = func.overloadpacket in (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty)
        # Says that it writes, to come after those that do; it starts no kernel.
        announces = func._schema.name == "rannc::gradients_made_"
        if (made or mutated) and not factory and not announces:
            self._device.operation(str(func), reads=given, writes=[*made, *mutated])
        return result


def _mutated(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return _storages(found)


@dataclass
class FakePosted:
    """A message on a group's internal stream; the socket's part is finished when somebody waits."""

    device: FakeDevice
    event: FakeEvent
    failure: BaseException | None = None  # completed, as torch has it

    def wait(self) -> None:
        stream = self.device.compute()
        if stream is not self.device.main:  # another stream waits; it is finished when the host comes to it
            stream.seen |= self.event.seen
            stream.finish.extend(self.event.finish)
            return
        stream.wait_event(self.event)
        self.event.passed = True

    def is_completed(self) -> bool:
        return self.event.passed or self.failure is not None

    def get_future_result(self) -> torch.futures.Future[int]:
        """As NCCL's watchdog and `is_completed` set it: 2, a communication error."""
        result: torch.futures.Future[int] = torch.futures.Future()
        if self.is_completed():
            result.set_result(0 if self.failure is None else 2)
        return result

    def exception(self) -> BaseException | None:
        return self.failure


class FakeLinks:
    """Stands for `transport_nccl.NcclCalls`; a `FakeDevice` judges the order. Subclasses move the bytes, each
    with a function to finish.
    """

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._inner: dict[int, FakeStream] = {}
        self.created: list[tuple[int, ...]] = []

    def new_group(self, ranks: tuple[int, ...], limit_seconds: float) -> Any:
        self.created.append(ranks)
        group = self.make_group(ranks)
        if group is not None:
            self._inner[id(group)] = self._device.new_stream()
        return group

    def exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
        group: Any,
    ) -> FakePosted:
        inner = self._inner[id(group)]
        inner.wait_event(self._device.compute().record_event())
        finish = []
        with without_modes():
            for tensor, peer in sends:
                self._device.operation(f"send to {peer}", reads=[tensor], stream=inner)
                finish.append(self.start_send(tensor, peer, group))
            for tensor, peer in receives:
                self._device.operation(f"receive from {peer}", writes=[tensor], stream=inner)
                finish.append(self.start_receive(tensor, peer, group))
        self._device.posted.append(
            FakePosted(self._device, FakeEvent(inner.seen, tuple(finish), device=self._device))
        )
        return self._device.posted[-1]

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> FakePosted:
        return self._queue("all-reduce", tensor, group, None)

    def reduce(self, tensor: torch.Tensor, root: int, group: Any) -> FakePosted:
        return self._queue("reduce", tensor, group, None)

    def broadcast(self, tensor: torch.Tensor, root: int, group: Any) -> FakePosted:
        return self._queue("broadcast", tensor, group, root)

    def _queue(self, name: str, tensor: torch.Tensor, group: Any, root: int | None) -> FakePosted:
        inner = self._inner[id(group)]
        inner.wait_event(self._device.compute().record_event())
        self._device.operation(name, reads=[tensor], writes=[tensor], stream=inner)
        with without_modes():
            finish = self.start_collective(tensor, group, root)
        return FakePosted(self._device, FakeEvent(inner.seen, (finish,), device=self._device))

    def make_group(self, ranks: tuple[int, ...]) -> Any:
        raise NotImplementedError

    def start_send(self, tensor: torch.Tensor, peer: int, group: Any) -> Callable[[], None]:
        raise NotImplementedError

    def start_receive(self, tensor: torch.Tensor, peer: int, group: Any) -> Callable[[], None]:
        raise NotImplementedError

    def start_collective(self, tensor: torch.Tensor, group: Any, root: int | None) -> Callable[[], None]:
        raise NotImplementedError


class GlooLinks(FakeLinks):
    """Between processes."""

    def make_group(self, ranks: tuple[int, ...]) -> Any:
        group = dist.new_group(list(ranks), backend="gloo")
        return group if dist.get_rank() in ranks else None

    def start_send(self, tensor: torch.Tensor, peer: int, group: Any) -> Callable[[], None]:
        return _once(dist.isend(tensor, peer, group=group), tensor)

    def start_receive(self, tensor: torch.Tensor, peer: int, group: Any) -> Callable[[], None]:
        return _once(dist.irecv(tensor, peer, group=group), tensor)

    def start_collective(self, tensor: torch.Tensor, group: Any, root: int | None) -> Callable[[], None]:
        if root is None:
            return _once(dist.all_reduce(tensor, group=group, async_op=True), tensor)
        return _once(dist.broadcast(tensor, root, group=group, async_op=True), tensor)


@dataclass(frozen=True)
class MailGroup:
    """A group within one process: its ranks and its number."""

    ranks: tuple[int, ...]
    number: int


class MailLinks(FakeLinks):
    """Between transports of one process, which share a ``mail`` box. An all-reduce finds the same on every
    rank and multiplies.
    """

    def __init__(self, device: FakeDevice, rank: int, local_messages: dict[Any, list[torch.Tensor]]) -> None:
        super().__init__(device)
        self._rank = rank
        self._local_messages = local_messages
        self.exchanges: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def make_group(self, ranks: tuple[int, ...]) -> MailGroup | None:
        return MailGroup(ranks, len(self.created)) if self._rank in ranks else None

    def exchange(self, sends: Any, receives: Any, group: MailGroup) -> FakePosted:
        self.exchanges.append(
            (group.number, tuple(peer for _, peer in sends), tuple(peer for _, peer in receives))
        )
        return super().exchange(sends, receives, group)

    def start_send(self, tensor: torch.Tensor, peer: int, group: MailGroup) -> Callable[[], None]:
        self._local_messages.setdefault((group.number, self._rank, peer), []).append(tensor.clone())
        return lambda: None

    def start_receive(self, tensor: torch.Tensor, peer: int, group: MailGroup) -> Callable[[], None]:
        held = [tensor]

        def finish() -> None:
            waiting = self._local_messages.get((group.number, peer, self._rank))
            if held and waiting:
                with without_modes():
                    byte_view(held.pop()).copy_(byte_view(waiting.pop(0)))  # as NCCL, which moves bytes

        return finish

    def start_collective(
        self, tensor: torch.Tensor, group: MailGroup, root: int | None
    ) -> Callable[[], None]:
        if root is None:
            tensor.mul_(len(group.ranks))
        return lambda: None


def _once(work: Any, tensor: torch.Tensor) -> Callable[[], None]:
    """Wait for a work of gloo, the first time. Not for the device's sake, so the tensor's memory is not kept
    by it afterwards.
    """
    held = [(work, tensor)]

    def finish() -> None:
        while held:
            held.pop()[0].wait()

    return finish


@contextmanager
def without_modes() -> Iterator[None]:
    """What the sockets do is no operation of the device."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


class Reporter:
    """The monitor, as a `DeviceWatch` sees it: notes what it is told."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, ...]] = []
        self.errors: list[BaseException] = []

    def begin_wait(self, ranks: tuple[int, ...]) -> None:
        self.waits.append(ranks)

    def end_wait(self) -> None:
        self.waits.append(())

    def current_phase(self) -> str:
        return "step 3, stage 1, micro-batch 2"

    def report_error(self, error: BaseException) -> None:
        self.errors.append(error)
