"""The exact search: blocks x stages x devices x replicas x micro-batch counts, for the shortest predicted step that fits.

In: tables of plain numbers (a `SearchProblem`). Out: the best `Solution`, or None if nothing fits. Pure functions.

Objective, for p stages and m micro-batches:
    (m + p - 1) * max over stages of seconds of one micro-batch + max over stages of all-reduce seconds,
over all cuts of the line of blocks into intervals and all replica counts that use every device, where a stage is allowed
only if its memory fits with the micro-batches that its place in the pipeline keeps in flight.

Method. Both terms are bottlenecks, so a pair of limits (on seconds, on all-reduce seconds) says which stages are allowed, and
whether allowed stages make up a whole pipeline is a question of reachability. One big integer per block holds, for the
blocks from there to the end, every reachable (number of stages, number of devices); a shift adds a stage. The best pair of
limits is found by bisection over the values in the tables, walking down the front of (seconds, all-reduce) pairs; most
numbers of micro-batches and stages are discarded by one such test against the best plan so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rannc_backend.cost.memory import num_in_flight

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatchTables:
    """Costs for one number of micro-batches of a stage of blocks [begin, end) on `replicas` devices.

    All arrays are indexed [begin, end, replicas], shape [L, L + 1, D + 1]; entries with end <= begin or replicas 0 are not
    read. `seconds`: forward, backward and transfers of one micro-batch; inf where a replica would have no rows.
    `fixed_bytes`: memory whatever is in flight; `flight_bytes`: memory of each micro-batch in flight.
    """

    seconds: Floats
    fixed_bytes: Floats
    flight_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchProblem:
    """What to search over. `allreduce_seconds` is indexed as the tables are; `tables(m)` gives those of m micro-batches.

    `num_stages`, `replicas`: fixed numbers of stages and of replicas of each stage, None where they are free.
    `stage_replicas`: fixes both, stage by stage.
    """

    num_blocks: int
    num_devices: int
    schedule: Literal["1f1b", "fill_drain"]
    micro_batches: tuple[int, ...]
    tables: Callable[[int], MicroBatchTables]
    allreduce_seconds: Floats
    memory_bytes: float
    num_stages: int | None = None
    replicas: int | None = None
    stage_replicas: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert self.num_blocks >= 1 and self.num_devices >= 1 and self.micro_batches, f"nothing to search: {self}"
        fixed = self.stage_replicas
        assert fixed is None or (min(fixed) >= 1 and sum(fixed) == self.num_devices), f"{fixed} on {self.num_devices} devices"

    @property
    def stage_counts(self) -> range:
        fixed = len(self.stage_replicas) if self.stage_replicas is not None else self.num_stages
        most = min(self.num_blocks, self.num_devices)
        if fixed is None:
            return range(1, most + 1)
        return range(fixed, fixed + 1) if fixed <= most else range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Stage s has blocks [bounds[s], bounds[s + 1]) on replicas[s] devices."""

    bounds: tuple[int, ...]
    replicas: tuple[int, ...]
    num_micro_batches: int
    step_seconds: float

    @property
    def num_stages(self) -> int:
        return len(self.replicas)


def step_seconds(problem: SearchProblem, bounds: tuple[int, ...], replicas: tuple[int, ...], num_micro_batches: int) -> float:
    """The objective for one plan; inf if it does not fit. (The search does not use it: it says what the search minimises.)"""
    tables = problem.tables(num_micro_batches)
    num_stages = len(replicas)
    slowest, slowest_allreduce = 0.0, 0.0
    for stage, devices in enumerate(replicas):
        place = (bounds[stage], bounds[stage + 1], devices)
        in_flight = num_in_flight(problem.schedule, num_micro_batches, num_stages - stage)
        if tables.fixed_bytes[place] + in_flight * tables.flight_bytes[place] > problem.memory_bytes:
            return float("inf")
        slowest = max(slowest, float(tables.seconds[place]))
        slowest_allreduce = max(slowest_allreduce, float(problem.allreduce_seconds[place]))
    return (num_micro_batches + num_stages - 1) * slowest + slowest_allreduce


def memory_bytes(problem: SearchProblem, solution: Solution) -> float:
    """The most memory that a stage of the solution needs on one device."""
    tables = problem.tables(solution.num_micro_batches)
    needs = []
    for stage, devices in enumerate(solution.replicas):
        place = (solution.bounds[stage], solution.bounds[stage + 1], devices)
        in_flight = num_in_flight(problem.schedule, solution.num_micro_batches, solution.num_stages - stage)
        needs.append(float(tables.fixed_bytes[place] + in_flight * tables.flight_bytes[place]))
    return max(needs)


def search(problem: SearchProblem, *, below_seconds: float = float("inf")) -> Solution | None:
    """The plan with the smallest objective, if it is below `below_seconds`.

    Ties go to the first in the order of trial, which depends on nothing but the problem.
    """
    best: tuple[float, _Space, int, Mask] | None = None
    limit = below_seconds
    for space in _in_promising_order(problem):
        remaining = list(problem.stage_counts)
        while remaining:
            num_stages = remaining.pop(0)
            # Also a relaxation for every larger number of stages: their limits are tighter.
            relaxed = space.below(limit, num_stages)
            reached = space.reached(relaxed)
            remaining = [count for count in remaining if space.completes(reached, count)]
            if not space.completes(reached, num_stages):
                continue
            found = space.solve(num_stages, limit)
            if found is not None:
                limit = found[0]
                best = (found[0], space, num_stages, found[1])
    if best is None:
        return None
    seconds, space, num_stages, allowed = best
    bounds, replicas = space.trace(num_stages, allowed)
    return Solution(
        bounds=bounds, replicas=replicas, num_micro_batches=space.num_micro_batches, step_seconds=seconds
    )


def is_feasible(problem: SearchProblem) -> bool:
    """Whether any plan fits."""
    return any(_feasible_stage_counts(_Space(problem, number)) for number in problem.micro_batches)


def most_devices(problem: SearchProblem) -> int:
    """The largest number of devices, up to the problem's, that some plan that fits can use; 0 if none fits."""
    most = 0
    for number in problem.micro_batches:
        space = _Space(problem, number)
        reached = space.reached(space.possible)
        for devices in range(problem.num_devices, most, -1):
            if any(space.completes(reached, count, devices) for count in problem.stage_counts):
                most = devices
                break
    return most


def smallest_memory(problem: SearchProblem) -> int | None:
    """The smallest memory in bytes with which some plan fits; None if none does with any memory."""
    best: int | None = None
    for number in problem.micro_batches:
        if best is not None and not _feasible_stage_counts(_Space(replace(problem, memory_bytes=best - 1), number)):
            continue
        tables = problem.tables(number)
        finite = np.isfinite(tables.seconds)
        highest = float(np.max(np.where(finite, tables.fixed_bytes + number * tables.flight_bytes, 0.0)))
        low, high = -1, int(np.ceil(highest)) if best is None else best - 1
        if not _feasible_stage_counts(_Space(replace(problem, memory_bytes=high), number)):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if _feasible_stage_counts(_Space(replace(problem, memory_bytes=middle), number)):
                high = middle
            else:
                low = middle
        best = high
    return best


def _feasible_stage_counts(space: _Space) -> list[int]:
    reached = space.reached(space.possible)
    return [count for count in space.problem.stage_counts if space.completes(reached, count)]


def _in_promising_order(problem: SearchProblem) -> Iterator[_Space]:
    """Spaces of all numbers of micro-batches, those that look fast first, so that the rest is discarded early."""
    estimates = []
    for number in problem.micro_batches:
        tables = problem.tables(number)
        whole = float(tables.seconds[0, problem.num_blocks, 1])
        estimates.append(((number + _guess_num_stages(problem, tables, number) - 1) * whole, number))
    for _, number in sorted(estimates):
        yield _Space(problem, number)


def _guess_num_stages(problem: SearchProblem, tables: MicroBatchTables, num_micro_batches: int) -> int:
    """How many stages it takes until an even share of the whole fits in memory. Only the order of trial depends on it."""
    for count in problem.stage_counts:
        place = (0, problem.num_blocks, max(1, problem.num_devices // count))
        in_flight = num_in_flight(problem.schedule, num_micro_batches, count)
        if tables.fixed_bytes[place] + in_flight * tables.flight_bytes[place] <= count * problem.memory_bytes:
            return count
    return problem.num_devices


@dataclass(slots=True)
class _Space:
    """All stages for one number of micro-batches, and which pipelines they make up.

    A state (k, d) is "the blocks from here to the end make k stages on d devices", bit k * stride + d of an integer.
    """

    problem: SearchProblem
    num_micro_batches: int
    seconds: Floats = field(init=False)
    possible: Mask = field(init=False)  # [begin, end, replicas]
    most_in_flight: NDArray[np.int64] = field(init=False)
    stride: int = field(init=False)
    max_stages: int = field(init=False)
    low_devices: int = field(init=False)  # all states with d <= num_devices and k <= max_stages

    def __post_init__(self) -> None:
        problem = self.problem
        tables = problem.tables(self.num_micro_batches)
        self.seconds = tables.seconds
        self.max_stages = max(problem.stage_counts, default=0)
        self.stride = 2 * problem.num_devices + 1  # a shift by a stage's devices never reaches the next row
        row = (1 << (problem.num_devices + 1)) - 1
        self.low_devices = sum(row << (count * self.stride) for count in range(self.max_stages + 1))
        num_blocks = problem.num_blocks
        begins = np.arange(num_blocks)[:, None, None]
        ends = np.arange(num_blocks + 1)[None, :, None]
        counts = np.arange(problem.num_devices + 1)[None, None, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            free = problem.memory_bytes - tables.fixed_bytes
            in_flight = np.where(tables.flight_bytes > 0, np.floor(free / tables.flight_bytes), np.inf)
        # Division rounds: correct by what the objective itself compares.
        whole = np.where(np.isfinite(in_flight), in_flight, 0.0)
        in_flight = np.where(tables.fixed_bytes + (whole + 1) * tables.flight_bytes <= problem.memory_bytes, in_flight + 1, in_flight)
        in_flight = np.where(tables.fixed_bytes + whole * tables.flight_bytes > problem.memory_bytes, in_flight - 1, in_flight)
        in_flight = np.where(free >= 0, in_flight, 0.0)
        most = self.num_micro_batches if problem.schedule == "fill_drain" else min(self.num_micro_batches, max(self.max_stages, 1))
        self.most_in_flight = np.clip(np.nan_to_num(in_flight, posinf=most, neginf=0), 0, most).astype(np.int64)
        least = self.num_micro_batches if problem.schedule == "fill_drain" else 1
        self.possible = (
            np.isfinite(self.seconds) & (ends > begins) & (counts >= 1) & (self.most_in_flight >= least)
        )
        if problem.replicas is not None:
            self.possible &= counts == problem.replicas

    def factor(self, num_stages: int) -> int:
        return self.num_micro_batches + num_stages - 1

    def below(self, limit_seconds: float, num_stages: int) -> Mask:
        """Stages that a plan of at least `num_stages` stages with an objective below the limit may have."""
        if limit_seconds == float("inf"):
            return self.possible
        return self.possible & (self.factor(num_stages) * self.seconds + self.problem.allreduce_seconds < limit_seconds)

    def reached(self, allowed: Mask) -> list[int]:
        """States reached from the end: element b for the blocks from b on."""
        num_blocks = self.problem.num_blocks
        states = [0] * num_blocks + [1]
        for begin, end, replica_bits, rows in reversed(self._stages(allowed)):
            source = states[end] & rows
            if source:
                states[begin] |= _shifted_by_each(source << self.stride, replica_bits) & self.low_devices
        return states

    def completes(self, states: list[int], num_stages: int, num_devices: int | None = None) -> bool:
        devices = self.problem.num_devices if num_devices is None else num_devices
        return bool(states[0] >> (num_stages * self.stride + devices) & 1)

    def _stages(self, allowed: Mask) -> list[tuple[int, int, int, int]]:
        """(begin, end, set of replica counts, states that may follow) of the allowed stages, ascending in begin."""
        most = int(self.most_in_flight.max(initial=0))
        groups = []
        for replicas_mask, places in self._by_place():
            chosen = allowed if replicas_mask is None else allowed & replicas_mask
            for in_flight in np.unique(self.most_in_flight[chosen]).tolist():
                rows = places if in_flight == most else places & ((1 << (in_flight * self.stride)) - 1)
                groups.append((chosen & (self.most_in_flight == in_flight), rows))
        found: list[tuple[int, int, int, int]] = []
        for mask, rows in groups:
            begins, ends = np.nonzero(mask.any(axis=2))
            sets = _as_integers(mask[begins, ends])
            found += zip(begins.tolist(), ends.tolist(), sets, [rows] * len(sets), strict=True)
        found.sort(key=itemgetter(0))
        return found

    def _by_place(self) -> Iterator[tuple[Mask | None, int]]:
        """Replica counts and the states that a stage with them may be put before (all, unless given stage by stage)."""
        fixed = self.problem.stage_replicas
        if fixed is None:
            yield None, self.low_devices
            return
        counts = np.arange(self.problem.num_devices + 1)[None, None, :]
        row = (1 << (self.problem.num_devices + 1)) - 1
        for replicas in sorted(set(fixed)):
            followers = [len(fixed) - 1 - stage for stage, count in enumerate(fixed) if count == replicas]
            yield counts == replicas, sum(row << (number * self.stride) for number in followers)

    def solve(self, num_stages: int, limit_seconds: float) -> tuple[float, Mask] | None:
        """Smallest objective below the limit for this number of stages, and the stages that are within its two bottlenecks."""
        best: tuple[float, Mask] | None = None
        allreduce = self.problem.allreduce_seconds
        allowed = self.below(limit_seconds, num_stages)
        while self.completes(self.reached(allowed), num_stages):
            allowed_seconds, slowest = self._smallest(allowed, self.seconds, num_stages)
            within, slowest_allreduce = self._smallest(allowed_seconds, allreduce, num_stages)
            total = self.factor(num_stages) * slowest + slowest_allreduce
            if total < limit_seconds:
                limit_seconds = total
                best = (total, within)
            # A better plan, if there is one, is slower per micro-batch and has a shorter all-reduce.
            allowed = self.below(limit_seconds, num_stages) & (allreduce < slowest_allreduce)
        return best

    def _smallest(self, allowed: Mask, values: Floats, num_stages: int) -> tuple[Mask, float]:
        """The smallest limit on `values` under which a pipeline is still complete, and the stages within it."""
        candidates = np.unique(values[allowed])
        low, high = -1, len(candidates) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.completes(self.reached(allowed & (values <= candidates[middle])), num_stages):
                high = middle
            else:
                low = middle
        return allowed & (values <= candidates[high]), float(candidates[high])

    def trace(self, num_stages: int, allowed: Mask) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """One complete pipeline of allowed stages: each time the stage nearest to an even share of what remains."""
        states = self.reached(allowed)
        stages = self._stages(allowed)
        begin, devices = 0, self.problem.num_devices
        bounds, replicas = [0], []
        for remaining in range(num_stages, 0, -1):
            share = self._even_share(begin, devices)
            choices = []
            for first, end, replica_bits, rows in stages:
                if first != begin:
                    continue
                followers = states[end] & rows
                for count in range(1, devices + 1):
                    if replica_bits >> count & 1 and followers >> ((remaining - 1) * self.stride + devices - count) & 1:
                        choices.append((abs(float(self.seconds[begin, end, count]) - share), end, count))
            assert choices, "a pipeline that completes can be traced"
            _, begin, count = min(choices)
            bounds.append(begin)
            replicas.append(count)
            devices -= count
        return tuple(bounds), tuple(replicas)

    def _even_share(self, begin: int, devices: int) -> float:
        """Seconds of each remaining stage if the rest were spread evenly over the remaining devices."""
        return float(self.seconds[begin, self.problem.num_blocks, 1]) / devices


def _as_integers(bits: Mask) -> list[int]:
    """Each line of a two-dimensional mask as an integer, column c being bit c."""
    packed = np.packbits(bits, axis=1, bitorder="little")
    missing = -packed.shape[1] % 8
    words = np.pad(packed, ((0, 0), (0, missing))).view("<u8")
    integers: list[int] = words[:, 0].tolist() if len(words) else []
    for column in range(1, words.shape[1]):
        integers = [low | high << 64 * column for low, high in zip(integers, words[:, column].tolist(), strict=True)]
    return integers


def _shifted_by_each(states: int, shifts: int) -> int:
    """OR of `states << s` for every s whose bit is set in `shifts`: a run of set bits takes a logarithm of its length."""
    result = 0
    while shifts:
        start = (shifts & -shifts).bit_length() - 1
        run = shifts >> start
        length = ((run + 1) & ~run).bit_length() - 1
        shifts &= ~(((1 << length) - 1) << start)
        spread, width = states << start, 1
        while 2 * width <= length:
            spread |= spread << width
            width *= 2
        if width < length:
            spread |= spread << (length - width)
        result |= spread
    return result
