"""What the GPU benchmarks share: flags, sizes of GPT-2, times of a device, and a JSON line that says where
and when it was measured.

In: flags of the command line. Out: numbers in seconds, medians of rounds that alternate between the
contenders. `--tiny --device cpu` runs the same code on a CPU in seconds, to show that it works; its figures
mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpt_model import Gpt, Sizes  # noqa: E402

GPT2: Mapping[str, Sizes] = {
    "124M": Sizes(num_layers=12, width=768, num_heads=12, vocabulary=50304, length=1024, rows=8),
    "350M": Sizes(num_layers=24, width=1024, num_heads=16, vocabulary=50304, length=1024, rows=8),
}
TINY = Sizes(num_layers=2, width=32, num_heads=2, vocabulary=64, length=16, rows=4)


def parse(description: str, argv: Sequence[str] | None = None, **defaults: Any) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--tiny", action="store_true", help="a model of some thousand parameters, to see that everything runs"
    )
    parser.add_argument("--rows", type=int, default=0, help="rows of a batch (0: 8)")
    parser.add_argument(
        "--rounds", type=int, default=defaults.get("rounds", 9), help="timed rounds of each contender"
    )
    parser.add_argument("--steps", type=int, default=defaults.get("steps", 5), help="steps of a round")
    parser.add_argument("--models", default=",".join(GPT2), help="of 124M and 350M")
    flags = parser.parse_args(argv)
    if flags.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --tiny --device cpu shows that the benchmark runs")
    if flags.tiny:
        flags.rounds, flags.steps, flags.models = 2, 1, "124M"
    return flags


def sizes_of(name: str, flags: argparse.Namespace) -> Sizes:
    """Sizes of a model and its batch."""
    chosen = TINY if flags.tiny else GPT2[name]
    rows = flags.rows or chosen.rows
    return Sizes(**{field: getattr(chosen, field) for field in Sizes.__slots__} | {"rows": rows})


def new_gpt2(sizes: Sizes, flags: argparse.Namespace, dtype: torch.dtype) -> Gpt:
    """A GPT-2 with tied embedding and head; the same weights for every contender."""
    torch.manual_seed(0)
    model = Gpt(sizes)
    model.pieces[-1].logits.weight = model.pieces[0].words.weight
    return model.to(flags.device, dtype)


def new_tokens(sizes: Sizes, flags: argparse.Namespace) -> torch.Tensor:
    """A batch of random tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(sizes.vocabulary, (sizes.rows, sizes.length), generator=generator).to(flags.device)


def optimizer_of(module: nn.Module, flags: argparse.Namespace) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=flags.device == "cuda")


def synchronize(flags: argparse.Namespace) -> None:
    """Wait until the device has done everything."""
    if flags.device == "cuda":
        torch.cuda.synchronize()


def seconds_of(function: Callable[[], Any], flags: argparse.Namespace, repeats: int) -> float:
    """Seconds of one call, in a row of ``repeats``: the host may run ahead, as in a training."""
    synchronize(flags)
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    synchronize(flags)
    return (time.perf_counter() - begin) / repeats


def medians_of(contenders: Mapping[str, Callable[[], Any]], flags: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a call of each contender; rounds alternate, so that what slows the machine slows
    all.
    """
    for function in contenders.values():
        seconds_of(function, flags, 3)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(flags.rounds):
        for name, function in contenders.items():
            times[name].append(seconds_of(function, flags, flags.steps))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(function: Callable[[], Any], flags: argparse.Namespace) -> int | None:
    """Most bytes allocated during one call; None on a CPU."""
    if flags.device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def report(benchmark: str, flags: argparse.Namespace, **results: Any) -> None:
    """Print one JSON line."""
    place: dict[str, Any] = {"device": platform.processor() or platform.machine()}
    if flags.device == "cuda":
        place = {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    line = {
        "benchmark": benchmark,
        **results,
        "rounds": flags.rounds,
        "steps": flags.steps,
        "tiny": flags.tiny,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        **place,
    }
    print(json.dumps(line), flush=True)


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__
