"""Operators of a joint graph that change an operand give a new value instead, or the graph is traced again; what
belongs to a segment is computed again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.passes.stage.recompute import Recomputed, mark_segments, segments_of
from rannc_backend.planner.blocks.partitions import StagePartition, partitions_of
from rannc_backend.settings.choices import SEGMENTS_BUDGET
from rannc_backend.stages import joint_graph
from rannc_backend.stages.compiled_stage import CompileCache
from rannc_backend.stages.joint_graph import write_elsewhere
from tests.unit.passes.golden import _joint
from tests.unit.rannc_backend.stages.test_compiled_stage import EXACT, SIZES, captured, compare
from tests.unit.stage_models import Rowwise, StageGraph

X = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64).view(3, 4)


def _filled(x: Tensor) -> tuple[Tensor, ...]:
    value = x * 2
    seen = value.sum()
    filled = value.masked_fill_(x < 0, 0)
    return filled.t() @ x, seen, value.view(12).cos(), value


def _of_a_view(x: Tensor) -> tuple[Tensor, ...]:
    value = x * 2
    view = value.view(12)
    value.mul_(3)
    return (view.sin(),)


def _of_an_input(x: Tensor) -> tuple[Tensor, ...]:
    return (x.add_(1).sin(),)


def _twice(x: Tensor) -> tuple[Tensor, ...]:
    value = x * 2
    value.mul_(3)
    return (value.add_(1),)


def _without_a_form(x: Tensor) -> tuple[Tensor, ...]:
    value, index = x.sum(0), torch.tensor([1])
    return (torch.ops.aten.index_put_.default(value, [index], value.new_ones(1)),)


def _into_another(x: Tensor) -> tuple[Tensor, ...]:
    return (torch.ops.aten.add.out(x, x, out=torch.empty_like(x)),)


@pytest.mark.parametrize(
    ("function", "is_possible"),
    [
        (_filled, True),
        (_without_a_form, True),
        (_of_a_view, False),
        (_of_an_input, False),
        (_twice, False),
        (_into_another, False),
    ],
)
def test_changes_of_what_nobody_has_seen_are_new_values(
    function: Callable[[Tensor], tuple[Tensor, ...]], is_possible: bool
) -> None:
    graph_module = make_fx(function, tracing_mode="fake")(X.clone())
    assert write_elsewhere(graph_module) is is_possible
    for found, expected in zip(graph_module(X.clone()), function(X.clone()), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if is_possible:
        assert not any(joint_graph._mutates(node) for node in graph_module.graph.nodes)


def test_the_operand_and_the_new_value_have_memory_of_their_own() -> None:
    graph_module = make_fx(_filled, tracing_mode="fake")(X.clone())
    write_elsewhere(graph_module)
    memory = {
        node.name: node.meta["val"].untyped_storage()._cdata
        for node in graph_module.graph.nodes
        if node.op == "call_function"
    }
    assert memory["mul"] != memory["masked_fill_"] == memory["view"]


def test_a_stage_is_traced_once_where_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The derivative of clamp fills its gradient in place."""
    traces: list[bool] = []
    trace = joint_graph._JointTracer.trace

    def counted(self: Any, *, functionalized: bool) -> Any:
        traces.append(functionalized)
        return trace(self, functionalized=functionalized)

    monkeypatch.setattr(joint_graph._JointTracer, "trace", counted)
    case = _joint()
    with case.graph_module.graph.inserting_before(case.graph_module.graph.output_node()):
        (result,) = case.graph_module.graph.output_node().args[0]
        least = case.graph_module.graph.call_function(torch.ops.aten.maximum.default, (result, result))
        least.meta["val"] = result.meta["val"]
    case.graph_module.graph.output_node().args = ((least,),)
    case.graph_module.recompile()
    case.graph_pass.run(case.graph_module)
    assert traces == [False]


def test_operators_that_run_one_by_one_do_without_the_compiler_of_kernels() -> None:
    """Its import takes a second of each rank's first call."""
    code = (
        "import sys, torch\n"
        "model = torch.nn.Linear(3, 2)\n"
        "options = {'stage_compiler': 'eager', 'plan_cache': False}\n"
        "torch.compile(model, backend='rannc', options=options)(torch.ones(4, 3)).sum().backward()\n"
        "print([name for name in sys.modules if name in ('torch._inductor.lowering', 'torch._inductor.pattern_matcher')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr[-2000:]


def marked(rowwise: Rowwise, num_stages: int, num_segments: int) -> tuple[StageGraph, ...]:
    """Stages whose values belong to segments of equal length of the whole graph."""
    stages = rowwise.cut(num_stages)
    names = rowwise.staged_names
    for stage in stages:
        segments = {name: num_segments * i // len(names) for i, name in enumerate(names)}
        mark_segments(stage.graph_module, Recomputed(segment_of=segments))
    return stages


@pytest.mark.parametrize(
    ("name", "num_segments"), [("gpt2", 6), ("convolutions", 4), ("skip", 5), ("awkward", 6), ("tied", 3)]
)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_segments_that_are_computed_again_change_no_number(
    name: str, num_segments: int, num_stages: int
) -> None:
    _, _, rowwise = captured(name)
    stages = marked(rowwise, num_stages, num_segments)
    compiled = rowwise.compile(stages, activation_budget=SEGMENTS_BUDGET)
    assert compare(name, compiled, SIZES) <= EXACT


def partitions(
    rowwise: Rowwise, stage: StageGraph, budgets: tuple[float, ...], compiler: str
) -> tuple[StagePartition, ...]:
    trained = frozenset(name for name, value in rowwise.parameters.items() if value.requires_grad)
    return partitions_of(
        stage,
        needs_grad=frozenset(node.name for node in rowwise.graph_module.graph.nodes),
        requires_grad_parameters=trained,
        rows_symbol=rowwise.rows_symbol,
        compiler=compiler,
        budgets=budgets,
    )


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_stage_saves_what_goes_from_segment_to_segment_alone(compiler: str) -> None:
    """Seen on torch 2.11 and 2.13: marks of checkpointed regions, and the partitioner's ways with random numbers."""
    _, _, rowwise = captured("gpt2")
    (stage,) = rowwise.cut(1)
    (plain,) = partitions(rowwise, stage, (1.0,), compiler)
    (unmarked,) = partitions(rowwise, stage, (SEGMENTS_BUDGET,), compiler)
    sizes = []
    for number in (2, 4, 8):
        (stage,) = marked(rowwise, 1, number)
        found, after = partitions(rowwise, stage, (SEGMENTS_BUDGET, 1.0), compiler)
        # What was marked for a split is not for the next one of the same trace.
        assert after.saved_bytes.subs(after.rows_symbol, 8) == plain.saved_bytes.subs(plain.rows_symbol, 8)
        sizes.append(int(found.saved_bytes.subs(found.rows_symbol, 8)))
        assert found.backward is not None and plain.backward is not None
        assert len(found.backward.graph.nodes) > len(plain.backward.graph.nodes)
        assert not any("rng_state" in node.name for node in found.backward.graph.nodes)
    whole = int(plain.saved_bytes.subs(plain.rows_symbol, 8))
    assert sizes == sorted(sizes) and sizes[0] < 0.2 * whole and sizes[-1] < whole
    assert unmarked.saved_bytes.subs(unmarked.rows_symbol, 8) == whole


def test_stages_with_other_segments_are_compiled_apart() -> None:
    _, _, rowwise = captured("perceptron")
    cache = CompileCache()
    for number in (2, 3, 2):
        rowwise.compile(marked(rowwise, 1, number), cache=cache, activation_budget=SEGMENTS_BUDGET)
    assert (cache.num_hits, len(cache.functions)) == (1, 2)
    rowwise.compile(marked(rowwise, 1, 3), cache=cache, activation_budget=1.0)
    rowwise.compile(marked(rowwise, 1, 2), cache=cache, activation_budget=1.0)
    assert cache.num_hits == 2, "where nothing is computed again, segments do not matter"


def test_segments_of_a_stage_count_from_its_first_one() -> None:
    _, _, rowwise = captured("perceptron")
    first, second = marked(rowwise, 2, 4)
    assert set(segments_of(first.graph_module)) == {-1, 0, 1} == set(segments_of(second.graph_module))
