"""An optimizer's step in several parts of its parameters, one after the other: `num_apply_group`.

In: torch's global hook of optimizer steps, the tables of ownership with the number that each model's options ask for.
Out: the same update, whose temporaries (of foreach kernels, as large as the parameters that they update together) are
those of one part at a time. Terms. A *part* is a run of parameters, in the order of the optimizer's groups; parts are
about equal in the elements that have gradients. A part sees the groups of its parameters with these alone.

How. torch calls an optimizer's own ``step`` between the hooks of steps. The function that it calls there is replaced,
once per class, so hooks, schedulers and scalers see one step; state belongs to parameters, so it does not change. An
optimizer whose update in parts is not that of a whole step, bit by bit, is refused: it is tried on small copies.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rannc_backend.errors import GroupedStepError
from rannc_backend.runtime.gradients.optimizer_probe import Step, is_same_in_parts, parameters_of
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.torch_internals import cell_of_step
from rannc_backend.settings import hooks

Wanted = Sequence[tuple[ParameterTable, int]]
"""Of each planned model, its table and in how many parts optimizers of its parameters step."""


class ApplyGroups:
    """See the module docstring.

    Args:
        wanted: of all models that are planned.
        checks: whether optimizers are to be tried before their first step.
    """

    def __init__(self, wanted: Callable[[], Wanted], checks: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._checks = checks
        self._tried: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._in_step: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._replaced: dict[int, hooks.Undo] = {}  # by identity of the cells, which their classes keep

    def install(self) -> Callable[[], None]:
        """From now on, until what this gives is called."""
        return hooks.together(
            hooks.register("apply groups", register_optimizer_step_pre_hook, self._before_step), self._end
        )

    def _end(self) -> None:
        for undo in self._replaced.values():
            undo()
        self._replaced.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        number = self._number_for(optimizer)
        if number == 1:
            self._numbers.pop(optimizer, None)
            return
        name = type(optimizer).__name__
        if optimizer in self._in_step:
            raise GroupedStepError(name, "its step calls that of another class, with hooks, for each part")
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise GroupedStepError(
                name, "its step has been given a closure, or something else, which is for one call"
            )
        cell = cell_of_step(type(optimizer))
        if cell is None:
            raise GroupedStepError(name, "torch does not call its step between hooks")
        if optimizer not in self._tried and self._checks():
            if not is_same_in_parts(optimizer, lambda step: functools.partial(_one_by_one, step)):
                raise GroupedStepError(
                    name, "on small copies that is not the update of a whole step, or cannot be tried"
                )
            self._tried.add(optimizer)
        self._numbers[optimizer] = number
        if id(cell) not in self._replaced:
            self._replaced[id(cell)] = hooks.replace(
                "apply groups", cell, "cell_contents", self._in_parts(cell.cell_contents)
            )

    def _number_for(self, optimizer: torch.optim.Optimizer) -> int:
        most = [(table, number) for table, number in self._wanted() if number > 1]
        parameters = parameters_of(optimizer) if most else ()
        found = (
            number for table, number in most if any(table.name_of(each) is not None for each in parameters)
        )
        return max(found, default=1)

    def _in_parts(self, step: Step) -> Step:
        numbers, in_step = self._numbers, self._in_step

        @functools.wraps(step)
        def stepped(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            number = numbers.pop(optimizer, 1)
            if number == 1:
                return step(optimizer, *args, **kwargs)
            in_step.add(optimizer)
            try:
                return step_in_parts(step, optimizer, number)
            finally:
                in_step.discard(optimizer)

        return stepped


def step_in_parts(step: Step, optimizer: torch.optim.Optimizer, number: int) -> Any:
    """Step the optimizer's parameters in at most so many parts.

    Args:
        step: of the optimizer's class, without hooks.

    Returns:
        What the last part's step gave.
    """
    groups, result = optimizer.param_groups, None
    # All are made before the first runs: each begins with the settings that a whole step would see.
    parts = [[(group, {**group, "params": own}) for group, own in part] for part in _parts(groups, number)]
    try:
        for part in parts:
            optimizer.param_groups = [seen for _, seen in part]
            result = step(optimizer)
    finally:
        optimizer.param_groups = groups
    for group, seen in (pair for part in parts for pair in part):
        group.update({name: value for name, value in seen.items() if name != "params"})
    return result


def _one_by_one(step: Step, optimizer: torch.optim.Optimizer, *args: Any) -> Any:
    return step_in_parts(step, optimizer, len(parameters_of(optimizer)))


_Group = dict[str, Any]


def _parts(groups: Sequence[_Group], number: int) -> Iterator[list[tuple[_Group, list[torch.Tensor]]]]:
    """Of each part the groups with their parameters in it. Every group is in one part at least."""
    sizes = [[0 if p.grad is None else p.numel() for p in group["params"]] for group in groups]
    total, before = sum(map(sum, sizes)), 0
    found: list[list[tuple[_Group, list[torch.Tensor]]]] = [[] for _ in range(number)]
    for group, own_sizes in zip(groups, sizes, strict=True):
        own: dict[int, list[torch.Tensor]] = {}
        for parameter, size in zip(group["params"], own_sizes, strict=True):
            # By the middle of a parameter's elements; rounding must not lead beyond the last.
            place = min(number - 1, (2 * before + size) * number // (2 * total)) if total else 0
            own.setdefault(place, []).append(parameter)
            before += size
        for place, members in (own or {0: []}).items():
            found[place].append((group, members))
    return (part for part in found if part)
