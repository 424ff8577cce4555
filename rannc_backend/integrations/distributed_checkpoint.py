"""Directories of `torch.distributed.checkpoint` (DCP), as FSDP's scripts save them: out and in.

In: a model, compiled or not, with its optimizers, and a directory. Out: the layout of
``dcp.save({"model": ..., "optim": ...})`` with what `torch.distributed.checkpoint.state_dict.get_state_dict`
gives: names of parameters, never numbers, so that any division of the model reads it. Functions are
collective; no rank holds more than its own parameters and their state.

`.metadata` of such a directory is a pickle. It is read by an unpickler that makes nothing but DCP's records of
names, shapes and places; tensors and values are read with ``weights_only=True``. So no file runs code.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import math
import os
import pathlib
import pickle
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from rannc_backend.api.checkpoints import Optimizers, load_other, share_problem
from rannc_backend.checkpoint import optimizer_state
from rannc_backend.checkpoint.background import guarded
from rannc_backend.checkpoint.directory import Disk, checkpoint_file
from rannc_backend.checkpoint.manifest import OPTIMIZER_PREFIX, GroupRecord, OptimizerRecord
from rannc_backend.checkpoint.model_state import ModelTensors, tensors_to_write
from rannc_backend.checkpoint.plain_values import decode, encode
from rannc_backend.checkpoint.reader import TensorReader
from rannc_backend.checkpoint.saving import sees
from rannc_backend.checkpoint.snapshot import listed
from rannc_backend.errors import (
    CheckpointFileError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointStateError,
    CheckpointWriteError,
    RanncError,
)
from rannc_backend.errors.base import did_you_mean, nearest, shown
from rannc_backend.kernels.plain_memory import plain_memory
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.torch_internals import outside_of_traces, root_of
from rannc_backend.runtime.world import World
from rannc_backend.session_registry import REGISTRY
from rannc_backend.settings.user_files import UserFile, kind_of, names_in, read_bytes

METADATA_FILE = ".metadata"
_MAX_METADATA_BYTES = 2**30
_RECORDS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
Path_ = tuple[Any, ...]


def save_distributed_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    model_key: str = "model",
    optimizer_key: str = "optim",
) -> None:
    """Saves a directory that `torch.distributed.checkpoint.load` reads. Collective.

    Each rank writes what it owns; rank 0 writes the metadata. The directory gets its name when all of it is on
    disk.

    Args:
        directory: On a file system that all ranks see; must not be there yet.
        model: Compiled or not, planned or not.
        optimizer: An optimizer, or several in a list; None saves none.
        model_key, optimizer_key: Where the two are in the state that was given to `dcp.save`, with dots
            between keys.

    Raises:
        CheckpointStateError: A parameter has no value yet, or a state of the optimizer is neither a tensor nor
            a plain value.
        CheckpointWriteError: A rank could not write, or the directory is there.
    """
    world = bootstrap.start()
    world.monitor.phase("saving a checkpoint")
    what = f"no checkpoint can be written in {shown(str(directory))}"
    found: list[_Part] = []
    problem = guarded(
        what,
        lambda: found.append(
            _Part.of(world, root_of(model), listed(optimizer), _keys(model_key), _keys(optimizer_key))
        ),
        CheckpointStateError,
    )
    share_problem(world, "save_distributed_checkpoint", problem, [str(directory), model_key, optimizer_key])
    _write(world, Path(directory), found[0], what)
    world.monitor.phase("between steps")


def load_distributed_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    model_key: str = "model",
    optimizer_key: str = "optim",
    strict: bool = True,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Loads a directory that `torch.distributed.checkpoint.save` wrote, on any number of ranks. Collective.

    Each rank reads the parameters that it owns and their state. A model on "meta" gets its values, and every
    optimizer its state, at the first call of the compiled model. Nothing is changed unless names, shapes,
    dtypes and parameter groups fit on all ranks.

    Args:
        directory: The ``checkpoint_id`` of `dcp.save`.
        model: Compiled or not, planned or not.
        optimizer: As for `save_distributed_checkpoint`; None loads none.
        model_key, optimizer_key: As for `save_distributed_checkpoint`; "app.model" for a state
            ``{"app": {"model": ...}}``, "" where the model's state itself was saved.
        strict: If False, load the parameters and buffers that both have.

    Returns:
        Names that only the model has, and those that only the checkpoint has; both empty if ``strict``.

    Raises:
        CheckpointNotFoundError: There is no such directory, or nothing of DCP in it.
        CheckpointFileError: A file is missing, truncated, or none of DCP.
        CheckpointMismatchError: It does not fit the model or the optimizers.
    """
    optimizers = listed(optimizer)

    def opened(tensors: ModelTensors) -> TensorReader:
        reader = DistributedReader(directory, _keys(model_key), _keys(optimizer_key))
        reader.stand_for(tensors.aliases)
        if optimizers:
            reader.divide(optimizers)
        return reader

    return load_other(
        "load_distributed_checkpoint", directory, model, optimizer, opened, strict=strict, same_dtypes=True
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one rank writes.

    Attributes:
        state: by path in the state that `dcp.load` fills.
        aliases: further paths, each with the one under which the tensor is written; on rank 0.
    """

    state: Mapping[Path_, Any]
    aliases: Mapping[Path_, Path_]

    @classmethod
    def of(
        cls,
        world: World,
        root: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        model_at: Path_,
        optimizer_at: Path_,
    ) -> _Part:
        session = REGISTRY.of(root)
        table = None if session is None else session.table
        model = ModelTensors.of(root, table, world.size)
        own = tensors_to_write(model, model.writers(planned=table is not None), world.rank)
        state: dict[Path_, Any] = {(*model_at, name): tensor for name, tensor in own.items()}
        groups: list[GroupRecord] = []
        for number, optimizer in enumerate(optimizers):
            record, tensors = optimizer_state.capture(
                optimizer, number, model.names_of(), own, with_groups=world.rank == 0
            )
            groups += record.groups
            for key, tensor in tensors.items():
                name, _, local = key.removeprefix(f"{OPTIMIZER_PREFIX}{number}/").rpartition("/")
                state[(*optimizer_at, "state", name, local)] = tensor
            for name, values in record.values.items():
                for local, value in values.items():
                    state[(*optimizer_at, "state", name, local)] = decode(value, local)
        for index, group in enumerate(groups):
            options = {key: decode(value, key) for key, value in group.options.items()}
            for key, value in (options | {"params": list(group.parameters)}).items():
                state[(*optimizer_at, "param_groups", index, key)] = value
        if world.rank == 0 and not state:
            # A record of where rank 0 has written is what those of other ranks are made from.
            state[("saved_by",)] = "rannc_backend"
        aliases = {(*model_at, alias): (*model_at, name) for alias, name in model.aliases.items()}
        return cls(state=state, aliases=aliases)


def _write(world: World, directory: Path, part: _Part, what: str) -> None:
    disk = Disk()
    begun: list[str] = []

    def begin() -> None:
        if os.path.lexists(directory):
            raise CheckpointWriteError(
                f"{str(directory)!r} is there already", cure="give a directory of its own for each save."
            )
        temporary = directory.with_name(f".{directory.name}.tmp-{secrets.token_hex(4)}")
        disk.make_directory(temporary)
        begun.append(temporary.name)

    share_problem(world, "the directory of a checkpoint", guarded(what, begin) if world.rank == 0 else None)
    temporary = directory.with_name(world.control.broadcast(begun, what="the directory of a checkpoint")[0])
    rows: list[list[Any]] = []
    writer = FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True)

    def write() -> None:
        if not sees(temporary):
            raise CheckpointWriteError(
                f"rank 0 has made the directory {str(temporary)!r}, and this rank does not see it",
                cure="give a directory on a file system that all hosts share, with the same path on each.",
            )
        rows.extend(_write_part(writer, world.rank, part.state))

    try:
        all_rows = share_problem(world, "the parts of a checkpoint", guarded(what, write), None, rows)
        problem = None
        if world.rank == 0:

            def publish() -> None:
                _write_metadata(writer, part, [row for rank in all_rows for row in rank])
                disk.sync(temporary)
                disk.rename(temporary, directory)
                disk.sync(directory.parent)

            problem = guarded(what, publish)
        share_problem(world, "the end of a checkpoint", problem)
    except RanncError:
        if world.rank == 0:
            guarded("removing what was written", lambda: disk.remove(temporary))
        raise


def _write_part(writer: FileSystemWriter, rank: int, state: Mapping[Path_, Any]) -> list[list[Any]]:
    """Write one rank's part without collectives; for each item its path, shape, dtype (None: no tensor), file,
    offset and length.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    named = {
        _flat(path): plain_memory(value.detach()) if isinstance(value, torch.Tensor) else value
        for path, value in state.items()
    }
    path_of = {_flat(path): path for path in state}
    planner.set_up_planner(named, is_coordinator=True)
    writer.set_up_storage_writer(True)
    local, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    # Files are called by the number of the plan: this rank's is the only one that has something.
    plan = writer.prepare_global_plan([*(SavePlan([]) for _ in range(rank)), local[0]])[rank]
    rows: list[list[Any]] = []
    for result in writer.write_data(planner.finish_plan(plan), planner).wait():
        name, place, value = result.index.fqn, result.storage_data, named[result.index.fqn]
        is_tensor = isinstance(value, torch.Tensor)
        shape = list(value.shape) if is_tensor else None
        dtype = str(value.dtype).removeprefix("torch.") if is_tensor else None
        rows.append([list(path_of[name]), shape, dtype, place.relative_path, place.offset, place.length])
    return rows


def _write_metadata(writer: FileSystemWriter, part: _Part, rows: Sequence[Sequence[Any]]) -> None:
    described: dict[str, Any] = {}
    planner_data: dict[str, Path_] = {}
    results: list[WriteResult] = []
    further: dict[Path_, list[Path_]] = {}
    for alias, path in part.aliases.items():
        further.setdefault(path, []).append(alias)
    for path, shape, dtype, *place in rows:
        for each in (tuple(path), *further.get(tuple(path), ())):
            name = _flat(each)
            planner_data[name] = each
            index = MetadataIndex(name, None if shape is None else [0] * len(shape))
            if shape is None:
                described[name] = BytesStorageMetadata()
            else:
                size = torch.Size(shape)
                described[name] = TensorStorageMetadata(
                    properties=TensorProperties(dtype=getattr(torch, dtype)),
                    size=size,
                    chunks=[ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)],
                )
            results.append(WriteResult(index=index, size_in_bytes=place[2], storage_data=_stored(*place)))
    metadata = Metadata(state_dict_metadata=described, planner_data=planner_data)
    writer.finish(metadata, [results])


def _stored(file: str, offset: int, length: int) -> Any:
    # The class has no public name.
    record = sys.modules[FileSystemWriter.__module__].__dict__["_StorageInfo"]
    return record(relative_path=file, offset=offset, length=length)


def _flat(path: Path_) -> str:
    return ".".join(map(str, path))


def _keys(text: str) -> Path_:
    return tuple(text.split(".")) if text else ()


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
            index, _, key = flat.removeprefix(prefix).partition(".")
            if not flat.startswith(prefix) or not index.isdecimal():
                continue
            is_tensor = isinstance(described, TensorStorageMetadata)
            value = self._assemble(flat) if is_tensor else self._value(flat)
            groups.setdefault(int(index), {})[key] = value
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
        _refuse(module, name)


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
