"""Events of several ranks come into one file on one clock, in memory of bounded size; the file is of the
Trace Event Format.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.errors import UserInputError
from rannc_backend.ir.action import parse_programs
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.torch_internals import trace_artifact
from rannc_backend.runtime.trace import trace_file
from rannc_backend.runtime.trace.clock_offsets import ClockOffsets, Offset, offset_of
from rannc_backend.runtime.trace.event_trace import EventTrace
from rannc_backend.runtime.trace.trace_file import begin_trace, merge, part_path, write_at_exit, write_part
from rannc_backend.runtime.world import World
from tests.trace_format import findings

PROGRAM = parse_programs("lane 0: 0RF0<I 0WF0<I 0F0 0SF0>1 0RB0<1 0DF0>1 0WB0<1 0A 0B0 0G")[0]


def world(rank: int = 0, size: int = 1) -> World:
    return replace(bootstrap.start(), rank=rank, size=size)


@pytest.fixture
def traces() -> Iterator[list[EventTrace]]:
    """Traces whose hooks are removed in the end."""
    made: list[EventTrace] = []
    yield made
    for trace in made:
        trace.close()


def rows_of(size: int) -> RowTable:
    """Stage 0 on all ranks, stage 1 on rank 0."""
    return RowTable(local_rows=(1,) * size, num_micro_batches=1, stage_ranks=(tuple(range(size)), (0,)))


def run(trace: EventTrace, num_steps: int, num_marks: int = len(PROGRAM) + 1) -> None:
    """Steps as the executor runs them; the last may break off early."""
    for number in range(1, num_steps + 1):
        # Clocks are measured over a real control plane in the distributed tests.
        own, trace.world = trace.world, replace(trace.world, size=1)
        record = trace.begin(None, number, "training step", rows_of(own.size))
        trace.world = own
        marks = record.marks_of(PROGRAM)
        marks += [record.mark() for _ in range(num_marks if number == num_steps else len(PROGRAM) + 1)]
        if len(marks) > len(PROGRAM):
            record.stop(complete=True)


def make(traces: list[EventTrace], path: Path, rank: int = 0, size: int = 1, **members: Any) -> EventTrace:
    trace = EventTrace(world=world(rank, size), file=str(path), **members)
    traces.append(trace)
    return trace


def events(path: Path) -> list[dict[str, Any]]:
    content = json.loads(path.read_text())
    assert findings(content) == []
    return [event for event in content["traceEvents"] if event["ph"] != "M"]


def test_every_action_of_every_rank_is_in_one_file(traces: list[EventTrace], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for rank in (0, 1):
        trace = make(traces, path, rank, 2, label=f"stage {rank}")
        run(trace, 3)
        write_part(trace)
    assert findings(json.loads(part_path(str(path), 1).read_text())) == []
    merge(traces[0], [0, 1])
    found = events(path)
    for rank in (0, 1):
        for step in (1, 2, 3):
            own = [event for event in found if event["pid"] == rank and event["args"]["step"] == step]
            spelled = [event["name"] for event in own if event["ph"] == "X" and event["cat"] != "step"]
            assert spelled == [str(action) for action in PROGRAM]
            assert [event["name"] for event in own if event["cat"] == "step"] == [f"training step {step}"]
            assert {event["cat"] for event in own if event["ph"] == "b"} == {
                "send under way",
                "receive under way",
            }
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]
    names = [
        event["args"]["name"]
        for event in json.loads(path.read_text())["traceEvents"]
        if event["name"] == "process_name"
    ]
    assert names == ["rank 0: stage 0", "rank 1: stage 1"]
    # Perfetto takes 0 for the idle thread, and a thread with the number of a process for its main one: tracks
    # would be drawn as one.
    tracks = {(event["pid"], event["tid"]) for event in found}
    assert len({number for _, number in tracks}) == len(tracks) and not {number for _, number in tracks} & {
        0,
        1,
    }


def test_clocks_of_other_hosts_are_brought_to_rank_zeros(traces: list[EventTrace], tmp_path: Path) -> None:
    plain, shifted = tmp_path / "plain.json", tmp_path / "shifted.json"
    trace = make(traces, plain)
    run(trace, 2)
    write_part(trace)
    trace.file = str(shifted)
    trace.offsets.found.append(Offset(0.0, 100.0, 2e-6))
    write_part(trace)
    before, after = (events(part_path(str(path), 0)) for path in (plain, shifted))
    assert all(abs(a["ts"] - b["ts"] - 100e6) < 0.01 for a, b in zip(before, after, strict=True))
    assert (
        json.loads(part_path(str(shifted), 0).read_text())["otherData"]["ranks"][0][
            "clock_error_microseconds"
        ]
        == 2.0
    )


def test_the_oldest_steps_are_forgotten_and_the_file_says_so(
    traces: list[EventTrace], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    trace = make(traces, path, most_marks=100)
    run(trace, 50)
    write_part(trace)
    content = json.loads(part_path(str(path), 0).read_text())
    steps = {event["args"]["step"] for event in content["traceEvents"] if event["ph"] == "X"}
    num_marks = len(PROGRAM) + 1
    assert steps == set(range(51 - len(steps), 51)) and 8 <= len(steps) <= 100 // num_marks + 1
    assert content["otherData"]["ranks"][0]["events_forgotten"] == (50 - len(steps)) * num_marks
    assert findings(content) == []


def test_a_step_that_broke_off_is_there_as_far_as_it_came(traces: list[EventTrace], tmp_path: Path) -> None:
    trace = make(traces, tmp_path / "trace.json")
    run(trace, 2, num_marks=4)
    write_part(trace)
    last = [
        event["name"]
        for event in events(part_path(trace.file, 0))
        if event["args"]["step"] == 2 and event["ph"] == "X"
    ]
    assert last == ["training step 2", *(str(action) for action in PROGRAM[:3])]


def test_optimizer_steps_and_reductions_are_noted_until_the_end(
    traces: list[EventTrace], tmp_path: Path
) -> None:
    class Buckets:
        def start_reduce(
            self, tensor: torch.Tensor, ranks: tuple[int, ...], takers: tuple[int, ...] = ()
        ) -> Any:
            return self

        def wait(self) -> None:
            pass

    trace, buckets = make(traces, tmp_path / "trace.json"), Buckets()
    trace.follow(buckets, stages=(3,))  # type: ignore[arg-type]
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    optimizer.step()
    run(trace, 1)
    optimizer.step()
    buckets.start_reduce(torch.ones(2**18), (0, 1)).wait()
    buckets.start_reduce(torch.ones(1), (0, 1))  # never waited for
    trace.close()
    optimizer.step()
    write_part(trace)
    found = events(part_path(trace.file, 0))
    assert [event["name"] for event in found if event["name"].startswith("optimizer")] == [
        "optimizer step (SGD)"
    ]
    reductions = [(event["ph"], event["name"]) for event in found if event["cat"] == "reduction under way"]
    assert reductions == [(ph, "all-reduce of 1 MB over 2 ranks") for ph in "be"]


def test_the_end_takes_what_the_others_wrote_in_time(
    traces: list[EventTrace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trace_file, "_END_LIMIT_SECONDS", 0.05)
    path = tmp_path / "trace.json"
    for rank in (2, 0):
        trace = make(traces, path, rank, 3)
        run(trace, 1)
        with caplog.at_level(logging.INFO, "rannc_backend"):
            write_at_exit(trace)
    assert {event["pid"] for event in events(path)} == {0, 2}
    assert "1 did not write theirs" in caplog.text


def test_parts_of_an_earlier_job_are_removed_and_a_second_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("atexit.register", lambda *_: None)
    path = tmp_path / "trace.json"
    part_path(str(path), 7).write_text("{}")
    trace = begin_trace(world(), str(path), None)
    assert list(tmp_path.iterdir()) == []
    assert begin_trace(world(), str(path), trace) is trace and not caplog.text
    assert begin_trace(world(), "other.json", trace) is trace and "other.json" in caplog.text


def test_a_file_that_cannot_be_written(traces: list[EventTrace], tmp_path: Path) -> None:
    trace = make(traces, tmp_path / "nowhere" / "trace.json")
    run(trace, 1)
    with pytest.raises(UserInputError, match="event_trace_file"):
        write_part(trace)
    write_at_exit(trace)


@given(seed=st.integers(0, 10_000), offset=st.floats(-1e4, 1e4))
def test_the_offset_is_within_its_error_whatever_the_delays(seed: int, offset: float) -> None:
    chosen = random.Random(seed)
    own, zeros = [], []
    now = 0.0
    for _ in range(6):
        entered = [now + chosen.random() * 1e-3 for _ in range(2)]
        left = [max(entered) + chosen.random() * 1e-3 for _ in range(2)]
        now = max(left)
        zeros.append((entered[0], left[0]))
        own.append((entered[1] + offset, left[1] + offset))
    found = offset_of(own, zeros)
    assert abs(found.seconds - offset) <= found.error_seconds + 1e-9
    assert found.error_seconds < 2e-3


def test_measurements_narrow_each_other_and_hold_for_the_time_between() -> None:
    exact, rough = Offset(10.0, 1.0, 1e-6), Offset(10.5, 1.004, 5e-3)
    offsets = ClockOffsets([exact, rough])
    assert offsets.at(10.0).seconds == pytest.approx(1.0, abs=1e-6)
    at = offsets.at(10.5)
    assert abs(at.seconds - 1.0) <= at.error_seconds <= 0.5 * 1e-3 + 2e-6
    # Steps of time stay in order, whatever was measured.
    mapped = [
        seconds - offsets.at(seconds).seconds for seconds in (9.0, 10.0, 10.1, 10.25, 10.5, 10.500001, 12.0)
    ]
    assert mapped == sorted(mapped) and len(set(mapped)) == len(mapped)
    assert ClockOffsets().at(5.0).seconds == 0.0


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"ph": "X", "ts": 1.0, "dur": 5.0}, ""),
        ({"ph": "X", "ts": 1.0}, "no dur"),
        ({"ph": "X", "ts": 1.0, "dur": -1.0}, "negative"),
        ({"ph": "Q", "ts": 1.0}, "unknown phase"),
        ({"ph": "b", "ts": 1.0}, "no id"),
        ({"ph": "e", "ts": 1.0, "id": "1"}, "ends before"),
        ({"ph": "b", "ts": 1.0, "id": "1"}, "never ends"),
        ({"ph": "X", "ts": "1", "dur": 5.0}, "no ts"),
    ],
)
def test_the_check_of_the_format_sees_what_it_looks_for(event: dict[str, Any], words: str) -> None:
    whole = {"name": "n", "cat": "c", "pid": 0, "tid": 0, **event}
    found = findings({"displayTimeUnit": "ns", "traceEvents": [whole]})
    assert (not found) if not words else words in found[0]
    overlapping = [{**whole, "ph": "X", "ts": ts, "dur": 5.0} for ts in (1.0, 3.0)]
    assert "begins before" in findings({"displayTimeUnit": "ns", "traceEvents": overlapping})[0]


def test_artifacts_go_to_the_structured_trace() -> None:
    """Seen on torch 2.13.0: torch._logging.trace_structured with expect_trace_id."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch.__trace")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        trace_artifact("rannc_program", "string", lambda: "2F0\n2B0")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert records[-1].metadata["artifact"] == {"name": "rannc_program", "encoding": "string"}
    assert records[-1].payload == "2F0\n2B0"
