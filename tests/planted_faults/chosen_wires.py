"""Faults that somebody thought of, in what travels in fewer bits, in how many buckets, over how many communicators."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault

_REDUCTIONS = "runtime/gradients/bucket_reductions.py"
_SUMS = unit("runtime/gradients/bucket_reductions")
_WIRES = ("tests/unit/kernels/test_bucket_wires.py",)
_PACK = ("tests/unit/kernels/test_boundary_pack.py",)


def wires(*cases: str) -> tuple[str, ...]:
    """Cases of formats over ranks."""
    return tuple(f"tests/distributed/test_wires.py::test_wires[{case}]" for case in cases)


CHOSEN_WIRES: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "scales-that-are-not-divided-out",
            "kernels/bucket_wires.py",
            "return _convert(narrow, wide, times=1.0, over=float(scale))",
            "return _convert(narrow, wide, times=1.0, over=1.0)",
            _SUMS,
        ),
        (
            "casts-before-the-scale",
            "kernels/bucket_wires.py",
            "values = values.to(compute) * times",
            "values = values.to(target.dtype) * times",
            _WIRES,
        ),
        (
            "unpacking-forgets-a-tensor",
            "kernels/pack_reference.py",
            "for target, offset, wire in zip(targets, offsets, wires):",
            "for target, offset, wire in list(zip(targets, offsets, wires))[:-1]:",
            _PACK,
        ),
        (
            "buckets-are-scaled-that-are-not-rounded",
            _REDUCTIONS,
            "if dtype == buffer.dtype or len(ranks) == 1:",
            "if len(ranks) == 1:",
            _SUMS,
        ),
        (
            "sums-go-to-ranks-that-do-not-take-them",
            _REDUCTIONS,
            "is_taken=not takers or self.rank in takers,",
            "is_taken=True,",
            _SUMS,
        ),
        (
            "all-buckets-over-one-communicator",
            _REDUCTIONS,
            "self._num_started[ranks] += 1",
            "pass",
            _SUMS,
        ),
        (
            "gradients-are-summed-in-the-dtype-that-they-have",
            "runtime/gradients/bucket_reductions.py",
            "return cls(dtype=GRADIENT_DTYPES.get(config.gradient_dtype), scale=config.gradient_scale)",
            "return cls()",
            wires("equal_rounding_in_one_process-2-bf16"),
        ),
        (
            "values-travel-as-they-are-whatever-is-asked-for",
            "runtime/step/messages.py",
            "wanted if is_between_stages else Wire.SAME,",
            "Wire.SAME,",
            wires("equal_rounding_in_one_process-1,1-bf16-sent"),
        ),
        (
            "gradients-of-values-travel-as-float8",
            "runtime/step/messages.py",
            "backward=channel.direction == GRADIENTS,",
            "backward=False,",
            wires("equal_rounding_in_one_process-1,1-fp8-sent"),
        ),
        (
            "rounded-values-are-written-in-place",
            "runtime/step/send_buffers.py",
            "return not any(wires_of(channel, values, wire))",
            "return True",
            unit("runtime/step/send_buffers"),
        ),
        (
            "rounded-messages-are-priced-as-they-are",
            "planner/search/over_intervals.py",
            "moved *= self.shares[kind][flows[kept], None]",
            "pass",
            unit("planner/formats"),
        ),
        (
            "rounded-buckets-take-no-memory",
            "planner/search/over_intervals.py",
            "rounded = use.reduced_bytes if use.sum_share < 1 else 0.0",
            "rounded = 0.0",
            unit("planner/formats"),
        ),
        (
            "one-bucket-more-than-asked-for",
            "runtime/gradients/bucket_layout.py",
            "places = [max(0, -(-end * number // total) - 1) for end in ends]",
            "places = [end * number // total for end in ends]",
            unit("runtime/gradients/buckets"),
        ),
        (
            "a-scaled-loss-is-reduced-unscaled",
            "deployment.py",
            'or "fp16" in (config.gradient_dtype, config.boundary_dtype)',
            "",
            wires("overflow-2"),
        ),
    )
)
