"""Jobs that save small checkpoints in one process, for the tests of checkpoints: as many ranks as wanted, one
after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rannc_backend.checkpoint.directory import Disk
from rannc_backend.checkpoint.manifest import OptimizerRecord, RuntimeRecord
from rannc_backend.checkpoint.saving import SaveJob, Snapshot, begin_directory


def snapshot(step: int, tensors: Mapping[str, Tensor], **members: Any) -> Snapshot:
    """A snapshot of these tensors and not much else."""
    base = {
        "optimizers": (),
        "random": {},
        "aliases": {},
        "model_name": "Model",
        "plan_text": "",
        "runtime": RuntimeRecord(num_steps_begun=step, loss_gradient=1.0),
        "schedulers": [],
        "scaler": None,
        "extra": None,
    }
    return Snapshot(step=step, tensors=tensors, **{**base, **members})


def save(
    path: Path,
    shares: Sequence[Mapping[str, Tensor]],
    *,
    step: int = 1,
    disk: Disk | None = None,
    keep: int | None = None,
    file_bytes: int = 2**20,
    **members: Any,
) -> Path:
    """Save one share per rank; the ranks write in descending order, and rank 0 publishes."""
    disk = disk or Disk()
    temporary, name, serial = begin_directory(path, step, disk)
    jobs = [
        SaveJob(
            rank=rank,
            world_size=len(shares),
            temporary=path / temporary,
            name=name,
            serial=serial,
            keep=keep,
            snapshot=snapshot(step, share, **members),
            tensors=share,
            disk=disk,
            file_bytes=file_bytes,
        )
        for rank, share in enumerate(shares)
    ]
    for job in reversed(jobs):
        job.write_part()
    jobs[0].publish()
    return jobs[0].path


def tensors(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Random tensors by name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


NO_GROUPS = OptimizerRecord(class_name="SGD", groups=())
