"""Operators of a joint graph that change an operand give a new value instead, or the graph is traced again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.stages import joint_graph
from rannc_backend.stages.joint_graph import write_elsewhere
from tests.unit.passes.golden import _joint

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
