"""The forward of a model, run as Python on fakes, as a graph with a symbolic batch size.

In: a module and the arguments of one call. Out: a `Recorded`: the graph, where its tensors come from and what
it gives back. It is run twice: first alone, with a size of its own for dimension 0 of each argument, which
shows the arguments that have rows; then as `aten_trace` runs Dynamo's graphs, with one size for all of them.

What a run leaves behind (attributes of modules, values in globals) is found by `guards`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
import torch.fx.experimental._config as symbolic_config
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from rannc_backend.capture.aten_trace import (
    AtenTrace,
    RowsSymbol,
    trace_function,
)
from rannc_backend.capture.batch_inputs import batch_candidates, batch_of_one_size
from rannc_backend.capture.graph import CapturedGraph, captured_of, lengths_hold
from rannc_backend.capture.inputs import TensorInput, UserTensor, check_devices
from rannc_backend.capture.nonstrict.arguments import (
    BatchSize,
    Call,
    Changing,
    Place,
    Ranks,
    inputs_of,
    length_dims,
    places_of,
)
from rannc_backend.capture.nonstrict.kept_modules import KeptModules
from rannc_backend.capture.nonstrict.outputs import Structure, sorted_leaves, taken_apart
from rannc_backend.capture.nonstrict.read_values import ReadValue, TracedValue, read_value
from rannc_backend.capture.nonstrict.reads import Decision, Reads, Unknown, checked_both_ways, used_as_number
from rannc_backend.capture.nonstrict.swapping import Attributes, Written, swapped, values_of, write_back
from rannc_backend.capture.nonstrict.watch import Watch, keep_second_derivatives
from rannc_backend.errors import (
    DataDependentControlFlowError,
    ModelError,
    NoBatchDimensionError,
    UnsupportedModelError,
    needing_batch_size,
    user_location,
)
from rannc_backend.ir.length import NO_LENGTHS, LengthDims
from rannc_backend.ir.size_test import SizeTest, first_broken
from rannc_backend.passes.plain_numbers import (
    is_apart_from,
    length_hints,
    new_size,
    numbers_of,
    prime_apart_from,
)

logger = logging.getLogger(__name__)

PROBED_ROWS = 53
_MAX_TRACES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A captured forward. The tensor at position i is that of ``places[i]``, then those of the call."""

    captured: CapturedGraph
    places: tuple[Place, ...]
    structure: (
        Structure  # of what the forward gives, and of what it puts into attributes that it does not read
    )
    written: tuple[Written, ...] = ()  # these attributes
    constants: tuple[tuple[int, Any], ...]  # leaves of it that are no tensors, by position
    passed: tuple[tuple[int, int], ...]  # leaves that are arguments, by position; their place in the call
    # leaves that are numbers (`loss.item()`), by position: of how many tensors, and what of these
    numbers: Mapping[int, tuple[int, Callable[..., Any]]] = field(default_factory=dict)
    # places of checks of values that only raise, which the graph does not make
    unchecked: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()  # values that chose the path
    kept_modules: Mapping[str, str] = field(default_factory=dict)  # that run as written, with their classes
    why_kept: str = ""
    kept_attributes: Attributes = ()  # that these set, on the ranks that run them
    lengths: LengthDims = NO_LENGTHS

    def takes(self, num_rows: int) -> bool:
        """Whether the model's code takes the captured path for a batch of so many rows on all ranks."""
        return first_broken(self.captured.size_tests, num_rows) is None

    def result(self, outputs: Sequence[Any], call: Call) -> Any:
        """What the forward gives for a call, with these tensors; attributes that it writes have their values then."""
        known = dict(self.constants) | {position: call.given[index] for position, index in self.passed}
        remaining = iter(outputs)

        def leaf(position: int) -> Any:
            if position in known:
                return known[position]
            if position not in self.numbers:
                return next(remaining)
            count, form = self.numbers[position]
            return form(*(next(remaining).tolist() for _ in range(count)))

        result, *values = self.structure.rebuilt(map(leaf, range(self.structure.num_leaves)))
        for attribute, value in zip(self.written, values, strict=True):
            attribute.holder[attribute.key] = value
        return result


def record(
    module: nn.Module,
    call: Call,
    ranks: Ranks,
    undo: Callable[[], None],
    changing: Changing = frozenset(),
    all_rows: bool = False,
    unread: frozenset[str] = frozenset(),
) -> Recorded:
    """Capture one call of the module. Collective where its code tests its batch size or values.

    ``changing``: (tensor of the call, dimension) of sizes that other calls have had otherwise: these are lengths
    where the forward can be traced so. ``all_rows``, ``unread``: see `KeptModules`. ``undo``: takes back what a failed run changed.

    Raises:
        UnsupportedModelError: for what a graph cannot hold exactly; with the user's line.
        DataDependentControlFlowError, NoBatchDimensionError: it tests its batch size; no argument has rows.
        ModelDevicesError: parameters on several devices.
    """
    tensors = [
        None if ranks.is_absent(item.tensor) else item.tensor
        for item in inputs_of(places_of(module, unread), call)
    ]
    kept = KeptModules(module, all_rows=all_rows, unread=unread)
    while True:
        try:
            recorded, unchecked, decisions = checked_both_ways(
                lambda reads: _recorded(module, call, reads, ranks, changing, kept),
                lambda value: value.evaluate(tensors, ranks.exchange),
                functools.partial(_without_graph, module, call, ranks, kept),
            )
        except ModelError as error:
            if not kept.extended(error):
                raise kept.refusal(error) from error
            undo()
            logger.debug("the forward is run again with more modules kept whole: %s", error)
            continue
        more: dict[str, Any] = {"kept_modules": dict(kept.names), "why_kept": kept.why()}
        more["kept_attributes"] = tuple(itertools.chain(*kept.attributes.values()))
        return replace(recorded, unchecked=unchecked, decisions=decisions, **more)


def _recorded(
    module: nn.Module, call: Call, reads: Reads, ranks: Ranks, changing: Changing, kept: KeptModules
) -> Recorded:
    places = places_of(module, kept.unread)
    inputs = inputs_of(places, call)
    if ranks.device is None:
        check_devices(inputs)
    numbers = {size for item in inputs for size in item.tensor.shape}
    wanted = length_dims(call, len(places), changing)
    for hints in length_hints(wanted.hints, numbers):
        lengths = replace(wanted, hints=hints)
        try:
            recorded = _recorded_at(module, call, places, inputs, reads, ranks, lengths, kept)
        except ModelError as error:
            logger.debug("with symbolic lengths at %s it cannot be traced: %s", hints, error)
            continue
        if lengths_hold(recorded.captured, wanted.hints):
            return recorded
    return _recorded_at(module, call, places, inputs, reads, ranks, NO_LENGTHS, kept)


def _recorded_at(
    module: nn.Module,
    call: Call,
    places: tuple[Place, ...],
    inputs: Sequence[TensorInput],
    reads: Reads,
    ranks: Ranks,
    lengths: LengthDims,
    kept: KeptModules,
) -> Recorded:
    traced = functools.partial(_traced, module, call, inputs, reads, ranks, lengths, kept)
    # A size that the forward uses as a number is one too where all inputs share it: no probe where none is.
    guess = _batch_guess(inputs)
    try:
        run, trace, batch = traced(guess)
    except (UnsupportedModelError, NoBatchDimensionError) as error:
        if kept.all_rows:
            raise
        try:
            batch = _batch_positions(module, inputs, call, ranks, Reads(reads.answers), kept)
        except NoBatchDimensionError:
            raise error from None  # it says more: why the batch size cannot be a symbol
        if batch == guess:
            raise
        run, trace, batch = traced(batch)
    assert run.structure is not None
    return Recorded(
        captured=captured_of(trace, batch, module, lengths=lengths, size_tests=run.size_tests),
        places=places,
        structure=run.structure,
        written=run.written,
        constants=tuple(run.constants.items()),
        passed=tuple(run.passed.items()),
        numbers=dict(run.numbers),
        lengths=lengths,
    )


def _traced(
    module: nn.Module,
    call: Call,
    inputs: Sequence[TensorInput],
    reads: Reads,
    ranks: Ranks,
    lengths: LengthDims,
    kept: KeptModules,
    batch: frozenset[int],
) -> tuple[_Run, AtenTrace, frozenset[int]]:
    """The forward, traced with the batch size for dimension 0 of the inputs at the positions `batch`."""
    if not batch:
        raise _no_batch(inputs)
    numbers = {size for item in inputs for size in item.tensor.shape} | set(lengths.hints)
    local_rows = next(int(item.tensor.shape[0]) for item in inputs if item.position in batch)
    hint, all_rows = prime_apart_from(numbers), functools.cache(lambda: ranks.global_rows(local_rows))
    for _ in range(_MAX_TRACES):
        run = _Run(module, inputs, call, reads, batch, lengths, kept, local_rows, all_rows)
        suits = functools.partial(_takes_the_path, run, all_rows)
        try:
            trace = trace_function(
                run.forward,
                inputs,
                batch_positions=batch,
                hint=hint,
                device=ranks.device,
                strides_of=ranks.strides_of,
                lengths=lengths,
            )
        except Exception as error:
            if suits(hint):
                raise
            # The batch might not have failed.
            hint = prime_apart_from(numbers, suits)
            if not hint:
                raise _no_hint(run.size_tests, all_rows()) from error
            continue
        run.check(trace)
        keep_second_derivatives(trace.graph_module.graph)
        # No size may equal a multiple of the hint by coincidence, and the path is that of the whole batch.
        numbers |= numbers_of(trace.graph_module)
        if suits(hint) and is_apart_from(hint, numbers):
            return run, trace, batch
        hint = prime_apart_from(numbers, suits)
        if not hint:
            raise _no_hint(run.size_tests, all_rows())
    raise needing_batch_size("the forward uses sizes that depend on its batch size as numbers")


def _takes_the_path(run: _Run, all_rows: Callable[[], int], hint: int) -> bool:
    """Whether a batch of `hint` samples takes the path of one of all ranks, as far as the run's tests know."""
    return all(test.holds(hint) == test.holds(all_rows()) for test in run.size_tests)


def _no_hint(tests: Sequence[SizeTest], num_rows: int) -> DataDependentControlFlowError:
    test = first_broken(tests, num_rows) or tests[0]
    return DataDependentControlFlowError(
        f"the model tests its batch size ({test.text}), and no other size takes the path of a batch of "
        f"{num_rows} samples",
        location=test.location,
    )


class _Run:
    """One run of the forward on fakes."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[TensorInput],
        call: Call,
        reads: Reads,
        batch: frozenset[int],
        lengths: LengthDims,
        kept: KeptModules,
        local_rows: int,
        all_rows: Callable[[], int],
    ) -> None:
        self._local_rows, self._all_rows = local_rows, all_rows
        self._reads = reads
        self._kept = kept
        self._lengths = lengths
        self._batch = batch
        self._module = module
        self._inputs = inputs
        self._call = call
        self.structure: Structure | None = None
        self.written: tuple[Written, ...] = ()
        self.size_tests: tuple[SizeTest, ...] = ()
        self.constants: dict[int, Any] = {}
        self.passed: dict[int, int] = {}
        self.numbers: dict[int, tuple[int, Callable[..., Any]]] = {}

    def forward(self, tensors: tuple[torch.Tensor, ...], rows: RowsSymbol) -> tuple[Any, ...]:
        """Gives the tensors among the outputs."""
        others, given = _apart(self._inputs, self._call, tensors)
        args, kwargs = self._call.rebuilt(given)
        watch = Watch(rows, self._reads, self._kept)
        self._reads.begin(functools.partial(self._read, rows.symbol), watch.note_place)
        running = self._kept.running(BatchSize(rows.symbol, self._local_rows, self._all_rows))
        with running, swapped(self._module, others, self._kept.unread) as swap:
            try:
                with watch.watching():
                    result = _rannc_forward(self._kept, args, kwargs)
            except Exception:
                with contextlib.suppress(ModelError):
                    self.size_tests = watch.size_tests()
                raise
            self.written = swap.written()
            values = values_of(self.written, others.values(), self._kept.names)
            leaves, self.structure = taken_apart((result, *values))
            write_back(swap.replaced(), leaves)
        self.size_tests = watch.size_tests()
        found = sorted_leaves(leaves, given, watch.packed.holds)
        self.constants, self.passed, self.numbers = found.constants, found.passed, found.numbers
        return found.outputs

    def _read(self, symbol: sympy.Symbol, traced: TracedValue, location: str) -> ReadValue:
        return read_value(traced, self._inputs, self._batch, self._lengths, symbol, location)

    def check(self, trace: AtenTrace) -> None:
        """Refuse tensors that are neither arguments nor the model's: the graph would hold today's."""
        graph_module = trace.graph_module
        for node in graph_module.graph.find_nodes(op="get_attr"):
            value = getattr(graph_module, str(node.target), None)
            # torch.tensor(...) in the forward: made anew from numbers in the code.
            if not isinstance(value, torch.Tensor) or all(
                user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users
            ):
                continue
            user = next(iter(node.users), node)
            raise UnsupportedModelError(
                f"the model uses a tensor {list(value.shape)} that is neither an argument nor registered in "
                "it",
                location=user_location(user.meta.get("stack_trace")),
                cure="register it (self.register_buffer, self.name = nn.Parameter(...)), or pass it as an "
                "argument.",
            )


def _rannc_forward(kept: KeptModules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Traces of the user's lines begin below this function.
    try:
        return kept.forward(args, kwargs)
    except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
        raise DataDependentControlFlowError(
            "the forward decides by a value that is known only when it runs",
            location=user_location("".join(traceback.format_tb(error.__traceback__))),
        ) from error
    except TypeError as error:
        # Of functions that take it for what it is not, before anything sees the call.
        if Unknown.__name__ not in str(error):
            raise
        raise used_as_number("".join(traceback.format_tb(error.__traceback__))) from error


def _apart(
    inputs: Sequence[TensorInput], call: Call, tensors: Sequence[torch.Tensor]
) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
    """Of tensors in the places of `inputs`: those of the module, by the id of its own, and the user's."""
    own = len(inputs) - len(call.tensors)
    others = {id(item.tensor): tensor for item, tensor in zip(inputs[:own], tensors[:own], strict=True)}
    return others, call.as_given(tensors[own:])


def _batch_guess(inputs: Sequence[TensorInput]) -> frozenset[int]:
    """All arguments whose dimension 0 may be the batch size, if that is one size; else none."""
    for single in (False, True):
        known = {id(tensor) for tensor in batch_candidates(inputs, single=single)}
        found = [item for item in inputs if id(item.tensor) in known]
        if found:
            is_one = len({item.tensor.shape[0] for item in found}) == 1
            return frozenset(item.position for item in found if is_one)
    return frozenset()


def _no_batch(inputs: Sequence[TensorInput]) -> NoBatchDimensionError:
    return NoBatchDimensionError(
        {item.label: tuple(item.tensor.shape) for item in inputs if isinstance(item, UserTensor)}
    )


def _batch_positions(
    module: nn.Module,
    inputs: Sequence[TensorInput],
    call: Call,
    ranks: Ranks,
    reads: Reads,
    kept: KeptModules,
) -> frozenset[int]:
    """Arguments whose dimension 0 the forward does not use as a number."""
    for single in (False, True):
        known = {id(tensor) for tensor in batch_candidates(inputs, single=single)}
        hints = {
            (item.position, 0): PROBED_ROWS if single else int(item.tensor.shape[0])
            for item in inputs
            if id(item.tensor) in known
        }
        if not hints:
            continue
        sizes, shape_env = sizes_after_run(module, inputs, call, ranks, reads, kept, hints)
        left = {
            position: expression for (position, _), expression in sizes.items() if not expression.is_number
        }
        if left and (found := batch_of_one_size(inputs, left, shape_env)):
            return found
    raise _no_batch(inputs)


def sizes_after_run(
    module: nn.Module,
    inputs: Sequence[TensorInput],
    call: Call,
    ranks: Ranks,
    reads: Reads,
    kept: KeptModules,
    hints: Mapping[tuple[int, int], int],
) -> tuple[dict[tuple[int, int], sympy.Expr], ShapeEnv]:
    """What a run of the forward makes of sizes of inputs, each a symbol of its own with the hint of its position and
    dimension; and what it has asked of them.
    """
    shape_env = ShapeEnv(duck_shape=False)
    with symbolic_config.patch(backed_size_oblivious=True, use_duck_shape=False):  # type: ignore[attr-defined]
        sizes = {
            place: new_size(shape_env, "size_{}_{}".format(*place), hint) for place, hint in hints.items()
        }
        _run_on_fakes(module, inputs, call, ranks, reads, kept, shape_env, sizes)
    return {place: shape_env.replace(size.node.expr) for place, size in sizes.items()}, shape_env


def _without_graph(module: nn.Module, call: Call, ranks: Ranks, kept: KeptModules, reads: Reads) -> None:
    """Run the forward for how it ends: with a plain number for the batch size, which takes a tenth of the time."""
    inputs = inputs_of(places_of(module, kept.unread), call)
    rows = prime_apart_from({size for item in inputs for size in item.tensor.shape})
    sizes = {(position, 0): rows for position in _batch_guess(inputs)}
    _run_on_fakes(module, inputs, call, ranks, reads, kept, ShapeEnv(), sizes)


def _run_on_fakes(
    module: nn.Module,
    inputs: Sequence[TensorInput],
    call: Call,
    ranks: Ranks,
    reads: Reads,
    kept: KeptModules,
    shape_env: ShapeEnv,
    sizes: Mapping[tuple[int, int], Any],
) -> None:
    """Run the forward, of which no graph is made; ``sizes``: other ones, by the position of an input and dimension."""
    fakes = []
    with FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True):
        for item in inputs:
            options: dict[str, Any] = {
                "dtype": item.tensor.dtype,
                "device": ranks.device or item.tensor.device,
            }
            if any(position == item.position for position, _ in sizes):
                shape = [sizes.get((item.position, dim), size) for dim, size in enumerate(item.tensor.shape)]
                fake = torch.empty(shape, **options)
            else:
                strides = ranks.strides_of(item.tensor)
                fake = torch.empty_strided(list(item.tensor.shape), strides, **options)
            fakes.append(fake.requires_grad_(item.tensor.requires_grad))
        others, given = _apart(inputs, call, fakes)
        args, kwargs = call.rebuilt(given)
        never = RowsSymbol(symbol=sympy.Dummy("none"), shape_env=shape_env)
        watch = Watch(never, reads, kept)
        reads.begin(noted=watch.note_place)
        with (
            kept.running(),
            swapped(module, others, kept.unread),
            enable_python_dispatcher(),
            fx.traceback.preserve_node_meta(),
            watch.watching(),
        ):
            _rannc_forward(kept, args, kwargs)
