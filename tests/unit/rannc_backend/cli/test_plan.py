"""The command `rannc plan`: what it prints and writes, and that every mistake is one line with exit code
2.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
import torch

from rannc_backend.cli import plan as cli_plan
from rannc_backend.cli.main import main
from rannc_backend.ir.plan import Plan
from rannc_backend.planner import plan_blocks as planning_search
from rannc_backend.report.run_report import RunReport, StageRun
from tests.unit.rannc_backend.capture.capture_harness import fresh_dynamo
from tests.unit.rannc_backend.log.log_harness import fresh_logger

FACTORY = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    def forward(self, x):
        return self.layers(x).square().mean()

def make():
    model = Model()
    assert model.layers[0].weight.is_meta
    return model, (torch.zeros(2, 32),), {}

def wrong():
    return Model()

def raises():
    return make()[0].layers[7]

def breaks():
    model = Model()
    model.forward = lambda x: print(x)
    return model, (torch.zeros(2, 32),), {}
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "factories.py").write_text(FACTORY)
    for name in ("RANNC_CLUSTER", "RANNC_COSTS", "RANNC_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    with fresh_dynamo():
        yield tmp_path


def _plan(*more, factory="factories.py:make", np="4", cluster="v100-32gb"):
    """Exit code; stdout and stderr are the test's own."""
    arguments = ["plan", factory, "--np", np, "--batch-size", "64", "--option", "stage_compiler=eager", *more]
    try:
        main([*arguments, *(["--cluster", cluster] if cluster else [])])
    except SystemExit as end:
        return end.code or 0
    return 0


def test_a_plan_is_printed_and_written(place, capsys):
    code = _plan(
        "--option",
        "partition_num=2",
        "--json",
        "plan.json",
        "--html",
        "plan.html",
        "--gpus-per-node",
        "2",
        "--dtype",
        "bf16",
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "2 stages on" in out and "v100-32gb: 4 x" in out
    steps = [line.split(":")[0] for line in err.splitlines()]
    assert steps[:6] == ["model", "capture", "analysis", "blocks", "prices", "search"]
    assert "plan written to plan.json" in err and "page written to plan.html" in err
    plan = Plan.from_json((place / "plan.json").read_text())
    assert (plan.world_size, plan.batch_rows, plan.cluster.devices_per_node) == (4, 64, 2)
    assert sum(block.parameter_bytes for block in plan.blocks) == 2 * 4 * (32 * 32 + 32)
    assert "<svg" in (place / "plan.html").read_text()
    assert not torch.distributed.is_initialized()


LOGGING = """global_pattern = "%n %l %v"
[[sink]]
name = "file"
type = "basic_file_sink_st"
filename = "search.log"
[[logger]]
name = "DPStaging"
sinks = ["file"]
level = "debug"
"""


def _check_the_search_is_logged(place, monkeypatch):
    (place / "logging.toml").write_text(LOGGING)
    monkeypatch.setenv("RANNC_CONF_DIR", str(place))
    with fresh_logger():
        assert _plan(factory="model.blocks") == 0
    lines = (place / "search.log").read_text().splitlines()
    assert any(line.startswith("DPStaging debug 1 stages: best step") for line in lines), lines


def test_saved_blocks_take_the_place_of_the_model(place, capsys, monkeypatch):
    assert _plan("--save-blocks", "model.blocks", "--json", "a.json") == 0
    assert _plan("--json", "b.json", factory="model.blocks") == 0
    assert (place / "a.json").read_text() == (place / "b.json").read_text()
    assert _plan("--json", "c.json", factory="model.blocks", np="2", cluster="a100-80gb") == 0
    assert Plan.from_json((place / "c.json").read_text()).world_size == 2
    assert _plan("--dtype", "bf16", factory="model.blocks") == 2
    assert "the blocks have their dtype" in capsys.readouterr().err
    _check_the_search_is_logged(place, monkeypatch)


def test_blocks_are_planned_without_torch_and_sympy(place):
    """Then halves of the search run side by side, and give the same plan."""
    assert _plan("--save-blocks", "model.blocks", "--json", "a.json") == 0
    words = [
        "plan",
        "model.blocks",
        "--np",
        "4",
        "--batch-size",
        "64",
        "--cluster",
        "v100-32gb",
        "--option",
        "stage_compiler=eager",
    ]
    words += ["--json", "b.json"]
    code = f"""
import os, sys
from rannc_backend.cli.main import main
os.sched_getaffinity = lambda _: {{0, 1}}
try:
    main({words!r})
except SystemExit as end:
    assert not end.code, end.code
print([name for name in ("torch", "sympy", "transformers") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]" and "on 4 ranks" in done.stdout
    assert (place / "a.json").read_text() == (place / "b.json").read_text()


def _run_report(plan, *, slower):
    stages = tuple(
        StageRun(
            stage=stage.index,
            structures=tuple(plan.blocks[index].structure for index in stage.blocks),
            rows=-(-plan.batch_rows // plan.num_micro_batches // stage.num_replicas),
            num_replicas=stage.num_replicas,
            recompute=stage.recompute,
            forward_seconds=slower * stage.predicted.forward_seconds,
            backward_seconds=slower * stage.predicted.backward_seconds,
            waiting_seconds=0.0, sending_seconds=0.0, reducing_seconds=0.0, step_seconds=1.0, peak_bytes=1000,
            predicted_forward_seconds=stage.predicted.forward_seconds,
            predicted_backward_seconds=stage.predicted.backward_seconds,
            predicted_waiting_seconds=0.0, predicted_peak_bytes=1000,
        )
        for stage in plan.stages
    )  # fmt: skip
    return RunReport(
        fingerprint=plan.fingerprint, model_name=plan.model_name, device_name="a machine", costs_from=plan.costs_from,
        world_size=plan.world_size, num_rows=plan.batch_rows, num_micro_batches=plan.num_micro_batches, num_steps=3, comparable=True,
        step_seconds=1.0, predicted_step_seconds=plan.predicted_step_seconds, stages=stages,
    )  # fmt: skip


def test_what_a_run_measured_corrects_the_prices(place, capsys):
    settings = ("--option", "partition_num=2", "--option", "pipeline_num=2")
    assert _plan(*settings, "--save-blocks", "model.blocks", "--json", "a.json") == 0
    first = Plan.from_json((place / "a.json").read_text())
    (place / "run.json").write_text(_run_report(first, slower=3.0).to_json())
    assert _plan(*settings, "--profile", "run.json", "--json", "b.json", factory="model.blocks") == 0
    assert (
        _plan(*settings, "--option", "profile_file=run.json", "--json", "c.json", factory="model.blocks") == 0
    )
    assert (place / "b.json").read_text() == (place / "c.json").read_text()
    second = Plan.from_json((place / "b.json").read_text())
    assert second.costs_from == "measured stages on a machine" and first.costs_from == "analytic"
    assert [stage.blocks for stage in second.stages] == [stage.blocks for stage in first.stages]
    for before, after in zip(first.stages, second.stages, strict=True):
        assert after.predicted.forward_seconds == pytest.approx(
            3 * before.predicted.forward_seconds, rel=0.02
        )
    (place / "run.json").write_text("[]")
    assert _plan(*settings, "--profile", "run.json", factory="model.blocks") == 2
    assert "no file of profiles" in capsys.readouterr().err


def test_options_come_from_the_environment_and_the_command_line(place, capsys, monkeypatch):
    monkeypatch.setenv("RANNC_CLUSTER", "a100-40gb")
    monkeypatch.setenv("RANNC_PARTITION_NUM", "3")
    assert (
        _plan("--option", "pipeline_num=4", "--mem-limit-gb", "10", "--json", "plan.json", cluster=None) == 0
    )
    plan = Plan.from_json((place / "plan.json").read_text())
    assert (plan.cluster.name, plan.num_stages, plan.num_micro_batches) == ("a100-40gb", 3, 4)
    assert plan.memory_limit_bytes == int(10 * 2**30 * 0.9)


@pytest.mark.parametrize(
    ("more", "given", "texts"),
    [
        ([], {"cluster": "a100-80g"}, ["a100-80g", "did you mean 'a100-80gb'"]),
        ([], {"cluster": None}, ["cluster local is measured", "name one with --cluster (RANNC_CLUSTER): a100-40gb"]),
        ([], {"factory": "factories.py:mak"}, ["has no function 'mak'", "make"]),
        ([], {"factory": "factories.py"}, ["does not name a factory"]),
        ([], {"factory": "other.py:make"}, ["there is no file 'other.py'"]),
        ([], {"factory": "factories.py:wrong"}, ["wrong returned a Model"]),
        ([], {"factory": "factories.py:raises"}, ["raises raised IndexError", "factories.py:22, in raises: "
        "return make()[0].layers[7]"]),
        ([], {"factory": "factories.py:breaks"}, ["the model is not one graph"]),
        (["--mem-limit-gb", "0.00001"], {}, ["no plan satisfies the limits", "smallest"]),
        (["--option", "replica_num=8"], {}, ["replica_num 8 needs 8 ranks, and there are 4"]),
        (["--option", "pipelin_num=8"], {}, ["pipelin_num", "pipeline_num"]),
        (["--option", "pipeline_num=x"], {}, ["pipeline_num", "an integer"]),
        (["--option", "pipeline_num"], {}, ["pipeline_num=value"]),
        (["--option", "mem_margin=2"], {}, ["mem_margin", "below 1"]),
        (["--dtype", "int8"], {}, ["--dtype", "bf16"]),
        (["--json", "nowhere/plan.json"], {}, ["nowhere/plan.json", "there is no directory"]),
        ([], {"np": "0"}, ["--np"]),
    ],
)  # fmt: skip
def test_mistakes_are_said_without_a_traceback(capsys, more, given, texts):
    assert _plan(*more, **given) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    for text in texts:
        assert text in err


def test_ctrl_c_during_the_search_gives_the_best_plan_so_far(place, capsys, monkeypatch):
    search = planning_search.plan_prepared

    def interrupted(model, question):
        signal.raise_signal(signal.SIGINT)
        assert question.progress.cancelled()
        return search(model, question)

    monkeypatch.setattr(planning_search, "plan_prepared", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert _plan("--json", "plan.json") == 0
    err = capsys.readouterr().err
    assert "this is the best plan so far" in err and (place / "plan.json").exists()
    assert signal.getsignal(signal.SIGINT) is before and threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_before_the_search_and_twice_within_it_aborts(place, capsys, monkeypatch, times):
    def interrupted(*arguments, **named):
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    monkeypatch.setattr(
        *((cli_plan, "_prepared") if times == 1 else (planning_search, "plan_prepared")), interrupted
    )
    assert _plan("--json", "plan.json") == 130
    assert not (place / "plan.json").exists()
