"""Outputs that are safe to send, bytes that are saved, gradients that leave early: the passes behind stage
compilation.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from rannc_backend.passes.pipeline import count_ops
from rannc_backend.passes.stage.partition_backward import boxed, deliver, deliver_early
from rannc_backend.passes.stage.recompute import saved_bytes
from rannc_backend.passes.stage.stage_boundaries import secure_outputs

aten = torch.ops.aten


def _graph(*results: str) -> fx.GraphModule:
    """x [4, 6] -> the named ones of several values."""
    graph = fx.Graph()
    nodes = {"x": graph.placeholder("x")}
    nodes["view"] = graph.call_function(aten.view.default, (nodes["x"], [6, 4]))
    nodes["value"] = graph.call_function(aten.sin.default, (nodes["x"],))
    nodes["seen"] = graph.call_function(aten.view.default, (nodes["value"], [6, 4]))
    nodes["turned"] = graph.call_function(aten.t.default, (nodes["value"],))
    nodes["part"] = graph.call_function(aten.slice.Tensor, (nodes["value"], 0, 0, 2))
    graph.output(tuple(nodes[name] for name in results))
    return fx.GraphModule({}, graph)


def _secured(*results: str) -> tuple[fx.GraphModule, tuple[int, ...]]:
    mode = FakeTensorMode()
    with mode:
        fake = torch.empty(4, 6)
    graph_module = _graph(*results)
    FakeTensorProp(graph_module, mode).propagate_dont_convert_inputs(fake)
    return secure_outputs(graph_module, [fake], mode)


@pytest.mark.parametrize(
    ("results", "num_clones", "num_unsafe_views"),
    [
        (("value",), 0, 0),
        (("seen",), 0, 0),
        (("x",), 1, 0),
        (("view",), 1, 0),
        (("turned",), 1, 0),
        (("part",), 1, 0),
        (("value", "seen"), 0, 2),
        (("value", "turned"), 1, 1),
    ],
)
def test_copies_only_where_they_are_needed(
    results: tuple[str, ...], num_clones: int, num_unsafe_views: int
) -> None:
    secured, positions = _secured(*results)
    ops = count_ops(secured)
    assert (ops[str(aten.clone.default)], ops[str(aten._unsafe_view.default)]) == (
        num_clones,
        num_unsafe_views,
    )
    x = torch.randn(4, 6)
    values = secured(x)
    for position, expected in zip(positions, _graph(*results)(x), strict=True):
        assert torch.equal(values[position], expected)
        assert values[position].is_contiguous()
        assert values[position].untyped_storage().nbytes() == expected.numel() * 4
        assert values[position].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_a_value_listed_twice_is_returned_once() -> None:
    secured, positions = _secured("value", "turned", "value")
    assert positions == (0, 1, 0)
    assert len(secured(torch.randn(4, 6))) == 2


def test_saved_bytes_count_a_storage_once_and_long_lived_inputs_never() -> None:
    mode = FakeTensorMode()
    graph = fx.Graph()
    with mode:
        x, weight = graph.placeholder("x"), graph.placeholder("weight")
        x.meta["val"], weight.meta["val"] = torch.empty(4, 6), torch.empty(6, 6)
        value = graph.call_function(aten.mm.default, (x, weight))
        value.meta["val"] = torch.empty(4, 6)
        half = graph.call_function(aten.slice.Tensor, (value, 0, 0, 2))
        half.meta["val"] = value.meta["val"][:2]
    graph.output((value, half, weight, x))
    module = fx.GraphModule({}, graph)
    assert saved_bytes(module, 1, {"weight"}) == 2 * 4 * 6 * 4
    assert saved_bytes(module, 1, {"weight", "x"}) == 4 * 6 * 4
    assert saved_bytes(module, 4, set()) == 0


def _backward() -> fx.GraphModule:
    """a -> gradients (sin a, a, cos sin a)."""
    graph = fx.Graph()
    a = graph.placeholder("a")
    first = graph.call_function(aten.sin.default, (a,))
    second = graph.call_function(aten.cos.default, (first,))
    graph.output((first, a, second))
    return fx.GraphModule({}, graph)


def test_gradients_are_delivered_right_after_they_are_made() -> None:
    delivered: list[tuple[int, Tensor]] = []
    graph_module = deliver_early(_backward(), {0: 7, 1: 5}, 3)
    a = torch.randn(3)
    arguments = [lambda position, gradient: delivered.append((position, gradient)), a]
    (returned,) = boxed(graph_module)(arguments)
    assert arguments == [], "the list is emptied"
    assert [position for position, _ in delivered] == [5, 7]
    assert torch.equal(delivered[0][1], a) and torch.equal(delivered[1][1], a.sin())
    assert torch.equal(returned, a.sin().cos())
    order = [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
    assert order == [deliver, aten.sin.default, deliver, aten.cos.default]


def test_boxed_frees_its_inputs_early() -> None:
    import weakref

    graph = fx.Graph()
    a = graph.placeholder("a")
    first = graph.call_function(aten.sin.default, (a,))
    seen: list[bool] = []
    value = torch.randn(3)
    watched = weakref.ref(value)

    def look(x: Tensor) -> Tensor:
        seen.append(watched() is None)
        return x

    graph.output((graph.call_function(look, (first,)),))
    arguments = [value]
    del value
    boxed(fx.GraphModule({}, graph))(arguments)
    assert seen == [True]
