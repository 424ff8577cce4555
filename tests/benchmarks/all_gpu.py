"""Runs every benchmark of a GPU, and fails if one of them does, after all have run: `make bench-gpu`.

    python -m tests.benchmarks.all_gpu
    python -m tests.benchmarks.all_gpu --tiny --device cpu      # anywhere; its figures mean nothing

In: flags, handed on to each. Out: their JSON lines on standard output, what runs on standard error, and a
last line that names what failed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_SECONDS = 3600.0


def benchmarks(folder: Path = HERE) -> list[Path]:
    """The files, in the order in which they run; host_cost has a part that needs a GPU."""
    return [
        *sorted(path for path in folder.glob("*_gpu.py") if path.name != "all_gpu.py"),
        *folder.glob("host_cost.py"),
    ]


def run_all(files: Sequence[Path], flags: Sequence[str]) -> list[str]:
    """Run each; names of those that failed, printed nothing, or took too long."""
    failed = []
    for file in files:
        print(f"# {file.name}", file=sys.stderr, flush=True)
        try:
            # Its first line is not held back: a benchmark that prints nothing has measured nothing.
            result = subprocess.run(
                [sys.executable, str(file), *flags], stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired:
            failed.append(f"{file.name} (longer than {LIMIT_SECONDS:.0f} s)")
            continue
        sys.stdout.write(result.stdout)
        sys.stdout.flush()
        if result.returncode != 0:
            failed.append(f"{file.name} (exit code {result.returncode})")
        elif not result.stdout.strip():
            failed.append(f"{file.name} (printed nothing)")
    return failed


def main(flags: Sequence[str]) -> int:
    """Exit code."""
    import torch

    on_cpu = "--device=cpu" in flags or any(a == "--device" and b == "cpu" for a, b in zip(flags, flags[1:]))
    if not on_cpu and not torch.cuda.is_available():
        print(
            "bench-gpu: no CUDA device here; BENCH_ARGS='--tiny --device cpu' shows that the benchmarks run",
            file=sys.stderr,
        )
        return 2
    files = benchmarks()
    failed = run_all(files, flags)
    if failed or not files:
        print(f"bench-gpu: failed: {', '.join(failed) or 'no benchmarks found'}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
