"""Where the time of a step goes: share in copies, in other kernels, and in gaps in which the device has
nothing to do; prints JSON lines.

    python tests/benchmarks/profile_gpu.py

In: models, steps. Out: for this backend and for plain torch.compile, from torch.profiler: seconds of a step,
and which part of the device's time lies in copies, in other kernels, in gaps; the ten kernels that take
longest. On a CPU operators stand for kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_report import parse, report, sizes_of, synchronize  # noqa: E402
from step_gpu import make_step  # noqa: E402

# Of torch's kernels, of ours, and of operators on a CPU. Inductor's fused casts
# (triton_poi_fused__to_copy...) compute, and are not meant.
COPY_MARKS = (
    "memcpy",
    "memset",
    "direct_copy_kernel",
    "catarraybatchedcopy",
    "_pack_kernel",
    "_bucket_kernel",
    "aten::copy_",
    "aten::cat",
)
NUM_KERNELS_SHOWN = 10


def is_copy(name: str) -> bool:
    """Whether a kernel or operator only moves bytes, by its name."""
    return any(mark in name.lower() for mark in COPY_MARKS)


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def shares(events: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    """Parts of the time from the first start to the last end; ``events`` are (name, start, stop)."""
    if not events:
        return {"kernels": 0.0, "copies": 0.0, "gaps": 1.0, "longest": []}
    intervals = [(start, stop) for _, start, stop in events]
    copies = [(start, stop) for name, start, stop in events if is_copy(name)]
    span = max(stop for _, stop in intervals) - min(start for start, _ in intervals)
    busy, copying = covered(intervals), covered(copies)
    by_name: dict[str, float] = defaultdict(float)
    for name, start, stop in events:
        by_name[name] += stop - start
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:NUM_KERNELS_SHOWN]
    return {
        # Where a copy runs beside a kernel, the time counts as the kernel's.
        "kernels": covered([i for i in intervals if i not in set(copies)]) / span,
        "copies": copying / span,
        "gaps": 1.0 - busy / span,
        "longest": [[name[:80], seconds / span] for name, seconds in longest],
    }


def measure(step: Callable[[], Any], flags: argparse.Namespace) -> dict[str, Any]:
    """Profile some steps after some to warm up."""
    for _ in range(3):
        step()
    synchronize(flags)
    cuda = flags.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        for _ in range(flags.steps):
            step()
        synchronize(flags)
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    events = [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events()
        if event.device_type == wanted and (cuda or event.cpu_parent is None)
    ]
    result = shares(events)
    starts, stops = [start for _, start, _ in events], [stop for _, _, stop in events]
    return {"step_seconds": (max(stops) - min(starts)) / flags.steps if events else None, **result}


def main() -> None:
    """Measure all."""
    flags = parse(__doc__.splitlines()[0], steps=3)
    for name in flags.models.split(","):
        for contender in ("rannc", "torch_compile"):
            torch._dynamo.reset()
            options = {"pipeline_num": 1, "outputs": "loss", "report_steps": 0}
            backend: dict[str, Any] = {"backend": "rannc", "options": options} if contender == "rannc" else {}
            step = make_step(backend, sizes_of(name, flags), flags, "pure")
            report("profile", flags, model=name, contender=contender, **measure(step, flags))


if __name__ == "__main__":
    main()
