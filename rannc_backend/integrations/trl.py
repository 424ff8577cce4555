"""TRL's SFTTrainer with the model on this backend.

In: what a script gives SFTTrainer. Out: the same training as one process's on the global batch. TRL computes the loss with
an autograd function of its own, in tiles that its code cuts by hand, which cannot be captured; the model's own loss is the
same number, and is what the stages compute.
"""

from __future__ import annotations

from typing import Any

import transformers
import trl
from torch import nn

from rannc_backend.errors import UserInputError
from rannc_backend.integrations.trainer import RanncTrainerMixin
from rannc_backend.integrations.tried_versions import mention_untried

_LOSS = "nll"


class RanncSFTTrainer(RanncTrainerMixin, trl.SFTTrainer):
    """trl.SFTTrainer with the model on this backend; its logs have no entropy and no accuracy of tokens."""

    def __init__(self, *args: Any, **named: Any) -> None:
        mention_untried(trl)
        super().__init__(*args, **named)
        loss_type = getattr(self.args, "loss_type", _LOSS)
        if loss_type != _LOSS:
            raise UserInputError(
                f"loss_type={loss_type!r} is computed by TRL outside of the model, and cannot be captured",
                cure=f"use loss_type={_LOSS!r}.",
            )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The model's own loss, with what SFTTrainer asks of its forward."""
        self.refuse_plain(model)
        inputs["use_cache"] = False
        return transformers.Trainer.compute_loss(
            self, model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
