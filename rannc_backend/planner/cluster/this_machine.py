"""Which cluster a job plans for: a described one, or the one at hand, measured by all ranks together and
remembered.

In: the options and the `World`. Out: one `Cluster`, the same on every rank. Terms: *local* is the cluster of
the ranks at hand; its *identity* is what its rates depend on, and the name of its file in the cache. Rank 0
alone reads and writes files, and tells the others what it found, so that never one rank measures while
another does not.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rannc_backend.errors import RanncError, rebuild_error
from rannc_backend.ir.plan import DeviceKind
from rannc_backend.ir.plan_file import write_text
from rannc_backend.planner.cluster.calibrate import DeviceRates, Stopwatch, measure_device
from rannc_backend.planner.cluster.cluster import Cluster, Device, Link
from rannc_backend.planner.cluster.cluster_file import (
    FORMAT,
    LOCAL,
    cluster_toml,
    load_cluster,
    parse_cluster,
    read_cluster,
)
from rannc_backend.runtime.trace.link_speed import TransferSeconds, allreduce_seconds, message_seconds
from rannc_backend.runtime.world import World
from rannc_backend.settings.options import Config
from rannc_backend.settings.user_files import UserFile, kind_of, make_directory

logger = logging.getLogger(__name__)

# Raised when what is measured, or how, changes: files of an older number are not read.
_VERSION = 4
_CACHE = "option cache_dir, or $XDG_CACHE_HOME or ~/.cache"
# Where links are not measured: a cluster of the same kind of device.
_GENERIC = {"cpu": "generic-cpu", "cuda": "a100-80gb"}
_DIGITS = 4


def choose_cluster(
    config: Config, world: World, *, num_devices: int | None = None, devices_per_node: int | None = None
) -> Cluster:
    """The cluster that `config.cluster` names, with the ranks of `world` as its devices. Collective over all
    ranks.

    Args:
        num_devices, devices_per_node: for a plan for other devices than the ranks at hand, as in a dry run.

    Raises:
        ClusterFileError: no such description, or a wrong one; on all ranks.
    """
    count = world.size if num_devices is None else num_devices
    if config.cluster != LOCAL:
        # The file may be on the host of rank 0 only.
        text = _told_by_rank_0(
            config, world, lambda: cluster_toml(load_cluster(config.cluster, count, devices_per_node))
        )
        return parse_cluster(text, file=config.cluster, num_devices=count)
    cluster = _local_cluster(config, world)
    if num_devices is not None or devices_per_node is not None:
        cluster = _resized(cluster, world, count, devices_per_node)
    return cluster


def ranks_per_node(hosts: Sequence[str]) -> int:
    """The largest n for which ranks n*i to n*i + n - 1 are on one host, whatever i."""
    return math.gcd(*(len(list(group)) for _, group in itertools.groupby(hosts)))


def cache_directory(config: Config) -> Path:
    """Where measured clusters are kept."""
    if config.cache_dir:
        return Path(config.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rannc"


def device_memory_bytes(world: World) -> int:
    """Memory of this rank's device; on a CPU, its share of the host's."""
    return _own_rank_record(world).memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """A rank's device, as far as it is known without measuring. `name`: for people."""

    name: str
    kind: DeviceKind
    memory_bytes: int
    num_threads: int


def _own_rank_record(world: World) -> _Device:
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        return _Device(
            name=str(properties.name), kind="cuda", memory_bytes=int(properties.total_memory), num_threads=0
        )
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory_bytes = physical // world.hosts.count(world.hosts[world.rank])
    return _Device(
        name=_cpu_model(), kind="cpu", memory_bytes=memory_bytes, num_threads=torch.get_num_threads()
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.machine() or 'CPU')}, {os.cpu_count()} cores"


def _told_by_rank_0(config: Config, world: World, find: Callable[[], str]) -> str:
    """What `find` gives on rank 0, or its error, on all ranks."""
    text, failure = "", None
    if world.rank == 0:
        try:
            text = find()
        except RanncError as error:
            failure = error
    words = [text, type(failure).__name__, str(failure)] if failure else [text, "", ""]
    text, error_class, error_text = world.control.broadcast(
        words, what="the cluster", limit_seconds=config.compile_timeout_seconds
    )
    if failure is not None:
        raise failure
    if error_class:
        raise rebuild_error(error_class, error_text)
    return text


def _local_cluster(config: Config, world: World) -> Cluster:
    """The ranks at hand, from the cache or measured now."""
    world.monitor.phase("measuring this cluster")
    per_node = ranks_per_node(world.hosts)
    limit = config.compile_timeout_seconds
    rank_records = [
        _Device(**each)
        for each in world.control.allgather(
            _as_dict(_own_rank_record(world)), what="devices", limit_seconds=limit
        )
    ]
    path = cache_directory(config) / "clusters" / f"{_identity(rank_records, world, per_node, config)}.toml"
    text = _told_by_rank_0(config, world, lambda: _remembered(path, world.size))
    if text:
        return parse_cluster(text, file=str(path), num_devices=world.size)
    if world.rank == 0:
        logger.info("measuring this cluster for a few seconds; the result is kept in %s", path)
    rates, links = _measured(world, per_node, config)
    generic = load_cluster(_GENERIC[world.device.type], world.size)
    cluster = _assembled(rank_records, rates, links, world, per_node, generic)
    if world.rank == 0:
        _remember(path, cluster, generic)
    return cluster


def _as_dict(rank_record: _Device) -> dict[str, Any]:
    return {
        "name": rank_record.name,
        "kind": rank_record.kind,
        "memory_bytes": rank_record.memory_bytes,
        "num_threads": rank_record.num_threads,
    }


def _identity(rank_records: Sequence[_Device], world: World, per_node: int, config: Config) -> str:
    """A name for what the rates depend on: devices, threads, torch, how many ranks share a node, how many
    nodes there are.
    """
    facts = {
        "seats": sorted({json.dumps(_as_dict(rank_record), sort_keys=True) for rank_record in rank_records}),
        "torch": torch.__version__,
        "ranks_per_node": per_node,
        "most_ranks_on_a_host": max(world.hosts.count(host) for host in world.hosts),
        "num_ranks": world.size,
        "shared_memory": config.shared_memory,
        "version": [_VERSION, FORMAT],
    }
    return f"{rank_records[0].kind}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}"


def _remembered(path: Path, num_devices: int) -> str:
    """The cache's description, "" if there is none that can be used."""
    try:
        if not kind_of(_remembered_file(path)):
            return ""
        return cluster_toml(read_cluster(path, num_devices))
    except RanncError as error:
        logger.warning("the remembered cluster cannot be used and is measured again: %s", error.problem)
        return ""


def _remembered_file(path: Path) -> UserFile:
    return UserFile(path=path, what="measured cluster", named_by=_CACHE)


def _remember(path: Path, cluster: Cluster, generic: Cluster) -> None:
    sources = {"device": "measured"}
    for name in ("intra_node", "inter_node"):
        sources[name] = (
            f"as {generic.name}, not measured"
            if getattr(cluster, name) == getattr(generic, name)
            else "measured"
        )
    text = cluster_toml(cluster, description="measured by rannc; may be deleted", sources=sources)
    try:
        make_directory(replace(_remembered_file(path.parent), what="cache directory"))
        write_text(path, text, what="measured cluster", named_by=_CACHE)
    except RanncError as error:
        logger.warning("the measured cluster is not remembered, the next run measures again: %s", error)


def _measured(
    world: World, per_node: int, config: Config
) -> tuple[list[DeviceRates], list[dict[str, TransferSeconds]]]:
    """Rates of all ranks' devices, and what transfers they took part in, in rank order."""

    limit = config.compile_timeout_seconds

    def together() -> None:
        world.control.barrier(what="measuring devices", limit_seconds=limit)

    rates = measure_device(Stopwatch(device=world.device), together)
    found = _own_transfers(world, per_node, shared_memory=config.shared_memory)
    transfers = {name: times for name, times in found.items() if times is not None}
    own = {
        "rates": {
            "flops_per_second": rates.flops_per_second,
            "memory_bytes_per_second": rates.memory_bytes_per_second,
            "launch_seconds": rates.launch_seconds,
            "efficiencies": rates.efficiencies,
        },
        "transfers": {
            name: [times.small, times.large, times.large_bytes] for name, times in transfers.items()
        },
    }
    answers = world.control.allgather(own, what="measured rates", limit_seconds=limit)
    all_transfers = [
        {
            name: TransferSeconds(small=small, large=large, large_bytes=size)
            for name, (small, large, size) in answer["transfers"].items()
        }
        for answer in answers
    ]
    return [DeviceRates(**answer["rates"]) for answer in answers], all_transfers


def _core_share(world: World) -> float:
    """The part of a core that each thread of a rank has when all ranks of the host compute."""
    num_ranks_here = world.hosts.count(world.hosts[world.rank])
    return min(1.0, len(os.sched_getaffinity(0)) / (num_ranks_here * torch.get_num_threads()))


def _own_transfers(world: World, per_node: int, *, shared_memory: bool) -> dict[str, TransferSeconds | None]:
    if world.size == 1:
        return {}
    ranks = range(world.size)
    near = [(rank, rank + 1) for rank in ranks if rank % per_node % 2 == 0 and rank % per_node + 1 < per_node]
    far = [
        (rank, rank + per_node)
        for rank in ranks
        if rank // per_node % 2 == 0 and rank + per_node < world.size
    ]
    nodes = [tuple(range(first, first + per_node)) for first in range(0, world.size, per_node)]
    result: dict[str, TransferSeconds | None] = {}
    if per_node > 1:
        result["near_message"] = message_seconds(world, near)
        result["near_allreduce"] = allreduce_seconds(world, nodes, shared_memory=shared_memory)
    if per_node < world.size:
        result["far_message"] = message_seconds(world, far)
        result["far_allreduce"] = allreduce_seconds(world, [tuple(ranks)], shared_memory=shared_memory)
    return result


def _assembled(
    rank_records: Sequence[_Device],
    rates: Sequence[DeviceRates],
    transfers: Sequence[dict[str, TransferSeconds]],
    world: World,
    per_node: int,
    generic: Cluster,
) -> Cluster:
    """One description of all ranks: the median rank's rates, the smallest memory."""
    if len({rank_record.name for rank_record in rank_records}) > 1:
        logger.warning(
            "the ranks have different devices; they are planned for as if each were the median one"
        )
    threads = f", {rank_records[0].num_threads} thread(s) per rank" if rank_records[0].num_threads else ""
    peaks = {
        dtype: _median(each.flops_per_second[dtype] for each in rates)
        for dtype in sorted(rates[0].flops_per_second)
    }
    shares = {
        name: _median(each.efficiencies[name] for each in rates) for name in sorted(rates[0].efficiencies)
    }
    return Cluster(
        name=f"local ({rank_records[0].name}{threads})",
        num_devices=world.size,
        devices_per_node=per_node,
        device=Device(
            name="cpu" if rank_records[0].kind == "cpu" else rank_records[0].name,
            memory_bytes=min(rank_record.memory_bytes for rank_record in rank_records),
            flops_per_second=tuple(peaks.items()),
            memory_bytes_per_second=_median(each.memory_bytes_per_second for each in rates),
            launch_seconds=_median(each.launch_seconds for each in rates),
            efficiencies=tuple(shares.items()),
            kind=rank_records[0].kind,
            core_share=_rounded(_core_share(world)) if rank_records[0].kind == "cpu" else 1.0,
            communicator_bytes=generic.device.communicator_bytes,
            host_bytes_per_second=generic.device.host_bytes_per_second,
        ),
        intra_node=_link("near", transfers, per_node, generic.intra_node),
        inter_node=_link("far", transfers, world.size, generic.inter_node),
    )


def _median(values: Iterable[float]) -> float:
    return _rounded(statistics.median(values))


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _link(name: str, transfers: Sequence[dict[str, TransferSeconds]], num_ranks: int, generic: Link) -> Link:
    """The link under measured messages and all-reduces over `num_ranks`; `generic` where nobody measured
    it.
    """
    messages = [each[f"{name}_message"] for each in transfers if f"{name}_message" in each]
    reductions = [each[f"{name}_allreduce"] for each in transfers if f"{name}_allreduce" in each]
    if not messages:
        return generic
    # The large message is chosen so that moving its bytes takes most of its time; a small one that takes
    # longer than half of it was disturbed, and their difference would be noise.
    large = statistics.median(times.large for times in messages)
    latency = min(statistics.median(times.small for times in messages), large / 2)
    bytes_per_second = messages[0].large_bytes / max(large - latency, 1e-7)
    share = 1.0
    # A ring's steps: 2 (n - 1), each with an n-th of the bytes and a latency of its own.
    moving = statistics.median(times.large - times.small for times in reductions) if reductions else 0.0
    if moving > 0:
        step = moving / (2 * (num_ranks - 1))
        share = reductions[0].large_bytes / num_ranks / step / bytes_per_second
    return Link(
        latency_seconds=_rounded(latency),
        bytes_per_second=_rounded(bytes_per_second),
        allreduce_share=_rounded(min(max(share, 0.01), 10.0)),
    )


def _resized(cluster: Cluster, world: World, num_devices: int, devices_per_node: int | None) -> Cluster:
    """The same machines with other numbers of devices; where one rank alone measured, its machine has as many
    as it can have.
    """
    alone = num_devices if world.device.type == "cpu" else min(num_devices, torch.cuda.device_count())
    per_node = devices_per_node or (alone if world.size == 1 else cluster.devices_per_node)
    memory_bytes = cluster.device.memory_bytes
    if world.device.type == "cpu":
        memory_bytes = memory_bytes * cluster.devices_per_node // per_node
    return replace(
        cluster,
        num_devices=num_devices,
        devices_per_node=per_node,
        device=replace(cluster.device, memory_bytes=memory_bytes),
    )
