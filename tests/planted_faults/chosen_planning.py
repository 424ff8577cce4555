"""Faults that somebody thought of, in how plans are searched for and measured."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault

_ILP = unit("planner/search/ilp")

CHOSEN_PLANNING: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "solver-ilp-is-dp",
            "planner/planner.py",
            'if self.config.solver == "dp":',
            "if True:",
            _ILP,
        ),
        (
            "programmes-with-every-link-far",
            "planner/search/ilp.py",
            "return bool(source[0] // per_node == (node[0] + replicas[node[1]] - 1) // per_node)",
            "return False",
            _ILP,
        ),
        (
            "programmes-without-shared-cores",
            "planner/search/ilp.py",
            "number = self.cell.num_micro_batches / problem.num_cores",
            "number = 0.0",
            _ILP,
        ),
        (
            "all-is-proven",
            "planner/search/ilp.py",
            "lower = self.seconds if left_out >= self.seconds * (1 - _PROVEN_TO) else left_out",
            "lower = self.seconds",
            _ILP,
        ),
        (
            "blocks-skipped-between-stages",
            "planner/search/ilp.py",
            "for block in range(1, problem.num_blocks):",
            "for block in range(2, problem.num_blocks):",
            _ILP,
        ),
    )
)
