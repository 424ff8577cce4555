"""The machines a plan is made for: equal devices, equal nodes, one kind of link within a node and one between nodes.

In: plain numbers. Out: a frozen `Cluster`. Terms: a *device* is what one rank computes on (a GPU, or the share of a CPU
that a process has); a *link* is what a message or one step of a ring costs: latency plus bytes over bandwidth.
The constants of `local_cpu` and `generic_gpu` are of the right order, not measured; the search only compares plans on them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from rannc_backend.ir.plan import ClassEfficiency, ClusterAssumption, DtypeRate

# How operators are told apart: by what bounds them, and how near to the device's peak such kernels come.
OPERATOR_CLASSES = ("matmul", "attention", "convolution", "elementwise")

# Multiply-adds per clock and streaming multiprocessor count two each; dense tensor cores for the half types.
_GPU_FLOPS_PER_CLOCK_AND_SM = {"float64": 64, "float32": 256, "tf32": 1024, "bfloat16": 2048, "float16": 2048}
_GPU_EFFICIENCY = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What it takes to move bytes from one device to another.

    `bytes_per_second`: what a large message reaches, in one direction; `allreduce_share`: the share of it that each step
    of a ring all-reduce reaches (adding up costs time too; more than 1 where a ring uses wires that a pair does not have).
    """

    latency_seconds: float
    bytes_per_second: float
    allreduce_share: float = 1.0

    def __post_init__(self) -> None:
        assert self.latency_seconds >= 0 and self.bytes_per_second > 0 and self.allreduce_share > 0, f"not a link: {self}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device.

    Attributes:
        flops_per_second: peak by dtype name ("float32"), sorted by name.
        memory_bytes_per_second: peak of the device's memory, read and written bytes together.
        efficiencies: share of the peak that an operator class reaches, sorted by class: of `flops_per_second` for
            matmul, attention and convolution, of `memory_bytes_per_second` for elementwise. 1 for a class not in it.
        launch_seconds: per operator, however small.
    """

    name: str
    memory_bytes: int
    flops_per_second: tuple[tuple[str, float], ...]
    memory_bytes_per_second: float
    launch_seconds: float
    efficiencies: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        assert self.memory_bytes > 0 and self.memory_bytes_per_second > 0 and self.launch_seconds >= 0, f"bad {self}"
        assert self.flops_per_second and all(rate > 0 for _, rate in self.flops_per_second), f"no rates in {self}"
        assert {name for name, _ in self.efficiencies} <= set(OPERATOR_CLASSES), f"unknown operator class in {self}"
        assert all(share > 0 for _, share in self.efficiencies), f"an efficiency of nothing in {self}"

    def efficiency(self, operator_class: str) -> float:
        """Share of the peak that the operators of a class reach."""
        assert operator_class in OPERATOR_CLASSES, f"no operator class is called {operator_class!r}"
        return dict(self.efficiencies).get(operator_class, 1.0)

    def rate(self, dtype: str, operator_class: str = "matmul") -> float:
        """FLOP/s reached in a class; a dtype that is not described (integers, bool) counts as the slowest."""
        rates = dict(self.flops_per_second)
        return rates.get(dtype, min(rates.values())) * self.efficiency(operator_class)

    def memory_rate(self, operator_class: str = "elementwise") -> float:
        """Bytes/s reached in a class. Operators that compute much stream at the peak where they are bound by it at all."""
        assert operator_class in OPERATOR_CLASSES, f"no operator class is called {operator_class!r}"
        return self.memory_bytes_per_second * (self.efficiency("elementwise") if operator_class == "elementwise" else 1.0)



@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_devices` equal devices; rank r sits on node r // devices_per_node."""

    name: str
    num_devices: int
    devices_per_node: int
    device: Device
    intra_node: Link
    inter_node: Link

    def __post_init__(self) -> None:
        assert self.num_devices >= 1 and self.devices_per_node >= 1, f"a cluster has devices: {self}"

    def group_link(self, num_ranks: int) -> Link:
        """Slowest link in a group of `num_ranks` neighbouring ranks: within a node while a node can hold them all."""
        return self.intra_node if num_ranks <= self.devices_per_node else self.inter_node

    @property
    def message_link(self) -> Link:
        """Link between stages; where stages lie on nodes is not known while searching, so more than one node counts as far."""
        return self.group_link(self.num_devices)

    def assumption(self) -> ClusterAssumption:
        """This description as the plan keeps it."""
        return ClusterAssumption(
            name=self.name,
            num_devices=self.num_devices,
            devices_per_node=self.devices_per_node,
            device_name=self.device.name,
            device_memory_bytes=self.device.memory_bytes,
            peak_flops=tuple(DtypeRate(dtype=dtype, flops_per_second=rate) for dtype, rate in self.device.flops_per_second),
            efficiencies=tuple(ClassEfficiency(operator_class=name, share=share) for name, share in self.device.efficiencies),
            memory_bytes_per_second=self.device.memory_bytes_per_second,
            launch_seconds=self.device.launch_seconds,
            intra_node_latency_seconds=self.intra_node.latency_seconds,
            intra_node_bytes_per_second=self.intra_node.bytes_per_second,
            intra_node_allreduce_share=self.intra_node.allreduce_share,
            inter_node_latency_seconds=self.inter_node.latency_seconds,
            inter_node_bytes_per_second=self.inter_node.bytes_per_second,
            inter_node_allreduce_share=self.inter_node.allreduce_share,
        )

    @classmethod
    def from_assumption(cls, assumption: ClusterAssumption, *, num_devices: int | None = None) -> Cluster:
        """The cluster that a plan was made for, perhaps with another number of devices: what a re-plan needs."""
        return cls(
            name=assumption.name,
            num_devices=num_devices or assumption.num_devices,
            devices_per_node=assumption.devices_per_node,
            device=Device(
                name=assumption.device_name,
                memory_bytes=assumption.device_memory_bytes,
                flops_per_second=tuple((rate.dtype, rate.flops_per_second) for rate in assumption.peak_flops),
                memory_bytes_per_second=assumption.memory_bytes_per_second,
                launch_seconds=assumption.launch_seconds,
                efficiencies=tuple((entry.operator_class, entry.share) for entry in assumption.efficiencies),
            ),
            intra_node=Link(
                latency_seconds=assumption.intra_node_latency_seconds,
                bytes_per_second=assumption.intra_node_bytes_per_second,
                allreduce_share=assumption.intra_node_allreduce_share,
            ),
            inter_node=Link(
                latency_seconds=assumption.inter_node_latency_seconds,
                bytes_per_second=assumption.inter_node_bytes_per_second,
                allreduce_share=assumption.inter_node_allreduce_share,
            ),
        )


def local_cpu(num_devices: int, *, memory_bytes: int | None = None) -> Cluster:
    """`num_devices` processes on one machine, each with one core's worth of compute and an equal share of the memory.

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

    float32 counts as computed without TF32. Links are assumed to be NVLink within a node, 200 Gbit/s between nodes.
    """
    per_clock = num_multiprocessors * clock_hertz * _GPU_EFFICIENCY
    return Cluster(
        name="local-gpu",
        num_devices=num_devices,
        devices_per_node=devices_per_node,
        device=Device(
            name=device_name,
            memory_bytes=memory_bytes,
            flops_per_second=tuple((dtype, per_clock * flops) for dtype, flops in sorted(_GPU_FLOPS_PER_CLOCK_AND_SM.items())),
            memory_bytes_per_second=memory_bytes_per_second,
            launch_seconds=4e-6,
        ),
        intra_node=Link(latency_seconds=1e-5, bytes_per_second=2e11),
        inter_node=Link(latency_seconds=2e-5, bytes_per_second=2e10),
    )
