"""Checks of embeddings with sparse=True: their gradients are rows, on every rank that owns the table.

In: a context. Out: findings. Every function is collective. One process has the same model with sparse gradients too, and
the same optimizers. Terms. *Rows* of a gradient are the numbers that it has, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rannc_backend
from rannc_backend.errors import RanncError
from rannc_backend.runtime.gradients.sparse_rows import RowSums
from rannc_backend.session_registry import REGISTRY
from tests.distributed.harness.context import Context

WORDS, WIDTH, LENGTH = 40, 6, 5
EXACT = 1e-12


class Looked(nn.Module):
    """Two tables in the first of two stages, one of them read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0, sparse=True)
        self.kinds = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.words((ids + 3) % WORDS) + self.kinds(ids % 7)
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1, 1).flatten())


class Large(nn.Module):
    """A table that is much larger than what a batch reads of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100 * WORDS, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(ids))).square().mean()


class Tied(Looked):
    """The table is read by the output layer, too, so its gradient is dense."""

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.words(ids) + self.kinds(ids % 7)))
        return F.cross_entropy((x @ self.words.weight.t()).flatten(0, 1), ids.roll(1, 1).flatten())


class Bags(nn.Module):
    """Sums and means of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, WIDTH, mode="sum", padding_idx=2, sparse=True)
        self.kinds = nn.EmbeddingBag(WORDS, WIDTH, mode="mean", sparse=True)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        factors = (ids % 3 + 1).to(self.words.weight.dtype)
        x = self.words(ids, per_sample_weights=factors) + self.kinds(ids % 7)
        return self.head(torch.tanh(self.first(x))).square().mean()


class BagsWithOffsets(Bags):
    """Bags whose ids are in one dimension are left to torch."""

    def forward(self, ids: Tensor) -> Tensor:
        starts = torch.arange(0, ids.numel(), LENGTH)
        return self.head(self.words(ids.flatten(), starts)).square().mean()  # refused


class AtBothEnds(Looked):
    """A table that two stages read."""

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(self.words(ids)))))
        scores = (x * self.words(ids.roll(2, 1)) + self.kinds(ids % 7)).sum(-1)
        return F.cross_entropy(scores, ids[:, 0] % LENGTH)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "bags": Bags,
    "offsets": BagsWithOffsets,
    "both_ends": AtBothEnds,
    "looked": Looked,
}


def _tables(model: nn.Module) -> list[nn.Parameter]:
    return [module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]


def _optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    tables = _tables(model)
    others = [p for p in model.parameters() if all(p is not table for table in tables)]
    sparse = {
        "adam": lambda: torch.optim.SparseAdam(tables, 0.01),
        "sgd": lambda: torch.optim.SGD(tables, 0.1, momentum=0.9),
        "adagrad": lambda: torch.optim.Adagrad(tables, 0.1),
    }
    return [sparse[kind](), torch.optim.Adam(others, 0.01)]


def _ids(context: Context, step: int) -> Tensor:
    """Of a batch: the ranks' parts have different numbers of distinct ids."""
    numbers = torch.Generator().manual_seed(step)
    rows = sum(context.case.local_rows)
    ids = torch.randint(0, WORDS, (rows, LENGTH), generator=numbers)
    ids[: context.case.local_rows[0]] %= 4
    return ids


def _pair(context: Context, make: Callable[[], nn.Module] = Looked) -> tuple[nn.Module, nn.Module, Any]:
    dtype = context.dtype
    model, alone, compiled, _ = context.pair(lambda: make().to(dtype))
    return model, alone, compiled


def _own(context: Context, ids: Tensor) -> Tensor:
    start, stop = context.interval
    return ids[start:stop].clone()


def left_to_others(model: nn.Module) -> set[str]:
    """The parameters that other ranks update."""
    session = REGISTRY.of(model)
    assert session is not None and session.table is not None, "not planned"
    table = session.table
    return {name for name in table.owners if table.world.rank not in table.updaters(name)}


def _same_rows(
    context: Context, what: str, found: Tensor | None, expected: Tensor | None, bound: float
) -> None:
    find = context.findings
    if found is None or expected is None:
        find.that(found is expected, f"{what}: {found} instead of {expected}")
        return
    if not (found.is_sparse and found.is_coalesced()):
        find.that(False, f"{what}: {found.layout}, coalesced: {found.is_sparse and found.is_coalesced()}")
        return
    expected = expected.coalesce()
    error = float((found.to_dense() - expected.to_dense()).abs().max())
    find.that(error <= bound, f"{what}: off by {error}")
    if context.case.stage_compiler == "eager":
        find.that(
            torch.equal(found.indices(), expected.indices()), f"{what}: other rows than one process has"
        )
    else:
        numbers = set(found.indices()[0].tolist()) ^ set(expected.indices()[0].tolist())
        find.that(numbers <= {0}, f"{what}: rows {numbers} too many or too few")  # that of the padding


def _step_and_compare(
    context: Context,
    step: int,
    model: nn.Module,
    alone: nn.Module,
    pairs: Sequence[tuple[torch.optim.Optimizer, torch.optim.Optimizer]],
    bound: float,
) -> None:
    """Rows of the gradients, then one step of the optimizers, then all parameters."""
    expected = dict(alone.named_parameters())
    held = [(name, p) for name, p in model.named_parameters() if rannc_backend.is_held(p)]
    for name, parameter in held:
        if name in ("words.weight", "kinds.weight"):
            if name in left_to_others(model):
                context.findings.that(parameter.grad is None, f"{name}: a gradient where others update")
            else:
                _same_rows(context, f"step {step}, {name}", parameter.grad, expected[name].grad, bound=bound)
    for both in pairs:
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in held:
        error = float((parameter.detach() - expected[name].detach()).abs().max())
        context.findings.that(error <= bound, f"step {step}: {name} off by {error}")


def sparse_trains(context: Context) -> None:
    """Losses, rows of gradients and parameters of five steps, also where gradients of two backwards add up."""
    model, alone, compiled = _pair(context, MODELS[context.case.parameters.get("model", "looked")])
    kind = context.case.parameters["optimizer"]
    pairs = list(zip(_optimizers(model, kind), _optimizers(alone, kind), strict=True))
    bound = EXACT if context.case.dtype == "float64" else 4e-2
    for step in range(5):
        for part in range(2 if step == 3 else 1):
            ids = _ids(context, 10 * step + part)
            losses = compiled(_own(context, ids)), alone(ids)
            error = float((losses[0] - losses[1]).detach().abs())
            context.findings.that(error <= bound, f"step {step}: loss off by {error}")
            for loss in losses:
                loss.backward()
        _step_and_compare(context, step, model, alone, pairs, bound)


def sparse_delayed(context: Context) -> None:
    """Rows of several backwards that are summed over ranks once, after some that were summed at once."""
    model, alone, compiled = _pair(context, MODELS[context.case.parameters.get("model", "looked")])
    pairs = list(zip(_optimizers(model, "adam"), _optimizers(alone, "adam"), strict=True))
    for step, window in enumerate(((True, True, False), (False, True, False), (True, True))):
        for part, delays in enumerate(window):
            rannc_backend.delay_grad_allreduce(delays)
            ids = _ids(context, 10 * step + part)
            compiled(_own(context, ids)).backward()
            alone(ids).backward()
        rannc_backend.delay_grad_allreduce(False)
        if window[-1]:
            rannc_backend.allreduce_grads(model)
        _step_and_compare(context, step, model, alone, pairs, EXACT)


def sparse_priced(context: Context) -> None:
    """Ranks send as many bytes of rows as the plan says, where no number comes twice, and no more in any case."""
    reduce = RowSums.reduce
    for distinct in (True, False):
        sent: list[int] = []

        def noted(sums: RowSums, start: Any, sent: list[int] = sent) -> None:
            def start_noted(tensor: Tensor, ranks: Any, takers: Any) -> Any:
                sent.append(tensor.nbytes)
                return start(tensor, ranks, takers)

            reduce(sums, None if start is None else start_noted)

        torch._dynamo.reset()
        model, _, compiled = _pair(context, Large)
        with mock.patch.object(RowSums, "reduce", noted):
            rows = sum(context.case.local_rows)
            ids = torch.arange(rows * LENGTH).view(rows, LENGTH)
            compiled(_own(context, ids if distinct else ids % 7)).backward()
        session = REGISTRY.of(model)
        assert session is not None and session.plan is not None, "not planned"
        formats, num_ranks = session.plan.formats, context.case.world
        of_rows = sum(sent) - sent[0] if sent else 0  # the first is how many rows each rank has
        find, predicted = context.findings, formats.row_gradient_bytes // num_ranks
        find.that(formats.num_row_gradients == 1, f"{formats}")
        find.that(
            of_rows == predicted if distinct else of_rows <= predicted, f"{of_rows} of {predicted} bytes"
        )
        find.that(10 * formats.row_gradient_bytes < formats.dense_gradient_bytes, f"{formats}")
        stage = next(stage for stage in session.plan.stages if "words.weight" in stage.parameters)
        table = model.get_parameter("words.weight")
        find.that(stage.predicted.gradient_bytes * 10 < table.nbytes, f"{stage.predicted.gradient_bytes}")


def sparse_wires(context: Context) -> None:
    """Rows that travel in fewer bits: off by no more than their roundings, and by something."""
    model, alone, compiled = _pair(context)
    ids = _ids(context, 0)
    compiled(_own(context, ids)).backward()
    alone(ids).backward()
    roundoff = {"bf16": 2.0**-8, "fp16": 2.0**-11}[context.case.options["gradient_dtype"]]
    expected = dict(alone.named_parameters())
    for name in ("words.weight", "kinds.weight"):
        found, other = model.get_parameter(name).grad, expected[name].grad
        if found is None:
            context.findings.that(name in left_to_others(model), f"{name} has no gradient")
            continue
        assert other is not None, f"{name} has a gradient"
        off = (found.to_dense() - other.to_dense()).abs()
        context.findings.that(found.is_sparse, f"{name}: {found.layout}")
        bound = 4 * roundoff * float(other.to_dense().abs().max())
        context.findings.that(0 < float(off.max()) <= bound, f"{name}: off by {float(off.max())} of {bound}")


def sparse_tied(context: Context) -> None:
    """A table that the output layer reads too has a dense gradient, as in one process; one beside it a sparse one."""
    model, alone, compiled = _pair(context, Tied)
    ids = _ids(context, 0)
    compiled(_own(context, ids)).backward()
    alone(ids).backward()
    expected = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        if not rannc_backend.is_held(parameter) or parameter.grad is None:
            continue
        other = expected[name].grad
        assert other is not None, f"{name} has a gradient"
        context.findings.that(parameter.grad.layout == other.layout, f"{name}: {parameter.grad.layout}")
        error = float((parameter.grad.to_dense() - other.to_dense()).abs().max())
        context.findings.that(error <= EXACT, f"{name}: gradient off by {error}")


def sparse_equal_bits(context: Context) -> None:
    """All owners of a table have the same bits; a kept gradient is not changed by the next step."""
    model, _, compiled = _pair(context)
    kept: list[Tensor] = []
    for step in range(3):
        compiled(_own(context, _ids(context, step))).backward()
        grad = model.get_parameter("words.weight").grad
        assert grad is not None and grad.is_sparse, "no sparse gradient"
        text = [grad.indices().tolist(), [value.hex() for value in grad.values().flatten().tolist()]]
        session = REGISTRY.of(model)
        assert session is not None, "not planned"
        answers = session.world.control.allgather(text, what="bits of rows")
        context.findings.that(all(answer == answers[0] for answer in answers), f"step {step}: other bits")
        kept.append(grad)
        before = kept[0].to_dense()
        model.zero_grad()
        compiled(_own(context, _ids(context, step + 10))).backward()
        context.findings.that(torch.equal(before, kept[0].to_dense()), "a gradient that was kept has changed")
        model.zero_grad()


def sparse_norms(context: Context) -> None:
    """Norms, clipping, get_param_grad, a loss that is scaled, hooks: as one process has them of the dense gradient."""
    find = context.findings
    model, alone, compiled = _pair(context)
    seen: list[Tensor] = []
    ids = _ids(context, 0)
    (compiled(_own(context, ids)) * 3).backward()
    model.zero_grad()
    if rannc_backend.is_held(model.get_parameter("words.weight")):
        model.get_parameter("words.weight").register_hook(lambda grad: seen.append(grad) or grad * 2)
    alone.get_parameter("words.weight").register_hook(lambda grad: grad * 2)
    (compiled(_own(context, ids)) * 3).backward()
    (alone(ids) * 3).backward()
    find.that(all(grad.is_sparse for grad in seen), "a hook was given a dense gradient")
    dense = {name: p.grad.to_dense() for name, p in alone.named_parameters() if p.grad is not None}
    norms = {name: float(grad.norm()) for name, grad in dense.items()}
    for name, norm in rannc_backend.named_gradient_norms(model).items():
        find.that(abs(norm - norms[name]) <= EXACT, f"{name}: norm {norm}, not {norms[name]}")
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    found = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5 * total))
    find.that(abs(found - total) <= EXACT, f"norm {found}, not {total}")
    for name, expected in dense.items():
        grad = rannc_backend.get_param_grad(model, name)
        assert grad is not None, f"{name} has no gradient"
        error = float((grad - 0.5 * expected).abs().max())
        find.that(error <= 1e-6, f"{name}: clipped gradient off by {error}")
    held = model.get_parameter("words.weight")
    find.that(
        not rannc_backend.is_held(held) or held.grad is None or held.grad.is_sparse, "clipping made it dense"
    )


def sparse_scaler(context: Context) -> None:
    """GradScaler: what it unscales, and a step that all ranks leave out."""
    find = context.findings
    model, alone, compiled = _pair(context)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=16.0) for _ in optimizers]
    expected = dict(alone.named_parameters())
    for step in range(3):
        ids = _ids(context, step)
        factor = float("inf") if step == 1 else 1.0
        losses = compiled(_own(context, ids)), alone(ids)
        for loss, optimizer, scaler in zip(losses, optimizers, scalers, strict=True):
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        find.that(scalers[0].get_scale() == scalers[1].get_scale(), f"step {step}: another scale")
        for name, parameter in model.named_parameters():
            if rannc_backend.is_held(parameter):
                error = float((parameter.detach() - expected[name].detach()).abs().max())
                find.that(error <= EXACT, f"step {step}: {name} off by {error}")


def sparse_refused(context: Context) -> None:
    """What sparse gradients do not go together with: the line, and what to change; dense ones do."""
    make = MODELS.get(context.case.parameters["what"], Looked)
    model, alone, compiled = _pair(context, make)
    ids = _ids(context, 0)
    find = context.findings
    try:
        compiled(_own(context, ids)).backward()
        find.that(False, "not refused")
    except RanncError as error:
        text = str(error)
        find.that("sparse_gradients='dense'" in text and "sparse_checks.py:" in text, text)
        find.that(context.case.parameters["word"] in text, text)
    model, alone, _ = _pair(context, make)
    compiled = context.compile(model, sparse_gradients="dense")
    compiled(_own(context, ids)).backward()
    alone(ids).backward()
    for name, parameter in alone.named_parameters():
        grad = rannc_backend.get_param_grad(model, name)
        expected = parameter.grad
        if expected is None or grad is None:
            find.that(expected is grad, f"{name}: {grad}")
            continue
        error = float((grad - expected.to_dense()).abs().max())
        find.that(error <= EXACT, f"{name}: dense gradient off by {error}")
