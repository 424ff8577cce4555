"""How fast this process computes: the rates of a `Device`, measured in about two seconds.

In: a torch device, and a function that lets the ranks of a machine measure the same thing at the same time.
Out: `DeviceRates`.

Terms. A *workload* is a small piece of a network, run forward and backward by torch's own kernels and counted
as `compute` counts the operators of a graph; so a rate is what operators of that class reach among others,
with memory to be fetched and results to be allocated, and not what the best of them reaches alone. A
workload's *scale* grows with the device, until one matrix product takes about a millisecond. On CUDA the same
code waits for the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rannc_backend.planner.cluster.cluster import SHARES

Work = Callable[[], object]
"""Runs a workload once."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LARGEST_SCALE = 16
_TARGET_SECONDS = 1e-3
_NUM_BATCHES = 5
_FEWEST_BATCHES = 3
_COPIED_BYTES = 16 * 2**20  # times the scale


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """What one process measured. FLOP/s by dtype, bytes/s of a copy, seconds per small operator, and shares
    of those by class.
    """

    flops_per_second: dict[str, float]
    memory_bytes_per_second: float
    launch_seconds: float
    efficiencies: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Times calls on a device.

    Where it computes with one thread, seconds are those that it had a core for: what other programs, or other
    ranks of this machine (`Device.core_share`), take from the core just now is no property of the device, and
    a description is kept for long. `limit_seconds` is about how long one measurement may take.
    """

    device: torch.device
    limit_seconds: float = 0.12
    clock: Callable[[], float] = time.perf_counter
    core_clock: Callable[[], float] = time.process_time

    def synchronize(self) -> None:
        """Wait for what was started on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def batch_seconds(self, work: Work, num_calls: int) -> float:
        """Seconds that `num_calls` calls take, to the end of what they start."""
        self.synchronize()
        begin, begin_on_core = self.clock(), self.core_clock()
        for _ in range(num_calls):
            work()
        self.synchronize()
        seconds, seconds_on_core = self.clock() - begin, self.core_clock() - begin_on_core
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        return max(min(seconds, seconds_on_core) if alone else seconds, 1e-9)

    def seconds_per_call(self, work: Work) -> float:
        """Median over batches of calls, after a first call that may load and choose kernels."""
        begin = self.clock()
        self.batch_seconds(work, 1)
        again = self.batch_seconds(work, 1)
        if again > 5 * self.limit_seconds:
            return again
        num_calls = max(1, int(self.limit_seconds / _NUM_BATCHES / again))
        seconds: list[float] = []
        while len(seconds) < _NUM_BATCHES and (
            len(seconds) < _FEWEST_BATCHES or self.clock() - begin < 2 * self.limit_seconds
        ):
            seconds.append(self.batch_seconds(work, num_calls) / num_calls)
        return statistics.median(seconds)


def measure_device(watch: Stopwatch, together: Callable[[], None]) -> DeviceRates:
    """The rates of this process's device. `together` is called before each measurement: it returns when all
    ranks call it.
    """
    device = watch.device
    # Gradients are of our own tensors only, whatever the caller is in the middle of.
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        scale = _scale(watch)

        def rate(amount: float, work: Work) -> float:
            together()
            return amount / watch.seconds_per_call(work)

        flops = {
            _name(dtype): rate(*_products(device, dtype, scale, 3 if dtype == torch.float32 else 1))
            for dtype in _DTYPES
        }
        copied = rate(*_copy(device, scale))
        # What models compute in: the share of the peak that a kernel reaches is that of a dtype.
        usual = torch.float32 if device.type == "cpu" else torch.bfloat16
        peak = flops[_name(usual)]
        rates = DeviceRates(
            flops_per_second=flops,
            memory_bytes_per_second=copied,
            launch_seconds=1 / rate(*_small_operators(device)),
            efficiencies={
                "matmul": 1.0,
                "attention": _share(rate(*_attention(device, usual, scale)), peak),
                "convolution": _share(rate(*_convolutions(device, usual, scale)), peak),
                "elementwise": _share(rate(*_elementwise(device, scale)), copied),
            },
        )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def _share(rate: float, peak: float) -> float:
    """Within what a description may say: a device that others use too may have measured anything."""
    low, high = SHARES
    return min(max(rate / peak, low), high)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _scale(watch: Stopwatch) -> int:
    scale = 1
    while scale < _LARGEST_SCALE:
        _, work = _products(watch.device, torch.float32, scale, 1)
        work()
        if watch.batch_seconds(work, 1) > 3 * _TARGET_SECONDS:  # three products: forward and two gradients
            break
        scale *= 2
    return scale


def _tensor(
    device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False
) -> Tensor:
    # No random numbers: the user's generators stay as they are.
    values = torch.linspace(-1.0, 1.0, 997, device=device, dtype=torch.float32)
    count = 1
    for size in shape:
        count *= size
    filled = values.repeat(count // 997 + 1)[:count].view(shape).to(dtype)
    return filled.requires_grad_(grad)


def _forward_backward(forward: Callable[[], Tensor], leaves: list[Tensor], gradient: Tensor) -> Work:
    return lambda: torch.autograd.grad(forward(), leaves, gradient)


def _products(device: torch.device, dtype: torch.dtype, scale: int, num_layers: int) -> tuple[float, Work]:
    """Linear layers with a bias, each with weights of its own."""
    rows, width = 128 * scale, 256 * scale
    inputs = _tensor(device, rows, width, dtype=dtype, grad=True)
    weights = [_tensor(device, width, width, dtype=dtype, grad=True) for _ in range(num_layers)]
    biases = [_tensor(device, width, dtype=dtype, grad=True) for _ in range(num_layers)]

    def forward() -> Tensor:
        hidden = inputs
        for weight, bias in zip(weights, biases):
            hidden = functional.linear(hidden, weight, bias)
        return hidden

    flops = num_layers * 3 * 2.0 * rows * width * width
    return flops, _forward_backward(forward, [inputs, *weights, *biases], inputs.detach())


def _attention(device: torch.device, dtype: torch.dtype, scale: int) -> tuple[float, Work]:
    batch, heads, length, depth = 4, 8, 64 * scale, 64
    query, key, value = (
        _tensor(device, batch, heads, length, depth, dtype=dtype, grad=True) for _ in range(3)
    )
    flops = 3.5 * 4.0 * batch * heads * length * length * depth
    forward = lambda: functional.scaled_dot_product_attention(query, key, value)  # noqa: E731
    return flops, _forward_backward(forward, [query, key, value], query.detach())


def _convolutions(device: torch.device, dtype: torch.dtype, scale: int) -> tuple[float, Work]:
    """3 x 3 filters, many positions and few channels as at a ResNet's beginning, to the opposite as at its
    end.
    """
    works, flops = [], 0.0
    for channels, size in ((64, 12), (256, 3), (512, 2)):
        size *= min(scale, 4)
        images = _tensor(device, 4 * scale, channels, size, size, dtype=dtype, grad=True)
        weight = _tensor(device, channels, channels, 3, 3, dtype=dtype, grad=True)
        forward = lambda images=images, weight=weight: functional.conv2d(images, weight, padding=1)  # noqa: E731
        works.append(_forward_backward(forward, [images, weight], images.detach()))
        flops += 3 * 2.0 * images.numel() * channels * 9
    return flops, lambda: [work() for work in works]


def elementwise_chain(inputs: Tensor, other: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Normalisations, activations and sums as between the products of a transformer and a ResNet, cheap and
    dear ones.

    inputs, other: [rows, width], rows a multiple of 8; scale, shift: [width]. Gives [8, rows / 8, width].
    """
    width = scale.shape[0]
    hidden = functional.layer_norm(inputs + other, (width,), scale, shift)
    hidden = functional.gelu(hidden) * other
    hidden = functional.batch_norm(hidden, None, None, scale, shift, training=True)
    hidden = torch.softmax(functional.relu(hidden), dim=-1)
    return torch.tanh(hidden.view(-1, 8, width).transpose(0, 1).contiguous())


# Tensors as large as `inputs` that the operators of `elementwise_chain` read and write, in its order.
_CHAIN_MOVES = (3, 2, 2, 3, 2, 2, 2, 2, 2)


def _elementwise(device: torch.device, scale: int) -> tuple[float, Work]:
    width = min(512 * scale, 4096)
    inputs, other = (_tensor(device, width, width, grad=True) for _ in range(2))
    leaves = [inputs, other, _tensor(device, width, grad=True), _tensor(device, width, grad=True)]
    # `compute` counts as many bytes for backward as for forward.
    num_bytes = 2.0 * sum(_CHAIN_MOVES) * inputs.numel() * inputs.element_size()
    gradient = inputs.detach().view(8, width // 8, width)
    return num_bytes, _forward_backward(lambda: elementwise_chain(*leaves), leaves, gradient)


def _copy(device: torch.device, scale: int) -> tuple[float, Work]:
    source = _tensor(device, _COPIED_BYTES * scale // 4)
    target = torch.empty_like(source)
    return 2.0 * source.numel() * source.element_size(), lambda: target.copy_(source)


def _small_operators(device: torch.device) -> tuple[float, Work]:
    """Operators with nothing to compute, among the views that surround them in a graph; the amount is that of
    the former.
    """
    inputs, weight, bias = _tensor(device, 4, 8), _tensor(device, 8, 8), _tensor(device, 8)
    aten = torch.ops.aten

    def work() -> Tensor:
        rows = aten.view.default(aten.view.default(inputs, [2, 2, 8]), [4, 8])
        product = aten.addmm.default(bias, rows, aten.t.default(weight))
        hidden = aten.view.default(product, [2, 2, 8])
        return aten.add.Tensor(aten.gelu.default(hidden), hidden)

    return 3.0, work
