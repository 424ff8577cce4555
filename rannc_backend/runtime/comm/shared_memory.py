"""Memory that the processes of one host share: what a rank cuts for itself, the others can map.

In: sizes, and what another rank said of its tensor. Out: tensors.

Terms. A *chunk* is one file in memory from which tensors are cut; it has no name, none of the size limit of
/dev/shm, and goes with the last process that maps it. A chunk lives as long as a tensor that was cut from it.
A *handle* says where a tensor lies: process, file descriptor, the chunk's key, offset; all zeros for a tensor
that is not shared. A *place* is what two ranks have in common that can open each other's files: the same
running system and the same numbering of processes.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import weakref
from collections.abc import Collection, Sequence

import torch

from rannc_backend.runtime.processes import space_of_numbers

Handle = tuple[int, int, int, int]

NOT_SHARED: Handle = (0, 0, 0, 0)
# Address space: pages exist from their first use on. Large, so that few file descriptors are needed.
_CHUNK_BYTES = 2**30
_KEY_BYTES = 8


def place() -> str:
    """The same for ranks that can share memory; "" where that cannot be."""
    return space_of_numbers() if hasattr(os, "memfd_create") else ""


class Chunk(mmap.mmap):
    """A mapped file of memory. ``seen``: what tensors of other ranks those of this chunk have been summed
    with.
    """

    descriptor: int
    key: int
    num_used_bytes: int
    seen: dict[tuple[Handle, ...], tuple[torch.Tensor, ...] | None]
    others: dict[int, Chunk]

    def cut(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor over this memory, which keeps it."""
        return torch.frombuffer(self, dtype=dtype, count=numel, offset=offset)


class SharedMemory:
    """The chunks of this rank, and those of others that it has opened. Not for several threads."""

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        # By key. Weak: tensors keep their chunk, nothing else does.
        self._own: weakref.WeakValueDictionary[int, Chunk] = weakref.WeakValueDictionary()
        self._newest: weakref.ref[Chunk] | None = None

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in memory that others can map.

        Raises:
            OSError: the system has none left, or does not let this process have it.
        """
        num_bytes = _whole_pages(numel * dtype.itemsize)
        chunk = None if self._newest is None else self._newest()
        if chunk is None or chunk.num_used_bytes + num_bytes > len(chunk):
            chunk = self._new_chunk(num_bytes)
        offset = chunk.num_used_bytes
        # Now, as an error: a page that is missing when it is written to would kill the process.
        os.posix_fallocate(chunk.descriptor, offset, num_bytes)
        chunk.num_used_bytes += num_bytes
        return chunk.cut(offset, numel, dtype)

    def chunk_of(self, tensor: torch.Tensor) -> Chunk | None:
        """The chunk from which this process has cut a tensor."""
        return next(
            (chunk for chunk in self._own.values() if 0 <= tensor.data_ptr() - _address(chunk) < len(chunk)),
            None,
        )

    def handle_of(self, tensor: torch.Tensor) -> Handle:
        """What to tell others, so that they can `open` the tensor."""
        chunk = self.chunk_of(tensor)
        if chunk is None:
            return NOT_SHARED
        return (os.getpid(), chunk.descriptor, chunk.key, tensor.data_ptr() - _address(chunk))

    def open(self, handle: Handle, like: torch.Tensor) -> torch.Tensor | None:
        """Another rank's tensor of the size and dtype of ``like``, one of this rank's; None where that cannot
        be opened.
        """
        process, descriptor, key, offset = handle
        own = self.chunk_of(like)
        if own is None:
            return None
        if key not in own.others:
            chunk = _opened(process, descriptor, key)
            if chunk is None:
                return None
            own.others[key] = chunk
        chunk = own.others[key]
        if not 0 < offset <= len(chunk) - like.nbytes:
            return None
        return chunk.cut(offset, like.numel(), like.dtype)

    def _new_chunk(self, num_bytes: int) -> Chunk:
        size = max(self._chunk_bytes, num_bytes + mmap.PAGESIZE)
        descriptor = os.memfd_create("rannc gradients")
        try:
            os.ftruncate(descriptor, size)
            chunk = Chunk(descriptor, size)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise OSError(str(error)) from error
        weakref.finalize(chunk, os.close, descriptor)
        chunk.descriptor, chunk.key = descriptor, secrets.randbits(62) + 1
        chunk.seen, chunk.others = {}, {}
        # The first page tells whoever opens the file that it is this one.
        chunk[:_KEY_BYTES] = chunk.key.to_bytes(_KEY_BYTES, "little")
        chunk.num_used_bytes = mmap.PAGESIZE
        self._own[chunk.key] = chunk
        self._newest = weakref.ref(chunk)
        return chunk


def add_up(
    parts: Sequence[torch.Tensor], index: int, piece_bytes: int = 2**19, takers: Collection[int] = ()
) -> None:
    """Put the sum of flat tensors of one size, in their order, in the place of each (or of ``takers`` alone, where
    there are some), within slice ``index`` of ``len(parts)``.

    Sums of 16-bit numbers are formed in float32 and rounded once. ``piece_bytes``: what is in the cache at a
    time, of each.
    """
    numel, dtype = parts[0].numel(), parts[0].dtype
    # Slices begin at cache lines of their own, for any dtype.
    width = -(-numel // (64 * len(parts))) * 64
    begin, end = min(numel, index * width), min(numel, (index + 1) * width)
    for pieces in zip(*(part[begin:end].split(piece_bytes // dtype.itemsize) for part in parts), strict=True):
        total = pieces[0].float() if dtype in (torch.float16, torch.bfloat16) else pieces[0]
        for piece in pieces[1:]:
            total.add_(piece)
        for place, piece in enumerate(pieces):
            if piece is not total and (not takers or place in takers):
                piece.copy_(total)


def _opened(process: int, descriptor: int, key: int) -> Chunk | None:
    try:
        # Neither waits for the other end of a pipe, nor takes what is not memory.
        own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(own)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        chunk = Chunk(own, status.st_size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(own)
    return chunk if chunk[:_KEY_BYTES] == key.to_bytes(_KEY_BYTES, "little") else None


def _address(chunk: Chunk) -> int:
    return torch.frombuffer(chunk, dtype=torch.uint8, count=1).data_ptr()


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
