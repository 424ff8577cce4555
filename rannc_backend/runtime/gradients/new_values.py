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

from rannc_backend.errors import ReplicasDifferError, StaleParameterError
from rannc_backend.kernels.plain_memory import has_plain_memory, plain_memory
from rannc_backend.runtime.agreement import agree, exchanging
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.step_counts import apart
from rannc_backend.runtime.world import Ranks, Work

# Below it a message of its own costs more than a copy.
_MAX_PACKED_BYTES = 2**20
_MAX_BYTES_UNDER_WAY = 64 * 2**20
# Values are compared in the first steps, when a loop shows what it does, and now and then.
FIRST_COMPARED, COMPARED_EVERY = 4, 64
_MAX_COMPARED, _MAX_COMPARED_OF_EACH = 4096, 256


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
                if sum(message.packed.nbytes for message in under_way) > _MAX_BYTES_UNDER_WAY:
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
        if tensor.nbytes > _MAX_PACKED_BYTES and has_plain_memory(tensor):
            yield [tensor]
            continue
        if small and num_bytes + tensor.nbytes > _MAX_BYTES_UNDER_WAY // 4:
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


def outside_changes(table: ParameterTable, number: int) -> list[float] | None:
    """A few numbers, alike on ranks of a stage unless parameters were changed outside on some of them only; None where
    nothing is compared. ``number``: of the step.

    Changes by way of ``.data`` have no version: some values are looked at. Where all owners update, values alone tell.
    """
    # To look at all that replicas share, a host that runs ahead waits for its device.
    num_first = FIRST_COMPARED if table.updates or not table.world.runs_behind else 0
    compares = number <= num_first or number % COMPARED_EVERY == 0
    if not table.updates:
        return looked_at([table.tensors[name] for name in _shared_here(table)]) if compares else None
    # In the order of the division, which is the same on all owners.
    mine = _divided_here(table, table.updates)
    found: list[float] = [zlib.crc32(" ".join(_changed(table)).encode())]
    if mine and compares:
        found.append(_sample(table.tensors[mine[number % len(mine)]]))
    return found


def check_outside_changes(
    table: ParameterTable, stage_ranks: Sequence[Ranks], found_by_rank: Sequence[list[float] | None]
) -> None:
    """Raises StaleParameterError, or where all owners update ReplicasDifferError, where ranks of a stage differ.
    Collective then.
    """
    if not table.updates:
        _check_replicas(table, stage_ranks, found_by_rank)
        return
    if all(len({str(found_by_rank[rank]) for rank in ranks}) == 1 for ranks in stage_ranks):
        return
    changed = agree(table.world, "parameters that were changed", _changed(table))
    raise StaleParameterError(sorted(set().union(*changed)))


def _check_replicas(
    table: ParameterTable, stage_ranks: Sequence[Ranks], found_by_rank: Sequence[list[float] | None]
) -> None:
    """Raises ReplicasDifferError where replicas of a stage hold values that differ by more than rounding."""
    differ = {ranks: apart([found_by_rank[rank] or [] for rank in ranks]) for ranks in stage_ranks}
    if not any(differ.values()):
        return
    shared = _shared_here(table)
    own = [shared[place] for ranks, places in differ.items() if table.world.rank in ranks for place in places]
    names = agree(table.world, "parameters of which replicas have different values", own)
    raise ReplicasDifferError(sorted(set().union(*names)))


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


def _shared_here(table: ParameterTable) -> list[str]:
    """The parameters that this rank has and others have too, in their order."""
    return [
        name
        for name, owners in table.owners.items()
        if len(owners) > 1 and table.owns(name) and isinstance(table.tensors[name], torch.nn.Parameter)
    ]


def _sample(tensor: torch.Tensor) -> int:
    """A checksum of some elements' bits."""
    return zlib.crc32(_some(tensor, _MAX_COMPARED).cpu().view(torch.uint8).numpy().data)


def looked_at(tensors: Sequence[torch.Tensor]) -> list[float] | None:
    """For each a weighted sum of some elements, and by how much those of replicas may differ: kinds of devices round
    differently. Waits for the device once. None where there are no tensors.
    """
    found = []
    for tensor in tensors:
        some = _some(tensor, _MAX_COMPARED_OF_EACH)
        values = (torch.view_as_real(some) if some.is_complex() else some).reshape(-1).double()
        weights = torch.linspace(1.0, 2.0, len(values), dtype=torch.float64, device=values.device)
        precision = min(torch.finfo(tensor.dtype).eps ** 0.75, 0.01) if _has_fractions(tensor) else 0.0
        found += [(values * weights).sum(), values.abs().sum() * precision]
    # JSON has neither NaN nor infinities.
    return torch.stack(found).nan_to_num().tolist() if found else None


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _some(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Some elements, over the whole length."""
    flat = plain_memory(tensor.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // number)][:number].contiguous()
