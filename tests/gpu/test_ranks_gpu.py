"""Two ranks on one GPU, equal to one process: over NCCL, and over gloo with copies through the host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rannc_backend.runtime.job.bootstrap import SHARE_VARIABLE
from tests.distributed.harness.launch import run_script

WORKER = Path(__file__).with_name("rank_worker.py")
LIMIT_SECONDS = 400.0


def run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, share: str, *arguments: str
) -> tuple[int | None, str]:
    monkeypatch.setenv(SHARE_VARIABLE, share)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    code, output, _ = run_script(WORKER, arguments, world=2, directory=directory, limit_seconds=LIMIT_SECONDS)
    return code, output


def assert_ok(code: int | None, output: str, transport: str) -> None:
    assert code == 0, output[-4000:]
    assert sorted(re.findall(r"\bok (\d)", output)) == ["0", "1"] and f"transport {transport}" in output, (
        output[-4000:]
    )


@pytest.mark.parametrize("stage_compiler", ["eager", "inductor"])
@pytest.mark.parametrize("replicas", ["1,1", "2"])
def test_staged_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: str, stage_compiler: str
) -> None:
    assert_ok(*run(tmp_path, monkeypatch, "gloo", "equal", replicas, stage_compiler), "StagedTransport")


@pytest.mark.parametrize("stage_compiler", ["eager", "inductor"])
@pytest.mark.parametrize("replicas", ["1,1", "2"])
@pytest.mark.parametrize("check", ["equal", "no_wait", "long", "wires"])
def test_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str, replicas: str, stage_compiler: str
) -> None:
    """Also on one device, where each rank passes for a host; where NCCL refuses that, a machine with two
    devices is needed.
    """
    assert_ok(*run(tmp_path, monkeypatch, "nccl", check, replicas, stage_compiler), "NcclTransport")


def test_more_ranks_than_devices_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code, output = run(tmp_path, monkeypatch, "", "equal", "1,1", "eager")
    assert code != 0 and "2 ranks on host" in output and "start one rank per device" in output, output[-4000:]
