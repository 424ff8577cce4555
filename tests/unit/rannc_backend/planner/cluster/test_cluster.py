"""Rates by class of operator, and a cluster that comes back whole from what a plan keeps of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy

from rannc_backend.ir.block_graph import OperatorCost
from rannc_backend.planner.cluster.cluster import OPERATOR_CLASSES, Device, Link
from rannc_backend.planner.cost.compute import operator_class
from rannc_backend.planner.cost.pricing import operator_seconds
from rannc_backend.planner.cost.transfer import allreduce_seconds, message_seconds

DEVICE = Device(
    name="device",
    memory_bytes=2**30,
    flops_per_second=(("bfloat16", 400.0), ("float32", 100.0)),
    memory_bytes_per_second=50.0,
    launch_seconds=0.25,
    efficiencies=(("attention", 0.25), ("convolution", 0.75), ("elementwise", 0.4), ("matmul", 0.5)),
)


def operator(kind: str, *, flops: float = 0, num_bytes: float = 0, dtype: str = "float32") -> OperatorCost:
    return OperatorCost(
        name=kind,
        dtype=dtype,
        operator_class=kind,
        forward_flops=sympy.Float(flops),
        backward_flops=sympy.Float(2 * flops),
        forward_bytes=sympy.Float(num_bytes),
        backward_bytes=sympy.Float(2 * num_bytes),
        num_forward_launches=1,
        num_backward_launches=2,
    )


@pytest.mark.parametrize(
    ("kind", "rate"), [("matmul", 50.0), ("attention", 25.0), ("convolution", 75.0), ("elementwise", 40.0)]
)
def test_rates_by_class(kind: str, rate: float) -> None:
    assert DEVICE.rate("float32", kind) == rate
    assert DEVICE.rate("bfloat16", kind) == 4 * rate
    assert DEVICE.rate("int64", kind) == rate, "a dtype that is not described counts as the slowest"


def test_bytes_of_elementwise_operators_have_a_rate_of_their_own() -> None:
    assert DEVICE.memory_rate() == DEVICE.memory_rate("elementwise") == 20.0
    assert {DEVICE.memory_rate(kind) for kind in ("matmul", "attention", "convolution")} == {50.0}


def test_a_class_without_an_efficiency_reaches_the_peak() -> None:
    bare = replace(DEVICE, efficiencies=())
    assert {bare.rate("float32", kind) for kind in OPERATOR_CLASSES} == {100.0}
    assert bare.memory_rate() == 50.0


@pytest.mark.parametrize(
    "question", [lambda: DEVICE.rate("float32", "softmax"), lambda: DEVICE.memory_rate("softmax")]
)
def test_an_unknown_class_is_an_error_of_ours(question: object) -> None:
    with pytest.raises(AssertionError, match="softmax"):
        question()


def test_seconds_of_an_operator_are_those_of_its_class() -> None:
    operators = [
        operator("matmul", flops=100),
        operator("attention", flops=100),
        operator("convolution", flops=150),
        operator("matmul", flops=100, dtype="bfloat16"),
        operator("elementwise", num_bytes=100),
        operator("matmul", flops=1, num_bytes=100),
    ]
    forward, backward = operator_seconds(operators, DEVICE, [1, 2])
    assert forward[:, 0].tolist() == [2.25, 4.25, 2.25, 0.75, 5.25, 2.25]
    assert backward[:, 0].tolist() == [4.5, 8.5, 4.5, 1.5, 10.5, 4.5]
    assert forward.shape == backward.shape == (6, 2)


def test_names_of_operators_have_a_class() -> None:
    names = [
        "addmm",
        "bmm",
        "_scaled_dot_product_flash_attention_for_cpu",
        "convolution",
        "gelu",
        "native_layer_norm",
    ]
    assert [operator_class(name) for name in names] == [
        "matmul",
        "matmul",
        "attention",
        "convolution",
        "elementwise",
        "elementwise",
    ]


def test_an_allreduce_reaches_its_share_of_the_link() -> None:
    link = Link(latency_seconds=0.5, bytes_per_second=100, allreduce_share=0.5)
    assert message_seconds(link, 100) == 1.5, "a message does not"
    assert allreduce_seconds(link, 400, 4) == 6 * (0.5 + 2)
