"""The directory of a run's checkpoints: which are complete, which is the latest, which go, and how one is published in one step.

In: paths. Out: paths, and changes of the directory through a `Disk`, whose methods are the only file operations of saving.

Terms. A checkpoint is the directory `step-00000120` in the run's directory, `step-00000120-2` when step 120 was saved again. It is
*complete* when it holds a manifest, and gets its name by one rename when all of it is on disk. Before, it is `.step-00000120.tmp-<token>`,
which no reader looks at and the next save removes. The *latest* has the greatest serial number, which is the last that was saved: after
a return to step 100, step 110 is later than step 120 of before.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from rannc_backend.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest
from rannc_backend.errors import CheckpointFileError, CheckpointNotFoundError, RanncError

_NAME = re.compile(r"step-(?P<step>[0-9]{8,})(?:-(?P<attempt>[0-9]+))?")
_TEMPORARY = re.compile(r"\.step-[0-9-]+\.tmp-[0-9a-f]+")


class Disk:
    """File operations of saving; what `write` has written may be lost in a crash until `sync` has returned, and so a rename."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)

    def write_tensors(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """A safetensors file of contiguous CPU tensors."""
        save_file(dict(tensors), path, metadata={"format": "pt"})

    def sync(self, path: Path) -> None:
        """A file's content, or a directory's names, are on disk when this returns."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, destination: Path) -> None:
        os.rename(source, destination)

    def remove(self, path: Path) -> None:
        """A file, or a directory with all in it; nothing where there is none."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest


def read_file(path: Path, most_bytes: int) -> bytes:
    """A file's bytes. CheckpointFileError: it cannot be read, or is larger than anything that is written here."""
    try:
        # Not what a device or a pipe gives: that may never end.
        if path.exists() and not path.is_file():
            raise CheckpointFileError(f"{str(path)!r} is not a file", cure="load another checkpoint.")
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointFileError(f"cannot read {str(path)!r}: {reason}", cure="load another checkpoint.") from None
    if len(content) > most_bytes:
        raise CheckpointFileError(f"{str(path)!r} has more than {most_bytes} bytes", cure="load another checkpoint.")
    return content


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in the directory ``path``."""
    return Manifest.read(read_file(path / MANIFEST_FILE, MAX_MANIFEST_BYTES))


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """``path`` itself if it is a checkpoint, else the latest complete one in it.

    Raises:
        CheckpointNotFoundError: there is none; names what is there instead.
        CheckpointFileError: a manifest cannot be read, so that nobody knows which one is the latest.
    """
    place = Path(path)
    if (place / MANIFEST_FILE).exists():
        return place
    if not place.is_dir():
        what = "is a file" if place.exists() else "does not exist"
        raise CheckpointNotFoundError(
            f"no checkpoint at {str(place)!r}: it {what}", cure="give the directory that was given to save_checkpoint."
        )
    found, problems = _survey(place)
    # Never an older one in silence: no crash leaves a manifest that cannot be read.
    if problems:
        raise problems[0]
    if found:
        return max(found, key=lambda item: item.manifest.serial).path
    raise CheckpointNotFoundError(
        f"no complete checkpoint in {str(place)!r}: there is no {MANIFEST_FILE} in it, nor in a directory step-... in it",
        cure="give the directory that was given to save_checkpoint; a save that was cut short leaves nothing to load.",
    )


def checkpoints_in(path: Path) -> list[Found]:
    """Complete checkpoints of a run's directory, the latest last. Those whose manifest cannot be read are left out."""
    return sorted(_survey(path)[0], key=lambda item: item.manifest.serial) if path.is_dir() else []


def _survey(path: Path) -> tuple[list[Found], list[RanncError]]:
    found: list[Found] = []
    problems: list[RanncError] = []
    for entry in sorted(path.iterdir()):
        if _NAME.fullmatch(entry.name) and (entry / MANIFEST_FILE).exists():
            try:
                found.append(Found(path=entry, manifest=read_manifest(entry)))
            except CheckpointFileError as error:
                problems.append(error)
    return found, problems


def free_name(path: Path, step: int) -> str:
    """A name in ``path`` for a checkpoint of ``step``: nothing that is there is ever written over."""
    base = f"step-{step:08d}"
    attempts = [0]
    for entry in path.iterdir():
        match = _NAME.fullmatch(entry.name)
        if match and int(match["step"]) == step:
            attempts.append(int(match["attempt"] or 1))
    return base if max(attempts) == 0 else f"{base}-{max(attempts) + 1}"


def temporary_name(name: str, token: str) -> str:
    """Under what name the checkpoint ``name`` is written."""
    return f".{name}.tmp-{token}"


def remove_leftovers(path: Path, disk: Disk) -> None:
    """Remove what saves that were cut short have left in ``path``."""
    for entry in path.iterdir():
        if _TEMPORARY.fullmatch(entry.name):
            disk.remove(entry)


def publish(temporary: Path, name: str, disk: Disk) -> Path:
    """Give a written checkpoint its name; from here on it is the latest."""
    final = temporary.with_name(name)
    disk.sync(temporary)
    disk.rename(temporary, final)
    disk.sync(final.parent)
    return final


def rotate(path: Path, keep: int | None, disk: Disk) -> None:
    """Remove all but the last ``keep`` complete checkpoints (None: all stay), and earlier ones of the step that was saved last."""
    found = checkpoints_in(path)
    doomed = [item for item in found[:-1] if item.manifest.step == found[-1].manifest.step]
    rest = [item for item in found if item not in doomed]
    if keep is not None:
        doomed += rest[: len(rest) - keep]
    for item in doomed:
        # Without its manifest it is no checkpoint any more, however far the rest of its removal comes.
        disk.remove(item.path / MANIFEST_FILE)
        disk.remove(item.path)
