"""New values of parameters that not all of their owners update, from the updaters to the others.

In: the table of ownership, which says who updates what (`ir/updates.py`), and the parameters that an optimizer has
stepped. Out: equal values on all owners again, before anything else of the script can read them; an error where a
parameter was changed in another way on some of its owners only. Terms: a change is *outside* if no step of a
`torch.optim.Optimizer` made it.

Large parameters are sent as they lie; small ones of one updater travel together.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from rannc_backend.errors import StaleParameterError
from rannc_backend.kernels.plain_memory import has_plain_memory, plain_memory
from rannc_backend.runtime.agreement import agree, exchanging
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.world import Ranks, Work

# Below it a message of its own costs more than a copy.
_MOST_PACKED_BYTES = 2**20
_MOST_UNDER_WAY = 64 * 2**20
# Values are compared in the first steps, when a loop shows what it does, and now and then.
_FIRST_COMPARED, _COMPARED_EVERY = 4, 64
_MOST_COMPARED = 4096


@dataclass(slots=True, kw_only=True)
class _Message:
    """A broadcast under way, with the parameters to be filled from it: none where it is one itself."""

    work: Work
    packed: torch.Tensor
    targets: list[torch.Tensor] = field(default_factory=list)

    def finish(self) -> None:
        self.work.wait()
        offset = 0
        for target in self.targets:
            target.copy_(self.packed[offset : offset + target.numel()].view(target.shape))
            offset += target.numel()


def send_new_values(table: ParameterTable, names: Sequence[str]) -> None:
    """From updaters to the other owners. Collective among the owners of each of these parameters."""
    world, tensors = table.world, table.tensors
    mine = sorted(
        (group, updater, str(tensors[name].dtype), name)
        for name in _divided_here(table, names)
        for updater, group in [table.updates[name].of(world.rank)]
        if len(group) > 1
    )
    under_way: list[_Message] = []
    with exchanging(world), torch.no_grad():
        for (group, updater, _), entries in groupby(mine, key=lambda entry: entry[:3]):
            for batch in _batches([tensors[entry[3]].detach() for entry in entries]):
                under_way.append(_start(table, batch, updater, group))
                if sum(message.packed.nbytes for message in under_way) > _MOST_UNDER_WAY:
                    _finish(under_way)
        _finish(under_way)
    note_values(table, names)


def _finish(under_way: list[_Message]) -> None:
    for message in under_way:
        message.finish()
    under_way.clear()


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Large tensors alone, small ones together."""
    small: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if tensor.nbytes > _MOST_PACKED_BYTES and has_plain_memory(tensor):
            yield [tensor]
            continue
        if small and num_bytes + tensor.nbytes > _MOST_UNDER_WAY // 4:
            yield small
            small, num_bytes = [], 0
        small.append(tensor)
        num_bytes += tensor.nbytes
    if small:
        yield small


def _start(table: ParameterTable, batch: Sequence[torch.Tensor], updater: int, group: Ranks) -> _Message:
    transport, device = table.world.transport, table.world.device
    if len(batch) == 1 and has_plain_memory(batch[0]) and batch[0].device == device:
        return _Message(work=transport.broadcast(batch[0], updater, group), packed=batch[0])
    if table.world.rank == updater:
        packed = torch.cat([plain_memory(tensor).reshape(-1) for tensor in batch]).to(device)
        return _Message(work=transport.broadcast(packed, updater, group), packed=packed)
    packed = batch[0].new_empty(sum(tensor.numel() for tensor in batch), device=device)
    return _Message(work=transport.broadcast(packed, updater, group), packed=packed, targets=list(batch))


def note_values(table: ParameterTable, names: Iterable[str]) -> None:
    """These parameters have the same values on all owners now."""
    for name in _divided_here(table, names):
        table.versions[name] = table.tensors[name]._version


def outside_changes(table: ParameterTable, number: int) -> list[int] | None:
    """A few numbers, equal on ranks of a stage unless parameters were changed outside on some of them only; None where
    all owners update. ``number``: of the step.

    Changes by way of ``.data`` have no version: some values are looked at.
    """
    if not table.updates:
        return None
    # In the order of the division, which is the same on all owners.
    mine = _divided_here(table, table.updates)
    found = [zlib.crc32(" ".join(_changed(table)).encode())]
    if mine and (number <= _FIRST_COMPARED or number % _COMPARED_EVERY == 0):
        found.append(_sample(table.tensors[mine[number % len(mine)]]))
    return found


def check_outside_changes(
    table: ParameterTable, stage_ranks: Sequence[Ranks], found_by_rank: Sequence[list[int] | None]
) -> None:
    """Raises StaleParameterError where ranks of a stage differ. Collective then."""
    if all(len({str(found_by_rank[rank]) for rank in ranks}) == 1 for ranks in stage_ranks):
        return
    changed = agree(table.world, "parameters that were changed", _changed(table))
    raise StaleParameterError(sorted(set().union(*changed)))


def _divided_here(table: ParameterTable, names: Iterable[str]) -> list[str]:
    """The parameters among these that not all owners update, and that this rank has, in their order."""
    return [name for name in names if name in table.updates and table.owns(name)]


def _changed(table: ParameterTable) -> list[str]:
    tensors, versions = table.tensors, table.versions
    return [
        name
        for name in _divided_here(table, table.updates)
        if tensors[name]._version != versions.get(name, 0)
    ]


def _sample(tensor: torch.Tensor) -> int:
    """A checksum of some elements' bits."""
    flat = plain_memory(tensor.detach()).reshape(-1)
    some = flat[:: max(1, flat.numel() // _MOST_COMPARED)][:_MOST_COMPARED].contiguous()
    return zlib.crc32(some.cpu().view(torch.uint8).numpy().data) if some.numel() else 0
