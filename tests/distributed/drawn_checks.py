"""Check of configurations that are drawn: each trains as one process does, or is refused on all ranks with a cure.

In: a context whose case has a `Drawn`. Out: findings, and what the ranks agree on: the refusal, or that there was none.
Terms. A run is *exact* where nothing is rounded that one process does not round; of another, gradients are compared by
their norms, from equal parameters in each step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rannc_backend
from rannc_backend import epl
from rannc_backend.autodist import AutoDistConfig
from rannc_backend.errors import (
    CommunicationError,
    InternalError,
    OutOfStepError,
    RankFailedError,
    RanncError,
)
from rannc_backend.session_registry import REGISTRY
from tests.distributed.harness.compare import relative_error, torch_dtype
from tests.distributed.harness.context import Context
from tests.distributed.harness.reference import intervals

WORDS, WIDTH, LENGTH, LAYERS = 23, 12, 5, 4
IGNORED = -100
# Errors that say that something of ours went wrong, not that the user asked for what cannot be had.
_NO_REFUSALS = (InternalError, CommunicationError, OutOfStepError)
# A step that hangs ends soon, with an error that is no refusal.
_LIMITS = {"step_timeout_seconds": 25.0, "start_timeout_seconds": 40.0, "compile_timeout_seconds": 45.0}
_ROUNDOFF = {"same": 0.0, "none": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4, "float16": 2.0**-10,
             "bfloat16": 2.0**-7}  # fmt: skip
_BY_DTYPE = {"float64": 0.0, "float32": 1e-6, "bfloat16": 2.0**-7}
# How many roundings may come together in the norm of a gradient, whose terms may cancel.
_ROUNDINGS = 16.0


class Drawn(nn.Module):
    """A table, four layers and a head; see `_model` of drawn_configurations.py for what varies."""

    def __init__(self, members: dict[str, Any]) -> None:
        super().__init__()
        kind = members["table"]
        if kind == "bag":
            self.table: nn.Module = nn.EmbeddingBag(WORDS, WIDTH, mode="sum", sparse=True)
        else:
            padding = 0 if kind == "padded" else None
            self.table = nn.Embedding(WORDS, WIDTH, padding_idx=padding, sparse=kind in ("sparse", "padded"))
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        if members["shared_layer"]:
            layers[-1] = layers[0]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if kind == "tied":
            self.head.weight = self.table.weight
        if members["frozen"]:
            self.layers[1].requires_grad_(False)
        self.counts = members["buffer"]
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.loss, self.is_bag = members["loss"], kind == "bag"

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        """The loss, or scores, or both."""
        if self.counts:
            self.count += 1
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = rannc_backend.checkpoint_tensor(hidden + layer(hidden))
        scores = self.head(hidden)
        if self.loss == "outside":
            return scores
        loss = loss_of(scores, labels)
        return loss if self.loss == "inside" else (loss, scores)


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Of each place; of a bag that of the first."""
    if scores.dim() == 2:
        return F.cross_entropy(scores, labels[:, 0], ignore_index=IGNORED)
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


@dataclass(slots=True, kw_only=True)
class _Pair:
    """The model under the backend, the one of one process, and an optimizer list for each."""

    context: Context
    model: nn.Module
    alone: nn.Module
    compiled: Callable[..., Any]
    config: Any = None
    optimizers: list[list[torch.optim.Optimizer]] = field(default_factory=list)
    rows: tuple[int, ...] = ()
    bound: float = 0.0
    num_calls: int = 0

    @property
    def drawn(self) -> dict[str, Any]:
        return self.context.case.parameters["drawn"]

    def batch(self) -> tuple[Tensor, Tensor]:
        self.num_calls += 1
        numbers = torch.Generator().manual_seed(self.num_calls)
        ids = torch.randint(0, WORDS, (sum(self.rows), LENGTH), generator=numbers)
        labels = ids.roll(1, 1)
        if self.drawn["model"]["ignored"]:
            chosen = torch.rand(labels.shape, generator=numbers) < 0.5
            chosen[:, 0] = chosen[:, -1] = False
            labels = labels.masked_fill(chosen, IGNORED)
        return ids, labels

    def parts(self) -> list[tuple[int, int]]:
        """Rows of each rank's outputs."""
        whole = (0, sum(self.rows))
        return intervals(self.rows) if self.config.gather_inputs else [whole] * len(self.rows)

    def call(self, model: Callable[..., Any], ids: Tensor, labels: Tensor) -> Any:
        if model is not self.compiled:
            return self.call_alone(ids, labels)
        if self.config.gather_inputs:
            own = slice(*intervals(self.rows)[self.context.rank])
            return model(ids[own].clone(), labels[own].clone())
        return model(ids.clone(), labels.clone())

    def call_alone(self, ids: Tensor, labels: Tensor) -> Any:
        dtype = self.config.autocast
        with torch.autocast("cpu", getattr(torch, dtype)) if dtype != "none" else contextlib.nullcontext():
            return self.alone(ids, labels)

    def losses(self, *, of_scores: bool = False) -> tuple[Tensor, Tensor]:
        """This rank's, of the compiled model, and that whose gradients are expected."""
        ids, labels = self.batch()
        found, expected = self.call(self.compiled, ids, labels), self.call_alone(ids, labels)
        kind, parts = self.drawn["model"]["loss"], self.parts()
        if kind == "inside" or (kind == "both" and not of_scores):
            pair = (found, expected) if kind == "inside" else (found[0], expected[0])
            self._compare("loss", *pair)
            return pair
        scores = [value[1] if kind == "both" else value for value in (found, expected)]
        own = slice(*parts[self.context.rank])
        self._compare("rows", scores[0], scores[1][own])
        of = (lambda rows, _: rows.square().mean()) if of_scores else loss_of
        each = [of(scores[1][begin:end], labels[begin:end]) for begin, end in parts]
        total = torch.stack(each).sum()
        return of(scores[0], labels[own]), total / len(each) if self.config.mean_gradients else total

    def _compare(self, what: str, found: Tensor, expected: Tensor) -> None:
        error = relative_error(found, expected, 1e-3)
        bound = max(self.bound, 1e-11 * 10.0 ** min(self.num_calls, 3))
        self.context.findings.that(error <= bound, f"call {self.num_calls}: {what} off by {error:.3g}")

    def compare_gradients(self, what: str) -> None:
        expected = dict(self.alone.named_parameters())
        largest = max(float(p.grad.to_dense().norm()) for p in expected.values() if p.grad is not None)
        for name, parameter in self.model.named_parameters():
            grad, other = parameter.grad, expected[name].grad
            if grad is None:
                continue
            if other is None:
                self.context.findings.that(False, f"{what}: {name} has a gradient, and none in one process")
                continue
            self.context.findings.that(
                grad.shape == other.shape and grad.dtype == other.dtype, f"{what}: {name} is {grad.dtype}"
            )
            self._compare_norms(f"{what}: gradient of {name}", grad.to_dense(), other.to_dense(), largest)

    def _compare_norms(self, what: str, found: Tensor, expected: Tensor, largest: float) -> None:
        error = relative_error(found, expected, 0.05 * largest)
        bound = max(self.bound, 1e-12 * 10.0 ** min(self.num_calls, 4))
        self.context.findings.that(error <= bound, f"{what} off by {error:.3g}")

    def compare_states(self) -> None:
        """Parameters and buffers; where runs are not exact, the one of one process takes those of the job."""
        state = self.model.state_dict()  # whole: states_on_all_ranks
        expected = self.alone.state_dict()
        if self.bound > 1e-4:
            self.alone.load_state_dict(state)
            return
        for name, value in expected.items():
            error = relative_error(state[name], value, 1e-3)
            self.context.findings.that(
                error <= max(100 * self.bound, 1e-8), f"call {self.num_calls}: {name} off by {error:.3g}"
            )


def drawn_configuration(context: Context) -> dict[str, Any]:
    """Trains as one process, or is refused."""
    drawn = context.case.parameters["drawn"]
    try:
        _trains(context, drawn)
    except RankFailedError as error:
        return {"refused": "", "failed": str(error)}
    except RanncError as error:
        text = f"{type(error).__name__}: {error}"
        context.findings.that(not isinstance(error, _NO_REFUSALS), text)
        context.findings.that("What to change: " in str(error), f"no cure: {text}")
        return {"refused": text}
    finally:
        REGISTRY.defaults = None
        rannc_backend.delay_grad_allreduce(False)
    return {"refused": ""}


def _trains(context: Context, drawn: dict[str, Any]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    dtype = drawn["model"]["dtype"]
    model = Drawn(drawn["model"]).to(torch_dtype(dtype))
    alone = copy.deepcopy(model)
    if drawn["model"]["table"] == "tied":
        alone.head.weight = alone.table.weight
    compiled = torch.compile(model, backend="rannc", options=_options(drawn))
    pair = _Pair(context=context, model=model, alone=alone, compiled=compiled, rows=context.case.local_rows)
    pair.optimizers = [_optimizers(each, drawn) for each in (model, alone)]
    # What the options are is known with the first call.
    pair.config = _resolved(drawn)
    rounds = [getattr(pair.config, name) for name in ("boundary_dtype", "gradient_dtype")]
    rounds += [pair.config.autocast] if dtype != "float64" else []
    pair.bound = min(_ROUNDINGS * max(_BY_DTYPE[dtype], *(_ROUNDOFF[name] for name in rounds)), 0.5)
    for number, step in enumerate(drawn["steps"]):
        _STEPS[step](pair)
        if number == 0:
            _binds(pair)
        pair.compare_states()


def _options(drawn: dict[str, Any]) -> Any:
    more = {"stage_compiler": "eager", "max_partition_num": 16, "states_on_all_ranks": True, **_LIMITS}
    more |= drawn["more"]
    if drawn["words"] == "own":
        return more | drawn["items"]
    if drawn["words"] == "epl":
        epl.init(epl.Config(drawn["items"]))
        return more
    return AutoDistConfig(**drawn["items"]).options() | more


def _resolved(drawn: dict[str, Any]) -> Any:
    from rannc_backend.settings.sources import resolve_config

    options = _options(drawn)
    if drawn["words"] == "epl":
        options = epl.Config(drawn["items"]).options() | options
    return resolve_config(options, {})


def _optimizers(model: nn.Module, drawn: dict[str, Any]) -> list[torch.optim.Optimizer]:
    sparse = drawn["model"]["table"] in ("sparse", "padded", "bag")
    trained = [p for p in model.parameters() if p.requires_grad]
    tables = [model.table.weight] if sparse else []
    dense = _resolved(drawn).sparse_gradients == "dense" and sparse
    others = [p for p in trained if all(p is not table for table in tables)]
    kinds: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
        "sgd": lambda each: torch.optim.SGD(each, 0.1, momentum=0.9),
        "adam": lambda each: torch.optim.Adam(each, 0.01, eps=1e-3),
        "adamw_foreach": lambda each: torch.optim.AdamW(each, 0.01, eps=1e-3, foreach=True),
        "rmsprop": lambda each: torch.optim.RMSprop(each, 0.01, eps=1e-3),
    }
    made = [kinds[drawn["optimizer"]](others)]
    if tables:
        # One process has a sparse gradient in any case.
        is_adam = drawn["optimizer"] != "sgd" and not dense
        made.append(
            torch.optim.SparseAdam(tables, 0.01, eps=1e-3) if is_adam else torch.optim.SGD(tables, 0.1)
        )
    return made


def _binds(pair: _Pair) -> None:
    """What was given is in the plan."""
    session = REGISTRY.of(pair.model)
    plan = None if session is None else session.plan
    if plan is None:
        return
    config, find = pair.config, pair.context.findings
    is_outside = pair.drawn["model"]["loss"] == "outside"
    shown = {
        "partition_num": (config.partition_num, plan.num_stages),
        # A first batch of few rows has no more micro-batches than that.
        "pipeline_num": (
            0 if pair.drawn["steps"][0] == "fewer_rows" else config.pipeline_num,
            plan.num_micro_batches,
        ),
        # Without a loss in the model there is one order alone, and the log says so.
        "schedule": ("" if config.schedule == "auto" or is_outside else config.schedule, plan.schedule),
        "replica_num": (config.replica_num, max(len(stage.ranks) for stage in plan.stages)),
    }
    for name, (given, found) in shown.items():
        find.that(not given or given == found, f"{name}: {given} was given, and the plan has {found}")
    find.that(config.zero_level in (None, plan.zero_stage), f"zero_stage: {plan.zero_stage}")
    find.that(config.offload == plan.offload, f"offload: {plan.offload}")


def _update(pair: _Pair, *, to_none: bool = True) -> None:
    pair.compare_gradients(f"call {pair.num_calls}")
    for optimizers in pair.optimizers:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)


def _plain(pair: _Pair) -> None:
    for loss in pair.losses():
        loss.backward()
    _update(pair)


def _zeros(pair: _Pair) -> None:
    for loss in pair.losses():
        loss.backward()
    _update(pair, to_none=False)


def _accumulate(pair: _Pair) -> None:
    for _ in range(2):
        for loss in pair.losses():
            (loss / 2).backward()
    _update(pair)


def _retain(pair: _Pair) -> None:
    for loss in pair.losses():
        loss.backward(retain_graph=True)
        loss.backward()
    _update(pair)


def _two_forwards(pair: _Pair) -> None:
    first, second = pair.losses(), pair.losses()
    for losses in (first, second):
        for loss in losses:
            loss.backward()
    _update(pair)


def _outputs_alone(pair: _Pair) -> None:
    if pair.drawn["model"]["loss"] == "inside":
        return _plain(pair)
    for loss in pair.losses(of_scores=True):
        loss.backward()
    return _update(pair)


def _clip(pair: _Pair) -> None:
    for loss in pair.losses():
        loss.backward()
    if pair.drawn["model"]["table"] in ("sparse", "padded", "bag"):
        return _update(pair)
    norms = [float(nn.utils.clip_grad_norm_(each.parameters(), 0.05)) for each in (pair.model, pair.alone)]
    error = abs(norms[0] - norms[1]) / norms[1]
    pair.context.findings.that(error <= max(pair.bound, 1e-9), f"norms {norms}")
    return _update(pair)


def _scaler(pair: _Pair) -> None:
    losses = pair.losses()
    for loss, optimizers in zip(losses, pair.optimizers, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    pair.compare_gradients(f"call {pair.num_calls}, unscaled")
    _update(pair)


def _evaluate(pair: _Pair) -> None:
    for model in (pair.model, pair.alone):
        model.eval()
    with torch.no_grad():
        pair.losses()
    for model in (pair.model, pair.alone):
        model.train()
    _plain(pair)


def _no_backward(pair: _Pair) -> None:
    pair.losses()
    _plain(pair)


def _fewer_rows(pair: _Pair) -> None:
    rows, pair.rows = pair.rows, (1, 2)[: len(pair.rows)]
    _plain(pair)
    pair.rows = rows
    _plain(pair)


def _state(pair: _Pair) -> None:
    _plain(pair)
    for model, optimizers in zip((pair.model, pair.alone), pair.optimizers, strict=True):
        for optimizer in optimizers:
            optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(model.state_dict())
    _plain(pair)


_STEPS: dict[str, Callable[[_Pair], None]] = {
    "plain": _plain,
    "zeros": _zeros,
    "accumulate": _accumulate,
    "retain": _retain,
    "two_forwards": _two_forwards,
    "outputs_alone": _outputs_alone,
    "clip": _clip,
    "scaler": _scaler,
    "evaluate": _evaluate,
    "no_backward": _no_backward,
    "fewer_rows": _fewer_rows,
    "state": _state,
}
