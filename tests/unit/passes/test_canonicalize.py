"""Canonicalisation: constants folded, assertions gone, fills differentiable, values unchanged."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.passes.canonicalize import (
    CANONICAL,
    CANONICALIZE,
    IN_PARTS,
    ComplexScatters,
    DifferentiableFills,
    EraseAssertions,
    EraseRestriding,
    FoldConstants,
    NamedSqueezes,
)
from rannc_backend.passes.pipeline import count_ops, run_passes, with_facts

aten = torch.ops.aten


def traced(function, *args) -> fx.GraphModule:
    graph = make_fx(lambda *inputs: (function(*inputs),), tracing_mode="symbolic")(*args)
    graph.graph.eliminate_dead_code()
    return graph


def check(graph, args, passes=CANONICALIZE):
    """The graph after the passes; it computes the same."""
    expected = copy.deepcopy(graph)(*args)
    result, _ = run_passes(with_facts(graph, CANONICAL), passes)
    for mine, theirs in zip(result(*args), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        assert mine.stride() == theirs.stride()
    assert all("val" in node.meta for node in result.graph.nodes if node.op == "call_function")
    return result


def test_constants_of_one_value_become_full():
    def function(x):
        repeated = torch.tensor([2.0, 2.0, 2.0])
        return (
            x * repeated
            + torch.tensor(4, dtype=torch.int32)
            + torch.tensor([1.0, 2.0, 3.0])
            + torch.tensor(float("nan"))
        )

    x = torch.randn(4, 3)
    result = check(traced(function, x), (x,))
    assert len(result.graph.find_nodes(op="get_attr")) == 2  # three different values; NaN
    assert count_ops(result)["aten.full.default"] == 2
    assert count_ops(result)["aten.lift_fresh_copy.default"] == 0


def test_empty_starts_of_caches_are_left_out():
    def function(x, y):
        cache = torch.tensor([], dtype=x.dtype)
        return torch.cat([torch.cat([cache, x], dim=-2), y], dim=-2)

    x, y = torch.randn(2, 3, 4), torch.randn(2, 1, 4)
    result = check(traced(function, x, y), (x, y))
    assert count_ops(result)["aten.cat.default"] == 1
    assert not result.graph.find_nodes(op="get_attr")


def test_a_cache_keeps_the_layout_that_it_had_after_cat():
    def function(x):
        keys = torch.cat([torch.tensor([], dtype=x.dtype), x.transpose(1, 2)], dim=-2)
        return keys.view(2, -1)

    x = torch.randn(2, 3, 4)
    result = check(traced(function, x), (x,))
    assert count_ops(result)["aten.cat.default"] == 0


def test_empty_parts_that_decide_the_type_stay():
    def function(x):
        return torch.cat([torch.tensor([], dtype=torch.float64), x])

    x = torch.randn(3)
    result = check(traced(function, x), (x,))
    assert result(x)[0].dtype == torch.float64


def test_assertions_are_erased():
    def function(x):
        torch._assert_async((x.sum() != 12345).all())
        return x + 1

    x = torch.randn(3)
    graph = make_fx(lambda x: (function(x),))(x)
    assert any("_assert" in op for op in count_ops(graph))
    result, (report,) = run_passes(with_facts(graph, CANONICAL), (EraseAssertions(),))
    assert set(count_ops(result)) == {"aten.add.Tensor"}
    assert report.op_count_change["aten._assert_async.default"] == -1


def test_copies_are_differentiable():
    def function(x, y):
        return aten.copy(x, y).view(-1) * 2

    cases = {
        "same": torch.randn(4, 3),
        "broadcast": torch.randn(3),
        "rows": torch.randn(4, 1),
        "other type": torch.randn(4, 3, dtype=torch.float64),
        "transposed": torch.randn(3, 4).t(),
    }
    for name, y in cases.items():
        x = torch.randn(4, 3, requires_grad=True)
        result = check(traced(function, x.detach(), y), (x.detach(), y), (DifferentiableFills(),))
        assert count_ops(result)["aten.copy.default"] == 0, name
        y = y.clone().requires_grad_()
        result(x, y)[0].sum().backward()
        torch.testing.assert_close(y.grad, torch.full_like(y, 2.0 * 12 / y.numel()), msg=name)
        assert x.grad is None, name


def test_random_fills_pass_no_gradient():
    def function(x):
        y = x * 2
        return aten.normal_functional(y, 0.0, 1.0) + aten.bernoulli.p(y, 0.5) + x

    x = torch.randn(4, 3)
    graph, _ = run_passes(with_facts(traced(function, x), CANONICAL), (DifferentiableFills(),))
    x = torch.zeros(4, 3, requires_grad=True)
    graph(x)[0].sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 3))


def test_nothing_to_do():
    x = torch.randn(4, 3)
    graph = traced(lambda x: x.relu() + 1, x)
    _, reports = run_passes(with_facts(graph, CANONICAL), CANONICALIZE)
    assert all(not report.op_count_change for report in reports)
    assert [type(item) for item in CANONICALIZE] == [
        EraseAssertions,
        EraseRestriding,
        FoldConstants,
        DifferentiableFills,
        ComplexScatters,
        NamedSqueezes,
    ]


def test_a_slice_of_one_row_keeps_its_rows():
    """As `scores.squeeze()` has them in a step of more."""

    def function(x):
        return (
            x.unsqueeze(2).squeeze().cumsum(1) + x.squeeze(0),
            x.t().squeeze(),
            x.mean(1, keepdim=True).squeeze().sin(),
        )

    x = torch.randn(4, 3)
    graph = make_fx(function, tracing_mode="symbolic")(x)
    named, _ = run_passes(with_facts(graph, CANONICAL), CANONICALIZE)
    for rows in (x, x[:1], x[2:3]):
        assert [tuple(value.shape) for value in named(rows)] == [(len(rows), 3), (3, len(rows)), (len(rows),)]
        torch.testing.assert_close(named(rows)[2], rows.mean(1).sin())


def test_other_strides_of_single_elements_are_nothing():
    def function(x):
        pooled = x.mean(2, keepdim=True)
        return pooled.as_strided(pooled.shape, (pooled.shape[1], 1, 7)).flatten(1) * 2

    x = torch.randn(4, 5, 3)
    graph = traced(function, x)
    assert count_ops(graph)["aten.as_strided.default"] == 1
    assert count_ops(check(graph, (x,)))["aten.as_strided.default"] == 0


def test_strides_that_give_other_elements_stay():
    for function in (
        lambda x: x.as_strided((5, 4), (1, 5)) + 1,
        lambda x: x[1:].as_strided((3, 4), (4, 1), 8) + 1,
    ):
        x = torch.randn(4, 5)
        assert count_ops(check(traced(function, x), (x,)))["aten.as_strided.default"] == 1


def _masks(which: int | None) -> dict[str, object]:
    shapes = {0: (5, 5), 1: (3, 5), 2: (3, 2, 5, 5)}
    if which is None:
        return {}
    generator = torch.Generator().manual_seed(which)
    mask = torch.rand(shapes[which], generator=generator) > 0.6
    mask[..., 0] = False  # no token without a key
    return {"mask": mask, "mask_type": which}


def _layer(width: int = 8) -> tuple[nn.TransformerEncoderLayer, list[torch.Tensor]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 2, 12, batch_first=True).double()
    for norm in (layer.norm1, layer.norm2):
        nn.init.uniform_(norm.weight)
        nn.init.uniform_(norm.bias)
    attention = layer.self_attn
    nn.init.uniform_(attention.in_proj_bias)
    own = [
        attention.in_proj_weight,
        attention.in_proj_bias,
        attention.out_proj.weight,
        attention.out_proj.bias,
    ]
    return layer, own


@pytest.mark.parametrize("which", [None, 0, 1, 2])
@pytest.mark.parametrize("average", [True, False])
def test_attention_of_evaluation_equals_its_parts(which, average):
    _, own = _layer()
    target, x = aten._native_multi_head_attention.default, torch.randn(3, 5, 8, dtype=torch.float64)
    settings = _masks(which) | {"need_weights": True, "average_attn_weights": average}
    with torch.no_grad():
        for call in ((x, x, x), (x, x.flip(1), 2 * x)):
            expected = target(*call, 8, 2, *own, **settings)
            found = IN_PARTS[target](*call, 8, 2, *own, **settings)
            for mine, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)
        assert IN_PARTS[target](x, x, x, 8, 2, *own, need_weights=False)[1] is None


@pytest.mark.parametrize("which", [None, 1, 2])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("use_gelu", [True, False])
def test_encoder_layers_of_evaluation_equal_their_parts(which, norm_first, use_gelu):
    layer, own = _layer()
    others = [
        *(layer.norm1.weight, layer.norm1.bias, layer.norm2.weight, layer.norm2.bias),
        *(layer.linear1.weight, layer.linear1.bias, layer.linear2.weight, layer.linear2.bias),
    ]
    target, x = aten._transformer_encoder_layer_fwd.default, torch.randn(3, 5, 8, dtype=torch.float64)
    arguments = (x, 8, 2, *own, use_gelu, norm_first, 1e-5, *others)
    masks = _masks(which)
    with torch.no_grad():
        expected = target(*arguments, *masks.values())
        for found in (IN_PARTS[target](*arguments, *masks.values()), IN_PARTS[target](*arguments, **masks)):
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
