"""Traces Dynamo's graph to functional ATen operators with one symbol for the batch size.

In: the Dynamo `fx.GraphModule`, its tensor inputs and which of them are batch inputs. Out: an `AtenTrace`.
Terms: *rows* is the batch size; the *hint* is the number that stands for it where the trace has to decide
something (which memory layout a convolution prefers, say): a prime that divides no other size, so that no
decision rests on a coincidence with the batch size of this process.

The trace runs with gradients enabled on fake tensors that require grad like the real ones, because operators
are chosen accordingly (attention, matmul folding). Where the model switches gradients off, each result
becomes an `aten.detach`, so that the graph, run later under autograd, stops gradients at the same places.

Private to torch here: what functional tensors know of their changes, and Dynamo's function for `x.data` (seen on torch
2.13.0 and 2.15.0; see tests/unit/rannc_backend/capture/nonstrict/test_changing.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from rannc_backend.capture.detached_writes import (
    DetachedWrites,
    check_own_memory,
    innermost,
    needs_gradient,
    tensors_in,
)
from rannc_backend.capture.inputs import SparseTable, TensorInput, made_dense, number_reads
from rannc_backend.capture.written_out import BagsAsRows, PlainOperators, as_strided_scatter
from rannc_backend.errors import RanncError, UnsupportedModelError, located, needing_batch_size, user_location
from rannc_backend.ir.length import NO_LENGTHS, LengthDims, length_name, length_symbol
from rannc_backend.passes.canonicalize import IN_PARTS, TRACED
from rannc_backend.passes.pipeline import run_pass, with_facts
from rannc_backend.passes.plain_numbers import new_number, new_size, rows_hint
from rannc_backend.passes.size_nodes import FloatsAsTensors, number_of

#: Higher-order operators that only wrap a part of the graph: `name -> number of leading arguments, the graph
#: included`.
_WRAPPERS = {"tag_activation_checkpoint": 1, "wrap": 1, "wrap_activation_checkpoint": 1, "invoke_subgraph": 2}

StridesOf = Callable[[torch.Tensor], tuple[int, ...]]
"""Strides by which to trace a parameter: those it has on its owners, where this rank has given its memory
back.
"""
#: The noise that the forward drew is not what the derivative sees.
_WRONG_GRADIENTS = {
    torch.ops.aten.rrelu_with_noise_functional.default: "use another activation, or evaluation mode.",
    #: Of what `as_strided_scatter` does not write out.
    torch.ops.aten.as_strided_scatter.default: "write with an index (x[:, 0] = value), or into x.diagonal().",
}
#: The derivative takes sizes as plain numbers.
_WITH_PLAIN_SIZES = (torch.ops.aten.affine_grid_generator.default,)
_GET_DATA = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
_CONSTANT = "rannc_constant"  # in the metadata of a node


@dataclass(frozen=True, slots=True, kw_only=True)
class AtenTrace:
    """Output of `graph_module`: the user's outputs, then the new values of the inputs in `mutated`. Its first
    placeholders are the lengths. `sparse`: tables whose gradients are sparse.
    """

    graph_module: fx.GraphModule
    inputs: tuple[TensorInput, ...]
    num_user_outputs: int
    mutated: tuple[int, ...]  # indices into the inputs
    rows_symbol: sympy.Symbol
    rows_hint: int
    length_symbols: tuple[sympy.Symbol, ...]
    fake_mode: FakeTensorMode
    sparse: tuple[SparseTable, ...] = ()  # by the places of placeholders
    number_symbols: Mapping[int, sympy.Symbol] = field(default_factory=dict)  # of Python's, by position
    needed_numbers: frozenset[int] = (
        frozenset()
    )  # positions of those that are no tensors: the graph is of no use

    def conditions_on(self, symbols: set[sympy.Symbol]) -> tuple[sympy.Basic, ...] | None:
        """What the trace has assumed of symbols; None: one of them is a number."""
        shape_env = self.fake_mode.shape_env
        assert shape_env is not None, "traces have symbols"
        if symbols & shape_env.replacements.keys():
            return None
        conditions = (shape_env.replace(guard.expr) for guard in shape_env.guards)
        return tuple(item for item in conditions if item.free_symbols & symbols)


def trace_aten(
    dynamo_graph: fx.GraphModule,
    inputs: Sequence[TensorInput],
    *,
    batch_positions: frozenset[int],
    sizes: dict[int, sympy.Expr | None],
    device: torch.device | None = None,
    strides_of: StridesOf = torch.Tensor.stride,
    lengths: LengthDims = NO_LENGTHS,
    numbers: Set[int] = frozenset(),
) -> AtenTrace:
    """Trace. Mutates neither the given graph nor any real tensor.

    `numbers`: positions of Python's floats that are inputs; others are constants. `sizes` gives the number for each
    size argument of Dynamo's graph, over lengths, None for the batch size. `device`: trace as if the model and its
    inputs were there. Raises UnsupportedModelError for what cannot be traced exactly.
    """
    num_arguments = sum(node.op == "placeholder" for node in dynamo_graph.graph.nodes)
    plain = {
        item.position: float(item.tensor)
        for item in inputs
        if item.is_number and item.position not in numbers
    }
    given = [item for item in inputs if item.position not in plain]
    first_batch = next(index for index, item in enumerate(given) if item.position in batch_positions)

    def forward(tensors: tuple[torch.Tensor, ...], rows: RowsSymbol) -> tuple[Any, ...]:
        arguments: list[Any] = [None] * num_arguments
        for item, tensor in zip(given, tensors, strict=True):
            arguments[item.position] = tensor
        for position, number in sizes.items():
            arguments[position] = tensors[first_batch].size(0) if number is None else rows.of_lengths(number)
        known = number_reads(inputs, {**plain, **rows.numbers})
        interpreter = _AtenInterpreter(dynamo_graph, device, rows.is_fixed)
        return tuple(interpreter.run(*arguments, initial_env=known))

    return trace_function(
        forward,
        given,
        batch_positions=batch_positions,
        hint=rows_hint(dynamo_graph),
        device=device,
        strides_of=strides_of,
        lengths=lengths,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsSymbol:
    """The batch size of a trace, its lengths and numbers."""

    symbol: sympy.Symbol
    shape_env: ShapeEnv
    lengths: tuple[torch.SymInt, ...] = ()
    numbers: Mapping[int, torch.SymFloat] = field(default_factory=dict)  # Python's floats, by position

    def is_fixed(self) -> bool:
        """Whether it has been taken for its hint."""
        return self.symbol in self.shape_env.replacements

    def of_lengths(self, size: sympy.Expr) -> Any:
        """A size over `length_symbol`s as a number of the trace."""
        return _of_lengths(size, self.lengths)


def trace_function(
    forward: Callable[[tuple[torch.Tensor, ...], RowsSymbol], tuple[Any, ...]],
    inputs: Sequence[TensorInput],
    *,
    batch_positions: frozenset[int],
    hint: int,
    device: torch.device | None = None,
    strides_of: StridesOf = torch.Tensor.stride,
    lengths: LengthDims = NO_LENGTHS,
) -> AtenTrace:
    """Trace a function of fakes of `inputs`, which says itself what it cannot take, and notes the user's lines;
    see `trace_aten`. Placeholder i of the result, behind those of lengths, is `inputs[i]`.
    """
    shape_env = ShapeEnv()
    fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    rows = new_size(shape_env, "rows", hint)
    numbers = tuple(new_size(shape_env, length_name(index), size) for index, size in enumerate(lengths.hints))
    floats = {
        item.position: new_number(shape_env, item.label, float(item.tensor))
        for item in inputs
        if item.is_number
    }
    # Before the trace: a size that it takes for a number has no symbol afterwards.
    symbol, symbols = rows.node.expr, tuple(number.node.expr for number in numbers)
    number_symbols = {position: number.node.expr for position, number in floats.items()}
    sizes = {place: _of_lengths(size, numbers) for place, size in lengths.sizes.items()}
    fakes = [
        _fake_input(item, item.position in batch_positions, rows, sizes, fake_mode, device, strides_of)
        for item in inputs
    ]
    mutated: list[int] = []
    make_writes = functools.partial(DetachedWrites, is_with_gradients=torch.is_grad_enabled())
    num_user_outputs = 0

    def counted(*tensors: torch.Tensor) -> tuple[Any, ...]:
        nonlocal num_user_outputs
        known = RowsSymbol(symbol=symbol, shape_env=shape_env, lengths=numbers, numbers=floats)
        outputs = forward(tensors, known)
        num_user_outputs = len(outputs)
        return outputs

    with fake_mode, enable_python_dispatcher(), fx.traceback.preserve_node_meta(), torch.enable_grad():
        # A table in any case: without one torch 2.14 makes `alias` of `detach`, and gradients go on where the
        # model stops them.
        graph_module = make_fx(
            _functionalized(counted, make_writes, mutated, len(numbers) + len(floats)),
            decomposition_table=_table(),
            record_module_stack=True,
        )(*numbers, *floats.values(), *fakes)
    _detach_constants(graph_module.graph)
    graph_module.graph.eliminate_dead_code()
    _check_gradients(graph_module.graph)
    places = list(graph_module.graph.find_nodes(op="placeholder"))[len(numbers) :]
    of_item = {item.position: node for item, node in zip(inputs, places[len(floats) :], strict=True)}
    of_float = dict(zip(places, floats, strict=False))
    with_facts(graph_module, TRACED)
    tensors = {node.name: of_item[place].name for node, place in of_float.items()}
    needed = run_pass(FloatsAsTensors(tensors), graph_module).needed if tensors else frozenset()
    constants = {place for place, known in number_symbols.items() if known in shape_env.replacements}
    return AtenTrace(
        graph_module=graph_module,
        inputs=tuple(inputs),
        number_symbols=number_symbols,
        needed_numbers=frozenset(
            constants.union(place for node, place in of_float.items() if node.name in needed)
        ),
        sparse=made_dense(graph_module.graph),
        num_user_outputs=num_user_outputs,
        mutated=tuple(mutated),
        rows_symbol=symbol,
        rows_hint=hint,
        length_symbols=symbols,
        fake_mode=fake_mode,
    )


def _of_lengths(size: sympy.Expr, lengths: Sequence[torch.SymInt]) -> Any:
    return number_of(size, [length_symbol(index) for index in range(len(lengths))], lengths)


def _table() -> dict[Any, Callable[..., Any]]:
    written_out = {torch.ops.aten.as_strided_scatter.default: as_strided_scatter}
    return {**get_decompositions(_WITH_PLAIN_SIZES), **IN_PARTS, **written_out}


def _check_gradients(graph: fx.Graph) -> None:
    """Refuse what no stage gives right gradients for."""
    for node in graph.nodes:
        if node.target in _WRONG_GRADIENTS:
            raise UnsupportedModelError(
                f"torch gives wrong gradients for {node.target} in a captured graph",
                location=user_location(node.meta.get("stack_trace")),
                cure=_WRONG_GRADIENTS[node.target],
            )


def _fake_input(
    item: TensorInput,
    is_batch: bool,
    rows: int | torch.SymInt,
    sizes: Mapping[tuple[int, int], Any],
    mode: FakeTensorMode,
    device: torch.device | None,
    strides_of: StridesOf,
) -> torch.Tensor:
    tensor = item.tensor
    is_counter = (
        tensor.dim() == 0 and tensor.device.type == "cpu" and not isinstance(tensor, torch.nn.Parameter)
    )
    place = tensor.device if device is None or is_counter else device
    shape: list[Any] = [sizes.get((item.position, dim), int(size)) for dim, size in enumerate(tensor.shape)]
    with mode:
        if is_batch:
            # Slices of a batch are handed on as contiguous tensors, whatever the layout of the user's.
            fake = torch.empty((rows, *shape[1:]), dtype=tensor.dtype, device=place)
        elif any(isinstance(size, torch.SymInt) for size in shape):
            fake = torch.empty(shape, dtype=tensor.dtype, device=place)
        else:
            fake = torch.empty_strided(tensor.shape, strides_of(tensor), dtype=tensor.dtype, device=place)
        return fake.requires_grad_(tensor.requires_grad)


def _functionalized(
    forward: Callable[..., tuple[Any, ...]],
    make_writes: Callable[[], DetachedWrites],
    mutated: list[int],
    num_lengths: int,
) -> Callable[..., tuple[Any, ...]]:
    """`forward` without mutation, behind numbers that it has already; new values of mutated inputs are appended
    to its outputs, their indices to `mutated`.
    """

    def run(*arguments: Any) -> tuple[Any, ...]:
        tensors = arguments[num_lengths:]
        exclude = torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        )
        with exclude, FunctionalTensorMode(), PlainOperators(), BagsAsRows(), make_writes() as writes:
            wrapped = [FunctionalTensor.to_functional(tensor) for tensor in tensors]
            writes.begin(wrapped)
            outputs = forward(*wrapped)
            writes.check(outputs)
            mutated.clear()
            updates = []
            for index, tensor in enumerate(wrapped):
                torch._sync(tensor)
                if torch._functionalize_has_metadata_mutation(tensor.elem):
                    raise UnsupportedModelError(
                        "the model changes the shape or storage of one of its inputs in place"
                    )
                is_other = torch._functionalize_was_storage_changed(tensor.elem)
                if is_other:
                    check_own_memory(tensor, wrapped)
                if is_other or torch._functionalize_has_data_mutation(tensor.elem):  # type: ignore[attr-defined]
                    writes.check_change(tensor)
                    mutated.append(index)
                    updates.append(tensor)
            return tuple(_unwrapped(value) for value in (*outputs, *updates))

    return run


def _unwrapped(value: Any) -> Any:
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)


class _AtenInterpreter(fx.Interpreter):
    """Runs Dynamo's graph: wrappers are inlined, results under no_grad detached, the rest is torch's own
    business.
    """

    def __init__(
        self, graph_module: fx.GraphModule, device: torch.device | None, is_fixed: Callable[[], bool]
    ) -> None:
        super().__init__(graph_module, garbage_collect_values=True)
        self._device = device
        self._location = ""  # in the user's source, of the node that runs
        self._is_fixed = is_fixed  # whether the batch size has been taken for its hint
        # torch's note "While executing ..." prints the whole graph's node; our errors carry the user's line
        # instead.
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        self._location = user_location(n.meta.get("stack_trace") or "")
        operands: list[torch.Tensor] = []
        if n.op.startswith("call_"):
            operands = list(filter(needs_gradient, tensors_in(self.fetch_args_kwargs_from_env(n))))
        try:
            result = super().run_node(n)
        except RanncError as error:
            if getattr(error, "location", ""):
                raise
            raise located(error, self._location) from error.__cause__
        except Exception as error:
            raise UnsupportedModelError(
                f"{n.target} cannot be captured with a symbolic batch size: {type(error).__name__}: {error}",
                location=self._location,
            ) from error
        if self._is_fixed():
            raise fixed_rows(str(n.target), self._location)
        # x.contiguous() and the like may give x itself, with its gradient.
        if any(value is operand for value in tensors_in(result) for operand in operands):
            return result
        return with_constants(result, operands)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if self._device is None:
            return args, kwargs
        return pytree.tree_map_only(torch.device, self._moved, (args, kwargs))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _GET_DATA:
            return args[0].data  # which modes see
        if target is torch.Tensor.set_ and len(args) == 2:
            args[0].data = args[1]  # what Dynamo writes in its place
            return args[0]
        if not isinstance(target, HigherOrderOperator):
            return super().call_function(target, args, kwargs)
        name = target.name()
        if name in _WRAPPERS:
            body, operands = args[0], args[_WRAPPERS[name] :]
            return _AtenInterpreter(body, self._device, self._is_fixed).run(*operands)
        if name == "autograd_function_apply" and not (torch.is_grad_enabled() and _any_requires_grad(args)):
            return super().call_function(target, args, kwargs)
        raise UnsupportedModelError(
            f"the model uses {_readable(name)}, whose gradients or branches cannot be split over stages "
            "exactly",
            location=self._location,
            cure="write this part with ordinary operators, for which autograd knows the gradient.",
        )

    def _moved(self, device: torch.device) -> torch.device:
        assert self._device is not None
        return self._device


def fixed_rows(what: str, location: str) -> UnsupportedModelError:
    """The model has used its batch size as a number."""
    return needing_batch_size(f"{what} works for one batch size only", location=location)


def _any_requires_grad(values: object) -> bool:
    return any(map(needs_gradient, tensors_in(values)))


def _readable(name: str) -> str:
    return {
        "autograd_function_apply": "a torch.autograd.Function with a backward of its own",
        "cond": "torch.cond",
    }.get(name, f"torch.ops.higher_order.{name}")


def with_constants(result: Any, operands: Sequence[torch.Tensor]) -> Any:
    """What an operator gives, with `_constant_of` where autograd takes it for a constant; `operands` are those with a
    gradient. A derivative that a transform of torch.func takes reads weights that are not among them.
    """

    def of(value: torch.Tensor) -> torch.Tensor:
        is_wrapped = innermost(value) is not value and traced_node(value) is not None
        return _constant_of(value, operands) if operands or is_wrapped else value

    return pytree.tree_map_only(torch.Tensor, of, result)


def _constant_of(tensor: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The value of an operator that autograd takes for a constant, as one in the graph too; `operands` are those of
    the operator.

    It is noted at the value's node, for `_detach_constants`: what is written into the tensor later may have a
    gradient, which would end at a `detach`, as that is a view of it. Of what is an operand itself, a `detach`.
    """
    if needs_gradient(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    node = traced_node(tensor)
    if node is None or any(traced_node(operand) is node for operand in operands):
        return tensor.detach()
    node.meta[_CONSTANT] = True
    return tensor


def traced_node(tensor: torch.Tensor) -> fx.Node | None:
    """The node of a tensor's value in the trace that runs; None where nothing is traced."""
    mode: Any = get_proxy_mode()
    tensor = innermost(tensor)
    if mode is None or not isinstance(tensor, FunctionalTensor):
        return None
    torch._sync(tensor)
    slot = get_proxy_slot(torch._from_functional_tensor(tensor.elem), mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _detach_constants(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if not node.meta.pop(_CONSTANT, False) or node.target is torch.ops.aten.detach.default:
            continue
        with graph.inserting_after(node):
            constant = graph.call_function(torch.ops.aten.detach.default, (node,))
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant, delete_user_cb=lambda user, own=constant: user is not own)
