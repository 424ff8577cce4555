"""Stages whose backwards have two parts: the same numbers, and what is kept between the parts is what is counted."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.choice import mostly
from tests.unit.rannc_backend.stages.test_compiled_stage import EXACT, SIZES, captured, compare, one_stage
from tests.unit.stage_networks import NETWORKS


@pytest.mark.parametrize(
    ("name", "num_stages", "budget"),
    mostly(
        itertools.product(NETWORKS, (1, 3), (1.0, 0.0)),
        list(itertools.product(["perceptron", "convolutions", "skip", "tied", "awkward"], (3,), (1.0,)))
        + [("gpt2", 3, 0.0), ("convolutions", 1, 0.0)],
    ),
)
def test_backwards_in_two_parts_change_no_number(name: str, num_stages: int, budget: float) -> None:
    _, _, rowwise = captured(name)
    cut = rowwise.cut(num_stages)
    stages = rowwise.compile(cut, activation_budget=budget, splits_backward=True)
    assert compare(name, stages, SIZES) <= EXACT
    # And as one backward, as a measurement runs them.
    for stage in stages:
        stage.splits_backward = False
    assert compare(name, stages, SIZES) <= EXACT


def test_what_is_kept_between_the_parts_is_what_is_counted() -> None:
    _, _, rowwise = captured("gpt2")
    (stage,) = rowwise.compile(rowwise.cut(3)[1:2], splits_backward=True)
    values = {**rowwise.parameters, **rowwise.buffers}
    rows = 5
    args = []
    nodes = {node.name: node for node in rowwise.graph_module.graph.nodes}
    for item in stage.inputs:
        if item.name in values:
            args.append(values[item.name])
        else:
            value = nodes[item.name].meta["val"]
            sizes = [
                int(size.node.expr.subs(rowwise.rows_symbol, rows))
                if isinstance(size, torch.SymInt)
                else size
                for size in value.shape
            ]
            args.append(torch.rand(sizes, dtype=torch.float64))
    outputs, saved = stage.forward(args)
    grads = [torch.rand_like(outputs[position]) for position in stage.grad_outputs]
    kept = stage.backward_inputs(list(saved), grads)[1]
    storages = {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes()
        for value in kept
        if isinstance(value, Tensor)
        and value.untyped_storage()._cdata not in {v.untyped_storage()._cdata for v in values.values()}
    }
    assert sum(storages.values()) == stage.kept_bytes.subs(rowwise.rows_symbol, rows) > 0
    sink = stage.scratch_gradients()
    stage.backward_weights(kept, sink)
    assert set(sink.order) == set(stage.grad_parameters) and kept == []


def test_a_stage_that_was_not_compiled_for_two_parts_has_one() -> None:
    stage, _, outputs, saved = one_stage("perceptron")
    grads = [torch.ones_like(outputs[position]) for position in stage.grad_outputs]
    with pytest.raises(AssertionError, match="in one part"):
        stage.backward_inputs(saved, grads)
