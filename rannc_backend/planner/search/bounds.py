"""Lower bounds on the simulated step, for all plans of one shape or for all ways to complete part of a plan.

In: a `Pricer` and a `Cell`: schedule, micro-batches, number of stages, placement. Out: numbers below which no
plan's step can fall, and for each place in the pipeline the stages that a plan faster than a limit may have
there (`Choices`).

Terms. Seconds of a stage: forward f, backward b, c = f + b, messages into it t and u, w = c + t + u; a:
stages after it; P: sum of w over all p stages; m: micro-batches. Every path through what waits for what is a
lower bound of the step. Those used are P, m c of each stage, and what the schedule knows (see the modules of
`rannc_backend/schedule/`): alpha P + beta max c, and P with the largest of what stages add to it.
Reductions of a stage that end after its gradients have reached the first stage replace that part of the path.

Sums over stages are bounded for the blocks that are left by shortest paths over (stages left, blocks left);
the limit on devices is priced (Lagrange): sum of (w + price r) - price * devices, for several prices. max c
is at least the mean of c weighted by the share of devices, which is such a sum too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rannc_backend.planner.search.problem import Floats, Ints, Pricer
from rannc_backend.planner.search.sums import Cell, Choices, Peaks, Row, Sums, shape_rows

_BISECTIONS = 10
_BISECTED_TO = 0.004
_GRID = 5  # intervals of the longest c that are told apart in first bounds
_IN_FLIGHT_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # told apart in first bounds


class CellBounds:
    """Bounds of one cell, narrowed to plans faster than a limit by `narrow`."""

    def __init__(
        self,
        pricer: Pricer,
        cell: Cell,
        choices: Sequence[Choices],
        path_seconds: float,
        limit: float = np.inf,
        least_path: float = 0.0,
    ) -> None:
        """`path_seconds`: about the round trip of good plans; no plan has a shorter one than `least_path`."""
        self.pricer, self.cell, self.choices = pricer, cell, list(choices)
        self.path_seconds = path_seconds
        self.peaks = Peaks(cell, self.choices, pricer.problem.num_blocks)
        most = self.peaks.below(limit, least_path)
        # Most cells end here, which costs little.
        if np.isfinite(most) and not self._is_enough(most):
            self.lower_bound = limit
        else:
            self.resum(limit)

    def resum(self, limit: float = np.inf) -> None:
        """Compute the sums over the choices anew; plans that take `limit` or longer are of no interest."""
        problem = self.pricer.problem
        rows = shape_rows(self.cell, self.path_seconds, problem.num_devices)
        self.sums = Sums(self.choices, rows, problem.num_blocks, problem.num_devices)
        stages = self.cell.num_stages
        self.lower_bound = np.inf
        if self.sums.rest("devices", stages, 0, problem.num_devices) > problem.num_devices:
            return
        self.path_seconds = float(self.sums.rest("path", stages, 0, problem.num_devices))
        if not np.isfinite(self.path_seconds):
            return
        # What costs little comes first: at the limit nothing more is asked of a cell.
        self.lower_bound = self.path_seconds
        if self.sums.kinds["step"].any():
            self.lower_bound = max(
                self.lower_bound, float(self.sums.rest("step", stages, 0, problem.num_devices))
            )
        if self.lower_bound >= limit:
            return
        self.peaks.complete()
        self._bound_by_peaks()
        if self.lower_bound >= limit:
            return
        highest = self._least_highest(self.peaks.below(limit, self.path_seconds))
        if highest is None:
            self.lower_bound = limit
            return
        self.peaks.highest = highest
        self._bound_by_peaks()

    def _bound_by_peaks(self) -> None:
        excess, longest = self.peaks.after[:, self.cell.num_stages, 0]
        bound = float(self.peaks.bound(np.asarray(self.path_seconds), excess, longest))
        self.lower_bound = max(self.lower_bound, bound, float(self.peaks.reach[self.cell.num_stages, 0]))

    def _least_highest(self, most: float) -> float | None:
        """The least `Peaks.measure` of the worst stage of plans that have enough devices, a little less at
        most; None: above `most`.
        """
        low, high = 0.0, max((float(values.max(initial=0.0)) for values in self.peaks.measures), default=0.0)
        if most < high:
            if not self._is_enough(most):
                return None
            high = most
        if not np.isfinite(high):
            return 0.0
        for _ in range(_BISECTIONS):
            if high - low <= _BISECTED_TO * high:
                break
            # With a limit the answer is near to it.
            middle = (low + high) / 2 if low else high * (0.75 if high == most else 0.25)
            if self._is_enough(middle):
                high = middle
            else:
                low = middle
        return low

    def _is_enough(self, most: float) -> bool:
        """Whether there are devices enough for stages whose measures are `most` at most."""
        devices = self.pricer.problem.num_devices
        least = np.full(self.pricer.problem.num_blocks + 1, np.inf)
        least[-1] = 0.0
        for options, values in zip(self.choices, self.peaks.measures, strict=True):
            if not len(options):
                return False
            needed = np.minimum.reduceat(np.where(values <= most, options.replicas, np.inf), options.pairs)
            sums = np.minimum.reduceat(needed + least[options.pair_ends], options.begins_at)
            least = np.full_like(least, np.inf)
            least[options.distinct_begins] = sums
        return bool(least[0] <= devices)

    def narrow(self, limit: float) -> None:
        """Drop choices that no plan with a step below `limit` has. `lower_bound` is inf when none are
        left.
        """
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
            self.peaks = Peaks(self.cell, self.choices, self.pricer.problem.num_blocks)
            self.resum(limit)
            if sum(map(len, self.choices)) > 0.9 * before:
                return

    def _through(self, options: Choices, k: int, prefixes: tuple[Floats, Floats]) -> Floats:
        """[choices]: a bound for the plans in which the k-th stage from the end is that choice."""
        sums, cell, devices = self.sums, self.cell, self.pricer.problem.num_devices
        added = sums.of_choices(options)
        total = (
            prefixes[0][:, cell.num_stages - k][:, options.begins]
            + added
            + sums.tables[:, k - 1][:, options.ends]
        )
        priced = total - sums.price * devices
        path = priced[sums.kinds["path"]].max(axis=0)
        peaks = np.maximum(
            prefixes[1][:, cell.num_stages - k, options.begins], self.peaks.after[:, k - 1, options.ends]
        )
        peaks = np.maximum(peaks, self.peaks.of_choices(options, k))
        bound = np.maximum(self.peaks.bound(path, *peaks), cell.num_micro_batches * options.compute)
        if sums.kinds["step"].any():
            bound = np.maximum(bound, priced[sums.kinds["step"]].max(axis=0))
        bound = np.where(total[sums.kinds["devices"]][0] > devices, np.inf, bound)
        return bound


class Shapes:
    """Choices and first bounds for all cells of one pricer: what does not depend on the number of stages is
    computed once.
    """

    def __init__(self, pricer: Pricer, limit: float = float("inf")) -> None:
        """`limit`: plans with a longer step are of no interest."""
        self.pricer, self.limit = pricer, limit
        self._choices: dict[tuple[object, ...], Choices] = {}
        self._messages: dict[str, Floats] = {}
        self._backward: dict[tuple[int, int, tuple[bool, ...]], Floats] = {}
        self._distinct: dict[bytes, Floats] = {}
        self._allowed = self._everywhere()

    def _everywhere(self) -> NDArray[np.bool_]:
        problem, tables = self.pricer.problem, self.pricer.tables
        num_blocks, max_length, _ = tables.forward.shape
        begins = np.arange(num_blocks)[:, None, None]
        ends = begins + np.arange(1, max_length + 1)[None, :, None]
        allowed = (
            (ends <= num_blocks) & (tables.replicas <= problem.num_devices) & np.isfinite(tables.forward)
        )
        for start in problem.starts:
            allowed &= ~((begins < start) & (start < ends))
        if problem.legal_starts:
            legal = (*problem.legal_starts, num_blocks)
            allowed &= np.isin(begins, legal) & np.isin(ends, legal)
        if problem.replicas is not None:
            allowed &= tables.replicas == problem.replicas
        return allowed

    @cached_property
    def _useful(self) -> tuple[Ints, Ints, Ints]:
        """Index [n] of the tables: stages that fit at the last place and leave enough devices for the blocks
        around them.

        The others too must be faster than the limit. Little is left where the limit is near to what all
        devices can do.
        """
        tables, problem = self.pricer.tables, self.pricer.problem
        num_blocks, max_length, _ = tables.forward.shape
        # `limit` at the first call: a lower one later only makes more choices useless.
        useful = self._allowed & (
            self.pricer.num_micro_batches * (tables.forward + self.pricer.least_backward) < self.limit
        )
        least = np.where(useful, tables.replicas.astype(float), np.inf).min(axis=-1)
        before, after = np.full((2, num_blocks + 1), np.inf)
        before[0] = after[num_blocks] = 0.0
        for block in range(num_blocks):
            longest = min(max_length, num_blocks - block)
            reached = before[block + 1 : block + 1 + longest]
            np.minimum(reached, before[block] + least[block, :longest], out=reached)
        for block in range(num_blocks - 1, -1, -1):
            longest = min(max_length, num_blocks - block)
            after[block] = (least[block, :longest] + after[block + 1 : block + 1 + longest]).min()
        begins, lengths, options = np.nonzero(useful)
        kept = before[begins] + tables.replicas[options] + after[begins + lengths + 1] <= problem.num_devices
        return begins[kept], lengths[kept], options[kept]

    @cached_property
    def _memory_of_useful(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Forward seconds [n], and by budget backward seconds, fixed bytes, bytes of each micro-batch in
        flight.
        """
        tables, index = self.pricer.tables, (slice(None), *self._useful)
        parts = (tables.backward, tables.fixed_bytes, tables.flight_bytes)
        backward, fixed, flight = (part[index] for part in parts)
        return tables.forward[self._useful], backward, fixed, flight

    def _backward_of_useful(self, num_stages_to_end: int, num_stages: int, *, or_more: bool) -> Floats:
        """[n]; the same array for places at which the same budgets fit. `or_more`: plans may have more stages."""
        described, micro_batches = self.pricer.described, self.pricer.num_micro_batches
        number = described.in_flight(num_stages_to_end, micro_batches)
        # Nowhere is more kept behind fewer stages, so this is the least memory of some neighbouring places.
        fewer_stages = num_stages_to_end + rounded_down(num_stages - num_stages_to_end)
        kept = described.kept(num_stages_to_end, fewer_stages, micro_batches)
        problem, stage = self.pricer.problem, num_stages - num_stages_to_end
        limits = 0 <= problem.recompute_last_stage and (stage > problem.recompute_last_stage or not or_more)
        allowed = problem.allowed_budgets(stage) if limits else np.ones(len(problem.budgets), dtype=bool)
        key = (number, kept, tuple(allowed.tolist()))
        if key not in self._backward:
            forward, backward, fixed, flight = self._memory_of_useful
            backward = np.where(allowed[:, None], backward, np.inf) if limits else backward
            fixed = fixed + described.kept_memory(
                num_stages_to_end,
                fewer_stages,
                micro_batches,
                self.pricer.tables.kept_bytes[self._useful],
                flight,
            )
            seconds = self.pricer.backward_of(number, forward, backward, fixed, flight)[0]
            self._backward[key] = self._distinct.setdefault(seconds.tobytes(), seconds)
        return self._backward[key]

    def choices(self, cell: Cell, num_stages_to_end: int, least_stages: int | None = None) -> Choices:
        """Stages that the place may have in memory and by the user's wishes; in plans of `least_stages` or more."""
        problem, tables = self.pricer.problem, self.pricer.tables
        stage = cell.num_stages - num_stages_to_end
        forced = None if problem.stage_replicas is None else problem.stage_replicas[stage]
        wishes = tuple((block, wanted == stage) for block, wanted in problem.stage_of)
        backward = self._backward_of_useful(
            num_stages_to_end, least_stages or cell.num_stages, or_more=bool(least_stages)
        )
        key = (id(backward), forced, wishes, cell.placement, cell.option)
        if key not in self._choices:
            begins, lengths, options = self._useful
            compute = tables.forward[self._useful] + backward
            kept = np.isfinite(compute) & (self.pricer.num_micro_batches * compute < self.limit)
            for block, here in wishes:
                kept &= ((begins <= block) & (block <= begins + lengths)) == here
            # The slowest stage takes at least as long as a micro-batch on all devices at once.
            kept &= problem.limits.slowest_of(compute) >= self.least_path
            if forced is not None:
                kept &= tables.replicas[options] == forced
            if cell.option is not None:
                kept &= options == cell.option
            index = (begins[kept], lengths[kept], options[kept])
            self._choices[key] = Choices.of(
                self.pricer, index, backward[kept], self._least_messages(cell)[kept]
            )
        return self._choices[key]

    def _least_messages(self, cell: Cell) -> Floats:
        """[n]: the least that both messages into a useful stage can take."""
        if cell.placement not in self._messages:
            problem, tables = self.pricer.problem, self.pricer.tables
            replicas = tables.replicas[self._useful[2]]
            may_be_near = (replicas < problem.cluster.devices_per_node) | (cell.placement == "replica_major")
            near, far = np.ones_like(may_be_near), np.zeros_like(may_be_near)
            seconds = np.zeros(len(replicas))
            for size in (tables.message_bytes[self._useful], tables.gradient_bytes[self._useful]):
                fast, slow = self.pricer.links(near, size), self.pricer.links(far, size)
                seconds += np.where(may_be_near, np.minimum(fast, slow), slow)
            self._messages[cell.placement] = seconds
        return self._messages[cell.placement]

    def bounds(self, cell: Cell, path_seconds: float, least_path: float = 0.0) -> CellBounds:
        """See `CellBounds`."""
        choices: list[Choices] = []
        for k in range(1, cell.num_stages + 1):
            choices.append(self.choices(cell, k))
            if not len(choices[-1]):
                choices += choices[-1:] * (cell.num_stages - k)  # nothing fits here, so no plan does
                break
        return CellBounds(self.pricer, cell, choices, path_seconds, self.limit, least_path)

    def first_bounds(self, stage_counts: Sequence[int]) -> dict[int, tuple[float, float]]:
        """Number of stages -> (lower bound, round trip at least) of stage-major cells; those that cannot fit
        are left out.

        The longest c of a plan lies in one of a few intervals; each gives its least round trip with no stage
        beyond it.
        """
        pricer, problem = self.pricer, self.pricer.problem
        if not stage_counts:
            return {}
        cells = {
            p: Cell(schedule=pricer.schedule, num_micro_batches=pricer.num_micro_batches, num_stages=p)
            for p in stage_counts
        }
        if problem.stage_replicas is not None or problem.stage_of:
            alone = {p: self.bounds(cell, p * self.unit) for p, cell in cells.items()}
            return {
                p: (b.lower_bound, b.path_seconds) for p, b in alone.items() if np.isfinite(b.lower_bound)
            }
        result = self._bounds_between(cells, self.least_path, np.inf)
        open_cells = {p: cells[p] for p, (bound, _) in result.items() if bound < self.limit}
        if not open_cells:
            return result
        longest = max(self._longest_below_limit(cell, result[p][1]) for p, cell in open_cells.items())
        has_limit = np.isfinite(longest)
        if not has_limit:
            longest = _GRID * self.unit
        grid = np.geomspace(self.unit, max(longest, 1.01 * self.unit), _GRID + 1)
        grid[0] = self.least_path
        if not has_limit:
            grid[-1] = np.inf
        parts = [
            self._bounds_between(open_cells, low, high) for low, high in zip(grid[:-1], grid[1:], strict=True)
        ]
        for p in open_cells:
            found = [part[p] for part in parts if p in part]
            # Plans with a longer c than the grid's last have a longer step than the limit.
            result[p] = (
                min([self.limit, *(bound for bound, _ in found)]),
                min([path for _, path in found], default=result[p][1]),
            )
        return result

    def _longest_below_limit(self, cell: Cell, path: float) -> float:
        """The longest c of plans with that round trip or more and a step below the limit."""
        bounds = [
            self.limit / cell.num_micro_batches,
            *((self.limit - a * path) / b for a, b in cell.quick_weights() if b),
        ]
        return min(bounds)

    def _bounds_between(
        self, cells: Mapping[int, Cell], lower: float, upper: float
    ) -> dict[int, tuple[float, float]]:
        """By number of stages: bound and least round trip of plans whose longest c is between the two."""
        pricer, problem = self.pricer, self.pricer.problem
        most = max(cells)
        steps = [max(step for step in _IN_FLIGHT_STEPS if step <= k) for k in range(1, most + 1)]
        capped: dict[int, Choices] = {}
        for step in dict.fromkeys(steps):
            options = self.choices(cells[most], step, max(step, min(cells)))
            capped[step] = options if upper == np.inf else options.keep(options.compute <= upper)
        unit = self.unit / problem.num_devices
        rows = [Row(bounds="devices", price=1.0), Row(bounds="path", path=1.0)]
        # Of plans with p stages a device is worth about p units.
        powers = range(int(np.log2(min(cells))), int(np.log2(most)) + 2)
        rows += [Row(bounds="path", path=1.0, price=unit * 2.0**power) for power in powers]
        sums = Sums([capped[step] for step in steps], rows, problem.num_blocks, problem.num_devices)
        result = {}
        for p, cell in cells.items():
            if sums.rest("devices", p, 0, problem.num_devices) > problem.num_devices:
                continue
            path = float(sums.rest("path", p, 0, problem.num_devices))
            if np.isfinite(path):
                bounds = [
                    path,
                    pricer.num_micro_batches * lower,
                    *(a * path + b * lower for a, b in cell.quick_weights()),
                ]
                result[p] = (max(bounds), path)
        return result

    def option_paths(self) -> Floats:
        """[options]: the least round trip of plans whose stages all have that replica count."""
        pricer = self.pricer
        seconds = np.where(
            self._allowed, pricer.tables.forward + pricer.least_backward - pricer.later_part, np.inf
        )
        return _shortest(seconds)

    @cached_property
    def least_path(self) -> float:
        """Seconds of a micro-batch's forward and backward on all devices at once: no longest c is less."""
        pricer = self.pricer
        work = np.where(
            self._allowed, (pricer.tables.forward + pricer.least_backward) * pricer.tables.replicas, np.inf
        )
        least = float(_shortest(work.min(axis=-1, keepdims=True))[0])
        return least / self.pricer.problem.num_devices

    @property
    def unit(self) -> float:
        """The unit of prices: `least_path`, but never nothing."""
        return max(self.least_path, 1e-30)


def rounded_down(number: int) -> int:
    """To four binary digits, so that few numbers are told apart; those below 16 are as they are."""
    return number >> max(0, number.bit_length() - 4) << max(0, number.bit_length() - 4)


def _shortest(values: Floats) -> Floats:
    """[options]: least sums of values [L, N, options] over runs that make up all blocks."""
    num_blocks, max_length, num_options = values.shape
    sums = np.zeros((num_blocks + 1, num_options))
    for begin in range(num_blocks - 1, -1, -1):
        longest = min(max_length, num_blocks - begin)
        sums[begin] = (values[begin, :longest] + sums[begin + 1 : begin + 1 + longest]).min(axis=0)
    return sums[0]
