"""Writes a checkpoint: every rank its part, rank 0 the manifest when all parts are there, then one rename.

In: what this rank has to write. Out: a directory that is a complete checkpoint, or nothing that a reader
would look at.

Ranks meet in the file system, not in collectives, so that the same code runs in a thread beside training: a
rank's part is complete when its `part-<rank>.json` is there. Terms as in `manifest` and `directory`.
"""

from __future__ import annotations

import datetime
import json
import logging
import platform
import secrets
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rannc_backend.checkpoint import directory
from rannc_backend.checkpoint.directory import Disk
from rannc_backend.checkpoint.manifest import (
    INDEX_FILE,
    MANIFEST_FILE,
    MAX_INDEX_BYTES,
    OPTIMIZER_PREFIX,
    PLAN_FILE,
    WEIGHTS_INDEX_FILE,
    FileRecord,
    Index,
    Manifest,
    OptimizerRecord,
    PartRecord,
    RuntimeRecord,
    parse,
    to_bytes,
)
from rannc_backend.checkpoint.tensor_storage import FILE_BYTES, SafetensorsWriter, write_tensors
from rannc_backend.errors import CheckpointWriteError

logger = logging.getLogger(__name__)

# Longest wait for the next rank's part; a rank that has died ends the whole job sooner.
PART_LIMIT_SECONDS = 3600.0
# A file that another host has made may take so long to be seen through a network file system.
SEEN_LIMIT_SECONDS = 30.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one rank knows of a checkpoint before anything is written.

    Attributes:
        tensors: this rank's share, by key; on a background save in memory of its own.
        aliases, model_name, plan_text, runtime, schedulers, scaler, extra: what rank 0 writes; equal on all
        ranks.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    optimizers: tuple[OptimizerRecord, ...]
    random: Mapping[str, Any]
    aliases: Mapping[str, str]
    model_name: str
    plan_text: str
    runtime: RuntimeRecord
    schedulers: Any
    scaler: Any
    extra: Any

    def copied(self) -> dict[str, torch.Tensor]:
        """The tensors on the host, in memory that training does not write to."""
        return {key: tensor.to("cpu", copy=True) for key, tensor in self.tensors.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One rank's work on one checkpoint. ``temporary``: the directory it is written in; ``name``: the name it
    will have beside.
    """

    rank: int
    world_size: int
    temporary: Path
    name: str
    serial: int
    keep: int | None
    snapshot: Snapshot
    tensors: Mapping[str, torch.Tensor]
    disk: Disk = field(default_factory=Disk)
    file_bytes: int = FILE_BYTES
    begun: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> Path:
        """Where the checkpoint will be."""
        return self.temporary.with_name(self.name)

    def write_part(self) -> None:
        """Write this rank's tensors and, when they are on disk, its record."""
        writer = SafetensorsWriter(self.temporary, self.rank, self.disk, self.file_bytes)
        write_tensors(self.tensors, writer)
        part = PartRecord(
            rank=self.rank,
            files=writer.files,
            tensors=writer.tensors,
            optimizers=self.snapshot.optimizers,
            random=self.snapshot.random,
        )
        self._write(_part_file(self.rank), to_bytes(part))

    def give_up(self, problem: str) -> None:
        """Tell rank 0 that this rank's part will not come, as far as the disk lets it."""
        try:
            (self.temporary / _failure_file(self.rank)).write_text(problem[:2000], encoding="utf-8")
        except OSError:
            logger.debug("rank %d could not even say that its part failed", self.rank)

    def publish(self) -> None:
        """On rank 0: wait for all parts, write index, plan and manifest, give the checkpoint its name, remove
        older ones.
        """
        parts = [self._await_part(rank) for rank in range(self.world_size)]
        names = [name for part in parts for name in part.tensors]
        files = {INDEX_FILE: to_bytes(Index(parts=tuple(parts), aliases=self._aliases(set(names))))}
        if self.snapshot.plan_text:
            files[PLAN_FILE] = self.snapshot.plan_text.encode()
        for name, content in files.items():
            self._write(name, content)
        self._write(WEIGHTS_INDEX_FILE, _weights_index(parts))
        for rank in range(self.world_size):
            self.disk.remove(self.temporary / _part_file(rank))
        self._write(MANIFEST_FILE, to_bytes(self._manifest(files)))
        directory.publish(self.temporary, self.name, self.disk)
        size = sum(record.num_bytes for part in parts for record in part.files.values())
        logger.info(
            "checkpoint %s: %.1f MB in %.2f s", self.path, size / 2**20, time.monotonic() - self.begun
        )
        directory.rotate(self.temporary.parent, self.keep, self.disk)

    def _write(self, name: str, content: bytes) -> None:
        """A whole file or none of that name."""
        place = self.temporary / name
        unnamed = place.with_name(f"{name}.unfinished")
        self.disk.write(unnamed, content)
        self.disk.sync(unnamed)
        self.disk.rename(unnamed, place)

    def _await_part(self, rank: int) -> PartRecord:
        place, failure = self.temporary / _part_file(rank), self.temporary / _failure_file(rank)
        begin = time.monotonic()
        while not place.exists():
            if failure.exists():
                raise CheckpointWriteError(
                    f"rank {rank} could not write its part of {str(self.path)!r}: {_read(failure)}"
                )
            if time.monotonic() - begin > PART_LIMIT_SECONDS:
                raise CheckpointWriteError(
                    f"rank {rank}'s part of {str(self.path)!r} has not come within {PART_LIMIT_SECONDS:g} s",
                    cure="see whether all hosts write to the same file system, and whether it is overloaded.",
                )
            time.sleep(_POLL_SECONDS)
        part = parse(PartRecord, directory.read_file(place, MAX_INDEX_BYTES), place.name)
        for name, record in part.files.items():
            if (self.temporary / name).stat().st_size != record.num_bytes:
                raise CheckpointWriteError(
                    f"{name} of {str(self.path)!r} has another size than rank {rank} has written"
                )
        return part

    def _aliases(self, names: set[str]) -> dict[str, str]:
        return {alias: name for alias, name in self.snapshot.aliases.items() if name in names}

    def _manifest(self, files: Mapping[str, bytes]) -> Manifest:
        from rannc_backend import __version__

        snapshot = self.snapshot
        return Manifest(
            serial=self.serial,
            step=snapshot.step,
            world_size=self.world_size,
            saved_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            versions={
                "rannc_backend": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            model_name=snapshot.model_name,
            files={
                name: FileRecord(num_bytes=len(content), crc32=zlib.crc32(content))  # type: ignore[misc]
                for name, content in files.items()
            },
            runtime=snapshot.runtime,
            schedulers=snapshot.schedulers,
            scaler=snapshot.scaler,
            extra=snapshot.extra,
        ).sealed()


def begin_directory(path: Path, step: int, disk: Disk) -> tuple[str, str, int]:
    """On rank 0: make the directory to write in; returns its name, the checkpoint's name and its serial
    number.
    """
    disk.make_directory(path)
    directory.remove_leftovers(path, disk)
    name = directory.free_name(path, step)
    temporary = directory.temporary_name(name, secrets.token_hex(4))
    disk.make_directory(path / temporary)
    found = directory.checkpoints_in(path)
    return temporary, name, found[-1].manifest.serial + 1 if found else 0


def require_seen(path: Path) -> None:
    """Wait until this rank sees a directory that rank 0 has made.

    Raises:
        CheckpointWriteError: it does not.
    """
    begin = time.monotonic()
    while not path.is_dir():
        if time.monotonic() - begin > SEEN_LIMIT_SECONDS:
            raise CheckpointWriteError(
                f"rank 0 has made the directory {str(path)!r}, and this rank does not see it",
                cure="give a directory on a file system that all hosts share, with the same path on each.",
            )
        time.sleep(_POLL_SECONDS)


def _part_file(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _failure_file(rank: int) -> str:
    return f"failed-{rank:05d}.txt"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:2000]
    except OSError:
        return "it did not say why"


def _weights_index(parts: list[PartRecord]) -> bytes:
    weights = {
        key: record.file
        for part in parts
        for key, record in part.tensors.items()
        if not key.startswith(OPTIMIZER_PREFIX)
    }
    size = sum(
        record.num_bytes for part in parts for name, record in part.files.items() if name.startswith("model")
    )
    return json.dumps({"metadata": {"total_size": size}, "weight_map": weights}, indent=2).encode() + b"\n"
