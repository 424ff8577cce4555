"""Which transport brings tensors to other ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rannc_backend.errors import LaunchError
from rannc_backend.runtime.comm.device_watch import DeviceWatch
from rannc_backend.runtime.comm.gloo import UNLIMITED, GroupTransport, OwnedGroups
from rannc_backend.runtime.comm.nccl import NcclCalls, NcclTransport
from rannc_backend.runtime.comm.shared_memory import place
from rannc_backend.runtime.comm.staged import StagedTransport
from rannc_backend.runtime.comm.streams import CudaLayer
from rannc_backend.runtime.host_resources import own_mask
from rannc_backend.runtime.job import meeting as meetings
from rannc_backend.runtime.job.monitor import LinkMonitor
from rannc_backend.runtime.launch import Launch
from rannc_backend.runtime.world import StartOptions, Transport
from rannc_backend.settings import hooks

# (host name, CUDA_VISIBLE_DEVICES, number of devices, place: see shared_memory.py, network and addresses: see
# meeting.py, CPUs: see runtime/host_resources.py); a plain list because it travels as JSON.
RankRecord = list[Any]
_RECORD_TYPES = (str, str, int, str, str, list, str)


# NCCL refuses two ranks on one device of one host. With a name of its own each rank passes for a host, and
# talks over loopback.
_SHARED_NCCL = {
    "NCCL_HOSTID": "rannc-rank-{rank}",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}


def make_transport(
    options: StartOptions,
    launch: Launch,
    device: torch.device,
    rank_records: Sequence[RankRecord],
    monitor: LinkMonitor,
) -> Transport:
    """NCCL between devices, gloo between CPUs, and where ranks share a device gloo with copies."""
    rank, size, limit = launch.rank, launch.size, options.limit_seconds
    groups = OwnedGroups(owns_default_group=launch.launcher != "user")
    if uses_nccl(options, device):
        layer, watch = CudaLayer(device), DeviceWatch(monitor, rank=rank, limit_seconds=limit)
        return NcclTransport(
            rank=rank,
            size=size,
            limit_seconds=limit,
            layer=layer,
            calls=NcclCalls(),
            watch=watch,
            groups=groups,
        )
    arguments: dict[str, Any] = {
        "rank": rank,
        "size": size,
        "device": device,
        "limit_seconds": limit,
        "message_group": dist.new_group(backend="gloo", timeout=UNLIMITED),
        "groups": groups,
        "watch": monitor,
    }
    if device.type == "cuda":
        return StagedTransport(layer=CudaLayer(device), **arguments)
    return GroupTransport(places=tuple(rank_record[3] for rank_record in rank_records), **arguments)


def uses_nccl(options: StartOptions, device: torch.device) -> bool:
    return device.type == "cuda" and options.share_devices != "gloo"


def set_nccl_environment(environ: MutableMapping[str, str], *, rank: int, shared: bool) -> None:
    """What NCCL reads when it starts; what the user has set stays."""
    if shared:
        for name, value in _SHARED_NCCL.items():
            if name not in environ:
                hooks.replace_item("NCCL", environ, name, value.format(rank=rank))


def checked_rank_record(rank_record: Any) -> RankRecord:
    """A rank record as another rank sends it.

    Raises:
        LaunchError: it is none.
    """
    if (
        not isinstance(rank_record, list)
        or len(rank_record) != len(_RECORD_TYPES)
        or any(type(part) is not kind for part, kind in zip(rank_record, _RECORD_TYPES))
    ):
        raise LaunchError(
            f"what a rank says of itself is {str(rank_record)[:100]!r}", cure=meetings.STRANGER_CURE
        )
    return [*rank_record[:5], meetings.checked_addresses(rank_record[5]), rank_record[6]]


def own_rank_record() -> RankRecord:
    visible, addresses = (
        os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        meetings.chosen_first(meetings.own_addresses(), os.environ),
    )
    return [
        socket.gethostname(),
        visible,
        torch.cuda.device_count(),
        place(),
        meetings.network(),
        addresses,
        own_mask(),
    ]


def number_on_host(rank_records: Sequence[RankRecord], rank: int) -> int:
    return sum(1 for rank_record in rank_records[:rank] if rank_record[0] == rank_records[rank][0])
