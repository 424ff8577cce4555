"""A dry run plans for ranks that are not there, saves that and ends as a success; a run with those ranks then
uses this very plan.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rannc_backend.ir.plan import Plan
from tests.distributed.harness.launch import launcher, run_script
from tests.distributed.harness.template import Templates

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("workers") / "dry_run_worker.py"


def _run(
    world: int, directory: Path, templates: Templates, *, worker: Path = WORKER, **options: str
) -> tuple[int | None, str]:
    options |= {
        "stage_compiler": "eager",
        "cluster": "generic-cpu",
        "deployment_file": str(directory / "plan.json"),
    }
    options.setdefault("report_steps", "0")
    variables = [f"RANNC_{name.upper()}={value}" for name, value in options.items()]
    command = ["env", f"PYTHONPATH={ROOT}", *variables, *launcher(world), *templates.command([])]
    code, output, _ = run_script(
        worker, [], world=world, directory=directory, limit_seconds=120, command=command
    )
    return code, output


@pytest.mark.parametrize("present", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_dry_run_exits_well_on_every_rank_and_its_plan_is_loaded(tmp_path, templates, present):
    code, output = _run(
        present, tmp_path, templates, partitioning_dry_run_np="2", partition_num="2", pipeline_num="2"
    )
    assert code == 0, output
    assert "loss" not in output and "failed" not in output and "Traceback" not in output
    assert output.count(f"dry run: plan for 2 ranks saved in {tmp_path / 'plan.json'}") == 1
    assert "Model: 2 stages on" in output and "Memory of one rank" in output
    text = (tmp_path / "plan.json").read_text()
    plan = Plan.from_json(text)
    assert (plan.world_size, plan.num_stages, plan.batch_rows) == (2, 2, 16)
    code, output = _run(2, tmp_path, templates, load_deployment="1")
    assert code == 0, output
    assert output.count("loss ") == 4 and "plan loaded from" in output
    assert plan.summary().split("\n")[1].strip() in output, "another plan was used"
    assert (tmp_path / "plan.json").read_text() == text


def test_a_dry_run_that_fails_is_an_error_on_every_rank(tmp_path, templates):
    code, output = _run(2, tmp_path, templates, partitioning_dry_run_np="4", replica_num="8")
    assert code not in (0, None), output
    assert (
        output.count("failed: no plan satisfies the limits: replica_num 8 needs 8 ranks, and there are 4")
        == 2
    )
    assert not (tmp_path / "plan.json").exists()


def test_ctrl_c_on_all_ranks_while_one_plans_does_not_end_the_run(tmp_path, templates):
    code, output = _run(
        2,
        tmp_path,
        templates,
        worker=WORKER.with_name("interrupted_worker.py"),
        partition_num="2",
        pipeline_num="2",
    )
    assert code == 0, output
    assert "not cancelled" not in output and output.count("cancelled") == 1
    assert output.count("taking the best plan so far") == 2
    assert output.count("loss ") == 4
