"""`rannc doctor` on this host, without starting a rank: versions, devices, environment, memory, limits.

In: versions, numbers and texts of the system, each passed in, so that tests can fake them. Out: a `Finding`
for each check: what was found, whether it is good, and how to mend it. `host_findings` reads the system and
makes them all. With ranks: ranks.py.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from rannc_backend.doctor.findings import Finding, package_version, read_text
from rannc_backend.doctor.gpus import find_gpu_use
from rannc_backend.doctor.mpi import find_mpi
from rannc_backend.doctor.platforms import check_platform, check_python, check_torch, import_torch
from rannc_backend.errors import BYTES_PER_GB, RanncError
from rannc_backend.log.logger import LOGGING_FILE
from rannc_backend.log.logging_toml import logging_file
from rannc_backend.runtime.comm.device_connections import CURE, VARIABLE, WANTED, connections_problem
from rannc_backend.runtime.job.disabled_compile import disabling_variables, shown_variables
from rannc_backend.runtime.launch import find_launch
from rannc_backend.settings.sources import configuration_directory, resolve
from rannc_backend.settings.toml_lines import read_toml

_MIN_TEMPORARY_BYTES = 2**30
_MIN_SHARED_BYTES = (
    2**28
)  # NCCL and MPI keep buffers of their ranks there; containers have 64 MB if nobody asks for more
_MIN_FILES = 1024  # every rank holds connections to others, and a file for each compiled kernel
_MIN_LOCKED_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What torch sees of accelerators: a name and the bytes of memory of each. `cuda`: what torch was built
    for; None: CPUs.
    """

    names: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    cuda: str | None = None
    nccl: str | None = None


def host_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Every check of this host, in the order in which they are read."""
    devices = find_devices()
    yield check_platform(platform.system(), platform.machine())
    yield check_python(sys.version_info[:3])
    yield check_torch(package_version("torch"), *import_torch())
    yield check_devices(devices, driver_files=[str(path) for path in Path("/dev").glob("nvidia[0-9]*")])
    yield find_gpu_use(environ, num_devices=len(devices.names))
    yield check_triton(package_version("triton"), num_devices=len(devices.names))
    yield check_nccl(devices)
    yield check_connections(environ, num_devices=len(devices.names))
    yield from find_mpi(environ)
    yield check_optional("transformers", package_version("transformers"))
    yield check_compile(environ)
    yield check_launch(environ)
    yield check_configuration(environ)
    yield check_logging(environ)
    yield check_host_name(socket.gethostname())
    yield check_temporary(tempfile.gettempdir())
    yield check_shared_memory("/dev/shm", num_devices=len(devices.names))
    yield check_memory(memory_limit_bytes(), physical_memory_bytes())
    yield check_cores(len(os.sched_getaffinity(0)), quota_cores(), environ.get("OMP_NUM_THREADS"))
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_locked_memory(
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_infiniband=any_entry("/sys/class/infiniband")
    )


def check_devices(devices: Devices, *, driver_files: Sequence[str]) -> Finding:
    """Whether torch sees the accelerators that the host has."""
    if devices.names:
        texts = [
            f"{name} ({size / BYTES_PER_GB:.0f} GB)"
            for name, size in zip(devices.names, devices.memory_bytes, strict=True)
        ]
        return Finding(
            name="devices",
            status="ok",
            text=f"{len(texts)}: {', '.join(dict.fromkeys(texts))}; CUDA {devices.cuda}",
        )
    if driver_files and devices.cuda is None:
        text = f"the host has {', '.join(driver_files)}, and this torch is built for CPUs"
        return Finding(name="devices", status="problem", text=text, cure="install torch built for CUDA.")
    if driver_files:
        text = f"the host has {', '.join(driver_files)}, and torch (CUDA {devices.cuda}) sees no device"
        cure = "look at CUDA_VISIBLE_DEVICES and nvidia-smi: is the driver new enough for this CUDA?"
        return Finding(name="devices", status="problem", text=text, cure=cure)
    return Finding(name="devices", status="ok", text="no CUDA device: ranks compute on the CPU")


def check_triton(found: str | None, *, num_devices: int) -> Finding:
    """Whether the compiler of GPU kernels is there where it is needed."""
    if found is None and num_devices:
        cure = "install triton as this torch wants it, or set stage_compiler to eager."
        return Finding(
            name="Triton", status="problem", text="not installed; Inductor needs it on GPUs", cure=cure
        )
    return Finding(name="Triton", status="ok", text=found or "not installed, and not needed without GPUs")


def check_nccl(devices: Devices) -> Finding:
    """Whether torch has NCCL where there is more than one device."""
    if len(devices.names) > 1 and devices.nccl is None:
        return Finding(
            name="NCCL",
            status="problem",
            text="this torch has none",
            cure="install torch built for CUDA, which brings it.",
        )
    return Finding(name="NCCL", status="ok", text=devices.nccl or "none; messages between CPUs go over gloo")


def check_connections(environ: Mapping[str, str], *, num_devices: int) -> Finding:
    """Whether streams that wait for other ranks will have hardware queues of their own."""
    name, problem = "GPU queues", connections_problem(environ)
    if problem and num_devices:
        text, _, cure = problem.rpartition("; ")
        return Finding(name=name, status="warning", text=text, cure=f"{cure}.")
    if VARIABLE in environ or not num_devices:
        return Finding(
            name=name,
            status="ok",
            text=f"{VARIABLE}={environ[VARIABLE]}" if VARIABLE in environ else "no GPU",
        )
    text = f"{VARIABLE} is not set: set to {WANTED} when torch.compile gets the backend, too late in scripts that use the GPU before"
    return Finding(name=name, status="warning", text=text, cure=f"{CURE}.")


def check_optional(name: str, found: str | None) -> Finding:
    """A package that some models want."""
    return Finding(name=name, status="ok", text=found or "not installed; only models of it need it")


def check_compile(environ: Mapping[str, str]) -> Finding:
    """Whether torch.compile is switched on, and torch knows the backend by its name."""
    found = disabling_variables(environ)
    if found:
        cure = f"unset {' '.join(found)}: models run without the backend, each rank by itself."
        return Finding(
            name="torch.compile",
            status="problem",
            text=f"switched off by {shown_variables(found)}",
            cure=cure,
        )
    names = [entry.name for entry in entry_points(group="torch_dynamo_backends")]
    if "rannc" not in names:
        cure = "install the package, pip install ., in the environment that runs the script."
        return Finding(
            name="torch.compile", status="problem", text='no backend "rannc" is installed', cure=cure
        )
    return Finding(
        name="torch.compile",
        status="ok",
        text='finds backend="rannc"; a call with disable=True would not come to it',
    )


def check_launch(environ: Mapping[str, str]) -> Finding:
    """What the launcher has left in the environment, if there was one."""
    try:
        launch = find_launch(environ)
    except RanncError as error:
        return Finding(name="launch", status="problem", text=error.problem, cure=error.cure)
    text = (
        "not started by a launcher"
        if launch.launcher == "single"
        else f"rank {launch.rank} of {launch.size}, by {launch.source}"
    )
    return Finding(name="launch", status="ok", text=text)


def check_configuration(environ: Mapping[str, str]) -> Finding:
    """Whether options can be resolved."""
    try:
        resolution = resolve(None, environ)
    except RanncError as error:
        return Finding(name="options", status="problem", text=error.problem, cure=error.cure)
    others = {item: source for item, source in resolution.sources.items() if source != "default"}
    text = f"file: {resolution.file or 'none'}; {len(others)} set: {', '.join(others) or 'none'}"
    if resolution.notices:
        return Finding(name="options", status="warning", text=text, cure="; ".join(resolution.notices) + ".")
    return Finding(name="options", status="ok", text=text)


def check_logging(environ: Mapping[str, str]) -> Finding:
    """Whether logging.toml can be read, if there is one."""
    try:
        directory = configuration_directory(environ)
        file = None if directory is None else read_toml(directory / LOGGING_FILE)
        content = None if file is None else logging_file(file)
    except RanncError as error:
        return Finding(name="logging", status="problem", text=error.problem, cure=error.cure)
    if file is None or content is None:
        return Finding(name="logging", status="ok", text="no logging.toml: rank 0 writes to stderr")
    return Finding(
        name="logging",
        status="ok",
        text=f"{file.path}: {len(content.sink)} sinks, {len(content.logger)} loggers",
    )


def check_host_name(name: str) -> Finding:
    """Whether the host's own name has an address, which the ranks' connections need."""
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        cure = f"add `127.0.1.1 {name}` to /etc/hosts, or set GLOO_SOCKET_IFNAME to the network interface to use."
        return Finding(
            name="host name",
            status="warning",
            text=f"{name} has no address ({error.strerror or error})",
            cure=cure,
        )
    return Finding(name="host name", status="ok", text=f"{name} is {address}")


def check_temporary(path: str, free_bytes: int | None = None) -> Finding:
    """Whether compiled kernels have room. `free_bytes`: None: look."""
    if not os.access(path, os.W_OK):
        cure = "set TMPDIR to a directory that can be written."
        return Finding(name="temporary files", status="problem", text=f"{path} cannot be written", cure=cure)
    free = shutil.disk_usage(path).free if free_bytes is None else free_bytes
    text = f"{path}: {free / BYTES_PER_GB:.1f} GB free"
    if free < _MIN_TEMPORARY_BYTES:
        cure = "free some, or set TMPDIR to a larger file system: compiled kernels are kept there."
        return Finding(name="temporary files", status="warning", text=text, cure=cure)
    return Finding(name="temporary files", status="ok", text=text)


def check_shared_memory(path: str, *, num_devices: int, sizes: tuple[int, int] | None = None) -> Finding:
    """Whether ranks of one host have room to share. `sizes`: (total, free) bytes; None: look."""
    cure = "start the container with --shm-size=1g or more, or --ipc=host."
    if sizes is None:
        if not Path(path).is_dir():
            return Finding(name="shared memory", status="problem", text=f"there is no {path}", cure=cure)
        usage = shutil.disk_usage(path)
        sizes = (usage.total, usage.free)
    total, free = sizes
    text = f"{path}: {total / BYTES_PER_GB:.2f} GB, {free / BYTES_PER_GB:.2f} GB free"
    if free < _MIN_SHARED_BYTES:
        return Finding(
            name="shared memory", status="problem" if num_devices > 1 else "warning", text=text, cure=cure
        )
    return Finding(name="shared memory", status="ok", text=text)


def check_memory(limit_bytes: int | None, physical_bytes: int) -> Finding:
    """How much host memory the ranks of this host may take together."""
    text = f"{physical_bytes / BYTES_PER_GB:.1f} GB on the host"
    if limit_bytes is not None and limit_bytes < physical_bytes:
        text = f"{limit_bytes / BYTES_PER_GB:.1f} GB allowed by the control group, of {text}"
    return Finding(name="memory", status="ok", text=text)


def check_cores(allowed: int, quota: float | None, omp_threads: str | None) -> Finding:
    """How many cores the ranks of this host share, and whether each takes more than all of them. Without the variable
    ranks divide them (`runtime/host_resources.py`).
    """
    cores = min(allowed, quota) if quota is not None else allowed
    said = f"OMP_NUM_THREADS is {omp_threads}" if omp_threads else "the ranks of this host divide them"
    text = f"{cores:g} of {os.cpu_count() or allowed}; {said}"
    if omp_threads and omp_threads.isdecimal() and int(omp_threads) > max(1, cores):
        cure = "unset OMP_NUM_THREADS, and ranks divide the cores; or set it to the cores of one rank."
        return Finding(name="cores", status="warning", text=text, cure=cure)
    return Finding(name="cores", status="ok", text=text)


def check_open_files(limit: int) -> Finding:
    """`ulimit -n`."""
    if limit == resource.RLIM_INFINITY:
        return Finding(name="open files", status="ok", text="no limit")
    if limit < _MIN_FILES:
        return Finding(
            name="open files",
            status="warning",
            text=f"at most {limit}",
            cure=f"run `ulimit -n {_MIN_FILES}` or more.",
        )
    return Finding(name="open files", status="ok", text=f"at most {limit}")


def check_locked_memory(limit: int, *, has_infiniband: bool) -> Finding:
    """`ulimit -l`, which InfiniBand needs."""
    text = "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit / 2**20:.0f} MB"
    if has_infiniband and limit != resource.RLIM_INFINITY and limit < _MIN_LOCKED_BYTES:
        cure = "set `ulimit -l unlimited` (memlock in /etc/security/limits.conf; --ulimit memlock=-1 for containers)."
        return Finding(
            name="locked memory", status="problem", text=f"{text}, and InfiniBand registers memory", cure=cure
        )
    return Finding(name="locked memory", status="ok", text=text)


def find_devices() -> Devices:
    """What torch sees; nothing where there is no torch."""
    try:
        import torch
    except Exception:  # `check_torch` tells
        return Devices()
    if not torch.cuda.is_available():
        return Devices(cuda=torch.version.cuda)
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return Devices(
        names=tuple(str(item.name) for item in properties),
        memory_bytes=tuple(int(item.total_memory) for item in properties),
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())),
    )


def memory_limit_bytes() -> int | None:
    """What the control group of this process allows; None for all."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = read_text(path).strip()
        if text.isdecimal():
            return int(text)
    return None


def physical_memory_bytes() -> int:
    """Memory of the host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def quota_cores() -> float | None:
    """Cores that the control group allows; None for all."""
    fields = read_text("/sys/fs/cgroup/cpu.max").split()
    return int(fields[0]) / int(fields[1]) if len(fields) == 2 and fields[0].isdecimal() else None


def any_entry(path: str) -> bool:
    """Whether a directory is there and has something in it."""
    return Path(path).is_dir() and any(Path(path).iterdir())
