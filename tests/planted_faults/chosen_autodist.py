"""Faults that somebody thought of, in what AutoDist's items became: where stages may start, the size of the job, the memory
account, and plans for inference.
"""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault

_PIVOTS = unit("planner/stage_pivots")
_RULES = unit("planner/memory_rules")
_JOB = unit("planner/cluster/asked_job")


def _trials(case: str) -> tuple[str, ...]:
    return (f"tests/distributed/test_trials.py::test_trials[{case}]",)


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
        (
            "trials-that-change-buffers",
            "runtime/step/graph_runtime.py",
            "self.counter.number, state.apply_buffer_updates = before, False",
            "self.counter.number, state.apply_buffer_updates = before, True",
            _trials("leaves_nothing-second"),
        ),
        (
            "trials-that-draw-random-numbers",
            "runtime/step/graph_runtime.py",
            "        with same_random_numbers(self.world.device):\n            state",
            "        if self.world.device is not None:\n            state",
            _trials("leaves_nothing-nonstrict"),
        ),
        (
            "the-quickest-rank-decides",
            "planner/plan_on_ranks.py",
            'found.append(max(agree(world, "the seconds of a plan"',
            'found.append(min(agree(world, "the seconds of a plan"',
            _trials("leaves_nothing-second"),
        ),
        (
            "trials-without-a-limit",
            "planner/plan_on_ranks.py",
            "time.monotonic() - begun < config.plan_trial_seconds",
            "begun < math.inf",
            _trials("ends_in_time"),
        ),
        (
            "measured-in-each-job",
            "planner/plan_on_ranks.py",
            "config.plan_cache and len(found) == len(plans)",
            "config.plan_cache and not found",
            _trials("is_kept"),
        ),
        (
            "rivals-with-the-order-of-others",
            "planner/planner.py",
            "rival = plan_in_own_order(rival, choice.problem, other)",
            "rival = rival",
            _trials("own_orders"),
        ),
        (
            "measured-plans-in-the-place-of-others",
            "planner/plan_cache.py",
            "4 * MAX_PLAN_CHARACTERS) == text:",
            "4 * MAX_PLAN_CHARACTERS):",
            unit("planner/plan_cache"),
        ),
        (
            "parts-of-sparse-gradients-not-tried",
            "runtime/gradients/optimizer_probe.py",
            "return _is_same_in_parts(optimizer, in_parts, sparse=sparse)",
            "return _is_same_in_parts(optimizer, in_parts, sparse=False)",
            unit("runtime/gradients/apply_groups"),
        ),
    )
)
