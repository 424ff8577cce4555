"""What a rank knows of its job: the frozen `World` and the protocols of its four parts.

In: nothing. Out: the types that the executor is written against; `bootstrap.start` makes the objects behind
them.
Terms: a *rank* is one process of the job. *Control* carries small JSON values and keeps ranks together;
*transport* carries tensors; the *monitor* ends the whole job when one rank fails. A *call* is something that
every rank must enter, in the same order (a control operation, a step, a backward): the monitor counts calls
to see who has left too early. A *channel* is a named kind of message: between one pair of ranks, messages of
one channel arrive in the order sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from rannc_backend.ir.updates import Ranks as Ranks
from rannc_backend.kernels.message_layout import MessageLayout
from rannc_backend.runtime.step_counts import StepCounts


@dataclass(frozen=True, slots=True)
class Route:
    """A channel with the ranks that send and those that receive on it."""

    channel: str
    sources: Ranks
    destinations: Ranks

    @property
    def ranks(self) -> Ranks:
        """All of them, in ascending order."""
        return tuple(sorted({*self.sources, *self.destinations}))

    def peers_of(self, rank: int) -> frozenset[int]:
        """The ranks that ``rank`` sends to or receives from on it."""
        receivers = self.destinations if rank in self.sources else ()
        senders = self.sources if rank in self.destinations else ()
        return frozenset((*receivers, *senders)) - {rank}


class QueuedMessage(NamedTuple):
    """One message of a step that is queued on a device: when (before which action of the rank's program), on
    which channel, with whom.
    """

    place: int
    channel: str
    peer: int
    is_send: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """How `bootstrap.start` brings a job up.

    Attributes:
        start_limit_seconds: longest wait for the other ranks to start.
        limit_seconds: longest wait of a control operation or a message for which no limit is given.
        device: "auto" (CUDA where there is one), "cuda" or "cpu".
        share_devices: how more ranks than devices on a host may run, for tests: "" (not at all), "gloo"
        (tensors travel through
            pinned host memory) or "nccl" (which takes each rank for a host of its own).
        visible_devices: what CUDA is to see, as CUDA_VISIBLE_DEVICES says it; "": as it is.
    """

    start_limit_seconds: float = 1800.0
    limit_seconds: float = 600.0
    device: str = "auto"
    share_devices: str = ""
    visible_devices: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What the monitor last heard of a rank.

    Attributes:
        num_calls: calls entered so far.
        silent_seconds: time since its last sign of life; more than a few seconds means frozen or unreachable.
        left: it has ended in good order.
    """

    rank: int
    host: str
    phase: str
    num_calls: int
    silent_seconds: float
    left: bool


class Control(Protocol):
    """Small JSON values between all ranks. Every rank must call the same operations in the same order.

    Each operation raises CommunicationError, naming the ranks that are missing, after `limit_seconds` (None:
    the limit of StartOptions or of `limit_waits`), and when ranks call different operations. `what` is for
    that message.
    """

    rank: int
    size: int

    def allgather(
        self, value: Any, *, what: str = "values", limit_seconds: float | None = None, kind: str = ""
    ) -> list[Any]:
        """The values of all ranks, by rank. ``kind``: of the operation, where ``what`` may differ between
        ranks.
        """
        ...

    def broadcast(
        self, value: Any, *, root: int = 0, what: str = "value", limit_seconds: float | None = None
    ) -> Any:
        """The value of `root`, on every rank; the others' values are ignored."""
        ...

    def barrier(self, *, what: str = "barrier", limit_seconds: float | None = None) -> None:
        """Returns when every rank has called it."""
        ...

    def limit_waits(self, seconds: float) -> None:
        """From now on the limit of operations for which none is given."""
        ...

    def report_failure(self, error: BaseException) -> None:
        """In place of an operation that this rank does not come to, because ``error`` happened: the others
        raise it in theirs.
        """
        ...


class Work(Protocol):
    """A message or reduction under way. It keeps its tensor alive; it must be waited for exactly once or
    more.
    """

    def wait(self, limit_seconds: float | None = None) -> None:
        """Returns when the tensor may be read (receive, reduction) or overwritten (send).

        With NCCL it only orders the current stream. Raises CommunicationError on a broken connection or after
        `limit_seconds`; the connection is lost then, and the job cannot go on.
        """
        ...


class BucketSums(Protocol):
    """Sums of gradient buckets over groups of ranks that share memory, and of the others as ever."""

    def new_bucket(self, numel: int, dtype: torch.dtype, ranks: Ranks) -> torch.Tensor:
        """Zeros to be summed over a group, in memory that is best for it."""
        ...

    def reduce(self, tensor: torch.Tensor, ranks: Ranks, takers: Ranks = (), communicator: int = 0) -> Work:
        """Start summing a tensor over a group, in place: all ranks of a group start their tensors in the same
        order. ``takers``, ``communicator``: as of `Transport.allreduce`, to which what is not shared goes.
        """
        ...


class Transport(Protocol):
    """Tensors between ranks. Channels and groups are made by `prepare` before their first use."""

    def limit_waits(self, seconds: float) -> None:
        """From now on the limit of waits for which none is given."""
        ...

    def prepare(
        self,
        *,
        channels: Sequence[str] = (),
        groups: Sequence[Ranks] = (),
        routes: Sequence[Route] = (),
        num_communicators: int = 1,
    ) -> None:
        """Make channels and groups of ranks that do not exist yet. All ranks call it with the same arguments.

        ``routes``: channels of which it is known who sends and who receives; ``channels``: the others, best
        used with rank 0. ``num_communicators``: of each of the groups, in which sums go on side by side.
        """
        ...

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        """Start sending a contiguous tensor of any dtype."""
        ...

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> Work:
        """Start receiving into a contiguous tensor of the sender's size in bytes."""
        ...

    def allreduce(
        self, tensor: torch.Tensor, ranks: Ranks, takers: Ranks = (), communicator: int = 0
    ) -> Work:
        """Start summing `tensor` in place over `ranks` (a prepared group that contains this rank). ``takers``: those
        that need the sum, where not all do; the others' tensor is nothing to use then. ``communicator``: which of the
        group's.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, root: int, ranks: tuple[int, ...]) -> Work:
        """Start copying the tensor of `root` (a rank of the job) to all of `ranks`."""
        ...

    def share(self, groups: Sequence[Ranks]) -> BucketSums | None:
        """Prepare groups for sums in memory that their ranks share; None where no ranks do. All ranks call it
        with the same arguments.
        """
        ...

    def acquire(self, num_bytes: int) -> torch.Tensor:
        """Bytes on this rank's device to receive into. They are acquired again when nobody refers to them any
        more.
        """
        ...

    def acquire_message(self, layout: MessageLayout) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As `acquire`, for such a message: what to receive into, and the message's values in it."""
        ...

    def after_compute(self) -> None:
        """Work has been queued on the device, or done: time to look after messages and memory. Does not
        wait.
        """
        ...

    def connect(self, pairs: Iterable[tuple[str, int, int]]) -> None:
        """Set up what messages need, by channel, sender and receiver. All ranks call it with the same pairs,
        while nothing is under way.
        """
        ...

    def begin_step(self, queued: Sequence[QueuedMessage] = ()) -> None:
        """A step begins; its messages are queued in this order, where `reach` comes to their places. None: as
        they are posted.
        """
        ...

    def reach(self, place: int) -> None:
        """The action with this number is next, or none where it is the length of the program."""
        ...

    def check(self) -> None:
        """Raises CommunicationError when a message or reduction has failed of which nobody has heard yet.
        Does not wait.
        """
        ...

    def recreate(self) -> None:
        """Make all channels and groups anew. All ranks call it, while nothing is under way."""
        ...

    def close(self) -> None:
        """Give the connections back. Nothing may be under way."""
        ...


class Monitor(Protocol):
    """Ends the job when one rank fails, and says which one, where and why."""

    def phase(self, text: str) -> None:
        """Note what this rank is doing, as "step 12, stage 1, micro-batch 3, forward". Costs less than a
        microsecond.
        """
        ...

    def current_phase(self) -> str:
        """The text of this rank's last `phase`."""
        ...

    def begin_call(self) -> None:
        """Count one more call that needs all ranks. Raises RankFailedError when a needed rank has already
        left.
        """
        ...

    def report_error(self, error: BaseException) -> None:
        """Tell that `error` ends this rank, and so the job. Does not wait."""
        ...

    def survey(self) -> list[RankState]:
        """What is known of every rank, by rank; takes up to two seconds, for use when a limit has passed."""
        ...

    def close(self) -> None:
        """Tell the others that this rank ends in good order and wait until all do."""
        ...


@dataclass(frozen=True, slots=True)
class OwnRows:
    """A leaf whose gradient is of a rank's rows alone, and where it stands. Not ``is_certain``: it has as many rows as the
    batch, so it may be the rank's own.
    """

    where: str
    is_certain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This rank's place in the job.

    Attributes:
        local_rank: number of this rank on its host.
        hosts: host name by rank.
        device: where this rank computes.
        runs_behind: the device works behind the host, so reading a value of it within a step would make both
        wait.
        counts: what this rank has done so far; ranks compare it whenever they agree on something.
        launcher: "mpi", "torchrun", "user" (torch.distributed was already initialised) or "single".
        device_problem: what is wrong with the settings of this rank's device, in a sentence; "" where nothing
        is. The first step says it.
        rows_given: memory of the rows that compiled models gave the user lately.
        of_own_rows: leaves outside of compiled models whose gradients are of this rank's rows alone.
    """

    rank: int
    size: int
    local_rank: int
    hosts: tuple[str, ...]
    device: torch.device
    launcher: str
    control: Control
    transport: Transport
    monitor: Monitor
    runs_behind: bool = False
    counts: StepCounts = field(default_factory=StepCounts)
    device_problem: str = ""
    rows_given: deque[StorageWeakRef] = field(default_factory=lambda: deque(maxlen=64))
    of_own_rows: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def has_least_to_do(self) -> bool:
        """Whether this is the rank of its host that works for the host where one is enough: not the first,
        which plans, where there is another.
        """
        return self.local_rank == min(1, self.hosts.count(self.hosts[self.rank]) - 1)

    def limit_waits(self, seconds: float) -> None:
        """From now on the longest wait where none is given: what started the job may have known no
        options.
        """
        self.control.limit_waits(seconds)
        self.transport.limit_waits(seconds)
