"""Run a BatchSplit slice by slice, as a pipeline would, and the whole graph, and compare.

In: a Traced graph and its BatchSplit. Out: outputs and gradients of both, in float64, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from rannc_backend.passes.batch.batch_split import UserConstant, UserReplicated, UserRows, UserScalar
from rannc_backend.passes.batch.layouts import Rows
from rannc_backend.passes.batch.split_reductions import BatchSplit, split_batch
from rannc_backend.passes.canonicalize import CANONICAL
from rannc_backend.passes.pipeline import with_facts
from tests.unit.passes.batch.batch_tracing import Traced

Values = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Deliberate mistakes, to see that the comparison notices."""

    drop_slice: int | None = None
    mean_of_means: bool = False


def split_traced(
    traced: Traced,
    *,
    frozen: Sequence[str] = (),
    gradient_batch: Sequence[str] = (),
    together: bool = False,
) -> BatchSplit:
    gradient_inputs = [name for name in traced.parameters if name not in frozen] + list(gradient_batch)
    return split_batch(
        with_facts(traced.graph_module, CANONICAL),
        batch_inputs=traced.batch,
        replicated_inputs=traced.replicated,
        gradient_inputs=gradient_inputs,
        num_user_outputs=traced.num_user_outputs,
        buffer_updates=traced.buffer_updates,
        rows_symbol=traced.rows_symbol,
        together=together,
    )


def _run(module: fx.GraphModule, values: Values) -> list[Any]:
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    return list(fx.Interpreter(module).run(*(values[name] for name in names)))


def _leaves(traced: Traced) -> Values:
    """The inputs with gradients on for parameters."""
    values = dict(traced.values)
    for name in traced.parameters:
        values[name] = values[name].detach().clone().requires_grad_(values[name].is_floating_point())
    return values


def _weights(outputs: Sequence[Any]) -> list[Tensor | None]:
    """A fixed incoming gradient for every differentiable output."""
    generator = torch.Generator().manual_seed(7)
    weights: list[Tensor | None] = []
    for output in outputs:
        differentiable = isinstance(output, Tensor) and output.requires_grad
        weights.append(
            torch.randn(output.shape, generator=generator, dtype=output.dtype) if differentiable else None
        )
    return weights


def run_whole(traced: Traced) -> tuple[list[Any], Values, list[Tensor | None]]:
    """Outputs, parameter gradients and the incoming gradients used, of the model itself on the whole
    batch.
    """
    values = _leaves(traced)
    outputs = list(traced.model(*values.values()))
    assert len(outputs) == traced.num_user_outputs
    weights = _weights(outputs)
    differentiated = [(output, weight) for output, weight in zip(outputs, weights) if weight is not None]
    parameters = [values[name] for name in traced.parameters]
    if not differentiated or not parameters:
        return outputs, {}, weights
    gradients = torch.autograd.grad(
        [output for output, _ in differentiated],
        parameters,
        [weight for _, weight in differentiated],
        allow_unused=True,
    )
    return outputs, {n: g for n, g in zip(traced.parameters, gradients) if g is not None}, weights


def take_rows(value: Tensor, layout: Rows, total: int, rows: slice) -> Tensor:
    """The rows of a value, wherever they are."""
    shape = (*value.shape[: layout.dim], layout.outer, total, layout.inner, *value.shape[layout.dim + 1 :])
    taken = value.reshape(shape).movedim(layout.dim + 1, 0)[rows].movedim(0, layout.dim + 1)
    return taken.reshape(*value.shape[: layout.dim], -1, *value.shape[layout.dim + 1 :])


def join_rows(parts: Sequence[Tensor], layout: Rows) -> Tensor:
    unfolded = [
        part.reshape(*part.shape[: layout.dim], layout.outer, -1, layout.inner, *part.shape[layout.dim + 1 :])
        for part in parts
    ]
    joined = torch.cat(unfolded, layout.dim + 1)
    return joined.reshape(*joined.shape[: layout.dim], -1, *joined.shape[layout.dim + 3 :])


def _slices(sizes: Sequence[int]) -> list[slice]:
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [slice(start, start + size) for start, size in zip(starts, sizes)]


def run_in_slices(
    traced: Traced,
    split: BatchSplit,
    sizes: Sequence[int],
    weights: Sequence[Tensor | None],
    faults: Faults = Faults(),
    seed: int = 0,
) -> tuple[list[Any], Values]:
    """Outputs and parameter gradients from slices of `sizes` rows."""
    total = traced.num_rows
    assert sum(sizes) == total
    values = _leaves(traced)
    cuts = _slices(sizes)
    common = {"global_rows": torch.tensor(total), "rng_seed": torch.tensor(seed)}

    def of_slice(rows: slice) -> Values:
        batch = {name: values[name][rows] for name in traced.batch}
        return {**values, **common, **batch, "first_row": torch.tensor(rows.start)}

    parts: list[list[Any]] = [_run(split.prologue, of_slice(rows)) if split.prologue else [] for rows in cuts]
    sums: Values = {name: sum(column) for name, column in zip(split.prologue_sums, zip(*parts))}  # type: ignore[misc]
    results = [_run(split.rowwise, {**of_slice(rows), **sums}) for rows in cuts]
    kept = [result for place, result in enumerate(results) if place != faults.drop_slice]

    scalars, seeds = _epilogue(split, kept, {**common, **sums}, weights)
    if faults.mean_of_means:
        local = [
            dict(zip(split.prologue_sums, part), global_rows=torch.tensor(size))
            for part, size in zip(parts, sizes)
        ]
        each = [_epilogue(split, [result], known, weights)[0] for result, known in zip(results, local)]
        scalars = [sum(column) / len(each) for column in zip(*each)]  # type: ignore[misc]
    outputs: list[Any] = []
    by_name = {(item.kind, item.name): place for place, item in enumerate(split.outputs)}
    for item in split.user_outputs:
        if isinstance(item, UserRows):
            place, layout = by_name["rows", item.name], split.layouts[item.name]
            outputs.append(join_rows([result[place] for result in results], layout))
        elif isinstance(item, UserScalar):
            outputs.append(scalars[item.index])
        elif isinstance(item, UserReplicated):
            outputs.append(results[0][by_name["replicated", item.name]])
        else:
            outputs.append(item.value if isinstance(item, UserConstant) else item.why)
    kept_cuts = [rows for place, rows in enumerate(cuts) if place != faults.drop_slice]
    return outputs, _gradients(traced, split, values, kept, kept_cuts, seeds, weights)


def _epilogue(
    split: BatchSplit, results: Sequence[list[Any]], known: Values, weights: Sequence[Tensor | None]
) -> tuple[list[Tensor], Values]:
    """Scalar outputs, and the gradient that each partial of a slice gets."""
    if split.epilogue is None:
        return [], {}
    partials = {}
    for place, item in enumerate(split.outputs):
        if item.kind == "partial":
            total = sum(result[place].detach() for result in results)
            partials[item.name] = total.requires_grad_(total.is_floating_point())
    scalars = _run(split.epilogue, {**known, **partials})
    seeds: Values = {}
    wanted = {name: value for name, value in partials.items() if value.requires_grad}
    pairs = [
        (scalars[item.index], weight)
        for item, weight in zip(split.user_outputs, weights)
        if isinstance(item, UserScalar) and weight is not None
    ]
    if pairs and wanted:
        gradients = torch.autograd.grad(
            [s for s, _ in pairs], list(wanted.values()), [w for _, w in pairs], allow_unused=True
        )
        seeds = {name: gradient for name, gradient in zip(wanted, gradients) if gradient is not None}
    return scalars, seeds


def _gradients(
    traced: Traced, split: BatchSplit, values: Values, results: Sequence[list[Any]], cuts: Sequence[slice], seeds: Values,
    weights: Sequence[Tensor | None],
) -> Values:  # fmt: skip
    parameters = [values[name] for name in traced.parameters]
    totals: Values = {}
    for rows, result in zip(cuts, results):
        outputs, incoming = [], []
        for place, item in enumerate(split.outputs):
            if item.kind == "partial" and item.name in seeds and result[place].requires_grad:
                outputs.append(result[place])
                incoming.append(seeds[item.name])
        for item, weight in zip(split.user_outputs, weights):
            if isinstance(item, UserRows) and weight is not None:
                place = next(
                    p for p, o in enumerate(split.outputs) if o.kind == "rows" and o.name == item.name
                )
                outputs.append(result[place])
                incoming.append(take_rows(weight, split.layouts[item.name], traced.num_rows, rows))
        if not outputs or not parameters:
            continue
        gradients = torch.autograd.grad(outputs, parameters, incoming, allow_unused=True)
        for name, gradient in zip(traced.parameters, gradients):
            if gradient is not None:
                totals[name] = totals[name] + gradient if name in totals else gradient
    return totals


def relative_error(actual: Tensor, expected: Tensor, floor: float = 1e-30) -> float:
    """Norm of the difference over the norm of the expected value, or over `floor` if that is larger."""
    if expected.dtype == torch.bool or not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    scale = max(floor, expected.double().norm().item())
    return (actual.double() - expected.double()).norm().item() / scale


def worst_error(
    traced: Traced,
    split: BatchSplit,
    sizes: Sequence[int],
    faults: Faults = Faults(),
    whole: Callable[..., Any] = run_whole,
) -> float:
    """The largest relative error over all outputs and all gradients. A missing gradient is infinitely
    wrong.
    """
    expected, expected_gradients, weights = whole(traced)
    actual, gradients = run_in_slices(traced, split, sizes, weights, faults)
    errors = [
        relative_error(a, e) if isinstance(e, Tensor) else (0.0 if a == e else float("inf"))
        for a, e in zip(actual, expected, strict=True)
    ]
    # Some gradients are zero but for rounding (a key's bias before a softmax): they are measured against the
    # others.
    floor = max(
        [1e-30, *(1e-4 * gradient.double().norm().item() for gradient in expected_gradients.values())]
    )
    for name, gradient in expected_gradients.items():
        missing = torch.zeros_like(gradient)
        errors.append(relative_error(gradients.get(name, missing), gradient, floor))
    return max(errors)
