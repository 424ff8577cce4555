"""Values as rows: any layout survives the way into messages and back; slices are the model's own slices."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.ir.exchange import Value
from rannc_backend.runtime.comm.gloo import SingleTransport
from rannc_backend.runtime.rows import Piece, split_interval
from rannc_backend.runtime.step.messages import assemble, layout_of, make_incoming, make_message, slice_rows


@st.composite
def values(draw: st.DrawFn, name: str = "x") -> Value:
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = -1
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bool, torch.int64, torch.bfloat16]))
    return Value(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        dim=dim,
        outer=draw(st.integers(1, 3)),
        inner=draw(st.integers(1, 3)),
    )


def tensor_of(value: Value, num_rows: int) -> torch.Tensor:
    shape = [num_rows * value.outer * value.inner if size == -1 else size for size in value.shape]
    count = torch.Size(shape).numel()
    return torch.arange(count).remainder(251).reshape(shape).to(value.dtype)


@given(values(), st.integers(1, 5))
def test_rows_and_back(value: Value, num_rows: int) -> None:
    tensor = tensor_of(value, num_rows)
    rows = value.to_rows(tensor)
    assert rows.shape == (num_rows, value.elements_per_row)
    assert torch.equal(value.from_rows(rows), tensor)


@given(values(), st.integers(2, 5))
def test_a_row_is_the_row_of_the_layout(value: Value, num_rows: int) -> None:
    tensor = tensor_of(value, num_rows)
    split = tensor.unflatten(value.dim, (value.outer, num_rows, value.inner))
    one = split.select(value.dim + 1, 1)
    assert torch.equal(value.to_rows(tensor)[1].reshape(one.shape), one)


@given(values("a"), values("b"), st.integers(1, 9), st.integers(1, 4), st.integers(1, 2))
def test_messages_carry_slices(
    first: Value, second: Value, num_rows: int, num_parts: int, num_values: int
) -> None:
    edge = (first, second)[:num_values]
    tensors = [tensor_of(value, num_rows) for value in edge]
    arrived = []
    for start, stop in split_interval(10, 10 + num_rows, num_parts):
        if start == stop:
            continue
        piece = Piece(0, start, stop)
        layout = layout_of(edge, stop - start)
        message = make_message(slice_rows(tensors, edge, 10, piece), layout)
        incoming = make_incoming(layout, piece, SingleTransport().acquire_message)
        assert incoming.buffer.numel() * incoming.buffer.itemsize == message.numel() * message.itemsize
        incoming.buffer.view(torch.uint8).copy_(message.view(torch.uint8))
        arrived.append((piece, incoming.views))
    for got, sent in zip(assemble(edge, arrived[::-1], 10, 10 + num_rows), tensors, strict=True):
        assert torch.equal(got, sent)


def test_gradients_of_the_same_rows_from_several_ranks_are_summed() -> None:
    value = Value(name="x", dtype=torch.float64, shape=(-1, 2), dim=0)
    ones = torch.ones(3, 2, dtype=torch.float64)
    arrived = [(Piece(0, 0, 3), [ones]), (Piece(1, 0, 3), [2 * ones])]
    (total,) = assemble([value], arrived, 0, 3, overlapping=True)
    assert torch.equal(total, 3 * ones)
