"""Seconds to the first loss of a new user's script: `python tests/benchmarks/first_contact.py [--output
FILE.json]`.

In: nothing. A GPT-2 of 4 layers and width 128 (random weights, real shapes), two ranks under mpirun, default
options. Out: JSON, for a first run with empty caches, a second run of the same script, and the same with
Inductor by choice: seconds from the first call's begin to the first loss, seconds of the whole job with its
imports, and CPU seconds of all its processes. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600.0
SCRIPT = """
import sys, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, n_positions=128, vocab_size=256, use_cache=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
options = {"stage_compiler": sys.argv[1]} if len(sys.argv) > 1 else None
model = torch.compile(model, backend="rannc", options=options)
ids = torch.randint(0, 256, (8, 128))
begin = time.monotonic()
loss = model(input_ids=ids, labels=ids).loss
seconds_to_loss = time.monotonic() - begin
loss.backward()
optimizer.step()
seconds_to_update = time.monotonic() - begin
begin = time.monotonic()
model(input_ids=ids, labels=ids).loss.backward()
import rannc_backend
if rannc_backend.get_rank() == 0:
    print("FIGURES", seconds_to_loss, seconds_to_update, time.monotonic() - begin, float(loss), flush=True)
"""


def run(caches: Path, *arguments: str) -> dict[str, float]:
    """One job; what it took."""
    script = caches / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    beside = Path(sys.executable).with_name("mpirun")
    command = [
        str(beside) if beside.exists() else "mpirun",
        "-n",
        "2",
        sys.executable,
        str(script),
        *arguments,
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RANNC_")}
    environ |= {
        "XDG_CACHE_HOME": str(caches / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "HF_HUB_OFFLINE": "1",
    }
    (caches / "temporary").mkdir(exist_ok=True)
    environ["TMPDIR"] = str(
        caches / "temporary"
    )  # where torch keeps its compiled header, whatever its cache directory
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    ended = subprocess.run(
        command,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    wall = time.monotonic() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        raise SystemExit(
            f"the job ended with {ended.returncode}:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        )
    line = next(line for line in ended.stdout.splitlines() if line.startswith("FIGURES "))
    to_loss, to_update, second, loss = map(float, line.split()[1:])
    return {
        "first_call_to_loss_seconds": round(to_loss, 2),
        "first_call_to_update_seconds": round(to_update, 2),
        "second_step_seconds": round(second, 3),
        "job_seconds": round(wall, 1),
        "job_cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "loss": round(loss, 6),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    flags = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        caches = Path(folder)
        found["empty caches"] = run(caches)
        found["second run"] = run(caches)
        found["Inductor, empty caches"] = run(caches, "inductor")
        found["Inductor, second run"] = run(caches, "inductor")
    text = json.dumps(found, indent=1)
    print(text)
    if flags.output:
        flags.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
