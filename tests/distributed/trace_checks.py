"""Checks of the event trace over ranks.

In: a context. Out: findings. Every function is collective: all ranks make the same calls in the same order.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import torch

import rannc_backend
from rannc_backend.backend import REGISTRY
from rannc_backend.ir.action import Action
from tests.distributed.harness.context import Context
from tests.trace_format import arrows, findings


def every_rank_is_traced(context: Context) -> None:
    """Three training steps and one without gradients: every action of every rank is in one file, causes
    before effects.
    """
    path = context.directory / f"{context.case.name}.json"
    model = context.model()
    compiled = context.compile(model, trace_events=True, event_trace_file=str(path))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    entry = context.entry
    for step in range(3):
        batch = context.local(context.batch(step))
        entry.loss_of(entry.call(compiled, batch), batch).backward()
        optimizer.step()
    with torch.no_grad():
        entry.call(compiled, context.local(context.batch(3)))
    written = rannc_backend.write_event_trace()
    context.findings.that(written == path, f"it is in {written}")
    runtime_programs = [
        program
        for runtime in REGISTRY.sessions[model].runtimes.values()
        for program, *_ in runtime._programs.values()
    ]
    spelled = [[str(action) for action in program] for program in runtime_programs]
    gathered = [json.loads(text) for text in _of_all_ranks(json.dumps(spelled))]
    # The next case of this process begins a trace of its own.
    assert REGISTRY.trace is not None
    REGISTRY.trace.close()
    REGISTRY.trace = None
    trace = json.loads(path.read_text())
    context.findings.that(not (found := findings(trace)), f"the file: {found[:3]}")
    if context.rank == 0:
        _compare(context, trace, gathered)


def _of_all_ranks(text: str) -> list[str]:
    from rannc_backend.runtime.job import bootstrap

    return bootstrap.start().control.allgather(text, what="programs")


def _compare(context: Context, trace: Any, programs_by_rank: list[list[list[str]]]) -> None:
    slices: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            slices[event["pid"], event["args"]["step"]].append(event)
    for rank in range(context.case.world):
        # A deferred backward is a program of its own in the same step.
        single = programs_by_rank[rank]
        possible = single + [first + second for first in single for second in single]
        for step in range(1, 5):
            own = [
                e["name"]
                for e in slices[rank, step]
                if e["cat"] != "step" and not e["name"].startswith("optimizer")
            ]
            context.findings.that(own in possible, f"rank {rank} did {own} in step {step}")
            optimizers = [e["name"] for e in slices[rank, step] if e["name"].startswith("optimizer")]
            context.findings.that(
                optimizers == ["optimizer step (SGD)"] * (step < 4), f"rank {rank}, step {step}: {optimizers}"
            )
    _compare_arrows(context, trace)
    error = sum(details["clock_error_microseconds"] for details in trace["otherData"]["ranks"])
    for (rank, step), events in slices.items():
        for event in events:
            if event["name"].startswith("1WF") and event["name"].endswith("<0"):
                number = event["args"]["micro_batch"]
                sent = next(e for e in slices[0, step] if e["name"] == f"0SF{number}>1")
                late = sent["ts"] - (event["ts"] + event["dur"])
                context.findings.that(
                    late <= error,
                    f"step {step}: {event['name']} on rank {rank} ended {late} us before {sent['name']}",
                )
    reductions = [e for e in trace["traceEvents"] if e["ph"] == "b" and e["cat"] == "reduction under way"]
    replicas = max(int(number) for number in context.case.replicas.split(","))
    context.findings.that(
        bool(reductions) == (replicas > 1), f"{len(reductions)} all-reduces with {replicas} replicas"
    )


def _compare_arrows(context: Context, trace: Any) -> None:
    """Every wait of a rank that gets rows has an arrow, and each one comes from the send that it waits for,
    in the same step.
    """
    found = arrows(trace)
    for sent, received in found:
        counterpart = str(Action.parse(received["name"]).counterpart)
        right = (sent["name"], sent["args"]["step"]) == (counterpart, received["args"]["step"])
        context.findings.that(right, f"an arrow from {sent} to {received}")
        context.findings.that(
            sent["ts"] <= received["ts"] + received["dur"],
            f"an arrow back in time, from {sent} to {received}",
        )
    waits = [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and re.match(r"[\dIO]+W[FB]", event["name"])
    ]
    reached = {(event["pid"], event["ts"], event["name"]) for _, event in found}
    missing = [event for event in waits if (event["pid"], event["ts"], event["name"]) not in reached]
    # In this model every rank of a stage has rows of every micro-batch; what belongs to the batch's owners
    # may have none.
    missing = [event for event in missing if "I" not in event["name"] and "O" not in event["name"]]
    context.findings.that(bool(found) and not missing, f"{len(found)} arrows; none leads to {missing[:3]}")
