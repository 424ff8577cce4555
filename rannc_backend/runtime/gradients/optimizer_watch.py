"""Looks at every optimizer step of a job of several ranks, before it changes anything and after it.

In: torch's global hook of optimizer steps, and the tables of ownership. Out: an error, or the step as it is
and a number that the ranks compare (`step_counts.py`); after it, new values for the owners that do not update
(`new_values.py`). Refused are gradients that are not what one process
would have: delayed sums, gradients of parameters outside of any compiled model, gradients of plain calls; and
optimizers that could not do on one rank's parameters what they do on all.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rannc_backend.errors import (
    CoupledOptimizerError,
    PlainGradientError,
    ShardingOptimizerError,
    UnsynchronizedGradientError,
)
from rannc_backend.log.logger import say_once
from rannc_backend.runtime.agreement import agree, digest
from rannc_backend.runtime.gradients.new_values import (
    COMPARED_EVERY,
    FIRST_COMPARED,
    looked_at,
    send_new_values,
)
from rannc_backend.runtime.gradients.optimizer_probe import couples_parameters, optimizers_of, parameters_of
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.step_counts import Keys, OutsideValues, StepCounts, name_of
from rannc_backend.runtime.torch_internals import be_first_after_step, optimizers_in_step, replace_zero_grad
from rannc_backend.runtime.world import OwnRows, Ranks, World
from rannc_backend.settings import hooks

logger = logging.getLogger(__name__)

# They keep their state, or parameters, in step over ranks by collectives of their own.
_SHARDING = frozenset({"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"})


@dataclass(slots=True)
class _Known:
    """What is known of one optimizer, as long as its groups are these."""

    sizes: tuple[int, ...]
    numbers: tuple[int, ...]  # of the tables that there were
    keys: Keys
    tables: list[ParameterTable]
    outside: list[tuple[str, torch.Tensor]]
    num_backwards: int = 0  # of compiled models, at the last update
    is_tried: bool = False


@dataclass(slots=True)
class _Outside:
    """Values of an optimizer's parameters outside of compiled models; ``is_due``: they are to be looked at again."""

    key: str  # which of the optimizers of such parameters, in the order of their first steps
    values: OutsideValues
    num_steps: int = 0
    is_due: bool = False


class OptimizerWatch:
    """See the module docstring.

    Args:
        tables: of all models that are planned.
        is_synchronized: whether a parameter outside of compiled models has its gradients averaged over ranks.
        checks: whether optimizers are to be tried before their first step.
    """

    def __init__(
        self,
        world: World,
        tables: Callable[[], Sequence[ParameterTable]],
        is_synchronized: Callable[[torch.Tensor], bool],
        checks: Callable[[], bool],
    ) -> None:
        self._world = world
        self._tables = tables
        self._is_synchronized = is_synchronized
        self._checks = checks
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._outside: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Outside] = (
            weakref.WeakKeyDictionary()
        )
        self._num_alike: dict[str, int] = {}
        self._is_trying = False
        self._sending: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
        self._tried: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def install(self) -> Callable[[], None]:
        """From now on, until what this gives is called."""
        self._world.counts.owners_of = self._owners_of
        self._world.counts.outside_values = self._outside_values
        self._world.counts.updaters_of = partial(self._owners_of, updaters=True)
        return hooks.together(
            hooks.register("optimizer steps", register_optimizer_step_pre_hook, self._before_step),
            replace_zero_grad(self._before_clear),
        )

    def parameters_moved(self, table: ParameterTable, before: Mapping[str, Ranks] | None) -> None:
        """Other ranks may lack parameters now. A model may also be planned in the closure of a step that began before
        there was anything to look at.
        """
        for known in self._known.values():
            known.is_tried = False
        for optimizer in optimizers_in_step():
            self._note_outside(optimizer, self._of(optimizer))
            if any(each is table for each in self._of(optimizer).tables):
                self._before_step(optimizer, (), {})

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        known = self._of(optimizer)
        self._compare_own_rows(optimizer, known)
        self._note_outside(optimizer, known)
        if not known.keys:
            return
        assert not self._is_trying, "a copy of an optimizer steps the optimizer itself"
        for table in known.tables:
            table.require_reduced_gradients("optimizer.step()")
        name = type(optimizer).__name__
        if any(cls.__name__ in _SHARDING for cls in type(optimizer).__mro__):
            raise ShardingOptimizerError(name)
        self._try(optimizer, known)
        self._take_plain_gradients(known)
        if any(table.updates for table in known.tables):
            self._leave_to_others(optimizer, known)
            self._send_first(optimizer)
        counts = self._world.counts.of_parameters(known.keys)
        counts.num_updates += 1
        counts.settings = settings_of(optimizer)

    def _compare_own_rows(self, optimizer: torch.optim.Optimizer, known: _Known) -> None:
        """Refuse an update by gradients of each rank's rows, unless the user has brought them together: of what is noted, and
        of all that is beside parameters of a compiled model. Collective where there is some.
        """
        marked = self._world.of_own_rows
        beside = OwnRows("beside a compiled model", is_certain=True) if known.keys else None
        loose = {
            text: (p, mark)
            for text, p in known.outside
            if (mark := marked.get(p, beside)) is not None and not self._is_synchronized(p)
        }
        if not loose:
            return
        name, own = type(optimizer).__name__, {}
        for text, (p, _) in loose.items():
            own[text] = [None if each is None else digest(each.detach().to_dense()) for each in (p, p.grad)]
        answers = agree(self._world, f"a step of {name} outside of compiled models", own)
        apart = []
        for text in dict.fromkeys(text for answer in answers for text in answer):
            values, gradients = zip(*(answer.get(text, [None, None]) for answer in answers), strict=True)
            is_certain = text not in loose or loose[text][1].is_certain
            if any(each != gradients[0] for each in gradients) and (
                is_certain or all(each == values[0] for each in values)
            ):
                where = loose[text][1].where if text in loose else "on another rank"
                apart.append((is_certain, f"{text}, {where}"))
        if any(is_certain for is_certain, _ in apart):
            raise UnsynchronizedGradientError(name, [text for _, text in apart])
        if apart:
            say_once(
                logger,
                "%s updates tensors that are the same on all ranks by gradients of each rank's rows (%s): if they are no rows of a "
                "rank's own, call rannc_backend.synchronize(module) once, on all ranks, for the module that holds them.",
                name,
                "; ".join(text for _, text in apart),
                level=logging.WARNING,
            )

    def _note_outside(self, optimizer: torch.optim.Optimizer, known: _Known) -> None:
        """Remember values of parameters outside of compiled models before the first step, and when to look again."""
        parameters = [
            (text, p) for text, p in known.outside if type(p) in (torch.Tensor, nn.Parameter) and p.numel()
        ]
        noted = self._outside.get(optimizer)
        if noted is None or len(noted.values.names) != len(parameters):
            if not parameters:
                return
            before = looked_at([parameter for _, parameter in parameters]) or []
            names = tuple(text for text, _ in parameters)
            kind = f"{type(optimizer).__name__} of {names}"
            self._num_alike[kind] = number = self._num_alike.get(kind, 0) + 1
            values = OutsideValues(type(optimizer).__name__, names, tuple(before), tuple(before))
            noted = self._outside[optimizer] = _Outside(f"{kind} {number}", values)
        noted.num_steps += 1
        noted.is_due = noted.num_steps <= FIRST_COMPARED or noted.num_steps % COMPARED_EVERY == 0

    def _outside_values(self) -> dict[str, OutsideValues]:
        for optimizer, noted in list(self._outside.items()):
            parameters = dict(self._of(optimizer).outside) if noted.is_due else {}
            if noted.is_due and all(name in parameters for name in noted.values.names):
                now = looked_at([parameters[name] for name in noted.values.names]) or []
                noted.values, noted.is_due = replace(noted.values, now=tuple(now)), False
        return {noted.key: noted.values for noted in self._outside.values()}

    def _leave_to_others(self, optimizer: torch.optim.Optimizer, known: _Known) -> None:
        """What autograd itself has added to gradients (a penalty beside the loss) is updated where the sum is."""
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None and any(table.lacks(parameter) for table in known.tables):
                parameter.grad = None

    def _send_first(self, optimizer: torch.optim.Optimizer) -> None:
        """Let new values be there before any other hook (an average's) reads them after the step."""
        if optimizer not in self._sending:
            # Kept by the optimizer, which it must not keep.
            watch = weakref.ref(self)

            def send(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                if (alive := watch()) is not None:
                    alive._after_step(stepped)

            hooks.register("new values", optimizer.register_step_post_hook, send)
            self._sending[optimizer] = send
        be_first_after_step(optimizer, self._sending[optimizer])

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let all owners have what their updaters have made. Collective where those differ."""
        for table in self._of(optimizer).tables:
            if not table.updates or table.is_in_backward:
                continue
            agree(self._world, f"a step of {type(optimizer).__name__}")
            names = map(table.name_of, parameters_of(optimizer))
            send_new_values(table, [name for name in names if name is not None])

    def _before_clear(self, optimizer: torch.optim.Optimizer) -> None:
        known = self._of(optimizer)
        if known.keys:
            self._world.counts.of_parameters(known.keys).num_clears += 1

    def _of(self, optimizer: torch.optim.Optimizer) -> _Known:
        tables = self._tables()
        sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
        numbers = tuple(table.number for table in tables)
        known = self._known.get(optimizer)
        if known is None or known.sizes != sizes or known.numbers != numbers:
            before = 0 if known is None else known.num_backwards
            known = self._known[optimizer] = self._look(optimizer, sizes, tables)
            known.num_backwards = before
        return known

    def _look(
        self, optimizer: torch.optim.Optimizer, sizes: tuple[int, ...], tables: Sequence[ParameterTable]
    ) -> _Known:
        keys, outside, found = [], [], {}
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                table = next((table for table in tables if table.name_of(parameter) is not None), None)
                if table is None:
                    outside.append(
                        (f"group {number}, parameter {index} of shape {list(parameter.shape)}", parameter)
                    )
                else:
                    keys.append(table.key_of(parameter))
                    found[id(table)] = table
        return _Known(
            sizes=sizes,
            numbers=tuple(table.number for table in tables),
            keys=tuple(keys),
            tables=list(found.values()),
            outside=outside,
        )

    def _try(self, optimizer: torch.optim.Optimizer, known: _Known) -> None:
        """Once: refuse it, or one that stands around it, if it couples parameters of which this rank lacks
        some.
        """
        if known.is_tried or not self._checks():
            return
        parameters = parameters_of(optimizer)
        lacks = any(table.lacks(parameter) for table in known.tables for parameter in parameters)
        for each in optimizers_of(parameters) if lacks else ():
            if each in self._tried:
                continue
            self._is_trying = True
            try:
                couples = couples_parameters(each)
            finally:
                self._is_trying = False
            if couples or couples is None:
                raise CoupledOptimizerError(type(each).__name__, known=couples is True)
            self._tried.add(each)
        known.is_tried = True

    def _take_plain_gradients(self, known: _Known) -> None:
        """Refuse an update by plain gradients alone; the others compare theirs when the ranks agree on
        something next.
        """
        counts: StepCounts = self._world.counts
        for table in known.tables:
            found = table.take_plain_gradients()
            if found and counts.num_backwards == known.num_backwards:
                raise PlainGradientError(
                    f"{name_of(next(iter(found)))!r} was about to be updated by the gradient of a plain call "
                    "on this rank's rows alone: the compiled model has had no backward since the last update"
                )
            counts.plain_gradients.update(found)
        known.num_backwards = counts.num_backwards

    def _owners_of(self, key: str, *, updaters: bool = False) -> tuple[int, ...]:
        for table in self._tables():
            if (owners := table.owners_of_key(key, updaters=updaters)) is not None:
                return owners
        return ()


def settings_of(optimizer: torch.optim.Optimizer) -> str:
    """Class and settings of this step, as text: those that its constructor takes. Looked at in each step, as
    schedules change more than the learning rate (OneCycleLR the betas).
    """
    names = sorted(name for name in optimizer.defaults if name != "lr")
    texts = [
        ", ".join(f"{name}={_plain(group.get(name))}" for name in names) for group in optimizer.param_groups
    ]
    rates = [_plain(group.get("lr")) for group in optimizer.param_groups]
    return f"{type(optimizer).__name__}({'; '.join(dict.fromkeys(texts))}), learning rates {rates}"


def _plain(value: Any) -> str:
    """A number or a text in words; "..." for what is neither, or on a device that would have to be waited
    for.
    """
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 and value.device.type == "cpu" else "..."
    if isinstance(value, tuple):
        return f"({', '.join(map(_plain, value))})"
    return repr(value) if isinstance(value, bool | int | float | str | type(None)) else "..."
