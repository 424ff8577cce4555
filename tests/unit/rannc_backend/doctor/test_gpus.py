"""GPUs that somebody else uses, as a faked nvidia-smi tells."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rannc_backend.doctor import gpus

FREE = "0, GPU-aa, 4, 81559, 0\n1, GPU-bb, 4, 81559, 0\n"
BUSY = "0, GPU-aa, 30210, 81559, 97\n1, GPU-bb, 4, 81559, 0\n"
PROCESS = "GPU-aa, 4711, /usr/bin/python3, 30000\n"


def smi(folder: Path, gpu_lines: str, process_lines: str = "", code: int = 0) -> dict[str, str]:
    program = folder / "nvidia-smi"
    script = f"""#!/bin/sh
case "$1" in
*query-gpu*) printf '%s' '{gpu_lines}' ;;
*query-compute-apps*) printf '%s' '{process_lines}' ;;
esac
exit {code}
"""
    program.write_text(script, encoding="utf-8")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/bin:/usr/bin"}


def test_gpus_that_are_free(tmp_path: Path) -> None:
    found = gpus.find_gpu_use(smi(tmp_path, FREE), num_devices=2)
    assert (found.status, found.text) == ("ok", "2 free (at most 0.0 GB taken), by nvidia-smi")


def test_gpus_in_use_are_named_with_their_processes(tmp_path: Path) -> None:
    found = gpus.find_gpu_use(smi(tmp_path, BUSY, PROCESS), num_devices=2)
    assert found.status == "warning"
    assert found.text == "1 of 2 in use: GPU 0: 29.5 GB of 79.6 GB, 97 % of the time (python3 (pid 4711))"
    assert "CUDA_VISIBLE_DEVICES=1" in found.cure


@pytest.mark.parametrize(
    ("visible", "status"), [("1", "ok"), ("GPU-bb", "ok"), ("0,1", "warning"), ("", "ok")]
)
def test_only_visible_gpus_count(tmp_path: Path, visible: str, status: str) -> None:
    environ = smi(tmp_path, BUSY, PROCESS) | {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus.find_gpu_use(environ, num_devices=1).status == status


def test_an_idle_process_counts_and_ones_own_does_not() -> None:
    (other,) = gpus.parse_use("0, GPU-aa, 4, 81559, 0", PROCESS, visible=None)
    assert other.is_busy
    (own,) = gpus.parse_use("0, GPU-aa, 4, 81559, 0", f"GPU-aa, {os.getpid()}, python, 10", visible=None)
    assert not own.is_busy


def test_what_is_not_said_is_no_number() -> None:
    (use,) = gpus.parse_use(
        "x\n0, GPU-aa, 10, 100, [N/A]\n1, GPU-bb, [N/A], [N/A], 3\n", "GPU-aa, [N/A], x, y", visible=None
    )
    assert use.percent is None and use.index == "0"


def test_a_program_that_fails(tmp_path: Path) -> None:
    environ = smi(tmp_path, "NVIDIA-SMI has failed because it could not communicate with the driver.", code=9)
    assert gpus.find_gpu_use(environ, num_devices=1).status == "problem"
    found = gpus.find_gpu_use(environ, num_devices=0)
    assert found.status == "warning" and "could not communicate" in found.text and found.cure


def test_without_the_program() -> None:
    assert gpus.find_gpu_use({"PATH": "/missing"}, num_devices=0).text == "none is visible"
    full = gpus.GpuUse(index="0", used_bytes=40 * 2**30, total_bytes=80 * 2**30)
    found = gpus.check_gpu_use([full], source="torch", num_devices=1)
    assert found.status == "warning" and "no process of this container" in found.text
