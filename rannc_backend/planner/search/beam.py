"""The plans of one cell, stage by stage from the first: partial plans with a bound each, the hopeless ones
left out.

In: `CellBounds` and a limit in seconds. Out: complete plans whose bound is below the limit, best bound first,
and the least bound of what was left out because there was too much of it (inf when nothing was).

Terms. *Level* j: all partial plans of j stages. A partial plan's path P and the other amounts are those of
planner/search/bounds.py, summed over its stages; here messages and reductions are exact, because places are
known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rannc_backend.planner.search.bounds import CellBounds, Choices
from rannc_backend.planner.search.problem import Floats, Ints, StageTerms
from rannc_backend.schedule.chain import reduction_seconds
from rannc_backend.schedule.description import StageSeconds

_MAX_CANDIDATES = 400_000  # expanded at once: bounds memory
_MAX_ALIKE = 6  # partial plans kept with the same blocks and devices done, when there are too many


@dataclass(slots=True, eq=False)
class Level:
    """Partial plans, arrays [n]. `parents`: index in the level before; the last stage has blocks up to
    `ends`, `options`, `places`.

    `used`: ranks up to the last stage's end. `path`: P; `drain`: from the last stage's backward to the end of
    the path;
    `own`: the largest bound from one stage alone; `excess`, `longest`: the largest of the schedule's
    `exact_peaks`; `fastest`, `slowest`: the least and the largest c; `work`: sum of r c. `bounds`: for every way to complete it.
    """

    parents: Ints
    ends: Ints
    options: Ints
    places: Ints
    used: Ints
    path: Floats
    drain: Floats
    own: Floats
    excess: Floats
    longest: Floats
    fastest: Floats
    slowest: Floats
    work: Floats
    bounds: Floats

    def take(self, chosen: Ints | NDArray[np.bool_]) -> Level:
        return Level(*(getattr(self, name)[chosen] for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.parents)

    @classmethod
    def start(cls) -> Level:
        """The plan without stages."""
        dtypes = [np.int64] * 5 + [np.float64] * 9
        columns: list[NDArray[Any]] = [np.zeros(1, dtype=dtype) for dtype in dtypes]
        level = cls(*columns)
        level.fastest = np.full(1, np.inf)
        return level

    @classmethod
    def join(cls, parts: list[Level]) -> Level:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))


@dataclass(slots=True, eq=False)
class Beam:
    """One walk through a cell. `left_out`: least bound of what was dropped for want of room.
    `num_candidates`: work done.
    """

    bounds: CellBounds
    limit: float
    width: int
    left_out: float = field(init=False, default=float("inf"))
    num_candidates: int = field(init=False, default=0)
    _levels: list[Level] = field(init=False, default_factory=list)

    def complete_plans(self) -> tuple[Ints, Ints, Ints, Floats]:
        """Bounds [n, p + 1], options and places [n, p] and lower bounds [n] of complete plans, ascending in
        the latter.
        """
        cell = self.bounds.cell
        level = Level.start()
        self._levels = [level]
        for stage in range(cell.num_stages):
            level = self._next(level, stage)
            if stage + 1 < cell.num_stages:
                level = self._best(level)
            self._levels.append(level)
            if not len(level):
                break
        level = level.take(np.argsort(level.bounds, kind="stable"))
        self._levels[-1] = level
        return *self._trace(level), level.bounds

    def _next(self, level: Level, stage: int) -> Level:
        """All ways to add a stage whose bound is below the limit."""
        to_end = self.bounds.cell.num_stages - stage
        choices = self.bounds.choices[to_end - 1]
        firsts = np.searchsorted(choices.begins, level.ends, side="left")
        counts = np.searchsorted(choices.begins, level.ends, side="right") - firsts
        parts = []
        for chunk in _chunks(counts):
            states = np.repeat(chunk, counts[chunk])
            if len(states):
                within = np.arange(len(states)) - np.repeat(
                    np.cumsum(counts[chunk]) - counts[chunk], counts[chunk]
                )
                parts.append(self._expand(level, states, firsts[states] + within, choices, stage))
        return Level.join(parts) if parts else level.take(np.zeros(0, dtype=np.int64))

    def _expand(self, level: Level, states: Ints, chosen: Ints, choices: Choices, stage: int) -> Level:
        cell, sums = self.bounds.cell, self.bounds.sums
        pricer = self.bounds.pricer
        problem, left = pricer.problem, cell.num_stages - stage - 1
        self.num_candidates += len(states)
        replicas = pricer.tables.replicas
        needed = sums.rest("devices", left, choices.ends, 0)
        # Sums without messages and places first: most candidates end here.
        used = level.used[states] + replicas[choices.options[chosen]]
        path = level.path[states] + choices.path[chosen]
        hopeful = used + needed[chosen] <= problem.num_devices
        rest = sums.rest("path", left, choices.ends[chosen], problem.num_devices - used)
        peaks = self.bounds.peaks
        own = peaks.of_choices(choices, left + 1)[:, chosen]
        later = peaks.after[:, left, choices.ends[chosen]]
        excess, longest = (
            np.maximum(np.maximum(done, now), then)
            for done, now, then in zip((level.excess[states], level.longest[states]), own, later, strict=True)
        )
        hopeful &= peaks.bound(path + rest, excess, longest) < self.limit
        hopeful &= path + peaks.reach[left, choices.ends[chosen]] < self.limit
        states, chosen = states[hopeful], chosen[hopeful]
        if not len(states):
            return level.take(states)
        places = level.used[states]
        if cell.placement == "replica_major":
            places = np.full(len(states), stage, dtype=np.int64)
        elif problem.num_devices > problem.cluster.devices_per_node:
            per_node = problem.cluster.devices_per_node
            aligned = -(-places // per_node) * per_node
            again = aligned + replicas[choices.options[chosen]] + needed[chosen] <= problem.num_devices
            again &= aligned != places
            states, chosen = np.concatenate([states, states[again]]), np.concatenate([chosen, chosen[again]])
            places = np.concatenate([places, aligned[again]])
        terms = pricer.stage(
            left + 1,
            choices.begins[chosen],
            choices.ends[chosen] - choices.begins[chosen],
            choices.options[chosen],
            places,
            before_options=level.options[states] if stage else None,
            before_places=level.places[states] if stage else None,
            placement=cell.placement,
            num_stages=cell.num_stages,
        )
        grown = self._grow(level, states, chosen, choices, places, terms, left)
        return grown.take(grown.bounds < self.limit)

    def _grow(
        self,
        level: Level,
        states: Ints,
        chosen: Ints,
        choices: Choices,
        places: Ints,
        terms: StageTerms,
        left: int,
    ) -> Level:
        cell = self.bounds.cell
        forward, backward, message, gradient = terms.forward, terms.backward, terms.message, terms.gradient
        compute = forward + backward
        # What nobody waits for is no part of the round trip.
        stage = cell.num_stages - left - 1
        later = terms.weight if cell.described.splits_backward and stage else np.zeros_like(backward)
        path = level.path[states] + message + gradient
        drain = level.drain[states] + gradient
        reduction_tail = np.maximum(
            reduction_seconds(backward, terms.allreduce, terms.num_buckets) - drain, 0.0
        )
        seconds = StageSeconds(
            num_before=stage,
            num_after=left,
            forward=forward,
            backward=backward,
            weight=later,
            message=message,
            gradient=gradient,
            reduction_tail=reduction_tail,
        )
        excess, longest, own = cell.described.exact_peaks(cell.num_micro_batches, path, seconds)
        replicas = choices.replicas[chosen]
        used = level.used[states] + replicas.astype(np.int64)
        if cell.placement == "stage_major":
            used = places + replicas.astype(np.int64)
        grown = Level(
            parents=states,
            ends=choices.ends[chosen],
            options=choices.options[chosen],
            places=places,
            used=used,
            path=path + compute - later,
            drain=drain + backward - later,
            own=np.maximum(level.own[states], own),
            excess=np.maximum(level.excess[states], excess),
            longest=np.maximum(level.longest[states], longest),
            fastest=np.minimum(level.fastest[states], compute),
            slowest=np.maximum(level.slowest[states], compute),
            work=level.work[states] + replicas * compute,
            bounds=compute,
        )
        grown.bounds = self._bounds(grown, left)
        return grown

    def _bounds(self, level: Level, left: int) -> Floats:
        sums, devices = self.bounds.sums, self.bounds.pricer.problem.num_devices
        free = devices - level.used
        path = level.path + sums.rest("path", left, level.ends, free)
        peaks = self.bounds.peaks
        later = peaks.after[:, left, level.ends]
        result = peaks.bound(path, np.maximum(level.excess, later[0]), np.maximum(level.longest, later[1]))
        result = np.maximum(result, level.path + peaks.reach[left, level.ends])
        result = np.maximum(result, level.own)
        steps = sums.kinds["step"]
        if steps.any():
            sum_of_rows = sums.path[steps] * level.path + sums.compute[steps] * level.work
            sum_of_rows += sums.tables[steps, left][:, level.ends] - sums.price[steps] * free
            result = np.maximum(result, sum_of_rows.max(axis=0))
        hopeless = sums.rest("devices", left, level.ends, 0) > free
        hopeless |= level.slowest > self.bounds.pricer.problem.limits.slowest_of(level.fastest)
        return np.where(hopeless, np.inf, result)

    def _best(self, level: Level) -> Level:
        """At most `width` partial plans: those with the least bounds, not too many of them alike."""
        if len(level) <= self.width:
            return level
        order = np.argsort(level.bounds, kind="stable")
        keys = (level.ends * (self.bounds.pricer.problem.num_devices + 1) + level.used)[order]
        by_key = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.diff(keys[by_key], prepend=-1))
        rank = np.empty(len(keys), dtype=np.int64)
        rank[by_key] = np.arange(len(keys)) - np.repeat(starts, np.diff(starts, append=len(keys)))
        first = np.flatnonzero(rank < _MAX_ALIKE)[: self.width]
        kept = np.zeros(len(keys), dtype=bool)
        kept[first] = True
        kept[np.flatnonzero(~kept)[: self.width - len(first)]] = True
        self.left_out = min(self.left_out, float(level.bounds[order[~kept]].min()))
        return level.take(order[kept])

    def _trace(self, level: Level) -> tuple[Ints, Ints, Ints]:
        num_stages = self.bounds.cell.num_stages
        bounds = np.zeros((len(level), num_stages + 1), dtype=np.int64)
        options, places = np.zeros((2, len(level), num_stages), dtype=np.int64)
        index = np.arange(len(level))
        for stage in range(num_stages, 0, -1):
            if not len(level):
                break
            at = self._levels[stage]
            bounds[:, stage], options[:, stage - 1], places[:, stage - 1] = (
                at.ends[index],
                at.options[index],
                at.places[index],
            )
            index = at.parents[index]
        return bounds, options, places


def _chunks(counts: Ints) -> Iterator[Ints]:
    """Indices in runs whose counts add up to at most `_MAX_CANDIDATES` (or are one)."""
    if not len(counts):
        return
    groups = np.cumsum(counts) // _MAX_CANDIDATES
    yield from np.split(np.arange(len(counts)), np.flatnonzero(np.diff(groups)) + 1)
