"""The command `rannc`: what it prints, and that our errors end without a traceback."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rannc_backend
from rannc_backend.cli.config import configuration_markdown
from rannc_backend.cli.main import main
from rannc_backend.ir.action import parse_programs
from rannc_backend.ir.plan import (
    Alternative,
    BlockPlan,
    ClusterAssumption,
    Plan,
    RowCost,
    StageCost,
    StagePlan,
)
from rannc_backend.settings.options import Config
from rannc_backend.settings.rare_collections import rare_collections
from rannc_backend.settings.torch_version import NEWEST, OLDEST

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[4]


def run(*arguments: str) -> int:
    """Exit code of the command."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_a_command_looks_for_cycles_rarely_and_leaves_the_collector_as_it_was() -> None:
    seen: list[tuple[int, int, int]] = []
    before = gc.get_threshold()
    with rare_collections():
        seen.append(gc.get_threshold())
    assert run("version", "--wrong") == 2
    assert seen[0][0] > before[0] and gc.get_threshold() == before


@pytest.mark.parametrize("argument", ["--version", "version"])
def test_versions(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argument) == 0
    assert re.fullmatch(
        rf"rannc-backend {re.escape(rannc_backend.__version__)} \(torch \S+\)\n", capsys.readouterr().out
    )


def test_shells_complete_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "_RANNC_COMPLETE": "complete_bash",
        "COMP_WORDS": "rannc doc",
        "COMP_CWORD": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["rannc"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.split() == ["doctor"]


def test_metadata() -> None:
    """What an index shows, and type checkers need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text(
        encoding="utf-8"
    )
    assert "Typing :: Typed" in project["classifiers"] and (ROOT / "rannc_backend" / "py.typed").exists()
    (torch_range,) = [each for each in project["dependencies"] if each.startswith("torch")]
    newest, oldest = (f"{numbers[0]}.{numbers[1]}" for numbers in ((NEWEST[0], NEWEST[1] + 1), OLDEST))
    assert torch_range == f"torch>={oldest},<{newest}"
    assert torch_range in (ROOT / "requirements-gpu.txt").read_text(encoding="utf-8").splitlines()
    assert f"${{TORCH:-{torch_range}}}" in (ROOT / "scripts" / "make_environment.sh").read_text(
        encoding="utf-8"
    )


def plan() -> Plan:
    """Two stages; stage 0 has ranks 0 and 1, stage 1 rank 2, and rank 3 is idle."""
    cluster = ClusterAssumption(
        name="a [small] cluster",
        num_devices=4,
        devices_per_node=4,
        device_name="cpu",
        device_memory_bytes=2**30,
        peak_flops=(),
        memory_bytes_per_second=1e10,
        launch_seconds=1e-6,
        intra_node_latency_seconds=1e-5,
        intra_node_bytes_per_second=1e9,
        inter_node_latency_seconds=1e-4,
        inter_node_bytes_per_second=1e8,
    )
    cost = StageCost(
        forward_seconds=0.0123,
        backward_seconds=0.0246,
        transfer_seconds=0,
        allreduce_seconds=0,
        parameter_bytes=3 * 2**20,
        gradient_bytes=3 * 2**20,
        optimizer_bytes=6 * 2**20,
        activation_bytes=5 * 2**30,
        buffer_bytes=0,
        workspace_bytes=0,
        peak_bytes=12 * 2**20 + 5 * 2**30,
        idle_share=0.25,
    )
    at_rows = RowCost(
        rows=1, forward_seconds=0.0123, backward_seconds=0.0246, activation_bytes=5 * 2**29, workspace_bytes=0
    )
    counts = {name: 1 for name in BlockPlan.model_fields if name.endswith(("_flops", "_bytes"))}
    blocks = tuple(
        BlockPlan(
            index=i,
            structure="s",
            nodes=(f"mm_{i}",),
            modules=(f"layer{i}",),
            parameters=(f"w{i}",),
            **counts,
        )
        for i in range(2)
    )
    stages = tuple(
        StagePlan(
            index=i,
            blocks=(i,),
            nodes=(f"mm_{i}",),
            modules=(f"layer{i}",),
            parameters=(f"w{i}",),
            updated_buffers=(),
            ranks=ranks,
            recompute=1.0,
            predicted=cost,
            at_rows=(at_rows,),
            received_bytes_per_row=4.0,
            gradient_bytes_per_row=4.0,
            num_buckets=1,
        )
        for i, ranks in enumerate([(0, 1), (2,)])
    )
    lost = Alternative(
        num_stages=1,
        stage_replicas=(4,),
        num_micro_batches=1,
        schedule="1f1b",
        recompute=(1.0,),
        predicted_step_seconds=None,
        reason="needs 9 GB [of 1]",
    )
    return Plan(
        schema_version=2,
        fingerprint="f" * 64,
        model_name="Toy",
        cluster=cluster,
        world_size=4,
        batch_rows=8,
        num_micro_batches=4,
        schedule="1f1b",
        memory_limit_bytes=2**33,
        blocks=blocks,
        stages=stages,
        predicted_step_seconds=0.2,
        equal_split_seconds=0.3,
        proven_gap=0.0,
        costs_from="analytic",
        binding="stage 0 (compute)",
        alternatives=(lost,),
        what_if=(),
    )


@pytest.fixture
def plan_path(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(plan().to_json(), encoding="utf-8")
    return str(path)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version") == 0
    assert capsys.readouterr().out.startswith(f"rannc-backend {rannc_backend.__version__} (torch ")


def test_config_prints_every_item_with_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "7")
    assert run("config") == 0
    lines = capsys.readouterr().out.splitlines()
    for item in Config.model_fields:
        assert sum(re.search(rf"│ {item} +│", line) is not None for line in lines) == 1
    (line,) = [line for line in lines if "│ pipeline_num " in line]
    assert "│ 7 " in line and "environment RANNC_PIPELINE_NUM" in line


def test_config_with_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "rannc_conf.toml"
    path.write_text("# comment\npipeline_num = 7\np2p_comm = true\n", encoding="utf-8")
    monkeypatch.setenv("RANNC_CONF_DIR", str(tmp_path))
    assert run("config") == 0
    out = capsys.readouterr().out
    assert f"file: {path}\n" in out
    assert f"p2p_comm (from {path}, line 3) is accepted" in out
    assert run("config", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["items"]) == list(Config.model_fields)
    assert found["items"]["pipeline_num"]["value"] == 7
    assert found["items"]["pipeline_num"]["source"] == f"{path}, line 2"
    assert found["items"]["mem_margin"] == {
        "value": 0.1,
        "source": "default",
        "default": 0.1,
        "accepts": "a finite number, at least 0, below 1",
        "meaning": "Fraction of the memory limit that plans leave free.",
    }
    assert found["retired"]["p2p_comm"]["source"] == f"{path}, line 3" and found["file"] == str(path)
    path.write_text("pipeline_num = 7\nmem_margin = 2\n", encoding="utf-8")
    assert run("config") == 2
    assert f"(from {path}, line 2)" in capsys.readouterr().err


def test_configuration_page_is_what_the_code_says() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == configuration_markdown(), "docs/configuration.md is out of date: run `make docs`"


def test_config_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "--markdown") == 0
    assert capsys.readouterr().out == configuration_markdown()


@pytest.mark.parametrize(("rank", "stage"), [(0, 0), (1, 0), (2, 1)])
def test_program(capsys: pytest.CaptureFixture[str], plan_path: str, rank: int, stage: int) -> None:
    assert run("program", plan_path, "--rank", str(rank)) == 0
    (lane, actions), *others = parse_programs(capsys.readouterr().out).items()
    assert (lane, others) == (stage, [])
    computed = [str(action) for action in actions if action.is_compute]
    assert sorted(computed) == sorted(f"{stage}{kind}{m}" for kind in "FB" for m in range(4))


def test_program_of_one_phase(capsys: pytest.CaptureFixture[str], plan_path: str) -> None:
    assert run("program", plan_path, "--rank", "2", "--phase", "infer") == 0
    (actions,) = parse_programs(capsys.readouterr().out).values()
    assert [str(action) for action in actions if action.is_compute] == ["1F0", "1F1", "1F2", "1F3"]


def test_program_of_an_idle_rank(capsys: pytest.CaptureFixture[str], plan_path: str) -> None:
    assert run("program", plan_path, "--rank", "3") == 0
    assert "rank 3 has no stage" in capsys.readouterr().out


def test_our_errors_have_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan_path: str
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")
    for arguments, words in [
        (("show", str(tmp_path / "missing.json")), "cannot read the plan"),
        (("show", str(binary)), "not UTF-8"),
        (("show", str(broken)), "not JSON"),
        (("program", plan_path, "--rank", "4"), "from 0 to 3"),
    ]:
        assert run(*arguments) == 2
        captured = capsys.readouterr()
        assert words in captured.err and "Traceback" not in captured.err
        assert captured.out == ""
    monkeypatch.setenv("RANNC_PIPELIN_NUM", "7")
    assert run("config") == 2
    assert "did you mean 'RANNC_PIPELINE_NUM'" in capsys.readouterr().err


def test_the_command_does_not_import_torch(plan_path: str) -> None:
    code = (
        "import sys\n"
        "from rannc_backend.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    for arguments in (
        ["version"],
        ["show", plan_path],
        ["show", plan_path, "--html", str(Path(plan_path).with_suffix(".html"))],
        ["diff", plan_path, plan_path],
        ["simulate", plan_path, "--micro-batches", "2"],
        ["program", plan_path, "--rank", "0"],
    ):
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
