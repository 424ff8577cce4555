"""Every code block of RaNNC's tutorial, FAQ, configuration page and README runs, on 2 and on 4 ranks
(tests/rannc_documents).
"""

from __future__ import annotations

import sys
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
    return Case(
        name=f"document-{script}-{world}",
        world=world,
        check="document",
        parameters=parameters,
        limit_seconds=180.0,
    )


# The others show by default what other tests show too.
BY_DEFAULT = (
    "configuration", "faq_gradient_accumulation", "faq_save_and_load", "readme_usage", "tutorial_usage",
)  # fmt: skip


def _parameters() -> list[Any]:
    marks = {
        (world, script): () if world == 2 and script in BY_DEFAULT else (pytest.mark.full,)
        for world in (2, 4)
        for script in SCRIPTS
    }
    return [
        pytest.param(_case(script, world), id=f"{script}-{world}", marks=chosen)
        for (world, script), chosen in marks.items()
    ]


@pytest.mark.parametrize("case", _parameters())
def test_document(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_document_as_a_job_of_its_own(script: str, launcher: str, tmp_path: Path) -> None:
    command = (
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        if launcher == "torchrun"
        else []
    )
    path = Path(__file__).parents[1] / "rannc_documents" / f"{script}.py"
    code, output, _ = run_script(path, (), world=2, directory=tmp_path, limit_seconds=240, command=command)
    assert code == 0, output[-6000:]
