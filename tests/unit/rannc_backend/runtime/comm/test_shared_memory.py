"""Memory that ranks of one host share: what lies where, what becomes of it, and sums of slices in place."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.runtime.comm.shared_memory import NOT_SHARED, SharedMemory, add_up, place

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


def _in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in order of rank, in float32 for 16-bit numbers."""
    half = parts[0].dtype in (torch.bfloat16, torch.float16)
    total = parts[0].float() if half else parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


@given(
    num_parts=st.integers(1, 5),
    numel=st.integers(1, 3000),
    dtype=st.sampled_from(DTYPES),
    piece_bytes=st.integers(16, 4096),
    seed=st.integers(0, 100),
)
def test_slices_together_are_the_whole_sum(
    num_parts: int, numel: int, dtype: torch.dtype, piece_bytes: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(numel, dtype=torch.float64, generator=generator).to(dtype) for _ in range(num_parts)]
    expected = _in_order(parts)
    untouched = [part.clone() for part in parts]
    changed = torch.zeros(numel, dtype=torch.int64)
    for index in torch.randperm(num_parts, generator=generator).tolist():
        mine = [part.clone() for part in untouched]
        add_up(mine, index, piece_bytes)
        changed += (mine[0] != untouched[0]).long()
        add_up(parts, index, piece_bytes)
    assert all(torch.equal(part, expected) for part in parts)
    assert int(changed.max()) <= 1, "two ranks write the same number"


@given(
    num_parts=st.integers(2, 5), takers=st.sets(st.integers(0, 4), min_size=1), dtype=st.sampled_from(DTYPES)
)
def test_sums_are_written_where_they_are_needed(num_parts: int, takers: set[int], dtype: torch.dtype) -> None:
    """The first one's memory is what is added up in; the others keep theirs."""
    takers = {taker % num_parts for taker in takers}
    parts = [torch.randn(500, dtype=torch.float64).to(dtype) for _ in range(num_parts)]
    expected, untouched = _in_order(parts), [part.clone() for part in parts]
    for index in range(num_parts):
        add_up(parts, index, 256, takers)
    assert all(torch.equal(parts[taker], expected) for taker in takers)
    others = set(range(1, num_parts)) - takers
    assert all(torch.equal(parts[other], untouched[other]) for other in others)


def test_what_one_rank_writes_the_other_reads() -> None:
    ours, theirs = SharedMemory(2**16), SharedMemory(2**16)
    first, second = ours.zeros(100, torch.float32), ours.zeros(3000, torch.float64)
    like = theirs.zeros(3000, torch.float64)
    assert not first.any() and not second.any() and first.data_ptr() % 64 == 0 == second.data_ptr() % 64
    opened = theirs.open(ours.handle_of(second), like)
    assert opened is not None and opened.data_ptr() != second.data_ptr()
    second.copy_(torch.arange(3000))
    assert torch.equal(opened, torch.arange(3000, dtype=torch.float64))
    opened.zero_()
    assert not second.any() and not first.any()
    first.fill_(1)
    assert not opened.any(), "two tensors overlap"


def test_another_process_opens_it() -> None:
    memory = SharedMemory(2**16)
    tensor = memory.zeros(4, torch.uint8)
    tensor.copy_(torch.tensor([1, 2, 3, 4]))
    process, descriptor, key, offset = memory.handle_of(tensor)
    read = (
        f"import mmap, os; f = os.open('/proc/{process}/fd/{descriptor}', os.O_RDWR); m = mmap.mmap(f, "
        f"os.fstat(f).st_size); assert int.from_bytes(m[:8], 'little') == {key}; assert "
        f"m[{offset}:{offset + 4}] == bytes([1, 2, 3, 4]); m[{offset}] = 9"
    )
    subprocess.run([sys.executable, "-c", read], check=True, timeout=60)
    assert tensor.tolist() == [9, 2, 3, 4]


def test_memory_goes_with_its_tensors() -> None:
    memory = SharedMemory(2**14)
    before = len(os.listdir("/proc/self/fd"))
    tensors = [memory.zeros(1000, torch.float32) for _ in range(9)]
    descriptors = {memory.handle_of(tensor)[1] for tensor in tensors}
    assert len(descriptors) == 3, "a chunk of 16 KB has a page of its own and three tensors of a page"
    kept = tensors[0]
    tensors.clear()
    gc.collect()
    assert memory.handle_of(kept) != NOT_SHARED
    assert len(os.listdir("/proc/self/fd")) < before + 2 * len(descriptors)
    del kept
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert memory.zeros(10, torch.float32).sum() == 0, "there is a new chunk"


def test_a_tensor_larger_than_a_chunk() -> None:
    memory = SharedMemory(2**14)
    tensor = memory.zeros(2**14, torch.float64)
    assert memory.handle_of(tensor) != NOT_SHARED and tensor.numel() == 2**14 and not tensor.any()


def test_what_is_not_shared_has_no_handle() -> None:
    memory = SharedMemory(2**14)
    shared, plain = memory.zeros(10, torch.float32), torch.zeros(10)
    assert memory.handle_of(plain) == NOT_SHARED != memory.handle_of(shared)
    assert SharedMemory(2**14).handle_of(shared) == NOT_SHARED, "of another's memory"
    assert memory.open(memory.handle_of(shared), plain) is None


@pytest.mark.parametrize("wrong", ["process", "descriptor", "key", "offset", "negative"])
def test_a_wrong_handle_opens_nothing(wrong: str) -> None:
    ours, theirs = SharedMemory(2**14), SharedMemory(2**14)
    shared, like = ours.zeros(1000, torch.float32), theirs.zeros(1000, torch.float32)
    process, descriptor, key, offset = ours.handle_of(shared)
    handles = {
        "process": (2**30, descriptor, key, offset),
        "descriptor": (process, 10**6, key, offset),
        "key": (process, descriptor, key + 1, offset),
        "offset": (process, descriptor, key, 2**14 - 100),
        "negative": (process, descriptor, key, -8),
    }
    before = len(os.listdir("/proc/self/fd"))
    assert theirs.open(handles[wrong], like) is None
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "what was opened in vain is kept"
    assert theirs.open((process, descriptor, key, offset), like) is not None


def test_an_empty_file_opens_nothing() -> None:
    memory = SharedMemory(2**14)
    like = memory.zeros(10, torch.float32)
    descriptor = os.memfd_create("empty")
    try:
        assert memory.open((os.getpid(), descriptor, 5, 4096), like) is None
    finally:
        os.close(descriptor)


def test_a_full_host_is_an_error_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    memory = SharedMemory(2**14)
    kept = memory.zeros(10, torch.float32)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        memory.zeros(10, torch.float32)
    monkeypatch.undo()
    more = memory.zeros(10, torch.float32)
    more.fill_(1)
    assert not kept.any()


def test_ranks_of_one_host_are_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place()
    assert here and place() == here
    script = "from rannc_backend.runtime.comm.shared_memory import place; print(place())"
    there = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True
    ).stdout.strip()
    assert there == here
    monkeypatch.delattr(os, "memfd_create")
    assert place() == ""
