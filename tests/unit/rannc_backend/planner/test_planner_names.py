"""Names change nothing: neither what is chosen nor what it should cost."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.errors import InfeasiblePlanError
from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.blocks.block_lines import random_line, renamed
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu


def plan_text(graph: BlockGraph, memory_bytes: int) -> str:
    """The plan, or why there is none."""
    cluster, schedules = local_cpu(5, memory_bytes=memory_bytes), ("1f1b", "fill_drain")
    try:
        return plan_blocks(
            graph, Config(max_pipeline=6), cluster=cluster, batch_rows=24, schedules=schedules, fingerprint="f"
        ).to_json()  # fmt: skip
    except InfeasiblePlanError as error:
        return json.dumps(str(error))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(1, 9),
    memory=st.sampled_from([10**9, 2 * 10**9, 10**11]),
)
def test_renaming_changes_nothing(seed: int, num_blocks: int, memory: int) -> None:
    graph, names = random_line(seed, num_blocks), {}
    other = renamed(graph, names)
    old_of = {new: old for old, new in names.items()}

    def back(value: object) -> object:
        if isinstance(value, dict):
            return {
                key: sorted(back(item)) if key == "parameters" else back(item) for key, item in value.items()
            }
        if isinstance(value, list):
            return [back(item) for item in value]
        return old_of.get(value, value) if isinstance(value, str) else value

    assert back(json.loads(plan_text(other, memory))) == back(json.loads(plan_text(graph, memory)))
