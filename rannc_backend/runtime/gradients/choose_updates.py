"""Which replica updates which parameter of a model that is deployed, unless an optimizer stands against it.

In: the trained parameters with their owners, the optimizers of this process. Out: `ir.updates.divide`'s, or nothing
where an optimizer updates parameters from each other: then each replica updates all, as without ZeRO.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from rannc_backend.ir.updates import Update, divide
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.gradients.optimizer_probe import couples_parameters, optimizers_of
from rannc_backend.runtime.world import Ranks, World

logger = logging.getLogger(__name__)


def choose_updates(
    world: World,
    trained: Mapping[str, torch.Tensor],
    owners: Mapping[str, Ranks],
    num_groups: int,
    *,
    tries_optimizers: bool,
) -> dict[str, Update]:
    """The same on every rank. Collective.

    Args:
        trained: parameters that require gradients, by name; all of them have ``owners``.
        tries_optimizers: whether optimizers are tried on copies.
    """
    coupling = _coupling_optimizers(list(trained.values())) if tries_optimizers else []
    found = sorted(set().union(*agree(world, "optimizers under zero_stage", coupling)))
    if found:
        if world.rank == 0:
            logger.warning(
                "zero_stage is left out: %s updates parameters from each other, or cannot be tried on copies",
                " and ".join(found),
            )
        return {}
    return divide({name: parameter.nbytes for name, parameter in trained.items()}, owners, num_groups)


def _coupling_optimizers(parameters: Sequence[torch.Tensor]) -> list[str]:
    found = optimizers_of(parameters)
    return sorted({type(each).__name__ for each in found if couples_parameters(each) in (True, None)})
