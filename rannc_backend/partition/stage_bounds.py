"""Lower bounds on the simulated step, for all plans of one shape or for all ways to complete part of a plan.

In: a `Pricer` and a `Cell`: schedule, micro-batches, number of stages, placement. Out: numbers below which no plan's step can
fall, and for each place in the pipeline the stages that a plan faster than a limit may have there (`Choices`).

Terms. Seconds of a stage: forward f, backward b, c = f + b, messages into it t and u, w = c + t + u; a: stages after it; P: sum of
w over all p stages; m: micro-batches. Every path through what waits for what is a lower bound of the step. Those used:

1f1b  (down to the last stage and up again costs P, and p micro-batches are in flight)
    for each stage   w of the stages before it + its t + u + m c
                     P + (m - 1) c - min(a, m - 1) min(f, b)
    if m > p         P (1 + n) + (m - 1 - n p) max c          for n = 1 and n = (m - 1) // p
fill_drain           P + (m - 1) (max of f and t + max of b and u)
Reductions of a stage that end after its gradients have reached the first stage replace that part of the path.

Sums over stages are bounded for the blocks that are left by shortest paths over (stages left, blocks left); the limit on devices
is priced (Lagrange): sum of (w + price r) - price * devices, for several prices. max c is at least the mean of c weighted by the
share of devices, which is such a sum too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rannc_backend.partition.search_problem import Floats, Ints, Placement, Pricer
from rannc_backend.schedule.orders import ScheduleName

PRICES = (0.0, 0.4, 0.7, 1.0, 1.4, 2.2)
"""Prices of a device, as multiples of the seconds of a round trip per device: what one more device is worth where all share."""


_BISECTIONS = 10
_BISECTED_TO = 0.004
_GRID = 9  # intervals of the longest c that are told apart in first bounds
_IN_FLIGHT_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # told apart in first bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All plans with this schedule, numbers of micro-batches and stages, and placement. `option`: of all stages, if fixed."""

    schedule: ScheduleName
    num_micro_batches: int
    num_stages: int
    placement: Placement = "stage_major"
    option: int | None = None

    def weights(self) -> list[tuple[float, float]]:
        """(alpha, beta) of the bounds alpha P + beta max c that hold for every plan of the cell."""
        number, stages = self.num_micro_batches, self.num_stages
        if self.schedule == "fill_drain" or stages == 1:
            return [(1.0, number - 1.0)]
        trips = (number - 1) // stages
        return [(1.0 + n, float(number - 1 - n * stages)) for n in sorted({1, trips}) if 1 <= n <= trips]


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Stages that one place in the pipeline may have: arrays [n], sorted by first block, length, option.

    `pairs`: where in the arrays each run of blocks begins; `begins_at`: where in the pairs each first block does.
    """

    begins: Ints
    ends: Ints
    options: Ints
    forward: Floats
    backward: Floats
    path: Floats  # w at the least
    replicas: Floats
    pairs: Ints
    pair_begins: Ints
    pair_ends: Ints
    begins_at: Ints
    distinct_begins: Ints

    @classmethod
    def of(cls, pricer: Pricer, allowed: NDArray[np.bool_], num_stages_to_end: int, least_messages: Floats) -> Choices:
        begins, lengths, options = np.nonzero(allowed)
        index = (begins, lengths, options)
        forward, backward = pricer.tables.forward[index], pricer.backward(num_stages_to_end)[0][index]
        path = forward + backward + np.where(begins > 0, least_messages[index], 0.0)
        columns = (begins, begins + lengths + 1, options, forward, backward, path, pricer.tables.replicas[options].astype(float))
        return cls._sorted(*columns)

    @classmethod
    def _sorted(cls, *columns: NDArray) -> Choices:
        begins, ends = columns[0], columns[1]
        width = int(ends.max(initial=0)) + 1
        _, pairs = np.unique(begins * width + ends, return_index=True)
        distinct, begins_at = np.unique(begins[pairs], return_index=True)
        return cls(*columns, pairs, begins[pairs], ends[pairs], begins_at, distinct)

    def keep(self, kept: NDArray[np.bool_]) -> Choices:
        """Only the chosen ones."""
        if kept.all():
            return self
        names = ("begins", "ends", "options", "forward", "backward", "path", "replicas")
        return self._sorted(*(getattr(self, name)[kept] for name in names))

    @property
    def compute(self) -> Floats:
        return self.forward + self.backward

    def __len__(self) -> int:
        return len(self.begins)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sum over stages: path * w + compute * r c / devices + price * r. `bounds`: "path", "step" or "devices"."""

    bounds: str
    path: float = 0.0
    compute: float = 0.0
    price: float = 0.0


def shape_rows(cell: Cell, path_seconds: float, num_devices: int) -> list[Row]:
    """Rows for one cell whose round trip takes about `path_seconds`."""
    unit = path_seconds / num_devices
    rows = [Row(bounds="devices", price=1.0)]
    rows += [Row(bounds="path", path=1.0, price=price * unit) for price in PRICES]
    for alpha, beta in cell.weights():
        if beta > 0:
            rows += [Row(bounds="step", path=alpha, compute=beta, price=alpha * price * unit) for price in PRICES[1:-1]]
    return rows


class Sums:
    """Least sums over the last k stages for the blocks from b on: `tables` [rows, k, b]; and over the first k before b."""

    def __init__(self, choices: Sequence[Choices], rows: Sequence[Row], num_blocks: int, num_devices: int) -> None:
        self.choices, self.rows, self.num_blocks, self.num_devices = choices, rows, num_blocks, num_devices
        self._least: dict[int, Floats] = {}
        self.path = np.array([row.path for row in rows])[:, None]
        self.compute = np.array([row.compute / num_devices for row in rows])[:, None]
        self.price = np.array([row.price for row in rows])[:, None]
        self.kinds = {kind: np.array([row.bounds == kind for row in rows]) for kind in ("path", "step", "devices")}
        self.tables = np.full((len(rows), len(choices) + 1, num_blocks + 1), np.inf)
        self.tables[:, 0, num_blocks] = 0.0
        for k, options in enumerate(choices, start=1):
            if len(options):
                sums = self.least(options) + self.tables[:, k - 1, options.pair_ends]
                self.tables[:, k, options.distinct_begins] = np.minimum.reduceat(sums, options.begins_at, axis=1)

    def of_choices(self, options: Choices) -> Floats:
        """[rows, choices]: what each choice adds."""
        return self.path * options.path + self.compute * (options.replicas * options.compute) + self.price * options.replicas

    def least(self, options: Choices) -> Floats:
        """[rows, pairs]: the least over options."""
        if id(options) not in self._least:
            self._least[id(options)] = np.minimum.reduceat(self.of_choices(options), options.pairs, axis=1)
        return self._least[id(options)]

    def prefixes(self) -> Floats:
        """[rows, k, b]: least sums over the first k stages of as many as there are choices, for the blocks before b."""
        result = np.full_like(self.tables, np.inf)
        result[:, 0, 0] = 0.0
        for k, options in enumerate(reversed(self.choices), start=1):
            if len(options):
                sums = self.least(options) + result[:, k - 1, options.pair_begins]
                for row in range(len(sums)):
                    np.minimum.at(result[row, k], options.pair_ends, sums[row])
        return result

    def rest(self, kind: str, num_stages: int, blocks: Ints | int, devices: Ints | int) -> Floats:
        """Least sum of the last stages with the blocks from `blocks` on, on at most `devices` devices: [...], inf if none."""
        rows = self.kinds[kind]
        sums = self.tables[rows, num_stages][:, blocks]
        if kind == "devices":
            return sums[0]
        price = self.price[rows, 0].reshape((-1,) + (1,) * (sums.ndim - 1))
        return (sums - price * devices).max(axis=0)


class Peaks:
    """Least largest values over the last k stages for the blocks from b on, and over the first k before b: [kinds, k, b].

    Kinds: what a stage adds to the round trip (`own_excess`), and its c (of fill_drain: f); "reach" is the least, over the ways to
    complete, of the longest path from a stage's begin through m micro-batches of one stage (only for the last stages).
    """

    def __init__(self, cell: Cell, choices: Sequence[Choices], num_blocks: int) -> None:
        self.cell, self.choices = cell, choices
        self.highest = 0.0  # no plan's worst `measure` is less
        self.after = np.full((2, len(choices) + 1, num_blocks + 1), np.inf)
        self.reach = np.full((len(choices) + 1, num_blocks + 1), np.inf)
        self.after[:, 0, num_blocks] = self.reach[0, num_blocks] = 0.0
        self._least: list[tuple[Floats, Floats]] = []
        for k, options in enumerate(choices, start=1):
            if not len(options):
                self._least.append((np.zeros((2, 0)), np.zeros(0)))
                continue
            values = self.of_choices(options, k)
            least = np.minimum.reduceat(values, options.pairs, axis=1)
            self._least.append((least, least[0]))
            highest = np.maximum(least, self.after[:, k - 1, options.pair_ends])
            self.after[:, k, options.distinct_begins] = np.minimum.reduceat(highest, options.begins_at, axis=1)
            own = cell.num_micro_batches * options.compute
            reach = np.maximum(own, options.path + self.reach[k - 1, options.ends])
            reach = np.minimum.reduceat(reach, options.pairs)
            self.reach[k, options.distinct_begins] = np.minimum.reduceat(reach, options.begins_at)

    def of_choices(self, options: Choices, k: int) -> Floats:
        """[kinds, choices]."""
        if self.cell.schedule == "fill_drain":
            return np.stack([(self.cell.num_micro_batches - 1) * options.backward, options.forward])
        return np.stack([own_excess(self.cell, k - 1, options.forward, options.backward), options.compute])

    def before(self) -> Floats:
        """[kinds, k, b] over the first k stages."""
        result = np.full_like(self.after, np.inf)
        result[:, 0, 0] = 0.0
        for k in range(1, len(self.choices) + 1):
            place = len(self.choices) - k
            options = self.choices[place]
            if len(options):
                highest = np.maximum(self._least[place][0], result[:, k - 1, options.pair_begins])
                for kind in range(2):
                    np.minimum.at(result[kind, k], options.pair_ends, highest[kind])
        return result

    def measure(self, options: Choices, k: int) -> Floats:
        """What the worst stage of a plan is worst in: c; for 1f1b with few micro-batches the excess."""
        if self.cell.weights():
            return options.compute
        return own_excess(self.cell, k - 1, options.forward, options.backward)

    def bound(self, path: Floats, excess: Floats, longest: Floats) -> Floats:
        """Of the step, from bounds of the round trip and of the two kinds."""
        weights = self.cell.weights()
        if self.cell.schedule == "fill_drain":
            result = path + (longest * (self.cell.num_micro_batches - 1) if self.cell.num_micro_batches > 1 else 0.0) + excess
            longest = np.zeros_like(longest)
        else:
            result = path + excess
        if not weights:
            return np.maximum(result, path + self.highest)
        longest = np.maximum(longest, self.highest)
        for alpha, beta in weights:
            if beta:
                result = np.maximum(result, alpha * path + beta * longest)
            else:
                result = np.maximum(result, alpha * path)
        return result


class CellBounds:
    """Bounds of one cell, narrowed to plans faster than a limit by `narrow`."""

    def __init__(self, pricer: Pricer, cell: Cell, choices: Sequence[Choices], path_seconds: float) -> None:
        self.pricer, self.cell, self.choices = pricer, cell, list(choices)
        self.path_seconds = path_seconds
        self.resum()

    def resum(self) -> None:
        """Compute the sums over the choices anew."""
        problem = self.pricer.problem
        rows = shape_rows(self.cell, self.path_seconds, problem.num_devices)
        self.sums = Sums(self.choices, rows, problem.num_blocks, problem.num_devices)
        stages = self.cell.num_stages
        self.lower_bound = np.inf
        if self.sums.rest("devices", stages, 0, problem.num_devices) > problem.num_devices:
            return
        self.peaks = Peaks(self.cell, self.choices, problem.num_blocks)
        self.peaks.highest = self._least_highest()
        self.path_seconds = float(self.sums.rest("path", stages, 0, problem.num_devices))
        if not np.isfinite(self.path_seconds):
            return
        excess, longest = self.peaks.after[:, stages, 0]
        bounds = [float(self.peaks.bound(np.float64(self.path_seconds), excess, longest)), float(self.peaks.reach[stages, 0])]
        if self.sums.kinds["step"].any():
            bounds.append(float(self.sums.rest("step", stages, 0, problem.num_devices)))
        self.lower_bound = max(bounds)

    def _least_highest(self) -> float:
        """The least `Peaks.measure` of the worst stage of plans that have enough devices, a little less at most."""
        devices = self.pricer.problem.num_devices
        measures = [self.peaks.measure(options, k) for k, options in enumerate(self.choices, start=1)]
        low, high = 0.0, max((float(values.max(initial=0.0)) for values in measures), default=0.0)
        if not np.isfinite(high):
            return 0.0
        for _ in range(_BISECTIONS):
            if high - low <= _BISECTED_TO * high:
                break
            middle = (low + high) / 2 if low else high / 4
            least = np.full(self.pricer.problem.num_blocks + 1, np.inf)
            least[-1] = 0.0
            for options, values in zip(self.choices, measures, strict=True):
                needed = np.minimum.reduceat(np.where(values <= middle, options.replicas, np.inf), options.pairs)
                sums = np.minimum.reduceat(needed + least[options.pair_ends], options.begins_at)
                least = np.full_like(least, np.inf)
                least[options.distinct_begins] = sums
            if least[0] <= devices:
                high = middle
            else:
                low = middle
        return low

    def narrow(self, limit: float) -> None:
        """Drop choices that no plan with a step below `limit` has. `lower_bound` is inf when none are left."""
        while self.lower_bound < limit:
            before = sum(map(len, self.choices))
            prefixes = self.sums.prefixes(), self.peaks.before()
            shared: dict[tuple[int, bytes], Choices] = {}
            for k in range(1, self.cell.num_stages + 1):
                options = self.choices[k - 1]
                if len(options):
                    kept = self._through(options, k, prefixes) < limit
                    key = (id(options), kept.tobytes())
                    shared.setdefault(key, options.keep(kept))
                    self.choices[k - 1] = shared[key]
                if not len(self.choices[k - 1]):
                    self.lower_bound = np.inf
                    return
            self.resum()
            if sum(map(len, self.choices)) > 0.9 * before:
                return

    def _through(self, options: Choices, k: int, prefixes: tuple[Floats, Floats]) -> Floats:
        """[choices]: a bound for the plans in which the k-th stage from the end is that choice."""
        sums, cell, devices = self.sums, self.cell, self.pricer.problem.num_devices
        added = sums.of_choices(options)
        total = prefixes[0][:, cell.num_stages - k][:, options.begins] + added + sums.tables[:, k - 1][:, options.ends]
        priced = total - sums.price * devices
        path = priced[sums.kinds["path"]].max(axis=0)
        peaks = np.maximum(prefixes[1][:, cell.num_stages - k, options.begins], self.peaks.after[:, k - 1, options.ends])
        peaks = np.maximum(peaks, self.peaks.of_choices(options, k))
        bound = np.maximum(self.peaks.bound(path, *peaks), cell.num_micro_batches * options.compute)
        if sums.kinds["step"].any():
            bound = np.maximum(bound, priced[sums.kinds["step"]].max(axis=0))
        bound = np.where(total[sums.kinds["devices"]][0] > devices, np.inf, bound)
        return bound


def own_excess(cell: Cell, num_after: int, forward: Floats, backward: Floats) -> Floats:
    """1f1b: what a stage adds to the round trip: (m - 1) c - min(a, m - 1) min(f, b)."""
    number = cell.num_micro_batches
    return (number - 1) * (forward + backward) - min(num_after, number - 1) * np.minimum(forward, backward)


class Shapes:
    """Choices and first bounds for all cells of one pricer: what does not depend on the number of stages is computed once."""

    def __init__(self, pricer: Pricer, limit: float = float("inf")) -> None:
        """`limit`: plans with a longer step are of no interest."""
        self.pricer, self.limit = pricer, limit
        self._choices: dict[tuple[object, ...], Choices] = {}
        self._messages: dict[str, Floats] = {}
        self._allowed = self._everywhere()

    def _everywhere(self) -> NDArray[np.bool_]:
        problem, tables = self.pricer.problem, self.pricer.tables
        num_blocks, max_length, _ = tables.forward.shape
        begins = np.arange(num_blocks)[:, None, None]
        ends = begins + np.arange(1, max_length + 1)[None, :, None]
        allowed = (ends <= num_blocks) & (tables.replicas <= problem.num_devices) & np.isfinite(tables.forward)
        for start in problem.starts:
            allowed &= ~((begins < start) & (start < ends))
        if problem.replicas is not None:
            allowed &= tables.replicas == problem.replicas
        return allowed

    def choices(self, cell: Cell, num_stages_to_end: int) -> Choices:
        """Stages that the place may have in memory and by the user's wishes."""
        problem, tables = self.pricer.problem, self.pricer.tables
        stage = cell.num_stages - num_stages_to_end
        forced = None if problem.stage_replicas is None else problem.stage_replicas[stage]
        wishes = tuple((block, wanted == stage) for block, wanted in problem.stage_of)
        backward = self.pricer.backward(num_stages_to_end)[0]
        key = (id(backward), forced, wishes, cell.placement, cell.option)
        if key not in self._choices:
            compute = tables.forward + backward
            allowed = self._allowed & np.isfinite(compute) & (self.pricer.num_micro_batches * compute < self.limit)
            begins = np.arange(problem.num_blocks)[:, None, None]
            ends = begins + np.arange(1, self.pricer.max_length + 1)[None, :, None]
            for block, here in wishes:
                allowed &= ((begins <= block) & (block < ends)) == here
            if forced is not None:
                allowed &= tables.replicas == forced
            if cell.option is not None:
                allowed &= np.arange(len(tables.replicas)) == cell.option
            least = self.least_messages(cell)
            self._choices[key] = Choices.of(self.pricer, allowed, num_stages_to_end, least)
        return self._choices[key]

    def least_messages(self, cell: Cell) -> Floats:
        """[L, N, R]: the least that both messages into a stage can take."""
        if cell.placement not in self._messages:
            self._messages[cell.placement] = self._least_messages(cell)
        return self._messages[cell.placement]

    def _least_messages(self, cell: Cell) -> Floats:
        problem, tables = self.pricer.problem, self.pricer.tables
        may_be_near = (tables.replicas < problem.cluster.devices_per_node) | (cell.placement == "replica_major")
        may_be_near = np.broadcast_to(may_be_near, tables.message_bytes.shape)
        near, far = np.ones_like(may_be_near), np.zeros_like(may_be_near)
        result = np.zeros(tables.message_bytes.shape)
        for size in (tables.message_bytes, tables.gradient_bytes):
            fast, slow = self.pricer.links(near, size), self.pricer.links(far, size)
            result += np.where(may_be_near, np.minimum(fast, slow), slow)
        return result

    def bounds(self, cell: Cell, path_seconds: float) -> CellBounds:
        choices = [self.choices(cell, k) for k in range(1, cell.num_stages + 1)]
        return CellBounds(self.pricer, cell, choices, path_seconds)

    def first_bounds(self, stage_counts: Sequence[int]) -> dict[int, tuple[float, float]]:
        """Number of stages -> (lower bound, round trip at least) of stage-major cells; those that cannot fit are left out.

        The longest c of a plan lies in one of a few intervals; each gives its least round trip with no stage beyond it.
        """
        pricer, problem = self.pricer, self.pricer.problem
        if not stage_counts:
            return {}
        cells = {
            p: Cell(schedule=pricer.schedule, num_micro_batches=pricer.num_micro_batches, num_stages=p) for p in stage_counts
        }
        if problem.stage_replicas is not None or problem.stage_of:
            found = {p: self.bounds(cell, p * self.least_path) for p, cell in cells.items()}
            return {p: (b.lower_bound, b.path_seconds) for p, b in found.items() if np.isfinite(b.lower_bound)}
        result = self._bounds_between(cells, self.least_path, np.inf)
        open_cells = {p: cells[p] for p, (bound, _) in result.items() if bound < self.limit}
        if not open_cells:
            return result
        longest = max(self._longest_below_limit(cell, result[p][1]) for p, cell in open_cells.items())
        has_limit = np.isfinite(longest)
        if not has_limit:
            longest = _GRID * self.least_path
        grid = np.geomspace(self.least_path, max(longest, 1.01 * self.least_path), _GRID + 1)
        if not has_limit:
            grid[-1] = np.inf
        parts = [self._bounds_between(open_cells, low, high) for low, high in zip(grid[:-1], grid[1:], strict=True)]
        for p in open_cells:
            found = [part[p] for part in parts if p in part]
            # Plans with a longer c than the grid's last have a longer step than the limit.
            result[p] = min([self.limit, *(bound for bound, _ in found)]), min([path for _, path in found], default=result[p][1])
        return result

    def _longest_below_limit(self, cell: Cell, path: float) -> float:
        """The longest c of plans with that round trip or more and a step below the limit."""
        bounds = [self.limit / cell.num_micro_batches, *((self.limit - a * path) / b for a, b in cell.weights() if b)]
        return min(bounds)

    def _bounds_between(self, cells: Mapping[int, Cell], lower: float, upper: float) -> dict[int, tuple[float, float]]:
        """By number of stages: bound and least round trip of plans whose longest c is between the two."""
        pricer, problem = self.pricer, self.pricer.problem
        most = max(cells)
        steps = [max(step for step in _IN_FLIGHT_STEPS if step <= k) for k in range(1, most + 1)]
        capped: dict[int, Choices] = {}
        for step in dict.fromkeys(steps):
            options = self.choices(cells[most], step)
            capped[step] = options if upper == np.inf else options.keep(options.compute <= upper)
        unit = self.least_path / problem.num_devices
        rows = [Row(bounds="devices", price=1.0), Row(bounds="path", path=1.0)]
        rows += [Row(bounds="path", path=1.0, price=unit * 2.0**power) for power in range(int(np.log2(most)) + 2)]
        sums = Sums([capped[step] for step in steps], rows, problem.num_blocks, problem.num_devices)
        result = {}
        for p, cell in cells.items():
            if sums.rest("devices", p, 0, problem.num_devices) > problem.num_devices:
                continue
            path = float(sums.rest("path", p, 0, problem.num_devices))
            if np.isfinite(path):
                bounds = [path, pricer.num_micro_batches * lower, *(a * path + b * lower for a, b in cell.weights())]
                result[p] = (max(bounds), path)
        return result

    def option_paths(self) -> Floats:
        """[options]: the least c in all of plans whose stages all have that replica count."""
        backward = self.pricer.tables.backward.min(axis=0)
        seconds = np.where(self._allowed, self.pricer.tables.forward + backward, np.inf)
        return _shortest(seconds)

    @cached_property
    def least_path(self) -> float:
        """Seconds of a micro-batch's forward and backward on all devices at once: no longest c is less; the unit of prices."""
        backward = self.pricer.tables.backward.min(axis=0)
        work = np.where(self._allowed, (self.pricer.tables.forward + backward) * self.pricer.tables.replicas, np.inf)
        least = float(_shortest(work.min(axis=-1, keepdims=True))[0])
        return max(least / self.pricer.problem.num_devices, 1e-30)


def _shortest(values: Floats) -> Floats:
    """[options]: least sums of values [L, N, options] over runs that make up all blocks."""
    num_blocks, max_length, num_options = values.shape
    sums = np.zeros((num_blocks + 1, num_options))
    for begin in range(num_blocks - 1, -1, -1):
        longest = min(max_length, num_blocks - begin)
        sums[begin] = (values[begin, :longest] + sums[begin + 1 : begin + 1 + longest]).min(axis=0)
    return sums[0]
