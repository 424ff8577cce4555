"""Hugging Face's Trainer, and trainers that derive from it (TRL's SFTTrainer), with the model on this backend.

In: what a script gives its Trainer. Out: the same training as one process's on the global batch. Terms: the Trainer's
*share* of a loss is what it expects of a rank where it has counted the items of all ranks (`num_items_in_batch`): a part of
a sum over ranks. The backend's loss is the whole sum on every rank, so a share of it is what the Trainer is given.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.utils import reduce
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rannc_backend.api.functions import full_state_dict
from rannc_backend.capture.module_compile import is_compiled
from rannc_backend.errors import UserInputError
from rannc_backend.integrations.accelerate import join_job, prepare_model
from rannc_backend.integrations.tried_versions import mention_untried
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.torch_internals import root_of
from rannc_backend.settings import hooks

_NAME = "rannc"

# A mixin: what is beside it in a class's bases has the rest of a Trainer.
if TYPE_CHECKING:
    _Trainer = transformers.Trainer
else:
    _Trainer = object


@dataclass
class RanncTrainingArguments(transformers.TrainingArguments):
    """transformers.TrainingArguments that join the job first, so that they know their rank under mpirun, too."""

    def __post_init__(self) -> None:
        join_job()
        super().__post_init__()


class RanncTrainerMixin(_Trainer):
    """What makes a Trainer one of this backend: ``class MyTrainer(RanncTrainerMixin, SFTTrainer): ...``.

    Args:
        rannc_options: of the backend, as of ``torch.compile``; everything else is as the other class takes it.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *others: Any,
        rannc_options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        self._rannc_options = dict(rannc_options or {})
        self._rannc_model: nn.Module | None = None
        join_job()
        mention_untried(transformers)
        if args is not None:
            _refuse_settings(args)
        if isinstance(model, nn.Module) and is_compiled(model):
            raise UserInputError(
                "the Trainer was given a compiled model: it looks at its forward's arguments, and wraps it",
                cure="give the plain model, and the backend's options as rannc_options={...}.",
            )
        super().__init__(model, args, *others, **named)
        _refuse_settings(self.args)
        if self.label_smoother is not None:
            smoother: Any = SmootherOverRanks(self.label_smoother, is_causal=_is_causal(self.model))
            self.label_smoother = smoother

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's; the backend's name is not one of those that Accelerate knows."""
        if self.args.torch_compile:
            self.args.torch_compile, self.args.torch_compile_backend = False, None
            hooks.replace_item("other libraries", os.environ, "ACCELERATE_DYNAMO_BACKEND", "no")
        super().create_accelerator_and_postprocess()

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The compiled model, for training and for evaluation."""
        root = root_of(model)
        if self._rannc_model is None or root_of(self._rannc_model) is not root:
            compiled = prepare_model(self.accelerator, root, options=self._rannc_options)
            shares = functools.partial(compiled.register_forward_hook, with_kwargs=True)
            hooks.register("other libraries", shares, _share_of_loss)
            self._rannc_model = compiled
        return self._rannc_model

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, of a compiled model."""
        self.refuse_plain(model)
        return super().compute_loss(model, *args, **kwargs)

    def refuse_plain(self, model: nn.Module) -> None:
        """Raises UserInputError where it is not the compiled model that is to be called."""
        if model is not self._rannc_model:
            raise UserInputError(
                "this version of the Trainer calls the plain model, which each rank would train by itself",
                cure="use a version of transformers that was tried: docs/trainer.md names them.",
            )

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """All ranks give their parameters, rank 0 writes."""
        if state_dict is None:
            model: Any = self.model
            state_dict = full_state_dict(model)
        super()._save(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """All ranks give their part of the optimizer's state, rank 0 writes."""
        if not self.args.should_save and self.optimizer is not None:
            self.optimizer.state_dict()
        super()._save_optimizer_and_scheduler(output_dir)


class RanncTrainer(RanncTrainerMixin, transformers.Trainer):
    """transformers.Trainer with the model on this backend: stages, replicas and micro-batches as planned."""


@dataclass(frozen=True)
class SmootherOverRanks:
    """The Trainer's label smoother, which knows the model behind a compiled one and counts the labels of all ranks.

    Args:
        smoother: the Trainer's.
        is_causal: whether the model's labels are shifted; the Trainer decides this by the name of the class, which is
            another for every compiled model.
    """

    smoother: Any
    is_causal: bool

    def __call__(
        self,
        output: Any,
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """The loss of which the mean over ranks is that of the rows of all. Collective."""
        shifts, num_ranks = shift_labels or self.is_causal, bootstrap.start().size
        if num_items_in_batch is not None or num_ranks == 1:
            return self.smoother(output, labels, shift_labels=shifts, num_items_in_batch=num_items_in_batch)
        counted = labels[..., 1:] if shifts else labels
        num_items = reduce(counted.ne(self.smoother.ignore_index).sum(), reduction="sum")
        loss = self.smoother(output, labels, shift_labels=shifts, num_items_in_batch=num_items)
        return loss * num_ranks


def _is_causal(model: Any) -> bool:
    """Whether the Trainer takes a model's labels to be shifted."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _share_of_loss(model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    """This rank's share of a loss that is divided by the number of items of all ranks, which the Trainer multiplies by
    the number of ranks, as DistributedDataParallel takes the mean over them.
    """
    if kwargs.get("num_items_in_batch") is None:
        return output
    num_ranks = bootstrap.start().size  # of one rank, too: the Trainer multiplies in place
    if isinstance(output, MutableMapping):
        loss = output.get("loss")
        if loss is not None:
            output["loss"] = loss / num_ranks
        return output
    if isinstance(output, tuple):
        first, *rest = output
        is_loss = isinstance(first, torch.Tensor) and first.dim() == 0
        return (first / num_ranks, *rest) if is_loss else output
    raise UserInputError(
        f"the model gives a {type(output).__name__}, in which the Trainer's loss is not found",
        cure="let it give a dictionary with the key loss, a ModelOutput, or a tuple that begins with the loss.",
    )


def _refuse_settings(args: Any) -> None:
    """Raises UserInputError for settings under which the Trainer would do what the backend does, or wrong numbers."""
    refused = {
        "deepspeed": (
            args.deepspeed,
            "the backend divides the model, its gradients and its optimizer's state",
        ),
        "fsdp": (args.fsdp, "the backend divides the model, its gradients and its optimizer's state"),
        "parallelism_config": (
            args.parallelism_config,
            "the backend divides the model, its gradients and its optimizer's state",
        ),
        "auto_find_batch_size": (args.auto_find_batch_size, "ranks would try different batch sizes"),
        "save_on_each_node": (args.save_on_each_node, "rank 0 alone has the whole model while it is saved"),
        "average_tokens_across_devices=False": (
            not args.average_tokens_across_devices,
            "the loss is that of the rows of all ranks, so it is divided by the number of their items",
        ),
        "torch_compile_backend": (
            args.torch_compile and args.torch_compile_backend != _NAME,
            f"the backend is {_NAME!r}",
        ),
        "torch_compile_mode": (args.torch_compile_mode, "modes mean nothing to this backend"),
    }
    for name, (is_set, why) in refused.items():
        if is_set:
            raise UserInputError(
                f"the training argument {name} cannot be used here: {why}", cure=f"leave {name} out."
            )
