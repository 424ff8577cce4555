"""Searches in several processes give what one process gives, and go on here where a process ends."""

from __future__ import annotations

import logging
import os
import signal
import time

import pytest

from rannc_backend.planner.cost.pricing import AnalyticPricer
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.planner.worker_processes import Workers
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.blocks.block_lines import random_line
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu


def add(shared: int, item: int) -> tuple[int, int]:
    time.sleep(0.2)  # so that both get some
    return shared + item, os.getpid()


def print_and_add(shared: int, item: int) -> int:
    os.write(1, b"what libraries print\n")
    return shared + item


def end_in(shared: int, item: int) -> int:
    """Ends every process but `shared`."""
    if os.getpid() != shared:
        os._exit(3)
    return item


def refuse(shared: int, item: int) -> int:
    if os.getpid() != shared:
        raise ValueError("not here")
    return item


def sleep_in(shared: int, item: int) -> int:
    if os.getpid() != shared:
        time.sleep(60)
    return item


def interrupted(shared: int, item: int) -> int:
    """As a Ctrl-C, which comes to all processes of a terminal."""
    if os.getpid() != shared:
        os.kill(os.getpid(), signal.SIGINT)
    return os.getpid()


def test_items_are_shared_out_over_processes() -> None:
    with Workers(num_processes=2, limit_seconds=60) as workers:
        found = workers.run(add, 10, [1, 2, 3, 4])
        again = workers.run(add, 20, [1, 2])
    assert [value for value, _ in found] == [11, 12, 13, 14] and [value for value, _ in again] == [21, 22]
    pids = {pid for _, pid in found}
    assert len(pids) == 2 and os.getpid() not in pids
    assert pids == workers.pids and {pid for _, pid in again} <= pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_one_process_computes_here() -> None:
    with Workers(num_processes=1, limit_seconds=60) as workers:
        assert [pid for _, pid in workers.run(add, 1, [1, 2])] == [os.getpid()] * 2
    assert workers.pids == {os.getpid()}


def test_what_is_printed_is_no_answer() -> None:
    with Workers(num_processes=2, limit_seconds=60) as workers:
        assert workers.run(print_and_add, 1, [1, 2, 3]) == [2, 3, 4]
        assert workers.pids and os.getpid() not in workers.pids


@pytest.mark.parametrize("function", [end_in, refuse])
def test_what_processes_do_not_do_is_done_here(function, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Workers(num_processes=2, limit_seconds=60) as workers:
        assert workers.run(function, os.getpid(), [1, 2, 3]) == [1, 2, 3]
        assert workers.run(print_and_add, 1, [1, 2]) == [2, 3]
    assert "are done here" in caplog.text


def test_waits_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), Workers(num_processes=2, limit_seconds=2) as workers:
        assert workers.run(sleep_in, os.getpid(), [1, 2]) == [1, 2]
    assert time.monotonic() - began < 30
    assert "2 of 2 searches" in caplog.text


def test_an_interrupt_is_for_the_process_that_asks() -> None:
    with Workers(num_processes=2, limit_seconds=60) as workers:
        assert os.getpid() not in workers.run(interrupted, os.getpid(), [1, 2])


@pytest.mark.parametrize("solver", ["dp", "ilp"])
def test_plans_are_the_same_byte_for_byte(solver: str, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    asked: list[Workers] = []
    run = Workers.start
    monkeypatch.setattr(Workers, "start", lambda self, *rest: (asked.append(self), run(self, *rest))[1])
    cluster = local_cpu(8, memory_bytes=2 * 10**9)

    def plan(num_processes: int):
        asked.clear()
        return plan_blocks(
            random_line(5, 16),
            Config(max_pipeline=8, solver=solver, search_processes=num_processes),
            cluster=cluster,
            batch_rows=24,
            schedules=("1f1b", "fill_drain"),
            fingerprint="f" * 64,
            pricer=AnalyticPricer(device=cluster.device),
        ).to_json()

    alone = plan(1)
    assert set().union(*(workers.pids for workers in asked)) == {os.getpid()}
    assert plan(2) == alone
    pids = set().union(*(workers.pids for workers in asked))
    assert len(pids) == 2 and os.getpid() not in pids
