"""The directory of a run's checkpoints: which are complete, which is the latest, which go, and how one is
published in one step.

In: paths. Out: paths, and changes of the directory through a `Disk`, whose methods are the only file
operations of saving.

Terms. A checkpoint is the directory `step-00000120` in the run's directory, `step-00000120-2` when step 120
was saved again. It is *complete* when it holds a manifest, and gets its name by one rename when all of it is
on disk. Before, it is `.step-00000120.tmp-<token>`, which no reader looks at and the next save removes. The
*latest* has the greatest serial number, which is the last that was saved: after a return to step 100, step
110 is later than step 120 of before.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from rannc_backend.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest
from rannc_backend.errors import CheckpointFileError, CheckpointNotFoundError, RanncError
from rannc_backend.kernels.plain_memory import plain_memory
from rannc_backend.settings.user_files import NEW_FILE, UserFile, kind_of, names_in, read_bytes

_NAME = re.compile(r"step-(?P<step>[0-9]{8,})(?:-(?P<attempt>[0-9]+))?")
_TEMPORARY = re.compile(r"\.step-[0-9-]+\.tmp-[0-9a-f]+")


class Disk:
    """File operations of saving; what `write` has written may be lost in a crash until `sync` has returned,
    and so a rename.
    """

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, content: bytes) -> None:
        with os.fdopen(_create(path), "wb") as file:
            file.write(content)

    def write_tensors(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """A safetensors file of contiguous CPU tensors; complex128, which the format lacks, as pairs of
        float64.
        """
        descriptor = _create(path)
        try:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        finally:
            os.close(descriptor)
        save_file(
            {name: _in_the_format(tensor) for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
        # The library makes files that their owner alone can read.
        os.chmod(path, mode)

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


def _create(path: Path) -> int:
    """A new file with the mode that the user's umask gives; never one that is there, nor one that a link
    leads to.
    """
    return os.open(path, NEW_FILE, 0o666)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest


def checkpoint_file(path: Path) -> UserFile:
    """A file of a checkpoint, to be read.

    Raises:
        CheckpointFileError: it is a link that leads out of the directory that it is in.
    """
    file = UserFile(
        path=path, what="checkpoint's file", error=CheckpointFileError, cure="load another checkpoint."
    )
    if kind_of(file) and Path(os.path.realpath(path)).parent != Path(os.path.realpath(path.parent)):
        raise file.failed("cannot read the", "it is a link that leads out of the checkpoint")
    return file


def read_file(path: Path, most_bytes: int) -> bytes:
    """A file's bytes. CheckpointFileError: it cannot be read, or is larger than anything that is written
    here.
    """
    return read_bytes(checkpoint_file(path), most_bytes)


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
    cure = "give the directory that was given to save_checkpoint."
    named = UserFile(path=place, what="checkpoint", error=CheckpointNotFoundError, cure=cure)
    kind = kind_of(named)
    if kind != "a directory":
        raise named.failed("there is no", f"it {f'is {kind}' if kind else 'does not exist'}")
    if _has_manifest(place):
        return place
    found, problems = _survey(named)
    # Never an older one in silence: no crash leaves a manifest that cannot be read.
    if problems:
        raise problems[0]
    if found:
        return max(found, key=lambda item: item.manifest.serial).path
    raise CheckpointNotFoundError(
        f"no complete checkpoint in {str(place)!r}: there is no {MANIFEST_FILE} in it, nor in a directory "
        "step-... in it",
        cure="give the directory that was given to save_checkpoint; a save that was cut short leaves nothing "
        "to load.",
    )


def checkpoints_in(path: Path) -> list[Found]:
    """Complete checkpoints of a run's directory, the latest last. Those whose manifest cannot be read are
    left out.
    """
    named = UserFile(path=path, what="directory of checkpoints", error=CheckpointFileError)
    return (
        sorted(_survey(named)[0], key=lambda item: item.manifest.serial)
        if kind_of(named) == "a directory"
        else []
    )


def _survey(place: UserFile) -> tuple[list[Found], list[RanncError]]:
    found: list[Found] = []
    problems: list[RanncError] = []
    for name in names_in(place):
        entry = Path(place.path, name)
        if not _NAME.fullmatch(name):
            continue
        try:
            if _has_manifest(entry):
                found.append(Found(path=entry, manifest=read_manifest(entry)))
        except CheckpointFileError as error:
            problems.append(error)
    return found, problems


def _has_manifest(place: Path) -> bool:
    file = UserFile(
        path=place / MANIFEST_FILE,
        what="checkpoint's file",
        error=CheckpointFileError,
        cure="load another checkpoint.",
    )
    return os.path.isdir(place) and bool(kind_of(file))


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
    """Remove all but the last ``keep`` complete checkpoints (None: all stay), and earlier ones of the step
    that was saved last.
    """
    found = checkpoints_in(path)
    doomed = [item for item in found[:-1] if item.manifest.step == found[-1].manifest.step]
    rest = [item for item in found if item not in doomed]
    if keep is not None:
        doomed += rest[: len(rest) - keep]
    for item in doomed:
        # Without its manifest it is no checkpoint any more, however far the rest of its removal comes. Of a
        # link the link goes.
        if not item.path.is_symlink():
            disk.remove(item.path / MANIFEST_FILE)
        disk.remove(item.path)


def crc32_of(tensor: torch.Tensor) -> int:
    """CRC-32 of a CPU tensor's elements in order, as they are in memory and in files."""
    flat = plain_memory(tensor.detach()).reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)


def _in_the_format(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.dtype == torch.complex128 else tensor
