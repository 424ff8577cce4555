"""Checks of models in which samples of a batch meet: whatever was asked for, they train as in one process.

In: a context. Out: findings. One job does several models.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rannc_backend.errors import BatchMixedError, OutputNotAvailableError, RanncError
from tests import choice_models, data_size_models, expert_models, row_number_models
from tests.default_dtype import float64
from tests.distributed.harness.context import Context
from tests.odd_models import worst_error
from tests.whole_batch_models import MODELS, OPTIONS, Contrastive, batch

EXACT = 1e-12


def _buffer_error(model: nn.Module, alone: nn.Module) -> float:
    """Of the buffers that this rank has."""
    worst = 0.0
    expected = dict(alone.named_buffers())
    for name, buffer in model.named_buffers():
        with contextlib.suppress(RanncError):
            worst = max(worst, float((buffer.double() - expected[name].double()).abs().max()))
    return worst


def whole_batch_models(context: Context) -> dict[str, Any]:
    """Steps of each with other numbers of rows, two of them accumulated, and an evaluation."""
    with float64():
        for name, make in MODELS.items():
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = make()
            alone = copy.deepcopy(model)
            compiled = torch.compile(model, **context.compile_arguments(**OPTIONS.get(name, {})))
            optimizers = [torch.optim.Adam(each.parameters(), 0.01) for each in (model, alone)]
            for step in range(4):
                error = _trained(context, model, alone, compiled, step)
                context.findings.that(error <= EXACT, f"{name}, step {step}: off by {error}")
                if step != 1:
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            error = _buffer_error(model, alone)
            context.findings.that(error <= EXACT, f"buffers of {name}: off by {error}")
            compiled.eval()
            alone.eval()
            x, y = batch(sum(context.case.local_rows), 9)
            start, stop = context.interval
            with torch.no_grad():
                found, expected = compiled(x[start:stop].clone(), y[start:stop].clone()), alone(x, y)
            error = abs(float(found[0] - expected[0]))
            error = max(error, float((found[1] - expected[1][start:stop]).abs().max()))
            context.findings.that(error <= EXACT, f"{name} evaluated: off by {error}")
    return {}


def _trained(context: Context, model: nn.Module, alone: nn.Module, compiled: Any, step: int) -> float:
    """The largest error of the loss, of this rank's rows and of its gradients."""
    more = step if step > 1 else 0  # on every rank
    rows = [count + more for count in context.case.local_rows]
    start = sum(rows[: context.rank])
    stop = start + rows[context.rank]
    x, y = batch(sum(rows), step)
    loss, values = compiled(x[start:stop].clone(), y[start:stop].clone())
    expected, expected_values = alone(x, y)
    error = _error_of_losses(loss, expected)
    without = {name for name, p in alone.named_parameters() if p.grad is None}
    found = [name for name, p in model.named_parameters() if p.grad is not None and name in without]
    context.findings.that(not found, f"gradients of {found}, which have none")
    error = max(error, float((values.detach() - expected_values[start:stop].detach()).abs().max()))
    return max(error, worst_error(model, alone))


def whole_batch_data_sizes(context: Context) -> dict[str, Any]:
    """Values whose sizes depend on data, in batches of several sizes."""
    for name, make in data_size_models.MODELS.items():
        _follow(context, name, make, data_size_models.batch)
    return {}


def whole_batch_numbers(context: Context) -> dict[str, Any]:
    """Code that uses the batch size as a number, in batches of several sizes."""
    for name, make in row_number_models.MODELS.items():
        _follow(context, name, make, row_number_models.batch)
    return {}


def _follow(
    context: Context, name: str, make: Callable[[], nn.Module], batch_of: Callable[..., Any], **options: Any
) -> None:
    """Steps with other numbers of rows, of a model that gives its loss of two inputs."""
    rows = context.case.local_rows
    model, alone, compiled, optimizers = context.pair(make, **options)
    for step in range(4):
        times = 1 + step % 2
        start, stop = (times * place for place in context.interval)
        whole = batch_of(times * sum(rows), step)
        loss, expected = compiled(*(value[start:stop].clone() for value in whole)), alone(*whole)
        error = max(_error_of_losses(loss, expected), worst_error(model, alone))
        context.findings.that(error <= EXACT, f"{name}, step {step}: off by {error}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _sparse_bert() -> nn.Module:
    """A library's model that computes its head for masked tokens alone and gives their scores back."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        sparse_prediction=True, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        max_position_embeddings=32, global_attn_every_n_layers=1,
    )  # fmt: skip
    return ModernBertForMaskedLM(config).double()


def _sparse_error(context: Context) -> float:
    """Of the loss and the gradients of a step."""
    model, alone, compiled, _ = context.pair(_sparse_bert, whole_batch="never")
    start, stop = context.interval
    ids = torch.randint(3, 32, (sum(context.case.local_rows), 8))
    labels = torch.where(torch.rand(ids.shape) < 0.4, ids, -100)
    labels[0, 0] = ids[0, 0]
    whole = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    output = compiled(**{name: value[start:stop].clone() for name, value in whole.items()})
    _raises(context, "scores", OutputNotAvailableError, lambda: output.logits + 1, "what a mask chooses")
    return max(_error_of_losses(output.loss, alone(**whole).loss), worst_error(model, alone))


def _error_of_losses(loss: torch.Tensor, expected: torch.Tensor) -> float:
    """After the backward of both."""
    loss.backward()
    expected.backward()
    return abs(float(loss.detach()) / float(expected.detach()) - 1.0)


class _GivesPairs(Contrastive):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, images = super().forward(x, y)
        return loss, images @ images.t()


class _RowsFirst(nn.Module):
    """Its first call has rows of their own; a later one has not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Contrastive()

    def forward(self, x: torch.Tensor, y: torch.Tensor, mixed: bool = False) -> torch.Tensor:
        return self.inner(x, y)[0] if mixed else self.inner.encoded(x).square().mean()


def whole_batch_limits(context: Context) -> dict[str, Any]:
    """What cannot be had is said: models with the option off, values of pairs of samples, several replicas."""
    start, stop = context.interval
    with float64():
        x, y = batch(sum(context.case.local_rows), 0)
        own = x[start:stop].clone(), y[start:stop].clone()
        refused = torch.compile(Contrastive(), **context.compile_arguments(whole_batch="never"))
        _raises(context, "never", BatchMixedError, lambda: refused(*own), "whole_batch_models.py:")
        torch._dynamo.reset()
        torch.manual_seed(0)
        alone = _GivesPairs()
        compiled = torch.compile(copy.deepcopy(alone), **context.compile_arguments())
        loss, pairs = compiled(*own)
        error = abs(float(loss.detach() - alone(x, y)[0].detach()))
        context.findings.that(error <= EXACT, f"a loss beside pairs: off by {error}")
        _raises(context, "pairs", OutputNotAvailableError, lambda: pairs + 1, "cannot be taken apart")
        torch._dynamo.reset()
        later = torch.compile(_RowsFirst(), **context.compile_arguments())
        later(*own).backward()
        if max(map(int, context.case.replicas.split(","))) > 1:
            _raises(context, "later", RanncError, lambda: later(*own, mixed=True), "replica_num")
    return {}


def _raises(context: Context, what: str, kind: type[Exception], call: Any, words: str) -> None:
    try:
        result = call()
    except kind as error:
        context.findings.that(words in str(error), f"{what}: {error}")
    else:
        context.findings.that(False, f"{what}: no error, but {result}")


def whole_batch_chosen(context: Context) -> dict[str, Any]:
    """Elements that masks choose keep micro-batches and replicas; no element is chosen of some of them."""
    with float64():
        for name, make in choice_models.MODELS.items():
            # All layers of what takes padding out first work on what is chosen, and are one stage.
            options = {} if name == "unpadded" and context.case.num_stages > 1 else {"whole_batch": "never"}
            _follow(context, name, make, choice_models.batch, **options)
        error = _sparse_error(context)
        # The library computes the loss in float32.
        context.findings.that(error <= 1e-6, f"a head for masked tokens: off by {error}")
    return {}


def whole_batch_experts(context: Context) -> dict[str, Any]:
    """Tokens that are sorted by expert keep micro-batches and replicas, whatever the number of rows."""
    rows = context.case.local_rows
    for name, make in expert_models.MODELS.items():
        model, alone, compiled, optimizers = context.pair(
            lambda make=make: make().double(), whole_batch="never"
        )
        for step in range(3):
            times = 1 + step % 2
            start, stop = (times * place for place in context.interval)
            x = expert_models.batch(times * sum(rows), step)
            (loss, values), (expected, expected_values) = compiled(x[start:stop].clone()), alone(x)
            error = max(_error_of_losses(loss, expected), worst_error(model, alone))
            error = max(error, float((values.detach() - expected_values[start:stop].detach()).abs().max()))
            context.findings.that(error <= EXACT, f"{name}, step {step}: off by {error}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return {}
