"""`gathered`: a model whole on every rank for a while, to run or to look at as in one process.

In: a model, planned or not. Out: within a ``with`` block all of its parameters and buffers have their values, and its
calls, also those of what `torch.compile` made of it, run plainly on this rank alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from rannc_backend.api.functions import no_value_yet
from rannc_backend.api.gathering import Gathering, drop, gather, give_back
from rannc_backend.errors import GatheringError, RanncError
from rannc_backend.kernels.plain_memory import crc32_of
from rannc_backend.runtime.absent_tensors import is_absent
from rannc_backend.runtime.agreement import agree, failing_together, is_shared
from rannc_backend.runtime.gradients.new_values import note_values
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.torch_internals import root_of
from rannc_backend.runtime.world import World
from rannc_backend.session_registry import REGISTRY


@contextmanager
def gathered(
    model: nn.Module, *, rank0_only: bool = False, modifier_rank: int | None = None
) -> Iterator[nn.Module]:
    """Makes all parameters and buffers of a model whole on every rank within a ``with`` block. Collective.

    Inside, the model runs as in one process: calls of it, of its submodules and of the compiled model are plain PyTorch
    on this rank's arguments alone, ranks may call it differently often, and ``state_dict`` is not collective. So
    ``model.generate(...)`` works, averages can be read, and one rank can call ``save_pretrained``. At the end every
    rank has again what it owns.

    Values that are changed inside go back to the owners: where all ranks have made the same change, and with
    ``modifier_rank`` those of that rank. Whatever else was changed is an error at the end of the block, as are
    gradients that were computed inside. An exception that leaves the block is raised on all ranks; it has a note with
    what was changed by then, which is not brought back.

    Before the first call of the compiled model, every rank has its own values: the block then only checks that they
    are the same. A block within a block for the same model does nothing more.

    Args:
        model: The model, compiled or not, or a part of it.
        rank0_only: Bring values to rank 0 alone. On other ranks the model stays as it is; they wait at the end.
        modifier_rank: The rank whose changes count. With ``rank0_only`` it is 0 or None.

    Returns:
        The plain model.

    Raises:
        GatheringError: The values do not fit into a rank's or a host's memory (it says how many bytes are missing), or
            changes cannot be given back.
        UserInputError: Values of the model are not materialized yet.
    """
    root = root_of(model)
    world = bootstrap.start()
    if world.size == 1:
        with _running_plainly([root]):
            yield root
        return
    with failing_together(world, "gathered"):
        asked = [rank0_only, modifier_rank]
        if any(each != asked for each in agree(world, "gathered", asked)):
            raise GatheringError(
                "ranks have called gathered with different arguments", cure="give it the same on all ranks."
            )
        ranks = (0,) if rank0_only else tuple(range(world.size))
        if modifier_rank is not None and modifier_rank not in ranks:
            raise GatheringError(
                f"modifier_rank={modifier_rank} is no rank that gets the values of others",
                cure=f"name one of ranks {', '.join(map(str, ranks))}.",
            )
        tables = _tables_of(root)
        if not tables:
            _check_alike(root, world)
        gatherings: list[Gathering] = []
        try:
            for table in tables:
                if not table.is_gathered:
                    gatherings.append(gather(table, ranks=ranks, modifier_rank=modifier_rank))
                else:
                    _check_nested(root, ranks, modifier_rank)
            with _running_plainly([root, *(table.module() for table in tables)]):
                yield root
        except BaseException as error:
            changed = [name for gathering in gatherings for name in drop(gathering)]
            if changed:
                error.add_note(
                    f"rannc_backend.gathered was left with changes of {', '.join(changed[:3])}"
                    f"{' and others' if len(changed) > 3 else ''} on this rank, which were not brought to the "
                    "others: load the model anew before going on."
                )
            raise
        _give_all_back(gatherings)


@contextmanager
def _running_plainly(modules: Sequence[nn.Module]) -> Iterator[None]:
    """While it lasts, calls of these modules and of their submodules run without compilation."""
    found = weakref.WeakSet(part for module in modules for part in module.modules())
    REGISTRY.gathered.append(found)
    try:
        yield
    finally:
        REGISTRY.gathered[:] = [each for each in REGISTRY.gathered if each is not found]


def _tables_of(root: nn.Module) -> list[ParameterTable]:
    """Of planned models that have parameters of this one."""
    parameters = list(root.parameters())
    return [
        table
        for table in REGISTRY.tables()
        if any(table.name_of(parameter) is not None for parameter in parameters)
    ]


def _check_alike(root: nn.Module, world: World) -> None:
    """Whether a model that is not planned yet is the same on all ranks."""
    if REGISTRY.deferred_values.any_in(root):
        raise no_value_yet()
    found = {name: crc32_of(tensor) for name, tensor in root.named_parameters()}
    answers = agree(world, "gathered, before the first call", found)
    differing = [name for name, number in found.items() if any(each.get(name) != number for each in answers)]
    if differing:
        raise GatheringError(
            f"{differing[0]!r} and in all {len(differing)} parameters have other values on other ranks, which the "
            "first call of the compiled model would replace by those of rank 0",
            cure="call the compiled model once before, or make the model with the same seed on all ranks.",
        )


def _check_nested(root: nn.Module, ranks: Sequence[int], modifier_rank: int | None) -> None:
    """Whether a block within a block asks for what is there."""
    if modifier_rank is not None or (
        bootstrap.start().rank in ranks and any(is_absent(tensor) for tensor in root.parameters())
    ):
        raise GatheringError(
            "gathered within gathered asks for more than the outer block",
            cure="give rank0_only and modifier_rank to the outer block.",
        )


def _give_all_back(gatherings: Sequence[Gathering]) -> None:
    failure: RanncError | None = None
    for gathering in gatherings:
        try:
            if failure is not None and is_shared(failure):
                drop(gathering)  # another rank has left its block: it does not come
                continue
            note_values(gathering.table, give_back(gathering))
        except RanncError as error:
            if gathering.table.is_gathered:
                drop(gathering)
            failure = failure or error
    if failure is not None:
        raise failure
