"""Backward graphs that write parameter gradients into views of buckets: the same sums as adding them up
afterwards, and who copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.kernels.gradient_writes import FIRST, LATER, listening, write_gradients
from rannc_backend.passes.pipeline import PassError, count_ops
from rannc_backend.passes.stage.gradient_buckets import BucketGraph, write_into_buckets

aten = torch.ops.aten
EXACT = 1e-13
ROWS, TOKENS = 6, 7  # rows of a micro-batch, rows of an embedding table


@dataclass(frozen=True)
class Kind:
    """A gradient: its shape, what makes it from (x [6, 4], g [6, 5], numbers [6] of 7), how its terms are
    written without Inductor.
    """

    shape: tuple[int, ...]
    make: Callable[[Tensor, Tensor, Tensor], Tensor]
    how: tuple[str, ...]
    fused: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    slot_stride: tuple[int, ...] = field(default=())


def _table(x: Tensor, index: Tensor, padding: int = -1, by_frequency: bool = False) -> Tensor:
    return aten.embedding_dense_backward(x, index, TOKENS, padding, by_frequency)


def _put(x: Tensor, index: Tensor, start: float = 0.0) -> Tensor:
    return torch.full((TOKENS, x.shape[1]), start, dtype=x.dtype).index_put([index], x, accumulate=True)


def _masked(x: Tensor, index: Tensor) -> Tensor:
    mask = (index != 2).unsqueeze(-1)
    return aten._unsafe_masked_index_put_accumulate(
        torch.zeros(TOKENS, x.shape[1], dtype=x.dtype), mask, [index], x
    )


KINDS = {
    "product": Kind((4, 5), lambda x, g, i: x.t() @ g, ("product",)),
    "turned": Kind((5, 4), lambda x, g, i: (x.t() @ g).t(), ("product",)),
    "turned_twice": Kind((4, 5), lambda x, g, i: (x.t() @ g).t().transpose(0, 1), ("product",)),
    "seen": Kind((2, 2, 5), lambda x, g, i: (x.t() @ g).view(2, 2, 5), ("product",)),
    "row_of_one": Kind((1, 4, 5), lambda x, g, i: (x.t() @ g).unsqueeze(0), ("product",)),
    "permuted": Kind((5, 2, 2), lambda x, g, i: (x.t() @ g).view(2, 2, 5).permute(2, 0, 1), ("product",)),
    "by_columns": Kind((4, 5), lambda x, g, i: x.t() @ g, ("product",), slot_stride=(1, 4)),
    "batched": Kind(
        (2, 2, 5), lambda x, g, i: x.view(6, 2, 2).permute(1, 2, 0) @ torch.stack([g, g]), ("product",)
    ),
    "two_terms": Kind((4, 5), lambda x, g, i: x.t() @ g + x.sin().t() @ g.cos(), ("product", "product")),
    "three_terms": Kind(
        (4, 5), lambda x, g, i: (x.t() @ g + x.sin().t() @ g) + (g.t() @ x).t(), ("product",) * 3
    ),
    "product_and_sum": Kind(
        (4, 4),
        lambda x, g, i: x.t() @ x + x.cos().sum() * torch.eye(4, dtype=x.dtype),
        ("product", "added"),
        ("product", "fused"),
    ),
    "doubled": Kind((4, 5), lambda x, g, i: (lambda p: p + p)(x.t() @ g), ("product", "product")),
    "tied_table": Kind(
        (TOKENS, 4),
        lambda x, g, i: torch.eye(TOKENS, ROWS, dtype=x.dtype) @ x + _table(x.sin(), i),
        ("product", "rows"),
    ),
    "table": Kind((TOKENS, 4), lambda x, g, i: _table(x, i), ("rows",)),
    "table_padded": Kind((TOKENS, 4), lambda x, g, i: _table(x, i, padding=2), ("rows",)),
    "table_by_frequency": Kind((TOKENS, 4), lambda x, g, i: _table(x, i, by_frequency=True), ("added",)),
    "put": Kind((TOKENS, 4), lambda x, g, i: _put(x, i), ("rows",)),
    "put_masked": Kind((TOKENS, 4), lambda x, g, i: _masked(x, i), ("rows",)),
    "put_on_ones": Kind((TOKENS, 4), lambda x, g, i: _put(x, i, 1.0), ("added",)),
    "sum": Kind((5,), lambda x, g, i: g.sum(0), ("added",), ("fused",)),
    "pointwise": Kind((6, 5), lambda x, g, i: g.sin() * 2, ("added",), ("fused",)),
    "scaled_product": Kind((4, 5), lambda x, g, i: (x.t() @ g) * 2, ("added",), ("fused",)),
    "cast": Kind((4, 5), lambda x, g, i: (x.t() @ g).float(), ("added",), ("fused",), dtype=torch.float32),
    "cast_in_bucket": Kind((4, 5), lambda x, g, i: x.float().t() @ g.float(), ("added",)),
    "given": Kind((6, 5), lambda x, g, i: g, ("added",)),
    "turned_given": Kind((5, 6), lambda x, g, i: g.t(), ("added",)),
    "number": Kind((), lambda x, g, i: g.sum(), ("added",), ("fused",)),
}


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 4, dtype=torch.float64, generator=generator)
    g = torch.randn(ROWS, 5, dtype=torch.float64, generator=generator)
    return x, g, torch.randint(0, TOKENS, (ROWS,), generator=generator)


def rewritten(
    names: Sequence[str], *, fuse: bool, group_bytes: int = 0
) -> tuple[fx.GraphModule, BucketGraph, dict[int, Tensor]]:
    """The plain graph, which gives (cos x, *gradients, sin g); the rewritten one; views full of NaN by
    position (10, 11, ...).
    """

    def backward(x: Tensor, g: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return (x.cos(), *(KINDS[name].make(x, g, index) for name in names), g.sin())

    plain = make_fx(backward, tracing_mode="fake")(*inputs(0))
    slots = {}
    for number, name in enumerate(names):
        kind = KINDS[name]
        stride = kind.slot_stride or torch.empty(kind.shape, device="meta").stride()
        slots[10 + number] = torch.empty_strided(kind.shape, stride, dtype=kind.dtype).fill_(torch.nan)
    parameters = {1 + number: 10 + number for number in range(len(names))}
    return (
        plain,
        write_into_buckets(plain, parameters, slots, FIRST, fuse=fuse, group_bytes=group_bytes),
        slots,
    )


class Heard:
    """Notes what is made."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.rows: list[tuple[int, Tensor, Tensor]] = []

    def all_made(self, positions: Sequence[int]) -> None:
        self.positions.extend(positions)

    def keep_rows(self, position: int, index: Tensor, rows: Tensor) -> None:
        self.rows.append((position, index, rows))


def worst_error(
    names: Sequence[str], *, fuse: bool, turns: Sequence[int] = (FIRST, LATER, LATER), group_bytes: int = 0
) -> float:
    """Largest relative error of the sums over three micro-batches; the other outputs and what is announced
    are checked too.
    """
    plain, graph, slots = rewritten(names, fuse=fuse, group_bytes=group_bytes)
    sums: list[Tensor] = []
    for number, accumulate in enumerate(turns):
        given_inputs = inputs(number + 1)
        cosine, *gradients, sine = plain(*given_inputs)
        heard = Heard()
        with listening(heard), torch.no_grad():
            results = graph.graph_module(
                *given_inputs, accumulate, *(slots[position] for position in graph.positions)
            )
        assert torch.equal(results[0], cosine) and torch.equal(results[1], sine) and len(results) == 2
        assert sorted(heard.positions) == sorted(slots)
        sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients
    errors = []
    for position, total in zip(slots, sums, strict=True):
        scale = max(total.abs().max().item(), 1e-30)
        error = (slots[position].double() - total.double()).abs().max().item() / scale
        errors.append(float("inf") if error != error else error)
    return max(errors)


def exact(names: Sequence[str]) -> float:
    """What rounding may do."""
    return 1e-5 if any(name.startswith("cast") for name in names) else EXACT


@pytest.mark.parametrize("fuse", [False, True], ids=["called", "fused"])
@pytest.mark.parametrize("name", KINDS)
def test_sums_are_those_of_adding_afterwards(name: str, fuse: bool) -> None:
    assert worst_error([name], fuse=fuse) <= exact([name])
    _, graph, _ = rewritten([name], fuse=fuse)
    expected = KINDS[name].fused if fuse and KINDS[name].fused else KINDS[name].how
    assert sorted(graph.how[10]) == sorted(expected)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from([0, 100, 10**6]),
)
def test_any_gradients_together(names: list[str], fuse: bool, group_bytes: int) -> None:
    assert worst_error(names, fuse=fuse, group_bytes=group_bytes) <= exact(names)


@pytest.mark.parametrize("name", ["product", "tied_table", "table", "sum", "given", "two_terms"])
@pytest.mark.parametrize("fuse", [False, True], ids=["called", "fused"])
def test_a_second_micro_batch_that_overwrites_is_seen(name: str, fuse: bool) -> None:
    assert worst_error([name], fuse=fuse, turns=(FIRST, FIRST, LATER)) > 1e-3
    assert worst_error([name], fuse=fuse, turns=(LATER, LATER, LATER)) == float("inf"), (
        "memory that was never written holds NaN"
    )


def test_a_product_has_no_memory_of_its_own() -> None:
    _, graph, _ = rewritten(["product", "turned", "two_terms"], fuse=True)
    ops = count_ops(graph.graph_module)
    assert ops["rannc.write_product_.default"] == 4 and graph.num_calls == 0
    assert not {"aten.mm.default", "aten.add.Tensor", "aten.copy_.default"} & set(ops)


def test_a_product_that_others_use_is_not_taken() -> None:
    def backward(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        product = x.t() @ g
        return product, product.sin(), product

    plain = make_fx(backward, tracing_mode="fake")(*inputs(0)[:2])
    slots = {position: torch.empty(4, 5, dtype=torch.float64) for position in (0, 2)}
    graph = write_into_buckets(plain, {0: 0, 2: 2}, slots, FIRST, fuse=False)
    assert graph.how == {0: ("added",), 2: ("added",)}
    x, g, _ = inputs(3)
    (sine,) = graph.graph_module(x, g, FIRST, slots[0], slots[2])
    assert (
        torch.equal(slots[0], x.t() @ g)
        and torch.equal(slots[2], slots[0])
        and torch.equal(sine, slots[0].sin())
    )


def _calls(graph: BucketGraph, target: Any) -> list[fx.Node]:
    return graph.graph_module.graph.find_nodes(op="call_function", target=target)


def test_small_gradients_are_added_and_announced_together_large_ones_at_once() -> None:
    names = ["given", "turned_given", "product", "given"]
    one_by_one = rewritten(names, fuse=False, group_bytes=0)[1]
    made, written = torch.ops.rannc.gradients_made_.default, torch.ops.rannc.write_gradients_.default
    assert [node.args[1] for node in _calls(one_by_one, made)] == [[10], [13], [11], [12]]
    assert len(_calls(one_by_one, written)) == one_by_one.num_calls == 3
    together = rewritten(names, fuse=False, group_bytes=10**6)[1]
    assert [node.args[1] for node in _calls(together, made)] == [[10, 13, 11, 12]]
    assert len(_calls(together, written)) == together.num_calls == 1
    halves = rewritten(names, fuse=False, group_bytes=300)[1]
    assert [node.args[1] for node in _calls(halves, made)] == [[10, 13], [11, 12]]


def test_listeners_end_with_their_context() -> None:
    outer, inner = Heard(), Heard()
    announce = torch.ops.rannc.gradients_made_.default
    with listening(outer):
        with pytest.raises(ZeroDivisionError), listening(inner):
            announce([torch.zeros(1)], [1])
            raise ZeroDivisionError
        announce([torch.zeros(1)], [2])
    announce([torch.zeros(1)], [3])
    assert (outer.positions, inner.positions) == ([2], [1])


def test_one_launch_writes_what_single_copies_write() -> None:
    memory = [torch.full((64,), torch.nan), torch.full((16,), torch.nan, dtype=torch.float64)]
    views = [memory[0][4:10].view(2, 3), memory[1][:4], memory[0][32:37]]
    for accumulate in (FIRST, LATER):
        gradients = [torch.randn(3, 2).t(), torch.randn(4, dtype=torch.float64), torch.randn(5).bfloat16()]
        before = [view.clone() for view in views]
        write_gradients(views, gradients, accumulate)
        for view, old, gradient in zip(views, before, gradients, strict=True):
            assert torch.equal(view, gradient.to(view.dtype) if accumulate == FIRST else old + gradient)
    assert memory[0].isnan().sum() == 64 - 11 and memory[1].isnan().sum() == 12


_KEPT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], set[int]]] = {
    "table": (_table, set()),
    "padded": (lambda x, i: _table(x, i, padding=2), {2}),
    "masked": (_masked, {2}),
    "put": (_put, set()),
    "twice": (lambda x, i: _table(x, i) + _table(x.sin(), i), set()),
    "cast": (lambda x, i: _table(x.float(), i).double(), set()),
}


@pytest.mark.parametrize("name", _KEPT)
def test_rows_of_sparse_gradients_go_to_the_listener(name: str) -> None:
    make, left_out = _KEPT[name]
    plain = make_fx(lambda x, g, i: (make(x, i), g.sin()), tracing_mode="fake")(*inputs(0))
    slot = torch.full((1,), torch.nan, dtype=torch.float64)
    graph = write_into_buckets(plain, {0: 5}, {5: slot}, FIRST, fuse=True, sparse=frozenset({5}))
    assert set(graph.how[5]) == {"kept"}
    heard, given_inputs = Heard(), inputs(3)
    with listening(heard):
        (sine,) = graph.graph_module(*given_inputs, LATER, slot)
    assert torch.equal(sine, given_inputs[1].sin()) and heard.positions == [5] and slot.isnan().all()
    found = torch.zeros(TOKENS, 4, dtype=torch.float64)
    for position, index, rows in heard.rows:
        assert position == 5 and not left_out & set(index.tolist())
        found.index_add_(0, index, rows.double())
    expected = plain(*given_inputs)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if name == "cast" else EXACT)
    kept = heard.rows[0][2].clone()
    given_inputs[0].fill_(0)
    assert torch.equal(heard.rows[0][2], kept), "the memory is the graph's"


def test_a_sparse_gradient_of_more_than_rows_is_refused() -> None:
    plain = make_fx(lambda x, g, i: (_table(x, i) * 2, g), tracing_mode="fake")(*inputs(0))
    with pytest.raises(PassError, match="sparse_gradients='dense'"):
        write_into_buckets(plain, {0: 5}, {5: torch.zeros(1)}, FIRST, fuse=True, sparse=frozenset({5}))
