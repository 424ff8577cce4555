"""All parameters and buffers of a planned model whole on every rank, or on rank 0, for a while.

In: the table of ownership. Out: values on ranks that do not own them, in memory of their own; at the end absent
placeholders again, and the owners' tensors in the memory that steps use. Terms: a *holder* has a tensor's value
meanwhile: its owners and the ranks that got it. A *change* is another value at the end than at the begin, however it was
made: checksums are compared, since a change by way of ``.data`` has no version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from rannc_backend.errors import GatheringError
from rannc_backend.kernels.plain_memory import crc32_of, has_plain_memory, plain_memory
from rannc_backend.runtime.absent_tensors import is_absent, make_absent, make_present, strides_of
from rannc_backend.runtime.agreement import agree, exchanging
from rannc_backend.runtime.host_resources import available_bytes
from rannc_backend.runtime.parameters import STATE_CHANNEL, ParameterTable
from rannc_backend.runtime.state_hooks import size_in_bytes, wait_all
from rannc_backend.runtime.world import Ranks, World

# Messages on their way, bytes: more at once would need memory beside the values.
_MAX_UNDER_WAY = 64 * 2**20
_MAX_NAMES = 3
_INSIDE = "inside rannc_backend.gathered"


@dataclass(frozen=True, slots=True)
class _Kind:
    shape: torch.Size
    dtype: torch.dtype
    strides: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Gathering:
    """One model's tensors while they are whole; made by `gather`, ended by `give_back` or `drop`.

    Attributes:
        ranks: that got what they do not own.
        modifier_rank: whose changes count; None: changes are to be the same on all holders.
        kinds: of all parameters and buffers, by name.
        kept: the memory that steps use, of tensors that this rank owns, by name.
        checksums, gradients: at the begin, of what this rank holds.
    """

    table: ParameterTable
    ranks: Ranks
    modifier_rank: int | None
    kinds: dict[str, _Kind]
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, tuple[int, int] | None] = field(default_factory=dict)

    def holders(self, name: str) -> list[int]:
        """Ranks that have the value of a tensor, ascending."""
        return sorted({*self.table.owners[name], *self.ranks})

    def changed(self) -> dict[str, int]:
        """New checksums of what was changed on this rank, by name."""
        found = {name: crc32_of(self.table.tensors[name]) for name in self.checksums}
        return {name: number for name, number in found.items() if number != self.checksums[name]}


def gather(table: ParameterTable, *, ranks: Ranks, modifier_rank: int | None) -> Gathering:
    """Bring every value to ``ranks``. Collective.

    Raises:
        GatheringError: it does not fit into the memory of a rank or of a host; no value has moved.
    """
    table.take_all_replaced()
    root, world = table.module(), table.world
    found: dict[str, torch.Tensor] = dict([*root.named_parameters(), *root.named_buffers()])
    kinds = {name: _Kind(tensor.shape, tensor.dtype, strides_of(tensor)) for name, tensor in found.items()}
    gathering = Gathering(table=table, ranks=ranks, modifier_rank=modifier_rank, kinds=kinds)
    takes = world.rank in ranks
    needed = sum(size_in_bytes(tensor) for tensor in found.values() if takes and _is_elsewhere(tensor, world))
    records = agree(world, "gathered", [needed, available_bytes(world.device)])
    check_room(records, world.hosts, shared=world.device.type == "cpu")
    table.is_gathered = True
    with torch.inference_mode(False), torch.no_grad(), exchanging(world):
        for name, tensor in found.items():
            if not is_absent(tensor):
                gathering.kept[name] = tensor.data
        _send_all(table, {name: (table.owners[name][0], _without(table, name, ranks)) for name in found})
        if takes:
            for tensor in found.values():
                if _is_elsewhere(tensor, world):
                    tensor.data = tensor.data.to(world.device)
    for name, tensor in found.items():
        if not is_absent(tensor):
            gathering.checksums[name] = crc32_of(tensor)
            gathering.gradients[name] = _mark(tensor)
    return gathering


def give_back(gathering: Gathering) -> list[str]:
    """Bring changes to the owners and forget what this rank does not own; gives the names of changed tensors. Collective.

    Raises:
        GatheringError: changes that are not the same on all holders and not the modifier's, gradients, or other
            objects, shapes or dtypes; the same on all ranks.
    """
    table, world = gathering.table, gathering.table.world
    answers = agree(world, "the end of gathered", [_refusal(gathering), gathering.changed()])
    refusals = [text for text, _ in answers if text]
    by_rank = [each for _, each in answers]
    names = sorted(set().union(*by_rank))
    if refusals:
        _restore(gathering)
        first = {name: table.owners[name][0] for name in names}
        # Whatever was made of them: owners go on with the same values.
        with torch.inference_mode(False), torch.no_grad(), exchanging(world):
            _send_all(table, {name: (first[name], list(table.owners[name][1:])) for name in names})
        raise GatheringError(
            f"{refusals[0]} {_INSIDE}",
            cure="make such changes outside of it: train by calls of the compiled model, and replace or convert "
            "parameters before its first call.",
        )
    moves: dict[str, tuple[int, list[int]]] = {}
    lost = []
    for name in names:
        source, fits = _source(gathering, name, by_rank)
        if not fits:
            lost.append(name)
        number = by_rank[source].get(name)
        takers = [owner for owner in table.owners[name] if by_rank[owner].get(name) != number]
        if takers:
            moves[name] = source, takers
    with torch.inference_mode(False), torch.no_grad(), exchanging(world):
        _send_all(table, moves)
    _restore(gathering)
    if lost:
        raise GatheringError(
            f"{_listed(lost)} {'was' if len(lost) == 1 else 'were'} changed {_INSIDE} on some ranks only, or to other "
            "values on each",
            cure="make the same change on all ranks, or name the rank whose changes count: gathered(model, "
            "modifier_rank=0). The value of the first owner was kept, on all its owners.",
        )
    return names


def drop(gathering: Gathering) -> list[str]:
    """`give_back` of this rank alone, where the others may not come to it; gives what was changed on it."""
    changed = sorted(gathering.changed())
    _restore(gathering)
    return changed


def check_room(records: Sequence[Sequence[int]], hosts: Sequence[str], *, shared: bool) -> None:
    """Whether all ranks have room.

    Args:
        records: bytes that each rank needs, and those that it has free (negative: not known).
        hosts: name by rank.
        shared: ranks of a host have its memory together.

    Raises:
        GatheringError: which rank, or host, lacks how many bytes.
    """
    groups: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host if shared else f"rank {rank}", []).append(rank)
    for place, ranks in groups.items():
        needed = sum(records[rank][0] for rank in ranks)
        free = min(records[rank][1] for rank in ranks)
        if 0 <= free < needed:
            where = f"ranks {', '.join(map(str, ranks))} on host {place}" if shared else place
            raise GatheringError(
                f"the model does not fit into the memory of {where}: what is on other ranks takes {needed:,} bytes "
                f"more and {free:,} bytes are free, {needed - free:,} too few",
                cure="gather it on rank 0 alone (rank0_only=True), free memory before (rannc_backend.undeploy), or "
                "generate through the stages: model.compile(backend='rannc') and then model.generate(...).",
            )


def _is_elsewhere(tensor: torch.Tensor, world: World) -> bool:
    """Whether a rank has to make memory on its device to have the value there."""
    return is_absent(tensor) or (tensor.device != world.device and tensor.dim() > 0)


def _without(table: ParameterTable, name: str, ranks: Ranks) -> list[int]:
    return [rank for rank in ranks if rank not in table.owners[name]]


def _send_all(table: ParameterTable, moves: Mapping[str, tuple[int, list[int]]]) -> None:
    """Values by name, each from one rank to some, which get memory for it where they have none."""
    world, under_way = table.world, []
    num_bytes = 0
    for name, (source, takers) in moves.items():
        tensor = table.tensors[name]
        if world.rank == source and takers:
            data = plain_memory(tensor.detach().to(world.device))
            under_way += [world.transport.isend(data, taker, STATE_CHANNEL) for taker in takers]
            num_bytes += size_in_bytes(data)
        elif world.rank in takers:
            value = (
                torch.empty_strided(tensor.shape, strides_of(tensor), dtype=tensor.dtype, device=world.device)
                if is_absent(tensor)
                else tensor.data
            )
            direct = has_plain_memory(value) and value.device == world.device
            target = value if direct else torch.empty(value.shape, dtype=value.dtype, device=world.device)
            world.transport.irecv(target, source, STATE_CHANNEL).wait()
            if not direct:
                value.copy_(target)
            if is_absent(tensor):
                make_present(tensor, value)
        if num_bytes > _MAX_UNDER_WAY:
            wait_all(under_way)
            num_bytes = 0
    wait_all(under_way)


def _source(gathering: Gathering, name: str, by_rank: Sequence[Mapping[str, int]]) -> tuple[int, bool]:
    """The rank whose value of a changed tensor stays, and whether no other change is lost by that."""
    numbers = {rank: by_rank[rank].get(name) for rank in gathering.holders(name)}
    modifier, first = gathering.modifier_rank, gathering.table.owners[name][0]
    made = {number for number in numbers.values() if number is not None}
    if modifier is not None and numbers.get(modifier) is not None and made == {numbers[modifier]}:
        return modifier, True
    return first, len(set(numbers.values())) == 1


def _refusal(gathering: Gathering) -> str:
    """What this rank has made of the model that cannot be given back; "" for nothing."""
    table = gathering.table
    try:
        table.take_all_replaced()
    except Exception as error:
        return str(error).partition("\n")[0]
    for name in gathering.checksums:
        tensor, kind, device = table.tensors[name], gathering.kinds[name], _device_type(gathering, name)
        if (tensor.shape, tensor.dtype, tensor.device.type) != (kind.shape, kind.dtype, device):
            return f"{name!r} got another shape, dtype or device"
        if _mark(tensor) != gathering.gradients[name]:
            return f"gradients of {name!r} were computed"
    return ""


def _device_type(gathering: Gathering, name: str) -> str:
    world = gathering.table.world
    kept = gathering.kept.get(name)
    stays = kept is not None and (world.rank not in gathering.ranks or kept.dim() == 0)
    return kept.device.type if stays and kept is not None else world.device.type


def _mark(tensor: torch.Tensor) -> tuple[int, int] | None:
    """What changes with a tensor's gradient."""
    return None if tensor.grad is None else (id(tensor.grad), tensor.grad._version)


def _restore(gathering: Gathering) -> None:
    table = gathering.table
    with torch.inference_mode(False), torch.no_grad():
        for name, kind in gathering.kinds.items():
            tensor, kept = table.tensors[name], gathering.kept.get(name)
            if kept is None:
                if not is_absent(tensor):
                    home = (
                        "cpu" if table.offloads and isinstance(tensor, nn.Parameter) else table.world.device
                    )
                    tensor.grad = None
                    if (tensor.shape, tensor.dtype) != (kind.shape, kind.dtype):
                        tensor.data = torch.empty((), dtype=kind.dtype, device=home).expand(kind.shape)
                    make_absent(
                        tensor,
                        name,
                        owners=table.owners[name],
                        device=torch.device(home),
                        strides=kind.strides,
                    )
                continue
            if tensor.data_ptr() != kept.data_ptr() or tensor.device != kept.device:
                if (tensor.shape, tensor.dtype) == (kept.shape, kept.dtype):
                    kept.copy_(tensor.data)
                tensor.data = kept
    table.is_gathered = False


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(repr(name) for name in names[:_MAX_NAMES]) + more
