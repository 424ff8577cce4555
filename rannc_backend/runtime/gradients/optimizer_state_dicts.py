"""The state of optimizers over parameters that are spread over ranks: whole where it is saved, divided where
it is loaded.

In: the tables of ownership and any `torch.optim.Optimizer`. Out: its ``state_dict()``, called by all ranks,
is the one of one process on rank 0 (or, by option, on all ranks) and empty elsewhere; its
``load_state_dict()`` takes that, or the whole state on every rank, and keeps this rank's part. A state that
lacks what a rank needs is refused. When parameters go to other owners, their state goes with them.

Terms: an *entry* is the state of one parameter; a parameter's *index* counts over all groups, as in torch's
state_dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from rannc_backend.errors import CoupledOptimizerError, PartialStateError, UserInputError
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.comm.exchange_values import exchange
from rannc_backend.runtime.gradients.optimizer_probe import couples_parameters, optimizers_of, parameters_of
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.state_hooks import Ranks
from rannc_backend.runtime.torch_internals import optimizers_in_step, replace_optimizer_states
from rannc_backend.runtime.world import World

StateDict = dict[str, Any]
Load = Callable[[StateDict], None]

_RAW: ContextVar[bool] = ContextVar("rannc_raw_optimizer_states", default=False)


@contextmanager
def raw_optimizer_states() -> Iterator[None]:
    """Within it, optimizers give and take this rank's own state, as torch itself has it."""
    token = _RAW.set(True)
    try:
        yield
    finally:
        _RAW.reset(token)


def is_empty(state: StateDict | None) -> bool:
    """Whether a rank passes no state of its own: what ranks other than 0 get from ``state_dict()``."""
    return not state or not (state.get("state") or state.get("param_groups"))


def owners_of(
    optimizer: torch.optim.Optimizer, tables: Sequence[ParameterTable], everyone: Ranks
) -> list[Ranks]:
    """The ranks that have the state of each parameter, by index; of those that no table knows, all ranks."""
    found = []
    for parameter in parameters_of(optimizer):
        names = [(table, name) for table in tables if (name := table.name_of(parameter)) is not None]
        found.append(names[0][0].updaters(names[0][1]) if names else everyone)
    return found


def whole_state(world: World, own: StateDict, owners: Sequence[Ranks], *, on_all_ranks: bool) -> StateDict:
    """The state_dict of one process, from each rank's ``own``; empty on ranks that are not to have it.
    Collective.
    """
    everyone = tuple(range(world.size))
    takers = everyone if on_all_ranks else (0,)
    entries = [own["state"].get(index) for index in range(len(owners))]
    entries = exchange(world, entries, [ranks[0] for ranks in owners], [takers] * len(entries))
    if world.rank not in takers:
        return {"state": {}, "param_groups": []}
    beside = {key: value for key, value in own["state"].items() if not isinstance(key, int)}
    return {
        **own,
        "state": beside | {index: entry for index, entry in enumerate(entries) if entry is not None},
    }


def load_state(
    world: World, state: StateDict | None, owners: Sequence[Ranks], trained: Sequence[bool], load_own: Load
) -> None:
    """Load this rank's part of a whole state: its own, or rank 0's where this rank passes none. Collective.

    Args:
        owners, trained: by index; whether a parameter requires a gradient.

    Raises:
        UserInputError: rank 0 passes no state, or one with another number of parameters.
        PartialStateError: a state lacks all entries of a rank that takes it, though it has some of others.
    """
    entries = {} if state is None else state.get("state", {})
    own_sizes: int | None = None
    if state is not None and not is_empty(state):
        own_sizes = sum(len(group["params"]) for group in state["param_groups"])
    answers = agree(
        world, "optimizer.load_state_dict", [own_sizes, _ranks_without(entries, owners, trained, world.size)]
    )
    sizes = [answer[0] for answer in answers]
    if sizes[0] is None:
        raise UserInputError(
            "rank 0 gave no optimizer state",
            cure="pass rank 0 what state_dict() gave it, and {} on the others.",
        )
    for rank, size in enumerate(sizes):
        giver = 0 if size is None else rank
        if sizes[giver] != len(owners):
            raise UserInputError(
                f"rank {giver} gave an optimizer state of {sizes[giver]} parameters, and the optimizer has "
                f"{len(owners)}",
                cure="make the optimizer as it was when its state was saved.",
            )
        missing = answers[giver][1][rank]
        if missing:
            raise _partial("the optimizer", giver, missing[0], len(owners), rank)
    lacking = [tuple(rank for rank in ranks if sizes[rank] is None) for ranks in owners]
    without = tuple(rank for rank, size in enumerate(sizes) if size is None)
    given: list[Any] = [entries.get(index) for index in range(len(owners))]
    given.append(None if is_empty(state) else {key: value for key, value in state.items() if key != "state"})  # type: ignore[union-attr]
    *given, rest = exchange(world, given, [0] * len(given), [*lacking, without])
    own = {
        index: entry for index, entry in enumerate(given) if entry is not None and world.rank in owners[index]
    }
    beside = {key: value for key, value in entries.items() if not isinstance(key, int)}
    load_own({**rest, "state": beside | own})


def move_state(
    world: World, own: StateDict, old: Sequence[Ranks], new: Sequence[Ranks], load_own: Load
) -> None:
    """Bring entries from the ranks that have had them to those that own their parameters now. Collective."""
    entries = [own["state"].get(index) for index in range(len(old))]
    takers = [tuple(rank for rank in ranks if rank not in held) for ranks, held in zip(new, old, strict=True)]
    entries = exchange(world, entries, [ranks[0] for ranks in old], takers)
    mine = {
        index: entry for index, entry in enumerate(entries) if entry is not None and world.rank in new[index]
    }
    load_own({**own, "state": mine})


def _ranks_without(
    entries: Mapping[Any, Any], owners: Sequence[Ranks], trained: Sequence[bool], size: int
) -> list[list[int]]:
    """By rank: [] where a state serves it, else [number of entries]: it has some, and none of those that the
    rank needs. What all ranks update tells nothing: it may never have had a gradient, as what no stage uses.
    """
    found: list[list[int]] = []
    for rank in range(size):
        needed = [
            index
            for index, (ranks, flag) in enumerate(zip(owners, trained, strict=True))
            if flag and rank in ranks and len(ranks) < size
        ]
        none = bool(entries) and bool(needed) and not any(index in entries for index in needed)
        found.append([len(entries)] if none else [])
    return found


def _partial(
    optimizer: str, rank: int, num_entries: int, num_parameters: int, served: int
) -> PartialStateError:
    return PartialStateError(
        f"the state that rank {rank} gave {optimizer} has entries for {num_entries} of {num_parameters} "
        f"parameters, and none of those that rank {served} needs: it is the part of one rank",
        cure="save what optimizer.state_dict() gives rank 0 when all ranks call it, and load that on all "
        "ranks.",
    )


class OptimizerStates:
    """Gives every optimizer of the process whole states; see the module docstring.

    Args:
        tables: of all models that are planned.
        on_all_ranks: whether every rank gets what rank 0 gets.
        is_handled: whether an optimizer's state is looked after by something else (a RaNNCModule's).
    """

    def __init__(
        self,
        world: World,
        tables: Callable[[], Sequence[ParameterTable]],
        on_all_ranks: Callable[[], bool],
        is_handled: Callable[[torch.optim.Optimizer], bool],
    ) -> None:
        self._world = world
        self._tables = tables
        self._on_all_ranks = on_all_ranks
        self._is_handled = is_handled
        self._awaiting: weakref.WeakSet[torch.optim.Optimizer] = (
            weakref.WeakSet()
        )  # rank 0's state, when their model is planned

    def install(self) -> Callable[[], None]:
        """From now on, until what this gives is called."""
        return replace_optimizer_states(self._give, self._take)

    def _is_spread(self, optimizer: torch.optim.Optimizer) -> bool:
        parameters = parameters_of(optimizer)
        return any(
            table.name_of(parameter) is not None for table in self._tables() for parameter in parameters
        )

    def _give(self, optimizer: torch.optim.Optimizer, own: StateDict) -> StateDict:
        if _RAW.get() or self._is_handled(optimizer) or not self._is_spread(optimizer):
            return own
        everyone = tuple(range(self._world.size))
        owners = owners_of(optimizer, self._tables(), everyone)
        agree(self._world, "optimizer.state_dict", [type(optimizer).__name__, len(owners)])
        return whole_state(self._world, own, owners, on_all_ranks=self._on_all_ranks())

    def _take(self, optimizer: torch.optim.Optimizer, state: StateDict, load_own: Load) -> None:
        if _RAW.get() or self._is_handled(optimizer):
            load_own(state)
        elif self._is_spread(optimizer):
            trained = [parameter.requires_grad for parameter in parameters_of(optimizer)]
            load_state(
                self._world,
                state,
                owners_of(optimizer, self._tables(), tuple(range(self._world.size))),
                trained,
                load_own,
            )
        elif is_empty(state) and self._world.rank != 0:
            self._awaiting.add(optimizer)
        else:
            load_own(state)

    def check_before_move(self, owners: Mapping[str, Ranks], names: Mapping[torch.Tensor, str]) -> None:
        """Whether each rank's optimizers have what it needs when parameters go to their first owners; nothing
        has changed yet. Collective.

        Args:
            owners: by parameter's name, of those that not all ranks hold.
            names: of all parameters of the model.

        Raises:
            PartialStateError: as `load_state`.
            CoupledOptimizerError: the model is planned in the closure of such an optimizer's step.
        """
        everyone = tuple(range(self._world.size))
        found = self._known(list(names), lambda parameter: names.get(parameter))
        words = [
            [
                identity,
                each in self._awaiting,
                [i for i, p in enumerate(parameters_of(each)) if p in each.state],
            ]
            for identity, each in sorted(found.items())
        ]
        answers = agree(self._world, "optimizers of a model that is planned", words)
        waiting = {
            (identity, rank) for rank, answer in enumerate(answers) for identity, waits, _ in answer if waits
        }
        for rank, identity, indices in (
            (rank, word[0], word[2]) for rank, answer in enumerate(answers) for word in answer
        ):
            optimizer = found.get(identity)
            if optimizer is None or (identity, rank) in waiting or not indices:
                continue
            parameters = parameters_of(optimizer)
            ranks = [owners.get(names.get(parameter, ""), everyone) for parameter in parameters]
            missing = _ranks_without(
                dict.fromkeys(indices), ranks, [p.requires_grad for p in parameters], len(everyone)
            )
            for served in everyone:
                if missing[served] and (served == rank or (rank == 0 and (identity, served) in waiting)):
                    if (
                        optimizer in optimizers_in_step()
                        and (couples := couples_parameters(optimizer)) is not False
                    ):
                        # It has begun to make its state, for all parameters in one place.
                        raise CoupledOptimizerError(type(optimizer).__name__, known=couples is True)
                    raise _partial(type(optimizer).__name__, rank, len(indices), len(parameters), served)

    def parameters_moved(self, table: ParameterTable, before: Mapping[str, Ranks] | None) -> None:
        """As `session.Follower`: for all optimizers that nothing else looks after. Collective."""
        found = self._known(list(table.module().parameters()), table.name_of)
        words = [[identity, bool(each.state), each in self._awaiting] for identity, each in found.items()]
        answers = agree(self._world, "optimizers following their parameters", words)
        states = [{identity for identity, has_state, _ in answer if has_state} for answer in answers]
        awaited = {identity for answer in answers for identity, _, waits in answer if waits}
        for identity in sorted(set().union(*states)):
            optimizer = found.get(identity)
            if optimizer is not None and (before is not None or identity in awaited):
                self._follow(optimizer, table, before if identity not in awaited else None)
            if optimizer is not None:
                self._keep_own(optimizer, table)

    def _known(
        self, parameters: list[torch.Tensor], name_of: Callable[[torch.Tensor], str | None]
    ) -> dict[str, torch.optim.Optimizer]:
        """By what ranks call them: optimizers of these parameters; of several over the same (a new one in
        each epoch) one with a state.
        """
        known = [each for each in optimizers_of(parameters) if not self._is_handled(each)]
        return {
            f"{type(each).__name__} "
            f"{' '.join(name_of(parameter) or '?' for parameter in parameters_of(each))}": each
            for each in sorted(known, key=lambda each: len(each.state))
        }

    def _follow(
        self, optimizer: torch.optim.Optimizer, table: ParameterTable, before: Mapping[str, Ranks] | None
    ) -> None:
        new = owners_of(optimizer, [table], table.everyone)
        with raw_optimizer_states():
            own = optimizer.state_dict()
            if before is not None:
                old = owners_of_names(
                    [table.name_of(p) for p in parameters_of(optimizer)], before, table.everyone
                )
                move_state(self._world, own, old, new, optimizer.load_state_dict)
                return
            trained = [parameter.requires_grad for parameter in parameters_of(optimizer)]
            waits = optimizer in self._awaiting
            self._awaiting.discard(optimizer)
            load_state(self._world, None if waits else own, new, trained, optimizer.load_state_dict)

    def _keep_own(self, optimizer: torch.optim.Optimizer, table: ParameterTable) -> None:
        """Drop entries of other ranks' parameters."""
        for parameter in parameters_of(optimizer):
            if table.lacks(parameter):
                optimizer.state.pop(parameter, None)


def owners_of_names(names: Sequence[str | None], owners: Mapping[str, Ranks], everyone: Ranks) -> list[Ranks]:
    """Owners by index, of parameters with these names in a table; None for those that it does not know."""
    return [everyone if name is None else owners[name] for name in names]
