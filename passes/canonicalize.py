"""One spelling per meaning: turns a freshly captured ATen graph into the form that the other passes expect.

In: a functional ATen graph with `meta["val"]`. Out: the same computation in which
- tensor constants are gone where an operator can make them (`aten.full`),
- no operator does nothing but name other strides for the same elements,
- operators that stand for in-place ones (`aten.copy`, random fills, writing a slice) are differentiable, for
  complex numbers too,
- what is squeezed is named,
- there are no assertions, and nothing is computed that no output needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import sympy
import torch
from torch import fx
from torch.nn import functional

from rannc_backend.passes.graph_queries import is_one, size_expression, symbols_in
from rannc_backend.passes.pipeline import GraphPass
from rannc_backend.passes.tracing import inline, trace_function

aten = torch.ops.aten
_OF_KEYS = 1  # torch's number of a mask [rows, tokens]


def attention_of_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`aten._native_multi_head_attention` of dense [rows, tokens, width], which `nn.MultiheadAttention` calls in
    evaluation mode. As one operator its parameters could not be in two stages, as those of training may be.
    """
    sides = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    heads = (functional.linear(*side).unflatten(-1, (num_head, -1)).transpose(1, 2) for side in sides)
    queries, keys, values = heads
    scores = (queries / math.sqrt(embed_dim // num_head)) @ keys.transpose(2, 3)
    if mask is not None:
        masked = mask.to(torch.bool)
        if mask_type == _OF_KEYS:
            masked = masked[:, None, None]
        scores = scores.masked_fill(masked, -math.inf)
    weights = scores.softmax(-1)
    found = functional.linear((weights @ values).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return found, None
    return found, weights.mean(1) if average_attn_weights else weights


def encoder_layer_of_parts(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    *parameters: Any,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """`aten._transformer_encoder_layer_fwd`, which `nn.TransformerEncoderLayer` calls in evaluation mode, likewise."""
    *norms, up_weight, up_bias, down_weight, down_bias = parameters[:8]
    if rest := parameters[8:]:  # given by position
        mask, mask_type = rest

    def normed(value: torch.Tensor, which: int) -> torch.Tensor:
        weight, bias = norms[2 * which : 2 * which + 2]
        return functional.layer_norm(value, (embed_dim,), weight, bias, eps)

    def attended(value: torch.Tensor) -> torch.Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return attention_of_parts(
            value, value, value, embed_dim, num_heads, *weights, mask, need_weights=False, mask_type=mask_type
        )[0]

    def forwarded(value: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(value, up_weight, up_bias)
        hidden = functional.gelu(hidden) if use_gelu else functional.relu(hidden)
        return functional.linear(hidden, down_weight, down_bias)

    if norm_first:
        src = src + attended(normed(src, 0))
        return src + forwarded(normed(src, 1))
    src = normed(src + attended(src), 0)
    return normed(src + forwarded(src), 1)


#: What a trace puts in the place of operators that read the parameters of several layers at once.
IN_PARTS: dict[Any, Callable[..., Any]] = {
    aten._native_multi_head_attention.default: attention_of_parts,
    aten._transformer_encoder_layer_fwd.default: encoder_layer_of_parts,
}


@dataclass(frozen=True, slots=True)
class FoldConstants(GraphPass):
    """Replace constants of one repeated value by `aten.full`, also where they are made in the shape of another
    value, and leave empty ones out of `aten.cat`.

    The ones that autograd begins with have the shape of a sum over the batch, and nothing of its value.
    """

    name: ClassVar[str] = "fold_constants"
    requires: ClassVar[frozenset[str]] = frozenset({"no_assertions"})
    provides: ClassVar[frozenset[str]] = frozenset({"constants_folded"})

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        for node in list(graph.nodes):
            if node.target is aten.lift_fresh_copy.default or node.target is aten.lift_fresh.default:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            elif node.target is aten.cat.default:
                _drop_empty_parts(graph, node)
            elif node.target in _LIKE:
                _fill_like(graph, node)
        graph.eliminate_dead_code()
        for node in list(graph.nodes):
            if node.op == "get_attr":
                _fill_constant(graph_module, node)
        return graph_module


@dataclass(frozen=True, slots=True)
class EraseRestriding(GraphPass):
    """Erase `aten.as_strided` that gives its operand's elements at their places: strides of dimensions of
    size 1 mean nothing. One that takes the same elements of each row (overlapping windows, as Longformer has
    them) becomes a selection.

    torch's own pooling to one element uses it on channels-last operands, and what it does to rows of a batch
    could not be known; nor has it a gradient for sizes that are symbols.
    """

    name: ClassVar[str] = "erase_restriding"
    requires: ClassVar[frozenset[str]] = frozenset({"functional"})
    provides: ClassVar[frozenset[str]] = frozenset({"no_restriding"})

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=aten.as_strided.default):
            value, operand = node.meta["val"], node.args[0].meta["val"]
            if _has_the_elements_of(value, operand):
                node.replace_all_uses_with(node.args[0])
                graph_module.graph.erase_node(node)
            elif steps := _steps_in_each_row(value, operand):
                inner = [int(size) for size in value.shape[1:]]
                inline(node, trace_function(functools.partial(_selected, inner, steps), (node.args[0],), {}))
        return graph_module


@dataclass(frozen=True, slots=True)
class EraseAssertions(GraphPass):
    """Erase run-time assertions: they hold no value, and stages would have to carry their operands."""

    name: ClassVar[str] = "erase_assertions"
    requires: ClassVar[frozenset[str]] = frozenset({"functional"})
    provides: ClassVar[frozenset[str]] = frozenset({"no_assertions"})

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        for node in reversed(list(graph_module.graph.nodes)):
            if node.op == "call_function" and _name(node.target).startswith(
                ("aten::_assert", "aten::sym_constrain")
            ):
                graph_module.graph.erase_node(node)
        graph_module.graph.eliminate_dead_code()
        return graph_module


@dataclass(frozen=True, slots=True)
class DifferentiableFills(GraphPass):
    """Give operators that overwrite a tensor a derivative: `y.copy_(x)` is x in y's shape, `y.normal_()`
    needs no y.

    torch knows derivatives for the in-place spellings only.
    """

    name: ClassVar[str] = "differentiable_fills"
    requires: ClassVar[frozenset[str]] = frozenset({"functional"})
    provides: ClassVar[frozenset[str]] = frozenset({"differentiable_fills"})

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        for node in list(graph.nodes):
            if node.target is aten.copy.default:
                with graph.inserting_before(node):
                    result = _broadcast_copy(graph, node)
                node.replace_all_uses_with(result)
                graph.erase_node(node)
            elif node.target in _RANDOM_FILLS:
                with graph.inserting_before(node):
                    detached = _call(
                        graph, aten.detach.default, (node.args[0],), node, node.args[0].meta["val"]
                    )
                node.args = (detached, *node.args[1:])
        graph.eliminate_dead_code()
        return graph_module


@dataclass(frozen=True, slots=True)
class ComplexScatters(GraphPass):
    """Write slices of complex tensors as pairs of real numbers: torch knows the derivative of
    `aten.slice_scatter` for those only.

    A model that writes `out[:, :k] = z` does not have this operator, whose in-place spelling has a
    derivative: it stands for that.
    """

    name: ClassVar[str] = "complex_scatters"
    requires: ClassVar[frozenset[str]] = frozenset({"functional"})
    provides: ClassVar[frozenset[str]] = frozenset({"differentiable_scatters"})

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        for node in list(graph_module.graph.nodes):
            if node.target in _SCATTERS and node.meta["val"].is_complex():
                inline(
                    node,
                    trace_function(functools.partial(_scatter_pairs, node.target), node.args, node.kwargs),
                )
        return graph_module


@dataclass(frozen=True, slots=True)
class NamedSqueezes(GraphPass):
    """Let `x.squeeze()` and `x.squeeze(dim)` name the dimensions that they leave out: those of one element in the trace.

    Where a graph runs for a slice of one row, the operators as they were would leave out the rows as well.
    """

    name: ClassVar[str] = "named_squeezes"
    requires: ClassVar[frozenset[str]] = frozenset({"functional"})
    provides: ClassVar[frozenset[str]] = frozenset({"named_squeezes"})

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        graph = graph_module.graph
        for node in list(graph.nodes):
            if getattr(node.target, "overloadpacket", None) not in _SQUEEZES:
                continue
            value, *dims = node.args
            shape = value.meta["val"].shape
            named = range(len(shape)) if not dims else dims[0] if isinstance(dims[0], Sequence) else dims
            single = sorted(
                {dim % max(len(shape), 1) for dim in named} & {i for i, n in enumerate(shape) if is_one(n)}
            )
            if single:
                node.target, node.args = aten.squeeze.dims, (value, single)
            else:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
        return graph_module


_SQUEEZES = (aten.squeeze, aten.squeeze_copy)
_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default)
_RANDOM_FILLS = (aten.normal_functional.default, aten.bernoulli.p, aten.bernoulli.Tensor)

_LIKE: Mapping[Any, int | None] = {
    aten.ones_like.default: 1,
    aten.zeros_like.default: 0,
    aten.full_like.default: None,
}

#: In this order; `run_passes(graph_module, CANONICALIZE)`.
CANONICALIZE: Sequence[GraphPass] = (
    EraseAssertions(),
    EraseRestriding(),
    FoldConstants(),
    DifferentiableFills(),
    ComplexScatters(),
    NamedSqueezes(),
)
#: What holds for a traced graph, and what for one that has become canonical.
TRACED = frozenset({"functional"})
CANONICAL = TRACED.union(*(item.provides for item in CANONICALIZE))


def _scatter_pairs(
    operator: Any, value: torch.Tensor, source: torch.Tensor, *places: Any, **named: Any
) -> torch.Tensor:
    """`operator` on real and imaginary parts, which are the last dimension then."""
    options = {
        argument.name: default for argument, default in zip(operator._schema.arguments[2:], places)
    } | named
    for name, given in options.items():
        if name.startswith("dim") and given < 0:
            options[name] = given + value.dim()
    if operator is aten.diagonal_scatter.default:
        options = {"dim1": 0, "dim2": 1, **options}
        pairs = torch.view_as_real(source).transpose(-1, -2)
    else:
        pairs = torch.view_as_real(source)
    return torch.view_as_complex(operator(torch.view_as_real(value), pairs, **options).contiguous())


def _name(target: object) -> str:
    return target.name() if isinstance(target, torch._ops.OpOverload) else ""


def _has_the_elements_of(value: torch.Tensor, operand: torch.Tensor) -> bool:
    """Whether a view of `operand` differs in strides that mean nothing at most."""

    def meaning(tensor: torch.Tensor) -> list[tuple[str, str]]:
        places = [
            (str(size), str(stride)) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        return [(size, "" if size == "1" else stride) for size, stride in places]

    return meaning(value) == meaning(operand) and str(value.storage_offset()) == str(operand.storage_offset())


def _steps_in_each_row(value: torch.Tensor, operand: torch.Tensor) -> tuple[int, ...]:
    """By dimension of `value` behind the first, how far the next element is in a row of `operand` in row-major
    order; () where a view of `operand` is no such selection, or has a gradient as it is.

    The rows must be those of the operand: dimension 0 is as long and as far apart in memory. Inside of one, element
    (i, j, ..) of the view lies i * a + j * b + .. behind the row's first, and element (k, l, ..) of the operand
    k * c + l * d + ..; a, b, c, d may be symbols. Equal places, compared as expressions, are equal elements.
    """
    strides = [size_expression(step) for tensor in (value, operand) for step in tensor.stride()]
    sizes = [size for tensor in (value, operand) for size in tensor.shape[1:]]
    if (
        not all(isinstance(size, int) for size in sizes)
        or not symbols_in(list(value.shape) + list(value.stride()))
        or min(value.dim(), operand.dim()) < 2
        or size_expression(value.shape[0]) != size_expression(operand.shape[0])
        or strides[0] != strides[value.dim()]
        or size_expression(value.storage_offset()) != size_expression(operand.storage_offset())
    ):
        return ()
    own, theirs = _places(value), _places(operand)
    if own is None or theirs is None or own.keys() - theirs.keys():
        return ()
    found = []
    for dim, size in enumerate(value.shape[1:]):
        unit = tuple(int(i == dim) for i in range(value.dim() - 1))
        if size > 1:
            same = np.logical_and.reduce(
                [places.ravel() == (own[term][unit] if term in own else 0) for term, places in theirs.items()]
            )
            found.append(int(same.argmax()) if same.any() else -1)
        else:
            found.append(0)
    numbers = sum(
        (index * step for index, step in zip(np.indices(value.shape[1:]), found, strict=True)),
        np.int64(0),
    )
    if min(found) < 0 or numbers.max() >= math.prod(operand.shape[1:]):
        return ()
    if any((places.ravel()[numbers] != own.get(term, 0)).any() for term, places in theirs.items()):
        return ()
    return tuple(found)


def _places(value: torch.Tensor) -> dict[tuple[tuple[str, int], ...], Any] | None:
    """Where the elements of a row lie, as polynomials in the symbols of the strides: for each term (powers of the
    symbols) its factors; None where a stride is no polynomial.
    """
    strides = [size_expression(step) for step in value.stride()[1:]]
    symbols = sorted(set[Any]().union(*(step.free_symbols for step in strides)), key=str)
    places: dict[tuple[tuple[str, int], ...], Any] = {}
    for index, step in zip(np.indices(value.shape[1:]), strides, strict=True):
        if not step.is_polynomial(*symbols):
            return None
        for powers, factor in sympy.Poly(step, *symbols, sympy.Symbol("one")).terms():
            term = tuple((str(s), n) for s, n in zip(symbols, powers) if n)
            places[term] = places.get(term, 0) + index * int(factor)
    return places


def _selected(inner: Sequence[int], steps: Sequence[int], operand: torch.Tensor) -> torch.Tensor:
    places = torch.zeros([1] * len(inner), dtype=torch.long, device=operand.device)
    for dim, (size, step) in enumerate(zip(inner, steps, strict=True)):
        shape = [size if i == dim else 1 for i in range(len(inner))]
        places = places + (torch.arange(size, device=operand.device) * step).view(shape)
    rows = operand.flatten(1).index_select(1, places.flatten())
    return rows.view(operand.shape[0], *inner)


def _drop_empty_parts(graph: fx.Graph, node: fx.Node) -> None:
    """Key-value caches start as a tensor of shape [0], which `cat` ignores."""
    parts = list(node.args[0])  # type: ignore[arg-type]
    kept = [part for part in parts if not _is_legacy_empty(part.meta["val"])]
    if len(kept) == len(parts) or not kept:
        return
    types = [part.meta["val"].dtype for part in kept]
    if functools.reduce(torch.promote_types, types) != node.meta["val"].dtype:
        return
    if len(kept) > 1:
        node.args = (kept, *node.args[1:])
        return
    (part,) = kept
    value = node.meta["val"]
    if str(part.meta["val"].stride()) != str(value.stride()):
        # Views of the result were chosen for the layout that cat gave it.
        with graph.inserting_before(node):
            part = _call(
                graph, aten.clone.default, (part,), node, value, memory_format=torch.contiguous_format
            )
    node.replace_all_uses_with(part)
    graph.erase_node(node)


def _fill_like(graph: fx.Graph, node: fx.Node) -> None:
    """Only of known sizes: in the shape of rows an operator knows best what it makes."""
    value = node.meta["val"]
    if not all(isinstance(size, int) for size in value.shape) or not value.is_contiguous():
        return
    number = node.args[1] if _LIKE[node.target] is None else _LIKE[node.target]
    with graph.inserting_before(node):
        arguments: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        full = graph.call_function(aten.full.default, (list(value.shape), number), arguments)
    full.meta.update(node.meta)
    node.replace_all_uses_with(full)
    graph.erase_node(node)


def _is_legacy_empty(value: torch.Tensor) -> bool:
    return value.dim() == 1 and isinstance(value.shape[0], int) and value.shape[0] == 0


def _fill_constant(graph_module: fx.GraphModule, node: fx.Node) -> None:
    value = getattr(graph_module, str(node.target))
    if not isinstance(value, torch.Tensor) or not value.numel() or value.layout is not torch.strided:
        return
    first = value.reshape(-1)[0]
    # NaN is not equal to itself, so that such a constant stays as it is.
    if not bool((value == first).all()):
        return
    with graph_module.graph.inserting_before(node):
        arguments: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        full = graph_module.graph.call_function(
            aten.full.default, (list(value.shape), first.item()), arguments
        )
    full.meta.update(node.meta)
    node.replace_all_uses_with(full)
    graph_module.graph.erase_node(node)
    delattr(graph_module, str(node.target))


def _broadcast_copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The values of `aten.copy(like, source)`: source in the type, shape and (contiguous) layout of
    `like`.
    """
    like, source = node.args[0], node.args[1]
    assert isinstance(like, fx.Node) and isinstance(source, fx.Node), "aten.copy takes two tensors"
    value, target = source.meta["val"], node.meta["val"]
    if value.dtype != target.dtype or value.device != target.device:
        value = value.to(dtype=target.dtype, device=target.device)
        kwargs = {"dtype": target.dtype, "device": target.device}
        source = _call(graph, aten._to_copy.default, (source,), node, value, **kwargs)
    if len(value.shape) != len(target.shape) or any(
        str(a) != str(b) for a, b in zip(value.shape, target.shape)
    ):
        sizes = [
            _call(graph, aten.sym_size.int, (like, dim), node, size)
            if isinstance(size, torch.SymInt)
            else size
            for dim, size in enumerate(target.shape)
        ]
        value = value.expand(target.shape)
        source = _call(graph, aten.expand.default, (source, sizes), node, value)
    return _call(graph, aten.clone.default, (source,), node, target, memory_format=torch.contiguous_format)


def _call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], origin: fx.Node, value: object, **kwargs: Any
) -> fx.Node:
    """A new call with the user's line of `origin` and the value `value`."""
    node = graph.call_function(target, args, kwargs)
    node.meta.update({**origin.meta, "val": value})
    return node
