"""Plants faults and says which of them the tests notice: `python -m tests.planted_faults`, or `make
test-faults FAULTS_ARGS="..."`.

Prints a line for each fault as its tests end, and a line of counts. Exit code 0: every fault was caught, or
is known to be equivalent.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tests.planted_faults.areas import SEED, drawn
from tests.planted_faults.chosen import CHOSEN
from tests.planted_faults.equivalents import REASONS
from tests.planted_faults.fault import Fault
from tests.planted_faults.runner import KINDS, Diagnosis, State, run_faults
from tests.planted_faults.tenths import tenth_of
from tests.planted_faults.tree import ROOT

STATE_FILE = ROOT / "build" / "planted_faults.jsonl"


def counts_line(verdicts: Sequence[Diagnosis], seconds: float) -> str:
    """The last line."""
    counts = Counter(diagnosis.kind for diagnosis in verdicts)
    counted = ", ".join(
        f"{counts[kind]} {kind}" for kind in KINDS if counts[kind] or kind in ("caught", "uncaught")
    )
    judged = counts["caught"] + counts["uncaught"]
    share = f"{counts['caught'] / judged:.1%} caught" if judged else "none to judge"
    return f"planted faults: {len(verdicts)} of them, {counted} ({share}) in {seconds:.0f} s"


def with_equivalents(diagnosis: Diagnosis, fault: Fault) -> Diagnosis:
    """One that is uncaught as nobody could catch it."""
    reason = REASONS.get(fault.change)
    return (
        replace(diagnosis, kind="equivalent", detail=reason)
        if diagnosis.kind == "uncaught" and reason
        else diagnosis
    )


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.planted_faults", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--workers", type=int, default=2, help="faults at a time (default 2)")
    parser.add_argument("--only", default="", help="faults whose name or file has this text")
    parser.add_argument(
        "--tenth", default="", metavar="HASH", help="the tenth of the faults that belongs to this commit"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of the drawn faults")
    parser.add_argument("--times", type=int, default=1, help="draw so many times as many")
    parser.add_argument("--kind", choices=("all", "chosen", "drawn"), default="all", help="which faults")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    parser.add_argument(
        "--baseline",
        choices=("all", "rest", "none"),
        default="all",
        help="tests that noticed a fault, run again without it: all, those that `make test` leaves out, none",
    )
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=float("inf"),
        help="plant no more faults after so long; those that are left out are counted",
    )
    parser.add_argument("--list", action="store_true", help="list the faults and plant none")
    chosen = parser.parse_args(arguments)
    faults = [
        *(CHOSEN if chosen.kind != "drawn" else ()),
        *(drawn(chosen.seed, chosen.times) if chosen.kind != "chosen" else ()),
    ]
    faults = [fault for fault in faults if chosen.only in fault.name or chosen.only in fault.path]
    if chosen.tenth:
        faults = tenth_of(faults, chosen.tenth)
    if chosen.list:
        for fault in faults:
            print(f"{fault.name}\n    {fault.change}\n    {' '.join(fault.tests)}")
        return 0
    if chosen.fresh:
        STATE_FILE.unlink(missing_ok=True)
    begin = time.monotonic()
    by_name = {fault.name: fault for fault in faults}
    verdicts = []
    for diagnosis in run_faults(
        faults,
        workers=chosen.workers,
        state=State(STATE_FILE),
        baseline=chosen.baseline,
        budget_seconds=chosen.budget_seconds,
    ):
        diagnosis = with_equivalents(diagnosis, by_name[diagnosis.name])
        verdicts.append(diagnosis)
        print(diagnosis.line(), flush=True)
    left_out = f", {len(faults) - len(verdicts)} left out" if len(verdicts) < len(faults) else ""
    print(counts_line(verdicts, time.monotonic() - begin) + left_out, flush=True)
    return 0 if verdicts and all(diagnosis.kind in ("caught", "equivalent") for diagnosis in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
