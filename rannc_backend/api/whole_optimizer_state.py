"""An optimizer's state, whole, by RaNNC's own arguments, although each rank keeps that of its own parameters
only.

In: an optimizer over all parameters of a model. Out: for this one object, ``state_dict(from_global=True)``
and ``load_state_dict(state, from_global=True)``, at any time; without them it gives and takes this rank's own
part. And its state goes where its parameters go. What is done, and its terms, are in
`runtime.optimizer_states`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.gradients.optimizer_probe import parameters_of
from rannc_backend.runtime.gradients.optimizer_state_dicts import (
    StateDict,
    load_state,
    move_state,
    owners_of,
    owners_of_names,
    raw_optimizer_states,
    whole_state,
)
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.state_hooks import Ranks
from rannc_backend.session_registry import SessionRegistry
from rannc_backend.settings import hooks


@dataclass(slots=True, kw_only=True)
class GlobalState:
    """What one optimizer of one model needs to know of the other ranks."""

    root: weakref.ref[nn.Module]
    optimizer: weakref.ref[torch.optim.Optimizer]
    registry: SessionRegistry
    deferred: StateDict | None = None  # to be loaded when the model is planned
    is_deferred: bool = False

    @classmethod
    def attach(
        cls, root: nn.Module, optimizer: torch.optim.Optimizer, registry: SessionRegistry
    ) -> GlobalState:
        """Give the optimizer its two new arguments, and let its state follow its parameters."""
        self = cls(root=weakref.ref(root), optimizer=weakref.ref(optimizer), registry=registry)

        def state_dict(*, from_global: bool = False) -> StateDict | None:
            return self.whole_state() if from_global else self.own_state()

        def load_state_dict(state_dict: StateDict | None, *, from_global: bool = False) -> None:
            if from_global:
                self.load_whole(state_dict)
            else:
                assert state_dict is not None, "no state"
                self.load_own(state_dict)

        # The object's own attributes, not the class's: other optimizers stay as they are.
        hooks.replace("handed-over optimizer", optimizer, "state_dict", state_dict)
        hooks.replace("handed-over optimizer", optimizer, "load_state_dict", load_state_dict)
        registry.optimizers[optimizer] = self
        registry.followers.setdefault(root, []).append(self)
        session = registry.of(root)
        if session is not None and session.table is not None:
            self.parameters_moved(session.table, None)
        return self

    def _the_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.optimizer()
        assert optimizer is not None, "the optimizer is gone"
        return optimizer

    def _table(self) -> ParameterTable | None:
        root = self.root()
        session = None if root is None else self.registry.of(root)
        return None if session is None else session.table

    def own_state(self) -> StateDict:
        """This rank's part, as torch has it."""
        optimizer = self._the_optimizer()
        with raw_optimizer_states():
            return type(optimizer).state_dict(optimizer)

    def load_own(self, state: StateDict) -> None:
        """Load what `own_state` gave."""
        optimizer = self._the_optimizer()
        with raw_optimizer_states():
            type(optimizer).load_state_dict(optimizer, state)

    def whole_state(self) -> StateDict | None:
        """The state_dict of one process, on rank 0's CPU; None elsewhere. Collective."""
        table, state = self._table(), self.own_state()
        if table is None:
            return _on_cpu(state) if bootstrap.start().rank == 0 else None
        agree(table.world, "optimizer.state_dict(from_global=True)")
        whole = whole_state(
            table.world, state, owners_of(self._the_optimizer(), [table], table.everyone), on_all_ranks=False
        )
        return _on_cpu(whole) if table.world.rank == 0 else None

    def load_whole(self, state: StateDict | None) -> None:
        """Keep this rank's part of what `whole_state` gave, at once or when the model is planned. Collective
        once it is.

        Raises:
            UserInputError: rank 0 passes None.
        """
        table = self._table()
        if table is None:
            self.deferred, self.is_deferred = state, True
            if state is not None:
                self.load_own({**state, "state": {}})
            return
        optimizer = self._the_optimizer()
        trained = [parameter.requires_grad for parameter in parameters_of(optimizer)]
        load_state(table.world, state, owners_of(optimizer, [table], table.everyone), trained, self.load_own)

    def parameters_moved(self, table: ParameterTable, before: Mapping[str, Ranks] | None) -> None:
        """Follow the parameters to their owners; ``before``: the owners until now, None at the first
        deployment. Collective.
        """
        optimizer = self.optimizer()
        if optimizer is None:
            return
        deferred = agree(table.world, "an optimizer following its parameters", self.is_deferred)
        owners = owners_of(optimizer, [table], table.everyone)
        if any(deferred):
            state, self.deferred, self.is_deferred = self.deferred, None, False
            self.load_whole(state)
        elif before is not None:
            names = [table.name_of(parameter) for parameter in parameters_of(optimizer)]
            move_state(
                table.world,
                self.own_state(),
                owners_of_names(names, before, table.everyone),
                owners,
                self.load_own,
            )
        for parameter, ranks in zip(parameters_of(optimizer), owners, strict=True):
            if table.world.rank not in ranks:
                optimizer.state.pop(parameter, None)


def globals_of(optimizer: torch.optim.Optimizer, registry: SessionRegistry) -> GlobalState | None:
    """What `GlobalState.attach` has made for an optimizer; None when it has not."""
    found = registry.optimizers.get(optimizer)
    assert found is None or isinstance(found, GlobalState), "something else follows the optimizer"
    return found


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(member) for member in value)
    return value
