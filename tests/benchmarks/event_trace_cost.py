"""What tracing costs: steps of one model with and without it, in turn, in one process.

In: nothing. Out: one line of JSON with the median step of both, the nanoseconds per traced action and the
share of a step. Run it alone on an idle machine: `python tests/benchmarks/event_trace_cost.py`.
"""

from __future__ import annotations

import atexit
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from rannc_backend.backend import REGISTRY

NUM_STEPS = 200


class Model(nn.Module):
    """Eight layers; the loss inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def main(width: int = 64, num_micro_batches: int = 16) -> None:
    """Print the figures."""
    torch.manual_seed(0)
    directory = tempfile.mkdtemp()
    # Registered before the trace's own handler, so called after it.
    atexit.register(shutil.rmtree, directory, True)
    common = {"stage_compiler": "eager", "pipeline_num": num_micro_batches, "report_steps": 0}
    traced = {**common, "trace_events": True, "event_trace_file": str(Path(directory) / "trace.json")}
    models = {"off": Model(width), "on": Model(width)}
    compiled = {
        "off": torch.compile(models["off"], backend="rannc", options=common),
        "on": torch.compile(models["on"], backend="rannc", options=traced),
    }
    x = torch.randn(num_micro_batches * 2, width)
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for step in range(NUM_STEPS):
        for kind in ("off", "on") if step % 2 else ("on", "off"):
            # CPU time: what else runs on the machine does not count.
            begin = time.process_time()
            compiled[kind](x).backward()
            if step >= NUM_STEPS // 10:
                seconds[kind].append(time.process_time() - begin)
            models[kind].zero_grad()
    trace = REGISTRY.trace
    assert trace is not None, "nothing was traced"
    num_actions = len(trace._steps[-1].record.programs[0][0])
    off, on = (statistics.median(seconds[kind]) for kind in ("off", "on"))
    differences = [b - a for a, b in zip(seconds["off"], seconds["on"], strict=True)]
    extra = statistics.median(differences)
    figures = {
        "step_milliseconds_off": round(off * 1e3, 3),
        "step_milliseconds_on": round(on * 1e3, 3),
        "actions_per_step": num_actions,
        "nanoseconds_per_action": round(extra / num_actions * 1e9),
        "percent_of_a_step": round(100 * extra / off, 2),
        "torch": torch.__version__,
    }
    print(json.dumps(figures))
    trace.close()


if __name__ == "__main__":
    main()
