"""Stages that a plan may have at each place, the least sums over runs of such stages (the shortest paths under the
bounds), and the least largest values over such runs.

In: a `Pricer` and what is allowed. Out: `Choices`, and `Sums` and `Peaks` over the last or the first k stages. Terms are
those of planner/search/bounds.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rannc_backend.planner.search.problem import Floats, Ints, Placement, Pricer
from rannc_backend.schedule.description import PlaceSeconds, Schedule
from rannc_backend.schedule.orders import ScheduleName, schedule_named

PRICES = (0.0, 0.4, 0.7, 1.0, 1.4, 2.2)
"""Prices of a device, as multiples of the seconds of a round trip per device: what one more device is worth
where all share.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All plans with this schedule, numbers of micro-batches and stages, and placement. `option`: of all
    stages, if fixed.
    """

    schedule: ScheduleName
    num_micro_batches: int
    num_stages: int
    placement: Placement = "stage_major"
    option: int | None = None

    @property
    def described(self) -> Schedule:
        return schedule_named(self.schedule)

    def weights(self) -> list[tuple[float, float]]:
        """(alpha, beta) of the bounds alpha P + beta max c that hold for every plan of the cell."""
        return self.described.weights(self.num_stages, self.num_micro_batches)

    def quick_weights(self) -> list[tuple[float, float]]:
        """`weights`, and what stages' `excess` leaves of the longest c at worst."""
        return self.described.quick_weights(self.num_stages, self.num_micro_batches)


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """Stages that one place in the pipeline may have: arrays [n], sorted by first block, length, option.

    `pairs`: where in the arrays each run of blocks begins; `begins_at`: where in the pairs each first block
    does.
    """

    begins: Ints
    ends: Ints
    options: Ints
    forward: Floats
    backward: Floats
    weight: Floats  # of the backward, what is no part of w
    path: Floats  # w at the least
    replicas: Floats
    pairs: Ints
    pair_begins: Ints
    pair_ends: Ints
    begins_at: Ints
    distinct_begins: Ints

    @classmethod
    def of(
        cls, pricer: Pricer, index: tuple[Ints, Ints, Ints], backward: Floats, least_messages: Floats
    ) -> Choices:
        """Those at an ascending index of the pricer's tables [L, N, R]."""
        begins, lengths, options = index
        forward = pricer.tables.forward[index]
        weight = np.where(begins > 0, pricer.later_part[index], 0.0)
        path = forward + backward - weight + np.where(begins > 0, least_messages, 0.0)
        columns = (
            begins,
            begins + lengths + 1,
            options,
            forward,
            backward,
            weight,
            path,
            pricer.tables.replicas[options].astype(float),
        )
        return cls._sorted(*columns)

    @classmethod
    def _sorted(cls, *columns: NDArray[Any]) -> Choices:
        begins, ends = columns[0], columns[1]
        pairs = np.flatnonzero(np.diff(begins * (int(ends.max(initial=0)) + 1) + ends, prepend=-1))
        begins_at = np.flatnonzero(np.diff(begins[pairs], prepend=-1))
        columns += (pairs, begins[pairs], ends[pairs], begins_at, begins[pairs[begins_at]])
        return cls(*columns)

    def keep(self, kept: NDArray[np.bool_]) -> Choices:
        """Only the chosen ones."""
        if kept.all():
            return self
        names = ("begins", "ends", "options", "forward", "backward", "weight", "path", "replicas")
        return self._sorted(*(getattr(self, name)[kept] for name in names))

    @property
    def compute(self) -> Floats:
        return self.forward + self.backward

    def __len__(self) -> int:
        return len(self.begins)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sum over stages: path * w + compute * r c / devices + price * r. `bounds`: "path", "step" or
    "devices".
    """

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
            rows += [
                Row(bounds="step", path=alpha, compute=beta, price=alpha * price * unit)
                for price in PRICES[1:-1]
            ]
    return rows


class Sums:
    """Least sums over the last k stages for the blocks from b on: `tables` [rows, k, b]; and over the first k
    before b.
    """

    def __init__(
        self, choices: Sequence[Choices], rows: Sequence[Row], num_blocks: int, num_devices: int
    ) -> None:
        self.choices, self.rows, self.num_blocks, self.num_devices = choices, rows, num_blocks, num_devices
        self._least: dict[int, Floats] = {}
        self.path = np.array([row.path for row in rows])[:, None]
        self.compute = np.array([row.compute / num_devices for row in rows])[:, None]
        self.price = np.array([row.price for row in rows])[:, None]
        self.kinds = {
            kind: np.array([row.bounds == kind for row in rows]) for kind in ("path", "step", "devices")
        }
        self.tables = np.full((len(rows), len(choices) + 1, num_blocks + 1), np.inf)
        self.tables[:, 0, num_blocks] = 0.0
        for k, options in enumerate(choices, start=1):
            if len(options):
                sums = self.tables[:, k - 1].take(options.pair_ends, axis=1)
                sums += self.least(options)
                self.tables[:, k, options.distinct_begins] = np.minimum.reduceat(
                    sums, options.begins_at, axis=1
                )

    def of_choices(self, options: Choices) -> Floats:
        """[rows, choices]: what each choice adds."""
        result = self.path * options.path
        # In place: rows x choices are many numbers, and fresh memory for each part takes as long as computing
        # it.
        part = self.compute * (options.replicas * options.compute)
        result += part
        result += np.multiply(self.price, options.replicas, out=part)
        return result

    def least(self, options: Choices) -> Floats:
        """[rows, pairs]: the least over options."""
        if id(options) not in self._least:
            self._least[id(options)] = np.minimum.reduceat(self.of_choices(options), options.pairs, axis=1)
        return self._least[id(options)]

    def prefixes(self) -> Floats:
        """[rows, k, b]: least sums over the first k stages of as many as there are choices, for the blocks
        before b.
        """
        result = np.full_like(self.tables, np.inf)
        result[:, 0, 0] = 0.0
        for k, options in enumerate(reversed(self.choices), start=1):
            if len(options):
                sums = self.least(options) + result[:, k - 1, options.pair_begins]
                for row in range(len(sums)):
                    np.minimum.at(result[row, k], options.pair_ends, sums[row])
        return result

    def rest(self, kind: str, num_stages: int, blocks: Ints | int, devices: Ints | int) -> Floats:
        """Least sum of the last stages with the blocks from `blocks` on, on at most `devices` devices: [...],
        inf if none.
        """
        rows = self.kinds[kind]
        sums = self.tables[rows, num_stages][:, blocks]
        if kind == "devices":
            return sums[0]
        price = self.price[rows, 0].reshape((-1,) + (1,) * (sums.ndim - 1))
        return (sums - price * devices).max(axis=0)


class Peaks:
    """Least largest values over the last k stages for the blocks from b on, and over the first k before b:
    [kinds, k, b].

    Kinds: `excess` and `longest` of the schedule (what a stage adds to the round trip, and c); "reach" is the
    least, over the ways to complete, of the longest path from a stage's begin through m micro-batches of one
    stage (only for the last stages).
    """

    def __init__(self, cell: Cell, choices: Sequence[Choices], num_blocks: int) -> None:
        self.cell, self.choices = cell, choices
        self.highest = 0.0  # no plan's worst `measure` is less
        self.num_blocks = num_blocks
        self.measures = [self.measure(options, k) for k, options in enumerate(choices, start=1)]

    def complete(self) -> None:
        """Compute `after` and `reach`."""
        cell, choices, num_blocks = self.cell, self.choices, self.num_blocks
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
            self.after[:, k, options.distinct_begins] = np.minimum.reduceat(
                highest, options.begins_at, axis=1
            )
            own = cell.num_micro_batches * options.compute
            # With a second part of backwards after it, the path does not go back from there.
            reach = np.maximum(own, options.path + self.reach[k - 1, options.ends])
            reach = np.zeros_like(reach) if cell.described.splits_backward else reach
            reach = np.minimum.reduceat(reach, options.pairs)
            self.reach[k, options.distinct_begins] = np.minimum.reduceat(reach, options.begins_at)

    def of_choices(self, options: Choices, k: int) -> Floats:
        """[kinds, choices]."""
        longest = self.cell.described.longest(options.forward, options.backward)
        return np.stack([self._excess(options, k), longest])

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

    def below(self, limit: float, path: float) -> float:
        """No plan with a step below the limit and that round trip or more has a worst `measure` above
        this.
        """
        weights = [(alpha, beta) for alpha, beta in self.cell.weights() if beta > 0]
        if self.cell.weights():
            return min([(limit - alpha * path) / beta for alpha, beta in weights], default=np.inf)
        return limit - path

    def measure(self, options: Choices, k: int) -> Floats:
        """What the worst stage of a plan is worst in: c; the excess where the schedule has no `weights`."""
        if self.cell.weights():
            return options.compute
        return self._excess(options, k)

    def _excess(self, options: Choices, k: int) -> Floats:
        cell = self.cell
        place = PlaceSeconds(
            num_before=cell.num_stages - k,
            num_after=k - 1,
            forward=options.forward,
            backward=options.backward,
            weight=options.weight,
        )
        return cell.described.excess(cell.num_micro_batches, place)

    def bound(self, path: Floats, excess: Floats, longest: Floats) -> Floats:
        """Of the step, from bounds of the round trip and of the two kinds."""
        cell = self.cell
        return cell.described.bound_of_peaks(
            cell.num_stages, cell.num_micro_batches, path, excess, longest, self.highest
        )
