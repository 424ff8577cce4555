"""Who else uses this host's GPUs: memory that is taken, processes that run, as nvidia-smi tells or else
torch.

In: `nvidia-smi` of PATH, CUDA_VISIBLE_DEVICES. Out: a `Finding`. Nothing is started on a GPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rannc_backend.doctor.findings import Finding, output_of

_LIMIT_SECONDS = 20.0
_BUSY_BYTES = 10**9  # a driver and a desktop take some hundreds of MB
_BUSY_FRACTION = 0.05
_CONTEXT_BYTES = 5 * 10**8  # what asking torch takes by itself
_BUSY_PERCENT = 30
_MAX_NAMED = 4
_GPU_FIELDS = "index,uuid,memory.used,memory.total,utilization.gpu"
_PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """What is taken of one GPU. `percent`: of the time, in the last second; None if unknown. `processes`: as
    "python3 (pid 7)".
    """

    index: str
    used_bytes: int
    total_bytes: int
    percent: int | None = None
    processes: tuple[str, ...] = ()

    @property
    def is_busy(self) -> bool:
        """Whether a job would miss what is taken."""
        is_full = self.used_bytes > max(_BUSY_BYTES, _BUSY_FRACTION * self.total_bytes)
        return is_full or bool(self.processes) or (self.percent or 0) >= _BUSY_PERCENT


def find_gpu_use(environ: Mapping[str, str], *, num_devices: int) -> Finding:
    """The check of the GPUs that this process may use."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return check_gpu_use(
            torch_use(num_devices), source="torch" if num_devices else "", num_devices=num_devices
        )
    code, gpus, error = output_of(
        [program, f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"], _LIMIT_SECONDS
    )
    if code != 0:
        problem = (error or gpus).strip().splitlines()[-1:] or [f"exit code {code}"]
        return Finding(
            name="GPU use",
            status="problem" if num_devices else "warning",
            text=f"{program} fails: {problem[0][:200]}",
            cure="see whether the driver is loaded and fits the program (nvidia-smi by hand); in a "
            "container, start it with the GPUs.",
        )
    _, processes, _ = output_of(
        [program, f"--query-compute-apps={_PROCESS_FIELDS}", "--format=csv,noheader,nounits"], _LIMIT_SECONDS
    )
    uses = parse_use(gpus, processes, visible=environ.get("CUDA_VISIBLE_DEVICES"))
    return check_gpu_use(uses, source="nvidia-smi", num_devices=num_devices)


def check_gpu_use(uses: Sequence[GpuUse], *, source: str, num_devices: int) -> Finding:
    """Whether somebody else uses the GPUs."""
    if not uses:
        text = "none is visible" if num_devices == 0 else "unknown: neither nvidia-smi nor torch tells"
        return Finding(name="GPU use", status="ok", text=text)
    busy = [use for use in uses if use.is_busy]
    if not busy:
        most = max(uses, key=lambda use: use.used_bytes)
        return Finding(
            name="GPU use",
            status="ok",
            text=f"{len(uses)} free (at most {_gb(most.used_bytes)} taken), by {source}",
        )
    texts = [_use_text(use) for use in busy[:_MAX_NAMED]] + (
        [f"and {len(busy) - _MAX_NAMED} more"] if len(busy) > _MAX_NAMED else []
    )
    free = [use.index for use in uses if not use.is_busy]
    others = f"use the others (CUDA_VISIBLE_DEVICES={','.join(free)}), or " if free else ""
    cure = f"{others}wait for these processes or end your own of them: stages would find less memory than planned, and run slower."
    return Finding(
        name="GPU use",
        status="warning",
        text=f"{len(busy)} of {len(uses)} in use: {'; '.join(texts)}",
        cure=cure,
    )


def parse_use(gpus: str, processes: str, *, visible: str | None) -> list[GpuUse]:
    """What nvidia-smi has printed, for the GPUs that CUDA_VISIBLE_DEVICES names; None: all. Lines that say
    something else are left out.
    """
    running: dict[str, list[str]] = {}
    for cells in _rows(processes, 4):
        if cells[1].isdecimal() and int(cells[1]) != os.getpid():
            running.setdefault(cells[0], []).append(f"{os.path.basename(cells[2])[:40]} (pid {cells[1]})")
    uses = []
    for index, uuid, used, total, percent in _rows(gpus, 5):
        if used.isdecimal() and total.isdecimal() and _is_visible(index, uuid, visible):
            share = int(percent) if percent.isdecimal() else None
            found = tuple(running.get(uuid, ()))
            use = GpuUse(
                index=index,
                used_bytes=int(used) * 2**20,
                total_bytes=int(total) * 2**20,
                percent=share,
                processes=found,
            )
            uses.append(use)
    return uses


def torch_use(num_devices: int) -> list[GpuUse]:
    """As torch tells, which needs a context on each GPU: memory alone."""
    if not num_devices:
        return []
    import torch

    found = []
    for index in range(num_devices):
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            GpuUse(index=str(index), used_bytes=max(0, total - free - _CONTEXT_BYTES), total_bytes=total)
        )
    return found


def _rows(text: str, num_cells: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == num_cells]


def _is_visible(index: str, uuid: str, visible: str | None) -> bool:
    if visible is None:
        return True
    return any(
        name == index or (name and uuid.startswith(name))
        for name in (part.strip() for part in visible.split(","))
    )


def _use_text(use: GpuUse) -> str:
    processes = ", ".join(use.processes[:_MAX_NAMED]) or "no process of this container"
    share = "" if use.percent is None else f", {use.percent} % of the time"
    return f"GPU {use.index}: {_gb(use.used_bytes)} of {_gb(use.total_bytes)}{share} ({processes})"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GB"
