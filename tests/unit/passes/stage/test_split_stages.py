"""Stage graphs compute what the row-wise graph computes; what cannot be cut is refused."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from rannc_backend.passes.batch.batch_split import RowsOutput
from rannc_backend.passes.batch.layouts import PartialSum, RowIndex, Rows
from rannc_backend.passes.pipeline import PassError, count_ops, with_facts
from rannc_backend.passes.stage.split_stages import (
    BoundaryOutput,
    SplitStages,
    StageGraph,
    StageInput,
    free_nodes,
    rows_dimension,
)
from tests.choice import mostly
from tests.unit.stage_models import Rowwise, capture
from tests.unit.stage_networks import NETWORKS

aten = torch.ops.aten


def _rowwise(name: str) -> Rowwise:
    torch.manual_seed(0)
    network = NETWORKS[name]
    return capture(network.build().double(), network.function, network.inputs(6), ["rows", "partial"])


def _run(rowwise: Rowwise, stages: tuple[StageGraph, ...], inputs: list[Tensor]) -> dict[str, Tensor]:
    values = {**rowwise.parameters, **rowwise.buffers, **dict(zip(rowwise.batch_names, inputs, strict=True))}
    with torch.no_grad():
        for stage in stages:
            results = stage.graph_module(*(values[source.name] for source in stage.inputs))
            values.update({target.name: value for target, value in zip(stage.outputs, results, strict=True)})
    return values


@pytest.mark.parametrize("num_stages", mostly([1, 2, 3, 5], [2, 5]))
@pytest.mark.parametrize("name", ["perceptron", "convolutions", "skip", "tied", "awkward"])
def test_stages_compute_what_the_whole_computes(name: str, num_stages: int) -> None:
    rowwise = _rowwise(name)
    stages = rowwise.cut(num_stages)
    assert [stage.index for stage in stages] == list(range(num_stages))
    for rows in (1, 4):
        inputs = NETWORKS[name].inputs(rows)
        whole = _run(rowwise, rowwise.cut(1), inputs)
        parts = _run(rowwise, stages, inputs)
        for output in rowwise.outputs:
            assert torch.equal(whole[output.name], parts[output.name]), output.name


def test_one_stage_is_the_graph_itself() -> None:
    rowwise = _rowwise("convolutions")
    (stage,) = rowwise.cut(1)
    assert count_ops(stage.graph_module) == count_ops(rowwise.graph_module)
    assert {source.kind for source in stage.inputs} == {"batch", "parameter", "buffer"}
    assert [output.kind for output in stage.outputs] == ["buffer"] * 6 + ["rows", "partial"]
    assert {output.fqn for output in stage.outputs if output.kind == "buffer"} == set(
        rowwise.buffer_fqns.values()
    )


def test_names_and_kinds_of_what_crosses() -> None:
    rowwise = _rowwise("skip")
    names = rowwise.staged_names
    places = [i + 1 for i, name in enumerate(names) if name.startswith("tanh")]
    stages = rowwise.cut(5, places)
    first = names[places[0] - 1]
    assert stages[0].outputs == (BoundaryOutput(name=first),)
    readers = [stage.index for stage in stages if StageInput(name=first, kind="boundary") in stage.inputs]
    assert readers == [1, 4], "a skip goes straight to its reader"
    readers = [stage.index for stage in stages if any(source.kind == "batch" for source in stage.inputs)]
    assert readers == [0, 4]


def test_equal_layers_give_equal_text() -> None:
    rowwise = _rowwise("perceptron")
    places = [i + 1 for i, name in enumerate(rowwise.staged_names) if name.startswith("tanh")]
    stages = rowwise.cut(4, places[:-1])
    assert stages[1].graph_module.code == stages[2].graph_module.code
    assert stages[1].graph_module.code.strip() == (
        "def forward(self, p0, p1, p2):\n"
        "    n0 = torch.ops.aten.t.default(p0);  p0 = None\n"
        "    n1 = torch.ops.aten.addmm.default(p1, p2, n0);  p1 = p2 = n0 = None\n"
        "    n2 = torch.ops.aten.tanh.default(n1);  n1 = None\n"
        "    return (n2,)"
    )


def test_the_order_of_inputs_does_not_depend_on_the_run() -> None:
    rowwise = _rowwise("awkward")
    texts = {
        tuple(s.graph_module.code + repr(s.inputs) + repr(s.outputs) for s in rowwise.cut(3))
        for _ in range(3)
    }
    assert len(texts) == 1


def test_constant_nodes_are_cloned_and_tied_parameters_are_read_twice() -> None:
    rowwise = _rowwise("tied")
    stages = rowwise.cut(4)
    (tied,) = (n for n, p in rowwise.parameters.items() if p.shape == (11, 6))
    readers = [stage.index for stage in stages if StageInput(name=tied, kind="parameter") in stage.inputs]
    assert readers[0] == 0 and len(readers) >= 2


def test_values_made_of_the_batch_size_alone_are_not_sent() -> None:
    rowwise = _rowwise("awkward")
    (ones,) = (n for n in rowwise.graph_module.graph.nodes if n.target is aten.ones.default)
    assert ones in free_nodes(rowwise.graph_module, rowwise.layouts, rowwise.kinds)
    names = rowwise.staged_names
    stages = rowwise.cut(2, [next(i for i, name in enumerate(names) if name.startswith("mul"))])
    assert all(not output.name.startswith(("ones", "cumsum")) for stage in stages for output in stage.outputs)
    assert all(source.kind != "batch" for source in stages[1].inputs), (
        "the batch size comes from what arrives"
    )


def test_sizes_are_rebuilt_from_a_merged_batch() -> None:
    rowwise = _rowwise("awkward")
    names = rowwise.staged_names
    place = names.index(next(name for name in names if name.startswith("addmm"))) + 1
    stages = rowwise.cut(2, [place])
    carrier = next(
        n for n in stages[1].graph_module.graph.find_nodes(op="placeholder") if n.meta["val"].dim() == 2
    )
    assert rows_dimension(carrier.meta["val"], rowwise.rows_symbol) == (0, 4)
    assert any(n.target is operator.floordiv for n in stages[1].graph_module.graph.nodes)


def test_tuples_stay_with_their_elements() -> None:
    rowwise = _rowwise("convolutions")
    names = rowwise.staged_names
    place = next(i for i, name in enumerate(names) if "batch_norm" in name) + 1
    stages = rowwise.cut(2, [place])
    for stage in stages:
        for node in stage.graph_module.graph.nodes:
            if node.target is operator.getitem:
                assert node.args[0].op == "call_function"
    # The counter of batches is returned by the stage of its BatchNorm, the first of them in stage 0.
    fqns = [{o.fqn for o in stage.outputs if o.kind == "buffer"} for stage in stages]
    assert {"1.running_mean", "1.running_var"} <= fqns[0]
    assert {"4.running_mean", "4.running_var"} <= fqns[1]


def test_a_value_of_a_later_stage_is_refused() -> None:
    rowwise = _rowwise("perceptron")
    names = rowwise.staged_names
    stage_of = {name: 1 if index == 2 else 0 for index, name in enumerate(names)}
    with pytest.raises(PassError, match=f"stage 0 uses {names[2]}, which is made in the later stage 1"):
        rowwise.split(stage_of, 2)


def test_a_node_without_a_stage_is_refused() -> None:
    rowwise = _rowwise("perceptron")
    names = rowwise.staged_names
    with pytest.raises(PassError, match="no stage is given"):
        rowwise.split({name: 0 for name in names if name != names[3]}, 1)
    with pytest.raises(PassError, match="stage 2 is not one of 2 stages"):
        rowwise.split({name: 2 for name in names}, 2)


def test_only_row_wise_values_may_cross() -> None:
    rowwise = _rowwise("perceptron")
    names = rowwise.staged_names
    rowwise = replace(rowwise, layouts={**rowwise.layouts, names[0]: PartialSum()})
    with pytest.raises(PassError, match="only row-wise values can"):
        rowwise.cut(2, [1])


def test_numbers_of_rows_are_made_where_they_are_used() -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            numbers = torch.arange(x.shape[0])
            value = torch.sin(x)
            return value[numbers, 0] + torch.cos(value)[numbers, 1]

    x = torch.randn(6, 3)
    rowwise = capture(Picks(), lambda m, v: (m(v),), [x], ["rows"])
    arange = next(name for name in rowwise.staged_names if name.startswith("arange"))
    rowwise = replace(rowwise, layouts={**rowwise.layouts, arange: RowIndex(0)})
    stages = rowwise.cut(2)
    assert all(output.name != arange for stage in stages for output in stage.outputs)
    assert all(any("arange" in str(n.target) for n in s.graph_module.graph.nodes) for s in stages)
    values = _run(rowwise, stages, [x])
    assert torch.equal(values[rowwise.outputs[0].name], Picks()(x))


def test_an_input_may_be_an_output() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.sin.default, (x,))
    graph.output((x, y))
    base = _rowwise("perceptron")
    source = base.graph_module.graph.find_nodes(op="placeholder")
    x.meta["val"] = next(n.meta["val"] for n in source if n.name in base.batch_names)
    with base.fake_mode:
        y.meta["val"] = aten.sin.default(x.meta["val"])
    outputs = tuple(replace(base.outputs[0], name=node.name) for node in (x, y))
    rowwise = replace(
        base,
        graph_module=with_facts(fx.GraphModule({}, graph), SplitStages.requires),
        outputs=outputs,
        layouts={"x": Rows(0), y.name: Rows(0)},
        kinds={"x": "batch"},
        parameters={},
        batch_names=("x",),
    )
    (stage,) = rowwise.split({y.name: 0}, 1)
    assert [output.name for output in stage.outputs] == ["x", y.name]
    value = torch.randn(2, 6)
    assert torch.equal(stage.graph_module(value)[0], value)


def test_kinds_are_checked() -> None:
    with pytest.raises(AssertionError, match="unknown kind 'weight'"):
        StageInput(name="x", kind="weight")
    with pytest.raises(TypeError, match="unexpected keyword argument 'fqn'"):
        RowsOutput(name="x", fqn="y")  # type: ignore[call-arg]
