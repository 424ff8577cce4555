"""Faults that somebody thought of, in calls whose samples lie along another dimension than the first."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault

_TESTS = unit("capture/nonstrict/batch_dims")
_CALL, _CAPTURES = "capture/nonstrict/arguments.py", "capture/nonstrict/captures.py"

CHOSEN_DIMS: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "samples-stay-in-front",
            _CALL,
            "tensor.movedim(0, dim).contiguous() if dim else tensor",
            "tensor.contiguous() if dim else tensor",
            _TESTS,
        ),
        (
            "arguments-are-views",
            _CALL,
            "tensor.movedim(0, dim).contiguous() if dim else tensor",
            "tensor.movedim(0, dim) if dim else tensor",
            _TESTS,
        ),
        (
            "a-capture-sees-samples-elsewhere",
            _CAPTURES,
            "        return call.moved(self.dims)\n",
            "        return call\n",
            _TESTS,
        ),
        (
            "names-of-containers-are-none-of-their-parts",
            _CALL,
            'named = [name for name in self.by_input if label == name or label.startswith(f"{name}_")]',
            "named = [name for name in self.by_input if label == name]",
            _TESTS,
        ),
        (
            "sizes-that-are-tied-to-nothing-are-of-samples",
            _CAPTURES,
            "if dim == 1 and other == size]",
            "if dim == 1 and other != size]",
            _TESTS,
        ),
        (
            "one-sample-is-no-sample",
            _CAPTURES,
            "ones = [place for place, size in sizes.items() if size == 1]",
            "ones = [place for place, size in sizes.items() if size == 0]",
            _TESTS,
        ),
        (
            "pieces-of-sequences-are-put-together",
            "capture/analysis.py",
            "if choices or not keeps_rows_apart(captured):",
            "if not choices:",
            _TESTS,
        ),
        (
            "means-of-pieces-are-taken",
            "capture/analysis.py",
            "            where_rows_meet(sums)\n",
            "            pass\n",
            _TESTS,
        ),
        (
            "whatever-meets-is-unclear",
            _CAPTURES,
            "is_second = keeps_rows_apart(",
            "is_second = True or keeps_rows_apart(",
            _TESTS,
        ),
        (
            "layers-as-written-are-not-asked",
            _CAPTURES,
            'getattr(part, "batch_first", None) is False',
            'getattr(part, "batch_first", None) is None',
            _TESTS,
        ),
        (
            "arguments-come-back-turned",
            "capture/nonstrict/trace.py",
            "{position: call.given[index] for position, index in self.passed}",
            "{position: call.tensors[index] for position, index in self.passed}",
            _TESTS,
        ),
        (
            "with-the-option-it-is-asked-again",
            "compiled_call.py",
            "is_asked = num_ranks > 1 and config.gather_inputs and not config.batch_dim",
            "is_asked = config.gather_inputs",
            _TESTS,
        ),
    )
)
