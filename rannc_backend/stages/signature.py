"""What a stage graph looks like from outside, and whether two of them are the same.

In: a `StageGraph` and which values need a gradient. Out: its `StageSignature` (shapes as functions of its
sizes, positions that take and give gradients, fake inputs for tracing) and a hash of its structure.

Terms. The *sizes* of a call are its batch size and its lengths, in the order of the inputs that hold those.
*Constants* are tensors that the graph holds itself; they are lifted to inputs behind the others, so
that graphs that differ in them only are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx

from rannc_backend.kernels.gradient_writes import sum_dtype
from rannc_backend.passes.batch.batch_split import BufferOutput
from rannc_backend.passes.graph_queries import size_expression
from rannc_backend.passes.pipeline import run_passes
from rannc_backend.passes.stage.any_layout import TakeAnyLayout
from rannc_backend.passes.stage.lift_constants import LiftConstants
from rannc_backend.passes.stage.split_stages import StageGraph, rows_dimension

LONG_LIVED_KINDS = frozenset(
    {"parameter", "buffer", "replicated", "rng_seed", "global_rows", "prologue", "length"}
)
LENGTH = "length"
Sizes = tuple[int, ...]
# The others come from the user or another rank; they are taken as contiguous, whatever their strides were at
# capture.
OWNED_KINDS = frozenset({"parameter", "buffer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSignature:
    """Positions and shapes of one stage; `values` and `output_values` are the fakes of inputs and outputs, where
    an input is a length its symbolic number.

    `trained` are the positions of parameters that require a gradient, `long_lived` the inputs of the joint
    graph (0 is the batch size) that exist until backward anyway, `length_inputs` those that are lengths, `symbols`
    those of the sizes. `rows_from` is (input, dimension, factor):
    the size there is factor * rows. `received` are the inputs that compiled functions want contiguous. `wide_sums`:
    gradients of 16 bits are summed in float32. `sparse`: those of `trained` whose gradients are kept as rows.
    """

    kinds: tuple[str, ...]
    values: tuple[Any, ...]
    output_values: tuple[Tensor, ...]
    constants: tuple[Any, ...]
    constant_names: tuple[str, ...]
    grad_outputs: tuple[int, ...]
    grad_inputs: tuple[int, ...]
    trained: frozenset[int]
    long_lived: tuple[int, ...]
    received: tuple[int, ...]
    rows_from: tuple[int, int, int] | None
    rows: Any
    rows_symbol: sympy.Symbol
    length_inputs: tuple[int, ...]
    symbols: tuple[sympy.Symbol, ...]
    wide_sums: bool = False
    sparse: frozenset[int] = frozenset()

    def gradient_sum(self, position: int) -> Tensor:
        """A fake, under the current fake mode, that looks like the sum of a parameter's gradients; one number where rows
        are kept.
        """
        value = self.values[position]
        return torch.empty(
            (1,) if position in self.sparse else value.shape,
            dtype=self.sum_dtype(position),
            device=value.device,
        )

    def sum_dtype(self, position: int) -> torch.dtype:
        """In which a parameter's gradients are summed."""
        return sum_dtype(self.values[position].dtype, wide=self.wide_sums)

    def bound(self, args: Sequence[Any]) -> tuple[Sizes, list[Any]]:
        """The sizes of real inputs, and [rows, *inputs, *constants] for a compiled function."""
        assert len(args) == len(self.kinds), f"the stage takes {len(self.kinds)} inputs, not {len(args)}"
        rows = 1
        if self.rows_from is not None:
            position, dim, factor = self.rows_from
            rows = args[position].shape[dim] // factor
        values: list[Any] = [rows, *args, *self.constants]
        for position in self.received:
            if not values[position + 1].is_contiguous():
                values[position + 1] = values[position + 1].contiguous()
        return (rows, *(args[position] for position in self.length_inputs)), values

    def zeros_of_input(self, position: int, sizes: Sizes) -> Tensor:
        return self._empty(self.values[position], sizes).zero_()

    def zeros_of_output(self, position: int, sizes: Sizes) -> Tensor:
        return self._empty(self.output_values[position], sizes).zero_()

    def empty_output(self, position: int, sizes: Sizes) -> Tensor:
        return self._empty(self.output_values[position], sizes)

    def empty_input(self, position: int, sizes: Sizes) -> Tensor:
        return self._empty(self.values[position], sizes)

    def _empty(self, value: Tensor, sizes: Sizes) -> Tensor:
        known = dict(zip(self.symbols, map(sympy.Integer, sizes), strict=True))
        shape = [int(size_expression(size).xreplace(known)) for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device=value.device)

    def fakes(self, *, requires_grad: bool) -> list[Any]:
        """Fresh inputs for tracing, under the current fake mode: batch size, stage inputs, constants."""
        differentiated = self.trained | set(self.grad_inputs) if requires_grad else set()
        fresh: list[Any] = [self.rows]
        for position, value in enumerate(self.values):
            if not isinstance(value, Tensor):
                fresh.append(value)
                continue
            with torch.no_grad():
                if self.kinds[position] in OWNED_KINDS:
                    fake = torch.empty_strided(
                        value.shape, value.stride(), dtype=value.dtype, device=value.device
                    )
                else:
                    fake = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            fresh.append(fake.requires_grad_(position in differentiated))
        for value in self.constants:
            fresh.append(
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            )
        return fresh

    def lifted(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Copy of the stage's graph with its constants as placeholders behind the others; boundary values
        have become contiguous.
        """
        return run_passes(graph_module, (LiftConstants(self.constant_names), TakeAnyLayout()))[0]


def signature_of(
    stage: StageGraph,
    needs_grad: frozenset[str],
    requires_grad_parameters: frozenset[str],
    rows_symbol: sympy.Symbol,
    *,
    wide_sums: bool = False,
    sparse: frozenset[str] = frozenset(),
) -> StageSignature:
    """Read the signature of a stage graph; names in `needs_grad` that are not floating point are left out."""
    graph = stage.graph_module.graph
    values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    (output,) = graph.find_nodes(op="output")
    output_values = [node.meta["val"] for node in output.args[0]]
    names = [str(node.target) for node in graph.find_nodes(op="get_attr")]
    constants = {name: getattr(stage.graph_module, name) for name in names}
    constants = {name: value for name, value in constants.items() if isinstance(value, Tensor)}
    carrier = None
    for position, value in enumerate(values):
        found = rows_dimension(value, rows_symbol)
        if found is not None:
            carrier = (position, *found)
            break
    flows = [
        _differentiable(value) and source.name in needs_grad
        for source, value in zip(stage.inputs, values, strict=True)
    ]
    lengths = tuple(position for position, source in enumerate(stage.inputs) if source.kind == LENGTH)
    return StageSignature(
        kinds=tuple(source.kind for source in stage.inputs),
        values=tuple(values),
        output_values=tuple(output_values),
        constants=tuple(constants.values()),
        constant_names=tuple(constants),
        grad_outputs=tuple(
            position
            for position, target in enumerate(stage.outputs)
            if target.name in needs_grad
            and not isinstance(target, BufferOutput)
            and _differentiable(output_values[position])
        ),
        grad_inputs=tuple(
            i
            for i, source in enumerate(stage.inputs)
            if flows[i] and source.kind not in ("parameter", "buffer")
        ),
        trained=frozenset(
            i
            for i, source in enumerate(stage.inputs)
            if source.kind == "parameter"
            and source.name in requires_grad_parameters
            and _differentiable(values[i])
        ),
        long_lived=tuple(
            [i + 1 for i, source in enumerate(stage.inputs) if source.kind in LONG_LIVED_KINDS]
            + [len(values) + 1 + i for i in range(len(constants))]
        ),
        received=tuple(
            i for i, source in enumerate(stage.inputs) if source.kind not in OWNED_KINDS | {LENGTH}
        ),
        rows_from=carrier,
        rows=1 if carrier is None else _rows_of_fake(values[carrier[0]], carrier[1], carrier[2]),
        rows_symbol=rows_symbol,
        length_inputs=lengths,
        symbols=(rows_symbol, *(values[position].node.expr for position in lengths)),
        wide_sums=wide_sums,
        sparse=frozenset(i for i, source in enumerate(stage.inputs) if source.name in sparse),
    )


def structural_hash(graph_module: fx.GraphModule, signature: StageSignature, options: tuple[Any, ...]) -> str:
    """Equal for stages that may share compiled functions: same operators in the same order, shapes, dtypes
    and needs.
    """
    number = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    constant = {name: index for index, name in enumerate(signature.constant_names)}
    lines = []
    for node in graph_module.graph.nodes:
        # Only written down, so that any object may stand for a node.
        arguments = fx.map_arg(
            (node.args, node.kwargs), lambda n: cast("fx.node.Argument", _Reference(number[n]))
        )
        target = f"constant {constant[node.target]}" if node.target in constant else str(node.target)
        if node.op == "get_attr" and node.target not in constant:
            target = getattr(graph_module, str(node.target)).code
        lines.append(f"{node.op} {'' if node.op == 'placeholder' else target} {arguments!r}")
    names = {symbol: sympy.Symbol(f"size{index}") for index, symbol in enumerate(signature.symbols)}
    lines += [_described(value, names) for value in (*signature.values, *signature.constants)]
    lines.append(
        repr(
            (
                signature.kinds,
                signature.grad_outputs,
                signature.grad_inputs,
                sorted(signature.trained),
                signature.wide_sums,
                sorted(signature.sparse),
                options,
            )
        )
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Reference:
    """Stands for a node in the hashed text."""

    number: int


def _described(value: Any, names: Mapping[sympy.Symbol, sympy.Symbol]) -> str:
    if not isinstance(value, Tensor):
        return str(size_expression(value).xreplace(names))
    sizes = [str(size_expression(size).xreplace(names)) for size in (*value.shape, *value.stride())]
    return f"{value.dtype} {value.device} {sizes}"


def _differentiable(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _rows_of_fake(value: Tensor, dim: int, factor: int) -> Any:
    return value.shape[dim] if factor == 1 else value.shape[dim] // factor
