"""Finds operators whose result depends on how their operands lie in memory: `python tests/benchmarks/operator_layouts.py`.

Runs the samples of torch's own operator tests, takes each call of the dispatcher, forward and backward, and
repeats it with every operand in other orders of the same values. An operator that gives other numbers, or an
error, must be one whose operands `passes/stage/any_layout.py` lays out as in the trace; exit status 1 where one
is not. To be run with each new version of torch (about a minute).
"""

from __future__ import annotations

import collections
import contextlib
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# torch's samples import it for its test class alone.
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

from rannc_backend.passes.stage.any_layout import reads_as_traced  # noqa: E402

NUM_SAMPLES, NUM_CALLS = 40, 30
_ABOUT_MEMORY = ("view", "strid", "empty", "contiguous", "storage", "resize", "set_", "detach", "is_same")


def _otherwise(value: Any, order: int) -> Any:
    """The same values: all dimensions, or the last two, in reverse order in memory."""
    if not isinstance(value, Tensor) or value.dim() < 2 or value.layout is not torch.strided:
        return value
    dims = list(range(value.dim()))
    dims = dims[::-1] if order == 0 else [*dims[:-2], dims[-1], dims[-2]]
    return value.detach().permute(dims).contiguous().permute([dims.index(dim) for dim in range(value.dim())])


def _same(found: Any, expected: Any) -> bool:
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    return all(
        a.shape == b.shape and torch.allclose(a.to(torch.complex128), b.to(torch.complex128), equal_nan=True)
        for a, b in pairs
        if isinstance(a, Tensor)
    )


class _Repeating(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls: collections.Counter[Any] = collections.Counter()
        self.found: dict[Any, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        drawn = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func)
        about_memory = any(word in str(func) for word in _ABOUT_MEMORY)
        self.num_calls[func] += 1
        sparse = any(
            isinstance(value, Tensor) and value.layout is not torch.strided
            for value in tree_leaves((args, kwargs, result))
        )
        skipped = func._schema.is_mutable or drawn or about_memory or sparse
        if not skipped and self.num_calls[func] <= NUM_CALLS:
            for order in (0, 1):
                other_args, other_kwargs = tree_map(lambda x, o=order: _otherwise(x, o), (args, kwargs))
                try:
                    if not _same(func(*other_args, **other_kwargs), result):
                        self.found[func] = "other numbers"
                except RuntimeError as error:
                    self.found.setdefault(func, str(error).splitlines()[0][:80])
        return result


def _losses(operator: Any) -> Iterator[Tensor]:
    for sample in list(operator.sample_inputs("cpu", torch.float64, requires_grad=True))[:NUM_SAMPLES]:
        for value in tree_leaves(operator(sample.input, *sample.args, **sample.kwargs)):
            if isinstance(value, Tensor) and value.requires_grad:
                yield value.abs().sum()
                break


def main() -> int:
    """Print what was found."""
    warnings.simplefilter("ignore")
    repeating = _Repeating()
    for operator in op_db:
        with contextlib.suppress(Exception), repeating:  # a sample of something that is not built here
            for loss in _losses(operator):
                loss.backward()
    missed = [func for func in repeating.found if not reads_as_traced(func)]
    for func, what in sorted(repeating.found.items(), key=lambda item: str(item[0])):
        print(f"{'NOT LAID OUT ' if func in missed else ''}{func}: {what}")
    print(
        f"{len(repeating.num_calls)} operators, {len(repeating.found)} found, {len(missed)} of them not laid out"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
