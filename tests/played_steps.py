"""Steps of a pipeline on played ranks: the real executor, programs, transport and rehearsal, with stages that
add one.

In: a plan (stages, replicas, micro-batches, schedule, skipping edges) and where stages wait for their device.
Out: nothing, or `Hang`, or a wrong number. See `tests/played_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from rannc_backend.ir.action import INPUT, OUTPUT, describe
from rannc_backend.ir.exchange import Edge, Value
from rannc_backend.kernels.record_table import CopyReport
from rannc_backend.runtime.comm.device_watch import DeviceWatch
from rannc_backend.runtime.comm.gloo import OwnedGroups
from rannc_backend.runtime.comm.nccl import NcclTransport
from rannc_backend.runtime.gradients.bucket_layout import plan_buckets
from rannc_backend.runtime.gradients.buckets import PendingGradients
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.step.executor import Executor
from rannc_backend.runtime.step.queue_order import queued_messages, routes_of
from rannc_backend.runtime.step.rehearsal import Rehearsal
from rannc_backend.runtime.step.scalars import ScalarGraphs
from rannc_backend.runtime.step.send_buffers import SendBuffers
from rannc_backend.runtime.step.step_state import StepShapes, StepState
from rannc_backend.runtime.world import World
from rannc_backend.schedule.description import Lanes
from rannc_backend.schedule.lowering import lower_lanes
from rannc_backend.schedule.message_order import message_order
from rannc_backend.schedule.orders import ScheduleName, order_on, schedule_named
from rannc_backend.stages.cut_stages import edge_specs
from tests.played_ranks import Fabric, PlayedDevice, PlayedLinks

STATE = "state"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A pipeline and how it is run.

    ``synchronises``: "first runs" of each stage for a number of rows, "always", or "never". ``rehearses``,
    ``in_order``: what is tested; without that order each channel has a link of its own, as messages are queued when
    they are posted. ``outputs``: rows go back to the users. ``replicas`` by lane. ``stages_per_lane``: also for a
    schedule of one stage each, whose stages' sequences are merged. ``skips``: edges beside those between neighbours.
    """

    replicas: tuple[int, ...]
    num_micro_batches: int
    schedule: ScheduleName = "1f1b"
    synchronises: str = "always"
    rehearses: bool = True
    in_order: bool = True
    outputs: bool = False
    idle: int = 0
    skips: tuple[tuple[int, int], ...] = ()
    rows: tuple[int, ...] = ()
    stages_per_lane: int = 1

    @property
    def num_stages(self) -> int:
        """Of all lanes together."""
        return len(self.replicas) * self.stages_per_lane

    @property
    def lanes(self) -> Lanes:
        """The stages of each lane: as the schedule has them, or else in turn."""
        schedule = schedule_named(self.schedule)
        if schedule.stages_per_lane > 1:
            return schedule.lanes(self.num_stages)
        num_lanes = len(self.replicas)
        return tuple(tuple(range(lane, self.num_stages, num_lanes)) for lane in range(num_lanes))

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks in order of stages."""
        starts = [sum(self.replicas[:lane]) for lane in range(len(self.replicas))]
        ranks = [
            tuple(range(start, start + number)) for start, number in zip(starts, self.replicas, strict=True)
        ]
        lane_of = {stage: lane for lane, stages in enumerate(self.lanes) for stage in stages}
        return tuple(ranks[lane_of[stage]] for stage in range(self.num_stages))

    @property
    def size(self) -> int:
        """Ranks, those without a stage included."""
        return sum(self.replicas) + self.idle

    @property
    def steps(self) -> tuple[int, ...]:
        """Rows of each step: two of one size, then two of another."""
        least = max(self.replicas) * self.num_micro_batches
        return self.rows or (least, least, 2 * least, 2 * least)

    def edges(self) -> dict[tuple[int, int], Edge]:
        """Inputs to the first stage, labels to the last, everything between, gradients of all but labels."""
        last = self.num_stages - 1
        pairs = [(stage, stage + 1) for stage in range(last)] + list(self.skips)
        edges = {}
        for source, destination in pairs:
            values = (_value(f"x{source}"),)
            edges[source, destination] = Edge(src=source, dst=destination, forward=values, gradient=values)
        edges[INPUT, 0] = Edge(src=INPUT, dst=0, forward=(_value("input"),), gradient=(_value("input"),))
        if last:
            edges[INPUT, last] = Edge(src=INPUT, dst=last, forward=(_value("labels"),), gradient=())
        if self.outputs:
            values = (_value(f"x{last}"),)
            edges[last, OUTPUT] = Edge(src=last, dst=OUTPUT, forward=values, gradient=values)
        return edges


def _value(name: str) -> Value:
    return Value(name=name, dtype=torch.float32, shape=(-1, 2), dim=0)


class AddingStage:
    """Adds one to what the stage before it made; the gradient of everything is one more than what comes
    back.
    """

    def __init__(self, setting: Setting, index: int, device: PlayedDevice) -> None:
        edges = setting.edges()
        self.inputs, self.outputs = [], []
        for (source, destination), edge in edges.items():
            if destination == index:
                kind = "batch" if source == INPUT else "boundary"
                self.inputs += [SimpleNamespace(name=value.name, kind=kind) for value in edge.forward]
        kind = "rows" if index == setting.num_stages - 1 else "boundary"
        self.outputs.append(SimpleNamespace(name=f"x{index}", kind=kind))
        has_readers = any(source == index for source, _ in edges)
        self.grad_outputs = (0,) if has_readers and kind == "boundary" else ()
        self.grad_inputs = tuple(i for i, slot in enumerate(self.inputs) if slot.name != "labels")
        self.grad_parameters = self.stored_outputs = self.stored_gradients = ()
        self.gradient_copies = CopyReport()
        self._index, self._device, self._setting = index, device, setting
        self._ran: set[tuple[str, int]] = set()
        self.seen: list[torch.Tensor] = []

    def forward(self, args: Sequence[torch.Tensor], destinations: Any) -> tuple[list[torch.Tensor], Any]:
        self._wait("forward", args[0].shape[0])
        x = args[
            [slot.name for slot in self.inputs].index("input" if self._index == 0 else f"x{self._index - 1}")
        ]
        self.seen.append(x.clone())
        return [x + 1], (x.shape[0],)

    def backward(
        self, saved: Any, grads: Sequence[torch.Tensor | None], sink: Any, destinations: Any
    ) -> list[torch.Tensor]:
        self._wait("backward", saved[0])
        given = grads[0] if grads and grads[0] is not None else torch.zeros(saved[0], 2)
        return [given + 1 for _ in self.grad_inputs]

    def backward_inputs(
        self, saved: Any, grads: Sequence[torch.Tensor | None], destinations: Any
    ) -> tuple[list[torch.Tensor], Any]:
        return self.backward(saved, grads, None, destinations), (saved[0],)

    def backward_weights(self, kept: Any, sink: Any) -> None:
        self._wait("second part of the backward", kept[0])

    def infer(self, args: Sequence[torch.Tensor], destinations: Any) -> list[torch.Tensor]:
        return self.forward(args, destinations)[0]

    def _wait(self, direction: str, rows: int) -> None:
        key = (direction, rows)
        how = self._setting.synchronises
        if how == "always" or (how == "first runs" and key not in self._ran):
            self._device.synchronize(f"{direction} of stage {self._index}")
        self._ran.add(key)


class AsPosted(NcclTransport):
    """As it was: a link for each channel, and operations are queued when they are posted."""

    def prepare(self, *, channels: Any = (), groups: Any = (), routes: Any = ()) -> None:
        for route in routes:
            super().prepare(routes=[route])
            self._own = getattr(self, "_own", {})
            if len(route.ranks) > 1:  # between stages of one rank nothing is sent
                self._own[route.channel] = self._new_link(f"messages of {route.channel}", route.ranks)

    def connect(self, pairs: Any) -> None:
        return

    def begin_step(self, ordered: Any = ()) -> None:
        super().begin_step()

    def _link_of(self, tensor: torch.Tensor, peer: int, channel: str) -> Any:
        super()._link_of(tensor, peer, channel)
        return self._own[channel]


@dataclass
class _Quiet:
    """Control and monitor."""

    errors: list[BaseException] = field(default_factory=list)

    def phase(self, text: str) -> None:
        return

    def current_phase(self) -> str:
        return "step"

    def begin_wait(self, ranks: tuple[int, ...]) -> None:
        return

    def end_wait(self) -> None:
        return

    def report_error(self, error: BaseException) -> None:
        self.errors.append(error)


def transport_of(device: PlayedDevice, size: int, *, in_order: bool = True) -> NcclTransport:
    """The transport of one rank."""
    watch = DeviceWatch(_Quiet(), rank=device.rank, limit_seconds=60, start_thread=False)
    kind = NcclTransport if in_order else AsPosted
    groups, calls = OwnedGroups(owns_default_group=False), PlayedLinks(device)
    return kind(
        rank=device.rank, size=size, limit_seconds=60, layer=device, calls=calls, watch=watch, groups=groups
    )  # type: ignore[arg-type]


def shapes_of(edges: Mapping[tuple[int, int], Edge]) -> StepShapes:
    """Of a step in which nothing but messages depends on lengths."""
    nothing = ScalarGraphs(
        prologue=None,
        prologue_inputs=(),
        prologue_sums=(),
        epilogue=None,
        epilogue_inputs=(),
        partials=(),
        linear=True,
    )
    return StepShapes(lengths=(), edges=edges, outputs=(), scalars=nothing)


def run_steps(setting: Setting, phases: Sequence[str] = ("train",)) -> None:
    """Run the steps; each is these phases.

    Raises:
        Hang: the ranks wait for each other.
        AssertionError: a stage was given something else than its inputs (looked at where every action waits
        for its device).
    """
    fabric = Fabric(setting.size)
    # A rank that holds all rows sends and never receives them: as posted, ranks that do both would need a
    # link for each other rank.
    local = _local_rows if setting.in_order else lambda rows, size: (rows, *[0] * (size - 1))
    fabric.run(lambda rank: PlayedRank(setting, fabric, rank).run(phases, local))


def _local_rows(rows: int, size: int) -> tuple[int, ...]:
    least, rest = divmod(rows, size)
    return tuple(least + (rank < rest) for rank in range(size))


class PlayedRank:
    """One rank of a setting."""

    def __init__(self, setting: Setting, fabric: Fabric, rank: int) -> None:
        self.setting, self.fabric, self.rank = setting, fabric, rank
        self.device = fabric.devices[rank]
        self.edges = setting.edges()
        self.transport = transport_of(self.device, setting.size, in_order=setting.in_order)
        quiet: Any = _Quiet()
        self.world = World(
            rank=rank,
            size=setting.size,
            local_rank=rank,
            hosts=("here",) * setting.size,
            device=torch.device("cpu"),
            launcher="played",
            control=quiet,
            transport=self.transport,
            monitor=quiet,
            runs_behind=True,
        )
        self.stages = {
            stage: AddingStage(setting, stage, self.device)
            for stage, ranks in enumerate(setting.stage_ranks)
            if rank in ranks
        }
        self.executor = Executor(
            world=self.world,
            stages=self.stages,  # type: ignore[arg-type]
            edges=self.edges,
            tensors={},
            buffers={},
            parameter_names={},
            updated_buffers=frozenset(),
            limit_seconds=60,
            send_buffers=SendBuffers(torch.device("cpu")),
        )

    def run(self, phases: Sequence[str], local_rows: Any) -> None:
        """All steps; ``local_rows``: how the rows of a batch are divided."""
        setting, fabric = self.setting, self.fabric
        self.transport.prepare(
            channels=[STATE], routes=routes_of(self.edges, setting.stage_ranks, setting.size)
        )
        rehearsal = Rehearsal.of(self.world, self.edges)
        assert rehearsal is not None
        for step, num_rows in enumerate(setting.steps):
            rows = RowTable(
                local_rows=local_rows(num_rows, setting.size),
                num_micro_batches=setting.num_micro_batches,
                stage_ranks=setting.stage_ranks,
            )
            state = self.state(step, rows)
            kind = phases[0]
            programs = {phase: self.program(phase) for phase in phases}
            fabric.barrier(self.rank)
            if rehearsal.is_needed(kind, rows, ()):
                if setting.rehearses:
                    runs = [(phase, *programs[phase][:2]) for phase in phases]
                    rehearsal.run(kind, self.executor, runs, state, self.pending, dict)
                fabric.barrier(self.rank)
                rehearsal.done(kind, rows, ())
            for stage in self.stages.values():
                stage.seen.clear()
            for phase in phases:
                program, texts, ordered = programs[phase]
                state.pending = self.pending()
                self.executor.run(program, texts, state, queued_messages(ordered, self.rank, rows))
            self.device.synchronize("the end of the step")
            self._judge(state)

    def pending(self) -> PendingGradients:
        """Gradients of no parameters."""
        layout = plan_buckets([], {}, (self.rank,), 2.0**20)
        return PendingGradients(layout=layout, memory=[], start_reduce=lambda buffer, ranks: None)  # type: ignore[arg-type, return-value]

    def state(self, step: int, rows: RowTable) -> StepState:
        """A step that begins; inputs hold the numbers of their rows."""
        start, stop = rows.owned_rows(INPUT, self.rank)
        numbers = torch.arange(start, stop, dtype=torch.float32).view(-1, 1).expand(-1, 2).contiguous()
        grad_outputs = {f"x{self.setting.num_stages - 1}": torch.zeros(stop - start, 2)}
        inputs = {"input": numbers, "labels": numbers.clone()}
        return StepState(
            number=step + 1,
            rows=rows,
            shapes=shapes_of(self.edges),
            inputs=inputs,
            scalars={},
            training=True,
            grad_outputs=grad_outputs,
        )

    def program(self, phase: Any) -> tuple[Any, Any, Any]:
        """A phase's program, what its actions do, and the order of all messages."""
        setting, specs = self.setting, edge_specs(self.edges)
        schedule, lanes, number = (
            schedule_named(setting.schedule),
            setting.lanes,
            setting.num_micro_batches,
        )
        programs = lower_lanes(order_on(schedule, lanes, number), specs, phase, number)
        without_stage = tuple(action for action in programs[0] if action.stage < 0)
        ordered = message_order({**programs, len(programs): without_stage} if setting.idle else programs)
        program = programs[lanes.index(tuple(self.stages))] if self.stages else without_stage
        return program, describe(program), ordered

    def _judge(self, state: StepState) -> None:
        """What came from one rank is there when the stage runs, as all before it has ended."""
        if self.setting.synchronises != "always" or not self.stages or max(self.setting.replicas) > 1:
            return
        for index, stage in self.stages.items():
            self.fabric.seen[index] = _in_sequence(stage.seen)
        self.fabric.barrier(self.rank)
        for index in self.stages:
            for before, seen in (
                zip(self.fabric.seen[index - 1], self.fabric.seen[index], strict=True) if index else ()
            ):
                assert torch.equal(seen, before + 1), "a message came in the place of another"
        self.fabric.barrier(self.rank)


def _in_sequence(seen: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """By their rows: a schedule may have the micro-batches of its stages in any sequence."""
    return sorted(seen, key=lambda rows: float(rows[0, 0]))
