"""`torch.distributed.checkpoint` over safetensors files and a JSON index, without its pickled metadata.

In: tensors by key. Out: files that are on disk, and a record per tensor; and back. Each rank writes and reads
for itself: no collectives.

`SafetensorsReader` may be given to `torch.distributed.checkpoint.load` by anyone: it then fills plain
tensors, or each rank's part of DTensors, from a checkpoint of this package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from rannc_backend.checkpoint.directory import Disk
from rannc_backend.checkpoint.manifest import OPTIMIZER_PREFIX, FileRecord, TensorRecord
from rannc_backend.checkpoint.reader import CheckpointReader, TensorReader
from rannc_backend.errors import CheckpointStateError
from rannc_backend.kernels.plain_memory import crc32_of, plain_memory

# A new file is begun beyond this: only so many bytes of a GPU's tensors are on the host at a time.
FILE_BYTES = 2 * 2**30


class SafetensorsWriter(StorageWriter):
    """Writes one rank's tensors.

    Attributes:
        tensors, files: records of what has been written, when `write_data` has returned.
    """

    def __init__(self, directory: Path, rank: int, disk: Disk, file_bytes: int = FILE_BYTES) -> None:
        self._directory, self._rank, self._disk, self._file_bytes = directory, rank, disk, file_bytes
        self.tensors: dict[str, TensorRecord] = {}
        self.files: dict[str, FileRecord] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.tensors.clear()
        self.files.clear()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the directory is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        for kind in ("model", "optimizer"):
            items = [
                item
                for item in plan.items
                if item.index.fqn.startswith(OPTIMIZER_PREFIX) == (kind == "optimizer")
            ]
            # `write_tensors` plans nothing but tensors.
            tensors = ((item.index.fqn, cast("torch.Tensor", planner.resolve_data(item))) for item in items)
            self._write_kind(kind, tensors)
        result: Future[list[WriteResult]] = Future()
        result.set_result(
            [
                WriteResult(
                    index=item.index,
                    size_in_bytes=item.tensor_storage_size() or 0,
                    storage_data=self.tensors[item.index.fqn],
                )
                for item in plan.items
            ]
        )
        return result

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: the manifest is written by rank 0 from the records of all ranks."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()

    def _write_kind(self, kind: str, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        batch: dict[str, torch.Tensor] = {}
        num_bytes = 0
        for key, tensor in tensors:
            if tensor.is_quantized or tensor.layout != torch.strided:
                raise CheckpointStateError(
                    f"{key!r} is a tensor of dtype {tensor.dtype} and layout {tensor.layout}, which a "
                    "checkpoint cannot hold",
                    cure="keep it as plain tensors (its values, scales and indices), or register it with "
                    "persistent=False.",
                )
            host = plain_memory(tensor.detach().to("cpu"))
            if batch and num_bytes + host.nbytes > self._file_bytes:
                self._write_file(kind, batch)
                batch, num_bytes = {}, 0
            batch[key] = host
            num_bytes += host.nbytes
        if batch:
            self._write_file(kind, batch)

    def _write_file(self, kind: str, batch: dict[str, torch.Tensor]) -> None:
        name = (
            f"{kind}-{self._rank:05d}-{sum(other.startswith(kind) for other in self.files):05d}.safetensors"
        )
        path = self._directory / name
        self._disk.write_tensors(path, _in_memory_of_their_own(batch))
        self._disk.sync(path)
        self.files[name] = FileRecord(num_bytes=path.stat().st_size)
        for key, tensor in batch.items():
            self.tensors[key] = TensorRecord(
                file=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                crc32=crc32_of(tensor),
            )


def _in_memory_of_their_own(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # The format has no tensors that share memory.
    seen: set[int] = set()
    own = {}
    for key, tensor in batch.items():
        storage = tensor.untyped_storage().data_ptr()
        own[key] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return own


class SafetensorsReader(StorageReader):
    """Reads a checkpoint by key, see `manifest`; further names of tied tensors work too.

    Raises (on construction): as `CheckpointReader`.
    """

    def __init__(self, checkpoint: TensorReader | str | os.PathLike[str]) -> None:
        self._reader: TensorReader = (
            CheckpointReader(checkpoint) if isinstance(checkpoint, str | os.PathLike) else checkpoint
        )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._reader = CheckpointReader(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        keys = dict.fromkeys((*self._reader.keys, *self._reader.names))
        return Metadata(
            state_dict_metadata={key: _tensor_metadata(self._reader, key) for key in keys},
            storage_data={MetadataIndex(key, [0] * len(self._reader.shape(key))): key for key in keys},
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: the index has been read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # File by file, each from front to back as far as the writer's order goes.
        for item in sorted(plan.items, key=lambda item: self._reader.file_of(item.storage_index.fqn)):
            key = item.storage_index.fqn
            whole = tuple(item.lengths) == self._reader.shape(key)
            slices = tuple(
                slice(begin, begin + length)
                for begin, length in zip(item.storage_offsets, item.lengths, strict=True)
            )
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._reader.mapped(key) if whole else self._reader.part(key, slices))
            planner.commit_tensor(item, target)
        result: Future[None] = Future()
        result.set_result(None)
        return result

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


def _tensor_metadata(reader: TensorReader, key: str) -> TensorStorageMetadata:
    shape = torch.Size(reader.shape(key))
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=reader.dtype(key)), size=shape, chunks=[chunk]
    )


def write_tensors(tensors: Mapping[str, torch.Tensor], writer: SafetensorsWriter) -> None:
    """One rank's part of `torch.distributed.checkpoint.save`: its planner and our writer, without
    collectives.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer.reset()
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = writer.write_data(plan, planner).wait()
    writer.finish(metadata, [results])


def read_tensors(targets: Mapping[str, torch.Tensor], reader: TensorReader) -> None:
    """Fill ``targets``, by key, in place: one rank's part of `torch.distributed.checkpoint.load`, without
    collectives.

    Raises:
        CheckpointFileError: a file is torn or was changed; some of the targets may have been filled by then.
    """
    storage, planner = (
        SafetensorsReader(reader),
        DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    metadata = storage.read_metadata()
    planner.set_up_planner(dict(targets), metadata, is_coordinator=True)
    storage.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([storage.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(storage.prepare_global_plan(plans)[0])
    storage.read_data(plan, planner).wait()
