"""The machines a plan is made for: equal devices, equal nodes, one kind of link within a node and one between
nodes.

In: plain numbers. Out: a frozen `Cluster`. Terms: a *device* is what one rank computes on (a GPU, or the
share of a CPU that a process has); a *link* is what a message or one step of a ring costs: latency plus bytes
over bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from rannc_backend.ir.plan import ClassEfficiency, ClusterAssumption, DeviceKind, DtypeRate

# How operators are told apart: by what bounds them, and how near to the device's peak such kernels come.
SHARES = (1e-3, 16.0)  # the least and the largest efficiency that is believed
OPERATOR_CLASSES = ("matmul", "attention", "convolution", "elementwise")
# Where a description does not say it: what large copies over PCIe 3.0 x16 reach.
HOST_BYTES_PER_SECOND = 12e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What it takes to move bytes from one device to another.

    `bytes_per_second`: what a large message reaches, in one direction; `allreduce_share`: the share of it
    that each step of a ring all-reduce reaches (adding up costs time too; more than 1 where a ring uses wires
    that a pair does not have).
    """

    latency_seconds: float
    bytes_per_second: float
    allreduce_share: float = 1.0

    def __post_init__(self) -> None:
        assert self.latency_seconds >= 0 and self.bytes_per_second > 0 and self.allreduce_share > 0, (
            f"not a link: {self}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device. `kind`: what torch calls it, "cuda" or "cpu"; models on "meta" are traced for it.

    Attributes:
        flops_per_second: peak by dtype name ("float32"), sorted by name.
        memory_bytes_per_second: peak of the device's memory, read and written bytes together.
        efficiencies: share of the peak that an operator class reaches, sorted by class: of `flops_per_second`
        for
            matmul, attention and convolution, of `memory_bytes_per_second` for elementwise. 1 for a class not
            in it.
        launch_seconds: per operator, however small.
        communicator_bytes: what the library that moves tensors between devices takes of the memory for each
        of its communicators.
        host_bytes_per_second: what a large copy between the device and its host reaches, in one direction.
        core_share: part of a core that each device has when all of its machine compute; the rates are those
        of a whole one. Below 1
            for more processes than cores: one that waits gives its core to another.
    """

    name: str
    memory_bytes: int
    flops_per_second: tuple[tuple[str, float], ...]
    memory_bytes_per_second: float
    launch_seconds: float
    efficiencies: tuple[tuple[str, float], ...] = ()
    kind: DeviceKind = "cuda"
    core_share: float = 1.0
    communicator_bytes: int = 0
    host_bytes_per_second: float = HOST_BYTES_PER_SECOND

    def __post_init__(self) -> None:
        assert self.host_bytes_per_second > 0, f"no copies from the host in {self}"
        assert self.memory_bytes > 0 and self.memory_bytes_per_second > 0 and self.launch_seconds >= 0, (
            f"bad {self}"
        )
        assert self.flops_per_second and all(rate > 0 for _, rate in self.flops_per_second), (
            f"no rates in {self}"
        )
        assert {name for name, _ in self.efficiencies} <= set(OPERATOR_CLASSES), (
            f"unknown operator class in {self}"
        )
        assert all(share > 0 for _, share in self.efficiencies), f"an efficiency of nothing in {self}"
        assert 0 < self.core_share <= 1, f"no share of a core in {self}"
        assert self.communicator_bytes >= 0, f"a communicator of less than nothing in {self}"

    def efficiency(self, operator_class: str) -> float:
        """Share of the peak that the operators of a class reach."""
        assert operator_class in OPERATOR_CLASSES, f"no operator class is called {operator_class!r}"
        return dict(self.efficiencies).get(operator_class, 1.0)

    def rate(self, dtype: str, operator_class: str = "matmul") -> float:
        """FLOP/s reached in a class; a dtype that is not described (integers, bool) counts as the slowest."""
        rates = dict(self.flops_per_second)
        return rates.get(dtype, min(rates.values())) * self.efficiency(operator_class)

    def memory_rate(self, operator_class: str = "elementwise") -> float:
        """Bytes/s reached in a class. Operators that compute much stream at the peak where they are bound by
        it at all.
        """
        assert operator_class in OPERATOR_CLASSES, f"no operator class is called {operator_class!r}"
        return self.memory_bytes_per_second * (
            self.efficiency("elementwise") if operator_class == "elementwise" else 1.0
        )


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

    def assumption(self) -> ClusterAssumption:
        """This description as the plan keeps it."""
        return ClusterAssumption(
            name=self.name,
            num_devices=self.num_devices,
            devices_per_node=self.devices_per_node,
            device_name=self.device.name,
            device_kind=self.device.kind,
            core_share=self.device.core_share,
            communicator_bytes=self.device.communicator_bytes,
            host_bytes_per_second=self.device.host_bytes_per_second,
            device_memory_bytes=self.device.memory_bytes,
            peak_flops=tuple(
                DtypeRate(dtype=dtype, flops_per_second=rate) for dtype, rate in self.device.flops_per_second
            ),
            efficiencies=tuple(
                ClassEfficiency(operator_class=name, share=share) for name, share in self.device.efficiencies
            ),
            memory_bytes_per_second=self.device.memory_bytes_per_second,
            launch_seconds=self.device.launch_seconds,
            intra_node_latency_seconds=self.intra_node.latency_seconds,
            intra_node_bytes_per_second=self.intra_node.bytes_per_second,
            intra_node_allreduce_share=self.intra_node.allreduce_share,
            inter_node_latency_seconds=self.inter_node.latency_seconds,
            inter_node_bytes_per_second=self.inter_node.bytes_per_second,
            inter_node_allreduce_share=self.inter_node.allreduce_share,
        )
