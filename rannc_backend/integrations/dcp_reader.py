"""Reads directories of `torch.distributed.checkpoint` (DCP) tensor by tensor, in one process.

In: a directory that `torch.distributed.checkpoint.save` wrote. Out: a `TensorReader` of the model's tensors and of the
optimizers' states. `.metadata` of such a directory is a pickle. It is read by an unpickler that makes nothing but DCP's
records of names, shapes and places; tensors and values are read with ``weights_only=True``. So no file runs code.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import math
import os
import pathlib
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from rannc_backend.checkpoint.directory import checkpoint_file
from rannc_backend.checkpoint.manifest import OPTIMIZER_PREFIX, GroupRecord, OptimizerRecord
from rannc_backend.checkpoint.plain_values import encode
from rannc_backend.errors import CheckpointFileError, CheckpointMismatchError, CheckpointNotFoundError
from rannc_backend.errors.base import did_you_mean, nearest, shown
from rannc_backend.runtime.torch_internals import outside_of_traces
from rannc_backend.settings.user_files import UserFile, kind_of, names_in, read_bytes

METADATA_FILE = ".metadata"
_MAX_METADATA_BYTES = 2**30
_RECORDS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
Path_ = tuple[Any, ...]


class DistributedReader:
    """Reads a directory of DCP tensor by tensor; a `TensorReader`. Not collective.

    Args:
        path: The ``checkpoint_id`` of `dcp.save`.
        model_at, optimizer_at: Keys that lead to the model's and the optimizer's state.

    Raises:
        CheckpointNotFoundError: There is no such directory, or nothing of DCP in it.
        CheckpointFileError: The metadata cannot be read, or is none of DCP.
    """

    def __init__(self, path: str | os.PathLike[str], model_at: Path_, optimizer_at: Path_) -> None:
        self.path = Path(path)
        self.aliases: dict[str, str] = {}
        self.optimizers: tuple[OptimizerRecord, ...] = ()
        self._model_prefix = "".join(f"{key}." for key in model_at)
        self._optimizer_prefix = "".join(f"{key}." for key in optimizer_at)
        self._described, self._places = _read_metadata(self.path)
        tensors = [name for name, each in self._described.items() if isinstance(each, TensorStorageMetadata)]
        self._own = [
            name.removeprefix(self._model_prefix)
            for name in tensors
            if name.startswith(self._model_prefix)
            and (self._model_prefix or not name.startswith(self._optimizer_prefix))
        ]
        if not self._own:
            raise CheckpointMismatchError(
                f"the checkpoint {str(self.path)!r} has no tensors under {self._model_prefix[:-1]!r}",
                cure=f"give model_key=... what leads to the model's state; there are: "
                f"{', '.join(sorted({name.partition('.')[0] for name in self._described})[:8])}.",
            )
        self._flat_of = {name: f"{self._model_prefix}{name}" for name in self._own}
        self._values: list[dict[str, dict[str, Any]]] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model's tensors, further names of tied ones included."""
        return (*self._own, *self.aliases)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all tensors, those of the optimizers included; see `checkpoint.manifest`."""
        return tuple(self._flat_of)

    def stand_for(self, aliases: Mapping[str, str]) -> None:
        """Let another name of a tied tensor stand for its first one where that is not there."""
        there = set(self._own)
        for alias, name in aliases.items():
            if alias in there and name not in there:
                self.aliases.setdefault(name, alias)

    def divide(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Read the parameter groups and find the states, for these optimizers in order.

        Raises:
            CheckpointMismatchError: There is no state of an optimizer, or another number of groups.
        """
        groups = self._groups()
        counts = [len(optimizer.param_groups) for optimizer in optimizers]
        if len(groups) != sum(counts):
            raise CheckpointMismatchError(
                f"the checkpoint {str(self.path)!r} has {len(groups)} parameter group(s) under "
                f"{self._optimizer_prefix[:-1]!r}, the optimizers have {sum(counts)}",
                cure="make the same parameter groups as when it was saved, give optimizer_key=... what leads "
                "to the optimizer's state, or load with optimizer=None.",
            )
        owner: dict[str, int] = {}
        records = []
        for number, (optimizer, count) in enumerate(zip(optimizers, counts, strict=True)):
            own, groups = groups[:count], groups[count:]
            owner.update({name: number for group in own for name in group.parameters})
            records.append(OptimizerRecord(class_name=type(optimizer).__name__, groups=tuple(own), values={}))
        self.optimizers = tuple(records)
        self._values = [{} for _ in optimizers]
        prefix = f"{self._optimizer_prefix}state."
        for flat, described in self._described.items():
            name, _, local = flat.removeprefix(prefix).rpartition(".")
            if not flat.startswith(prefix) or name not in owner:
                continue
            number = owner[name]
            if isinstance(described, TensorStorageMetadata):
                self._flat_of[f"{OPTIMIZER_PREFIX}{number}/{self.aliases.get(name, name)}/{local}"] = flat
            else:
                self._values[number].setdefault(name, {})[local] = encode(self._value(flat), flat)

    def _groups(self) -> list[GroupRecord]:
        prefix = f"{self._optimizer_prefix}param_groups."
        groups: dict[int, dict[str, Any]] = {}
        for flat, described in self._described.items():
            number, _, key = flat.removeprefix(prefix).partition(".")
            if not flat.startswith(prefix) or not number.isdecimal():
                continue
            is_tensor = isinstance(described, TensorStorageMetadata)
            value = self._assemble(flat) if is_tensor else self._value(flat)
            groups.setdefault(int(number), {})[key] = value
        found = []
        for index in sorted(groups):
            names = groups[index].pop("params", None)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise self._torn(METADATA_FILE, f"parameter group {index} has no list of names")
            options = {key: encode(value, f"option {key!r}") for key, value in groups[index].items()}
            found.append(GroupRecord(parameters=tuple(names), options=options))
        return found

    def optimizer_values(self, number: int) -> Mapping[str, Mapping[str, Any]]:
        """By parameter and name of the state: what is no tensor."""
        return self._values[number]

    def file_of(self, key: str) -> str:
        """Name of the file that a tensor, or its first part, is in."""
        flat = self._flat(key)
        return str(self._place(flat, self._described[flat].chunks[0]).relative_path)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._described[self._flat(name)].size)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, without reading it."""
        dtype: torch.dtype = self._described[self._flat(name)].properties.dtype
        return dtype

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, on the CPU.

        Raises:
            CheckpointMismatchError: There is none of that name.
            CheckpointFileError: A file is missing, truncated, or has something else there.
        """
        return self._assemble(self._flat(name))

    mapped = tensor

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Elements ``slices`` of a tensor."""
        return self.tensor(name)[slices]

    def _flat(self, name: str) -> str:
        flat = self._flat_of.get(self.aliases.get(name, name))
        if flat is None:
            raise CheckpointMismatchError(
                f"the checkpoint {str(self.path)!r} has no tensor {name!r}",
                cure=f"{did_you_mean(nearest(name, self._flat_of))}build the model that was saved, or load "
                "with strict=False.",
            )
        return flat

    def _assemble(self, flat: str) -> torch.Tensor:
        described = self._described[flat]
        whole: torch.Tensor | None = None
        num_elements = 0
        for chunk in described.chunks:
            place = self._place(flat, chunk)
            piece = self._load(place)
            if not isinstance(piece, torch.Tensor) or (tuple(piece.shape), piece.dtype) != (
                tuple(chunk.sizes),
                described.properties.dtype,
            ):
                raise self._torn(place.relative_path, f"{flat!r} is another tensor than the metadata says")
            num_elements += piece.numel()
            if tuple(chunk.sizes) == tuple(described.size):
                return piece.clone() if piece.untyped_storage().nbytes() > piece.nbytes else piece
            if whole is None:
                whole = torch.empty(described.size, dtype=described.properties.dtype)
            for dim, (begin, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                if begin + length > whole.shape[dim]:
                    raise self._torn(METADATA_FILE, f"{flat!r} has a part outside of it")
            whole[tuple(map(_slice, chunk.offsets, chunk.sizes))] = piece
        if whole is None or num_elements != whole.numel():
            raise self._torn(METADATA_FILE, f"{flat!r} has parts of {num_elements} elements together")
        return whole

    def _place(self, flat: str, chunk: ChunkStorageMetadata | None) -> Any:
        index = MetadataIndex(flat, None if chunk is None else chunk.offsets)
        place = self._places.get(index)
        if place is None:
            raise self._torn(METADATA_FILE, f"there is no place of {flat!r}")
        if getattr(place, "transform_descriptors", None):
            raise CheckpointFileError(
                f"{flat!r} in {str(self.path)!r} was transformed by an extension of DCP",
                cure="save it without compression or other extensions.",
            )
        return place

    def _value(self, flat: str) -> Any:
        return self._load(self._place(flat, None))

    def _load(self, place: Any) -> Any:
        path = self.path / place.relative_path
        if path.parent != self.path:
            raise self._torn(METADATA_FILE, f"the file {shown(place.relative_path)} is not in the directory")
        file = checkpoint_file(path)
        try:
            if kind_of(file) != "a file":
                raise self._torn(place.relative_path, "there is no such file")
            with open(path, "rb") as opened:
                opened.seek(place.offset)
                content = opened.read(place.length)
            # The values of a model on "meta" are read within its first call.
            with outside_of_traces():
                return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except CheckpointFileError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the bytes of a file make torch.load raise
            raise self._torn(place.relative_path, str(error).splitlines()[0] if str(error) else "") from None

    def _torn(self, name: str, problem: str) -> CheckpointFileError:
        return CheckpointFileError(
            f"{name} of the checkpoint {str(self.path)!r} is torn or was changed: {problem}",
            cure="load another checkpoint.",
        )


def _slice(begin: int, length: int) -> slice:
    return slice(begin, begin + length)


class _Unpickler(pickle.Unpickler):
    """Makes DCP's records, and what they are made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(sys.modules.get(module), name, None) if "." not in name else None
        if module in _RECORDS and isinstance(found, type):
            is_own = found.__module__ == module
            if is_own and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)):
                return found
        is_path = isinstance(found, type) and issubclass(found, pathlib.PurePath)
        is_value = isinstance(found, torch.dtype | torch.layout) or found is torch.Size
        if is_path or is_value:
            return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("builtins", "getattr"):
            return _member
        _refuse(module, name)


def _member(kind: Any, name: str) -> enum.Enum:
    """Of an enumeration of DCP's, as the first releases of Python 3.11 write one."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    _refuse("builtins", "getattr")


def _layout(name: str) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.layout) else torch.strided


def _refuse(module: str, name: str) -> NoReturn:
    raise pickle.UnpicklingError(f"it names {module}.{name}, which is no record of DCP")


def _read_metadata(path: Path) -> tuple[dict[str, Any], dict[MetadataIndex, Any]]:
    cure = "give the checkpoint_id that was given to torch.distributed.checkpoint.save."
    named = UserFile(path=path, what="checkpoint", error=CheckpointNotFoundError, cure=cure)
    kind = kind_of(named)
    if kind != "a directory":
        raise named.failed("cannot read the", f"it is {kind}" if kind else "there is nothing of that name")
    there = names_in(named)
    if METADATA_FILE not in there:
        raise named.failed(
            "cannot read the", f"there is no {METADATA_FILE} in it, but {', '.join(there[:8]) or 'nothing'}"
        )
    content = read_bytes(checkpoint_file(path / METADATA_FILE), _MAX_METADATA_BYTES)
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
        described, places = _checked(metadata)
    except Exception as error:  # noqa: BLE001 - whatever the bytes make an unpickler raise
        raise CheckpointFileError(
            f"{METADATA_FILE} of the checkpoint {str(path)!r} cannot be read: {type(error).__name__}: {error}",
            cure="load another checkpoint; this one is torn, or was not written by DCP.",
        ) from None
    return described, places


def _checked(metadata: Any) -> tuple[dict[str, Any], dict[MetadataIndex, Any]]:
    """The two tables, with no value of another kind in them. ValueError or TypeError: there is one."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it is a {type(metadata).__name__}")
    described, places = dict(metadata.state_dict_metadata), dict(metadata.storage_data)
    lengths: dict[str, int] = {}
    for index, place in places.items():
        numbers = (place.offset, place.length)
        if not isinstance(index, MetadataIndex) or not isinstance(index.fqn, str):
            raise TypeError("a place has no name")
        if not isinstance(place.relative_path, str) or not all(
            isinstance(number, int) and 0 <= number < 2**62 for number in numbers
        ):
            raise TypeError(f"the place of {index.fqn!r} is none")
        lengths[index.fqn] = lengths.get(index.fqn, 0) + place.length
    for name, each in described.items():
        if isinstance(each, BytesStorageMetadata):
            continue
        if not isinstance(each, TensorStorageMetadata) or not isinstance(each.properties.dtype, torch.dtype):
            raise TypeError(f"{name!r} is neither a tensor nor a value")
        shapes = [each.size, *(part for chunk in each.chunks for part in (chunk.sizes, chunk.offsets))]
        if not each.chunks or any(
            len(shape) != len(each.size) or any(not isinstance(size, int) or size < 0 for size in shape)
            for shape in shapes
        ):
            raise ValueError(f"{name!r} has no shape")
        # Memory is made before files are read.
        if math.prod(each.size) * each.properties.dtype.itemsize > lengths.get(name, 0):
            raise ValueError(f"{name!r} is larger than its parts")
    return described, places
