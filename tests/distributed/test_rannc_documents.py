"""Every code block of RaNNC's tutorial, FAQ, configuration page and README runs, on 2 and on 4 ranks (tests/rannc_documents)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case
from tests.distributed.harness.launch import run_script

SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[1] / "rannc_documents").glob("[a-z]*.py"))
# What a script says about stages itself stays as it is.
OWN_STAGES = ("configuration",)


def _case(script: str, world: int) -> Case:
    variables: dict[str, Any] = {} if script in OWN_STAGES else {"RANNC_PARTITION_NUM": "2"}
    parameters = {"script": script, "variables": variables}
    return Case(name=f"document-{script}-{world}", world=world, check="document", parameters=parameters, limit_seconds=180.0)


# By default all on two ranks and some on four; the others show nothing more there.
ALSO_ON_FOUR = ("readme_usage", "faq_gradient_accumulation")


def _parameters(world: int, scripts: Sequence[str]) -> list[Any]:
    return [pytest.param(_case(script, world), id=f"{script}-{world}") for script in scripts]


@pytest.mark.full
@pytest.mark.parametrize("case", _parameters(4, [script for script in SCRIPTS if script not in ALSO_ON_FOUR]))
def test_document_on_four_ranks(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.parametrize("case", [*_parameters(2, SCRIPTS), *_parameters(4, ALSO_ON_FOUR)])
def test_document(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_document_as_a_job_of_its_own(script: str, launcher: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if launcher == "torchrun" else []
    path = Path(__file__).parents[1] / "rannc_documents" / f"{script}.py"
    code, output, _ = run_script(path, (), world=2, directory=tmp_path, limit_seconds=240, command=command)
    assert code == 0, output[-6000:]
