"""Whether any plan fits into memory, and how little would do: exact, without times.

In: `SearchProblem`s. Out: answers for error messages. A plan fits if the fewest devices on which its stages
fit, each with the micro-batches that its place keeps in flight, are no more than there are; that is a
shortest path. Of the limits of pipelines, only the one on numbers of stages is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rannc_backend.planner.search.bounds import Cell, Choices, Row, Shapes, Sums
from rannc_backend.planner.search.problem import Pricer, SearchProblem
from rannc_backend.schedule.orders import ScheduleName, schedule_named

_PRECISION = 1e-6  # of the smallest memory, relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Stages that fit: stage i has the blocks from ``bounds[i]`` to ``bounds[i + 1]``."""

    schedule: ScheduleName
    num_micro_batches: int
    bounds: tuple[int, ...]
    replicas: tuple[int, ...]


def is_feasible(problem: SearchProblem) -> bool:
    """Whether any plan fits."""
    return cut_that_fits(problem) is not None


def cut_that_fits(problem: SearchProblem) -> Cut | None:
    """Stages of some plan that fits, whatever it takes; None if there is none."""
    order = sorted(problem.micro_batches, reverse=True)  # many small micro-batches fit most easily
    cuts = (
        _cut_of(Shapes(Pricer(problem, number, schedule)))
        for schedule in problem.schedules
        for number in order
    )
    return next((cut for cut in cuts if cut is not None), None)


def _cut_of(shapes: Shapes) -> Cut | None:
    problem, pricer = shapes.pricer.problem, shapes.pricer
    most_stages = problem.limits.most_stages(pricer.described, pricer.num_micro_batches)
    counts = [count for count in problem.stage_counts if count <= most_stages]
    if not counts:
        return None
    depends = problem.stage_replicas is not None or bool(problem.stage_of)
    for most in counts if depends else counts[-1:]:
        cell = Cell(schedule=pricer.schedule, num_micro_batches=pricer.num_micro_batches, num_stages=most)
        choices = [shapes.choices(cell, k) for k in range(1, most + 1)]
        sums = Sums(choices, [Row(bounds="devices", price=1.0)], problem.num_blocks, problem.num_devices)
        possible = [most] if depends else counts
        fitting = [count for count in possible if sums.tables[0, count, 0] <= problem.num_devices]
        if fitting:
            return _path_of(pricer, choices, sums, fitting[0])
    return None


def _path_of(pricer: Pricer, choices: Sequence[Choices], sums: Sums, num_stages: int) -> Cut:
    """The stages with the fewest devices."""
    bounds, replicas = [0], []
    for left in range(num_stages, 0, -1):
        options = choices[left - 1]
        here = np.flatnonzero(options.begins == bounds[-1])
        devices = options.replicas[here] + sums.tables[0, left - 1, options.ends[here]]
        best = here[np.argmin(devices)]
        bounds.append(int(options.ends[best]))
        replicas.append(int(options.replicas[best]))
    return Cut(
        schedule=pricer.schedule,
        num_micro_batches=pricer.num_micro_batches,
        bounds=tuple(bounds),
        replicas=tuple(replicas),
    )


def smallest_memory(problem: SearchProblem) -> int | None:
    """The smallest memory in bytes with which some plan fits, rounded up a little; None if none does with any
    memory.
    """
    if not is_feasible(replace(problem, memory_bytes=float("inf"))):
        return None
    low, high = 0, max(1, int(min(problem.memory_bytes, 2.0**50)))
    while not is_feasible(replace(problem, memory_bytes=high)):
        low, high = high, 2 * high
    while high - low > max(1, _PRECISION * high):
        middle = (low + high) // 2
        if is_feasible(replace(problem, memory_bytes=middle)):
            high = middle
        else:
            low = middle
    return high


def smallest_count(fits: Callable[[int], bool], above: int, most: int) -> int | None:
    """The smallest number above `above` (which does not fit) for which `fits` is true, if that is monotone;
    None beyond `most`.
    """
    low = high = above
    while True:
        high = 2 * high
        if fits(high):
            break
        low = high
        if low >= most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def least_bytes_of_one_stage(problem: SearchProblem) -> float:
    """The least memory on one device with which the whole model is one stage, however it is replicated; inf
    if it cannot be.
    """
    least = float("inf")
    if problem.own_gradient_bytes.shape[1] < problem.num_blocks:
        return least  # no table knows a stage of all blocks
    for schedule in problem.schedules:
        for number in problem.micro_batches:
            tables = problem.tables(number, problem.num_blocks)
            if tables.forward.shape[1] >= problem.num_blocks:
                flight = schedule_named(schedule).in_flight(1, number)
                update = 0.0 if tables.update_bytes is None else tables.update_bytes[0, -1]
                held = np.maximum(flight * tables.flight_bytes[:, 0, -1], update)
                need = tables.fixed_bytes[:, 0, -1] + held
                need = np.where(np.isfinite(tables.forward[0, -1]), need, np.inf)
                least = min(least, float(need.min()))
    return least
