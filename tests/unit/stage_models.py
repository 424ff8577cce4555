"""Small models as row-wise graphs that are cut into stages by hand: shared by the tests of splitting and
compiling stages.

In: an `nn.Module` and example inputs. Out: `Rowwise`, with the graph and all that `split_stages` asks for,
and `run_pipeline`, which chains compiled stages over micro-batches without any runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from rannc_backend.passes.batch.batch_split import (
    BufferOutput,
    PartialOutput,
    ReplicatedOutput,
    RowsOutput,
    RowwiseOutput,
)
from rannc_backend.passes.batch.layouts import Constant, Layout, PartialSum, Rows, Several
from rannc_backend.passes.pipeline import with_facts
from rannc_backend.passes.stage.split_stages import SplitStages, StageGraph, split_stages
from rannc_backend.stages.compiled_stage import CompiledStage, compile_stage
from rannc_backend.stages.gradient_sink import ScratchGradients

HINT = 6
_OUTPUTS = {each.kind: each for each in (RowsOutput, PartialOutput, ReplicatedOutput)}


@dataclass(slots=True, kw_only=True)
class Rowwise:
    """A captured model. `parameters` and `buffers` are the real tensors by placeholder name."""

    graph_module: fx.GraphModule
    outputs: tuple[RowwiseOutput, ...]
    layouts: dict[str, Layout]
    kinds: dict[str, str]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    buffer_fqns: dict[str, str]
    batch_names: tuple[str, ...]
    rows_symbol: sympy.Symbol
    fake_mode: FakeTensorMode

    @property
    def staged_names(self) -> list[str]:
        """Names of the nodes that depend on the batch, in order."""
        return [
            node.name
            for node in self.graph_module.graph.nodes
            if node.op == "call_function" and self.layouts[node.name] != Constant()
        ]

    def cut(self, num_stages: int, places: Sequence[int] | None = None) -> tuple[StageGraph, ...]:
        """Split at the given places of `staged_names`, or into parts of equal length."""
        names = self.staged_names
        if places is None:
            places = [len(names) * k // num_stages for k in range(1, num_stages)]
        stage_of = {name: sum(index >= place for place in places) for index, name in enumerate(names)}
        return self.split(stage_of, num_stages)

    def split(self, stage_of: dict[str, int], num_stages: int) -> tuple[StageGraph, ...]:
        return split_stages(
            self.graph_module,
            self.outputs,
            self.layouts,
            stage_of,
            num_stages,
            input_kinds=self.kinds,
            rows_symbol=self.rows_symbol,
        )

    def compile(
        self, stages: Sequence[StageGraph], compiler: str = "eager", **options: Any
    ) -> list[CompiledStage]:
        trained = frozenset(name for name, value in self.parameters.items() if value.requires_grad)
        arguments: dict[str, Any] = {
            "needs_grad": frozenset(node.name for node in self.graph_module.graph.nodes),
            "requires_grad_parameters": trained,
            "training": True,
            **options,
        }
        return [
            compile_stage(
                stage, fake_mode=self.fake_mode, rows_symbol=self.rows_symbol, compiler=compiler, **arguments
            )
            for stage in stages
        ]


class _Flat(nn.Module):
    """Dynamo's graph as a function of flat inputs."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__()
        self._hidden = (graph_module,)

    def forward(self, *values: Any) -> tuple[Any, ...]:
        # Sizes come from the first batch input, so that the traced graph takes none.
        (graph_module,) = self._hidden
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        given = iter(values)
        numbers = [isinstance(node.meta["example_value"], torch.SymInt) for node in placeholders]
        tensors = [None if number else next(given) for number in numbers]
        rows = next(v.shape[0] for v in tensors if v is not None and isinstance(v.shape[0], torch.SymInt))
        return fx.Interpreter(graph_module).run(*[rows if v is None else v for v in tensors])


def capture(
    model: nn.Module,
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    output_kinds: Sequence[str],
) -> Rowwise:
    """Trace `function(model, *inputs)`, whose outputs are of the given kinds; dimension 0 of all inputs is
    the batch.
    """
    dynamo_graph, values = _dynamo_graph(model, function, inputs)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    symbol = mode.shape_env.create_symbol(HINT, source=ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC)
    rows = mode.shape_env.create_symintnode(symbol, hint=HINT, source=ConstantSource("rows"))
    fqns = {id(v): n for n, v in (*model.named_parameters(), *model.named_buffers())}
    names = [fqns.get(id(value), "") for value in values]
    with mode:
        fakes = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype)
            if name
            else torch.empty([rows, *v.shape[1:]], dtype=v.dtype)
            for name, v in zip(names, values, strict=True)
        ]
    with mode, torch.no_grad():
        graph_module, signature = aot_export_module(_Flat(dynamo_graph), fakes, trace_joint=False)
    placeholders = [node.name for node in graph_module.graph.find_nodes(op="placeholder")]
    fqn_of = dict(zip(placeholders, names, strict=True))
    real = dict(zip(placeholders, values, strict=True))
    (output,) = graph_module.graph.find_nodes(op="output")
    results = list(output.args[0])
    mutated = [
        fqn_of[signature.user_inputs_to_mutate[n.name]]
        for n in results
        if n.name in signature.user_inputs_to_mutate
    ]
    described: list[RowwiseOutput] = [
        BufferOutput(name=n.name, fqn=f) for n, f in zip(results, mutated, strict=False)
    ]
    described += [
        _OUTPUTS[k](name=n.name) for n, k in zip(results[len(mutated) :], output_kinds, strict=True)
    ]
    kinds = {
        name: "batch" if not fqn_of[name] else "parameter" if isinstance(value, nn.Parameter) else "buffer"
        for name, value in real.items()
    }
    batch = {id(real[name]): name for name, kind in kinds.items() if kind == "batch"}
    return Rowwise(
        graph_module=with_facts(graph_module, SplitStages.requires),
        outputs=tuple(described),
        layouts=layouts_of(graph_module, symbol, set(batch.values())),
        kinds=kinds,
        parameters={n: v for n, v in real.items() if kinds[n] == "parameter"},
        buffers={n: v for n, v in real.items() if kinds[n] == "buffer"},
        buffer_fqns={n: fqn_of[n] for n, k in kinds.items() if k == "buffer"},
        batch_names=tuple(batch[id(value)] for value in inputs),
        rows_symbol=symbol,
        fake_mode=mode,
    )


def _dynamo_graph(
    model: nn.Module, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Dynamo's graph of the call and the real tensors of its inputs; numbers are left out."""
    found: list[tuple[fx.GraphModule, list[Tensor]]] = []

    def backend(graph_module: fx.GraphModule, values: list[Any]) -> Callable[..., Any]:
        found.append((graph_module, [value for value in values if isinstance(value, Tensor)]))
        return graph_module.forward

    for value in inputs:
        torch._dynamo.mark_dynamic(value, 0)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    torch.compile(lambda *values: function(model, *values), backend=backend, fullgraph=True)(*inputs)
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
    torch._dynamo.reset()
    return found[0]


def layouts_of(graph_module: fx.GraphModule, symbol: sympy.Symbol, batch: set[str]) -> dict[str, Layout]:
    """Layouts read off the shapes, good enough for these models."""
    layouts: dict[str, Layout] = {}
    depends = set(batch)
    for node in graph_module.graph.nodes:
        if any(argument.name in depends for argument in node.all_input_nodes):
            depends.add(node.name)
        layouts[node.name] = _layout(node.meta.get("val"), symbol) if node.name in depends else Constant()
    return layouts


def _layout(value: Any, symbol: sympy.Symbol) -> Layout:
    if isinstance(value, (tuple, list)):
        return Several(tuple(_layout(element, symbol) for element in value))
    if isinstance(value, Tensor):
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt):
                return Rows(dim)
        return PartialSum()
    return Constant()


@dataclass(slots=True, kw_only=True)
class Results:
    """Of a pipeline run: sums of the partial outputs, concatenated row outputs, gradients, new buffers."""

    partials: dict[str, Tensor]
    rows: dict[str, Tensor]
    parameter_gradients: dict[str, Tensor]
    input_gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def run_pipeline(
    rowwise: Rowwise,
    stages: Sequence[CompiledStage],
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    row_gradients: dict[str, Tensor],
    partial_gradients: dict[str, Tensor],
) -> Results:
    """All forwards, then all backwards (last micro-batch first), values and gradients carried by hand. Of stages that
    were compiled for it, the gradients of parameters come after all those of inputs.
    """
    results = Results(
        partials={}, rows={}, parameter_gradients={}, input_gradients={}, buffers=dict(rowwise.buffers)
    )
    parts: list[list[Tensor]] = [list(value.split(list(sizes))) for value in inputs]
    collected: dict[str, list[Tensor]] = {}
    kept: list[list[Any]] = []
    for number in range(len(sizes)):
        values: dict[str, Tensor] = {**rowwise.parameters}
        values.update(zip(rowwise.batch_names, (part[number] for part in parts), strict=True))
        saved_by_stage = []
        for stage in stages:
            arguments = [
                results.buffers[i.name] if i.kind == "buffer" else values[i.name] for i in stage.inputs
            ]
            outputs, saved = stage.forward(arguments)
            saved_by_stage.append(saved)
            _take_outputs(rowwise, stage, outputs, values, collected, results)
        kept.append(saved_by_stage)
    results.rows = {name: torch.cat(chunks) for name, chunks in collected.items()}
    input_parts: dict[str, dict[int, Tensor]] = {}
    offsets = [sum(sizes[:k]) for k in range(len(sizes))]
    later: list[tuple[CompiledStage, list[Any]]] = []
    for number in reversed(range(len(sizes))):
        grads: dict[str, Tensor] = {}
        for stage, saved in zip(reversed(stages), reversed(kept[number]), strict=True):
            chosen = []
            for position in stage.grad_outputs:
                output = stage.outputs[position]
                if output.kind == "rows":
                    chosen.append(row_gradients[output.name].narrow(0, offsets[number], sizes[number]))
                elif output.kind == "partial":
                    chosen.append(partial_gradients[output.name])
                else:
                    chosen.append(grads.get(output.name))

            if stage.splits_backward:
                returned, between = stage.backward_inputs(list(saved), chosen)
                later.append((stage, between))
            else:
                sink = stage.scratch_gradients()
                returned = stage.backward(saved, chosen, sink)
                _add_all(results.parameter_gradients, stage, sink)
            for position, gradient in zip(stage.grad_inputs, returned, strict=True):
                _add(grads, stage.inputs[position].name, gradient)
        for name in rowwise.batch_names:
            if name in grads:
                input_parts.setdefault(name, {})[number] = grads[name]
    for stage, between in later:
        sink = stage.scratch_gradients()
        stage.backward_weights(between, sink)
        _add_all(results.parameter_gradients, stage, sink)
    results.input_gradients = {n: torch.cat([p[k] for k in sorted(p)]) for n, p in input_parts.items()}
    return results


def _take_outputs(
    rowwise: Rowwise,
    stage: CompiledStage,
    outputs: Sequence[Tensor],
    values: dict[str, Tensor],
    collected: dict[str, list[Tensor]],
    results: Results,
) -> None:
    placeholder_of = {fqn: name for name, fqn in rowwise.buffer_fqns.items()}
    for output, value in zip(stage.outputs, outputs, strict=True):
        assert value.is_contiguous(), f"output {output.name} is not contiguous"
        if output.kind == "boundary":
            values[output.name] = value.clone()
        elif output.kind == "rows":
            collected.setdefault(output.name, []).append(value)
        elif output.kind == "partial":
            _add(results.partials, output.name, value)
        elif output.kind == "buffer":
            results.buffers[placeholder_of[output.fqn]] = value


def _add_all(into: dict[str, Tensor], stage: CompiledStage, sink: ScratchGradients) -> None:
    for position, gradient in sink.gradients.items():
        _add(into, stage.inputs[position].name, gradient)


def _add(into: dict[str, Tensor], name: str, value: Tensor) -> None:
    into[name] = into[name] + value if name in into else value.clone()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value."""
    if expected.dtype.is_floating_point:
        scale = expected.abs().max().item() if expected.numel() else 0.0
        difference = (actual - expected).abs().max().item() if expected.numel() else 0.0
        return difference / max(scale, 1e-30) if difference else 0.0
    return float((actual != expected).any())
