"""Modules that the user wants computed again: which nodes they are, what stages then keep, and what plans say of it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.errors import NoMarkedTensorError, UnknownModuleError
from rannc_backend.kernels.checkpoint_mark import checkpoint_tensor
from rannc_backend.passes.stage.recompute import mark_segments
from rannc_backend.planner.blocks.block_partitions import partition_blocks, stage_needs_grad
from rannc_backend.planner.blocks.measure import interval_stage
from rannc_backend.planner.blocks.partitions import StagePartition, partitions_of
from rannc_backend.planner.blocks.told_recompute import check_told, told_recompute
from rannc_backend.planner.blocks.traced_stages import TracedStages
from rannc_backend.planner.cost.expressions import evaluate
from rannc_backend.planner.cost.pricing import AnalyticPricer, Interval, priced_budgets
from rannc_backend.planner.cost.segments import Segments
from rannc_backend.planner.plan_blocks import PlanningQuestion
from rannc_backend.planner.plan_model import analyze_model, plan_analysis
from rannc_backend.planner.search.interval_costs import IntervalCosts
from rannc_backend.settings.choices import SEGMENTS_BUDGET
from rannc_backend.settings.options import Config
from tests.choice import mostly
from tests.unit.rannc_backend.planner.blocks.block_peaks import (
    CLUSTER,
    SCALARS_BYTES,
    analysed,
    measured_peak,
)

ROWS = 16


class Part(nn.Module):
    """A product, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.inner(x)))


class Parted(nn.Module):
    """A list of parts, a part in a sequence, and one that is called twice. Marks the results of the list's parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.line = nn.Sequential(Part(), nn.Linear(8, 8))
        self.twice = Part()

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint_tensor(checkpoint_tensor(x + part(x)))
        return self.twice(self.twice(self.line(x))).sum()


@functools.lru_cache
def parted() -> GraphAnalysis:
    return analyze_model(Parted(), (torch.randn(6, 8),), {}, cluster=CLUSTER)


def products(told: str) -> list[int | None]:
    """The segment of each matrix product of the parted model, in order."""
    found = told_recompute(told, parted())
    nodes = [node for node in parted().split.rowwise.graph.nodes if "addmm" in str(node.target)]
    assert len(nodes) == 6
    return [found.segment_of.get(node.name) for node in nodes]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("Part", [0, 1, 2, None, 3, 4]),
        ("parts", [0, 1, None, None, None, None]),  # a list does not run: each of its modules does
        ("ModuleList", [0, 1, None, None, None, None]),
        ("parts.1,line", [None, 0, 1, 1, None, None]),
        ("1", [None, 0, None, 1, None, None]),
        ("twice", [None, None, None, None, 0, 1]),  # each call
        ("inner,Part", [0, 1, 2, None, 3, 4]),  # the outermost counts
        ("inner", [0, 1, 2, None, 3, 4]),
        ("twice.inner,Sequential", [None, None, 0, 0, 1, 2]),
        ("ROOT", [0] * 6),
        ("Parted", [0] * 6),
        ("ROOT,inner", [0] * 6),
        ("", [None] * 6),
    ],
)
def test_names_are_ends_of_paths_or_classes(told: str, expected: list[int | None]) -> None:
    check_told(told, parted())
    assert products(told) == expected


@pytest.mark.parametrize(
    ("told", "name", "near"),
    [
        ("Part,art.0", "art.0", "parts.0"),
        ("Prat", "Prat", "Part"),
        ("arts", "arts", "parts"),
        ("lin", "lin", "line"),
        ("twise", "twise", "twice"),
    ],
)
def test_a_name_that_nothing_has_is_refused_with_the_nearest(told: str, name: str, near: str) -> None:
    with pytest.raises(UnknownModuleError) as raised:
        check_told(told, parted())
    assert raised.value.name == name and raised.value.nearest == near
    assert "option 'recompute_modules'" in str(raised.value) and "ROOT" in str(raised.value)


def partition(told: str, compiler: str, name: str = "") -> tuple[StagePartition, StagePartition]:
    """The whole model as one stage: with what is told, and with all kept."""
    analysis = analysed(name)[0] if name else parted()
    nodes = [node.name for node in analysis.split.rowwise.graph.nodes if node.name in analysis.split.layouts]
    staged = [[name for block in analysed(name)[1].blocks for name in block.nodes] if name else nodes]
    stage = interval_stage(analysis, staged, 0, 1)
    mark_segments(stage.graph_module, told_recompute(told, analysis))
    one, other = partitions_of(
        stage,
        needs_grad=stage_needs_grad(analysis, stage),
        requires_grad_parameters=frozenset(analysis.trained_parameters),
        rows_symbol=analysis.captured.rows_symbol,
        compiler=compiler,
        budgets=(SEGMENTS_BUDGET, 1.0),
    )
    return one, other


def kept_of(found: StagePartition) -> list[str]:
    """Operators of what a stage keeps, but for its inputs."""
    nodes = found.forward.graph.find_nodes(op="output")[0].args[0][found.num_outputs :]
    return [
        str(node.target)
        for node in nodes
        if node.op == "call_function" and isinstance(node.meta["val"], Tensor)
    ]


def test_marked_values_are_kept_and_nothing_else() -> None:
    marks = [node for node in parted().split.rowwise.graph.nodes if node.meta.get("kept")]
    assert [str(node.target) for node in marks] == ["aten.add.Tensor"] * 2
    told = told_recompute("marked", parted())
    assert told.kept == {node.name for node in marks} and set(told.segment_of.values()) == {0}
    assert told.part_of is not None and told.part_of[marks[0].name] == 0 and told.part_of[marks[1].name] == 1
    found, whole = partition("marked", "eager")
    assert kept_of(found) == ["aten.add.Tensor"] * 2
    for graph in (found.forward, whole.forward, whole.backward, found.backward):
        assert graph is not None and not any(
            "checkpoint_tensor" in str(node.target) for node in graph.graph.nodes
        )
    # The mark alone does nothing.
    assert len(kept_of(whole)) > 5 and saved(whole) > 2 * saved(found)


def test_marks_are_part_of_a_graph_and_their_absence_is_an_error() -> None:
    class Plain(Parted):
        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = x + part(x)
            return self.twice(self.twice(self.line(x))).sum()

    plain = analyze_model(Plain(), (torch.randn(6, 8),), {}, cluster=CLUSTER)
    with pytest.raises(NoMarkedTensorError, match="checkpoint_tensor"):
        check_told("marked", plain)
    check_told("marked", parted())
    marked = parted().captured
    assert marked.fingerprint != plain.captured.fingerprint
    assert marked.plan_fingerprint != plain.captured.plan_fingerprint


def saved(found: StagePartition) -> int:
    return int(found.saved_bytes.subs(found.rows_symbol, ROWS))


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_module_keeps_what_enters_and_leaves_it_and_the_rest_keeps_as_ever(compiler: str) -> None:
    sizes = {}
    for told in ("GPT2Block", "GPT2MLP", "ROOT"):
        found, whole = partition(told, compiler, "gpt2")
        sizes[told], sizes[""] = saved(found), saved(whole)
        assert found.backward is not None and whole.backward is not None
        assert len(found.backward.graph.nodes) > len(whole.backward.graph.nodes)
    assert sizes["ROOT"] < sizes["GPT2Block"] < sizes["GPT2MLP"] < sizes[""]
    assert sizes["GPT2Block"] < 0.25 * sizes[""]


CASES = [(told, parts) for told in ("LlamaDecoderLayer", "mlp", "self_attn,mlp", "ROOT") for parts in (1, 3)]


@pytest.mark.parametrize(("told", "parts"), mostly(CASES, [("LlamaDecoderLayer", 3), ("mlp", 1)]))
def test_memory_of_stages_that_compute_modules_again(told: str, parts: int) -> None:
    """Traced stages are exact, also where a stage ends within a module; blocks say no less."""
    analysis, graph = analysed("llama", told)
    recomputed = told_recompute(told, analysis)
    traced = TracedStages(
        analysis=analysis,
        graph=graph,
        compiler="eager",
        segments=Segments(graph, fused=False),
        told=recomputed,
    )
    partitions = partition_blocks(
        analysis,
        graph,
        compiler="eager",
        rows=ROWS,
        budgets=priced_budgets(SEGMENTS_BUDGET, is_told=True),
        recomputed=recomputed,
    )
    costs = IntervalCosts(
        graph=graph,
        cluster=CLUSTER,
        batch_rows=ROWS,
        micro_batches=(1,),
        pricer=AnalyticPricer(device=CLUSTER.device, partitions=partitions),
        optimizer_factor=0.0,
        only_budget=SEGMENTS_BUDGET,
    )
    tables, rows = costs.tables(1), [ROWS]
    for part in range(parts):
        begin, end = len(graph.blocks) * part // parts, len(graph.blocks) * (part + 1) // parts
        (memory,) = traced.memory([Interval(begin=begin, end=end, budget=SEGMENTS_BUDGET, rows=ROWS)])
        assert memory is not None
        kept = float(evaluate([memory.saved_bytes], rows)[0, 0])
        peak = kept + float(evaluate(memory.workspace_bytes, rows).max())
        measured, least = (
            measured_peak(
                "llama", begin, end, ROWS, SEGMENTS_BUDGET, as_trained=True, told=told, lets_go=lets_go
            )
            for lets_go in (False, True)
        )
        assert least - SCALARS_BYTES <= peak <= 1.02 * measured, f"blocks {begin} to {end}"
        prices = costs.prices(begin, end, SEGMENTS_BUDGET, rows)
        whole = costs.prices(begin, end, 1.0, rows)
        assert prices.saved_bytes[0] + prices.workspace_bytes[0] >= least
        assert 0.99 * kept <= prices.saved_bytes[0] <= whole.saved_bytes[0]
        assert whole.backward_seconds[0] < prices.backward_seconds[0]
        assert prices.backward_seconds[0] <= 1.01 * (whole.backward_seconds[0] + whole.forward_seconds[0])
        place = (0, begin, end - begin - 1, list(tables.rows).index(ROWS))
        received = costs.message_bytes(begin, end, rows)[0][0]
        assert tables.flight_bytes[place] == pytest.approx(prices.saved_bytes[0] + received)
        assert tables.backward[place] == pytest.approx(prices.backward_seconds[0])


def test_a_plan_says_what_is_computed_again_and_takes_no_other_budget() -> None:
    question = PlanningQuestion(
        config=Config(recompute_modules="Part", stage_compiler="eager"), cluster=CLUSTER, batch_rows=ROWS
    )
    plan = plan_analysis(parted(), question)
    assert plan.told_recompute == "Part" and {stage.recompute for stage in plan.stages} == {SEGMENTS_BUDGET}
    with pytest.raises(UnknownModuleError):
        question = PlanningQuestion(config=Config(recompute_modules="Prat"), cluster=CLUSTER, batch_rows=ROWS)
        plan_analysis(parted(), question)
