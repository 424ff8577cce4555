"""Values that the code of a forward reads and decides by (`if mask.all()`, `lengths.max().item()`), for the
batch of all ranks.

In: a tensor in a trace. Out: a `ReadValue`: the part of the graph that gives it, which is evaluated apart from
the step. What one process would read is computed from the whole batch: each rank computes the part that goes
row by row on its own rows, the ranks exchange what follows from it, and each computes the rest. An `any`,
`all`, `max` or `min` over all elements of such a value is taken on each rank first, as it is the same over the
results as over the elements; so is a sum of integers.

What is private to torch here: the proxy of a traced tensor, and how modes are left (seen on torch 2.13.0; see
tests/unit/rannc_backend/capture/nonstrict/test_read_values.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

from rannc_backend.capture.aten_trace import traced_node
from rannc_backend.capture.inputs import StateTensor, TensorInput
from rannc_backend.capture.nonstrict.arguments import Exchange
from rannc_backend.errors import RanksDifferError, UnsupportedModelError, needing_value
from rannc_backend.ir.length import LengthDims
from rannc_backend.passes.batch.batch_axis import Meeting, analyze_batch_axis, is_random
from rannc_backend.passes.batch.layouts import Constant, Layout, RowCount, RowIndex, Rows, Several
from rannc_backend.passes.canonicalize import CANONICALIZE, TRACED
from rannc_backend.passes.graph_copy import GraphBuilder
from rannc_backend.passes.graph_queries import nodes_behind, placeholders, size_expression
from rannc_backend.passes.pipeline import run_passes, with_facts

aten = torch.ops.aten
_MAX_NUMBERS = 65_536  # that a rank sends for one value
_OVER_ALL = frozenset(
    {
        aten.any.default,
        aten.all.default,
        aten.max.default,
        aten.min.default,
        aten.amax.default,
        aten.amin.default,
    }
)
_OF_NOTHING = frozenset({aten.any.default, aten.all.default, aten.sum.default})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadValue:
    """See the module docstring.

    Members:
        graph: gives the tensor from those inputs of the capture that it depends on.
        inputs: indices of these, in the order of its placeholders; of a length, behind which dimension of an
            input has it.
        layouts: of its values; `meeting`: those that depend on samples of several rows.
        lengths: of the capture: symbol, and the input and dimension that has it.
        location: of the user's line.
    """

    graph: fx.GraphModule
    inputs: tuple[int | tuple[int, int], ...]
    layouts: Mapping[str, Layout]
    meeting: frozenset[str]
    rows_symbol: sympy.Symbol
    lengths: tuple[tuple[sympy.Symbol, tuple[int, int]], ...]
    location: str

    @property
    def key(self) -> str:
        """Equal for equal questions."""
        return f"{self.inputs} {self.graph.code}"

    @property
    def has_rows(self) -> bool:
        """Whether it depends on the batch."""
        return any(isinstance(layout, Rows) for layout in self.layouts.values())

    def evaluate(self, tensors: Sequence[torch.Tensor | None], exchange: Exchange) -> Any:
        """The value, as plain numbers, for the batch of all ranks. Collective where it has inputs.

        `tensors`: all inputs of the capture; None for one that is not on this rank.

        Raises:
            UnsupportedModelError: no rank has the parameters and buffers that it depends on.
        """
        operands = [_operand(tensors, source) for source in self.inputs]
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            if not operands:
                return self._run(operands, {}).tolist()
            if not self.has_rows:
                known = all(operand is not None for operand in operands)
                answers = exchange([self._run(operands, {}).tolist()] if known else None)
                found = next((answer for answer in answers if answer is not None), None)
                if found is None:
                    raise _spread(self.location)
                return found[0]
            if any(operand is None for operand in operands):
                raise _spread(self.location)
            own = {symbol: _operand(tensors, place) for symbol, place in self.lengths}
            answers = exchange({**self._own_part(operands), "lengths": list(own.values())})
            sizes = own | {self.rows_symbol: sum(answer["rows"] for answer in answers)}
            lengths = [str(answer["lengths"]) for answer in answers]
            if len(set(lengths)) > 1:
                raise RanksDifferError("the lengths of the inputs", value_by_rank=lengths)
            return self._run(operands, self._joined(answers), sizes).tolist()

    def _own_part(self, operands: Sequence[Any]) -> dict[str, Any]:
        """What the values of rows, on this rank, give to the rest: by name of the node."""
        env = self._environment(operands)
        num_rows = next(
            int(value.shape[0]) for node, value in env.items() if isinstance(self.layouts[node.name], Rows)
        )
        sent: dict[str, torch.Tensor] = {}
        for node in self.graph.graph.nodes:
            if self._is_local(node):
                if node.op != "placeholder":
                    env[node] = _computed(node, env, self.graph)
                if self._is_sent(node):
                    sent[node.name] = env[node]
            elif _is_over_all(node) and self._is_row_value(node.args[0]):
                if env[node.args[0]].numel() or node.target in _OF_NOTHING:
                    sent[node.name] = _computed(node, env, self.graph)
        number = sum(value.numel() for value in sent.values())
        if number > _MAX_NUMBERS:
            raise _refused(f"is made of {number} numbers of this rank's rows", self.location)
        values = {name: (list(value.shape), value.flatten().tolist()) for name, value in sent.items()}
        return {"rows": num_rows, "values": values}

    def _joined(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """The values of all ranks for what each has sent."""
        joined = {}
        for node in self.graph.graph.nodes:
            sent = [answer for answer in answers if node.name in answer["values"]]
            if not sent:
                continue
            dtype, layout = node.meta["val"].dtype, self.layouts[node.name]
            parts = [answer["values"][node.name] for answer in sent]
            tensors = [torch.tensor(numbers, dtype=dtype).view(shape) for shape, numbers in parts]
            if self._is_row_value(node):
                assert isinstance(layout, Rows)
                joined[node.name] = _concatenated(tensors, layout, [answer["rows"] for answer in sent])
            else:
                joined[node.name] = cast("Any", node.target)(torch.stack(tensors), **node.kwargs)
        return joined

    def _run(
        self,
        operands: Sequence[Any],
        joined: Mapping[str, torch.Tensor],
        sizes: Mapping[sympy.Symbol, int] | None = None,
    ) -> torch.Tensor:
        """The value of the graph; with the sizes of the whole batch, what `joined` has is given in place of rows."""
        env = self._environment(operands)
        device = next((operand.device for operand in operands if isinstance(operand, torch.Tensor)), "cpu")
        known = {symbol: sympy.Integer(size) for symbol, size in (sizes or {}).items()}
        for node in self.graph.graph.nodes:
            if node.op == "output":
                return env[node.args[0][0]]
            if node.name in joined:
                env[node] = joined[node.name].to(device)
            elif known and isinstance(node.meta.get("val"), torch.SymInt):
                env[node] = int(size_expression(node.meta["val"]).xreplace(known))
            elif node.op != "placeholder" and (sizes is None or not self._is_row_value(node)):
                env[node] = _computed(node, env, self.graph)
        raise AssertionError("a graph without an output")

    def _environment(self, operands: Sequence[Any]) -> dict[fx.Node, Any]:
        return dict(zip(placeholders(self.graph.graph), operands, strict=True))

    def _is_local(self, node: fx.Node) -> bool:
        """Whether this rank's rows give its part of the value."""
        return node.name not in self.meeting and all(
            isinstance(layout, Rows | Constant | RowCount | RowIndex) for layout in self._layouts_of(node)
        )

    def _layouts_of(self, node: fx.Node) -> tuple[Layout | None, ...]:
        """Of a list (`x.chunk(2, 1)`), that of each of its elements."""
        layout = self.layouts.get(node.name)
        return layout.elements if isinstance(layout, Several) else (layout,)

    def _is_row_value(self, node: Any) -> bool:
        return (
            isinstance(node, fx.Node)
            and self._is_local(node)
            and any(isinstance(layout, Rows) for layout in self._layouts_of(node))
        )

    def _is_sent(self, node: fx.Node) -> bool:
        return isinstance(self.layouts.get(node.name), Rows) and any(
            self._is_local(node) and (user.op == "output" or not (self._is_local(user) or _is_over_all(user)))
            for user in node.users
        )


@dataclass(frozen=True, slots=True)
class TracedValue:
    """A tensor of the trace that runs, as it is now."""

    node: fx.Node
    graph: fx.Graph
    root: torch.nn.Module

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TracedValue | None:
        """None where nothing is traced."""
        node, mode = traced_node(tensor), cast("Any", get_proxy_mode())
        return None if node is None else cls(node, mode.tracer.graph, mode.tracer.root)


def count_of(tensor: torch.Tensor, dim: int) -> TracedValue | None:
    """How long a dimension is that depends on data, as a tensor of the trace; None where others do too."""
    others = [size for place, size in enumerate(tensor.shape) if place != dim]
    if not all(isinstance(size, int) and size for size in others):
        return None
    total = torch.ones_like(tensor, dtype=torch.long).sum()
    return TracedValue.of(total // math.prod(others))


def read_value(
    traced: TracedValue,
    inputs: Sequence[TensorInput],
    batch_positions: frozenset[int],
    lengths: LengthDims,
    rows_symbol: sympy.Symbol,
    location: str,
) -> ReadValue:
    """What gives a tensor of a trace.

    Raises:
        UnsupportedModelError: it depends on random numbers, or on the batch and on parameters: to compute it,
            a rank would need stages of the model that it does not have.
    """
    behind = nodes_behind([traced.node]) | {traced.node}
    known = placeholders(traced.graph)
    num_lengths = len(lengths.hints)
    used = [index - num_lengths for index, node in enumerate(known) if node in behind]
    builder = GraphBuilder(traced.root)
    for node in traced.graph.nodes:
        if node in behind:
            builder.placeholder(node) if node.op == "placeholder" else builder.copy(node)
    copy = builder.finish([builder.find(traced.node)])
    own = [index for index in used if index >= 0]
    batch = [known[num_lengths + index].name for index in own if inputs[index].position in batch_positions]
    if any(is_random(node) for node in copy.graph.nodes):
        raise _refused("random numbers are part of", location)
    if batch and any(isinstance(inputs[index], StateTensor) for index in own):
        raise _refused("parameters or buffers are part of beside the batch", location)
    meeting = Meeting()
    # The trace that runs must not see what the passes compute.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        canonical, _ = run_passes(with_facts(copy, TRACED), CANONICALIZE)
        layouts = analyze_batch_axis(canonical, batch, rows_symbol, meeting=meeting)
    return ReadValue(
        graph=canonical,
        inputs=tuple(index if index >= 0 else lengths.carrier_of(num_lengths + index) for index in used),
        layouts=layouts,
        meeting=frozenset(meeting.names),
        rows_symbol=rows_symbol,
        lengths=tuple(
            (node.meta["val"].node.expr, lengths.carrier_of(index))
            for index, node in enumerate(known[:num_lengths])
        ),
        location=location,
    )


def _computed(node: fx.Node, env: Mapping[fx.Node, Any], module: fx.GraphModule) -> Any:
    if node.op == "get_attr":
        return getattr(module, str(node.target))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
    target: Any = node.target
    return target(*args, **kwargs)


def _is_over_all(node: fx.Node) -> bool:
    """Whether a value over all elements is the same over those of several tensors."""
    if node.target in _OVER_ALL:
        return len(node.args) == 1
    integers = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    operand: Any = node.args[0] if node.target is aten.sum.default else None
    return operand is not None and operand.meta["val"].dtype in integers


def _concatenated(parts: Sequence[torch.Tensor], layout: Rows, rows: Sequence[int]) -> torch.Tensor:
    """The rows of all ranks, of so many each, in their order; dimension `dim` holds (outer, row, inner), of which
    one may depend on lengths.
    """
    dim = layout.dim
    outer, inner = (number if isinstance(number, int) else -1 for number in (layout.outer, layout.inner))
    apart = [
        part.unflatten(dim, (outer, num_rows, inner)) for part, num_rows in zip(parts, rows, strict=True)
    ]
    return torch.cat(apart, dim + 1).flatten(dim, dim + 2)


def _operand(tensors: Sequence[torch.Tensor | None], source: int | tuple[int, int]) -> Any:
    """A tensor, None where it is not on this rank, or a length."""
    if isinstance(source, int):
        return tensors[source]
    position, dim = source
    carrier = tensors[position]
    return None if carrier is None else int(carrier.shape[dim])


def _refused(what: str, location: str) -> UnsupportedModelError:
    return needing_value(
        f"a path is chosen by a value that is known only when the model runs, and that {what}", location
    )


def _spread(location: str) -> UnsupportedModelError:
    return _refused("is made of parameters or buffers that no rank has all of", location)
