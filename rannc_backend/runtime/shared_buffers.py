"""Buffers that a model changes: the rank that answers for a new value gives it to all others that keep the
buffer.

In: which rank makes the new value of each buffer that a graph changes, and the table of owners. Out: after a
step, the same value on all
owners: the replicas of the stage that makes it, and the ranks of other stages that read it (in this graph or
in another).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.world import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuffers:
    """The buffers that one graph changes.

    Attributes:
        sources: the rank whose new value counts, by name of the buffer.
        tensors: all buffers of the model by name.
    """

    table: ParameterTable
    sources: Mapping[str, int]
    tensors: Mapping[str, torch.Tensor]
    limit_seconds: float

    def share(self) -> None:
        """Bring the new values to all owners, in one message per source, set of owners and dtype. The owners
        call it together.
        """
        groups: dict[tuple[int, Ranks, str], list[torch.Tensor]] = {}
        for name, source in sorted(self.sources.items()):
            owners = self.table.owners[name]
            if len(owners) > 1 and self.table.owns(name):
                groups.setdefault((source, owners, str(self.tensors[name].dtype)), []).append(
                    self.tensors[name]
                )
        started = []
        for (source, owners, _), tensors in groups.items():
            # A counter on the CPU goes with any device.
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self.table.world.device)
            started.append(
                (source, tensors, flat, self.table.world.transport.broadcast(flat, source, owners))
            )
        for source, tensors, flat, work in started:
            work.wait(self.limit_seconds)
            if self.table.world.rank != source:
                for tensor, part in zip(
                    tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
                ):
                    tensor.copy_(part.view(tensor.shape))
