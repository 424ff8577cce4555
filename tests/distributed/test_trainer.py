"""The examples of Hugging Face's Trainer, Accelerate and TRL over ranks: losses, evaluations and what is resumed are those of
one process.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.distributed.harness.launch import launcher, run_script
from tests.distributed.harness.template import Templates

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_SECONDS = 200.0
_PRECISION = 1e-10
_FLAGS = (
    "--steps",
    "4",
    "--every",
    "2",
    "--rows",
    "29",
)  # an epoch: two updates, and five rows in its last batch
_LONE = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
model.compile(backend="rannc")
rows = [{"input_ids": torch.arange(16) + row, "labels": torch.arange(16) + row} for row in range(32)]
settings = TrainingArguments(output_dir="run", max_steps=2, report_to=[], save_strategy="no")
Trainer(model, settings, train_dataset=rows).train()
"""


def _run(
    script: Path, directory: Path, templates: Templates, world: int, *flags: str, use_templates: bool = True
) -> str:
    command = [*launcher(world), *templates.command([])] if world > 1 and use_templates else [sys.executable]
    code, output, _ = run_script(
        script, flags, world=world, directory=directory, limit_seconds=LIMIT_SECONDS, command=command
    )
    assert code == 0, output[-6000:]
    return output


def _numbers(output: str, name: str) -> list[float]:
    line = re.search(rf"(?m)^{name} (.+)$", output)
    assert line, output[-3000:]
    return [float(number) for number in line[1].split()]


def _assert_as_one_process(output: str, plain: str, names: tuple[str, ...], precision: float) -> None:
    for name in names:
        expected = _numbers(plain, name)
        assert _numbers(output, name) == pytest.approx(expected, rel=precision), name


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, ("--stages", "2")),
        pytest.param(4, ("--stages", "2"), marks=pytest.mark.full),
        pytest.param(2, ("--smoothing", "0.1", "--stages", "2"), marks=pytest.mark.full),
        pytest.param(2, ("--lora", "--stages", "2"), marks=pytest.mark.full),
    ],
    ids=["plain", "four", "smoothing", "lora"],
)
def test_trainer_equals_one_process(
    world: int, flags: tuple[str, ...], tmp_path: Path, templates: Templates
) -> None:
    script = EXAMPLES / "trainer.py"
    saved = tmp_path / "run"
    output = _run(script, tmp_path, templates, world, *_FLAGS, *flags, "--save", str(saved))
    plain = _run(
        script, tmp_path, templates, 1, *_FLAGS, *flags, "--plain", "--save", str(tmp_path / "plain")
    )
    # The smoother adds up in float32, whatever the model computes in.
    precision = 1e-6 if "--smoothing" in flags else _PRECISION
    _assert_as_one_process(output, plain, ("losses", "evaluated"), precision)
    assert re.search(rf"plan of \w+ for {world} rank\(s\): 2 stage\(s\)", output), output[-3000:]
    assert sorted(path.name for path in saved.iterdir()) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.full
def test_resumed_in_the_middle_of_an_epoch(tmp_path: Path, templates: Templates) -> None:
    """The epoch's last batch, which has five rows and is filled up, comes after the resumption."""
    script, saved = EXAMPLES / "trainer.py", tmp_path / "run"
    flags = ("--rows", "29", "--accumulate", "1", "--steps", "6", "--every", "3", "--save", str(saved))
    expected = _run(script, tmp_path, templates, 1, *flags, "--plain")
    shutil.rmtree(saved / "checkpoint-6")
    rest = _run(script, tmp_path, templates, 2, *flags, "--resume")
    assert _numbers(rest, "losses") == pytest.approx(_numbers(expected, "losses")[3:], rel=_PRECISION)
    _assert_as_one_process(rest, expected, ("evaluated",), _PRECISION)


@pytest.mark.full
@pytest.mark.parametrize("worlds", [(2, 1), (2, 4), (1, 2)])
def test_resumed_on_another_number_of_ranks(
    worlds: tuple[int, int], tmp_path: Path, templates: Templates
) -> None:
    script, saved = EXAMPLES / "trainer.py", tmp_path / "run"
    whole = _run(script, tmp_path, templates, worlds[0], *_FLAGS, "--save", str(saved))
    shutil.rmtree(saved / "checkpoint-4")
    rest = _run(script, tmp_path, templates, worlds[1], *_FLAGS, "--save", str(saved), "--resume")
    expected = _numbers(whole, "losses")
    assert _numbers(rest, "losses") == pytest.approx(expected[len(expected) // 2 :], rel=_PRECISION)
    _assert_as_one_process(rest, whole, ("evaluated",), _PRECISION)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_accelerate_equals_a_plain_loop(world: int, tmp_path: Path, templates: Templates) -> None:
    saved = str(tmp_path / "run")
    output = _run(
        EXAMPLES / "with_accelerate.py",
        tmp_path,
        templates,
        world,
        *("--check", "--steps", "8", "--stages", "2", "--save", saved),
    )
    assert "as in a plain loop: " in output, output[-3000:]
    assert f"right {_right(output)} of 1797" in output
    if world == 4:
        again = _run(
            EXAMPLES / "with_accelerate.py",
            tmp_path,
            templates,
            2,
            *("--steps", "0", "--save", saved, "--resume", "--batch", "32"),
        )
        assert _right(again) == _right(output)


def _right(output: str) -> str:
    found = re.search(r"right (\d+) of", output)
    assert found, output[-3000:]
    return found[1]


@pytest.mark.full
def test_sft_equals_one_process(tmp_path: Path, templates: Templates) -> None:
    script = EXAMPLES / "sft.py"
    flags = ("--steps", "4", "--accumulate", "2")
    output = _run(script, tmp_path, templates, 2, *flags, "--stages", "2")
    # TRL's own kernel computes in float32.
    _assert_as_one_process(output, _run(script, tmp_path, templates, 1, *flags, "--plain"), ("losses",), 1e-6)


@pytest.mark.full
def test_a_trainer_that_sees_one_process_is_refused(tmp_path: Path, templates: Templates) -> None:
    """Each rank would read all rows, and the loss would be divided by one rank's number of items."""
    script = tmp_path / "lone.py"
    script.write_text(_LONE)
    command = [*launcher(2), sys.executable]
    code, output, _ = run_script(
        script, (), world=2, directory=tmp_path, limit_seconds=LIMIT_SECONDS, command=command
    )
    assert code not in (0, None)
    assert "LaunchError: Accelerate sees 1 process(es), the job has 2 ranks" in output, output[-3000:]
