"""Every operator and module of torch's own test database as a model of its own, beside one process.

    pip install expecttest
    python tests/benchmarks/torch_database.py [--samples 2] [--only REGEX] [--micro-batches 2] [--capture auto]

In: `torch.testing._internal`'s lists of operators and modules with sample inputs, those whose first tensor has two rows or
more. Out: a line for each sample that is neither exact nor refused, and how many are what. Each model multiplies its first
input by a parameter and takes the mean of sines of what the operator gives; its tensors with as many rows are its batch.
Loss and gradients, those of inputs too, are compared in float64, for micro-batches of one row unless told otherwise.

*exact*: within 1e-10 of the largest gradient; *refused*: an error of this package; *random*: the operator draws numbers,
which are this package's own; *constant*: the loss has no gradient, where one process has zeros; *differs* and *failed*:
mistakes; *not tried*: the plain model does not run, or has no gradient.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rannc_backend.errors import InternalError, RanncError  # noqa: E402

_MAX_ELEMENTS = 5000
_TOLERANCE = 1e-10
_LEAST = 1e-5  # gradients below are compared as if they were of this size: of many operators they are zero but for rounding
_RANDOM = re.compile(
    r"rand|bernoulli|multinomial|normal$|normal\.|exponential|uniform|dropout|empty|cauchy|geometric|rrelu"
)


class Applied(nn.Module):
    """The mean of sines of what a function gives for a batch and for constants, its first tensor times a parameter."""

    def __init__(self, function: Callable[..., Any], leaves: list[Any], batch: set[int], spec: Any) -> None:
        super().__init__()
        self.function, self.leaves, self.batch, self.spec = function, leaves, batch, spec
        self.factor = nn.Parameter(torch.ones(()))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and place not in batch:
                self.register_buffer(f"constant_{place}", leaf.detach().clone())

    def forward(self, *batch: Tensor) -> Tensor:
        rest = iter(batch)
        leaves = [
            next(rest)
            if place in self.batch
            else getattr(self, f"constant_{place}")
            if isinstance(leaf, Tensor)
            else leaf
            for place, leaf in enumerate(self.leaves)
        ]
        first = min(self.batch)
        if leaves[first].is_floating_point():
            leaves[first] = leaves[first] * self.factor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        losses = []
        for value in pytree.tree_leaves(self.function(*args, **kwargs)):
            if isinstance(value, Tensor) and value.numel():
                real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
                number = real if real.is_floating_point() else real.double() * self.factor
                losses.append(number.sin().mean())
        return torch.stack([loss.double() for loss in losses]).sum()


def operators(
    only: str, num_samples: int
) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Name, function and arguments of samples."""
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415 - needs expecttest

    for each in op_db:
        name = ".".join(filter(None, (each.name, each.variant_test_name)))
        dtype = next((dtype for dtype in (torch.float64, torch.int64) if dtype in each.dtypes), None)
        if dtype is None or not re.search(only, name):
            continue
        torch.manual_seed(1)
        samples = [
            (s.input, *s.args, s.kwargs) for s in each.sample_inputs("cpu", dtype, requires_grad=False)
        ]
        samples = [sample for sample in samples if _has_rows(sample[:-1])]
        for *args, kwargs in samples[:: max(1, len(samples) // num_samples)][:num_samples]:
            yield name, each.op, tuple(args), kwargs


def modules(
    only: str, num_samples: int
) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """The same of modules, in training."""
    from torch.testing._internal.common_modules import module_db  # noqa: PLC0415 - needs expecttest

    for each in module_db:
        if not re.search(only, each.name) or "Lazy" in each.name:
            continue
        torch.manual_seed(1)
        made = each.module_inputs_func(
            each, device="cpu", dtype=torch.float64, requires_grad=False, training=True
        )
        inputs = [one for one in made if one.forward_input is not None and _has_rows(one.forward_input.args)]
        for one in inputs[:: max(1, len(inputs) // num_samples)][:num_samples]:
            module = each.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs).double()
            yield each.name, module, one.forward_input.args, one.forward_input.kwargs


def _has_rows(args: tuple[Any, ...]) -> bool:
    first = next((leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)), None)
    return (
        first is not None
        and first.layout == torch.strided
        and first.dim() > 0
        and first.shape[0] > 1
        and first.numel() < _MAX_ELEMENTS
    )


def outcome(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
) -> str:
    """What a sample is, and why."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    rows = next(iter(tensors.values())).shape[0]
    batch = {place for place, leaf in tensors.items() if leaf.dim() > 0 and leaf.shape[0] == rows}
    model = Applied(function, leaves, batch, spec)
    alone = copy.deepcopy(model)
    mine, theirs = ([_leaf(tensors[place]) for place in sorted(batch)] for _ in range(2))
    try:
        expected = alone(*theirs)
        expected.backward()
    except Exception as error:  # noqa: BLE001 - whatever torch raises
        return f"not tried {type(error).__name__}"
    gradients = [each.grad for each in (*theirs, *alone.parameters()) if each.grad is not None]
    torch._dynamo.reset()
    options = {"pipeline_num": rows, **options}
    try:
        result = torch.compile(model, backend="rannc", options=options)(*mine)
        if not result.requires_grad and not any(map(torch.any, gradients)):
            return "constant"
        result.backward()
    except InternalError as error:
        return f"failed {error}"
    except RanncError as error:
        return f"refused {type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - an error of torch's own, where one process has none
        return f"failed {type(error).__name__}: {error}"
    pairs = [
        (expected.detach(), result.detach()),
        *((a.grad, b.grad) for a, b in zip(theirs, mine, strict=True)),
    ]
    pairs += [(a.grad, b.grad) for a, b in zip(alone.parameters(), model.parameters(), strict=True)]
    worst = max(_distance(*pair) for pair in pairs)
    return "exact" if worst <= _TOLERANCE else f"differs {worst:.1e}"


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _distance(expected: Tensor | None, found: Tensor | None) -> float:
    if expected is None or found is None:
        return 0.0 if expected is found else float("inf")
    if expected.numel() == 0:
        return 0.0
    expected, found = (torch.nan_to_num(value) for value in (expected, found))
    return float((expected - found).abs().max() / expected.abs().max().clamp_min(_LEAST))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--micro-batches", type=int, default=0, help="0: one for each row")
    parser.add_argument("--capture", default="auto", choices=("auto", "nonstrict"))
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_default_dtype(torch.float64)
    options = {
        "stage_compiler": "eager",
        "capture": chosen.capture,
        "report_steps": 0,
        "batch_norm": "global",
    }
    if chosen.micro_batches:
        options["pipeline_num"] = chosen.micro_batches
    counts: dict[str, Counter[str]] = {"operators": Counter(), "modules": Counter()}
    began = time.perf_counter()
    for kind, samples in (("operators", operators), ("modules", modules)):
        for name, function, args, kwargs in samples(chosen.only, chosen.samples):
            found = outcome(function, args, kwargs, options)
            what = found.split()[0].replace("not", "not tried")
            if what in ("differs", "failed") and _RANDOM.search(name):
                what = "random"
            counts[kind][what] += 1
            if what not in ("exact", "random", "constant", "not tried"):
                print(f"{name}: {found[:300]}", flush=True)
    print(json.dumps({**counts, "seconds": round(time.perf_counter() - began)}))
    sys.exit(any(count["differs"] + count["failed"] for count in counts.values()))


if __name__ == "__main__":
    main()
