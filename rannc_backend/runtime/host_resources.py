"""What a process of this package takes of its host: memory that the C library keeps, and threads.

A step frees all that its forward has saved, and its gradients lie in buckets that stay. So glibc finds the
end of its heap free and gives it back to the system, which hands it out again in the next step, page by page
and filled with zeros: 47 to 71 MB in a step of one second, 2 % of its time (docs/performance.md). What is
kept is at most what a step has held at one time.

Ranks that share a host take as many threads in all as the host has cores.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rannc_backend.settings import hooks

# mallopt(3): names of parameters, and the largest values that glibc takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAX_KEPT_BYTES = 2**31 - 1
_LARGEST_IN_HEAP_BYTES = 2**25
# Who sets one of these has made up their mind.
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """From now on keep freed memory, in blocks of up to 32 MB each; False where the user or the system has
    another way.
    """
    library = _library()
    if not hasattr(library, "mallopt") or any(environ.get(name) for name in _VARIABLES):
        return False
    return bool(
        library.mallopt(_TRIM_THRESHOLD, _MAX_KEPT_BYTES)
        and library.mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP_BYTES)
    )


def give_back_memory() -> None:
    """Give back what is free now, also between what is in use."""
    library = _library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def available_bytes(device: torch.device) -> int:
    """Memory that this process can still take, on a GPU or on its host; -1 where that is not known."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    lines = _read("/proc/meminfo").splitlines()
    kibibytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    found = [int(kibibytes[0]) * 1024] if kibibytes else []
    found += [max(0, int(limit) - int(used))] if limit.isdecimal() and used.isdecimal() else []
    return min(found, default=-1)


def _library() -> Any:
    return ctypes.CDLL(None)


_CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"
_MAX_COMPILERS = 32  # as Inductor has it
_MAX_DIGITS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A rank's part of its host.

    Attributes:
        num_threads: for operators; whole cores, at least 1.
        num_compilers: processes that compile; logical CPUs, at least 2 where there are: with 1, Inductor
        compiles one kernel after the
            other within the rank, and ranks that wait for its graph leave theirs.
        num_ranks: that run on these cores.
    """

    num_threads: int
    num_compilers: int
    num_ranks: int


def own_mask() -> str:
    """The CPUs that this process may run on, in hexadecimal digits."""
    return format(sum(1 << cpu for cpu in os.sched_getaffinity(0)), "x")


def mask_of(text: str) -> int:
    """The mask that another rank tells; 0 where it is none."""
    try:
        return int(text, 16) if len(text) <= _MAX_DIGITS else 0
    except ValueError:
        return 0


def share_of(masks: Sequence[int], own: int, *, num_cores: int, quota_cpus: float | None = None) -> Share:
    """What one rank may take, where every CPU is shared evenly by the ranks that may run on it.

    Args:
        masks: of all ranks of the host, this one among them.
        own: the mask of this rank.
        num_cores: cores of `own`.
        quota_cpus: what the control group of the host's ranks allows in all; None for no limit.
    """
    cpus = [cpu for cpu in range(own.bit_length()) if own >> cpu & 1]
    if not cpus:
        return Share(num_threads=1, num_compilers=1, num_ranks=max(1, len(masks)))
    shared = sum(1 / max(1, sum(mask >> cpu & 1 for mask in masks)) for cpu in cpus)
    if quota_cpus is not None:
        shared = min(shared, quota_cpus / max(1, len(masks)))
    whole = shared * num_cores / len(cpus)
    return Share(
        num_threads=max(1, int(whole + 1e-9)),
        num_compilers=max(min(2, len(cpus)), min(_MAX_COMPILERS, int(shared + 1e-9))),
        num_ranks=max(1, sum(1 for mask in masks if mask & own)),
    )


def num_cores_of(mask: int) -> int:
    """Cores, with their siblings counted once."""
    cpus = [cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1]
    return len(
        {_read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    )


def quota_cores() -> float | None:
    """CPUs that the control group allows; None for all."""
    fields = _read("/sys/fs/cgroup/cpu.max").split()
    return int(fields[0]) / int(fields[1]) if len(fields) == 2 and fields[0].isdecimal() else None


def take_share(masks: Sequence[int], own: int, environ: MutableMapping[str, str]) -> str:
    """Set this process's numbers of threads where the user has not; what was set, in words, "" for nothing.

    `masks`: of all ranks of this host. A rank that is alone on its host keeps what torch gives it.
    """
    if len(masks) < 2:
        return ""
    share = share_of(masks, own, num_cores=num_cores_of(own), quota_cpus=quota_cores())
    if _COMPILERS not in environ:
        hooks.replace_item("threads", environ, _COMPILERS, str(share.num_compilers))
        _limit_inductor(share.num_compilers)
    number = torch.get_num_threads()
    if any(name in environ for name in _CHOSEN_BY) or number not in (*_defaults(own), share.num_threads):
        return ""
    hooks.replace_item("threads", environ, "OMP_NUM_THREADS", str(min(number, share.num_threads)))
    if share.num_threads >= number:
        return ""
    torch.set_num_threads(share.num_threads)
    return (
        f"{share.num_threads} thread(s) per rank instead of {number}: {share.num_ranks} ranks share "
        f"{num_cores_of(own)} cores; OMP_NUM_THREADS or torch.set_num_threads decides otherwise"
    )


def _defaults(own: int) -> set[int]:
    """What torch's number may be where nobody has set it: it depends on how torch was built. (MKL divides by
    the ranks, under MPICH.)
    """
    num_cpus = os.cpu_count() or 1
    return {num_cpus, own.bit_count(), num_cores_of(own), num_cores_of((1 << num_cpus) - 1)}


def _limit_inductor(num_compilers: int) -> None:
    """Inductor reads the variable when it is imported, which may have been before."""
    config = sys.modules.get("torch._inductor.config")
    if config is not None and config.compile_threads == min(_MAX_COMPILERS, os.cpu_count() or 1):
        config.compile_threads = num_compilers  # type: ignore[attr-defined]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
