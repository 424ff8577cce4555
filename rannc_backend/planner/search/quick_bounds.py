"""Lower bounds on the simulated step that need no table of costs: most numbers of micro-batches and stages
end here.

In: a `SearchProblem` whose costs are sums over blocks (it says so with a `WorkFloor`). Out: for each number
of stages a number below which no plan's step can fall.

Terms as in planner/search/bounds.py, with r_s replicas of stage s, D devices, W the least work (the least
sum of r c of any plan), f the largest share of W in one stage that fits into memory. Since the sum of r_s is
at most D:

    P >= W / (f D)                        (Cauchy: P >= (sum of the roots of the works of stages)^2 / D, none
    of them above f W) P >= W - (D - p) max c                (P = sum of r c less sum of (r - 1) c) p >= 1 /
    f,   max c >= W / D the step is at least m max c, P, and alpha P + beta max c for the quick weights of the
    cell.

All of these hold for one max c; the bound is the least over it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rannc_backend.planner.search.problem import SearchProblem
from rannc_backend.planner.search.sums import Cell
from rannc_backend.schedule.orders import ScheduleName, schedule_named

_NUM_INTERVALS = 96  # of max c; between two ends the weaker end counts
_WIDEST = 4.0  # max c beyond so many times W / D is one interval
ROUNDED_DOWN = 1 - 1e-9  # of sums that are summed up otherwise than in tables


def quick_bounds(problem: SearchProblem, schedule: ScheduleName, num_micro_batches: int) -> dict[int, float]:
    """Number of stages -> lower bound of the step, for those numbers in which anything may fit and the bubble may be
    small enough; 0 where nothing is known.
    """
    counts = np.array(problem.stage_counts, dtype=np.int64)
    counts = counts[counts <= problem.limits.most_stages(schedule_named(schedule), num_micro_batches)]
    if problem.work_floor is None or not len(counts):
        return dict.fromkeys(counts.tolist(), 0.0)
    floor = problem.work_floor(num_micro_batches)
    work, devices, number = float(floor.work.sum()), problem.num_devices, num_micro_batches
    share = floor.largest_share(problem.memory_bytes)
    if not share or not np.isfinite(work):
        return {}
    counts = counts[counts * share >= ROUNDED_DOWN]
    if work <= 0:
        return dict.fromkeys(counts.tolist(), 0.0)
    least = work / devices
    ends = np.append(least * np.geomspace(1.0, _WIDEST, _NUM_INTERVALS + 1), np.inf)
    low, high = ends[:-1], ends[1:]
    stages = counts[:, None].astype(float)
    with np.errstate(invalid="ignore"):
        path = np.where(stages >= devices, work, work - (devices - stages) * high)
    path = np.maximum(path, max(work / (share * devices), least))
    if schedule_named(schedule).splits_backward:
        path = np.zeros_like(path)  # the sums hold for whole backwards
    bounds = np.maximum(number * low[None, :], path)
    cell = Cell(schedule=schedule, num_micro_batches=number, num_stages=1)
    for row, count in enumerate(counts.tolist()):
        for alpha, beta in replace(cell, num_stages=count).quick_weights():
            bounds[row] = np.maximum(bounds[row], alpha * path[row] + beta * low)
    return dict(zip(counts.tolist(), (bounds.min(axis=1) * ROUNDED_DOWN).tolist(), strict=True))


def useful_micro_batches(batch_rows: int, smallest: int, largest: int) -> tuple[int, ...]:
    """Numbers of micro-batches in [smallest, largest] worth trying: of those with equally large ones only the
    fewest.

    No more than the batch has rows.
    """
    chosen: dict[int, int] = {}
    for number in range(min(smallest, batch_rows), min(largest, batch_rows) + 1):
        chosen.setdefault(-(-batch_rows // number), number)
    return tuple(sorted(chosen.values()))
