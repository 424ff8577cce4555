"""Faults that somebody thought of, in Python's floats that change between calls, in sizes of data and in tables."""

from __future__ import annotations

from tests.planted_faults.areas import passes, unit
from tests.planted_faults.fault import Fault

_CAPTURE = unit("capture/numbers")
_GATE = ("tests/distributed/test_gate.py::test_the_gate[numbers_that_change]",)
_ROW_NUMBERS = ("tests/distributed/test_whole_batch.py::test_whole_batch[numbers-1,1]",)

CHOSEN_NUMBERS: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "numbers-keep-their-first-value",
            "capture/aten_trace.py",
            "known = number_reads(inputs, {**plain, **rows.numbers})",
            "known = number_reads(inputs, {**plain, **{k: v.node.hint for k, v in rows.numbers.items()}})",
            _CAPTURE,
        ),
        (
            "numbers-in-sizes-stay-inputs",
            "passes/size_nodes.py",
            "            self.stuck.update(*behind)\n            return\n",
            "            return\n",
            passes("size_nodes"),
        ),
        (
            "numbers-that-are-needed-are-not-fixed",
            "capture/dynamo_sizes.py",
            "            self.fix(needed)\n",
            "            return trace(numbers=frozenset(), **arguments)\n",
            _CAPTURE,
        ),
        (
            "numbers-widen-single-elements",
            "passes/size_nodes.py",
            "return _WIDER.get(dtype, dtype)",
            "return torch.float64",
            passes("size_nodes"),
        ),
        (
            "numbers-are-symbolic-once-only",
            "capture/dynamo.py",
            "return len(seen) > 1 and not self._given_up",
            "return seen != {number} and not self._given_up and number not in seen",
            _CAPTURE,
        ),
        (
            "derivatives-that-ask-for-sizes-of-data",
            "stages/build.py",
            "of_any_size = OF_ANY_SIZE if depends else {}",
            "of_any_size = {}",
            ("tests/distributed/test_whole_batch.py::test_whole_batch[data_sizes-1,1]",),
        ),
        (
            "derivatives-of-the-other-sign",
            "passes/data_sizes.py",
            "torch.where(value < 0, 1 - share, share)",
            "torch.where(value < 0, share, 1 - share)",
            passes("data_sizes"),
        ),
        (
            "tables-paired-with-rows",
            "passes/batch/batch_axis_indexing.py",
            'index is not None and index.dim == call.dim("dim", ndim) and call.rows',
            'index is not None and index.dim != call.dim("dim", ndim) and call.rows',
            passes("batch/batch_axis"),
        ),
        (
            "numbers-of-ranks-are-not-compared",
            "runtime/step/graph_settings.py",
            'raise RanksDifferError(\n                f"values of the input',
            'RanksDifferError(\n                f"values of the input',
            _GATE,
        ),
        (
            "batch-size-as-a-number-is-no-reason-to-run-as-written",
            "capture/nonstrict/kept_modules.py",
            "error.needs_value or error.needs_batch_size",
            "error.needs_value",
            unit("capture/nonstrict/kept_modules"),
        ),
        (
            "the-model-itself-is-never-kept-whole",
            "capture/nonstrict/kept_modules.py",
            "if root not in self._refused | self._kept:",
            "if False:",
            unit("capture/nonstrict/kept_modules"),
        ),
        (
            "batches-that-became-numbers-are-not-compared",
            "planner/plan_on_ranks.py",
            "if all(name in each for each in fixed) and any(",
            "if False and any(",
            _ROW_NUMBERS,
        ),
        (
            "sizes-of-the-whole-batch-are-no-numbers",
            "passes/batch/loss_decompositions.py",
            "if function is None and self.together:",
            "if False:",
            _ROW_NUMBERS,
        ),
        (
            "shares-of-the-batch-are-rounded-up",
            "passes/size_nodes.py",
            '"TruncToInt": math.trunc,',
            '"TruncToInt": math.ceil,',
            _ROW_NUMBERS,
        ),
        (
            "detached-scalars-have-gradients",
            "capture/analysis.py",
            "outputs = (self.split.user_outputs[place] for place in self.differentiable_outputs)",
            "outputs = self.split.user_outputs",
            _ROW_NUMBERS,
        ),
    )
)
