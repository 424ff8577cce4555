"""Ranks that measure their cluster together: the same answer everywhere, and nobody waits for one that has it
already.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness.template import Templates
from tests.distributed.runtime_jobs import assert_ok, run_job


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_all_ranks_have_the_same_cluster(tmp_path: Path, templates: Templates, world: int) -> None:
    job = run_job(
        tmp_path, world, "calibration_worker", str(tmp_path), limit_seconds=240, templates=templates
    )
    assert_ok(job, world)


@pytest.mark.full
def test_without_mpi_as_well(tmp_path: Path) -> None:
    job = run_job(tmp_path, 2, "calibration_worker", str(tmp_path), launcher="torchrun", limit_seconds=240)
    assert_ok(job, 2)
