"""`torch.amp.GradScaler` over ranks: an infinity in one stage's gradients makes every rank skip the same
step.

In: the tables of ownership. Out: every GradScaler of this process, whichever class the script has it from,
finds on each rank what one process would find over all parameters; so the ranks skip alike and their scales
stay equal. It costs one small message per `unscale_` (or `step`), and nothing without a scaler.

Why the scaler and not the gradients: the only other place where a rank could learn of another's infinity is
``p.grad``, and a gradient that is finite in one process would have to be made infinite here; ranks without
any gradient would stay without word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rannc_backend.errors import RanksDifferError
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.gradients.optimizer_probe import parameters_of
from rannc_backend.runtime.parameters import ParameterTable, is_spread
from rannc_backend.runtime.torch_internals import UnscaleGrads, replace_unscale_grads
from rannc_backend.runtime.world import World


def unscale_over_ranks(world: World, tables: Callable[[], Sequence[ParameterTable]]) -> Callable[[], None]:
    """From now on GradScalers take all ranks' gradients into account; returns a function that ends this.

    Unscaling an optimizer that has a parameter of one of the ``tables`` is collective then; others are left
    alone.
    """

    def make(original: UnscaleGrads) -> UnscaleGrads:
        def unscale(
            scaler: Any,
            optimizer: torch.optim.Optimizer,
            inv_scale: torch.Tensor,
            found_inf: torch.Tensor,
            allow_fp16: bool,
        ) -> dict[torch.device, torch.Tensor]:
            found = original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
            return (
                _of_all_ranks(found, inv_scale, world)
                if is_spread(parameters_of(optimizer), tables())
                else found
            )

        return unscale

    return replace_unscale_grads(make)


def _of_all_ranks(
    found: dict[torch.device, torch.Tensor], inv_scale: torch.Tensor, world: World
) -> dict[torch.device, torch.Tensor]:
    """``found`` with 1 where any rank has found an infinity; a rank without gradients has an entry too.

    Raises:
        RanksDifferError: the ranks' scalers have different scales, so their gradients would not fit together.
    """
    if not found:
        found = {world.device: torch.zeros((), dtype=torch.float32, device=world.device)}
    local = any(bool(tensor.item()) for tensor in found.values())
    # As text: NaN differs from itself.
    answers = agree(world, "GradScaler's unscaling of gradients", [repr(inv_scale.item()), local])
    scales = [answer[0] for answer in answers]
    if len(set(scales)) > 1:
        raise RanksDifferError("scales of the GradScaler (inverse)", value_by_rank=scales)
    if any(answer[1] for answer in answers):
        for tensor in found.values():
            tensor.fill_(1.0)
    return found
