"""What a backward starts from, with numbers and with tensors whose value the host does not read."""

from __future__ import annotations

import math

import pytest
import torch

from rannc_backend.kernels.scale_unless_one import scale_unless_one
from rannc_backend.runtime.agreement import Digests, digest
from rannc_backend.runtime.gradients.loss_gradients import (
    Number,
    filled_like,
    if_within,
    means_on_device,
    ratio,
    scale_buffers,
)
from tests.fake_device import FakeDevice, OnDevice


def device_number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize(
    ("number", "other", "expected"),
    [
        (3.0, 2.0, 1.5),
        (0.0, 0.0, 1.0),
        (math.inf, math.inf, 1.0),
        (0.0, 4.0, 0.0),
        (math.inf, 2.0, math.inf),
        (65536.0, 32768.0, 2.0),
    ],
)
def test_ratios(number: float, other: float, expected: float) -> None:
    assert ratio(number, other) == expected
    device = FakeDevice()
    with OnDevice(device):
        results: list[Number] = [
            ratio(device_number(number), device_number(other)),
            ratio(device_number(number), other),
            ratio(number, device_number(other)),
        ]
    assert not device.host_waits
    assert [float(result) for result in results] == [expected] * 3


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (2.0, 2.0),
        (0.0, 1.0),
        (-3.0, -3.0),
        (math.inf, 1.0),
        (math.nan, 1.0),
        (1e9, 1.0),
        (2.0**24, 1.0),
        (2.0**-24, 1.0),
    ],
)
def test_the_next_seed(number: float, expected: float) -> None:
    assert if_within(number, 2.0**-24, 2.0**24, otherwise=1.0) == expected
    for before in (1.0, device_number(1.0)):
        chosen = if_within(device_number(number), 2.0**-24, 2.0**24, otherwise=before)
        assert isinstance(chosen, torch.Tensor) and chosen.item() == expected


def test_an_infinite_or_absent_gradient_is_no_seed_even_where_any_number_is() -> None:
    for number, expected in (
        (math.inf, 4.0),
        (-math.inf, 4.0),
        (0.0, 4.0),
        (1e300, 1e300),
        (-1e-300, -1e-300),
    ):
        assert if_within(number, 0.0, math.inf, otherwise=4.0) == expected
        assert float(if_within(device_number(number), 0.0, math.inf, otherwise=4.0)) == expected


def test_means_stay_on_the_device() -> None:
    device = FakeDevice()
    grads = [torch.tensor(2.0), None, torch.tensor([3.0], dtype=torch.bfloat16)]
    with OnDevice(device):
        # Both ranks have the same.
        means = means_on_device(grads, lambda total: total.mul_(2), 2, torch.device("cpu"))
        alone = means_on_device(grads, None, 1, torch.device("cpu"))
    assert not device.host_waits
    assert [float(mean) for mean in means] == [float(mean) for mean in alone] == [2.0, 0.0, 3.0]


def test_gradients_of_scalars_are_filled() -> None:
    for dtype in (torch.float32, torch.float16):
        like = torch.zeros(2, dtype=dtype)
        for value in (0.5, 1e30):
            plain, behind = filled_like(like, value), filled_like(like, device_number(value))
            assert torch.equal(plain, behind) and plain.dtype == dtype and plain.shape == behind.shape
    assert filled_like(torch.zeros((), dtype=torch.float16), 1e30).isinf()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_buffers_are_scaled(dtype: torch.dtype) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for scale in (1.0, 0.5, 3.0):
        plain, behind, direct = values.clone(), values.clone(), values.clone()
        scale_buffers([plain, torch.empty(0, dtype=dtype)], scale)
        scale_buffers([behind, torch.empty(0, dtype=dtype)], device_number(scale))
        scale_unless_one([direct], device_number(scale))
        assert torch.equal(behind, (values.to(wide) * scale).to(dtype)) and torch.equal(direct, behind)
        assert torch.equal(plain, behind)


def test_a_digest_is_read_again_only_if_it_must() -> None:
    device, digests = FakeDevice(), Digests()
    mask = torch.randn(4, 4)
    expected = digest(mask)
    with OnDevice(device):
        assert digests.of("mask", mask) == expected
        reads = len(device.host_waits)
        assert digests.of("mask", mask) == expected
        assert len(device.host_waits) == reads > 0
    mask[0, 0] += 1
    assert digests.of("mask", mask) == digest(mask) != expected
    again = mask.clone()
    again[3, 3] = math.nan
    assert digests.of("mask", again) != digests.of("mask", mask)
    assert digest(torch.empty(0)) == [0.0] and all(
        map(math.isfinite, digest(torch.tensor([math.inf, math.nan])))
    )
    assert digest(torch.tensor([1 + 2j])) != digest(torch.tensor([1 + 3j]))
