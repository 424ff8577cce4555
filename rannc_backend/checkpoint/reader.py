"""Reads one checkpoint, tensor by tensor, on any number of ranks and without torch.distributed.

In: the path of a checkpoint, or of a directory of them. Out: tensors by the names that the model's own
`named_parameters` gives, each compared with its checksum. Nothing in a checkpoint is code, and nothing is
run.
"""

from __future__ import annotations

import math
import os
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from rannc_backend.checkpoint.directory import checkpoint_file, find_checkpoint, read_file, read_manifest
from rannc_backend.checkpoint.manifest import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    OPTIMIZER_PREFIX,
    PLAN_FILE,
    Index,
    Manifest,
    OptimizerRecord,
    TensorRecord,
    parse,
)
from rannc_backend.checkpoint.plain_values import decode
from rannc_backend.errors import CheckpointFileError, CheckpointMismatchError
from rannc_backend.ir.plan import Plan
from rannc_backend.ir.plan_text import MAX_PLAN_CHARACTERS
from rannc_backend.kernels.plain_memory import crc32_of
from rannc_backend.settings.user_files import kind_of

_MAX_OPEN_FILES = 8


class TensorReader(Protocol):
    """What loading needs of a checkpoint, of this package or of another one: see `CheckpointReader`.

    Attributes:
        aliases: further names of tied tensors, each with the name under which the tensor is kept.
        optimizers: what was saved of each optimizer, but for tensors and `optimizer_values`.
    """

    @property
    def path(self) -> Path: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def keys(self) -> Sequence[str]: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    @property
    def optimizers(self) -> Sequence[OptimizerRecord]: ...

    def optimizer_values(self, number: int) -> Mapping[str, Mapping[str, Any]]: ...
    def file_of(self, key: str) -> str: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def tensor(self, name: str) -> torch.Tensor: ...
    def mapped(self, name: str) -> torch.Tensor: ...
    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor: ...


class CheckpointReader:
    """Reads a checkpoint tensor by tensor, on any number of ranks. Not collective.

    Args:
        path: A checkpoint, or a directory of checkpoints, of which the latest is read.

    Attributes:
        path: The checkpoint's own directory.
        manifest: Step, world size, versions; see `manifest.Manifest`.

    Raises:
        CheckpointNotFoundError: There is no complete checkpoint.
        CheckpointFileError, CheckpointVersionError: Its description is truncated, was changed, or is of a
        later
            release.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = find_checkpoint(path)
        self.manifest: Manifest = read_manifest(self.path)
        self.index: Index = parse(Index, self._vouched(INDEX_FILE, MAX_INDEX_BYTES), INDEX_FILE)
        self._records = {key: record for part in self.index.parts for key, record in part.tensors.items()}
        self._sizes = {
            name: record.num_bytes for part in self.index.parts for name, record in part.files.items()
        }
        self._open_files: OrderedDict[str, Any] = OrderedDict()
        # Memory is made for tensors before they are read: none may claim to be larger than its file.
        for key, record in self._records.items():
            if math.prod(record.shape) * self.dtype(key).itemsize > self._sizes[record.file]:
                raise self._torn(INDEX_FILE, f"{key!r} of shape {list(record.shape)} is larger than its file")

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """Number of ranks that saved it."""
        return self.manifest.world_size

    @property
    def extra(self) -> Any:
        """What was given to save_checkpoint as ``extra``."""
        return decode(self.manifest.extra, "extra")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters and persistent buffers, all names of tied ones included."""
        own = [key for key in self._records if not key.startswith(OPTIMIZER_PREFIX)]
        return (
            *own,
            *(alias for alias, name in self.index.aliases.items() if not name.startswith(OPTIMIZER_PREFIX)),
        )

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all tensors, those of the optimizers included; see `manifest`."""
        return tuple(self._records)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors, each with the name under which the tensor is kept."""
        return self.index.aliases

    @property
    def optimizers(self) -> tuple[OptimizerRecord, ...]:
        """What was saved of each optimizer, but for tensors and `optimizer_values`."""
        return self.index.parts[0].optimizers

    def optimizer_values(self, number: int) -> dict[str, Mapping[str, Any]]:
        """By parameter and name of the state: what is no tensor, as `plain_values.encode` writes it."""
        values: dict[str, Mapping[str, Any]] = {}
        for part in self.index.parts:
            if number < len(part.optimizers):
                values.update(part.optimizers[number].values)
        return values

    def file_of(self, key: str) -> str:
        """Name of the file that a tensor is in."""
        return self.record(key).file

    def plan(self) -> Plan | None:
        """The plan under which the model ran, which is also in `plan.json`; None if it had not been planned
        yet.
        """
        if PLAN_FILE not in self.manifest.files:
            return None
        return Plan.from_json(
            self._vouched(PLAN_FILE, 4 * MAX_PLAN_CHARACTERS).decode("utf-8", errors="replace")
        )

    def record(self, name: str) -> TensorRecord:
        """File, dtype and shape of a tensor, by any of its names. CheckpointMismatchError: there is none of
        that name.
        """
        record = self._records.get(self.index.aliases.get(name, name))
        if record is None:
            raise CheckpointMismatchError(
                f"the checkpoint {str(self.path)!r} has no tensor {name!r}",
                cure="build the model that was saved, or load with strict=False.",
            )
        return record

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self.record(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, without reading it."""
        record = self.record(name)
        dtype = getattr(torch, record.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise self._torn(
                record.file, f"{name!r} has the dtype {record.dtype!r}, which torch does not know"
            )
        return dtype

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, in memory of its own on the CPU.

        Raises:
            CheckpointMismatchError: there is none of that name.
            CheckpointFileError: its file is torn, or its bytes are other ones than were written.
        """
        return self.mapped(name).clone()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters and persistent buffers, for `load_state_dict` of a model in one process; tied ones
        share memory.
        """
        kept = {name: self.index.aliases.get(name, name) for name in self.names}
        tensors = {name: self.tensor(name) for name in dict.fromkeys(kept.values())}
        return {name: tensors[own] for name, own in kept.items()}

    def mapped(self, name: str) -> torch.Tensor:
        """As `tensor`, but in the memory of the file: to copy from at once, not to keep."""
        record = self.record(name)
        key = self.index.aliases.get(name, name)
        try:
            tensor = _of_its_dtype(self._file(record.file).get_tensor(key), record)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise self._torn(record.file, str(error)) from None
        if tuple(tensor.shape) != record.shape or tensor.dtype != self.dtype(name):
            raise self._torn(
                record.file,
                f"{key!r} has shape {list(tensor.shape)} and dtype {tensor.dtype}, which was written "
                "otherwise",
            )
        if crc32_of(tensor) != record.crc32:
            raise self._torn(record.file, f"the checksum of {key!r} is another one")
        return tensor

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Elements ``slices`` of a tensor: its file's size is compared, its checksum is not."""
        record = self.record(name)
        try:
            return _of_its_dtype(
                self._file(record.file).get_slice(self.index.aliases.get(name, name))[slices], record
            )
        except (SafetensorError, OSError, ValueError, RuntimeError, IndexError) as error:
            raise self._torn(record.file, str(error)) from None

    def _file(self, name: str) -> Any:
        if name not in self._open_files:
            path = self.path / name
            file = checkpoint_file(path)
            size = path.stat().st_size if kind_of(file) == "a file" else None
            if size != self._sizes[name]:
                has = "is not there" if size is None else f"has {size} bytes"
                raise self._torn(name, f"it {has}, {self._sizes[name]} were written")
            self._open_files[name] = safe_open(path, framework="pt")
            while len(self._open_files) > _MAX_OPEN_FILES:
                self._open_files.popitem(last=False)
        self._open_files.move_to_end(name)
        return self._open_files[name]

    def _vouched(self, name: str, most_bytes: int) -> bytes:
        content = read_file(self.path / name, most_bytes)
        record = self.manifest.files[name]  # type: ignore[index]
        if len(content) != record.num_bytes or zlib.crc32(content) != record.crc32:
            raise self._torn(name, "its size or checksum is another one than the manifest says")
        return content

    def _torn(self, name: str, problem: str) -> CheckpointFileError:
        return CheckpointFileError(
            f"{name} of the checkpoint {str(self.path)!r} is torn or was changed: {problem}",
            cure="load an older checkpoint: give its own directory instead of the directory of all of them.",
        )


def _of_its_dtype(tensor: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    """Files hold complex128 as pairs of float64."""
    pairs = record.dtype == "complex128" and tensor.dtype == torch.float64
    return torch.view_as_complex(tensor.contiguous()) if pairs else tensor
