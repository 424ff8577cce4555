"""Memory that a step has freed: kept for the next one, unless the user has set malloc up; given back when
asked.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from rannc_backend.runtime.host_resources import keep_freed_memory

# Blocks as a step's tensors: each smaller than what malloc takes from the heap, and all freed. No tensors:
# what is small and lies above them by chance would keep them in the heap.
SCRIPT = """
import ctypes, resource, sys
import psutil
from rannc_backend.runtime.host_resources import give_back_memory, keep_freed_memory

library = ctypes.CDLL(None)
library.malloc.restype = library.memset.restype = ctypes.c_void_p
library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [library.malloc(2**23) for _ in range(24)]
    for block in blocks:
        library.memset(block, 1, 2**23)
    for block in blocks:
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

resident = lambda: psutil.Process().memory_info().rss // 2**20
for _ in range(3):
    step()
usual = step()
kept = keep_freed_memory()
step()
step()
after, full = step(), resident()
give_back_memory()
print(kept, usual, after, full - resident())
"""


def numbers(**environment: str) -> tuple[bool, int, int, int]:
    """Whether memory is kept, page faults of a step without and with, MB given back."""
    job = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    kept, *counts = job.stdout.split()
    usual, after, back = map(int, counts)
    return kept == "True", usual, after, back


def test_a_step_touches_no_new_page() -> None:
    kept, usual, after, back = numbers()
    assert kept
    assert usual > 90, "192 MB are 49,000 pages of 4 KB, or 96 of 2 MB: malloc has kept them by itself"
    assert after < usual / 20, f"{after} of {usual} pages are new in every step"
    assert back > 150, "MB that were kept, and are free again"


def test_who_has_set_malloc_up_is_left_alone() -> None:
    kept, usual, after, _ = numbers(GLIBC_TUNABLES="glibc.malloc.check=0")
    assert not kept and after > usual / 2


@pytest.mark.parametrize(
    "name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"]
)
def test_variables_of_malloc(name: str) -> None:
    assert not keep_freed_memory({name: "1"})


def test_a_system_without_these_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    from rannc_backend.runtime import host_resources as host_memory

    monkeypatch.setattr(host_memory, "_library", object)
    assert not keep_freed_memory({})
    host_memory.give_back_memory()
