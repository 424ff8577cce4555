"""The examples run over ranks in a small setting, print their plan, and the loss falls."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.choice import mostly
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case
from tests.distributed.harness.launch import launcher, run_script
from tests.distributed.harness.template import Templates

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_SECONDS = 150.0
_RESNET = ("--width-factor", "0.5")
RUNS = (
    ("tutorial", 2, ("--hidden", "64", "--layers", "8", "--steps", "10", "--stages", "2"), 2),
    ("tutorial-torchrun", 2, ("--hidden", "32", "--layers", "4", "--steps", "10", "--stages", "2"), 2),
    ("train_gpt2", 2, ("--layers", "2", "--width", "32", "--seq", "32", "--steps", "20", "--stages", "2"), 2),
    (
        "train_resnet",
        2,
        (
            *_RESNET,
            "--images",
            "600",
            "--epochs",
            "5",
            "--batch",
            "64",
            "--stages",
            "2",
            "--micro-batches",
            "2",
        ),
        2,
    ),
)
ALONE = ("tutorial", 1, ("--hidden", "64", "--layers", "4", "--steps", "5"), 1)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_IDS = [f"{run[0]}-{run[1]}" for run in (*RUNS, ALONE)]


@pytest.mark.parametrize(("name", "world", "flags", "num_stages"), mostly((*RUNS, ALONE), RUNS[1:]), ids=_IDS)
def test_example(
    name: str,
    world: int,
    flags: tuple[str, ...],
    num_stages: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    templates: Templates,
) -> None:
    if name == "train_gpt2":
        monkeypatch.delenv("RANNC_COSTS")  # as users run it
    script = EXAMPLES / f"{name.removesuffix('-torchrun')}.py"
    command = TORCHRUN if name.endswith("-torchrun") else ()
    if name == "train_resnet":
        # The others show that examples bring what they need; ranks that have imported torch already save
        # their start.
        command = (*launcher(world), *templates.command([]))
    code, output, _ = run_script(
        script, flags, world=world, directory=tmp_path, limit_seconds=LIMIT_SECONDS, command=command
    )
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


@pytest.mark.full
def test_the_first_look_equals_one_process(tmp_path: Path) -> None:
    """The README's: losses of the planner's plan, of a pipeline of two stages and of one process, and the
    plan's file.
    """
    code, output, _ = run_script(
        EXAMPLES / "hello_gpt2.py", (), world=2, directory=tmp_path, limit_seconds=LIMIT_SECONDS
    )
    assert code == 0, output[-6000:]
    found = {
        name: [float(loss) for loss in losses.split()]
        for name, losses in re.findall(r"(?m)^(\w+ \w+|planned) +([\d. ]+)$", output)
    }
    assert sorted(found) == ["one process", "planned", "two stages"], output[-3000:]
    assert all(
        len(losses) == 3 and losses == pytest.approx(found["one process"], rel=1e-5)
        for losses in found.values()
    ), found
    assert (tmp_path / "plan.json").is_file()


def _case(name: str, world: int, *flags: str, check: str = "example") -> Case:
    parameters = {"script": name.split("-")[0], "flags": flags}
    return Case(name=f"example-{name}", world=world, check=check, parameters=parameters, limit_seconds=300.0)


_BERT = (
    "--hidden",
    "16",
    "--layers",
    "1",
    "--heads",
    "2",
    "--seq",
    "16",
    "--batch",
    "4",
    "--stages",
    "2",
    "--micro-batches",
    "2",
)
# In the ranks that other tests have started, to save their start.
IN_PROCESS = (
    _case("tutorial_rannc", 2, "--hidden", "16", "--layers", "4", "--batch", "8", "--steps", "6"),
    _case(
        "train_bert-resumed",
        2,
        *_BERT,
        "--accumulate",
        "2",
        "--steps",
        "4",
        "--save-every",
        "2",
        check="example_resumed",
    ),
)
IN_FULL = (
    _case("generate", 2, "--width", "32", "--steps", "10", "--tokens", "6"),
    _case("train_bert-bfloat16", 2, *_BERT, "--precision", "bfloat16", "--steps", "30", "--lr", "3e-3"),
    _case(
        "train_bert-float16",
        4,
        *_BERT,
        "--precision",
        "float16",
        "--steps",
        "30",
        "--lr",
        "3e-3",
        "--dropout",
        "0.1",
    ),
    _case(
        "train_resnet-wide",
        2,
        "--arch",
        "resnet50x2",
        "--width-factor",
        "0.0625",
        "--images",
        "64",
        "--batch",
        "32",
        "--epochs",
        "3",
    ),
    _case(
        "train_resnet-resumed",
        2,
        "--width-factor",
        "0.5",
        "--images",
        "128",
        "--epochs",
        "2",
        check="example_resumed",
    ),
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name.removeprefix("example-")) for case in IN_PROCESS]
)
def test_example_in_process(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name.removeprefix("example-")) for case in IN_FULL]
)
def test_example_in_process_full(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()
