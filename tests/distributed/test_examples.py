"""The examples run over ranks in a small setting, print their plan, and the loss falls."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.distributed.harness.launch import run_script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_SECONDS = 150.0
RUNS = (
    ("tutorial", 2, ("--hidden", "64", "--layers", "8", "--steps", "10", "--stages", "2"), 2),
    ("tutorial", 1, ("--hidden", "64", "--layers", "4", "--steps", "5"), 1),
    ("train_gpt2", 2, ("--layers", "2", "--width", "32", "--seq", "32", "--steps", "20", "--stages", "2"), 2),
    ("train_resnet", 2, ("--width", "8", "--images", "600", "--epochs", "5", "--batch", "64", "--stages", "2", "--micro-batches", "2"), 2),
)


@pytest.mark.parametrize(("name", "world", "flags", "num_stages"), RUNS, ids=[f"{run[0]}-{run[1]}" for run in RUNS])
def test_example(name: str, world: int, flags: tuple[str, ...], num_stages: int, tmp_path: Path) -> None:
    script = EXAMPLES / f"{name}.py"
    code, output, _ = run_script(script, flags, world=world, directory=tmp_path, limit_seconds=LIMIT_SECONDS)
    assert code == 0, output[-6000:]
    plans = re.findall(r"plan of \w+ for \d+ rank\(s\): (\d+) stage\(s\)", output)
    assert plans == [str(num_stages)], "the plan is to be printed once:\n" + output[-3000:]
    assert len(re.findall(r"stage \d+: ranks", output)) == num_stages
    assert re.search(r"\d+ (bytes|rows|images)/s", output), output[-3000:]
    losses = re.search(r"done: loss (\S+) -> (\S+) in", output)
    assert losses and float(losses[2]) < 0.95 * float(losses[1]), output[-3000:]
    if name == "train_resnet":
        accuracy = re.search(r"accuracy (\S+)", output)
        assert accuracy and float(accuracy[1]) > 0.4, output[-3000:]


def test_torchrun_starts_it_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = EXAMPLES / "tutorial.py"
    code, output, _ = run_script(
        script, ("--hidden", "32", "--layers", "4", "--steps", "5"), world=2, directory=tmp_path, limit_seconds=90, command=command
    )
    assert code == 0 and "done: loss" in output, output[-6000:]
