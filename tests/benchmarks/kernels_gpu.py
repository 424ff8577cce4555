"""Packing and bucketing at the speed of the memory? Ratios in one run, medians, as JSON lines.

Per set of tensors and way to move them: what this package does, and beside it a device-to-device copy that
reads and writes as many bytes, `torch._foreach_copy_`, `torch._chunk_cat` and a loop of `copy_`. A ratio
above 1 means that this package is faster. Ways take turns in each round. Large sets are timed on the GPU,
with a queue that is never empty; small ones by the wall clock over many calls, where launches are what costs.

Ends with code 2 and one line where there is no CUDA device; `--device cpu --tiny` runs the references, to try
the script anywhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from rannc_backend.kernels.boundary_pack import pack, plan_message, slot_view
from rannc_backend.kernels.gradient_views import GradientTables
from rannc_backend.kernels.gradient_writes import FIRST, listening, write_gradients
from rannc_backend.kernels.message_layout import slot_elements
from rannc_backend.kernels.record_table import RecordTables

KIB, MIB = 1 << 10, 1 << 20
Ways = dict[str, Callable[[], object]]


class _Nobody:
    def all_made(self, positions: Sequence[int]) -> None:
        pass


_NOBODY = _Nobody()


def sizes_of_large_set(total_bytes: int, num_tensors: int = 200) -> list[int]:
    """Bytes per tensor: from 1 KB to 16 MB in a geometric row, scaled to ``total_bytes`` within these limits,
    in a mixed order.
    """
    row = [KIB * (16 * KIB) ** (index / (num_tensors - 1)) for index in range(num_tensors)]
    low, high = 1e-6, 1e6
    for _ in range(60):
        factor = (low * high) ** 0.5
        sizes = [min(max(size * factor, KIB), 16 * MIB) for size in row]
        low, high = (factor, high) if sum(sizes) < total_bytes else (low, factor)
    order = torch.randperm(num_tensors, generator=torch.Generator().manual_seed(0)).tolist()
    return [int(sizes[index]) // 8 * 8 for index in order]


def ways_to_pack(sizes: list[int], dtype: torch.dtype, device: torch.device) -> tuple[Ways, int]:
    """Tensors to a message; bytes read and written."""
    tensors = [torch.randn(size // dtype.itemsize, device=device).to(dtype) for size in sizes]
    layout = plan_message([tensor.shape for tensor in tensors], [dtype] * len(tensors))
    message = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    views = [
        slot_view(message, offset, tensor.shape, dtype) for offset, tensor in zip(layout.offsets, tensors)
    ]
    tables = RecordTables()
    total = sum(tensor.nbytes for tensor in tensors)
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=device)
    ways = {
        "ours": lambda: pack(tensors, layout, message=message, tables=tables),
        **peers(views, tensors, flat),
    }
    return ways | device_copy(total, device), 2 * total


def ways_to_bucket(
    sizes: list[int], from_dtype: torch.dtype, to_dtype: torch.dtype, device: torch.device
) -> tuple[Ways, int]:
    """Gradients to views of a bucket; bytes read and written."""
    gradients = [torch.randn(size // from_dtype.itemsize, device=device).to(from_dtype) for size in sizes]
    slots = [slot_elements(gradient.numel(), to_dtype) for gradient in gradients]
    bucket = torch.zeros(sum(slots), dtype=to_dtype, device=device)
    parts = bucket.split(slots)
    views = [part[: gradient.numel()] for part, gradient in zip(parts, gradients)]
    tables = GradientTables()
    total = sum(gradient.numel() for gradient in gradients) * (from_dtype.itemsize + to_dtype.itemsize)
    flat = torch.empty(sum(gradient.numel() for gradient in gradients), dtype=to_dtype, device=device)

    def ours() -> None:
        with listening(_NOBODY, tables):
            write_gradients(views, gradients, FIRST)

    return {"ours": ours, **peers(views, gradients, flat)} | device_copy(total // 2, device), total


def peers(views: list[torch.Tensor], tensors: list[torch.Tensor], flat: torch.Tensor) -> Ways:
    """What PyTorch offers for the same."""

    def loop() -> None:
        for view, tensor in zip(views, tensors):
            view.copy_(tensor)

    return {
        "foreach_copy": lambda: torch._foreach_copy_(views, tensors),
        "chunk_cat": lambda: torch._chunk_cat(tensors, 0, 1, out=flat.view(1, -1)),
        "loop_of_copy": loop,
    }


def device_copy(num_bytes: int, device: torch.device) -> Ways:
    """One copy that reads and writes ``num_bytes`` each: the speed of the memory."""
    source = torch.zeros(num_bytes // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    return {"device_copy": lambda: target.copy_(source)}


def gpu_seconds(way: Callable[[], object]) -> float:
    """On the GPU; a sleep before keeps the queue filled while the host prepares the launches."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(20_000_000)
    begin.record()
    way()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def wall_seconds(way: Callable[[], object], calls: int, device: torch.device) -> float:
    """By the clock, per call, launches included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        way()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def compare(
    name: str, ways: Ways, num_bytes: int, device: torch.device, *, rounds: int, launch_bound: bool
) -> dict:
    """Medians in seconds, bytes per second of ours, and ratios of the others' time to ours."""
    samples: dict[str, list[float]] = {way: [] for way in ways}
    on_gpu = device.type == "cuda" and not launch_bound
    for run in range(rounds + 3):
        for way, call in ways.items():
            seconds = gpu_seconds(call) if on_gpu else wall_seconds(call, 50 if launch_bound else 1, device)
            if run >= 3:
                samples[way].append(seconds)
    medians = {way: statistics.median(taken) for way, taken in samples.items()}
    ours = medians["ours"]
    return {
        "set": name,
        "timed": "on the GPU" if on_gpu else "by the clock",
        "bytes_read_and_written": num_bytes,
        "ours_gigabytes_per_second": round(num_bytes / ours / 1e9, 1),
        "seconds": {way: float(f"{seconds:.4g}") for way, seconds in medians.items()},
        "times_ours": {way: round(seconds / ours, 3) for way, seconds in medians.items() if way != "ours"},
    }


def main() -> None:
    """Run all sets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds; medians are taken over them")
    parser.add_argument(
        "--tiny", action="store_true", help="1 MB instead of 64 MB to 1 GB, two rounds: to try the script"
    )
    arguments, _ = parser.parse_known_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit(no_device())
    device = torch.device(arguments.device)
    rounds = 2 if arguments.tiny else arguments.rounds
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, references"
    print(
        json.dumps(
            {
                "hardware": hardware,
                "torch": torch.__version__,
                "date": time.strftime("%Y-%m-%d"),
                "rounds": rounds,
            }
        ),
        flush=True,
    )

    def report(name: str, made: tuple[Ways, int], *, launch_bound: bool = False) -> None:
        print(json.dumps(compare(name, *made, device, rounds=rounds, launch_bound=launch_bound)), flush=True)

    for total in [MIB] if arguments.tiny else [64 * MIB, 256 * MIB, 1024 * MIB]:
        sizes, label = sizes_of_large_set(total), f"200 tensors, {total // MIB} MiB"
        report(f"pack bf16, {label}", ways_to_pack(sizes, torch.bfloat16, device))
        for from_dtype, to_dtype in (
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float32),
        ):
            made = ways_to_bucket(sizes, from_dtype, to_dtype, device)
            report(f"bucket {from_dtype} to {to_dtype}, {label}", made)
    small = [4 * KIB] * 64
    report("pack bf16, 64 tensors of 4 KiB", ways_to_pack(small, torch.bfloat16, device), launch_bound=True)
    made = ways_to_bucket(small, torch.bfloat16, torch.float32, device)
    report("bucket bf16 to fp32, 64 tensors of 4 KiB", made, launch_bound=True)


def no_device() -> int:
    """One line, and the exit code."""
    print(
        "no CUDA device: this benchmark measures GPU kernels (--device cpu --tiny tries the script)",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    main()
