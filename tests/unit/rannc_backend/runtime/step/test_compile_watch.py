"""A long compilation tells who compiles what, and who is still at it; a short one says nothing."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from rannc_backend.runtime.comm.control import missing_ranks_error
from rannc_backend.runtime.step.compile_watch import CompileWatch
from rannc_backend.runtime.world import RankState


def state(rank: int, phase: str, num_calls: int = 3) -> RankState:
    return RankState(rank=rank, host="a", phase=phase, num_calls=num_calls, silent_seconds=0.1, left=False)


class Monitor:
    """Answers with one list of states after the other."""

    def __init__(self, answers: list[list[RankState]]) -> None:
        self.answers = answers
        self.phases: list[str] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def survey(self) -> list[RankState]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class World:
    def __init__(self, rank: int, monitor: Monitor) -> None:
        self.rank = rank
        self.monitor = monitor


def run(answers: list[list[RankState]], num_lines: int, rank: int = 0) -> tuple[list[str], Monitor]:
    monitor, lines, enough = Monitor(answers), [], threading.Event()

    def log(line: str) -> None:
        lines.append(line)
        if len(lines) >= num_lines:
            enough.set()

    world: Any = World(rank, monitor)
    with CompileWatch(
        world, "stage 0 of graph 0 (loss)", log=log, first_seconds=0.01, period_seconds=0.01
    ) as watch:
        if rank == 0:
            assert enough.wait(10), lines
        watch.done()
    return lines[:num_lines], monitor


def test_a_line_per_rank_and_then_who_is_left() -> None:
    compiling = [
        state(0, "compiling stage 0 of graph 0 (loss)"),
        state(1, "compiling stage 1 of graph 0 (loss)"),
        state(2, "capture"),
    ]
    later = [state(0, "compiled stage 0 of graph 0 (loss), waiting for the others"), *compiling[1:]]
    last = [later[0], compiling[1], state(2, "compiled stage 2 of graph 0 (loss), waiting for the others")]
    lines, monitor = run([compiling, later, last], 5)
    assert lines[:3] == [f"rank {s.rank}: {s.phase}" for s in compiling]
    left = "ranks have compiled; still compiling: rank 1 (stage 1 of graph 0 (loss));"
    assert lines[3] == f"1 of 3 {left} not there yet: rank 2 (capture); 0 s so far"
    assert lines[4] == f"2 of 3 {left} 0 s so far"
    assert monitor.phases == [
        "compiling stage 0 of graph 0 (loss)",
        "compiled stage 0 of graph 0 (loss), waiting for the others",
    ]


def test_many_ranks_are_not_all_listed() -> None:
    many = [state(rank, f"compiling stage {rank} of graph 0 (loss)") for rank in range(100)]
    lines, _ = run([many], 18)
    assert lines[15].startswith("rank 15:") and lines[16] == "and 84 ranks more"
    assert lines[17].endswith("rank 7 (stage 7 of graph 0 (loss)) and 92 more; 0 s so far")


def test_one_process_speaks_of_itself() -> None:
    lines, _ = run([[]], 2)
    assert lines[0] == "compiling stage 0 of graph 0 (loss)" and lines[1].startswith(
        "still compiling stage 0"
    )


def test_other_ranks_are_silent_and_a_short_compilation_is() -> None:
    assert run([[]], 1, rank=1)[0] == []
    lines: list[str] = []
    world: Any = World(0, Monitor([[]]))
    with CompileWatch(world, "stage 0", log=lines.append, first_seconds=0.2):
        pass
    time.sleep(0.3)
    assert lines == []


def test_nothing_is_said_after_the_end() -> None:
    class Slow(Monitor):
        def survey(self) -> list[RankState]:
            time.sleep(0.2)
            return []

    lines: list[str] = []
    world: Any = World(0, Slow([[]]))
    with CompileWatch(world, "stage 0", log=lines.append, first_seconds=0.01):
        time.sleep(0.1)
    time.sleep(0.3)
    assert lines == []


def test_the_limit_names_the_guilty_rank() -> None:
    states = [
        state(0, "compiled stage 0, waiting for the others", 4),
        state(1, "compiling stage 1 of graph 0 (loss)", 3),
    ]
    error = missing_ranks_error("compilation of graph 0", rank=0, states=states, limit_seconds=7200)
    assert error.peer == 1
    expected = "compilation of graph 0: rank 1 has not arrived (it is in: compiling stage 1 of graph 0 (loss)) (limit 7200 s)"
    assert expected in str(error)
    with pytest.raises(type(error)):
        raise error
