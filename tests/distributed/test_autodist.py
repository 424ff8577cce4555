"""AutoDist's example configurations over ranks, as options of torch.compile: equal to one process, planned as they say;
a job of another size is refused on every rank.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rannc_backend.ir.plan import Plan
from tests.distributed.harness.launch import launcher, run_script
from tests.distributed.harness.template import Templates

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "autodist.py"
LIMIT_SECONDS = 200.0
NAMES = ("my_experiment", "large_model_training", "pipeline_training", "efficient_training", "inference")


def _run(
    directory: Path, templates: Templates, world: int, *flags: str, **items: str
) -> tuple[int | None, str]:
    variables = [f"RANNC_{name.upper()}={value}" for name, value in items.items()]
    command = ["env", *variables, *launcher(world), *templates.command([])]
    code, output, _ = run_script(
        EXAMPLE, flags, world=world, directory=directory, limit_seconds=LIMIT_SECONDS, command=command
    )
    return code, output


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_examples_equal_one_process(world: int, tmp_path: Path, templates: Templates) -> None:
    code, output = _run(tmp_path, templates, world, "--check", "--steps", "3")
    assert code == 0, output[-6000:]
    assert len(re.findall(r": loss \S+ -> \S+, as in one process", output)) == len(NAMES) - 1
    # Each configuration has named its plan.
    plans = re.findall(r"plan of (\w+), Model for (\d+) rank", output)
    assert plans == [(name, str(world)) for name in NAMES]
    assert f"pipeline_training, Model for {world} rank(s): {world} stage(s), 4 micro-batch(es)" in output


@pytest.mark.parametrize(("name", "num_stages"), [("pipeline", 4), ("high_memory", None)])
def test_a_dry_run_plans_for_the_devices_of_the_document(
    name: str, num_stages: int | None, tmp_path: Path, templates: Templates
) -> None:
    code, output = _run(
        tmp_path, templates, 1, "--dry-run", name, deployment_file=str(tmp_path / "plan.json")
    )
    assert code == 0 and "dry run: plan for 8 ranks" in output, output[-3000:]
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert plan.world_size == 8 and num_stages in (None, plan.num_stages)


def test_ranks_of_another_number_are_refused_on_all(tmp_path: Path, templates: Templates) -> None:
    code, output = _run(tmp_path, templates, 2, "--steps", "1", num_ranks="4")
    assert code not in (0, None)
    assert "option 'num_ranks' asks for 4 ranks, and there are 2" in output, output[-3000:]
