"""Row-wise operators give the same on slices as on the whole batch; operators that mix rows are refused by
name.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rannc_backend.passes.batch.batch_axis import (
    Constant,
    PartialSum,
    Reduced,
    RowIndex,
    Rows,
    analyze_batch_axis,
)
from rannc_backend.passes.batch.batch_split import UserRows
from rannc_backend.passes.batch.loss_decompositions import decompose_batch_reductions
from rannc_backend.passes.pipeline import PassError
from tests.unit.passes.batch.batch_tracing import Traced, trace
from tests.unit.passes.batch.slice_runner import split_traced, worst_error

ROWS = 7
SIZES = (3, 1, 3)


class Applied(nn.Module):
    """A function of a [rows, 4, 6] input `x`, integers `i` in [0, 4) of shape [rows, 4], and parameters."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        self.v = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, x: Tensor, i: Tensor) -> object:
        # so that every output depends on a parameter, and a wrong gradient shows
        return self.function(x * self.v, i, self.w)


def traced(function: Callable[..., object], rows: int = ROWS) -> Traced:
    torch.manual_seed(0)
    inputs = dict(x=torch.randn(rows, 4, 6, dtype=torch.float64), i=torch.randint(0, 4, (rows, 4)))
    return trace(Applied(function), inputs)


def layouts_of(function: Callable[..., object]) -> tuple[Traced, dict]:
    graph = traced(function)
    decompose_batch_reductions(graph.graph_module, graph.rows_symbol)
    return graph, analyze_batch_axis(graph.graph_module, graph.batch, graph.rows_symbol)


def output_layout(function: Callable[..., object]) -> object:
    graph, layouts = layouts_of(function)
    return layouts[graph.graph_module.graph.output_node().args[0][0].name]


CONSTANT_INDEX = torch.tensor([2, 0, 1])

ROWWISE: dict[str, Callable[..., object]] = {
    "broadcast": lambda x, i, w: x * w[:4] + 1,
    "cast": lambda x, i, w: x.float().double(),
    "where": lambda x, i, w: torch.where(i[:, :, None] > 1, x, w[0]),
    "masked_fill": lambda x, i, w: x.masked_fill(i[..., None] == 2, 0.5),
    "diagonal_scatter": lambda x, i, w: torch.diagonal_scatter(x, x[:, :, 0] + 1.0, 1, 1, 2),
    "diagonal_scatter_before_rows": lambda x, i, w: torch.diagonal_scatter(
        x.permute(1, 2, 0), 2.0 * x[:, 0, :4], 0, -3, -2
    ).permute(2, 0, 1),
    "diagonal_scatter_of_a_constant": lambda x, i, w: torch.diagonal_scatter(x, w[0, :4].expand(x.shape[0], 4), 0, 2, 1),
    "diagonal_scatter_into_a_constant": lambda x, i, w: torch.diagonal_scatter(
        w[:4].expand(x.shape[0], 4, 6), x[:, :, 0], 0, 1, 2
    ),
    "diag_embed": lambda x, i, w: torch.diag_embed(x[:, 0], 1, -2, -1)[:, :6, :6] @ w,
    "masked_put": lambda x, i, w: _put(x, (i == 2,), torch.tensor(0.5, dtype=x.dtype)),
    "linear_norm": lambda x, i, w: F.layer_norm(F.linear(x, w), (6,), w[0], w[1]),
    "rms_norm": lambda x, i, w: F.rms_norm(x, (6,), w[0]),
    "group_norm": lambda x, i, w: F.group_norm(x, 2),
    "instance_norm": lambda x, i, w: F.instance_norm(x),
    "softmax_features": lambda x, i, w: x.softmax(-1) + x.log_softmax(1),
    "flatten_softmax": lambda x, i, w: x.reshape(-1, 6).softmax(1).view(-1, 4, 6),
    "time_major": lambda x, i, w: (x.transpose(0, 1) @ w).relu(),
    "time_major_flat": lambda x, i, w: (x.permute(1, 0, 2).reshape(-1, 6) @ w).view(4, -1, 6),
    "time_major_flat_output": lambda x, i, w: x.permute(1, 0, 2).reshape(-1, 6) @ w,
    "both_sides": lambda x, i, w: x.permute(1, 0, 2).unsqueeze(3).expand(4, -1, 6, 2).permute(0, 1, 3, 2).reshape(-1, 6) @ w,
    "heads": lambda x, i, w: _heads(x, w),
    "batch_of_heads": lambda x, i, w: _batch_of_heads(x, w),
    "attention_mask": lambda x, i, w: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], i[:, None, None, :] < 3),
    "einsum": lambda x, i, w: torch.einsum("btc,bsc->bts", x, x @ w),
    "outer_columns": lambda x, i, w: x.transpose(1, 2) @ x,
    "conv1d": lambda x, i, w: F.conv1d(x, w[:, :4, None], padding=1),
    "conv2d": lambda x, i, w: F.conv2d(x[:, None], w[None, None, :3, :3], stride=2),
    "conv_transpose": lambda x, i, w: F.conv_transpose1d(x, w[:4, :, None]),
    "conv_rows_of_time": lambda x, i, w: F.conv1d(x.reshape(-1, 1, 6), w[:1, None, :3]).view(x.shape[0], 4, -1),
    "pools": lambda x, i, w: F.max_pool1d(x, 2) + F.avg_pool1d(x, 2) + F.adaptive_avg_pool1d(x, 3),
    "pool2d": lambda x, i, w: (F.max_pool2d(x[:, None], 2), F.adaptive_avg_pool2d(x[:, None], 1)),
    "upsample": lambda x, i, w: F.interpolate(x[:, None], scale_factor=2, mode="bilinear"),
    "pad": lambda x, i, w: F.pad(x, (1, 2, 0, 1)),
    "pad_reflect": lambda x, i, w: F.pad(x, (1, 2), mode="reflect"),
    "pixel_shuffle": lambda x, i, w: F.pixel_shuffle(x[:, :, :, None], 2),
    "unfold": lambda x, i, w: x.unfold(2, 3, 1),
    "im2col": lambda x, i, w: F.unfold(x[:, None], 2),
    "cat_features": lambda x, i, w: torch.cat([x, x * 2], -1),
    "stack": lambda x, i, w: torch.stack([x, x * 2], 0),
    "cls_token": lambda x, i, w: torch.cat([w[:1].expand(x.shape[0], -1, -1), x], 1),
    "repeat_token": lambda x, i, w: torch.cat([w[None, :1].repeat(x.shape[0], 1, 1), x], 1),
    "cat_batch_in_blocks": lambda x, i, w: (torch.cat([x, x + 1]) @ w).chunk(2)[1],
    "repeat_batch": lambda x, i, w: x.repeat(2, 1, 1) @ w,
    "split_unbind": lambda x, i, w: x.split(2, 1)[0] + x.unbind(1)[0][:, None] + x.chunk(3, -1)[1].sum(-1, keepdim=True)[:, :2],
    "select_slice": lambda x, i, w: x[:, 0] + x[:, -1, :] + x[:, 1:3].sum(1),
    "write_slice": lambda x, i, w: _write(x),
    "flip_roll_features": lambda x, i, w: x.flip(1) + x.roll(1, 2),
    "cumsum_sort_topk": lambda x, i, w: (x.cumsum(1), x.sort(-1)[0], x.topk(2, -1)[0]),
    "reductions": lambda x, i, w: (x.sum(1), x.mean((1, 2)), x.amax(-1), x.argmax(-1), x.var(1), x.norm(dim=-1), x.logsumexp(2), x.prod(1)),
    "keepdim": lambda x, i, w: x - x.mean(1, keepdim=True) + x.transpose(0, 1).std(0, keepdim=True).transpose(0, 1),
    "embedding": lambda x, i, w: F.embedding(i, w) * x,
    "one_hot": lambda x, i, w: F.one_hot(i, 4).to(x.dtype) @ x,
    "gather": lambda x, i, w: x.gather(1, i[:, :, None].expand(-1, -1, 6)),
    "gather_in_a_table": lambda x, i, w: w[0].gather(-1, i[:, 0])[:, None, None] * x + w.gather(0, i)[..., None],
    "scatter": lambda x, i, w: torch.zeros_like(x).scatter_add(1, i[:, :, None].expand(-1, -1, 6), x),
    "index_constant": lambda x, i, w: x[:, CONSTANT_INDEX] + x.index_select(1, CONSTANT_INDEX),
    "index_two_constants": lambda x, i, w: x[:, CONSTANT_INDEX, CONSTANT_INDEX],
    "index_table": lambda x, i, w: w[i] + w[i, i][..., None],
    "row_numbers": lambda x, i, w: x[torch.arange(x.shape[0]), i[:, 0]],
    "row_numbers_grid": lambda x, i, w: x[torch.arange(x.shape[0])[:, None], i] * 2,
    "index_put_rows": lambda x, i, w: x.index_put((torch.arange(x.shape[0]), i[:, 0]), x[:, 0] * 3),
    "tril": lambda x, i, w: (x.transpose(1, 2) @ x).tril(),
    "factories": lambda x, i, w: x + torch.zeros(x.shape[0], 4, 6).to(x) + torch.ones_like(x) + x.new_full((x.shape[0], 1, 1), 2.0),
    "constant_of_positions": lambda x, i, w: x + torch.arange(4, dtype=x.dtype)[None, :, None],
    "fft": lambda x, i, w: torch.fft.rfft(x, dim=1).abs(),
    "inverse": lambda x, i, w: torch.linalg.inv_ex(x.transpose(1, 2) @ x + 9 * torch.eye(6, dtype=x.dtype))[0],
    "solved": lambda x, i, w: torch.linalg.solve_ex(_square(x), x.transpose(1, 2))[0],
    "solved_triangular": lambda x, i, w: torch.linalg.solve_triangular(_square(x).tril(), x.transpose(1, 2), upper=False),
    "solved_factored": lambda x, i, w: torch.cholesky_solve(x.transpose(1, 2), torch.linalg.cholesky_ex(_square(x))[0]),
    "bilinear": lambda x, i, w: F.bilinear(x, x.flip(1), w[:, :, None] * w[None]),
    "cdist": lambda x, i, w: torch.cdist(x, w),
    "bucketize": lambda x, i, w: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype)) * x,
    "activations": lambda x, i, w: F.gelu(x) + F.silu(x) + F.softplus(x) + F.glu(x, -1).sum(-1, keepdim=True) + F.prelu(x, w[0, :4]),
    "whole_batch_slice": lambda x, i, w: x[:][0 : x.shape[0]],
    "unchanged_input": lambda x, i, w: (x, i),
    "lstm": lambda x, i, w: _lstm(x, w),
}  # fmt: skip


def _square(x: Tensor) -> Tensor:
    return x.transpose(1, 2) @ x + 9 * torch.eye(x.shape[-1], dtype=x.dtype)


def _put(x: Tensor, indices: tuple[Tensor, ...], value: Tensor) -> Tensor:
    return x.index_put(indices, value)


def _write(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1] = y[:, 0] * 2
    y[:, 2:] = 1.0
    return y


def _batch_of_heads(x: Tensor, w: Tensor) -> Tensor:
    flat = x.reshape(-1, 4, 2, 3).transpose(1, 2).reshape(-1, 4, 3)
    return torch.bmm(flat, w[:1, :3, None].expand(x.shape[0] * 2, 3, 1))


def _lstm(x: Tensor, w: Tensor) -> Tensor:
    start = x.new_zeros(1, x.shape[0], 6)
    return torch.lstm(x, (start, start), [w.repeat(4, 1), w.repeat(4, 1)], False, 1, 0.0, False, False, True)[
        0
    ]


def _heads(x: Tensor, w: Tensor) -> Tensor:
    q = (x @ w).view(x.shape[0], 4, 2, 3).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(x.shape[0], 4, 6)


@pytest.mark.parametrize("name", ROWWISE)
def test_rowwise_operators_are_the_same_on_slices(name: str) -> None:
    graph = traced(ROWWISE[name])
    split = split_traced(graph)
    assert all(isinstance(item, UserRows) for item in split.user_outputs)
    assert worst_error(graph, split, SIZES) <= 1e-12


MIXING: dict[str, tuple[Callable[..., object], str]] = {
    "centred": (lambda x, i, w: x - x.mean(0), "sub"),
    "softmax_batch": (lambda x, i, w: x.softmax(0), "_softmax"),
    "softmax_flat_batch": (lambda x, i, w: x.reshape(-1, 6).softmax(0), "_softmax"),
    "gram": (lambda x, i, w: x[:, 0] @ x[:, 0].t(), "mm"),
    "flip": (lambda x, i, w: x.flip(0), "flip"),
    "roll": (lambda x, i, w: x.roll(1, 0), "roll"),
    "roll_flat": (lambda x, i, w: x.roll(1), "roll"),
    "cat_constant": (lambda x, i, w: torch.cat([x, w[None, :4]]), "cat"),
    "max_batch": (lambda x, i, w: x.amax(0), "amax"),
    "max_all": (lambda x, i, w: x.max(), "max"),
    "argmax_all": (lambda x, i, w: x.argmax(), "argmax"),
    "cumsum": (lambda x, i, w: x.cumsum(0), "cumsum"),
    "sort": (lambda x, i, w: x.sort(0)[0], "sort"),
    "pick_row": (lambda x, i, w: x[0], "select"),
    "pick_rows": (lambda x, i, w: x[1:], "slice"),
    "pairs": (lambda x, i, w: x[:, None, 0] - x[None, :, 0], "sub"),
    "layer_norm": (lambda x, i, w: F.layer_norm(x.permute(1, 2, 0), (x.shape[0],)), "native_layer_norm"),
    "shuffle": (lambda x, i, w: x[i[:, 0]], "index"),
    "reshape_across": (lambda x, i, w: x.transpose(0, 1).reshape(x.shape[0], 4, 6), "_unsafe_view"),
    "conv_over_batch": (lambda x, i, w: F.conv1d(x.permute(1, 2, 0), w[:, :, None]), "convolution"),
    "weights_from_rows": (lambda x, i, w: x[:, 0] @ x.reshape(-1, 6)[: x.shape[0]].t(), "slice"),
    "pad_batch": (lambda x, i, w: F.pad(x, (0, 0, 0, 0, 0, 1)), "constant_pad_nd"),
    "spread_loss": (lambda x, i, w: x.sum().expand(x.shape[0]), "expand"),
    "row_number_as_value": (lambda x, i, w: x + torch.arange(x.shape[0])[:, None, None], "add"),
    "diagonal": (lambda x, i, w: x.diagonal(0, 0, 1), "diagonal"),
    "diagonal_of_rows": (lambda x, i, w: torch.diagonal_scatter(x, w[:4].t(), 0, 0, 1), "diagonal_scatter"),
    "median": (lambda x, i, w: x.median(), "median"),
    "unknown": (lambda x, i, w: torch.histc(x, 4), "histc"),
    "eye": (lambda x, i, w: x.sum((1, 2))[:, None] * torch.eye(x.shape[0], dtype=x.dtype), "eye"),
    "trapezoid_logcumsumexp": (lambda x, i, w: x.logcumsumexp(0), "logcumsumexp"),
    "randperm": (lambda x, i, w: x[torch.randperm(x.shape[0])], "randperm"),
}


@pytest.mark.parametrize("name", MIXING)
def test_operators_that_mix_rows_are_refused_by_name(name: str) -> None:
    function, operator = MIXING[name]
    graph = traced(function)
    with pytest.raises(PassError) as caught:
        split_traced(graph)
    assert f"aten.{operator}" in caught.value.reason
    assert caught.value.node is not None


def test_loop_over_rows_is_refused() -> None:
    with pytest.raises(PassError, match="works for one batch size only"):
        split_traced(traced(lambda x, i, w: torch.stack([row * 2 for row in x])))


def test_refusal_says_what_to_do() -> None:
    with pytest.raises(
        PassError,
        match="mixes rows of the batch .*Each row of the batch must be computed from that row alone",
    ):
        split_traced(traced(lambda x, i, w: x.softmax(0)))


def test_layouts_of_moved_and_flattened_batch_dimensions() -> None:
    assert output_layout(lambda x, i, w: x.transpose(0, 2)) == Rows(2)
    assert output_layout(lambda x, i, w: x.reshape(-1, 6)) == Rows(0, 1, 4)
    assert output_layout(lambda x, i, w: x.transpose(0, 1).reshape(-1, 6)) == Rows(0, 4, 1)
    assert output_layout(lambda x, i, w: x.transpose(0, 1).reshape(-1)) == Rows(0, 4, 6)
    assert output_layout(lambda x, i, w: torch.cat([x, x])) == Rows(0, 2, 1)


def test_layouts_of_values_without_rows() -> None:
    assert output_layout(lambda x, i, w: w * 2) == Constant()
    assert output_layout(lambda x, i, w: x.sum()) == PartialSum()
    assert output_layout(lambda x, i, w: i.sum()) == PartialSum(input_only=True)
    assert output_layout(lambda x, i, w: x.sum() * 2) == Reduced()
    assert output_layout(lambda x, i, w: i.sum() + 1) == Reduced(input_only=True)
    assert output_layout(lambda x, i, w: torch.arange(x.shape[0])) == RowIndex(0)


def test_every_node_has_a_layout() -> None:
    graph, layouts = layouts_of(lambda x, i, w: x.view(x.shape[0] * 4, 6).max(-1))
    assert {node.name for node in graph.graph_module.graph.nodes if node.op != "output"} == set(layouts)


def test_gradient_of_an_input_keeps_its_sums_out_of_the_prologue() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean()

    centred = trace(Centred(), dict(x=torch.randn(5, 3, dtype=torch.float64)))
    assert worst_error(centred, split_traced(centred), (2, 3)) <= 1e-12
    with pytest.raises(PassError, match=r"aten\.sub"):
        split_traced(centred, gradient_batch=centred.batch)


def test_a_custom_operator_needs_the_word_of_its_author() -> None:
    @torch.library.custom_op("batch_axis_tests::plain", mutates_args=())
    def plain(x: Tensor) -> Tensor:
        return x * 2

    @torch.library.custom_op("batch_axis_tests::tagged", mutates_args=(), tags=(torch.Tag.pointwise,))
    def tagged(x: Tensor) -> Tensor:
        return x * 2

    for operator in (plain, tagged):
        operator.register_fake(torch.empty_like)
    assert output_layout(lambda x, i, w: tagged(x)) == Rows(0)
    with pytest.raises(PassError, match=r"batch_axis_tests.plain.*tags=\(torch.Tag.pointwise,\)"):
        output_layout(lambda x, i, w: plain(x))
