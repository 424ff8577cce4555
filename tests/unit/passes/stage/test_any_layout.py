"""Graphs run on other layouts than they were traced on, and give the same values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.passes.stage.any_layout import laid_out, reads_as_traced, restrided, take_any_layout
from rannc_backend.passes.stage.partition_backward import boxed

aten = torch.ops.aten


@torch.library.custom_op("rannc_tests::sum_of_memory", mutates_args=())
def sum_of_memory(values: list[Tensor], last: Tensor) -> Tensor:
    """An operator that takes for granted that its operands lie row by row."""
    memory = [x.as_strided((x.numel(),), (1,)) for x in (*values, last)]
    return sum((x.cumsum(0) for x in memory), torch.zeros(()))


@sum_of_memory.register_fake
def _(values: list[Tensor], last: Tensor) -> Tensor:
    return last.new_empty(last.numel())


@torch.library.custom_op("rannc_tests::add_numbers_", mutates_args={"out"})
def add_numbers_(out: Tensor, x: Tensor) -> None:
    """Writes one operand and takes for granted how the other lies."""
    out += x.as_strided(x.shape, (8, 2, 1))


def _attention(x: Tensor) -> Tensor:
    heads = (x * 1).reshape(3, 1, 4, 2)
    return aten._scaled_dot_product_flash_attention_for_cpu.default(heads, heads * 2, heads + 1)[0]


def _written(x: Tensor) -> Tensor:
    out = torch.ones_like(x)
    torch.ops.rannc_tests.add_numbers_(out, x * 1)
    return out


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: aten.view.default(x * 1, [24]),
    "unsafe_view": lambda x: aten._unsafe_view.default(x * 1, [4, 6]),
    "view_as_complex": lambda x: torch.view_as_complex(x * 1),
    "view_dtype": lambda x: (x * 1).view(torch.int32),
    "attention": _attention,
    "group_norm": lambda x: aten.native_group_norm.default(x * 1, None, None, 3, 4, 2, 2, 1e-5)[0],
    "operator of the user's": lambda x: torch.ops.rannc_tests.sum_of_memory([x * 1, x * 2], x * 3),
    "operator that writes": _written,
    "as_strided": lambda x: (x * 1).as_strided((2, 4), (3, 2), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_other_layouts(name: str) -> None:
    function = CASES[name]
    traced_on = torch.randn(3, 4, 2, dtype=torch.float64)
    graph = make_fx(function, tracing_mode="fake")(traced_on)
    given = traced_on.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert given.stride() != traced_on.stride() and torch.equal(given, traced_on)
    (result,) = (boxed(graph)([given]),)
    assert torch.equal(result, function(traced_on))
    take_any_layout(graph.graph)
    graph.recompile()
    assert torch.equal(graph(given), function(traced_on)) and torch.equal(
        graph(traced_on), function(traced_on)
    )


def test_strides_of_single_elements_mean_nothing() -> None:
    value = torch.randn(2, 1, 3)
    assert restrided(value, [3, 77, 1]) is value
    other = restrided(value, [1, 1, 2])
    assert torch.equal(other, value) and other.stride() == (1, 1, 2)


def test_operands_are_copied_only_where_they_lie_otherwise() -> None:
    value = torch.randn(2, 3, 4)
    assert laid_out(value, (0, 1, 2), True) is value
    part = torch.randn(2, 3, 8)[..., 4:]
    assert laid_out(part, (0, 1, 2), False) is part
    other = laid_out(part.transpose(1, 2), (0, 1, 2), False)
    assert other.is_contiguous() and torch.equal(other, part.transpose(1, 2))
    turned = laid_out(value, (0, 2, 1), True)
    assert turned.stride() == (12, 1, 3) and torch.equal(turned, value)
    repeated = torch.randn(2, 1, 4).expand(2, 3, 4)
    assert torch.equal(laid_out(repeated, (0, 1, 2), False), repeated)


def test_pointwise_operators_and_products_read_strides() -> None:
    assert not any(map(reads_as_traced, (aten.add.Tensor, aten.mm.default, aten._to_copy.default)))
