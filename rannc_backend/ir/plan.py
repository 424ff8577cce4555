"""The plan: which nodes, parameters and ranks make up each pipeline stage, and what that should cost.

In: numbers, names (from the planner) or JSON text (a file, maybe edited by hand, or the broadcast of the planning rank).
Out: a frozen `Plan` whose parts agree with each other, and the same text again, byte for byte.

Terms. Block: a run of consecutive graph nodes that is never cut. Stage: the blocks that one group of ranks computes.
Replica: one rank of a stage; replicas share the rows of a micro-batch. Constant nodes (which do not depend on
the rows of the batch) are recomputed where they are used and appear in no block and no stage.

Floats are kept to `SIGNIFICANT_DIGITS` digits from the start, so a plan equals what its own text reads back as.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from rannc_backend.errors import PlanError
from rannc_backend.ir.plan_formats import Formats
from rannc_backend.ir.plan_text import check_shape_of_text, describe_findings, first_repeated
from rannc_backend.settings.choices import check_schedule_name

SCHEMA_VERSION: Literal[2] = 2
SIGNIFICANT_DIGITS = 6
MAX_AMOUNT = 1e30  # of seconds, FLOP/s, bytes: products and quotients of a few of them are finite
_MAX_INTEGER = 2**63 - 1


def _round_float(value: float) -> float:
    """`value` to the digits that the text keeps; -0.0 becomes 0.0, so that equal plans have equal text. Next
    to nothing is 0.
    """
    return 0.0 if abs(value) < 1 / MAX_AMOUNT else float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _sorted_unique(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) != len(names):
        raise ValueError(f"{first_repeated(names)!r} is listed twice")
    return tuple(sorted(names))


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


Amount = Annotated[float, Field(ge=0, le=MAX_AMOUNT, allow_inf_nan=False), AfterValidator(_round_float)]
Count = Annotated[int, Field(ge=0, le=_MAX_INTEGER)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), AfterValidator(_round_float)]
PositiveCount = Annotated[int, Field(ge=1, le=_MAX_INTEGER)]
Name = Annotated[str, Field(min_length=1, max_length=1024)]
Text = Annotated[str, Field(max_length=4096)]
Schedule = Annotated[str, AfterValidator(check_schedule_name)]
DeviceKind = Literal["cpu", "cuda"]
StageCompiler = Literal["eager", "inductor"]
NameSet = Annotated[tuple[Name, ...], AfterValidator(_sorted_unique)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class DtypeRate(_Record):
    """Peak operations per second of one device for one dtype ("float32", "bfloat16", ...)."""

    dtype: Name
    flops_per_second: Amount


class ClassEfficiency(_Record):
    """Share of a device's peak that one class of operators reaches ("matmul", "elementwise", ...)."""

    operator_class: Name
    share: Amount


class ClusterAssumption(_Record):
    """The machines for which the plan was made. Seconds, bytes and bytes per second.

    `allreduce_share`: share of a link's bytes per second that the steps of an all-reduce reach. `core_share`,
    `communicator_bytes`: see `cost.cluster.Device`.
    """

    name: Text
    num_devices: PositiveCount
    devices_per_node: PositiveCount
    device_name: Text
    device_kind: DeviceKind = "cuda"
    core_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), AfterValidator(_round_float)] = 1.0
    communicator_bytes: Count = 0
    host_bytes_per_second: Amount = 0.0  # plans of before it was known say nothing
    device_memory_bytes: Count
    peak_flops: tuple[DtypeRate, ...]
    efficiencies: tuple[ClassEfficiency, ...] = ()
    memory_bytes_per_second: Amount
    launch_seconds: Amount
    intra_node_latency_seconds: Amount
    intra_node_bytes_per_second: Amount
    intra_node_allreduce_share: Amount = 1.0
    inter_node_latency_seconds: Amount
    inter_node_bytes_per_second: Amount
    inter_node_allreduce_share: Amount = 1.0


class BlockPlan(_Record):
    """A run of nodes that is never cut. FLOPs and activation bytes are of the whole batch (`Plan.batch_rows`
    rows).

    `structure`: a hash, equal for blocks that compute the same on parameters of the same shapes. `segment`: number
    of the segment that it belongs to, ascending; a stage may compute a segment at a time again.
    """

    index: Count
    structure: Name
    nodes: Annotated[tuple[Name, ...], Field(min_length=1)]
    modules: tuple[Text, ...]
    parameters: NameSet
    forward_flops: Count
    backward_flops: Count
    moved_bytes: Count
    activation_bytes: Count
    parameter_bytes: Count
    segment: Count = 0


class StageCost(_Record):
    """Predicted cost of one stage on one of its ranks.

    Seconds of forward, backward and transfer are of one micro-batch, and so are `weight_seconds`, of the second part
    of a backward, which computes gradients of parameters. Once per step: `allreduce_seconds`; `new_values_seconds`, from
    the replica that updates a parameter to the others, on which `elsewhere_bytes` of optimizer state are; `offload_seconds`, of
    copies from and to the host, where `host_bytes` lie. `idle_share`: part of the predicted step in which the rank computes
    nothing. Bytes are the most that lies in memory at one time: activations of all micro-batches in flight and what is kept
    between the two parts of backwards, or `update_bytes`, of an optimizer's step, where those are more, messages,
    returned outputs and communicators in `buffer_bytes`, what operators need only while they run in `workspace_bytes`;
    `peak_bytes` is the sum of the six.
    """

    forward_seconds: Amount
    backward_seconds: Amount
    weight_seconds: Amount = 0.0  # plans of before it was known say nothing
    transfer_seconds: Amount
    allreduce_seconds: Amount
    new_values_seconds: Amount = 0.0
    parameter_bytes: Count
    gradient_bytes: Count
    optimizer_bytes: Count
    activation_bytes: Count
    update_bytes: Count = 0
    buffer_bytes: Count
    workspace_bytes: Count
    peak_bytes: Count
    elsewhere_bytes: Count = 0
    idle_share: Share
    offload_seconds: Amount = 0.0
    host_bytes: Count = 0


class RowCost(_Record):
    """What a replica pays for one micro-batch of `rows` of its own rows; `activation_bytes` are kept from
    forward to backward. `weight_seconds`: of the backward, its second part; `kept_bytes`: from the first part to that.
    """

    rows: PositiveCount
    forward_seconds: Amount
    backward_seconds: Amount
    weight_seconds: Amount = 0.0
    kept_bytes: Count = 0
    activation_bytes: Count
    workspace_bytes: Count


class StagePlan(_Record):
    """What one group of ranks owns and computes.

    `nodes`: non-constant node names in topological order. `modules`: paths of the user's modules, in order of
    first use.
    `parameters`: primary dotted names of the parameters read here. `updated_buffers`: dotted names of buffers,
    and of trained parameters that the forward changes, whose new value is computed here.
    `recompute`: share of the activations that may be kept (1.0 keeps what the partitioner likes to keep, 0.0 only
    what the stage receives; 0.001, `SEGMENTS_BUDGET`: what each segment receives). `at_rows`: costs at the numbers
    of rows that other numbers of micro-batches would give a replica, ascending. `received_bytes_per_row`,
    `gradient_bytes_per_row`: the message from the stage before, and the gradients that go back to it.
    `num_buckets`: messages in which the gradients are all-reduced.
    """

    index: Count
    blocks: tuple[Count, ...]
    nodes: tuple[Name, ...]
    modules: tuple[Text, ...]
    parameters: NameSet
    updated_buffers: NameSet
    ranks: Annotated[tuple[Count, ...], Field(min_length=1)]
    recompute: Share
    predicted: StageCost
    at_rows: Annotated[tuple[RowCost, ...], Field(min_length=1)]
    received_bytes_per_row: Amount
    gradient_bytes_per_row: Amount
    num_buckets: PositiveCount

    @property
    def num_replicas(self) -> int:
        return len(self.ranks)


def lanes_of_stages(stages: Iterable[StagePlan]) -> tuple[tuple[int, ...], ...]:
    """Of stages the indexes of those that have the same ranks; lanes in the order of their first stages."""
    lanes: dict[tuple[int, ...], list[int]] = {}
    for stage in stages:
        lanes.setdefault(stage.ranks, []).append(stage.index)
    return tuple(map(tuple, lanes.values()))


def lane_bytes(sizes: Iterable[tuple[int, int]]) -> int:
    """What a rank needs with all of its stages, of the peak and the workspace of each, which is in it: stages run one
    after the other, so that the largest workspace serves all.
    """
    peaks, workspaces = zip(*sizes, strict=True)
    return sum(peaks) - sum(workspaces) + max(workspaces)


class OutputPlan(_Record):
    """A value with rows that the model gives back: the node `name`, of code of `module` ("" where that is not
    known), made in `stage`. `num_bytes` are of all rows of a step.
    """

    name: Name
    module: Text
    stage: Count
    num_bytes: Count


class Alternative(_Record):
    """A plan that was not taken: its shape, its predicted step (None: it does not fit in memory), the measured one and why
    it lost. `place`: among those that were kept, from 2 on; 0: in none. `plan`: its text, where it is to be measured."""

    num_stages: PositiveCount
    stage_replicas: Annotated[tuple[PositiveCount, ...], Field(min_length=1)]
    num_micro_batches: PositiveCount
    schedule: Schedule
    recompute: Annotated[tuple[Share, ...], Field(min_length=1)]
    predicted_step_seconds: Amount | None
    measured_step_seconds: Amount | None = None
    reason: Text
    place: Count = 0
    plan: Annotated[str, Field(max_length=2**24)] = ""

    @model_validator(mode="after")
    def _check_lengths(self) -> Alternative:
        for name, values in (("stage_replicas", self.stage_replicas), ("recompute", self.recompute)):
            if len(values) != self.num_stages:
                raise ValueError(f"{name} has {len(values)} entries for {self.num_stages} stages")
        return self


class WhatIf(_Record):
    """The best plan if one thing were different: `change`. `predicted_step_seconds` is None where none would fit."""

    change: Text
    predicted_step_seconds: Amount | None
    num_stages: PositiveCount
    stage_replicas: Annotated[tuple[PositiveCount, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_lengths(self) -> WhatIf:
        if len(self.stage_replicas) != self.num_stages:
            raise ValueError(
                f"stage_replicas has {len(self.stage_replicas)} entries for {self.num_stages} stages"
            )
        return self


class Plan(_Record):
    """The whole decision for one model on one number of ranks. Immutable; all parts are checked against each
    other.

    `costs_from`: "analytic", or what was measured. `proven_gap`: share of the step by which a plan that was not looked at
    could be faster; 0 for a proven optimum. `proven_for`: schedules that this holds for, if not for all that could be chosen.
    `equal_split_seconds`: predicted step of the best plan with equally many blocks and replicas in every stage; None where
    there is none. `told_recompute`: names of the modules that stages with `SEGMENTS_BUDGET` compute again, "marked" where they
    keep what the model marks, "" where they compute again the segments of the blocks. `outputs_left_out`: why the user does
    not get `outputs`; "" where every rank gets its rows of them."""

    schema_version: Literal[2]
    fingerprint: Name
    model_name: Text
    plan_name: Text = ""
    cluster: ClusterAssumption
    world_size: PositiveCount
    batch_rows: PositiveCount
    num_micro_batches: PositiveCount
    schedule: Schedule
    stage_compiler: StageCompiler = "inductor"  # plans of before the choice was there say nothing
    zero_stage: Annotated[int, Field(ge=0, le=2)] = 0  # likewise
    zero_ngroups: PositiveCount = 1
    told_recompute: Text = ""
    offload: Literal["none", "parameters"] = "none"
    formats: Formats = Formats()
    outputs: tuple[OutputPlan, ...] = ()
    outputs_left_out: Text = ""
    memory_limit_bytes: Count
    blocks: tuple[BlockPlan, ...]
    stages: Annotated[tuple[StagePlan, ...], Field(min_length=1)]
    predicted_step_seconds: Amount
    measured_step_seconds: Amount | None = None  # of its forward and backward, where plans were measured
    equal_split_seconds: Amount | None
    proven_gap: Share
    proven_for: tuple[Schedule, ...] = ()
    costs_from: Text
    binding: Text
    alternatives: tuple[Alternative, ...]
    what_if: tuple[WhatIf, ...]

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def stage_replicas(self) -> tuple[int, ...]:
        return tuple(stage.num_replicas for stage in self.stages)

    def num_updaters(self, num_replicas: int) -> int:
        """How many of the replicas of a stage update a parameter."""
        return min(self.zero_ngroups, num_replicas) if self.zero_stage else num_replicas

    @property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """Stages that the same ranks compute, by their indexes; lanes in the order of their first stages."""
        return lanes_of_stages(self.stages)

    @property
    def num_working_ranks(self) -> int:
        """Ranks that compute a stage."""
        return sum(self.stages[lane[0]].num_replicas for lane in self.lanes)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Indexes of the stages that `rank` computes, ascending; none for a rank without work."""
        return tuple(stage.index for stage in self.stages if rank in stage.ranks)

    @property
    def peak_bytes(self) -> int:
        """Predicted memory of the fullest rank."""
        return max(self.lane_peak_bytes(lane[0]) for lane in self.lanes)

    def lane_peak_bytes(self, stage: int) -> int:
        """Predicted memory of a rank that computes `stage`, with its other stages: see `lane_bytes`."""
        ranks = self.stages[stage].ranks
        own = [other.predicted for other in self.stages if other.ranks == ranks]
        return lane_bytes((cost.peak_bytes, cost.workspace_bytes) for cost in own)

    @property
    def offload_seconds(self) -> float:
        """What copies between hosts and devices take of a step, on the slowest rank."""
        return max(sum(self.stages[x].predicted.offload_seconds for x in lane) for lane in self.lanes)

    def owners(self, parameter: str) -> tuple[int, ...]:
        """All ranks that hold `parameter` (primary dotted name), ascending: those of every stage that reads it."""
        return tuple(
            sorted({rank for stage in self.stages if parameter in stage.parameters for rank in stage.ranks})
        )

    def summary(self) -> str:
        """A few lines for people: one per stage with ranks, modules, seconds and memory, and what binds."""
        name = f"{self.plan_name + ', ' * bool(self.plan_name)}{self.model_name or 'model'}"
        lines = [
            f"plan of {name} for {self.world_size} rank(s): {self.num_stages} stage(s), "
            f"{self.num_micro_batches} micro-batch(es) of {self.batch_rows} rows, {self.schedule}"
            f"{f', ZeRO {self.zero_stage}' if self.zero_stage else ''}{', offload' * (self.offload != 'none')}, step "
            f"{_seconds(self.predicted_step_seconds)} predicted on {self.cluster.name}"
        ]
        for stage in self.stages:
            cost = stage.predicted
            ranks = f"{stage.ranks[0]}-{stage.ranks[-1]}" if len(stage.ranks) > 1 else f"{stage.ranks[0]}"
            modules = " ... ".join(dict.fromkeys((*stage.modules[:1], *stage.modules[-1:])))
            lines.append(
                f"  stage {stage.index}: ranks {ranks}, {len(stage.nodes)} nodes ({modules}), forward "
                f"{_seconds(cost.forward_seconds)}, backward {_seconds(cost.backward_seconds)}, transfers "
                f"{_seconds(cost.transfer_seconds)}, all-reduce {_seconds(cost.allreduce_seconds)}, memory "
                f"{cost.peak_bytes / 2**20:.1f} MB"
            )
        return "\n".join([*lines, f"  bound by {self.binding}"])

    def to_json(self) -> str:
        """The plan as text: the same plan gives the same bytes (ASCII, two spaces, newline at the end)."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read and check a plan. Raises `PlanError` that names the place and what is wrong; runs nothing from
        the text.
        """
        check_shape_of_text(text, SCHEMA_VERSION)
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise PlanError(
                describe_findings(error), cure="correct the file, or let the planner write it again."
            ) from None

    @model_validator(mode="after")
    def _check_parts_agree(self) -> Plan:
        _check_parts_agree(self)
        return self


def _check_parts_agree(plan: Plan) -> None:
    """Blocks, stages, ranks and costs; raises `ValueError`."""
    _check_indexes(plan.blocks, "blocks")
    _check_indexes(plan.stages, "stages")
    _check_blocks(plan)
    _check_stages(plan)
    _check_ranks(plan)
    _check_costs(plan)
    for output in plan.outputs:
        if output.stage >= plan.num_stages:
            raise ValueError(f"output {output.name!r} is made in stage {output.stage}, which is not there")


def _check_indexes(items: tuple[BlockPlan | StagePlan, ...], what: str) -> None:
    for position, item in enumerate(items):
        if item.index != position:
            raise ValueError(
                f"{what}[{position}].index is {item.index}; indexes must count 0, 1, 2, ... in order"
            )


def _check_blocks(plan: Plan) -> None:
    repeated = first_repeated(name for block in plan.blocks for name in block.nodes)
    if repeated is not None:
        raise ValueError(f"node {repeated!r} is in two blocks (or twice in one)")
    listed = [index for stage in plan.stages for index in stage.blocks]
    repeated = first_repeated(listed)
    if repeated is not None:
        raise ValueError(f"block {repeated} is in two stages (or twice in one)")
    if unknown := sorted(set(listed) - set(range(len(plan.blocks)))):
        raise ValueError(f"block {unknown[0]} is in a stage, but there are only {len(plan.blocks)} blocks")
    if missing := sorted(set(range(len(plan.blocks))) - set(listed)):
        raise ValueError(f"block {missing[0]} is in no stage")


def _check_stages(plan: Plan) -> None:
    repeated = first_repeated(name for stage in plan.stages for name in stage.nodes)
    if repeated is not None:
        raise ValueError(f"node {repeated!r} is in two stages (or twice in one)")
    for stage in plan.stages:
        where = f"stages[{stage.index}]"
        for what, listed, of_blocks in (
            ("node", set(stage.nodes), {name for index in stage.blocks for name in plan.blocks[index].nodes}),
            (
                "parameter",
                set(stage.parameters),
                {name for index in stage.blocks for name in plan.blocks[index].parameters},
            ),
        ):
            if extra := sorted(listed - of_blocks):
                raise ValueError(
                    f"{where} lists {what} {extra[0]!r}, which none of its blocks {list(stage.blocks)} has"
                )
            if absent := sorted(of_blocks - listed):
                raise ValueError(
                    f"{where} lacks {what} {absent[0]!r}, which its blocks {list(stage.blocks)} have"
                )


def _check_ranks(plan: Plan) -> None:
    ranks = [rank for lane in plan.lanes for rank in plan.stages[lane[0]].ranks]
    repeated = first_repeated(ranks)
    if repeated is not None:
        raise ValueError(
            f"rank {repeated} is twice in a stage, or in two that do not have the same ranks: ranks compute all "
            "of several stages, or one"
        )
    if outside := sorted(rank for rank in ranks if rank >= plan.world_size):
        raise ValueError(
            f"rank {outside[0]} is in a stage, but the plan is for ranks 0 to {plan.world_size - 1}"
        )


def _check_costs(plan: Plan) -> None:
    for stage in plan.stages:
        cost, where = stage.predicted, f"stages[{stage.index}]"
        parts = (
            cost.parameter_bytes,
            cost.gradient_bytes,
            cost.optimizer_bytes,
            cost.activation_bytes,
            cost.buffer_bytes,
            cost.workspace_bytes,
        )
        if cost.peak_bytes != sum(parts):
            raise ValueError(
                f"{where}.predicted.peak_bytes is {cost.peak_bytes}, and its parts sum up to {sum(parts)}"
            )
        rows = [entry.rows for entry in stage.at_rows]
        if any(later <= earlier for earlier, later in zip(rows, rows[1:], strict=False)):
            raise ValueError(
                f"{where}.at_rows must be ascending in rows, each number once, and has {rows[:8]}"
            )
