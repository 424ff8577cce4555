"""One rank of a worker group: runs the cases of a file one after the other and writes a line before and after
each.

In: path of the cases (one JSON line each), directory for results. Out: `rank<r>.jsonl` with {"case", "event":
"start"} and {"case", "event": "end", "fatal", "failures", "worst", "result", "seconds"}. After a failure or
an unexpected exception the process ends ("fatal"): the ranks may have gone different ways, and the next case
belongs to a new group. A script for mpirun (or alone).
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))

from tests.distributed.harness.case import Case  # noqa: E402
from tests.distributed.harness.forked_rank import rank_of_environment  # noqa: E402

FAULT_VARIABLE = "DISTRIBUTED_TESTS_FAULT"
EXIT_AFTER_EXCEPTION = 17
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    # A killed mpirun must not leave ranks behind that keep the cores busy.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _find_check(name: str) -> Callable[[Any], dict[str, Any]]:
    folder = Path(__file__).parents[1]
    for path in (folder / "harness" / "equality.py", *sorted(folder.glob("*_checks.py"))):
        # Only the module that has it is imported.
        if f"\ndef {name}(" in path.read_text(encoding="utf-8"):
            return getattr(
                importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)), name
            )
    raise KeyError(f"no check is called {name}")


def _run(case: Case, rank: int, directory: Path, references: Any) -> dict[str, Any]:
    import torch

    from tests import models
    from tests.distributed.harness.context import Context

    torch._dynamo.reset()
    context = Context(
        case=case, entry=models.entry(case.model), rank=rank, references=references, directory=directory
    )
    result = _find_check(case.check)(context) or {}
    return {"failures": context.findings.failures, "worst": context.findings.worst, "result": result}


def main(cases_path: str, directory: str) -> int:
    """Run all cases; exit code 0 also when comparisons failed."""
    _die_with_parent()
    rank = rank_of_environment()
    cases = [Case.from_json(line) for line in Path(cases_path).read_text().splitlines()]
    with open(Path(directory) / f"rank{rank}.jsonl", "w", buffering=1) as lines:

        def write(case: Case, **members: Any) -> None:
            lines.write(json.dumps({"case": case.name, **members}) + "\n")

        import torch

        from tests.distributed.harness.faults import install_fault
        from tests.distributed.harness.reference import ReferenceCache

        torch.set_num_threads(1)
        install_fault(os.environ.get(FAULT_VARIABLE, ""))
        references = ReferenceCache()
        for case in cases:
            write(case, event="start")
            faulthandler.dump_traceback_later(case.limit_here, exit=True)
            begin = time.monotonic()
            try:
                found = _run(case, rank, Path(directory), references)
            except Exception:  # noqa: BLE001 - reported by the parent
                text = traceback.format_exc()
                write(case, event="end", fatal=True, failures=[text], worst={}, result={}, seconds=0.0)
                traceback.print_exc()
                sys.stderr.flush()
                # Not sys.exit: interpreter exit waits for MPI, and MPI waits for the others.
                os._exit(EXIT_AFTER_EXCEPTION)
            finally:
                faulthandler.cancel_dump_traceback_later()
            failed = bool(found["failures"])
            write(case, event="end", fatal=failed, seconds=time.monotonic() - begin, **found)
            if failed:
                # Ranks that went different ways would spoil the next case: the others get time to end this
                # one.
                time.sleep(1.0)
                os._exit(EXIT_AFTER_EXCEPTION)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
