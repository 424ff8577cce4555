"""CPU seconds of what happens before the first step, and of what accompanies each action; prints one JSON
line.

    python tests/benchmarks/parts.py [--layers 2,4,8,12] [--compiler eager]

In: depths of a GPT-2-like model, the stage compiler. Out: seconds of the first call (forward and backward;
capture, analysis, plan and compilation) per depth in one process, and of its largest parts; of verifying a
program; of noting a phase. CPU seconds of this process, so that other work on the machine changes little. A
small model comes first, so that imports are not counted.
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

import rannc_backend.capture.graph as capture
import rannc_backend.stages.joint_graph as joint_graph
from rannc_backend.runtime.job.monitor import LinkMonitor  # noqa: E402
from rannc_backend.runtime.job.monitor_wire import PHASE_BYTES
from rannc_backend.schedule.edges import EdgeSpec
from rannc_backend.schedule.lowering import lower
from rannc_backend.schedule.orders import build_order
from rannc_backend.schedule.verify import verify
from tests.benchmarks.gpt_model import Gpt, Sizes

# Where the seconds go: name in the output, module, function.
PARTS: Sequence[tuple[str, Any, str]] = (
    ("tracing the forward", capture, "trace_aten"),
    ("joint graph", joint_graph, "trace_joint"),
    ("cut of the joint graph", joint_graph, "split_joint"),
)


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Within it, CPU seconds spent in the parts add up in what it gives."""
    seconds = dict.fromkeys((name for name, _, _ in PARTS), 0.0)
    kept = [(module, function, getattr(module, function)) for _, module, function in PARTS]

    def timed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            begin = time.process_time()
            try:
                return original(*arguments, **keywords)
            finally:
                seconds[name] += time.process_time() - begin

        return run

    for (name, _, _), (module, function, original) in zip(PARTS, kept, strict=True):
        setattr(module, function, timed(name, original))
    try:
        yield seconds
    finally:
        for module, function, original in kept:
            setattr(module, function, original)


def first_call(num_layers: int, compiler: str) -> dict[str, float]:
    """CPU seconds until the first gradients are there, in all and by part."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Gpt(Sizes(num_layers=num_layers, width=32, num_heads=2, vocabulary=64, length=16, rows=8))
    tokens = torch.randint(64, (8, 16))
    compiled = torch.compile(model, backend="rannc", options={"stage_compiler": compiler, "pipeline_num": 2})
    with timed_parts() as seconds:
        begin = time.process_time()
        compiled(tokens).backward()
        total = time.process_time() - begin
    return {name: round(value, 2) for name, value in ({"all": total} | seconds).items()}


def verification(num_stages: int, num_micro_batches: int) -> float:
    """CPU seconds to verify the programs of all stages."""
    edges = [
        EdgeSpec(src=s, dst=s + 1, num_forward_values=1, num_gradient_values=1) for s in range(num_stages - 1)
    ]
    programs = lower(build_order("1f1b", num_stages, num_micro_batches), edges, "train", num_micro_batches)
    begin = time.process_time()
    verify(programs, edges, num_micro_batches, "train")
    return round(time.process_time() - begin, 4)


def phase_note(num_notes: int = 100_000) -> float:
    """Microseconds to note one phase for the monitor."""
    with mmap.mmap(-1, PHASE_BYTES) as memory:
        monitor = LinkMonitor.__new__(LinkMonitor)
        monitor._memory = memory
        begin = time.process_time()
        for number in range(num_notes):
            monitor.phase(f"step {number}, stage 1, micro-batch 2")
        return round((time.process_time() - begin) / num_notes * 1e6, 2)


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="2,4,8,12")
    parser.add_argument("--compiler", default="eager", choices=("eager", "inductor"))
    options = parser.parse_args()
    first_call(1, options.compiler)
    results = {
        "first call, CPU seconds by layers": {
            n: first_call(int(n), options.compiler) for n in options.layers.split(",")
        },
        "verifying 8 stages, 64 micro-batches, CPU seconds": verification(8, 64),
        "noting a phase, microseconds": phase_note(),
    }
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
