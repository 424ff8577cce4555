"""Ranks find each other under every launcher, and control keeps them together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.choice import mostly
from tests.distributed.harness.template import Templates
from tests.distributed.runtime_jobs import assert_ok, run_job


@pytest.mark.parametrize("world", mostly([2, 3], [3]))
def test_mpirun(tmp_path: Path, world: int) -> None:
    assert_ok(run_job(tmp_path, world, "runtime_worker", "places", "control", "forked_children"), world)


def test_torchrun(tmp_path: Path) -> None:
    checks = (
        "places",
        "mpi_stays_out_of_torchrun",
        "control",
        "messages",
        "groups",
        "leaving_at_different_times",
    )
    assert_ok(run_job(tmp_path, 2, "runtime_worker", *checks, launcher="torchrun"), 2)


def test_a_group_of_the_user(tmp_path: Path) -> None:
    assert_ok(run_job(tmp_path, 2, "runtime_worker", "user_group", launcher="torchrun"), 2)


def test_too_few_devices(tmp_path: Path, templates: Templates) -> None:
    assert_ok(run_job(tmp_path, 2, "runtime_worker", "too_few_devices", templates=templates), 2)


def test_a_missing_rank_is_named(tmp_path: Path, templates: Templates) -> None:
    assert_ok(run_job(tmp_path, 2, "runtime_worker", "control_names_the_missing", templates=templates), 2)


def test_different_operations_do_not_hang(tmp_path: Path, templates: Templates) -> None:
    assert_ok(
        run_job(tmp_path, 2, "runtime_worker", "control_finds_different_operations", templates=templates), 2
    )


@pytest.mark.full
def test_different_operations_do_not_hang_under_torchrun(tmp_path: Path) -> None:
    assert_ok(
        run_job(tmp_path, 2, "runtime_worker", "control_finds_different_operations", launcher="torchrun"), 2
    )


def test_one_process_starts_nothing(tmp_path: Path) -> None:
    assert_ok(run_job(tmp_path, 1, "single_worker"), 1)


@pytest.mark.full
def test_ranks_of_a_host_compile_equal_graphs_once(tmp_path: Path) -> None:
    job = run_job(tmp_path, 2, "runtime_worker", "equal_graphs", limit_seconds=300)
    assert job.code == 0 and job.output.count("ok ") == 2, job.output[-3000:]
