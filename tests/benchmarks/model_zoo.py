"""Trains the models of the zoo (`zoo/entries.py`) for two steps on two ranks beside one process:
`python tests/benchmarks/model_zoo.py [--count N] [--skip N] [--only PATTERN] [--capture auto|dynamo|nonstrict]
[--limit-seconds S] [--record] [--document] [--tenth COMMIT [--budget-seconds S]]`.

Each model is tried in two processes of its own, which are ended after a limit. A line is printed per model, and
a count of each outcome (`zoo/trial.py`). ``--record`` adds the outcomes to `zoo/outcomes.json`, in place of older
ones of the same models; ``--document`` writes `docs/models.md` from that file. ``--tenth`` tries the tenth that
belongs to a commit of the models that were exact when they were last recorded and whose libraries are installed, for so
many seconds at most, and fails where one is not exact any more.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import logging
import multiprocessing
import os
import queue
import re
import socket
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.benchmarks.zoo.documents import OUTCOMES, document, read_outcomes  # noqa: E402
from tests.benchmarks.zoo.entries import Entry, listed  # noqa: E402
from tests.benchmarks.zoo.image_models import import_torchvision  # noqa: E402
from tests.benchmarks.zoo.trial import Trial, tried  # noqa: E402
from tests.planted_faults.tenths import tenth_of  # noqa: E402

NUM_RANKS = 2
_WORST_LAST = ("exact", "narrow", "not built", "refused", "differs", "crashed")


def _child(entry: Entry, rank: int, port: int, capture: str, limit_seconds: float, results: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.setsid()
    # The end of the other rank is what this rank would talk of.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results.put((rank, tried(entry, rank, capture, lambda: results.put((rank, None)))))
    time.sleep(limit_seconds)  # until it is ended, when all ranks have answered


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def over_ranks(entry: Entry, capture: str, limit_seconds: float) -> Trial:
    """One entry in processes of its own; the worst of what its ranks found."""
    forking = multiprocessing.get_context("fork")
    results, port, end = forking.Queue(), _free_port(), time.monotonic() + limit_seconds
    arguments = [(entry, rank, port, capture, limit_seconds, results) for rank in range(NUM_RANKS)]
    children = [forking.Process(target=_child, args=each, daemon=True) for each in arguments]
    for child in children:
        child.start()
    found: dict[int, Trial] = {}
    built = set()
    try:
        while len(found) < NUM_RANKS:
            rank, trial = results.get(timeout=max(0.0, end - time.monotonic()))
            if trial is None:
                built.add(rank)
            else:
                found[rank] = trial
    except queue.Empty:
        kind = "crashed" if len(built) == NUM_RANKS else "not built"
        found[NUM_RANKS] = Trial(outcome=kind, detail=f"no answer in {limit_seconds:.0f} s")
    for child in children:
        child.kill()
        child.join()
    return _together(list(found.values()))


def _together(trials: list[Trial]) -> Trial:
    worst = max(trials, key=lambda trial: (_WORST_LAST.index(trial.outcome), trial.error))
    if worst.outcome not in ("exact", "narrow"):
        return worst
    missing = worst.expected_names - frozenset().union(*(trial.names for trial in trials))
    if missing:
        return Trial(outcome="differs", detail=f"no gradient of {sorted(missing)[:3]}", error=float("inf"))
    return replace(worst, cpu_seconds=max(trial.cpu_seconds for trial in trials))


def _line(trial: Trial) -> str:
    if trial.detail:
        return trial.detail
    own = f" (plain: {trial.own_error:.1e})" if trial.own_error else ""
    return f"{trial.error:.1e}{own}, {trial.cpu_seconds:.1f} CPU s"


def _tenth(entries: list[Entry], commit: str, limit_seconds: float, budget_seconds: float) -> int:
    """Try those of a commit; 1 where one that was exact is not."""
    recorded, end = read_outcomes(), time.monotonic() + budget_seconds
    good = [entry for entry in entries if recorded.get(str(entry), {}).get("outcome") in ("exact", "narrow")]
    there = {name for name in {entry.library for entry in good} if name == "plain" or name in sys.modules}
    tried_now, worse = 0, []
    for entry in tenth_of([entry for entry in good if entry.library in there], commit):
        if time.monotonic() > end:
            break
        trial = over_ranks(entry, "auto", limit_seconds)
        tried_now += 1
        if trial.outcome not in ("exact", "narrow"):
            worse.append(entry)
        print(f"{trial.outcome:10} {entry}  {_line(trial)}", flush=True)
    print(f"zoo: {tried_now} tried of {', '.join(sorted(there))}, {len(worse)} not exact any more")
    return 1 if worse or not tried_now else 0


def main() -> int:
    """Try models and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first ones")
    parser.add_argument("--capture", default="auto", choices=("auto", "dynamo", "nonstrict"))
    parser.add_argument("--only", default="", help="entries whose text has a match of this pattern")
    parser.add_argument("--limit-seconds", type=float, default=180.0)
    parser.add_argument("--record", action="store_true", help="add the outcomes to zoo/outcomes.json")
    parser.add_argument("--document", action="store_true", help="write docs/models.md")
    parser.add_argument(
        "--tenth", default="", metavar="COMMIT", help="the tenth of this commit must be as recorded"
    )
    parser.add_argument("--budget-seconds", type=float, default=480.0, help="of --tenth")
    flags = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        import_torchvision()  # before libraries that look for it
    for name in ("transformers", "timm", "diffusers"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)  # once, not in every rank
    chosen = [entry for entry in listed() if re.search(flags.only, str(entry))]
    if flags.tenth:
        return _tenth(chosen, flags.tenth, flags.limit_seconds, flags.budget_seconds)
    counts: collections.Counter[str] = collections.Counter()
    for entry in chosen[flags.skip : flags.skip + flags.count]:
        trial = over_ranks(entry, flags.capture, flags.limit_seconds)
        counts[trial.outcome] += 1
        print(f"{trial.outcome:10} {entry}  {_line(trial)}", flush=True)
        if flags.record:
            outcome = {
                "outcome": trial.outcome,
                "detail": _line(trial),
                "cpu_seconds": round(trial.cpu_seconds, 1),
                "has_batch_norm": trial.has_batch_norm,
            }
            text = json.dumps(read_outcomes() | {str(entry): outcome}, indent=1, sort_keys=True)
            OUTCOMES.write_text(text + "\n", encoding="utf-8")
    built = sum(counts.values()) - counts["not built"]
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()), f"of {built} built")
    if flags.document:
        document(listed(), read_outcomes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
