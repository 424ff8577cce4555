"""Batch-axis rules for operators that compute: elementwise, contractions, reductions, normalisations,
windows, attention.

In: an operator_call.Call with at least one argument that holds rows. Out: the layout of the result (for
results that are
tuples: one layout for all elements with rows, or `Several`). A rule raises PassError when the operator mixes
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import fx

from rannc_backend.passes.batch.batch_axis_indexing import INDEX_RULES
from rannc_backend.passes.batch.batch_axis_views import STRUCTURE_RULES, Rule
from rannc_backend.passes.batch.counted_keys import key_counts
from rannc_backend.passes.batch.layouts import Constant, Layout, PartialSum, Rows, Several, SliceStatistic
from rannc_backend.passes.batch.operator_call import Call, rows_dims, wrap_dims
from rannc_backend.passes.batch.orders import sorted_rows


def elementwise(call: Call) -> Layout:
    """Every tensor argument is broadcast to the result."""
    values = call.value if isinstance(call.value, (tuple, list)) else (call.value,)
    ndim = values[0].ndim
    merged: Rows | None = None
    for node in call.tensors():
        layout = call.rows(node)
        if layout is not None:
            shift = ndim - call.ndim(node)
            merged = call.merge(
                merged, Rows(layout.dim + shift, layout.outer, layout.inner, uniform=layout.uniform)
            )
    if merged is None or len(rows_dims(values[0], call.symbol)) != 1:
        call.refuse_mixing("it combines different rows with each other")
    return merged


def like(call: Call) -> Layout:
    """zeros_like and friends: only the shape of the argument matters."""
    layout = call.rows(call["self"])
    assert layout is not None
    return Rows(layout.dim, layout.outer, layout.inner, uniform=not call.name.startswith("aten.rand"))


def first_only(call: Call) -> Layout:
    """Elementwise in the first tensor; everything else must be without rows."""
    first, *others = call.tensors()
    for node in others:
        if call.rows(node) is not None:
            call.refuse(f"gets rows of the batch as {node}")
    layout = call.rows(first)
    assert layout is not None
    return Rows(layout.dim, layout.outer, layout.inner)


def along(call: Call, *, name: str = "dim") -> Layout:
    """Works along one or several dimensions and keeps them."""
    layout = call.rows(call["self"])
    assert layout is not None
    if layout.dim in wrap_dims(call[name], call.ndim(call["self"])):
        call.refuse_mixing(f"it works along the batch dimension, {layout.dim}")
    return Rows(layout.dim, layout.outer, layout.inner)


def sort(call: Call) -> Layout:
    layout = call.rows(call["self"])
    if layout is not None and layout.dim == call.dim("dim", call.ndim(call["self"])):
        return sorted_rows(call)
    return along(call)


def reduction(call: Call, *, is_sum: bool = False) -> Layout:
    """Reduces the dimensions `dim` (all without it)."""
    layout = call.rows(call["self"])
    assert layout is not None
    ndim = call.ndim(call["self"])
    dims = wrap_dims(call.arguments.get("dim"), ndim)
    if layout.dim in dims:
        if is_sum:
            return PartialSum()
        call.refuse_mixing(f"it reduces the batch dimension, {layout.dim}, and is no sum")
    keep = call.arguments.get("keepdim", False)
    return Rows(
        layout.dim - (0 if keep else sum(dim < layout.dim for dim in dims)), layout.outer, layout.inner
    )


def last_dims(call: Call, *, num_dims: int) -> Layout:
    """Works on the last `num_dims` dimensions of all its arguments, whatever stands before them."""
    merged: Rows | None = None
    for node in call.tensors():
        layout = call.rows(node)
        if layout is None:
            if call.ndim(node) > num_dims:
                call.refuse(f"pairs rows of the batch with {node}, which has none")
            continue
        if layout.dim >= call.ndim(node) - num_dims:
            call.refuse_mixing(f"it works along the batch dimension, {layout.dim}")
        merged = call.merge(merged, layout)
    assert merged is not None
    return Rows(merged.dim, merged.outer, merged.inner)


def contraction(call: Call, *, spec: str, operands: tuple[str, ...], bias: str | None = None) -> Layout:
    """A product of two tensors by einsum letters; a contraction over rows is a sum over the batch."""
    inputs, output = spec.split("->")
    found: dict[str, Rows] = {}
    for letters, name in zip(inputs.split(","), operands):
        layout = call.rows(call[name])
        if layout is not None:
            letter = letters[layout.dim]
            here = Rows(0, layout.outer, layout.inner, uniform=layout.uniform)
            merged = call.merge(found.get(letter), here)
            assert merged is not None
            found[letter] = merged
    if len(found) > 1:
        call.refuse_mixing("it multiplies rows with each other")
    bias_rows = call.rows(call[bias]) if bias else None
    if not found:
        call.refuse("adds rows of the batch to a product that has none")
    letter, layout = next(iter(found.items()))
    if letter not in output:
        if sum(letter in letters for letters in inputs.split(",")) != sum(
            call.rows(call[name]) is not None for name in operands
        ):
            call.refuse_mixing("it contracts the batch dimension with a value that has none")
        if bias is not None:
            call.refuse_mixing("it sums over the batch and adds to the sum")
        return PartialSum()
    result = Rows(output.index(letter), layout.outer, layout.inner)
    if bias is not None and bias_rows is not None:
        shift = call.value.ndim - call.ndim(call[bias])
        call.merge(
            result, Rows(bias_rows.dim + shift, bias_rows.outer, bias_rows.inner, uniform=bias_rows.uniform)
        )
    return result


def linear(call: Call) -> Layout:
    call.constant("weight", "bias")
    layout = call.rows(call["input"])
    assert layout is not None
    if layout.dim == call.ndim(call["input"]) - 1:
        call.refuse_mixing("it contracts the batch dimension")
    return Rows(layout.dim, layout.outer, layout.inner)


def convolution(call: Call) -> Layout:
    call.constant("weight", "bias")
    layout = call.rows(call["input"])
    if layout is None or layout.dim != 0:
        call.refuse_mixing("it convolves over the batch dimension; it must be the first one")
    return Rows(0, layout.outer, layout.inner)


def _first_dim(call: Call, name: str) -> Rows:
    layout = call.rows(call[name])
    if layout is None or layout.dim != 0:
        call.refuse_mixing("the batch dimension is not the first one of its input")
    return Rows(0, layout.outer, layout.inner)


def layer_norm(call: Call, *, shape: str = "normalized_shape") -> Layout:
    call.constant("weight", *(("bias",) if "bias" in call.arguments else ()))
    layout = call.rows(call["input"])
    assert layout is not None
    if layout.dim >= call.ndim(call["input"]) - len(call[shape]):
        call.refuse_mixing("it normalises over the batch dimension")
    return Rows(layout.dim, layout.outer, layout.inner)


def group_norm(call: Call) -> Layout:
    call.constant("weight", "bias")
    return _first_dim(call, "input")


def batch_norm(call: Call) -> Layout:
    """In training, by the stated rule: statistics of one slice; they may only become buffers.

    With rows in the channel dimension (instance norm) every row has its own statistics.
    """
    layout = call.rows(call["input"])
    assert layout is not None
    call.constant(*(name for name in ("running_mean", "running_var") if name in call.arguments))
    if layout.dim == 1:
        per_channel = Rows(0, layout.outer, layout.inner)
        for name in ("weight", "bias"):
            call.merge(per_channel, call.rows(call[name]))
        result = Rows(1, layout.outer, layout.inner)
        return Several((result, *(per_channel for _ in call.value[1:])))
    call.constant("weight", "bias")
    layout = _first_dim(call, "input")
    training = call.arguments.get("training", call.arguments.get("train", "no_training" not in call.name))
    if not training:
        return Several((layout, *(Constant() for _ in call.value[1:])))
    return Several((layout, *(SliceStatistic() for _ in call.value[1:])))


def attention(call: Call) -> Layout:
    """Fused attention on [batch, heads, length, width]; the batch may be a factor of either of the first
    two.
    """
    merged: Rows | None = None
    for name in ("query", "key", "value"):
        layout = call.rows(call[name])
        if layout is None or layout.dim >= call.ndim(call[name]) - 2:
            call.refuse_mixing(f"its argument {name!r} has no batch dimension before the last two")
        merged = call.merge(merged, layout)
    assert merged is not None
    for name in ("attn_mask", "attn_bias"):
        argument = call.arguments.get(name)
        if isinstance(argument, fx.Node) and (layout := call.rows(argument)) is not None:
            merged = call.merge(
                merged, Rows(layout.dim + 4 - call.ndim(argument), layout.outer, layout.inner)
            )
    return merged


def _table(rule: Callable[..., Layout], names: str, **options: object) -> dict[str, Rule]:
    bound = partial(rule, **options) if options else rule
    return dict.fromkeys(names.split(), bound)


#: by operator name without "aten."; operators tagged pointwise need no entry
def recurrent(call: Call) -> Layout:
    """A loop over tokens, each row by itself; states have rows as their second dimension."""
    rows = call.rows(call["input"])
    dim = 0 if call["batch_first"] else 1
    if rows is not None and rows.dim != dim:
        call.refuse_mixing("it goes from row to row as from token to token")
    call.constant("weights")
    merged = None if rows is None else Rows(1, rows.outer, rows.inner)
    for state in call["states"]:
        found = call.rows(state)
        if found is not None and found.dim != 1:
            call.refuse_mixing("it takes rows for layers")
        merged = call.merge(merged, found)
    lengths = None if call["lengths"] is None else call.rows(call["lengths"])
    if lengths is not None:
        merged = call.merge(merged, Rows(1, lengths.outer, lengths.inner))
    assert merged is not None, f"{call.node} holds no rows"
    states = Rows(1, merged.outer, merged.inner)
    return Several((Rows(dim, merged.outer, merged.inner), *(states for _ in call["states"])))


def ctc(call: Call) -> Layout:
    """A loss per row of scores [tokens, rows, classes], targets [rows, tokens] and lengths [rows]."""
    merged = None
    for name, dim in (("log_probs", 1), ("targets", 0), ("input_lengths", 0), ("target_lengths", 0)):
        found = call.rows(call[name])
        if found is not None and found.dim != dim:
            call.refuse_mixing(f"it takes rows of {name} for something else")
        merged = call.merge(merged, None if found is None else Rows(0, found.outer, found.inner))
    assert merged is not None, f"{call.node} holds no rows"
    return merged


RULES: dict[str, Rule] = {
    **STRUCTURE_RULES,
    **INDEX_RULES,
    **_table(
        elementwise,
        "_to_copy native_dropout bernoulli copy log_sigmoid_forward _prelu_kernel polar complex normal "
        "normal_functional uniform exponential dropout rrelu_with_noise_functional mse_loss smooth_l1_loss "
        "huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss angle real imag "
        "view_as _fused_dropout",
    ),
    **_table(like, "zeros_like ones_like full_like empty_like rand_like randn_like randint_like fill"),
    **_table(first_only, "bucketize isin one_hot"),
    **_table(
        along,
        "_softmax _log_softmax softmax log_softmax _safe_softmax cumsum cumprod logcumsumexp cummax cummin "
        "argsort topk glu _fft_r2c _fft_c2c _fft_c2r",
    ),
    **_table(sort, "sort"),
    **_table(key_counts, "histc"),
    **_table(along, "flip roll", name="dims"),
    **_table(along, "unfold", name="dimension"),
    **_table(reduction, "sum nansum", is_sum=True),
    **_table(
        reduction,
        "mean amax amin max min argmax argmin aminmax var std var_mean std_mean prod any all logsumexp "
        "linalg_vector_norm norm kthvalue median nanmedian mode count_nonzero",
    ),
    **_table(
        last_dims,
        "max_pool1d avg_pool1d adaptive_avg_pool1d upsample_nearest1d _upsample_nearest_exact1d",
        num_dims=1,
    ),
    **_table(last_dims, "upsample_linear1d reflection_pad1d replication_pad1d ", num_dims=1),
    **_table(
        last_dims,
        "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d "
        "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad2d replication_pad2d tril triu "
        "linalg_inv_ex linalg_cholesky_ex linalg_qr _linalg_svd _linalg_eigh _cdist_forward _linalg_det "
        "_linalg_slogdet linalg_lu_factor_ex linalg_matrix_exp cholesky_inverse col2im trace "
        "_linalg_solve_ex linalg_solve_triangular cholesky_solve",
        num_dims=2,
    ),
    **_table(
        last_dims,
        "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d "
        "upsample_nearest3d upsample_trilinear3d reflection_pad3d replication_pad3d pixel_shuffle "
        "pixel_unshuffle im2col grid_sampler_2d",
        num_dims=3,
    ),
    **_table(last_dims, "grid_sampler_3d", num_dims=4),
    **_table(recurrent, "rannc_recurrent.layers"),
    **_table(ctc, "rannc_ctc.losses"),
    **_table(contraction, "mm", spec="ik,kj->ij", operands=("self", "mat2")),
    **_table(contraction, "addmm", spec="ik,kj->ij", operands=("mat1", "mat2"), bias="self"),
    **_table(
        contraction, "_trilinear", spec="ni,oij,nj->no", operands=("i1", "i2", "i3")
    ),  # as nn.Bilinear calls it: its only caller
    **_table(contraction, "bmm", spec="bik,bkj->bij", operands=("self", "mat2")),
    **_table(contraction, "baddbmm", spec="bik,bkj->bij", operands=("batch1", "batch2"), bias="self"),
    **_table(contraction, "mv", spec="ik,k->i", operands=("self", "vec")),
    **_table(contraction, "addmv", spec="ik,k->i", operands=("mat", "vec"), bias="self"),
    **_table(contraction, "dot", spec="k,k->", operands=("self", "tensor")),
    **_table(contraction, "vdot", spec="k,k->", operands=("self", "other")),
    **_table(contraction, "outer ger", spec="i,j->ij", operands=("self", "vec2")),
    **_table(linear, "linear"),
    **_table(convolution, "convolution _convolution mkldnn_convolution cudnn_convolution"),
    **_table(layer_norm, "native_layer_norm layer_norm _fused_rms_norm rms_norm"),
    **_table(group_norm, "native_group_norm"),
    **_table(
        batch_norm,
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
        "_native_batch_norm_legit_no_training cudnn_batch_norm _batch_norm_with_update "
        "_batch_norm_with_update_functional _batch_norm_no_update",
    ),
    **_table(
        attention,
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention",
    ),
}
