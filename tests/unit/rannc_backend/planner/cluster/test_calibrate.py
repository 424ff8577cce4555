"""The workloads of the calibration do what they are counted as, and its stopwatch tells a rank's time from
others'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rannc_backend.planner.cluster import calibrate
from rannc_backend.planner.cluster.calibrate import Stopwatch, elementwise_chain, measure_device
from rannc_backend.planner.cluster.cluster import OPERATOR_CLASSES
from rannc_backend.planner.cluster.cluster_file import cluster_toml, load_cluster, parse_cluster
from rannc_backend.planner.cost.compute import operator_cost, operator_name

CPU = torch.device("cpu")
FLOAT = torch.float32


class Ticking:
    """A clock on which every reading is a second after the one before."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def slow_watch() -> Stopwatch:
    """Every batch takes a second of it: each workload runs once, at the smallest scale, and a rate is an
    amount.
    """
    return Stopwatch(device=CPU, clock=Ticking(), core_clock=Ticking())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "workload",
    [
        lambda: calibrate._products(CPU, FLOAT, 1, 3),
        lambda: calibrate._products(CPU, torch.bfloat16, 2, 1),
        lambda: calibrate._convolutions(CPU, FLOAT, 1),
    ],
)
def test_flops_are_those_that_torch_counts(workload: Callable[[], tuple[float, calibrate.Work]]) -> None:
    flops, work = workload()
    with FlopCounterMode(display=False) as counter:
        work()
    assert counter.get_total_flops() == flops


def test_flops_of_attention_contain_the_product_that_backward_does_again() -> None:
    flops, work = calibrate._attention(CPU, FLOAT, 1)
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        work()
    # Two products forward and four backward; the fused kernel does one more, having kept no probabilities.
    assert counter.get_total_flops() / 6 == flops / 7


def test_bytes_are_those_that_a_graph_of_it_would_cost() -> None:
    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = (torch.nn.Parameter(torch.ones(64)) for _ in range(2))

        def forward(self, inputs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return elementwise_chain(inputs, other, self.scale, self.shift)

    inputs = torch.ones(512, 64)
    graph = (
        torch.export.export(Chain(), (inputs, inputs.clone()), strict=False)
        .run_decompositions()
        .graph_module.graph
    )
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    costs = [
        operator_cost(node, {node.name for node in nodes})
        for node in nodes
        if operator_name(node) != "getitem"
    ]
    size = inputs.numel() * inputs.element_size()
    moves = [float(cost.forward_bytes) / size for cost in costs if cost.forward_bytes != 0]
    # Statistics and parameters, of one number per row or column, are in the graph's count only.
    assert moves == pytest.approx(list(calibrate._CHAIN_MOVES), rel=0.02)
    total = sum(float(cost.forward_bytes + cost.backward_bytes) for cost in costs)
    assert calibrate._elementwise(CPU, 1)[0] / (512 * 512 * 4) == pytest.approx(total / size, rel=0.02)


def test_a_rate_is_the_amount_of_work_over_its_seconds() -> None:
    calls = []
    rates = measure_device(slow_watch(), lambda: calls.append(1))
    assert rates.flops_per_second == {
        "float32": 3 * 6 * 128 * 256 * 256,
        "bfloat16": 6 * 128 * 256 * 256,
        "float16": 6 * 128 * 256 * 256,
        "float64": 6 * 128 * 256 * 256,
    }
    peak = rates.flops_per_second["float32"]
    assert rates.memory_bytes_per_second == 2 * 16 * 2**20
    assert rates.launch_seconds == pytest.approx(1 / 3)
    assert sorted(rates.efficiencies) == sorted(OPERATOR_CLASSES)
    assert rates.efficiencies["attention"] == pytest.approx(14 * 4 * 8 * 64 * 64 * 64 / peak)
    assert rates.efficiencies["elementwise"] == pytest.approx(
        40 * 512 * 512 * 4 / rates.memory_bytes_per_second
    )
    assert len(calls) == 9, "ranks meet before each measurement"


def test_nothing_of_the_callers_is_touched() -> None:
    state = torch.random.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        rates = measure_device(slow_watch(), lambda: None)
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert rates == measure_device(slow_watch(), lambda: None)


def test_a_real_clock_gives_rates() -> None:
    rates = measure_device(Stopwatch(device=CPU, limit_seconds=0.002), lambda: None)
    found = [
        *rates.flops_per_second.values(),
        rates.memory_bytes_per_second,
        rates.launch_seconds,
        *rates.efficiencies.values(),
    ]
    assert all(0 < value < math.inf for value in found)


@pytest.mark.parametrize(("on_core", "expected"), [(2.0, 2.0), (11.0, 10.0)])
def test_what_other_programs_take_is_left_out(on_core: float, expected: float) -> None:
    """Ten seconds by the wall, of which the process had a core for some."""
    wall, core = iter([0.0, 10.0]), iter([0.0, on_core])
    watch = Stopwatch(device=CPU, clock=lambda: next(wall), core_clock=lambda: next(core))
    assert watch.batch_seconds(lambda: None, 1) == expected


def test_with_several_threads_the_wall_counts() -> None:
    torch.set_num_threads(2)
    wall, core = iter([0.0, 10.0]), iter([0.0, 2.0])
    watch = Stopwatch(device=CPU, clock=lambda: next(wall), core_clock=lambda: next(core))
    assert watch.batch_seconds(lambda: None, 1) == 10.0


class Hand:
    """A clock that moves by what the work takes."""

    def __init__(self, seconds: list[float]) -> None:
        self.now = 0.0
        self.seconds = iter(seconds)
        self.num_calls = 0

    def work(self) -> None:
        self.now += next(self.seconds)
        self.num_calls += 1

    def watch(self) -> Stopwatch:
        return Stopwatch(device=CPU, limit_seconds=0.1, clock=lambda: self.now, core_clock=lambda: self.now)


def test_the_first_call_and_odd_batches_do_not_count() -> None:
    # A slow first call; one to see how long it takes; five batches of two calls, one of them disturbed.
    hand = Hand([0.09, 0.01, 0.01, 0.01, 0.3, 0.3, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01])
    assert hand.watch().seconds_per_call(hand.work) == pytest.approx(0.01)
    assert hand.num_calls == 8, "over the limit, three batches are enough"


def test_work_that_takes_long_is_called_twice() -> None:
    hand = Hand([2.0, 1.5])
    assert hand.watch().seconds_per_call(hand.work) == 1.5


def test_loading_a_kernel_is_not_taken_for_its_speed() -> None:
    """The first call of a product on a GPU may load a library for seconds."""
    hand = Hand([2.0] + [0.01] * 20)
    assert hand.watch().seconds_per_call(hand.work) == pytest.approx(0.01)


@pytest.mark.parametrize("rate", [1e3, 3e11, 1e20])
def test_a_measured_share_can_be_read_again(rate: float) -> None:
    """Whatever it is: others may use the device too."""
    cluster = load_cluster("a100-80gb", 8)
    measured = replace(
        cluster, device=replace(cluster.device, efficiencies=(("attention", calibrate._share(rate, 1e12)),))
    )
    again = parse_cluster(cluster_toml(measured), file="measured.toml", num_devices=8)
    expected = min(max(rate / 1e12, 1e-3), 16.0)
    assert again.device.efficiency("attention") == pytest.approx(expected)


def test_a_faster_device_gets_more_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds_of_scale_1, expected in ((1.0, 1), (2e-3, 2), (1e-3 / 8, 4), (1e-9, 16)):
        hand = Hand([])

        def products(
            device: torch.device,
            dtype: torch.dtype,
            scale: int,
            num_layers: int,
            seconds: float = seconds_of_scale_1,
            hand: Hand = hand,
        ) -> tuple[float, calibrate.Work]:
            def work() -> None:
                hand.now += seconds * scale**3

            return 1.0, work

        monkeypatch.setattr(calibrate, "_products", products)
        assert calibrate._scale(hand.watch()) == expected
