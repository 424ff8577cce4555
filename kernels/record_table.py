"""The work list of a kernel in device memory: one record per chunk, so that one launch serves any number of
tensors of any size.

In: addresses, offsets, sizes and kinds of tensors. Out: an int64 tensor [chunks, 4] of (address, offset,
count, kind), kept while the addresses stay. Copies are counted in a `CopyReport`.

Terms. A *chunk* is what one program of a kernel moves. `address` is absolute, `offset` counts bytes from the
start of the message or bucket, so a table serves every message with the same layout. `kind` says what happens
to the chunk; each kernel has its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

RECORD_COLUMNS = 4
Kept = TypeVar("Kept")


class KernelError(ValueError):
    """Tensors, formats or a device that a kernel refuses. The message is one sentence that says which, and
    what to do.
    """


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What was done to bring tensors to their place. Reports add up."""

    bytes_copied: int = 0
    """Bytes written by kernels or copies."""
    bytes_without_copy: int = 0
    """Bytes that were where they belong already: views, single tensors sent as they are, tensors made in
    place.
    """
    launches: int = 0
    """Kernels started on a device; on a CPU, copies made."""

    def __add__(self, other: CopyReport) -> CopyReport:
        return CopyReport(
            self.bytes_copied + other.bytes_copied,
            self.bytes_without_copy + other.bytes_without_copy,
            self.launches + other.launches,
        )


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How a kernel is started."""

    block: int
    """Items per chunk: elements, or words of four bytes where bytes are copied; a power of two."""
    num_warps: int


SMALL = LaunchConfig(block=1024, num_warps=4)
LARGE = LaunchConfig(block=4096, num_warps=8)


@dataclass(frozen=True, slots=True)
class Span:
    """One tensor's share of the work: ``count`` items at ``address``, and their place at byte ``offset``."""

    address: int
    offset: int
    count: int
    kind: int
    address_step: int
    """Bytes per item on the side of ``address``."""
    offset_step: int
    """Bytes per item on the side of ``offset``."""
    chunk: int
    """Items per chunk."""


def make_records(spans: Sequence[Span]) -> np.ndarray:
    """One int64 row (address, offset, count, kind) per chunk of ``spans``, in order; empty spans have
    none.
    """
    return record_template(spans)[0]


def record_template(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of `make_records`, and the number of the span that each is of: tables of equal spans elsewhere
    differ by a sum.
    """
    columns = np.array(
        [(s.address, s.offset, s.count, s.kind, s.address_step, s.offset_step, s.chunk) for s in spans],
        dtype=np.int64,
    ).reshape(-1, 7)
    address, offset, count, kind, address_step, offset_step, chunk = columns.T
    num_chunks = -(-count // chunk)
    span = np.repeat(np.arange(len(spans)), num_chunks)
    first_chunk = np.cumsum(num_chunks) - num_chunks
    start = (np.arange(len(span)) - first_chunk[span]) * chunk[span]
    records = np.empty((len(span), RECORD_COLUMNS), dtype=np.int64)
    records[:, 0] = address[span] + start * address_step[span]
    records[:, 1] = offset[span] + start * offset_step[span]
    records[:, 2] = np.minimum(chunk[span], count[span] - start)
    records[:, 3] = kind[span]
    return records, span


def upload(records: np.ndarray, device: torch.device) -> torch.Tensor:
    """``records`` on ``device``, ready for work that is put on the current stream from now on."""
    table = torch.from_numpy(records)
    if device.type != "cuda":
        return table
    return table.pin_memory().to(device, non_blocking=True)


@dataclass(slots=True)
class RecordTables:
    """Tables on the device (or what holds one), found again by addresses. Whoever packs owns one of these; it
    belongs to one device.

    At most ``capacity`` tables are kept, the ones used last.
    """

    capacity: int = 16
    num_built: int = 0
    _tables: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)

    def forget(self) -> None:
        """Drop all tables."""
        self._tables.clear()

    def get(self, key: Hashable, device: torch.device, build: Callable[[], np.ndarray]) -> torch.Tensor:
        """The table of ``key``, which must hold everything that ``build`` depends on; built and uploaded when
        it is not here.
        """
        return self.kept(key, device, lambda: upload(build(), device))

    def kept(self, key: Hashable, device: torch.device, make: Callable[[], Kept]) -> Kept:
        """What ``make`` gave for ``key``, which must hold everything that it depends on; made and uploaded
        when it is not here.
        """
        if device.type == "cuda":
            # A table uploaded on one stream may not have arrived when another one reads it.
            key = (key, torch.cuda.current_stream(device).cuda_stream)
        table = self._tables.get(key)
        if table is None:
            table = make()
            self.num_built += 1
            if len(self._tables) >= self.capacity:
                self._tables.popitem(last=False)
            self._tables[key] = table
        else:
            self._tables.move_to_end(key)
        return table
