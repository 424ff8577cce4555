"""Clusters for tests, which must not depend on how fast their machine is; constants are of the right order,
not measured.

In: numbers of devices. Out: `Cluster`s.
"""

from __future__ import annotations

import os

from rannc_backend.planner.cluster.cluster import Cluster, Device, Link

# Multiply-adds per clock and streaming multiprocessor count two each; dense tensor cores for the half types.
_GPU_FLOPS_PER_CLOCK_AND_SM = {"float64": 64, "float32": 256, "tf32": 1024, "bfloat16": 2048, "float16": 2048}
_GPU_EFFICIENCY = 0.6


def local_cpu(num_devices: int, *, memory_bytes: int | None = None) -> Cluster:
    """`num_devices` processes on one machine, each with one core's worth of compute and an equal share of the
    memory.

    Args:
        memory_bytes: memory of one process; None: this machine's physical memory over `num_devices`.
    """
    if memory_bytes is None:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_devices
    loopback = Link(latency_seconds=1e-4, bytes_per_second=1e9)
    return Cluster(
        name="local-cpu",
        num_devices=num_devices,
        devices_per_node=num_devices,
        device=Device(
            name="cpu",
            kind="cpu",
            memory_bytes=memory_bytes,
            flops_per_second=(("bfloat16", 1e10), ("float16", 1e10), ("float32", 5e10), ("float64", 2.5e10)),
            memory_bytes_per_second=8e9,
            launch_seconds=5e-6,
        ),
        intra_node=loopback,
        inter_node=Link(latency_seconds=2e-4, bytes_per_second=1e9),
    )


def generic_gpu(
    num_devices: int,
    *,
    devices_per_node: int,
    device_name: str,
    memory_bytes: int,
    num_multiprocessors: int,
    clock_hertz: float = 1.5e9,
    memory_bytes_per_second: float = 1.5e12,
) -> Cluster:
    """GPUs known only by what `torch.cuda.get_device_properties` says, passed in as plain numbers.

    float32 counts as computed without TF32. Links are assumed to be NVLink within a node, 200 Gbit/s between
    nodes.
    """
    per_clock = num_multiprocessors * clock_hertz * _GPU_EFFICIENCY
    return Cluster(
        name="local-gpu",
        num_devices=num_devices,
        devices_per_node=devices_per_node,
        device=Device(
            name=device_name,
            memory_bytes=memory_bytes,
            flops_per_second=tuple(
                (dtype, per_clock * flops) for dtype, flops in sorted(_GPU_FLOPS_PER_CLOCK_AND_SM.items())
            ),
            memory_bytes_per_second=memory_bytes_per_second,
            launch_seconds=4e-6,
        ),
        intra_node=Link(latency_seconds=1e-5, bytes_per_second=2e11),
        inter_node=Link(latency_seconds=2e-5, bytes_per_second=2e10),
    )
