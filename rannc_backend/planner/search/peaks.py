"""The most memory that a stage can take, for bounds of the search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rannc_backend.planner.search.problem import Floats
from rannc_backend.planner.search.sums import Cell, Choices
from rannc_backend.schedule.description import PlaceSeconds


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
