"""Checks of inputs whose lengths change: training equals one process, and nothing is compiled again.

In: a context. Out: findings. One job does several models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rannc_backend.errors import RanksDifferError
from rannc_backend.session_registry import REGISTRY
from tests.default_dtype import float64
from tests.distributed.harness.context import Context
from tests.length_models import MODELS, Bert, Entry, LanguageModel, text_batch
from tests.odd_models import worst_error

EXACT = 1e-12
FEW = ("language_model", "speech", "segmenter")


def _double(make: Callable[[], nn.Module]) -> nn.Module:
    return make().double()


def _step(
    model: nn.Module,
    alone: nn.Module,
    compiled: Any,
    optimizers: list[Any],
    own: Mapping[str, Tensor],
    whole: Mapping[str, Tensor],
    interval: tuple[int, int],
) -> float:
    """One step; the largest error of the loss, of this rank's rows and of its gradients."""
    loss, scores = compiled(**{name: value.clone() for name, value in own.items()})
    expected, expected_scores = alone(**whole)
    loss.backward()
    expected.backward()
    start, stop = interval
    error = abs(float(loss.detach()) / float(expected.detach()) - 1.0)
    error = max(error, float((scores.detach() - expected_scores[start:stop].detach()).abs().max()))
    error = max(error, worst_error(model, alone))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return error


def _num_compilations(model: nn.Module) -> int:
    return len(REGISTRY.sessions[model].compiled)


def _follow(context: Context, name: str, entry: Entry, **options: Any) -> None:
    model, alone, compiled, optimizers = context.pair(partial(_double, entry.make), **options)
    start, stop = context.interval
    for step, size in enumerate(entry.sizes):
        whole = entry.batch(sum(context.case.local_rows), size, step)
        own = {key: value[start:stop] for key, value in whole.items()}
        error = _step(model, alone, compiled, optimizers, own, whole, (start, stop))
        context.findings.that(error <= EXACT, f"{name}, size {size}: off by {error}")
    number = _num_compilations(model)
    context.findings.that(
        number == entry.num_compilations, f"{name}: compiled {number} times for {len(entry.sizes)} sizes"
    )
    if "ids" in whole:
        whole = entry.batch(sum(context.case.local_rows), 1, 1)
        own = {key: value[start:stop] for key, value in whole.items()}
        error = _step(model, alone, compiled, optimizers, own, whole, (start, stop))
        context.findings.that(error <= EXACT, f"{name}, size 1: off by {error}")
        more = _num_compilations(model) - number
        context.findings.that(more <= 1, f"{name}: compiled {more} times for a length of 1")


def lengths_models(context: Context) -> dict[str, Any]:
    """Twenty lengths of text, three of sound, five sizes of images, by Dynamo where it takes the model."""
    with float64():
        for name in FEW:
            _follow(context, name, MODELS[name])
    return {}


def lengths_others(context: Context) -> dict[str, Any]:
    """The same of all models that are not among those."""
    with float64():
        for name in sorted(MODELS.keys() - set(FEW)):
            _follow(context, name, MODELS[name])
    return {}


def lengths_nonstrict(context: Context) -> dict[str, Any]:
    """Two of them without Dynamo."""
    with float64():
        for name in ("language_model", "branches"):
            _follow(context, f"{name} without Dynamo", MODELS[name], capture="nonstrict")
    return {}


def _local_lengths(context: Context, step: int) -> list[int]:
    return [6 + (3 * rank + 5 * step) % 7 for rank in range(context.case.world)]


def _padded(context: Context, batches: list[Mapping[str, Tensor]], values: Mapping[str, int]) -> Any:
    longest = max(batch["ids"].shape[1] for batch in batches)
    return {
        name: torch.cat(
            [
                nn.functional.pad(batch[name], (0, longest - batch[name].shape[1]), value=value)
                for batch in batches
            ]
        )
        for name, value in values.items()
    }


def lengths_padded(context: Context) -> dict[str, Any]:
    """Ranks with batches of other lengths: padded where the user says with what, else refused with the cure."""
    values = {"ids": 0, "labels": -100}
    with float64():
        # Of a library's model one plan is enough.
        for make in (LanguageModel, Bert) if context.case.num_stages == 1 else (LanguageModel,):
            model, alone, compiled, optimizers = context.pair(partial(_double, make), pad_inputs=values)
            for step in range(4):
                batches = [
                    text_batch(rows, length, step + 10 * rank)
                    for rank, (rows, length) in enumerate(
                        zip(context.case.local_rows, _local_lengths(context, step), strict=True)
                    )
                ]
                whole = _padded(context, batches, values)
                error = _step(
                    model, alone, compiled, optimizers, batches[context.rank], whole, context.interval
                )
                context.findings.that(error <= EXACT, f"{make.__name__}, step {step}: off by {error}")
            number = _num_compilations(model)
            context.findings.that(number == 2, f"{make.__name__}: compiled {number} times")
        for lengths in ([[8, 9]], [[8, 8], [9, 9], [10, 12]]):
            _refused(context, lengths)
    return {}


def _refused(context: Context, lengths: list[list[int]]) -> None:
    """The last of these calls has other lengths on other ranks."""
    _, _, compiled, _ = context.pair(partial(_double, LanguageModel))
    message = ""
    for step, by_rank in enumerate(lengths):
        own = text_batch(context.case.local_rows[context.rank], by_rank[context.rank], step)
        try:
            compiled(**own)
        except RanksDifferError as error:
            message = str(error)
    context.findings.that(
        "pad_inputs" in message and "collator" in message, f"{lengths}: {message or 'taken'}"
    )


def lengths_marked(context: Context) -> dict[str, Any]:
    """What the user marks as dynamic is so from the first call; with dynamic=False nothing is."""
    start, stop = context.interval
    rows = sum(context.case.local_rows)
    with float64():
        for dynamic, marked, expected in ((None, True, 1), (False, False, 3)):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = LanguageModel()
            alone = copy.deepcopy(model)
            compiled = torch.compile(model, dynamic=dynamic, **context.compile_arguments())
            optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)]
            for step, length in enumerate((11, 7, 23)):
                whole = text_batch(rows, length, step)
                own = {name: value[start:stop].clone() for name, value in whole.items()}
                if marked:
                    for value in own.values():
                        torch._dynamo.mark_dynamic(value, 1)
                loss, _ = compiled(**own)
                target, _ = alone(**whole)
                loss.backward()
                target.backward()
                error = max(abs(float(loss.detach() / target.detach()) - 1.0), worst_error(model, alone))
                context.findings.that(error <= EXACT, f"dynamic={dynamic}, length {length}: off by {error}")
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            number = _num_compilations(model)
            context.findings.that(number == expected, f"dynamic={dynamic}: compiled {number} times")
    return {}
