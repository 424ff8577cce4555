"""Builds a model without memory and remembers how each of its tensors is made, so that any rank can make any
of them later.

In: the construction of a model under `DistributeModelParams`. Out: parameters and buffers on "meta", and a
*tape* of the operators that would have made them. Making one tensor runs the operators that it depends on and
no others. Terms: a *write* is an operator that makes a tensor, or changes one; tensors that share memory
share a *place* on the tape.

Code of the model that asks for a value (``linspace(...).tolist()``) gets it: what it depends on is run then
and there.

The rule: what is random in write i is drawn from a generator seeded with (seed, i). The seed is drawn from
rank 0's default generator when recording begins, so ``torch.manual_seed`` decides; neither the number of
stages nor of ranks does. They are not the numbers that building the model on the CPU draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from rannc_backend.errors import UserInputError
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.torch_internals import (
    OperatorWatch,
    leaves_of,
    map_leaves,
    storage_key,
    whole_fill_functions,
    written_arguments,
)
from rannc_backend.session_registry import REGISTRY
from rannc_backend.settings import hooks

_META, _CPU = torch.device("meta"), torch.device("cpu")
# Built from Python values: on "meta" those would be lost before any operator is seen.
_FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_aten = torch.ops.aten
# These leave nothing of what was there before.
_OVERWRITING = frozenset(
    {
        _aten.uniform_.default,
        _aten.normal_.default,
        _aten.zero_.default,
        _aten.fill_.Scalar,
        _aten.copy_.default,
    }
)


@dataclass(frozen=True, slots=True)
class Reference:
    """A tensor on the tape: where in which place."""

    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conjugate: bool
    is_negative: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One operator; tensors among its arguments and results are `Reference`s, or real tensors."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Any, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    is_random: bool


@dataclass(slots=True)
class Tape:
    """All writes of one recording. A `Source` of deferred values, which are named by where they lie: see
    `key_of`.
    """

    seed: int
    held: bool = False
    writes: list[Write] = field(default_factory=list)
    _places: dict[int, int] = field(default_factory=dict)  # by storage
    _kept: list[torch.Tensor] = field(
        default_factory=list
    )  # keeps storages alive, so that their numbers stay theirs
    _references: dict[str, Reference] = field(default_factory=dict)

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on "meta" and note it; what reads a value of a tensor gets the value."""
        tensors = _tensors_in((args, kwargs))
        if any(tensor.device == _META for tensor in tensors) and _leaves_meta(operator, kwargs):
            real_args, real_kwargs = map_leaves(self._made_now, (args, dict(kwargs)))
            return operator(*real_args, **real_kwargs)
        result = operator(*args, **kwargs)
        results = _tensors_in(result)
        if any(tensor.device == _META for tensor in (*tensors, *results)):
            self._note(operator, args, kwargs, results)
        return result

    def note_call(
        self, function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Note a whole function that fills ``tensor`` at random, in ways that depend on what is drawn."""
        reference = self._reference(tensor)
        place = frozenset({reference.place})
        self._add(
            function,
            (reference, *args),
            kwargs,
            (),
            reads=place,
            writes=place,
            overwrites=frozenset(),
            is_random=True,
        )
        return tensor

    def _note(
        self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Sequence[torch.Tensor]
    ) -> None:
        known_args, known_kwargs = map_leaves(self._noted, (args, dict(kwargs)))
        before = len(self._places)
        mutated = [tensor for tensor in written_arguments(operator, args, kwargs) if tensor.device == _META]
        written = {self._reference(tensor).place for tensor in mutated}
        noted = tuple(self._noted(tensor) for tensor in results)
        made = {leaf.place for leaf in noted if isinstance(leaf, Reference) and leaf.place >= before}
        if not written and not made:
            return  # a view
        overwritten: set[int] = set()
        if operator in _OVERWRITING and mutated and _is_all_of_its_place(mutated[0]):
            overwritten = written - set(_places_in((known_args[1:], known_kwargs)))
        self._add(
            operator,
            known_args,
            known_kwargs,
            noted,
            reads=frozenset(_places_in((known_args, known_kwargs))),
            writes=frozenset(written | made),
            overwrites=frozenset(overwritten | made),
            is_random=torch.Tag.nondeterministic_seeded in operator.tags,
        )

    def _add(
        self,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        results: tuple[Any, ...],
        **members: Any,
    ) -> None:
        self.writes.append(
            Write(operator=operator, args=args, kwargs=dict(kwargs), results=results, **members)
        )

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # Real tensors are few and small; what is done to them later must not count.
        return self._reference(leaf) if leaf.device == _META else leaf.detach().clone()

    def _made_now(self, leaf: Any) -> Any:
        is_deferred_value = isinstance(leaf, torch.Tensor) and leaf.device == _META
        return self.make(self._reference(leaf), self.seed) if is_deferred_value else leaf

    def _reference(self, tensor: torch.Tensor) -> Reference:
        key = storage_key(tensor)
        if key not in self._places:
            self._places[key] = len(self._places)
            self._kept.append(tensor.detach())
        marks = tensor.is_conj(), tensor.is_neg()
        return Reference(
            self._places[key],
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            *marks,
        )

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in a place of this tape."""
        return storage_key(tensor) in self._places

    def key_of(self, tensor: torch.Tensor) -> str:
        """The name under which `value` makes what is in a tensor now."""
        reference = self._reference(tensor)
        self._references[str(reference)] = reference
        return str(reference)

    def value(self, name: str, seed: int) -> torch.Tensor:
        """The value of a tensor that `key_of` was asked about, on the CPU."""
        return self.make(self._references[name], seed)

    def make(self, wanted: Reference, seed: int) -> torch.Tensor:
        """Run what a tensor depends on. UserInputError when its value came from nowhere that was recorded."""
        needed: set[int] = {wanted.place}
        chosen = []
        for number in range(len(self.writes) - 1, -1, -1):
            write = self.writes[number]
            if write.writes & needed:
                chosen.append(number)
                needed = (needed - write.overwrites) | (write.reads - write.overwrites)
        if needed:
            raise UserInputError(
                "a tensor of the model was made in a way that cannot be recorded",
                cure="build it outside of DistributeModelParams, or give materialize_by_stage a source of "
                "values.",
            )
        memory: dict[int, torch.Tensor] = {}
        # The model may be under construction, where tensors go to "meta" by default.
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            for number in reversed(chosen):
                if self.writes[number].is_random:
                    seed_generator(f"{seed} {number}")
                _play(self.writes[number], memory)
        return _seen(memory[wanted.place], wanted).clone(memory_format=torch.preserve_format)


class DistributeModelParams:
    """Context in which models are built without memory: ``with DistributeModelParams(): model = Net()``.

    Collective: all ranks must enter it. What the constructors do to parameters is recorded, and each rank
    repeats it for the parameters of its stages at the model's first call. Pass the model to `RaNNCModule` or
    `materialize_by_stage`.

    Args:
        enable: If False, models are built as usual.
    """

    def __init__(self, enable: bool = True) -> None:
        self.enable = enable
        self._stack = ExitStack()

    def __enter__(self) -> DistributeModelParams:
        if not self.enable:
            return self
        drawn = int(torch.empty((), dtype=torch.int64).random_().item())
        tape = Tape(bootstrap.start().control.broadcast(drawn, what="seed of parameters"))

        def registered(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
            if tensor is not None and tensor.device == _META:
                REGISTRY.recordings[tensor] = tape

        with ExitStack() as stack:
            stack.enter_context(torch.device("meta"))
            stack.enter_context(_FromValues())
            stack.enter_context(OperatorWatch(tape.run))
            stack.enter_context(whole_fill_functions(tape.note_call))
            for register in (
                register_module_parameter_registration_hook,
                register_module_buffer_registration_hook,
            ):
                stack.callback(hooks.register("recorded parameters", register, registered))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()


class _FromValues(TorchFunctionMode):
    """Lets tensors made from Python values be seen as operators, and code that spares tensors on "meta" the
    work do it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FROM_VALUES and kwargs.get("device") is None:
            return func(*args, **{**kwargs, "device": _CPU}).to(_META)
        if func == _IS_META:
            return False
        return func(*args, **kwargs)


def recorded_source(tensor: torch.Tensor) -> Tape | None:
    """The recording that a tensor comes from; None when it was not recorded."""
    found = REGISTRY.recordings.get(tensor)
    if found is None and tensor.device == _META:
        # Conversions put other tensors in the place of registered buffers.
        tapes = {id(tape): tape for tape in REGISTRY.recordings.values()}
        found = next((tape for tape in tapes.values() if tape.knows(tensor)), None)
    return found


def seed_generator(text: str) -> None:
    """Seed torch's default CPU generator by a text."""
    digest = hashlib.sha256(text.encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _leaves_meta(operator: Any, kwargs: Mapping[str, Any]) -> bool:
    if operator is _aten._to_copy.default:
        return kwargs.get("device") is not None and torch.device(kwargs["device"]) != _META
    return operator in (_aten._local_scalar_dense.default, _aten.equal.default)


def _play(write: Write, memory: dict[int, torch.Tensor]) -> None:
    def real(value: Any) -> Any:
        if isinstance(value, Reference):
            if value.place not in memory:
                assert value.place in write.overwrites, "a value is read before it is made"
                memory[value.place] = torch.empty(_extent(value), dtype=value.dtype)
            return _seen(memory[value.place], value)
        # Of the tape, which may be played again.
        return value.clone() if isinstance(value, torch.Tensor) else _CPU if value == _META else value

    args, kwargs = map_leaves(real, (write.args, dict(write.kwargs)))
    results = _tensors_in(write.operator(*args, **kwargs))
    for result, reference in zip(results, write.results):
        if isinstance(reference, Reference) and reference.place not in memory:
            memory[reference.place] = _laid_out(result, reference)


def _laid_out(result: torch.Tensor, reference: Reference) -> torch.Tensor:
    """Memory in which the result lies as the reference says."""
    if result.numel() == 0 or (
        tuple(result.stride()) == reference.strides and result.storage_offset() == reference.offset
    ):
        return result
    memory = torch.empty(_extent(reference), dtype=reference.dtype)
    _seen(memory, reference).copy_(result)
    return memory


def _seen(memory: torch.Tensor, reference: Reference) -> torch.Tensor:
    empty = torch.empty(0, dtype=reference.dtype, device=_CPU)
    seen = empty.set_(memory.untyped_storage(), reference.offset, reference.shape, reference.strides)
    seen = seen.conj() if reference.is_conjugate else seen
    return _aten._neg_view(seen) if reference.is_negative else seen


def _extent(reference: Reference) -> int:
    """Elements from the beginning of the memory to the last one of the tensor."""
    if 0 in reference.shape:
        return 0
    return (
        reference.offset
        + 1
        + sum((size - 1) * stride for size, stride in zip(reference.shape, reference.strides, strict=True))
    )


def _is_all_of_its_place(tensor: torch.Tensor) -> bool:
    return (
        tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() and tensor.is_contiguous()
    )


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(values) if isinstance(leaf, torch.Tensor)]


def _places_in(values: Any) -> list[int]:
    return [leaf.place for leaf in leaves_of(values) if isinstance(leaf, Reference)]
