"""Faults that somebody thought of, in what AutoDist's items became: where stages may start, the size of the job, the memory
account, and plans for inference.
"""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault

_PIVOTS = unit("planner/stage_pivots")
_RULES = unit("planner/memory_rules")
_JOB = unit("planner/cluster/asked_job")

CHOSEN_AUTODIST: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "pivots-that-the-search-passes-over",
            "planner/search/bounds.py",
            "allowed &= np.isin(begins, legal) & np.isin(ends, legal)",
            "allowed &= np.isin(ends, range(num_blocks + 1))",
            _PIVOTS,
        ),
        (
            "loaded-plans-with-stages-anywhere",
            "planner/plan_fits_graph.py",
            "if pins.pivots and illegal:",
            "if False:",
            _PIVOTS,
        ),
        (
            "lanes-with-stages-anywhere",
            "planner/search/several_stages.py",
            "    if problem.lane_legal_starts:",
            "    if False:",
            _PIVOTS,
        ),
        (
            "optimizer-steps-without-room",
            "planner/search/problem.py",
            "fits = self.fixed_bytes + self.update_bytes <= memory_bytes",
            "fits = self.fixed_bytes <= memory_bytes",
            _RULES,
        ),
        (
            "optimizer-steps-that-no-plan-shows",
            "planner/plan_parts.py",
            '"activation_bytes": held,',
            '"activation_bytes": held - memory.update if held == memory.update else held,',
            _RULES,
        ),
        (
            "one-largest-operator",
            "planner/search/over_intervals.py",
            "found[:, place] = sizes[-1], sizes[-2]",
            "found[:, place] = sizes[-1], 0",
            _RULES,
        ),
        (
            "sizes-rounded-down",
            "planner/cost/pricing.py",
            "np.ceil(num_bytes / self.granularity)",
            "np.floor(num_bytes / self.granularity)",
            _RULES,
        ),
        (
            "a-job-of-any-number-of-ranks",
            "planner/cluster/asked_job.py",
            "if not asked or asked == num_ranks:",
            "if asked < 10**9:",
            _JOB,
        ),
        (
            "batches-of-any-number-of-rows",
            "planner/cluster/asked_job.py",
            "if number and rows * number != batch_rows:",
            "if number and batch_rows == 0:",
            _JOB,
        ),
        (
            "nodes-as-they-are",
            "planner/plan_blocks.py",
            "cluster=on_mesh(config, question.cluster)",
            "cluster=question.cluster",
            _JOB,
        ),
        (
            "inference-planned-as-training",
            "planner/plan_model.py",
            "    if config.training:",
            "    if config is not None:",
            unit("autodist/items"),
        ),
        (
            "defaults-that-bind",
            "autodist/config.py",
            "if name in self.model_fields_set",
            "if name",
            unit("autodist/config"),
        ),
    )
)
