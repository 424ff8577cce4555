"""From what Dynamo hands to the backend to one functional ATen graph with a symbolic batch size.

In: the Dynamo `fx.GraphModule` and its example inputs. Out: a `CapturedGraph`.
Terms: *rows* is the batch size, dimension 0 of every *batch* input; a *replicated* input is a tensor without
rows that is no registered parameter or buffer. Where Dynamo's first graph of a frame has the batch size baked
in, `capture_or_restart` makes Dynamo trace the frame again with that size symbolic, and captures at the
second call (capture_begin.py: mostly the first will do).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import sympy
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from rannc_backend.capture.aten_trace import (
    AtenTrace,
    StridesOf,
    trace_aten,
)
from rannc_backend.capture.batch_inputs import (
    BatchInputs,
    batch_candidates,
    find_batch_inputs,
    has_symbolic_batch,
)
from rannc_backend.capture.dynamo import (
    NO_MARKED_LENGTHS,
    DynamoCall,
    RestartReason,
    find_dynamo_call,
    guard_as_they_are,
    marked_sizes,
    module_stack,
    previous_restart,
    restart_trace,
    run_without_check_of_guards,
    skip_library_loggers,
)
from rannc_backend.capture.dynamo_sizes import FrameNumbers, fix_symbols, holds_from_two, require
from rannc_backend.capture.errors import is_partial, refuse_graph_break, refuse_resumed_frame
from rannc_backend.capture.fingerprint import (
    canonical_text,
    fingerprint,
    without_order_of_outputs,
)
from rannc_backend.capture.first_trace import begun_trace
from rannc_backend.capture.inputs import (
    SparseTable,
    TensorInput,
    UserTensor,
    buffer_updates,
    find_tensor_inputs,
    named_inputs,
    trained_tables,
    with_buffers,
)
from rannc_backend.errors import InternalError, UnsupportedModelError
from rannc_backend.ir.graph_input import (
    BatchInput,
    GraphInput,
    LengthInput,
    ReplicatedInput,
    StateInput,
)
from rannc_backend.ir.length import NO_LENGTHS, Length, LengthDims, length_name, length_symbol
from rannc_backend.ir.size_test import SizeTest
from rannc_backend.passes.canonicalize import CANONICALIZE, TRACED
from rannc_backend.passes.pipeline import run_passes, with_facts
from rannc_backend.passes.plain_numbers import length_hints, numbers_of, rows_hint
from rannc_backend.passes.stage.recompute import KEPT, lift_marks

__all__ = [
    "CapturedGraph",
    "capture",
    "capture_or_restart",
    "renew_guards",
    "run_without_check_of_guards",
    "skip_library_loggers",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """A model's forward as functional ATen operators; placeholder i of `graph_module` is described by
    `inputs[i]`.

    `graph_module` mutates nothing. Its output is one flat tuple: the user's outputs in Dynamo's order
    (`num_user_outputs` of them), then the new value of each buffer in `buffer_updates`. Node metadata: "val"
    (fake tensors of `fake_mode`, batch sizes are expressions of `rows_symbol`), "stack_trace" (user's lines),
    "module_path" (dotted path of the user's module, "" if none) and "module_stack" (see `module_stack`). Batch inputs
    must be passed as contiguous tensors.
    """

    graph_module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    num_user_outputs: int
    buffer_updates: tuple[str, ...]
    rows_symbol: sympy.Symbol
    rows_hint: int
    fake_mode: FakeTensorMode
    root_module: nn.Module
    fingerprint: str = ""
    # of plans: equal for graphs that differ in the order of their outputs alone, as ways of capture do
    plan_fingerprint: str = ""
    sparse_tables: tuple[SparseTable, ...] = ()  # see there; their gradients are dense in this graph
    dynamo_key: str = ""  # hash of the Dynamo graph and inputs that it was traced from
    size_tests: tuple[SizeTest, ...] = ()
    lengths: tuple[Length, ...] = ()  # whose placeholders are the first
    # what was assumed of them, over their symbols; None: that one is a number
    length_conditions: tuple[sympy.Basic, ...] | None = ()
    # of those inputs that are Python's floats, by position; and what was assumed of them
    number_symbols: Mapping[int, sympy.Symbol] = field(default_factory=dict)
    number_conditions: tuple[sympy.Basic, ...] = ()
    fixed_inputs: Mapping[str, list[float]] = field(default_factory=dict)  # see `with_fixed_inputs`

    def with_gradients(self, of_tables: str, device: torch.device) -> CapturedGraph:
        """Itself, with the option sparse_gradients. Raises UnsupportedModelError where that cannot be on the device."""
        if of_tables == "dense":
            return replace(self, sparse_tables=())
        for table in self.sparse_tables:
            table.check()
            if device.type != "cpu":
                table.refuse(
                    "how many rows it has is known on the device alone, which a step does not wait for"
                )
        return self

    def with_fingerprints(self) -> CapturedGraph:
        """Itself, with the hashes of its text. Graphs of other paths have other hashes, whatever is in them."""
        text = canonical_text(
            self.graph_module,
            self.inputs,
            self.rows_symbol,
            num_user_outputs=self.num_user_outputs,
            buffer_updates=self.buffer_updates,
        )
        paths = "".join(f"path {test.text}\n" for test in self.size_tests)
        nodes = enumerate(self.graph_module.graph.nodes)
        marks = "".join(f"kept {place}\n" for place, node in nodes if node.meta.get(KEPT))
        return replace(
            self,
            fingerprint=fingerprint(text + paths + marks),
            plan_fingerprint=fingerprint(without_order_of_outputs(text) + marks),
        )

    def numbers_at(self, lengths: Sequence[int] | None = None) -> dict[sympy.Symbol, sympy.Integer]:
        """What the symbols of its lengths are then (those of the capture if not given)."""
        numbers = [length.hint for length in self.lengths] if lengths is None else lengths
        symbols = (length.symbol for length in self.lengths)
        return dict(zip(symbols, map(sympy.Integer, numbers), strict=True))


def capture_or_restart(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    device: torch.device | None = None,
    strides_of: StridesOf = torch.Tensor.stride,
    with_lengths: bool = True,
) -> CapturedGraph:
    """Capture the graph of this backend call; call it directly from the backend, with what Dynamo passed. Without
    ``with_lengths``, for sizes of this call alone.

    Raises TensorifyScalarRestartAnalysis (let it pass: Dynamo then calls the backend again) where this trace
    was not begun by `begin_symbolically` or shows more than could be known then; GraphBreakError, and the
    errors of `capture`. Dynamo's settings are as before when this returns or raises anything else.
    """
    call = find_dynamo_call()
    restart = previous_restart(call) or begun_trace()
    if restart is not None:
        restart.restore()
    refuse_resumed_frame(call)
    # The first graph may end at the call of a logger that the next trace leaves out, and says little about
    # other breaks.
    if restart is not None:
        seen = restart.lengths.numbers
        if is_partial(graph_module) and seen is not None and seen.give_up():
            restart_trace(call, restart.batch_tensors, lengths=restart.lengths, hint=restart.hint)
        refuse_graph_break(graph_module, restart)
    _, tensors = find_tensor_inputs(graph_module, example_inputs, call)
    wanted = _wanted_trace(tensors, call, restart, is_partial(graph_module))
    if wanted is not None:
        batch_tensors, single = wanted
        lengths = NO_MARKED_LENGTHS if restart is None else restart.lengths
        restart_trace(call, batch_tensors, lengths=lengths, hint=rows_hint(graph_module) if single else None)
    if restart is None:
        return capture(graph_module, example_inputs, call, device=device, strides_of=strides_of)
    return capture(
        graph_module,
        example_inputs,
        call,
        device=device,
        strides_of=strides_of,
        finished=restart.finished,
        with_lengths=with_lengths,
        give_up_lengths=restart.lengths.give_up,
    )


def check_one_device(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raises ModelDevicesError where the parameters of the model lie on several devices. To be called from
    the backend, as above.
    """
    find_tensor_inputs(graph_module, example_inputs, find_dynamo_call())


def capture(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    call: DynamoCall,
    *,
    device: torch.device | None = None,
    strides_of: StridesOf = torch.Tensor.stride,
    finished: CapturedGraph | None = None,
    with_lengths: bool = True,
    give_up_lengths: Callable[[], object] = lambda: None,
) -> CapturedGraph:
    """Capture a Dynamo graph whose batch sizes are symbolic, and its lengths where it can be traced so. `device`:
    trace as if the model and its inputs were there. `give_up_lengths` is called where it cannot.

    Raises DataDependentControlFlowError, NoBatchDimensionError, ModelDevicesError, UnsupportedModelError.
    Consumes no random numbers and changes neither the model nor the inputs.
    """
    root, tensors = find_tensor_inputs(graph_module, example_inputs, call)
    batch = find_batch_inputs(graph_module, tensors, call)
    key, numbers = _dynamo_key(graph_module, tensors, batch.positions), FrameNumbers(call, tensors)
    if finished is not None and finished.dynamo_key == key and finished.root_module is root:
        if not finished.lengths:
            fix_symbols(call, batch.length_symbols)
        elif not _require_of_frame(finished.length_conditions, finished.lengths, batch, call):
            raise InternalError("a trace for renewed guards is of other lengths")
        numbers.fix(numbers.positions - finished.number_symbols.keys())
        numbers.require(finished.number_conditions, finished.number_symbols)
        return finished
    if not with_lengths:
        numbers.fix(numbers.positions)
    trace_with = functools.partial(
        trace_aten,
        graph_module,
        tensors,
        batch_positions=batch.positions,
        device=device,
        strides_of=strides_of,
    )
    for hints in length_hints(batch.lengths.hints, numbers_of(graph_module)) if with_lengths else ():
        lengths = replace(batch.lengths, hints=hints)
        try:
            trace = numbers.trace(trace_with, sizes=batch.sizes, lengths=lengths)
        except UnsupportedModelError as error:
            logger.debug("with symbolic lengths at %s it cannot be traced: %s", hints, error)
            continue
        captured = captured_of(trace, batch.positions, root, key, lengths=lengths)
        if _require_of_frame(captured.length_conditions, captured.lengths, batch, call):
            return captured
    if batch.length_symbols:
        give_up_lengths()
    fix_symbols(call, batch.length_symbols)
    trace = numbers.trace(trace_with, sizes=batch.sizes_in_this_call)
    return captured_of(trace, batch.positions, root, key)


def _marked(tensors: Sequence[TensorInput], lengths: LengthDims, index: int) -> Iterator[int]:
    """What the user has said of a length, 0 for nothing, at each place that has it."""
    marks = {item.position: marked_sizes(item.tensor) for item in tensors}
    for (position, dim), size in lengths.sizes.items():
        if size == length_symbol(index):
            yield marks[position].get(dim, 0)


def _require_of_frame(
    conditions: Collection[sympy.Basic] | None,
    lengths: Sequence[Length],
    batch: BatchInputs,
    call: DynamoCall,
) -> bool:
    """Let conditions on lengths be such of the compiled frame; False where one is a number, or this call does not
    meet them.
    """
    own = {length.symbol: symbol for length, symbol in zip(lengths, batch.length_symbols, strict=True)}
    return conditions is not None and require(call, [item.xreplace(own) for item in conditions])


def lengths_hold(captured: CapturedGraph, lengths: Sequence[int]) -> bool:
    """Whether a graph is that of these lengths."""
    known = captured.numbers_at(lengths)
    conditions = captured.length_conditions
    return conditions is not None and all(item.xreplace(known) != sympy.false for item in conditions)


def _length_conditions(trace: AtenTrace) -> tuple[sympy.Basic, ...] | None:
    """What a trace has assumed of its lengths alone, as far as not all have it; None where one is a number."""
    symbols = set(trace.length_symbols)
    found = trace.conditions_on(symbols)
    if found is None:
        return None
    return tuple(item for item in found if item.free_symbols <= symbols and not holds_from_two(item))


def captured_of(
    trace: AtenTrace,
    batch_positions: frozenset[int],
    root: nn.Module,
    key: str = "",
    *,
    lengths: LengthDims = NO_LENGTHS,
    size_tests: tuple[SizeTest, ...] = (),
) -> CapturedGraph:
    """What was traced, with names that are the same on all ranks, in canonical operators."""
    tensors = trace.inputs
    graph = trace.graph_module.graph
    inputs = named_inputs(graph, tensors, batch_positions, len(lengths.hints))
    inputs = with_buffers(graph, inputs, trace.mutated, trace.num_user_outputs)
    updates = buffer_updates(graph, inputs, trace.mutated, trace.num_user_outputs)
    names = {item.position: item.name for item in inputs}
    found = []
    for index, (symbol, hint) in enumerate(zip(trace.length_symbols, lengths.hints, strict=True)):
        position, dim = lengths.carrier_of(index)
        carrier = names[position]
        found.append(
            Length(
                name=length_name(index),
                symbol=symbol,
                hint=hint,
                carrier=carrier,
                dim=dim,
                longest=max(_marked(tensors, lengths, index)),
            )
        )
    inputs = (*(LengthInput(name=length.name) for length in found), *inputs)
    _tidy_metadata(trace.graph_module, root)
    lift_marks(trace.graph_module.graph)
    trace.graph_module.recompile()
    canonical, _ = run_passes(with_facts(trace.graph_module, TRACED), CANONICALIZE)
    captured = CapturedGraph(
        graph_module=canonical,
        inputs=in_order_of_use(canonical, inputs),
        num_user_outputs=trace.num_user_outputs,
        buffer_updates=updates,
        rows_symbol=trace.rows_symbol,
        rows_hint=trace.rows_hint,
        fake_mode=trace.fake_mode,
        root_module=root,
        sparse_tables=trained_tables(trace.sparse, inputs),
        dynamo_key=key,
        size_tests=size_tests,
        lengths=tuple(found),
        length_conditions=_length_conditions(trace),
        number_symbols=trace.number_symbols,
        number_conditions=trace.conditions_on(set(trace.number_symbols.values())) or (),
    ).with_fingerprints()
    logger.debug("captured %d nodes, fingerprint %s", len(canonical.graph.nodes), captured.fingerprint)
    return captured


def in_order_of_use(graph_module: fx.GraphModule, inputs: Sequence[GraphInput]) -> tuple[GraphInput, ...]:
    """Lengths, then all inputs in the order in which the graph uses them, whatever has captured it. Drops what the
    module holds and the forward does not use: autograd gives it no gradient, and an optimizer makes a difference
    between none and zeros.
    """
    graph = graph_module.graph
    place = {node: number for number, node in enumerate(graph.nodes)}
    found = []
    for node, item in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(item, StateInput) and not node.users:
            graph.erase_node(node)
        else:
            first = min((place[user] for user in node.users), default=len(place))
            found.append((not isinstance(item, LengthInput), first, item.name, node, item))
    found.sort(key=lambda entry: entry[:3])
    for *_, node, _ in reversed(found):
        first_node = next(iter(graph.nodes))
        if node is not first_node:
            first_node.prepend(node)
    graph_module.recompile()
    return tuple(item for *_, item in found)


def _wanted_trace(
    tensors: Sequence[TensorInput], call: DynamoCall, restart: RestartReason | None, partial: bool
) -> tuple[tuple[torch.Tensor, ...], bool] | None:
    """Which tensors the next trace should take for batches, and whether of size 1; None if this trace will
    do.
    """
    single = restart is not None and restart.hint is not None
    candidates = batch_candidates(tensors, single=single)
    # A graph that was broken did not show all inputs.
    known = set() if restart is None else {id(tensor) for tensor in restart.batch_tensors}
    if any(id(tensor) not in known for tensor in candidates) or (restart is None and partial):
        return candidates, single
    # Before a trace the model's own tensors may look like the user's.
    if any(id(item.tensor) in known for item in tensors if not isinstance(item, UserTensor)):
        return candidates, single
    ones = batch_candidates(tensors, single=True)
    if ones and not single and not has_symbolic_batch(tensors, call):
        return ones, True
    return None


def _dynamo_key(graph_module: fx.GraphModule, tensors: Sequence[TensorInput], batch: frozenset[int]) -> str:
    parts = [part.code for part in graph_module.modules() if isinstance(part, fx.GraphModule)]
    for item in tensors:
        shape = tuple(item.tensor.shape)[item.position in batch :]
        parts.append(
            f"{item.position} {item.source} {item.prefix} {shape} {item.tensor.dtype} "
            f"{item.tensor.requires_grad}"
        )
    return fingerprint("\n".join([*parts, str(sorted(batch))]))


def _tidy_metadata(graph_module: fx.GraphModule, root: nn.Module) -> None:
    """Keep what the rest of the backend relies on; the remainder holds on to the graph that was traced."""
    paths = {id(module): name for name, module in root.named_modules()}
    for node in graph_module.graph.nodes:
        stack = module_stack(node.meta, paths)
        kept = {key: node.meta[key] for key in ("val", "stack_trace") if key in node.meta}
        node.meta.clear()
        node.meta.update(kept, module_path=stack[-1][0] if stack else "", module_stack=stack)


def renew_guards(
    captured: CapturedGraph, graph_module: fx.GraphModule, example_inputs: Sequence[Any]
) -> None:
    """Let the compiled frame serve the model's parameters as they are now. Raises what `trace_again` raises
    where that takes a trace.
    """
    positions = [item.position for item in captured.inputs if isinstance(item, StateInput)]
    if not guard_as_they_are(find_dynamo_call(), graph_module, example_inputs, positions):
        trace_again(captured)


def trace_again(captured: CapturedGraph) -> NoReturn:
    """Raise the exception that Dynamo answers with another trace, under the settings of the last one.

    If that gives the same graph, `capture_or_restart` returns ``captured`` without tracing to ATen again.
    """
    call = find_dynamo_call()
    last = previous_restart(call) or begun_trace()
    assert last is not None, "the first trace has no symbolic batch size yet"
    restart_trace(call, last.batch_tensors, lengths=last.lengths, hint=last.hint, finished=captured)


def fixed_shapes(captured: CapturedGraph) -> tuple[str, ...]:
    """Of the user's inputs: the sizes that are numbers in a graph."""
    of_user = {item.name for item in captured.inputs if isinstance(item, BatchInput | ReplicatedInput)}
    nodes = captured.graph_module.graph.find_nodes(op="placeholder")
    return tuple(
        f"{node.name} {[size if isinstance(size, int) else '*' for size in node.meta['val'].shape]}"
        for node in nodes
        if node.name in of_user
    )
