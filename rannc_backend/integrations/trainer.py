"""Hugging Face's Trainer, and trainers that derive from it (TRL's SFTTrainer), with the model on this backend.

In: what a script gives its Trainer. Out: the same training as one process's on the global batch. Terms: the Trainer's
*share* of a loss is what it expects of a rank where it has counted the items of all ranks (`num_items_in_batch`): a part of
a sum over ranks. The backend's loss is the whole sum on every rank, so a share of it is what the Trainer is given.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.utils import recursively_apply, reduce
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import find_batch_size

from rannc_backend.api.functions import full_state_dict
from rannc_backend.capture.module_compile import is_compiled
from rannc_backend.errors import UserInputError
from rannc_backend.integrations.accelerate import join_job, prepare_model
from rannc_backend.integrations.generation import generate
from rannc_backend.integrations.tried_versions import mention_untried
from rannc_backend.log.logger import say_once
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.torch_internals import root_of
from rannc_backend.session_registry import REGISTRY
from rannc_backend.settings import hooks

logger = logging.getLogger(__name__)
_NAME = "rannc"
_COUNT_TWICE = (
    "rows that fill up an epoch's last batch count twice in its loss, since %s; dataloader_drop_last=True leaves that batch "
    "out, and with a number of rows that the batch of all ranks divides there is none"
)
_IGNORED = -100  # a label that counts in no loss of transformers

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

    def __init__(self, *given: Any, rannc_options: Mapping[str, Any] | None = None, **named: Any) -> None:
        self._rannc_options = dict(rannc_options or {})
        self._rannc_model: nn.Module | None = None
        join_job()
        mention_untried(transformers)
        # Of other trainers args is not the second: DPOTrainer takes a reference model before.
        bound = inspect.signature(super().__init__).bind_partial(*given, **named)
        model, args = bound.arguments.get("model"), bound.arguments.get("args")
        if isinstance(args, transformers.TrainingArguments):
            _refuse_settings(args)
        if isinstance(model, nn.Module) and is_compiled(model):
            raise UserInputError(
                "the Trainer was given a compiled model: it looks at its forward's arguments, and wraps it",
                cure="give the plain model, and the backend's options as rannc_options={...}.",
            )
        super().__init__(*given, **named)
        _refuse_settings(self.args)
        if self.label_smoother is not None:
            smoother: Any = SmootherOverRanks(self.label_smoother, is_causal=_is_causal(self.model))
            self.label_smoother = smoother
        if self.compute_loss_func is not None:
            self.compute_loss_func = LossOverRanks(self.compute_loss_func)

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

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, without the rows that Accelerate fills up an epoch's last batch with."""
        return super().get_batch_samples(map(self._without_repeated, epoch_iterator), *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's; Seq2SeqTrainer would gather rows that are there a second time, too."""
        if getattr(self, "gather_function", None) == self.accelerator.gather:
            self.gather_function = self._gathered_once
        return super().evaluation_loop(*args, **kwargs)

    def _gathered_once(self, values: Any) -> Any:
        """Values of all rows, each once; but losses as Seq2SeqTrainer has them in one process, the last batch's as often."""
        is_loss = isinstance(values, torch.Tensor) and values.dim() == 1 and values.is_floating_point()
        gathering = self.accelerator.gather if is_loss else self.accelerator.gather_for_metrics
        return gathering(values)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, without the rows that Accelerate fills up the last batch with; what it gives has as many rows as
        that batch, as it is gathered.
        """
        generates = bool(getattr(self.args, "predict_with_generate", False))
        own = self._without_repeated(inputs, keeps_rows=generates)
        with self._generating() if generates else contextlib.nullcontext():
            loss, logits, labels = super().prediction_step(model, own, *args, **kwargs)
        if loss is not None and not self._is_loss_inside():
            loss = reduce(loss, reduction="mean")  # of a last batch rank 0's alone would count
        num_rows, num_own = find_batch_size(inputs), find_batch_size(own)
        return loss, *(_with_rows(each, num_own, num_rows) for each in (logits, labels))

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The Trainer's; the loss that it logs is that of all ranks' rows."""
        loss = super().training_step(*args, **kwargs)
        return loss if self._is_loss_inside() else reduce(loss, reduction="mean")

    def _is_loss_inside(self) -> bool:
        """Whether the loss is the model's, which has the same value on all ranks."""
        return self.label_smoother is None and self.compute_loss_func is None and _is_ours(self)

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """The model generates through the stages."""
        compiled = self._rannc_model
        assert compiled is not None, "the Trainer wraps its model before it evaluates"
        through_stages = functools.partial(generate, compiled)
        undo = hooks.replace_item("other libraries", vars(self.model), "generate", through_stages)
        try:
            yield
        finally:
            undo()

    def _without_repeated(self, inputs: dict[str, Any], *, keeps_rows: bool = False) -> dict[str, Any]:
        """A rank's batch without rows that are there a second time, so that all ranks together have what one process has.

        Where there are fewer rows than a stage has replicas, and with ``keeps_rows``, they stay, and their labels are
        ignored. A loss of the script's own is a mean over a rank's rows, which there may be none of: its batches stay as
        they are, which is said.
        """
        state, world = self.accelerator.gradient_state, bootstrap.start()
        if world.size == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return inputs
        num_rows = find_batch_size(inputs)
        if not num_rows or not self.accelerator.even_batches:
            return inputs
        if not _is_ours(self):
            say_once(logger, _COUNT_TWICE, "it is for a loss of the script's own", level=logging.WARNING)
            return inputs
        num_own = min(max(state.remainder - world.rank * num_rows, 0), num_rows)
        if (
            state.remainder >= _most_replicas(getattr(self, "_rannc_model", None), world.size)
            and not keeps_rows
        ):
            cut = functools.partial(_cut, num_rows=num_rows, num_own=num_own)
            return recursively_apply(cut, inputs)
        labels = [inputs[name] for name in self.label_names if isinstance(inputs.get(name), torch.Tensor)]
        if not keeps_rows and any(each.is_floating_point() for each in labels):
            why = "it has fewer rows than a stage has replicas, and its labels are no whole numbers"
            say_once(logger, _COUNT_TWICE, why, level=logging.WARNING)
        ignored = functools.partial(_ignored, num_own=num_own)
        return {
            name: recursively_apply(ignored, value) if name in self.label_names else value
            for name, value in inputs.items()
        }

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
        with _states_of_this_rank(self.model):
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


@dataclass
class LossOverRanks:
    """A loss function of the script's own, which must divide by the number of items of all ranks: the Trainer multiplies by
    the number of ranks what it gives.

    Args:
        function: the script's `compute_loss_func`.
    """

    function: Callable[..., Any]
    _divides: bool = False

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        """The function's loss.

        Raises:
            UserInputError: it is the same whatever the number of items.
        """
        loss = self.function(outputs, labels, num_items_in_batch=num_items_in_batch)
        if (
            self._divides
            or num_items_in_batch is None
            or bootstrap.start().size == 1
            or not loss.detach().any()
        ):
            return loss
        with torch.no_grad():
            other = self.function(outputs, labels, num_items_in_batch=2 * num_items_in_batch)
        if torch.equal(loss.detach(), other):
            raise UserInputError(
                "compute_loss_func does not use num_items_in_batch, and the Trainer multiplies what it gives by the number "
                "of ranks",
                cure="divide the sum over items by num_items_in_batch, which counts the items of all ranks and of all "
                "forwards of an update.",
            )
        self._divides = True
        return loss


@contextlib.contextmanager
def _states_of_this_rank(model: Any) -> Iterator[None]:
    """While one rank writes a state that it has: PEFT asks parts of the model for the names of their states, which other
    ranks do not.
    """
    session = REGISTRY.sessions.get(root_of(model))
    table = None if session is None else session.table
    if table is None or table.is_gathered:
        yield
        return
    table.is_gathered = True
    try:
        yield
    finally:
        table.is_gathered = False


def _is_ours(trainer: Any) -> bool:
    """Whether the loss is the Trainer's or the model's, and not that of a `compute_loss` of the script or of another library."""
    makers = (each for each in type(trainer).__mro__ if "compute_loss" in vars(each))
    first = next((each for each in makers if each is not RanncTrainerMixin), transformers.Trainer)
    return first is transformers.Trainer or first.__module__.startswith("rannc_backend.")


def _most_replicas(model: Any, num_ranks: int) -> int:
    """Of a stage; as many as ranks before there is a plan."""
    session = None if model is None else REGISTRY.of(model)
    plan = None if session is None else session.plan
    return num_ranks if plan is None else max(stage.num_replicas for stage in plan.stages)


def _cut(value: torch.Tensor, num_rows: int, num_own: int) -> torch.Tensor:
    """The first rows of what has rows."""
    return value[:num_own] if value.dim() and len(value) == num_rows else value


def _ignored(labels: torch.Tensor, num_own: int) -> torch.Tensor:
    """Labels of which those of the later rows do not count."""
    if labels.dtype.is_floating_point or labels.dtype == torch.bool or not labels.dim():
        return labels
    labels = labels.clone()
    labels[num_own:] = _IGNORED
    return labels


def _with_rows(values: Any, num_own: int, num_rows: int) -> Any:
    """Values with as many rows as a whole batch; the others are zeros."""

    def filled(value: torch.Tensor) -> torch.Tensor:
        if not value.dim() or len(value) != num_own or num_own == num_rows:
            return value
        return torch.cat([value, value.new_zeros(num_rows - num_own, *value.shape[1:])])

    return None if values is None else recursively_apply(filled, values)


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
