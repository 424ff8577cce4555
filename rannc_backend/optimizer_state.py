"""An optimizer's state, whole, although each rank keeps that of its own parameters only.

In: an optimizer over all parameters of a model. Out: for this one object, ``state_dict(from_global=True)`` and
``load_state_dict(state, from_global=True)``; and its state goes where its parameters go. Terms: an *entry* is the state of one parameter,
a nest of tensors and plain values; a parameter's *index* counts over all groups, as in torch's state_dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rannc_backend.errors import UserInputError
from rannc_backend.runtime import bootstrap
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.parameters import STATE_CHANNEL, ParameterTable, Ranks
from rannc_backend.runtime.world import World
from rannc_backend.session import SessionRegistry

StateDict = dict[str, Any]
_PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True, kw_only=True)
class GlobalState:
    """What one optimizer of one model needs to know of the other ranks."""

    root: weakref.ref[nn.Module]
    optimizer: weakref.ref[torch.optim.Optimizer]
    registry: SessionRegistry
    own_state: Callable[[], StateDict]
    load_own: Callable[[StateDict], None]
    deferred: StateDict | None = None  # to be loaded when the model is planned
    is_deferred: bool = False

    @classmethod
    def attach(cls, root: nn.Module, optimizer: torch.optim.Optimizer, registry: SessionRegistry) -> GlobalState:
        """Give the optimizer its two new arguments, and let its state follow its parameters."""
        self = cls(
            root=weakref.ref(root),
            optimizer=weakref.ref(optimizer),
            registry=registry,
            own_state=optimizer.state_dict,
            load_own=optimizer.load_state_dict,
        )

        def state_dict(*, from_global: bool = False, **kwargs: Any) -> StateDict | None:
            return self.whole_state() if from_global else self.own_state(**kwargs)

        def load_state_dict(state_dict: StateDict | None, *, from_global: bool = False, **kwargs: Any) -> None:
            if from_global:
                self.load_whole(state_dict)
            else:
                self.load_own(state_dict, **kwargs)

        # The object's own attributes, not the class's: other optimizers stay as they are.
        optimizer.state_dict = state_dict  # type: ignore[method-assign,assignment]
        optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign,assignment]
        optimizer.register_step_pre_hook(lambda *_: self._before_step())
        registry.optimizers[optimizer] = self
        registry.followers.setdefault(root, []).append(self)
        session = registry.of(root)
        if session is not None and session.table is not None:
            self.parameters_moved(session.table, None)
        return self

    def _table(self) -> ParameterTable | None:
        root = self.root()
        session = None if root is None else self.registry.of(root)
        return None if session is None else session.table

    def _before_step(self) -> None:
        table = self._table()
        if table is not None:
            table.require_reduced_gradients("optimizer.step()")

    def _parameters(self) -> list[torch.Tensor]:
        optimizer = self.optimizer()
        assert optimizer is not None, "the optimizer is gone"
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def _owners(self, table: ParameterTable, owners: Mapping[str, Ranks]) -> list[Ranks]:
        names = [table.name_of(parameter) for parameter in self._parameters()]
        return [table.everyone if name is None else owners[name] for name in names]

    def whole_state(self) -> StateDict | None:
        """The state_dict of one process, on rank 0's CPU; None elsewhere. Collective."""
        table, state = self._table(), self.own_state()
        if table is None:
            return _on_cpu(state) if bootstrap.start().rank == 0 else None
        agree(table.world, "optimizer.state_dict(from_global=True)")
        entries = [state["state"].get(index) for index in range(len(self._parameters()))]
        sources = [ranks[0] for ranks in self._owners(table, table.owners)]
        entries = exchange(table.world, entries, sources, [(0,)] * len(entries))
        if table.world.rank != 0:
            return None
        found = {index: entry for index, entry in enumerate(entries) if entry is not None}
        return _on_cpu({**state, "state": found})

    def load_whole(self, state: StateDict | None) -> None:
        """Keep this rank's part of what `whole_state` gave, at once or when the model is planned. Collective once it is.

        Raises:
            UserInputError: rank 0 passes None.
        """
        table = self._table()
        if table is None:
            self.deferred, self.is_deferred = state, True
            if state is not None:
                self.load_own({**state, "state": {}})
            return
        given = agree(table.world, "optimizer.load_state_dict(from_global=True)", state is not None)
        if not given[0]:
            raise UserInputError("rank 0 gave no optimizer state", cure="pass rank 0 what state_dict(from_global=True) gave it.")
        num_parameters = len(self._parameters())
        entries: list[Any] = [None] * (num_parameters + 1)
        if state is not None:
            entries = [state["state"].get(index) for index in range(num_parameters)]
            entries.append({key: value for key, value in state.items() if key != "state"})
        lacking = [tuple(rank for rank in ranks if not given[rank]) for ranks in self._owners(table, table.owners)]
        lacking.append(tuple(rank for rank in table.everyone if not given[rank]))
        *entries, rest = exchange(table.world, entries, [0] * len(entries), lacking)
        owners = self._owners(table, table.owners)
        own = {i: entry for i, entry in enumerate(entries) if entry is not None and table.world.rank in owners[i]}
        self.load_own({**rest, "state": own})

    def parameters_moved(self, table: ParameterTable, before: Mapping[str, Ranks] | None) -> None:
        """Follow the parameters to their owners; ``before``: the owners until now, None at the first deployment. Collective."""
        optimizer = self.optimizer()
        if optimizer is None:
            return
        deferred = agree(table.world, "an optimizer following its parameters", self.is_deferred)
        if any(deferred):
            state, self.deferred, self.is_deferred = self.deferred, None, False
            self.load_whole(state)
        elif before is not None:
            self._transfer(table, before)
        for parameter, owners in zip(self._parameters(), self._owners(table, table.owners), strict=True):
            if table.world.rank not in owners:
                optimizer.state.pop(parameter, None)

    def _transfer(self, table: ParameterTable, before: Mapping[str, Ranks]) -> None:
        state = self.own_state()
        old, new = self._owners(table, before), self._owners(table, table.owners)
        entries = [state["state"].get(index) for index in range(len(old))]
        takers = [tuple(rank for rank in ranks if rank not in held) for ranks, held in zip(new, old, strict=True)]
        entries = exchange(table.world, entries, [ranks[0] for ranks in old], takers)
        own = {i: entry for i, entry in enumerate(entries) if entry is not None and table.world.rank in new[i]}
        self.load_own({**state, "state": own})


def globals_of(optimizer: torch.optim.Optimizer, registry: SessionRegistry) -> GlobalState | None:
    """What `GlobalState.attach` has made for an optimizer; None when it has not."""
    found = registry.optimizers.get(optimizer)
    assert found is None or isinstance(found, GlobalState), "something else follows the optimizer"
    return found


def exchange(world: World, entries: Sequence[Any], sources: Sequence[int], takers: Sequence[Ranks]) -> list[Any]:
    """``entries`` with those that this rank takes from others filled in, on the CPU; an entry without a value stays None. Collective.

    Args:
        entries: this rank's own.
        sources: the rank that has each entry.
        takers: the ranks that want each entry.
    """
    result = list(entries)
    wanted = [i for i in range(len(result)) if any(taker != sources[i] for taker in takers[i])]
    coded: dict[int, Coded] = {i: Coded.of(entries[i]) for i in wanted if sources[i] == world.rank and entries[i] is not None}
    shapes = {i: form for answer in agree(world, "forms of optimizer state", [[i, c.form] for i, c in coded.items()]) for i, form in answer}
    for i in wanted:
        if i not in shapes:
            continue
        if sources[i] == world.rank:
            for tensor in coded[i].tensors:
                data = tensor.detach().to(world.device).contiguous()
                for work in [world.transport.isend(data, taker, STATE_CHANNEL) for taker in takers[i] if taker != world.rank]:
                    work.wait()
        elif world.rank in takers[i]:
            tensors = []
            for shape, dtype in tensors_of_form(shapes[i]):
                buffer = torch.empty(shape, dtype=dtype, device=world.device)
                world.transport.irecv(buffer, sources[i], STATE_CHANNEL).wait()
                tensors.append(buffer.cpu())
            result[i] = value_of_form(shapes[i], iter(tensors))
    return result


@dataclass(slots=True)
class Coded:
    """A nest as JSON, its *form*, with the tensors beside it in order."""

    form: Any = None
    tensors: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, value: Any) -> Coded:
        """UserInputError for what is neither a tensor, a plain value, nor a list, tuple or dict of such."""
        coded = cls()
        coded.form = coded._code(value)
        return coded

    def _code(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return ["tensor", list(value.shape), str(value.dtype).removeprefix("torch.")]
        if isinstance(value, dict):
            return ["dict", [[self._code(key), self._code(member)] for key, member in value.items()]]
        if isinstance(value, list | tuple):
            return ["list" if isinstance(value, list) else "tuple", [self._code(member) for member in value]]
        if isinstance(value, _PLAIN):
            # As text, so that infinities and all digits of a float arrive.
            return ["plain", repr(value) if isinstance(value, float) else value, type(value).__name__]
        raise UserInputError(
            f"the optimizer keeps a {type(value).__name__}, which cannot be sent to another rank",
            cure="use an optimizer whose state is tensors and numbers.",
        )


def tensors_of_form(form: Any) -> Iterator[tuple[list[int], torch.dtype]]:
    """Shape and dtype of each tensor of a form, in order."""
    kind, content = form[0], form[1]
    if kind == "tensor":
        yield content, getattr(torch, form[2])
    elif kind == "dict":
        for key, member in content:
            yield from tensors_of_form(key)
            yield from tensors_of_form(member)
    elif kind in ("list", "tuple"):
        for member in content:
            yield from tensors_of_form(member)


def value_of_form(form: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The nest of a form and its tensors."""
    kind, content = form[0], form[1]
    if kind == "tensor":
        return next(tensors)
    if kind == "dict":
        return {value_of_form(key, tensors): value_of_form(member, tensors) for key, member in content}
    if kind in ("list", "tuple"):
        members = [value_of_form(member, tensors) for member in content]
        return members if kind == "list" else tuple(members)
    return float(content) if form[2] == "float" else content


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(member) for member in value)
    return value
