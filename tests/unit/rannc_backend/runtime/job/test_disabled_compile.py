"""Where torch.compile is switched off, the package says so wherever it is asked, once, on rank 0 alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rannc_backend.cli.main import main
from rannc_backend.doctor.host import check_compile
from rannc_backend.runtime.job.disabled_compile import disabling_variables, warn_if_disabled

_SCRIPT = """
import sys, torch
model = torch.nn.Linear(2, 2)
compiled = torch.compile(model, backend="rannc", disable="disable" in sys.argv)
print("called", tuple(compiled(torch.ones(1, 2)).shape))
"""


def _run(code: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_variables(variable: str) -> None:
    assert disabling_variables({variable: "0"}) == disabling_variables({}) == []
    with pytest.warns(RuntimeWarning, match=f"{variable}=1.*without the backend.*unset {variable}"):
        warn_if_disabled({variable: "1"})
    finding = check_compile({variable: "1"})
    assert finding.status == "problem" and f"unset {variable}" in finding.cure
    assert check_compile({}).status == "ok"


def test_rank_0_alone_speaks(recwarn: pytest.WarningsRecorder) -> None:
    warn_if_disabled({"TORCHDYNAMO_DISABLE": "1", "PMI_RANK": "1", "PMI_SIZE": "2"})
    warn_if_disabled({})
    assert not recwarn.list


def test_a_script_with_the_variable() -> None:
    ended = _run(_SCRIPT, TORCHDYNAMO_DISABLE="1", PMI_RANK="0", PMI_SIZE="2", RANNC_START_WATCH="")
    assert (
        "called (1, 2)" in ended.stdout
        and ended.stderr.count("TORCHDYNAMO_DISABLE=1: torch.compile does nothing") == 1
    )
    assert "no call of a model came to the backend in this job: TORCHDYNAMO_DISABLE=1" in ended.stderr


def test_a_script_that_disables() -> None:
    """torch 2.13.0 looks the backend up and does not call it."""
    ended = _run(_SCRIPT, "disable")
    assert "called (1, 2)" in ended.stdout
    assert (
        ended.stderr.count(
            "<string>:4: RuntimeWarning: torch.compile(..., disable=True): the model runs without the backend"
        )
        == 1
    )


@pytest.mark.parametrize(
    "code",
    [
        "import rannc_backend; rannc_backend.get_rank",
        "from rannc_backend import RaNNCModule",
        "import rannc_backend; rannc_backend.save_checkpoint",
        "import rannc_backend; rannc_backend.tensor_coll",
    ],
)
def test_entry_points(code: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.warns(RuntimeWarning, match="TORCHDYNAMO_DISABLE=1"):
        exec(code, {})
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    exec(code, {})
    assert not recwarn.list


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for value, is_said in (("1", True), ("0", False)):
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", value)
        with pytest.raises(SystemExit):
            main(["config", "--help"])
        assert ("TORCHDYNAMO_DISABLE=1 switches torch.compile off" in capsys.readouterr().err) == is_said
