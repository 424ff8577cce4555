"""Buckets in fewer bits on a CPU: how far a round trip is off, what becomes infinite, what is touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.kernels.bucket_wires import from_wire, to_wire

ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SCALES = st.sampled_from([1.0, 2.0, 128.0, 3.0, 0.25, 1e-3])


@given(
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([torch.bfloat16, torch.float16]),
    SCALES,
    st.lists(st.floats(-60.0, 60.0, allow_nan=False), min_size=1, max_size=40),
)
def test_a_round_trip_is_off_by_one_rounding(
    wide: torch.dtype, narrow: torch.dtype, scale: float, values: list[float]
) -> None:
    """Within the range of normal numbers of the narrow dtype."""
    given_values = torch.tensor(values, dtype=wide)
    made, back = torch.empty(len(values), dtype=narrow), torch.empty_like(given_values)
    assert to_wire(given_values, made, scale) == 1 and from_wire(made, back, scale) == 1
    normal = (given_values.double() * scale).abs() >= torch.finfo(narrow).smallest_normal * 2
    normal &= (given_values.double() * scale).abs() <= torch.finfo(narrow).max
    off = (back.double() - given_values.double()).abs()
    # Product and quotient round in the wide dtype, too.
    allowed = (ROUNDOFF[narrow] + 4 * torch.finfo(torch.float32).eps) * given_values.double().abs()
    assert bool((off <= allowed)[normal].all())
    assert torch.equal(made, (given_values * scale).to(narrow)), "the product is rounded, once"


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_what_is_out_of_range_becomes_infinite_and_stays_so(narrow: torch.dtype) -> None:
    given_values = torch.tensor([1e38, -1e38, float("nan"), float("inf"), 1.0])
    made, back = torch.empty(5, dtype=narrow), torch.empty(5)
    to_wire(given_values, made, 1e3)
    from_wire(made, back, 1e3)
    assert back.isinf().tolist() == [True, True, False, True, False] and bool(back[2].isnan())
    assert back[0] > 0 > back[1] and back[4] == 1.0


def test_nothing_takes_no_launch() -> None:
    assert to_wire(torch.empty(0), torch.empty(0, dtype=torch.float16), 2.0) == 0
