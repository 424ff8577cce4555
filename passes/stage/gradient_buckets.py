"""Let parameter gradients be born where they stay: the backward graph of a stage writes them into views of
gradient buckets.

In: a backward graph (inputs: sizes, saved values, incoming gradients; outputs: gradients, as one flat tuple),
and which outputs are gradients of parameters. Out: a graph with more inputs (the accumulate and one view per
parameter, see `kernels.gradient_writes`) that returns the other outputs only. A matrix product becomes one
that writes or adds to the view itself; so do rows that are added to an embedding table; what Inductor makes
in a kernel of its own is stored by that kernel; the rest is added by one call per group.

Terms. A gradient is a sum of *terms* (a parameter that is used twice has two). A *group* is a run of
gradients, in the order in which they are complete, that are announced together; a large gradient is a group
of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx

from rannc_backend.kernels.gradient_writes import FIRST, LATER
from rannc_backend.passes.graph_queries import arguments_of, is_zeros
from rannc_backend.passes.pipeline import Pass, PassError
from rannc_backend.passes.stage.fused_operators import is_fused

aten = torch.ops.aten
rannc = torch.ops.rannc

GROUP_BYTES = 2**20

_SAME_ELEMENTS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.alias.default,
        aten.detach.default,
    }
)
_CASTS = frozenset({torch.ops.prims.convert_element_type.default, aten._to_copy.default})
_PRODUCTS = frozenset({aten.mm.default, aten.bmm.default})
_SCATTERS = frozenset({aten.index_put.default, aten._unsafe_index_put.default})
# Their gradients are sums of many small numbers per row, which narrower types would round one by one.
_ROW_DTYPES = frozenset({torch.float32, torch.float64})

How = Literal["product", "rows", "fused", "added", "kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketGraph:
    """A backward graph that writes parameter gradients itself.

    Its inputs are those of the given graph, the accumulate, and a view per element of `positions`.
    `how[position]` says how the terms of a gradient get there; `num_calls` is the number of calls of
    operators of `kernels.gradient_writes` that copy.
    """

    graph_module: fx.GraphModule
    positions: tuple[int, ...]
    how: Mapping[int, tuple[How, ...]]
    num_calls: int

    def named_graphs(self) -> dict[str, fx.GraphModule]:
        return {"": self.graph_module}


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteIntoBuckets(Pass[BucketGraph]):
    """The pass of `write_into_buckets`; fields as its arguments."""

    name: ClassVar[str] = "gradient_buckets"
    requires: ClassVar[frozenset[str]] = frozenset({"safe_gradients", "all_outputs", "all_gradients"})
    ends: ClassVar[frozenset[str]] = frozenset({"all_gradients"})
    parameters: Mapping[int, int]
    slots: Mapping[int, Tensor]
    accumulate: Any
    fuse: bool
    group_bytes: int = GROUP_BYTES
    sparse: frozenset[int] = frozenset()

    def run(self, graph_module: fx.GraphModule) -> BucketGraph:
        return write_into_buckets(
            graph_module,
            self.parameters,
            self.slots,
            self.accumulate,
            fuse=self.fuse,
            group_bytes=self.group_bytes,
            sparse=self.sparse,
        )


def write_into_buckets(
    backward: fx.GraphModule,
    parameters: Mapping[int, int],
    slots: Mapping[int, Tensor],
    accumulate: Any,
    *,
    fuse: bool,
    group_bytes: int = GROUP_BYTES,
    sparse: frozenset[int] = frozenset(),
) -> BucketGraph:
    """Copy of `backward` that writes the gradients of parameters into buckets.

    Args:
        parameters: for each output that is a parameter's gradient, the position that the listener is told.
        slots: for each position a tensor (a fake) that looks like the view that will be given.
        accumulate: value of the new input `accumulate` (a SymInt where the graph is compiled).
        fuse: pointwise operators and sums are stored by the kernel that computes them (for Inductor), else
        added by a call.
        group_bytes: gradients are announced when so many bytes are complete, or at the end.
        sparse: positions whose rows the listener keeps; their views are not written.

    Raises:
        PassError: a gradient of `sparse` is made of something else than rows.
    """
    rewriter = _Rewriter(backward, parameters, slots, accumulate, fuse=fuse, group_bytes=group_bytes)
    rewriter.sparse = sparse
    return rewriter.run()


@dataclass(slots=True, kw_only=True)
class _Term:
    """One term: what it is made by, and for a product how the bucket's view looks as its result."""

    how: How
    node: fx.Node
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


class _Rewriter:
    """Builds the graph; members: `slot_nodes` by position, `order` of nodes, `pending` gradients of the open
    group.
    """

    def __init__(
        self,
        backward: fx.GraphModule,
        parameters: Mapping[int, int],
        slots: Mapping[int, Tensor],
        accumulate: Any,
        *,
        fuse: bool,
        group_bytes: int,
    ) -> None:
        self.owner = backward
        self.parameters = parameters
        self.slots = slots
        self.fuse = fuse
        self.group_bytes = group_bytes
        self.sparse: frozenset[int] = frozenset()
        self.graph = fx.Graph()
        results = self.graph.graph_copy(backward.graph, {})
        assert isinstance(results, (tuple, list)), "a backward graph returns a tuple"
        self.results = results
        self.num_calls = 0
        self._add_inputs(accumulate)
        self.returned = tuple(result for index, result in enumerate(results) if index not in parameters)
        self.output = self.graph.output(tuple(results))
        self.order = {node: place for place, node in enumerate(self.graph.nodes)}

    def _add_inputs(self, accumulate: Any) -> None:
        inputs = self.graph.find_nodes(op="placeholder")
        self.slot_nodes: dict[int, fx.Node] = {}
        with (
            self.graph.inserting_after(inputs[-1])
            if inputs
            else self.graph.inserting_before(next(iter(self.graph.nodes)))
        ):
            self.accumulate = self.graph.placeholder("accumulate")
        self.accumulate.meta["val"] = accumulate
        last = self.accumulate
        for position in self.parameters.values():
            with self.graph.inserting_after(last):
                last = self.graph.placeholder(f"bucket_{position}")
            last.meta["val"] = self.slots[position]
            self.slot_nodes[position] = last
        self.last_input = last

    def run(self) -> BucketGraph:
        terms = {
            position: self._terms_of(self.results[index], position)
            for index, position in self.parameters.items()
        }
        # Before anything is taken out: where each gradient's last term is made decides the order in which
        # they are complete.
        complete = sorted(terms, key=lambda position: self.order[terms[position][-1].node])
        how: dict[int, tuple[How, ...]] = {
            position: tuple(term.how for term in found) for position, found in terms.items()
        }
        group: list[tuple[int, _Term | None]] = []
        group_bytes = 0
        for number, position in enumerate(complete):
            *earlier, last = terms[position]
            for term in earlier:
                self._write(position, term, self.accumulate if term is terms[position][0] else LATER)
            is_first = not earlier
            waits = last.how == "added" and is_first
            if not waits:
                self._write(position, last, self.accumulate if is_first else LATER)
            group.append((position, last if waits else None))
            group_bytes += _bytes(self.slots[position])
            if group_bytes >= self.group_bytes or number + 1 == len(complete):
                self._close(group, last.node)
                group, group_bytes = [], 0
        self.output.args = (self.returned,)
        self.graph.eliminate_dead_code()
        return BucketGraph(
            graph_module=fx.GraphModule(self.owner, self.graph),
            positions=tuple(self.slot_nodes),
            how=how,
            num_calls=self.num_calls,
        )

    def _terms_of(self, result: fx.Node, position: int) -> list[_Term]:
        """The terms of a gradient in the order in which the graph makes them."""
        if position in self.sparse:
            return self._kept_terms(result)
        slot = self.slots[position]
        found: list[_Term] = []
        open_nodes = [(result, tuple(slot.shape), tuple(slot.stride()))]
        while open_nodes:
            node, size, stride = open_nodes.pop()
            own = self._used_once(node) and node.op == "call_function"
            if own and _is_sum(node) and all(_like(argument, node) for argument in node.args):
                open_nodes += [(argument, size, stride) for argument in arguments_of(node)]
                continue
            found.append(
                self._product(node, slot, size, stride) or self._rows(node, slot) or self._other(node, slot)
            )
        return sorted(found, key=lambda term: self.order[term.node])

    def _kept_terms(self, result: fx.Node) -> list[_Term]:
        """The look-ups that a gradient of rows is made of, in the order of the graph."""
        found: list[_Term] = []
        open_nodes = [result]
        while open_nodes:
            node = open_nodes.pop()
            if node.op == "call_function" and _is_sum(node):
                open_nodes += arguments_of(node)
            elif node.op == "call_function" and _scatter_of(node) is not None:
                found.append(_Term(how="kept", node=node))
            elif node.op == "call_function" and node.target in _CASTS:
                open_nodes.append(arguments_of(node)[0])
            else:
                raise PassError(
                    node, "a sparse gradient has more than rows here; set the option sparse_gradients='dense'"
                )
        return sorted(found, key=lambda term: self.order[term.node])

    def _used_once(self, node: fx.Node) -> bool:
        return len(node.users) == 1 and self._num_returns(node) <= 1

    def _num_returns(self, node: fx.Node) -> int:
        return sum(result is node for result in self.results)

    def _product(
        self, node: fx.Node, slot: Tensor, size: Sequence[int], stride: Sequence[int]
    ) -> _Term | None:
        """A term that a matrix product makes, seen through views that nobody else uses; None if it is
        something else.
        """
        look = torch.empty_strided(size, stride, dtype=slot.dtype, device="meta")
        while node.op == "call_function" and self._used_once(node) and node.meta["val"].dtype == slot.dtype:
            if node.target in _PRODUCTS:
                if not _writable(look, node.meta["val"]):
                    return None
                return _Term(how="product", node=node, size=tuple(look.shape), stride=look.stride())
            source = node.args[0] if node.args else None
            if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), Tensor):
                return None
            seen = _undone(node, look, source.meta["val"])
            if seen is None:
                return None
            node, look = source, seen
        return None

    def _rows(self, node: fx.Node, slot: Tensor) -> _Term | None:
        """A term that adds rows to an empty embedding table; None if it is something else."""
        if (
            node.op != "call_function"
            or not self._used_once(node)
            or slot.dtype not in _ROW_DTYPES
            or not slot.is_contiguous()
        ):
            return None
        scatter = _scatter_of(node)
        if scatter is None or node.meta["val"].shape != slot.shape:
            return None
        index, rows = scatter.index.meta["val"], scatter.rows.meta["val"]
        fits = (
            index.dtype in (torch.int32, torch.int64)
            and rows.dtype == slot.dtype
            and tuple(rows.shape) == (*index.shape, *slot.shape[1:])  # a row for each index, none broadcast
        )
        return _Term(how="rows", node=node) if fits else None

    def _other(self, node: fx.Node, slot: Tensor) -> _Term:
        fits = self.fuse and not slot.is_complex()
        return _Term(how="fused" if fits and is_fused(node) else "added", node=node)

    def _call_behind(
        self, anchor: fx.Node, target: Any, arguments: tuple[Any, ...], value: Tensor | None, **options: Any
    ) -> fx.Node:
        """A call behind `anchor`, and behind what was put there before."""
        place = self.last_input if anchor.op == "placeholder" else anchor
        while place.next.op == "call_function" and place.next not in self.order:
            place = place.next
        with self.graph.inserting_after(place):
            node = self.graph.call_function(target, arguments, options)
        node.meta["val"] = value
        return node

    def _write(self, position: int, term: _Term, accumulate: fx.Node | int) -> None:
        bucket, node = self.slot_nodes[position], term.node
        match term.how:
            case "product":
                arguments = (bucket, list(term.size), list(term.stride), *node.args, accumulate)
                self._call_behind(node, rannc.write_product_.default, arguments, None)
            case "rows":
                self._write_rows(bucket, node, accumulate)
            case "added":
                self._call_behind(node, rannc.write_gradients_.default, ([bucket], [node], accumulate), None)
                self.num_calls += 1
            case "fused":
                self._store(bucket, node, accumulate)
            case "kept":
                scatter = _scatter_of(node)
                assert scatter is not None, "a term of rows scatters rows"
                kept = (bucket, scatter.index, scatter.rows, scatter.mask, scatter.padding_index, position)
                self._call_behind(node, rannc.keep_rows_.default, kept, None)

    def _write_rows(self, bucket: fx.Node, node: fx.Node, accumulate: fx.Node | int) -> None:
        scatter = _scatter_of(node)
        assert scatter is not None, "a term of rows scatters rows"
        index, rows = scatter.index, scatter.rows
        if scatter.mask is not None:
            # As operators that Inductor computes with what made the rows.
            old, numbers = rows.meta["val"], index.meta["val"]
            nothing = self._number(node, 0, old.dtype, old)
            rows = self._call_behind(
                node, aten.where.self, (scatter.mask, rows, nothing), torch.empty_like(old)
            )
            index = self._call_behind(node, aten.clamp_min.default, (index, 0), torch.empty_like(numbers))
            index = self._call_behind(
                node,
                aten.clamp_max.default,
                (index, bucket.meta["val"].shape[0] - 1),
                torch.empty_like(numbers),
            )
        self._call_behind(
            node, rannc.write_rows_.default, (bucket, index, rows, scatter.padding_index, accumulate), None
        )

    def _store(self, bucket: fx.Node, gradient: fx.Node, accumulate: fx.Node | int) -> None:
        """bucket = gradient, or bucket + gradient, as operators that Inductor computes in the kernel of
        `gradient`.
        """
        anchor, old = gradient, bucket.meta["val"]
        if gradient.meta["val"].dtype != old.dtype:
            cast = torch.ops.prims.convert_element_type.default
            gradient = self._call_behind(
                anchor, cast, (gradient, old.dtype), torch.empty_like(gradient.meta["val"], dtype=old.dtype)
            )
        total = self._call_behind(anchor, aten.add.Tensor, (bucket, gradient), torch.empty_like(old))
        if accumulate != LATER:
            number = self._number(anchor, accumulate, torch.int64, old)
            is_first = self._call_behind(
                anchor, aten.eq.Scalar, (number, FIRST), old.new_empty((), dtype=torch.bool)
            )
            # Not a product with 0: the memory may hold NaN.
            total = self._call_behind(
                anchor, aten.where.self, (is_first, gradient, total), torch.empty_like(old)
            )
        self._call_behind(anchor, aten.copy_.default, (bucket, total), old)

    def _number(self, anchor: fx.Node, number: Any, dtype: torch.dtype, like: Tensor) -> fx.Node:
        options = {"dtype": dtype, "device": like.device, "pin_memory": False}
        return self._call_behind(
            anchor, aten.full.default, ([], number), like.new_empty((), dtype=dtype), **options
        )

    def _close(self, group: Sequence[tuple[int, _Term | None]], anchor: fx.Node) -> None:
        """Add what waits, in one call, and announce the group."""
        waiting = [(self.slot_nodes[position], term.node) for position, term in group if term is not None]
        if waiting:
            buckets, gradients = ([pair[side] for pair in waiting] for side in (0, 1))
            self._call_behind(
                anchor, rannc.write_gradients_.default, (buckets, gradients, self.accumulate), None
            )
            self.num_calls += 1
        positions = [position for position, _ in group]
        arguments = ([self.slot_nodes[position] for position in positions], positions)
        self._call_behind(anchor, rannc.gradients_made_.default, arguments, None)


def _is_sum(node: fx.Node) -> bool:
    return (
        node.target is aten.add.Tensor
        and not node.kwargs
        and all(isinstance(argument, fx.Node) for argument in node.args)
    )


def _like(argument: Any, node: fx.Node) -> bool:
    """Whether an operand of a sum is neither broadcast nor cast."""
    value, total = argument.meta["val"], node.meta["val"]
    return isinstance(value, Tensor) and value.shape == total.shape and value.dtype == total.dtype


def _undone(node: fx.Node, look: Tensor, source: Tensor) -> Tensor | None:
    """`look` is memory seen as the result of a view; the same memory seen as its operand, or None if it
    cannot be.
    """
    if node.target is aten.permute.default:
        dims = arguments_of(node)[1]
        inverse = sorted(range(len(dims)), key=lambda dim: dims[dim] % look.dim())
        return look.permute(inverse)
    if node.target is aten.t.default:
        return look.t()
    if node.target is aten.transpose.int:
        return look.transpose(*arguments_of(node)[1:])
    if node.target in _SAME_ELEMENTS and all(isinstance(size, int) for size in source.shape):
        try:
            return look.view(source.shape)
        except (RuntimeError, ValueError):  # of torch's kernels, and of its shape functions
            return None
    return None


def _writable(look: Tensor, product: Tensor) -> bool:
    """Whether a matrix product can write `look` without a copy: one of the two matrix dimensions has stride
    1, nothing overlaps.
    """
    if tuple(look.shape) != tuple(product.shape) or not all(isinstance(size, int) for size in product.shape):
        return False
    *batch, rows, columns = look.stride()
    num_rows, num_columns = look.shape[-2:]
    by_rows = columns == 1 and rows >= max(1, num_columns)
    by_columns = rows == 1 and columns >= max(1, num_rows)
    if not by_rows and not by_columns:
        return False
    span = (num_rows - 1) * rows + (num_columns - 1) * columns + 1
    return not batch or look.shape[0] == 1 or batch[0] >= span


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scatter:
    """Rows that are added to an empty table: all but those of `padding_index`, or those where `mask` is
    true.
    """

    index: fx.Node
    rows: fx.Node
    mask: fx.Node | None = None
    padding_index: int = -1


def _scatter_of(node: fx.Node) -> _Scatter | None:
    if node.target is aten.embedding_dense_backward.default:
        rows, index, _, padding_index, by_frequency = arguments_of(node)
        return None if by_frequency else _Scatter(index=index, rows=rows, padding_index=padding_index)
    if node.target is aten._unsafe_masked_index_put_accumulate.default:
        table, mask, indices, rows = arguments_of(node)
    elif node.target in _SCATTERS and len(node.args) == 4 and node.args[3] is True:
        table, indices, rows, _ = arguments_of(node)
        mask = None
    else:
        return None
    if not is_zeros(table) or len(indices) != 1 or not isinstance(indices[0], fx.Node):
        return None
    return _Scatter(index=indices[0], rows=rows, mask=mask)


def _bytes(slot: Tensor) -> int:
    return math.prod(slot.shape) * slot.element_size()
