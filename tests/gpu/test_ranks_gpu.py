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
    directory: Path, monkeypatch: pytest.MonkeyPatch, share: str, *arguments: str, world: int = 2
) -> tuple[int | None, str]:
    monkeypatch.setenv(SHARE_VARIABLE, share)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    code, output, _ = run_script(
        WORKER, arguments, world=world, directory=directory, limit_seconds=LIMIT_SECONDS
    )
    return code, output


def assert_ok(code: int | None, output: str, transport: str, world: int = 2) -> None:
    assert code == 0, output[-4000:]
    done = sorted(re.findall(r"\bok (\d)", output))
    assert done == [str(rank) for rank in range(world)], output[-4000:]
    assert f"transport {transport}" in output, output[-4000:]


@pytest.mark.parametrize("stage_compiler", ["eager", "inductor"])
def test_staged_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage_compiler: str) -> None:
    checks = ("equal:1,1", "equal:2")
    assert_ok(*run(tmp_path, monkeypatch, "gloo", "cuda", stage_compiler, *checks), "StagedTransport")


@pytest.mark.parametrize("stage_compiler", ["eager", "inductor"])
@pytest.mark.parametrize(
    "checks",
    [
        ("equal:1,1", "equal:2", "no_wait:1,1", "no_wait:2"),
        ("wires:1,1", "wires:2", "zero:2", "segments:1,1", "offload:1,1", "offload:2"),
        ("parts:1,1", "lanes:1,1,1,1", "interleaved:1,1,1,1"),
        ("long:1,1", "long:2"),
    ],
    ids=["equal", "options", "schedules", "long"],
)
def test_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: tuple[str, ...], stage_compiler: str
) -> None:
    """Also on one device, where each rank passes for a host; where NCCL refuses that, a machine with two
    devices is needed.
    """
    assert_ok(*run(tmp_path, monkeypatch, "nccl", "cuda", stage_compiler, *checks), "NcclTransport")


@pytest.mark.parametrize("stage_compiler", ["eager", "inductor"])
def test_nccl_with_four_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage_compiler: str) -> None:
    checks = ("equal:2,2", "equal:1,1,1,1", "equal:1,3", "parts:2,2", "zero:4")
    outcome = run(tmp_path, monkeypatch, "nccl", "cuda", stage_compiler, *checks, world=4)
    assert_ok(*outcome, "NcclTransport", 4)


def test_more_ranks_than_devices_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code, output = run(tmp_path, monkeypatch, "", "cuda", "eager", "equal:1,1")
    assert code != 0 and "2 ranks on host" in output and "start one rank per device" in output, output[-4000:]
