"""What differs between two plans.

In: plans a and b. Out: a `PlanDifference` (empty for equal plans, the same with its sides swapped for (b,
a)), and the rich renderables that show it.

Terms. Move: nodes that stage i of a has and stage j of b, i and j not equal. Nodes are compared by name, so
moves say something only where both plans are of the same graph; of other graphs the modules are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rannc_backend.ir.plan import Plan, StagePlan
from rannc_backend.report.modules import path_tree, stage_modules
from rannc_backend.report.words import (
    change_text,
    count_text,
    formats_text,
    kept_text,
    offload_text,
    printable,
    ranges_text,
    rate_text,
    replicas_text,
    row_gradients_text,
    seconds_text,
    size_text,
    told_text,
    zero_text,
)

_SHOWN_NAMES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that is not the same; `change` is "" where it is no amount. `values`: the amounts in SI
    units, a's and b's.
    """

    what: str
    a: str
    b: str
    change: str = ""
    values: tuple[float | None, float | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Nodes that lie on another stage; None: the other plan does not have them. `modules`: short names of
    what they compute.
    """

    stage_a: int | None
    stage_b: int | None
    num_nodes: int
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDifference:
    """`settings`: of the whole plan; `cluster`: what was assumed; `stages`: of stages with the same index;
    `moves`: of nodes.
    """

    settings: tuple[Change, ...]
    cluster: tuple[Change, ...]
    stages: tuple[Change, ...]
    moves: tuple[Move, ...]
    same_graph: bool

    @property
    def is_empty(self) -> bool:
        return not (self.settings or self.cluster or self.stages or self.moves)

    def summary(self) -> dict[str, Any]:
        """Plain values for programs: amounts as numbers, in seconds and bytes; the rest as text."""

        def plain(changes: Sequence[Change]) -> list[dict[str, Any]]:
            return [
                {"what": item.what, **dict(zip("ab", item.values or (item.a, item.b), strict=True))}
                for item in changes
            ]

        return {
            "equal": self.is_empty,
            "same_graph": self.same_graph,
            "settings": plain(self.settings),
            "cluster": plain(self.cluster),
            "stages": plain(self.stages),
            "moves": [asdict(move) for move in self.moves],
        }


def compare(a: Plan, b: Plan) -> PlanDifference:
    """What differs; the details (costs at other numbers of rows, reasons, alternatives) are only named, where
    nothing else does.
    """
    settings, cluster, stages, moves = (
        tuple(_settings(a, b)),
        tuple(_cluster(a, b)),
        tuple(_stages(a, b)),
        tuple(_moves(a, b)),
    )
    if a != b and not (settings or cluster or stages or moves):
        names = [name for name in type(a).model_fields if getattr(a, name) != getattr(b, name)]
        settings = (
            Change(what="details", a=f"of {', '.join(names)}", b=f"of {', '.join(names)}", change="differ"),
        )
    return PlanDifference(
        settings=settings,
        cluster=cluster,
        stages=stages,
        moves=moves,
        same_graph=a.fingerprint == b.fingerprint,
    )


def difference_report(difference: PlanDifference, name_a: str, name_b: str) -> Iterator[RenderableType]:
    """The sections of `rannc diff`."""
    if difference.is_empty:
        yield Text("the plans are equal")
        return
    yield Text(f"a: {printable(name_a)}\nb: {printable(name_b)}")
    if not difference.same_graph:
        yield Text("The plans are of different graphs (their fingerprints differ).", style="yellow")
    sections = (
        ("Plan", difference.settings),
        ("Cluster assumed", difference.cluster),
        ("Stages", difference.stages),
    )
    for title, changes in sections:
        if changes:
            yield Text()
            yield _change_table(title, changes)
    if difference.moves:
        yield Text()
        yield _move_table(difference.moves)


def _settings(a: Plan, b: Plan) -> Iterator[Change]:
    def texts(what: str, one: str, other: str) -> Iterator[Change]:
        if one != other:
            yield Change(what=what, a=one or "-", b=other or "-")

    def counts(what: str, one: int, other: int) -> Iterator[Change]:
        if one != other:
            yield Change(what=what, a=str(one), b=str(other), values=(one, other))

    yield from texts("graph", a.fingerprint[:16], b.fingerprint[:16])
    yield from texts("model", printable(a.model_name), printable(b.model_name))
    yield from texts("name", printable(a.plan_name), printable(b.plan_name))
    yield from _amount("predicted step", a.predicted_step_seconds, b.predicted_step_seconds, seconds_text)
    yield from counts("ranks", a.world_size, b.world_size)
    yield from counts("rows of a batch", a.batch_rows, b.batch_rows)
    yield from counts("stages", a.num_stages, b.num_stages)
    yield from texts("replicas", replicas_text(a.stage_replicas), replicas_text(b.stage_replicas))
    yield from counts("micro-batches", a.num_micro_batches, b.num_micro_batches)
    yield from texts("schedule", a.schedule, b.schedule)
    yield from texts("stage compiler", a.stage_compiler, b.stage_compiler)
    yield from texts("ZeRO", zero_text(a.zero_stage, a.zero_ngroups), zero_text(b.zero_stage, b.zero_ngroups))
    yield from texts("recompute", told_text(a.told_recompute), told_text(b.told_recompute))
    yield from texts("offload", offload_text(a), offload_text(b))
    yield from texts("in fewer bits", formats_text(a) or "nothing", formats_text(b) or "nothing")
    yield from texts("sparse gradients", row_gradients_text(a) or "none", row_gradients_text(b) or "none")
    yield from _amount("memory limit", a.memory_limit_bytes, b.memory_limit_bytes, size_text)
    yield from _amount("peak memory", a.peak_bytes, b.peak_bytes, size_text)
    yield from counts("blocks", len(a.blocks), len(b.blocks))
    yield from texts("costs", printable(a.costs_from), printable(b.costs_from))
    yield from texts("bound by", printable(a.binding), printable(b.binding))


def _amount(what: str, one: float, other: float, text: Callable[[float], str]) -> Iterator[Change]:
    if one != other:
        yield Change(
            what=what, a=text(one), b=text(other), change=change_text(one, other), values=(one, other)
        )


def _cluster(a: Plan, b: Plan) -> Iterator[Change]:
    for name in type(a.cluster).model_fields:
        one, other = getattr(a.cluster, name), getattr(b.cluster, name)
        if one == other:
            continue
        what = name.replace("_", " ")
        if name.endswith("_seconds"):
            yield from _amount(what.removesuffix(" seconds"), one, other, seconds_text)
        elif name.endswith("bytes_per_second"):
            what = what.replace("bytes per second", "bandwidth")
            yield from _amount(what, one, other, rate_text)
        elif name.endswith("_bytes"):
            yield from _amount(what.removesuffix(" bytes"), one, other, size_text)
        elif isinstance(one, tuple):
            yield from _rates(what, one, other)
        else:
            values = (one, other) if isinstance(one, int) else None
            yield Change(what=what, a=printable(str(one)), b=printable(str(other)), values=values)


def _rates(what: str, one: tuple, other: tuple) -> Iterator[Change]:
    """Peak FLOP/s by dtype and efficiencies by class: pairs of a name and a number."""
    sides = [
        dict(tuple(getattr(entry, name) for name in type(entry).model_fields) for entry in side)
        for side in (one, other)
    ]
    for name in sorted({*sides[0], *sides[1]}):
        before, after = (side.get(name) for side in sides)
        if before != after:
            texts = ["-" if value is None else f"{value:.4g}" for value in (before, after)]
            change = "" if before is None or after is None else change_text(before, after)
            yield Change(
                what=f"{what} {printable(name)}",
                a=texts[0],
                b=texts[1],
                change=change,
                values=(before, after),
            )


def _stages(a: Plan, b: Plan) -> Iterator[Change]:
    for one, other in zip(a.stages, b.stages, strict=False):
        yield from _stage(one, other)


def _stage(one: StagePlan, other: StagePlan) -> Iterator[Change]:
    where = f"stage {one.index}"
    if one.ranks != other.ranks:
        yield Change(what=f"{where} ranks", a=ranges_text(one.ranks), b=ranges_text(other.ranks))
    if one.recompute != other.recompute:
        yield Change(what=f"{where} kept", a=kept_text((one.recompute,)), b=kept_text((other.recompute,)))
    before, after = one.predicted, other.predicted
    first, second = (cost.forward_seconds + cost.backward_seconds for cost in (before, after))
    yield from _amount(f"{where} forward and backward", first, second, seconds_text)
    yield from _amount(f"{where} transfer", before.transfer_seconds, after.transfer_seconds, seconds_text)
    yield from _amount(f"{where} all-reduce", before.allreduce_seconds, after.allreduce_seconds, seconds_text)
    yield from _amount(f"{where} peak memory", before.peak_bytes, after.peak_bytes, size_text)


def _moves(a: Plan, b: Plan) -> Iterator[Move]:
    stages = [{name: stage.index for stage in plan.stages for name in stage.nodes} for plan in (a, b)]
    groups: dict[tuple[int | None, int | None], set[str]] = {}
    for name in {*stages[0], *stages[1]}:
        places = (stages[0].get(name), stages[1].get(name))
        if places[0] != places[1]:
            groups.setdefault(places, set()).add(name)
    # One order of the plans, whichever is a: a difference is the same from both sides.
    plans = sorted((a, b), key=lambda plan: (plan.fingerprint, [block.modules for block in plan.blocks]))
    blocks = [(set(block.nodes), block.modules or ("",)) for plan in plans for block in plan.blocks]
    for places, names in sorted(
        groups.items(), key=lambda item: tuple(-1 if stage is None else stage for stage in item[0])
    ):
        yield Move(
            stage_a=places[0], stage_b=places[1], num_nodes=len(names), modules=_modules_of(names, blocks)
        )


def _modules_of(names: set[str], blocks: list[tuple[set[str], tuple[str, ...]]]) -> tuple[str, ...]:
    """Short names of the modules whose blocks hold the nodes `names`."""
    touched, untouched = 1, 0
    marks = []
    for nodes, modules in blocks:
        inside = [touched] * bool(nodes & names) + [untouched] * bool(nodes - names)
        marks += [(path, mark) for path in modules for mark in inside]
    return tuple(stage_modules(path_tree(marks), touched))


def _change_table(title: str, changes: tuple[Change, ...]) -> Table:
    table = _table(title)
    table.add_column("", no_wrap=True)
    for name in ("a", "b"):
        table.add_column(name, ratio=1, overflow="fold")
    table.add_column("change", justify="right", no_wrap=True)
    for change in changes:
        table.add_row(*(Text(text) for text in (change.what, change.a, change.b, change.change)))
    return table


def _move_table(moves: tuple[Move, ...]) -> Table:
    table = _table("Moved")
    for name in ("stage in a", "stage in b", "operators"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of modules", ratio=1, overflow="fold")
    for move in moves:
        more = len(move.modules) - _SHOWN_NAMES
        names = ", ".join(move.modules[:_SHOWN_NAMES]) + (
            f" and {count_text(more, 'other')}" if more > 0 else ""
        )
        places = ("-" if stage is None else str(stage) for stage in (move.stage_a, move.stage_b))
        table.add_row(*places, str(move.num_nodes), Text(names or "none"))
    return table


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )  # fmt: skip
