"""Messages and reductions between ranks over gloo (under torchrun: test_bootstrap)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness.template import Templates
from tests.distributed.runtime_jobs import assert_ok, run_job


@pytest.mark.parametrize("world", [2, 4])
def test_messages_and_groups(tmp_path: Path, templates: Templates, world: int) -> None:
    assert_ok(
        run_job(tmp_path, world, "runtime_worker", "messages", "groups", "buckets", templates=templates),
        world,
    )


def test_a_wait_that_expires_names_the_peer(tmp_path: Path, templates: Templates) -> None:
    assert_ok(run_job(tmp_path, 2, "runtime_worker", "wait_names_the_peer", templates=templates), 2)
