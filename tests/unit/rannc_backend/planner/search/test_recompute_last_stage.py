"""Stages after the last one that recomputes keep all, in every schedule and however recompute is chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rannc_backend.errors import BYTES_PER_GB, InfeasiblePlanError, PlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.plan_fits_graph import check_options
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.schedule.orders import ScheduleName
from rannc_backend.settings.choices import SEGMENTS_BUDGET
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.blocks.block_lines import random_line
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu

NAMES: tuple[ScheduleName, ...] = ("1f1b", "fill_drain")


def plan(names: tuple[ScheduleName, ...] = NAMES, num_stages: int = 3, **options: object) -> Plan:
    line = random_line(1, 9)
    graph = replace(line, blocks=tuple(replace(block, workspace_bytes=()) for block in line.blocks))
    config = Config(mem_margin=0.0, pipeline_num=6, partition_num=num_stages, **options)  # type: ignore[arg-type]
    return plan_blocks(
        graph,
        config,
        cluster=local_cpu(3, memory_bytes=64 * BYTES_PER_GB),
        batch_rows=96,
        schedules=names,
        fingerprint="f" * 64,
    )


def kept(found: Plan) -> tuple[float, ...]:
    return tuple(stage.recompute for stage in found.stages)


@pytest.mark.parametrize(("recompute", "budget"), [("segments", SEGMENTS_BUDGET), ("0", 0.0)])
@pytest.mark.parametrize("last", [-1, 0, 1, 2, 7])
@pytest.mark.parametrize("names", [NAMES, ("zb_h1",)])
def test_stages_to_the_last_recompute_as_they_are_told(
    recompute: str, budget: float, last: int, names: tuple[ScheduleName, ...]
) -> None:
    found = plan(names, recompute=recompute, recompute_last_stage=last)
    num_told = 3 if last < 0 else min(3, last + 1)
    assert kept(found) == (budget,) * num_told + (1.0,) * (3 - num_told)


def test_ranks_with_several_stages_keep_to_it() -> None:
    found = plan(("interleaved",), num_stages=0, recompute="segments", recompute_last_stage=0)
    assert found.schedule == "interleaved" and found.num_stages > 1
    assert kept(found) == (SEGMENTS_BUDGET, *(1.0,) * (found.num_stages - 1))


def test_where_recompute_is_chosen_later_stages_keep_all_or_the_plan_is_refused() -> None:
    fullest = max(stage.predicted.peak_bytes for stage in plan().stages) / BYTES_PER_GB
    shares: set[float] = set()
    with pytest.raises(InfeasiblePlanError, match="without recompute_last_stage=0"):
        for share in np.linspace(0.95, 0.1, 18):
            found = plan(recompute_last_stage=0, mem_limit_gb=share * fullest)
            assert kept(found)[1:] == (1.0, 1.0)
            shares.add(kept(found)[0])
            free = plan(mem_limit_gb=share * fullest)
            assert found.predicted_step_seconds >= free.predicted_step_seconds * (1 - 1e-9)
    assert len(shares) > 1, shares


def test_a_plan_that_is_loaded_must_keep_to_it() -> None:
    found = plan(recompute="segments", recompute_last_stage=1)
    check_options(found, Config(recompute_last_stage=1), NAMES)
    check_options(found, Config(), NAMES)
    with pytest.raises(PlanError, match="none after stage 0, and the plan .* has recompute in stage 1"):
        check_options(found, Config(recompute_last_stage=0), NAMES)
