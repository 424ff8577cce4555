"""Operators of torch.library: declared element by element or row by row they train as in one process; others
are refused with the cure.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.choice import mostly
from tests.distributed.runtime_jobs import run_job

TRAINED = [
    ("row_wise", 1, "eager"),
    *((case, 2, compiler) for case in ("pointwise", "row_wise") for compiler in ("eager", "inductor")),
]
REFUSED = {
    "undeclared": ("docs.mean_of_rows", "rannc_backend.row_wise"),
    "declared_wrongly": ("docs.centred", "gives other results for rows of the batch together"),
    "turned": ("docs.unit_rows", "in dimension 1, not 0"),
    "row_count": ("docs.count", "gets the batch size as a number"),
    "writes": ("auto_functionalized", "let it return what it computes"),
}


@pytest.mark.parametrize(("case", "num_stages", "compiler"), mostly(TRAINED, [("row_wise", 2, "eager")]))
def test_declared_operators_train_as_in_one_process(
    tmp_path: Path, case: str, num_stages: int, compiler: str
) -> None:
    job = run_job(tmp_path, 2, "custom_operator_worker", case, str(num_stages), compiler, limit_seconds=120)
    assert job.code == 0 and "as in one process" in job.output, job.output


@pytest.mark.parametrize("case", mostly(list(REFUSED), ["undeclared", "declared_wrongly"]))
def test_others_are_refused_with_the_cure(tmp_path: Path, case: str) -> None:
    job = run_job(tmp_path, 2, "custom_operator_worker", case, "2", "eager", limit_seconds=120)
    name, cure = REFUSED[case]
    assert job.code not in (0, None) and f"operator {name}" in job.output and cure in job.output, job.output
    assert "custom_operator_worker.py:" in job.block, job.output
