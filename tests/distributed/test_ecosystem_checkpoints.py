"""Files of Hugging Face's libraries and of `torch.distributed.checkpoint`, out and in, over ranks."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case
from tests.distributed.harness.launch import run_script

# Jobs of several worlds meet in it.
DIRECTORY = Path(tempfile.gettempdir()) / f"rannc-ecosystem-{os.getpid()}"
STAGES = {1: "1", 2: "1,1", 4: "1,2,1"}
ROWS = {1: (12,), 2: (6, 6), 4: (3, 3, 3, 3)}


def _case(check: str, world: int, *, saver: int = 0, needs: tuple[str, ...] = ()) -> Case:
    return Case(
        name=f"ecosystem-{check}-{world}-{saver}",
        world=world,
        replicas=STAGES[world],
        rows=ROWS[world],
        num_micro_batches=1,
        check=check,
        limit_seconds=300,
        environment={"HF_HUB_OFFLINE": "1"},
        parameters={"path": str(DIRECTORY / str(saver))},
        needs=needs,
    )


@pytest.fixture(scope="session", autouse=True)
def _clean() -> Iterator[None]:
    yield
    shutil.rmtree(DIRECTORY, ignore_errors=True)


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "other_files.py"


@pytest.mark.full
def test_example(tmp_path: Path) -> None:
    flags = ("--directory", str(tmp_path / "files"))
    code, output, _ = run_script(EXAMPLE, flags, world=2, directory=tmp_path, limit_seconds=150.0)
    assert code == 0, output[-6000:]
    losses = re.search(r"loss went on (\S+), resumed (\S+)", output)
    assert losses and losses[1] == losses[2], output[-3000:]
    assert "read by transformers: 28544 parameters" in output


FILES = [_case("hugging_face_files", 2), _case("adapter_files", 2)]
FULL_FILES = [_case("hugging_face_files", 4), _case("adapter_files", 4), _case("hugging_face_files", 1)]


@pytest.mark.parametrize(
    "case",
    [*FILES, *(pytest.param(case, marks=pytest.mark.full) for case in FULL_FILES)],
    ids=lambda case: case.name,
)
def test_files(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


def _pair(saver: int, loader: int) -> list[Case]:
    saving = _case("dcp_saved", saver, saver=saver)
    return [saving, _case("dcp_loaded", loader, saver=saver, needs=(saving.name,))]


PAIRS = {
    f"{saver}-{loader}": _pair(saver, loader) for saver, loader in ((2, 2), (2, 4), (4, 2), (2, 1), (1, 2))
}


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(cases, id=name, marks=() if name == "2-2" else pytest.mark.full)
        for name, cases in PAIRS.items()
    ],
)
def test_distributed_checkpoint(cases: list[Case], outcome_of: OutcomeOf) -> None:
    for case in cases:
        outcome_of(case).raise_if_failed()
