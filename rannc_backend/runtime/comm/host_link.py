"""Copies between a rank's host and its device, for parameters that lie on the host (option offload).

In: host tensors, and a program whose stages read them. Out: their values on the device while the stages need them, and
gradients on the host. Terms: the *host link* is what carries both; the device's side of it is a *pool* whose bytes are
counted. On a CPU both sides are memory of the host, and a copy is there at once.

Where the device works behind the host, copies have a stream of their own. The host waits for them at the end of each
run of a program, since whoever changes a parameter next changes what they read, and before gradients are handed out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rannc_backend.ir.action import ActionKind, Program
from rannc_backend.runtime.comm.streams import DeviceLayer, Event, Stream


class MemoryCount(Protocol):
    """Counts memory from when it is added to when it is freed."""

    live_bytes: int
    peak_bytes: int

    def add(self, values: Iterable[Any]) -> None:
        """Count the memory of tensors; what is counted already counts once."""
        ...


@dataclass(slots=True)
class UnderWay:
    """Copies that have been started; ``sources`` are kept until the compute stream has waited for them."""

    link: HostLink
    event: Event | None
    sources: list[torch.Tensor]

    def wait(self) -> None:
        """Make the compute stream wait for them."""
        if self.event is not None and self.link.layer is not None:
            self.link.layer.compute().wait_event(self.event)
        self.sources.clear()

    def wait_on_host(self) -> None:
        """Make the host wait for them."""
        if self.event is not None:
            self.event.synchronize()


@dataclass(slots=True, kw_only=True)
class HostLink:
    """See the module docstring. ``layer``: of a device that works behind the host; None: of a CPU.

    ``parameters``, ``gradients``: count the device's side.
    """

    device: torch.device
    parameters: MemoryCount
    gradients: MemoryCount
    layer: DeviceLayer | None = None
    _stream: Stream | None = None

    def fetch(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], UnderWay]:
        """Start to copy tensors to the device, in their layouts. They may be read after `UnderWay.wait`, and the tensors
        be changed after `UnderWay.wait_on_host`.
        """
        sources = [_memory_of(tensor) for tensor in tensors]
        targets = [torch.empty(each.shape, dtype=each.dtype, device=self.device) for each in sources]
        self.parameters.add(targets)
        under_way = self._copy(sources, targets)
        copies = [
            target.as_strided(tensor.shape, tensor.stride())
            for target, tensor in zip(targets, tensors, strict=True)
        ]
        return copies, under_way

    def bring(self, source: torch.Tensor, target: torch.Tensor) -> UnderWay:
        """Start to copy device memory to the host, after what the compute stream has been given so far."""
        return self._copy([source], [target])

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory on the host, which the device copies to without it."""
        if self.layer is None:
            return torch.zeros(numel, dtype=dtype)
        return self.layer.pinned(numel * dtype.itemsize).view(dtype)

    def _copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> UnderWay:
        if self.layer is None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return UnderWay(self, None, [])
        if self._stream is None:
            self._stream = self.layer.new_stream()
        # Kernels that were queued before may still use the memory, or make what is copied.
        self._stream.wait_event(self.layer.compute().record_event())
        with self.layer.on(self._stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        return UnderWay(self, self._stream.record_event(), [*sources, *targets])


@dataclass(slots=True, kw_only=True)
class StageParameters:
    """The parameters of a rank's stages on its device, anew in each run of a program.

    A stage's copies are started when the stage before it, of this rank, begins, and let go of after its last forward: what
    backward needs is among the saved values. ``names(stage)``: of the parameters that it reads, of ``tensors``.
    """

    link: HostLink
    tensors: Mapping[str, torch.Tensor]
    names: Callable[[int], Sequence[str]]
    _to_come: list[int] = field(default_factory=list)  # stages, the next one last
    _num_forwards: Counter[int] = field(default_factory=Counter)  # that are still to come, by stage
    _copies: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    _under_way: dict[int, UnderWay] = field(default_factory=dict)
    _all: list[UnderWay] = field(default_factory=list)

    def begin(self, program: Program) -> None:
        """A run of ``program`` begins."""
        stages = [action.stage for action in program if action.kind is ActionKind.FORWARD]
        self.end()  # of one that was not run to its end
        self._copies.clear()
        self._under_way.clear()
        self._num_forwards = Counter(stages)
        self._to_come = list(reversed(dict.fromkeys(stages)))
        self._start_next()

    def forward_begins(self, stage: int) -> None:
        """A forward of ``stage`` is next; the copies of the stage after it are started with the first."""
        while stage not in self._copies:
            assert self._to_come, f"a forward of stage {stage} that the program does not have"
            self._start_next()
        if stage in self._under_way:
            self._under_way.pop(stage).wait()
            self._start_next()

    def of(self, stage: int, name: str) -> torch.Tensor:
        """The copy of a parameter, within a forward of ``stage``."""
        return self._copies[stage][name]

    def forward_done(self, stage: int) -> None:
        """A forward of ``stage`` has been queued."""
        self._num_forwards[stage] -= 1
        if not self._num_forwards[stage]:
            del self._copies[stage]

    def end(self) -> None:
        """The run has come to its end: parameters may be changed."""
        for under_way in self._all:
            under_way.wait_on_host()
        self._all.clear()

    def _start_next(self) -> None:
        if not self._to_come:
            return
        stage = self._to_come.pop()
        # Stages of one rank may share parameters.
        there = {
            id(self.tensors[name]): copy for copies in self._copies.values() for name, copy in copies.items()
        }
        wanted = {id(self.tensors[name]): self.tensors[name] for name in self.names(stage)}
        missing = [tensor for key, tensor in wanted.items() if key not in there]
        copies, under_way = self.link.fetch(missing)
        there |= {id(tensor): copy for tensor, copy in zip(missing, copies, strict=True)}
        self._copies[stage] = {name: there[id(self.tensors[name])] for name in self.names(stage)}
        self._under_way[stage] = under_way
        self._all.append(under_way)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that a tensor lies over, from its first to its last, in one dimension."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((extent if tensor.numel() else 0,), (1,))
