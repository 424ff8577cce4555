"""Checks of models that are captured without Dynamo: they train as in one process, follow what their code
reads, and are refused on all ranks where a graph cannot hold them.

In: a context. Out: findings. One job does several models.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import tests.batch_dim_models as batch_dim_models
import tests.changing_models as changing_models
import tests.kept_models as kept_models
import tests.nonstrict_models as nonstrict
import tests.own_backward_models as own_backward_models
from rannc_backend import backend, is_held
from rannc_backend.capture.inputs import named_tensors
from rannc_backend.errors import ModelError, RanncError
from tests.changing_models import WAYS, Momentum, Reporting
from tests.default_dtype import float64
from tests.distributed.harness.context import Context
from tests.nonstrict_models import MODELS, REFUSED, ChosenByCount, ChosenByValues, Paths, batch
from tests.odd_models import worst_error

EXACT = 1e-12


@contextlib.contextmanager
def _counted_captures() -> Iterator[list[nn.Module]]:
    captured: list[nn.Module] = []
    before = backend.capture_call

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        captured.append(module)
        return before(module, *args, **kwargs)

    backend.capture_call = counted
    try:
        yield captured
    finally:
        backend.capture_call = before


def _trained(
    context: Context,
    model: nn.Module,
    alone: nn.Module,
    compiled: Any,
    optimizers: list[Any],
    step: int,
    *,
    times: int = 1,
) -> float:
    """One step; the largest error of the loss and of the gradients of this rank."""
    start, stop = (times * place for place in context.interval)
    rows = batch(times * sum(context.case.local_rows), step)
    for optimizer in optimizers:
        optimizer.zero_grad()
    result, expected = compiled(rows[start:stop].clone()), alone(rows)
    result.backward()
    expected.backward()
    error = max(abs(float(result.detach()) / float(expected.detach()) - 1.0), worst_error(model, alone))
    for optimizer in optimizers:
        optimizer.step()
    return error


def _evaluate(context: Context, name: str, compiled: Any, alone: nn.Module) -> None:
    compiled.eval()
    alone.eval()
    start, stop = context.interval
    rows = batch(sum(context.case.local_rows), 7)
    with torch.no_grad():
        error = abs(float(compiled(rows[start:stop].clone())) / float(alone(rows)) - 1)
    context.findings.that(error <= EXACT, f"{name} evaluated: off by {error}")


def nonstrict_models(context: Context) -> dict[str, Any]:
    """Three steps of each, and an evaluation, equal one process."""
    with float64():
        for name in MODELS:
            model, alone, compiled, optimizers = context.pair(MODELS[name])
            with _counted_captures() as captures:
                for step in range(3):
                    error = _trained(context, model, alone, compiled, optimizers, step)
                    context.findings.that(error <= EXACT, f"{name}, step {step}: off by {error}")
            context.findings.that(len(captures) == 1, f"{name}: captured {len(captures)} times in 3 steps")
            if name in ("gradient", "slopes"):
                continue  # they need gradients in the forward
            _evaluate(context, name, compiled, alone)
    return {}


def nonstrict_kept(context: Context) -> dict[str, Any]:
    """Modules whose code decides by values run as written: three steps of each, and an evaluation, in batches of
    several sizes; those that are declared to work row by row in micro-batches and on replicas.
    """
    kept: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
        **{name: (make, {}) for name, (make, _) in kept_models.MODELS.items()},
        **{name: (make, {"whole_batch": "never"}) for name, make in kept_models.DECLARED.items()},
    }
    with float64():
        for name, (make, options) in kept.items():
            model, alone, compiled, optimizers = context.pair(make, **options)
            for step in range(3):
                error = _trained(context, model, alone, compiled, optimizers, step, times=1 + step % 2)
                context.findings.that(error <= EXACT, f"{name}, step {step}: off by {error}")
            _evaluate(context, name, compiled, alone)
    return {}


def nonstrict_backwards(context: Context) -> dict[str, Any]:
    """Functions with a backward of their own that no operator can hold: three steps of each, and an evaluation."""
    with float64():
        for name, make in own_backward_models.MODELS.items():
            model, alone, compiled, optimizers = context.pair(make)
            for step in range(3):
                error = _trained(context, model, alone, compiled, optimizers, step, times=1 + step % 2)
                context.findings.that(error <= EXACT, f"{name}, step {step}: off by {error}")
            _evaluate(context, name, compiled, alone)
    return {}


def nonstrict_attributes(context: Context) -> dict[str, Any]:
    """What a forward puts into attributes is that of one process, on all ranks: numbers of the whole batch, and this rank's
    rows; a penalty there is differentiated. What a part that runs as written puts there, its own ranks have.
    """
    start, stop = context.interval
    with float64():
        model, alone, compiled, optimizers = context.pair(Reporting)
        for step in range(3):
            rows = batch(sum(context.case.local_rows), step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            (compiled(rows[start:stop].clone()) + model.penalty).backward()
            (alone(rows) + alone.penalty).backward()
            error = max(
                worst_error(model, alone),
                abs(model.share - alone.share),
                abs(model.report["norm"] - alone.report["norm"]),
                float((model.hidden - alone.hidden[start:stop]).abs().max()),
                abs(model.num_rows - len(rows)),
            )
            context.findings.that(error <= EXACT, f"attributes, step {step}: off by {error}")
            for optimizer in optimizers:
                optimizer.step()
        model, alone, compiled, _ = context.pair(kept_models.Counted)
        runs = []
        for step in range(3):
            rows = 9 * batch(sum(context.case.local_rows), step)
            compiled(rows[start:stop].clone()).backward()
            alone(rows).backward()
            runs.append(isinstance(model.part.steps, int))
            if runs[-1]:
                context.findings.that(model.part.steps == alone.part.steps, f"{model.part.steps} steps")
            else:
                context.findings.raises("elsewhere", ("AttributeReadError",), lambda: float(model.part.steps))
        context.findings.that(len(set(runs)) == 1, f"it ran here in some steps: {runs}")
    return {"runs": runs[0]}


def _changing() -> Iterator[tuple[str, Callable[[], nn.Module], dict[str, Any]]]:
    data, in_data, many = (WAYS[name] for name in ("average of data", "average in data", "many"))
    yield "of data", lambda: Momentum(data), {"capture": "dynamo"}
    yield "of data, by one run", lambda: Momentum(data, is_buffer=True), {"capture": "nonstrict"}
    yield "of data, as written", lambda: Momentum(data, decides=True), {}
    yield "in data, as written", lambda: Momentum(in_data, decides=True), {}
    yield "many at once", lambda: Momentum(many), {"capture": "dynamo"}
    for name, make in changing_models.MODELS.items():
        yield name, make, {}
    ways = changing_models.TRAINED
    for name, more in (
        ("new data", {}),
        ("row", {"zero_stage": 2}),
        ("in place", {"recompute": 0}),
        ("several times", {"offload": "parameters"}),
    ):
        yield (
            f"trained, {name}",
            functools.partial(changing_models.Prototypes, ways[name]),
            {"pipeline_num": 2, **more},
        )
    for name, way in changing_models.LATE.items():
        yield f"trained, {name}", functools.partial(changing_models.LateChange, way), {"zero_stage": 1}


def nonstrict_writing(context: Context) -> dict[str, Any]:
    """Models that change parameters and buffers of theirs in the forward: three steps of six rows, of which ranks
    have unequal numbers, and an evaluation. All that a rank holds is that of one process.
    """
    num_ranks = len(context.case.local_rows)
    start, stop = (-(-6 * (context.rank + more) // num_ranks) for more in (0, 1))
    with float64():
        for name, make, options in _changing():
            model, alone, compiled, optimizers = context.pair(make, **options)
            for step in range(4):
                rows = changing_models.batch(6, step)
                if step == 3:
                    model.eval()
                    alone.eval()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                if step == 2 and name.startswith("trained"):
                    for each in (model, alone):
                        next(each.parameters()).requires_grad_(False)
                with torch.set_grad_enabled(step < 3):
                    result, expected = compiled(rows[start:stop].clone()), alone(rows)
                if step < 3:
                    result.backward()
                    expected.backward()
                    error = worst_error(model, alone)
                    context.findings.that(
                        error <= EXACT, f"{name}, step {step}: a gradient is off by {error}"
                    )
                    for optimizer in optimizers:
                        optimizer.step()
                error = max(
                    abs(float(result.detach()) - float(expected.detach())), _worst_state(model, alone)
                )
                context.findings.that(error <= EXACT, f"{name}, step {step}: off by {error}")
            state, expected_state = model.state_dict(), alone.state_dict()
            held = {key: value for key, value in state.items() if is_held(value)}
            error = max((float((held[key] - expected_state[key]).abs().max()) for key in held), default=0.0)
            whole = context.rank > 0 or held.keys() == expected_state.keys()
            context.findings.that(
                error <= EXACT and whole, f"{name}: its state is off by {error}, or not whole"
            )
    return {}


def nonstrict_dims(context: Context) -> dict[str, Any]:
    """Models whose samples lie along another dimension of some inputs: three steps, of unequal numbers of samples, and
    an evaluation. What they give has samples where it has them in one process; without the option those where both
    dimensions could be meant are refused.
    """
    start, stop = context.interval
    with float64():
        for name, entry in batch_dim_models.MODELS.items():
            options = {"batch_dim": entry.option} if entry.option else {}
            model, alone, compiled, optimizers = context.pair(entry.make, **options)
            for step in range(4):
                rows = entry.batch(sum(context.case.local_rows), step)
                own = entry.part(rows, start, stop)
                if step == 3:
                    alone.eval()
                    compiled.eval()
                    with torch.no_grad():
                        results = compiled(**own), alone(**rows)
                else:
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    results = compiled(**own), alone(**rows)
                found, expected = (each if isinstance(each, tuple) else (each,) for each in results)
                error = abs(float(found[0].detach()) / float(expected[0].detach()) - 1)
                if step < 3:
                    found[0].backward()
                    expected[0].backward()
                    error = max(error, worst_error(model, alone))
                    for optimizer in optimizers:
                        optimizer.step()
                for mine, whole in zip(found[1:], expected[1:], strict=True):
                    error = max(error, float((mine - whole[:, start:stop]).abs().max()))
                context.findings.that(error <= EXACT, f"{name}, step {step}: off by {error}")
        for name in batch_dim_models.UNCLEAR:
            entry = batch_dim_models.MODELS[name]
            model, _, compiled, _ = context.pair(entry.make)
            if name == "pooled":

                def twice(x: Tensor, model: nn.Module = model) -> Any:
                    return 2 * model(x)

                compiled = torch.compile(twice, **context.compile_arguments())
            # As many on all ranks: other numbers are refused as lengths that differ.
            rows = entry.part(
                entry.batch(2 * len(context.case.local_rows)), 2 * context.rank, 2 * context.rank + 2
            )
            try:
                compiled(**rows)
                said = ""
            except RanncError as error:
                said = f"{type(error).__name__}: {error}"
            wanted = "UnclearBatchDimError" in said and "'batch_dim': 1" in said and "'batch_dim': 0" in said
            context.findings.that(wanted, f"{name} without the option: {said or 'taken'}")
    return {}


def _worst_state(model: nn.Module, alone: nn.Module) -> float:
    """Of the parameters and buffers that this rank holds."""
    others, mine = named_tensors(alone), named_tensors(model)
    errors = (
        float((tensor.detach() - others[name].detach()).abs().max())
        for name, tensor in mine.items()
        if is_held(tensor)
    )
    return max(errors, default=0.0)


def nonstrict_changes(context: Context) -> dict[str, Any]:
    """What the code reads has another value in a later step: an item of a global, an attribute, the mode."""
    with float64():
        model, alone, compiled, optimizers = context.pair(MODELS["global"])
        before = nonstrict.SCALE["of_output"]
        try:
            for step, scale in enumerate((before, 0.5, before)):
                nonstrict.SCALE["of_output"] = scale
                error = _trained(context, model, alone, compiled, optimizers, step)
                context.findings.that(error <= EXACT, f"with {scale}: off by {error}")
        finally:
            nonstrict.SCALE["of_output"] = before
        model, alone, compiled, optimizers = context.pair(Paths)
        model.limit = alone.limit = sum(context.case.local_rows) + 1  # type: ignore[assignment]
        with _counted_captures() as captures:
            for step, times in enumerate((1, 2, 3, 1, 2)):
                error = _trained(context, model, alone, compiled, optimizers, step, times=times)
                context.findings.that(error <= EXACT, f"path of {times} times the rows: off by {error}")
        context.findings.that(len(captures) == 3, f"three paths captured {len(captures)} times")
        # By the rows of all ranks, and by a buffer that one of them has.
        _follow_values(
            context, ChosenByValues, lambda alone, x: (bool(alone.is_ready), bool(x.max() > 1)), num_paths=3
        )
        # By how many rows of all ranks are selected: some of one rank, or none.
        _follow_values(context, ChosenByCount, lambda alone, x: bool((x > 1).any()), num_paths=2)
        # Asked for, a model that Dynamo takes goes the other way too.
        model, alone, compiled, optimizers = context.pair(MODELS["tied"], capture="nonstrict")
        error = _trained(context, model, alone, compiled, optimizers, 0)
        context.findings.that(error <= EXACT, f"by choice: off by {error}")
    return {}


def _follow_values(
    context: Context,
    make: Callable[[], nn.Module],
    path_of: Callable[[nn.Module, Tensor], object],
    num_paths: int,
) -> None:
    """Six steps take at least so many paths, each of which is captured once."""
    model, alone, compiled, optimizers = context.pair(make)
    name, seen = type(model).__name__, set()
    with _counted_captures() as captures:
        for step in range(6):
            seen.add(path_of(alone, batch(sum(context.case.local_rows), step)[:, 0, 0]))
            error = _trained(context, model, alone, compiled, optimizers, step)
            context.findings.that(error <= EXACT, f"{name}, step {step}: off by {error}")
    context.findings.that(len(seen) >= num_paths, f"{name}: {seen} are too few paths to show anything")
    context.findings.that(
        len(captures) == len(seen), f"{name}: {len(seen)} paths captured {len(captures)} times"
    )


def nonstrict_refusals(context: Context) -> dict[str, Any]:
    """A model that neither way takes is refused on all ranks; so is one by option `capture`, with the line."""
    with float64():
        for name, (make, reason) in REFUSED.items():
            torch._dynamo.reset()
            for chosen in ("nonstrict", "auto"):
                compiled = torch.compile(make(), **context.compile_arguments(capture=chosen))
                text = _refusal(context, compiled, f"{name}, {chosen}")
                if chosen == "nonstrict":
                    context.findings.that(reason in text, f"{name}: {text}")
        torch._dynamo.reset()
        compiled = torch.compile(MODELS["lock"](), **context.compile_arguments(capture="dynamo"))
        text = _refusal(context, compiled, "a lock with capture='dynamo'")
        context.findings.that("lock" in text and "nonstrict_models.py:" in text, f"a lock: {text}")
    return {}


def _refusal(context: Context, compiled: Any, what: str) -> str:
    try:
        result: Tensor = compiled(batch(4))
    except RanncError as error:
        context.findings.that(isinstance(error, ModelError), f"{what}: {type(error).__name__} {error}")
        return str(error)
    context.findings.that(False, f"{what}: not refused, but {result}")
    return ""
