"""What a stage needs to start the kernel for its gradients is made once: tables are built in its first
backwards, and then found again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rannc_backend.kernels import gradient_views, gradient_writes
from rannc_backend.kernels.gradient_views import GradientTables
from rannc_backend.kernels.gradient_writes import FIRST, LATER, listening, write_gradients
from rannc_backend.stages import build as compile_build
from rannc_backend.stages.gradient_sink import ScratchGradients
from tests.unit.stage_models import capture

DTYPES = {0: torch.float32, 1: torch.float16, 2: torch.bfloat16, 3: torch.float64}


class PlayedKernel:
    """Does to the memory of a CPU what the table says, and counts launches."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def start(bucket: Tensor, table: Tensor, *arguments: Any, **constants: Any) -> None:
            assert grid == (table.shape[0],)
            self.launches += 1
            for address, offset, count, kind in table.tolist():
                assert constants["codes"] >> (kind & 3) & 1 and 0 < count <= constants["block"]
                source = _at(address, count, DTYPES[kind & 3])
                target = _at(bucket.data_ptr() + offset, count, bucket.dtype)
                target.copy_(target + source if kind & gradient_views.ACCUMULATE else source)

        return start


def _at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> PlayedKernel:
    played = PlayedKernel()
    monkeypatch.setattr(gradient_views, "_gradient_kernel", played)
    monkeypatch.setattr(gradient_views, "triton_dtype", lambda dtype: dtype)
    monkeypatch.setattr(gradient_writes, "can_launch", lambda tensor: True)
    return played


def test_a_table_is_built_for_new_addresses_only(kernel: PlayedKernel) -> None:
    tables, bucket = GradientTables(), torch.zeros(9000)
    views = [bucket[3:8], bucket[100:5100], bucket[5100:5100], bucket[6000:6004].view(2, 2)]
    held = [torch.randn(5), torch.randn(5000).bfloat16(), torch.empty(0), torch.randn(2, 2)]
    expected = torch.zeros(9000)
    for step, gradients in enumerate((held, held, [each.clone() for each in held], held)):
        gradients[0].fill_(step)
        report = tables.write(views, gradients, accumulate=step > 0)
        assert report is not None and (report.launches, report.bytes_copied) == (1, 5009 * 4)
        for place, gradient in zip((3, 100, 5100, 6000), gradients, strict=True):
            expected[place : place + gradient.numel()] += gradient.float().view(-1)
        assert torch.equal(bucket, expected)
    # First and later micro-batches differ, and one other set of addresses.
    assert tables.num_built == 3 and kernel.launches == 4


def test_what_does_not_fit_is_left_to_torch(kernel: PlayedKernel) -> None:
    tables = GradientTables()
    numbers = torch.zeros(4, dtype=torch.complex64)
    assert tables.write([numbers, numbers], [torch.ones(4), torch.ones(4)], accumulate=False) is None
    assert (
        tables.write(
            [torch.zeros(3, 2).t(), torch.zeros(2)], [torch.ones(2, 3), torch.ones(2)], accumulate=False
        )
        is None
    )
    with pytest.raises(AssertionError, match="elements"):
        tables.write([torch.zeros(4)], [torch.ones(3)], accumulate=False)
    turned = torch.arange(6.0).view(2, 3).t()
    target = torch.zeros(3, 2)
    report = tables.write([target], [turned], accumulate=False)
    assert (
        report is not None and report.launches == 2 and torch.equal(target, turned) and kernel.launches == 1
    )


def test_calls_of_a_graph_use_the_tables_of_its_stage(kernel: PlayedKernel) -> None:
    tables, sink = GradientTables(), ScratchGradients({})
    views, gradients = [torch.zeros(4), torch.zeros(2, 3)], [torch.ones(4), torch.ones(2, 3)]
    for accumulate in (FIRST, LATER, FIRST, LATER, LATER):
        with listening(sink, tables):
            torch.ops.rannc.write_gradients_(views, gradients, accumulate)
        with listening(sink, GradientTables()):
            torch.ops.rannc.write_gradients_([torch.zeros(1)] * 2, [torch.zeros(1)] * 2, accumulate)
    assert tables.num_built == 2 and kernel.launches == 10 and all(bool((view == 3).all()) for view in views)


def test_gradients_of_a_graph_reach_all_their_buckets() -> None:
    buckets = [torch.ones(2, 3), torch.ones(4), torch.ones(5, dtype=torch.float64)]
    gradients = [torch.full((2, 3), 2.0), torch.full((4,), 3.0).bfloat16(), torch.full((5,), 4.0)]
    for accumulate, wanted in ((FIRST, (2, 3, 4)), (LATER, (4, 6, 8))):
        write_gradients(buckets, gradients, accumulate)
        assert [bucket.unique().tolist() for bucket in buckets] == [[value] for value in wanted]


def test_the_reference_rounds_sums_once() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        view, gradient = torch.randn(300).to(dtype), torch.randn(300).bfloat16()
        exact = (view.double() + gradient.double()).to(dtype)
        gradient_views.reference(view, gradient, accumulate=True)
        torch.testing.assert_close(view, exact, rtol=torch.finfo(dtype).eps, atol=0)
        gradient_views.reference(view, gradient, accumulate=False)
        assert torch.equal(view, gradient.to(dtype))


class Biases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_stage_keeps_its_tables(kernel: PlayedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    # An eager stage announces each gradient by itself; here all come in one call, as what a compiled stage
    # adds does.
    writes = compile_build.WriteIntoBuckets
    monkeypatch.setattr(
        compile_build, "WriteIntoBuckets", lambda **named: writes(**named | {"group_bytes": 10**6})
    )
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Biases().double(), torch.randn(4, 6, dtype=torch.float64)
    rowwise = capture(model, lambda m, x: (m(x),), [x], ["rows"])
    (stage,) = rowwise.compile(rowwise.cut(1))
    values = {**rowwise.parameters, **rowwise.buffers, rowwise.batch_names[0]: x}
    sink = stage.scratch_gradients()
    built = []
    for _ in range(6):
        _, saved = stage.forward([values[item.name] for item in stage.inputs])
        stage.backward(saved, [torch.ones(4, 6, dtype=x.dtype) for _ in stage.grad_outputs], sink)
        built.append(stage.gradient_tables.num_built)
    assert kernel.launches == built[-1] == 6, "one group of gradients"
    # That of a host, unlike that of a device, hardly ever gives the same places: the sizes are known, the
    # addresses are new.
    assert len(stage.gradient_tables.shapes) == 2, "one for the first micro-batch, one for those that add"
    (6 * model(x).sum()).backward()
    for position, gradient in sink.gradients.items():
        torch.testing.assert_close(
            gradient, rowwise.parameters[stage.inputs[position].name].grad, rtol=1e-12, atol=1e-12
        )
