"""Directories of `torch.distributed.checkpoint` (DCP), as FSDP's scripts save them: out and in.

In: a model, compiled or not, with its optimizers, and a directory. Out: the layout of
``dcp.save({"model": ..., "optim": ...})`` with what `torch.distributed.checkpoint.state_dict.get_state_dict`
gives: names of parameters, never numbers, so that any division of the model reads it. Functions are
collective; no rank holds more than its own parameters and their state.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from rannc_backend.checkpoint.directory import Disk
from rannc_backend.checkpoint.manifest import OPTIMIZER_PREFIX, GroupRecord
from rannc_backend.checkpoint.model_state import ModelTensors, tensors_to_write
from rannc_backend.checkpoint.plain_values import decode
from rannc_backend.checkpoint.reader import TensorReader
from rannc_backend.checkpoint.saving import require_seen
from rannc_backend.checkpoint.snapshot import listed
from rannc_backend.errors import (
    CheckpointStateError,
    CheckpointWriteError,
    RanncError,
)
from rannc_backend.errors.base import shown
from rannc_backend.integrations.dcp_reader import DistributedReader, Path_
from rannc_backend.kernels.plain_memory import plain_memory
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.torch_internals import root_of
from rannc_backend.runtime.world import World
from rannc_backend.session_registry import REGISTRY


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
        require_seen(temporary)
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
