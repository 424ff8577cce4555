"""What ranks that wait take from those that compute: `mpirun -np 4 python tests/benchmarks/waiting_ranks.py
[--seconds 5]`.

Rank 0 computes without pause, the others wait for it in a barrier, as they wait for a plan. Each waiting rank
prints the share of a core that its main thread took.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

import rannc_backend as pyrannc  # noqa: E402


def main() -> None:
    """Wait, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="how long rank 0 computes")
    arguments = parser.parse_args()
    pyrannc.barrier()
    begin, computed = time.monotonic(), time.thread_time()
    if pyrannc.get_rank() == 0:
        while time.monotonic() - begin < arguments.seconds:
            sum(range(10_000))
    pyrannc.barrier()
    share = (time.thread_time() - computed) / (time.monotonic() - begin)
    if pyrannc.get_rank() != 0:
        print(json.dumps({"rank": pyrannc.get_rank(), "core_share": round(share, 3)}), flush=True)


if __name__ == "__main__":
    main()
