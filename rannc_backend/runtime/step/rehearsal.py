"""The first run of a stage, before messages: what synchronises a device must not meet a receive that waits
for another rank.

In: a step that is about to begin, with what is new in it for some rank: a compiled part (loss, all, infer), a
number of rows. Out: the step then finds kernels tuned, modules loaded, memory reserved and connections made.
Terms: a *rehearsal* runs this rank's programs from begin to end with nobody at the other end: sends go
nowhere, receives bring example rows (the rank's own for inputs, zeros for values of other stages). All that a
step does on the device is in it: the stage's forwards and backwards, as many in flight as ever, packing and
unpacking, gradient buckets, receive buffers. It leaves nothing behind: buffers of the model are not updated,
gradients are not published or reduced, no generator of random numbers is advanced.

Whether a step needs one is known to all ranks without a word, from the rows that they have agreed on; they
wait for each other under the limit for compilation. Only devices that run behind the host need it: on others
a receive that is posted holds nothing up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from rannc_backend.ir.action import INPUT, OUTPUT, Channel, GraphUse, Program
from rannc_backend.ir.exchange import Edge
from rannc_backend.kernels.message_layout import MessageLayout
from rannc_backend.runtime.comm.gloo import DoneWork, Memory
from rannc_backend.runtime.gradients.buckets import PendingGradients
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.step.executor import Executor
from rannc_backend.runtime.step.step_state import StepState
from rannc_backend.runtime.world import BucketSums, QueuedMessage, Ranks, Route, Transport, World

_MAX_REMEMBERED = 1024  # uses and rows of steps that need nothing

PhaseProgram = tuple[str, Program, Sequence[str]]
"""A phase, its program, and what each action does in words."""


class NobodyThere(Memory):
    """A transport that sends nothing and receives nothing; memory is the real one's."""

    def __init__(self, inner: Transport, device: torch.device) -> None:
        super().__init__(device)
        self._inner = inner

    def limit_waits(self, seconds: float) -> None:
        return

    def prepare(
        self,
        *,
        channels: Sequence[str] = (),
        groups: Sequence[Ranks] = (),
        routes: Sequence[Route] = (),
        num_communicators: int = 1,
    ) -> None:
        return

    def isend(self, tensor: torch.Tensor, peer: int, channel: str) -> DoneWork:
        return DoneWork()

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> DoneWork:
        return DoneWork()

    def allreduce(
        self, tensor: torch.Tensor, ranks: Ranks, takers: Ranks = (), communicator: int = 0
    ) -> DoneWork:
        return DoneWork()

    def broadcast(self, tensor: torch.Tensor, root: int, ranks: Ranks) -> DoneWork:
        return DoneWork()

    def share(self, groups: Sequence[Ranks]) -> BucketSums | None:
        return None

    def acquire(self, num_bytes: int) -> torch.Tensor:
        return self._inner.acquire(num_bytes)

    def acquire_message(self, layout: MessageLayout) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self._inner.acquire_message(layout)

    def after_compute(self) -> None:
        self._inner.after_compute()

    def begin_step(self, queued: Sequence[QueuedMessage] = ()) -> None:
        return

    def recreate(self) -> None:
        return

    def close(self) -> None:
        return


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """What the graphs of one deployment have rehearsed. Alike on all ranks."""

    world: World
    edges: Mapping[tuple[int, int], Edge]
    num_runs: int = 0
    # (use, stage, rows of a micro-batch on one rank, lengths)
    _sizes: set[tuple[GraphUse, int, int, tuple[int, ...]]] = field(default_factory=set)
    _pairs: set[tuple[str, int, int]] = field(default_factory=set)  # (channel, sender, receiver)
    _known: set[tuple[GraphUse, RowTable, tuple[int, ...]]] = field(default_factory=set)

    @classmethod
    def of(cls, world: World, edges: Mapping[tuple[int, int], Edge]) -> Rehearsal | None:
        """None where no step needs one: the device keeps pace with the host, or there is nobody to wait
        for.
        """
        return cls(world=world, edges=edges) if world.runs_behind and world.size > 1 else None

    def is_needed(self, use: GraphUse, rows: RowTable, lengths: tuple[int, ...]) -> bool:
        """Whether a step has something new for some rank."""
        if (use, rows, lengths) in self._known:
            return False
        sizes = self._sizes_of(use, rows, lengths)
        return not (sizes <= self._sizes and self._pairs_of(rows) <= self._pairs)

    def run(
        self,
        use: GraphUse,
        executor: Executor,
        programs: Iterable[PhaseProgram],
        state: StepState,
        pending: Callable[[], PendingGradients],
        partial_gradients: Callable[[], dict[str, torch.Tensor]],
    ) -> None:
        """Run the programs of a step, one after the other, with nobody there.

        Args:
            use: of the executor.
            state: the step as it begins; it is not changed.
            pending: makes gradient buckets for a step.
            partial_gradients: makes the gradients from which backward starts.
        """
        if self._sizes_of(use, state.rows, state.shapes.lengths) <= self._sizes:
            return  # connections alone are new
        self.num_runs += 1
        played = StepState(
            number=state.number,
            rows=state.rows,
            shapes=state.shapes,
            inputs=state.inputs,
            scalars=dict(state.scalars),
            training=state.training,
            apply_buffer_updates=False,
        )
        alone = replace(self.world, transport=NobodyThere(self.world.transport, self.world.device))
        player = replace(executor, world=alone, examples=self._examples(state))
        with same_random_numbers(self.world.device):
            for phase, program, phases in programs:
                if phase in ("train", "backward"):
                    played.pending = pending()
                    played.pending.start_reduce = _reduce_nothing
                    played.partial_gradients, played.grad_outputs = (
                        partial_gradients(),
                        self._grad_outputs(state),
                    )
                player.run(program, [f"first run, {text}" for text in phases], played)
        del played
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)  # what fails, fails here

    def done(self, use: GraphUse, rows: RowTable, lengths: tuple[int, ...]) -> None:
        """All ranks have rehearsed: make the connections that the step needs, and remember. Collective."""
        pairs = self._pairs_of(rows)
        self.world.transport.connect(sorted(pairs - self._pairs))
        self._pairs |= pairs
        self._sizes |= self._sizes_of(use, rows, lengths)
        if len(self._known) >= _MAX_REMEMBERED:
            self._known.clear()
        self._known.add((use, rows, lengths))

    def _sizes_of(
        self, use: GraphUse, rows: RowTable, lengths: tuple[int, ...]
    ) -> set[tuple[GraphUse, int, int, tuple[int, ...]]]:
        sizes = set()
        for num_rows in {stop - start for start, stop in rows.micro_batches}:
            for stage, ranks in enumerate(rows.stage_ranks):
                least, rest = divmod(num_rows, len(ranks))
                sizes |= {(use, stage, least, lengths), (use, stage, least + (rest > 0), lengths)}
        return sizes

    def _pairs_of(self, rows: RowTable) -> set[tuple[str, int, int]]:
        pairs = set()
        for (source, destination), edge in self.edges.items():
            for sender, receiver in rows.pairs(source, destination):
                pairs.add((str(Channel(source, destination, "F")), sender, receiver))
                if edge.gradient:
                    pairs.add((str(Channel(destination, source, "B")), receiver, sender))
        return pairs

    def _examples(self, state: StepState) -> dict[str, torch.Tensor]:
        """A row of each input, of this rank's own: what a model expects of its inputs holds for them."""
        examples = {}
        for (source, _), edge in state.shapes.edges.items():
            for value in edge.forward if source == INPUT else ():
                rows = value.to_rows(state.inputs[value.name])
                if rows.shape[0]:
                    examples[value.name] = rows[:1]
        return examples

    def _grad_outputs(self, state: StepState) -> dict[str, torch.Tensor]:
        start, stop = state.rows.owned_rows(OUTPUT, self.world.rank)
        values = [
            value
            for (_, destination), edge in state.shapes.edges.items()
            if destination == OUTPUT
            for value in edge.gradient
        ]
        zeros = {
            v.name: torch.zeros(stop - start, v.elements_per_row, dtype=v.dtype, device=self.world.device)
            for v in values
        }
        return {value.name: value.from_rows(zeros[value.name]) for value in values}


def _reduce_nothing(buffer: torch.Tensor, ranks: Ranks, takers: Ranks = ()) -> DoneWork:
    return DoneWork()


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """What is drawn from torch's generators within it, by operators of the user too, leaves no trace."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
