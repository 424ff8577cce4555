"""Every message has one arrow in the trace, from the send that it left with to the wait that it arrived
in.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.ir.action import Action, Program
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.trace.event_trace import EventTrace
from rannc_backend.runtime.trace.trace_file import merge, write_part
from rannc_backend.schedule.edges import PHASES
from rannc_backend.schedule.lowering import lower
from rannc_backend.schedule.orders import build_order
from tests.schedule_lists import ONE_STAGE
from tests.trace_format import arrows, findings
from tests.unit.rannc_backend.schedule.test_lowering import edge_tables

Message = tuple[str, int, int, int, int]  # send, step, run, rank that sends, rank that receives


@dataclass
class Clock:
    """Time that goes on when the test says so."""

    now: float = 1.0

    def mark(self) -> float:
        return self.now

    def anchor(self) -> tuple[float, float]:
        return self.now, self.now


@dataclass
class Job:
    """Ranks that run programs in a random order, in which nothing arrives before it was sent. `messages`:
    with when they were sent.
    """

    table: RowTable
    programs: dict[int, Program]  # by rank
    chosen: random.Random
    clock: Clock = field(default_factory=Clock)
    sent: dict[Message, float] = field(default_factory=dict)
    received: Counter[Message] = field(default_factory=Counter)

    def messages(self, action: Action, rank: int, step: int, run: int) -> list[Message]:
        """Of all ranks those that have a row in common with this one."""
        own = range(*self.table.interval(action.stage, rank, action.micro_batch))
        found = []
        for peer in self.table.ranks(action.peer):
            if set(own) & set(range(*self.table.interval(action.peer, peer, action.micro_batch))):
                sends = action.is_send
                name = str(action if sends else action.counterpart)
                found.append((name, step, run, *((rank, peer) if sends else (peer, rank))))
        return found

    def run(self, traces: list[EventTrace], step: int, num_runs: int) -> None:
        records = []
        for trace in traces:
            # Clocks are measured over a real control plane in the distributed tests.
            own, trace.world = trace.world, replace(trace.world, size=1)
            records.append(trace.begin(None, step, "training step", self.table))
            trace.world = own
        for run in range(num_runs):
            marks = [record.marks_of(self.programs[rank]) for rank, record in enumerate(records)]
            for of_rank in marks:
                of_rank.append(self.clock.mark())
            self._run_once(marks, step, run)
        for record in records:
            record.stop(complete=True)

    def _run_once(self, marks: list[list[float]], step: int, run: int) -> None:
        while any(len(marks[rank]) <= len(program) for rank, program in self.programs.items()):
            able = [rank for rank in self.programs if self._can_go_on(rank, marks[rank], step, run)]
            rank = self.chosen.choice(able)
            action = self.programs[rank][len(marks[rank]) - 1]
            self.clock.now += self.chosen.choice([1e-6, 1e-5, 0.25])
            marks[rank].append(self.clock.mark())
            if action.is_send:
                self.sent |= dict.fromkeys(self.messages(action, rank, step, run), self.clock.now)
            elif action.is_wait:
                self.received.update(self.messages(action, rank, step, run))

    def _can_go_on(self, rank: int, marks: list[float], step: int, run: int) -> bool:
        if len(marks) > len(self.programs[rank]):
            return False
        action = self.programs[rank][len(marks) - 1]
        return not action.is_wait or all(
            message in self.sent for message in self.messages(action, rank, step, run)
        )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Any schedule and phase, edges that skip stages, replicas, batches of ranks that have few rows or
    none.
    """
    replicas = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    num_micro_batches = draw(st.integers(1, 4))
    order = build_order(draw(st.sampled_from(ONE_STAGE)), len(replicas), num_micro_batches)
    programs = lower(
        order, draw(edge_tables(len(replicas))), draw(st.sampled_from(PHASES)), num_micro_batches
    )
    firsts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    stage_ranks = tuple(
        tuple(range(first, first + count)) for first, count in zip(firsts, replicas, strict=True)
    )
    local_rows = draw(st.lists(st.integers(0, 4), min_size=sum(replicas), max_size=sum(replicas)).filter(any))
    table = RowTable(
        local_rows=tuple(local_rows), num_micro_batches=num_micro_batches, stage_ranks=stage_ranks
    )
    by_rank = {rank: programs[stage] for stage, ranks in enumerate(stage_ranks) for rank in ranks}
    return Job(table=table, programs=by_rank, chosen=random.Random(draw(st.integers(0, 999))))


def traced(job: Job, num_runs: list[int], **members: Any) -> dict[str, Any]:
    """The whole file of as many steps, each of so many runs of the programs."""
    with tempfile.TemporaryDirectory() as directory:
        file, world = str(Path(directory) / "trace.json"), bootstrap.start()
        ranks = sorted(job.programs)
        traces = [
            EventTrace(world=replace(world, rank=rank, size=len(ranks)), file=file, **members)
            for rank in ranks
        ]
        for trace in traces:
            trace._clock = job.clock
        try:
            for step, runs in enumerate(num_runs, 1):
                job.run(traces, step, runs)
        finally:
            for trace in traces:
                trace.close()
        for trace in traces:
            write_part(trace)
        merge(traces[0], ranks)
        content = json.loads(Path(file).read_text())
    assert findings(content) == []
    return content


def found_messages(content: dict[str, Any]) -> Counter[Message]:
    """What the arrows say; the run is the place of the slice among those of its rank, step and name."""
    places: dict[tuple[int, float, str], int] = {}
    numbers: dict[tuple[int, int, str], int] = defaultdict(int)
    for event in content["traceEvents"]:
        if event["ph"] == "X" and event["cat"] in ("send", "receive"):
            of_kind = (event["pid"], event["args"]["step"], event["name"])
            places[event["pid"], event["ts"], event["name"]] = numbers[of_kind]
            numbers[of_kind] += 1
    found: Counter[Message] = Counter()
    for sent, received in arrows(content):
        assert sent["ts"] <= received["ts"] + received["dur"]
        runs = [places[event["pid"], event["ts"], event["name"]] for event in (sent, received)]
        assert runs[0] == runs[1] and sent["args"] == received["args"]
        assert sent["name"] == str(Action.parse(received["name"]).counterpart)
        found[sent["name"], sent["args"]["step"], runs[0], sent["pid"], received["pid"]] += 1
    return found


@settings(max_examples=40, deadline=None)
@given(job=jobs(), num_runs=st.lists(st.integers(1, 2), min_size=1, max_size=2))
def test_every_message_that_was_received_has_one_arrow_from_its_send(job: Job, num_runs: list[int]) -> None:
    content = traced(job, num_runs)
    assert found_messages(content) == job.received
    assert set(job.received.values()) <= {1}


@settings(max_examples=20, deadline=None)
@given(job=jobs(), most_marks=st.integers(1, 60))
def test_an_arrow_of_which_one_end_is_forgotten_is_left_out(job: Job, most_marks: int) -> None:
    content = traced(job, [1, 1, 1], most_marks=most_marks)
    found = found_messages(content)
    remembered: dict[int, set[int]] = defaultdict(set)
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            remembered[event["pid"]].add(event["args"]["step"])
    expected = {
        message for message in job.received if all(message[1] in remembered[rank] for rank in message[3:])
    }
    assert set(found) == expected
