"""Traces that begin with a symbolic batch size: one trace where there were two, on torch 2.11.0 and 2.13.0.

When a test of this file fails on another version, rannc_backend/capture/first_trace.py has to learn where
Dynamo keeps what it looks for; until then every frame is traced twice, which
tests/unit/rannc_backend/capture/test_inputs.py shows to be right all the same.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from rannc_backend.capture import refusals as capture_compilation
from tests.unit.rannc_backend.capture.capture_harness import Recorder, fresh_dynamo, kinds, trace_settings


@pytest.fixture(autouse=True)
def dynamo():
    with fresh_dynamo(begins=True):
        yield


@dataclasses.dataclass
class Hidden:
    """Not known to pytree, so nobody sees the tensor before the trace."""

    x: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(12.0).reshape(4, 3))

    def forward(self, x: Tensor | Hidden, other: Tensor | None = None) -> Tensor:
        x = x.x if isinstance(x, Hidden) else x
        return self.linear(x) + self.table.sum() + (0 if other is None else other.sum())


MODEL = Model()


def num_traces(model, *args, **kwargs) -> int:
    recorder = Recorder()
    torch.compile(model, backend=recorder)(*args, **kwargs)
    assert kinds(recorder)["linear.weight"] == "parameter" and kinds(recorder)["table"] == "buffer"
    assert "batch" in kinds(recorder).values()
    return recorder.num_calls


def test_one_trace_is_enough() -> None:
    x = torch.randn(4, 3)
    before = trace_settings()
    assert num_traces(Model(), x) == 1
    torch._dynamo.reset()
    assert num_traces(Model(), x=x) == 1, "after a reset too"
    assert trace_settings() == before and not vars(x)


def test_a_function_around_the_model() -> None:
    model = Model()

    def step(batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"])

    assert num_traces(step, {"x": torch.randn(4, 3)}) == 1


def test_settings_go_back_where_dynamo_gives_up_and_its_exception_is_kept() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    x = torch.randn(4, 3)
    before = trace_settings()
    recorder = Recorder()
    with pytest.raises(torch._dynamo.exc.Unsupported) as kept:
        torch.compile(breaks, backend=recorder, fullgraph=True)(x)
    assert recorder.num_calls == 0 and kept.value.__traceback__ is not None
    assert trace_settings() == before and not vars(x)


def test_what_is_not_seen_before_the_trace_is_asked_for_again() -> None:
    assert num_traces(Model(), Hidden(torch.randn(4, 3))) == 2
    assert num_traces(Model(), torch.randn(1, 3)) == 2, (
        "what stands for a batch of 1 is known only after a trace"
    )


def test_tensors_of_the_model_among_the_arguments_stay_what_they_are() -> None:
    assert num_traces(MODEL, torch.randn(4, 3), MODEL.table) == 1

    def step(x: Tensor, table: Tensor) -> Tensor:
        return MODEL(x) + table.sum()

    assert num_traces(step, torch.randn(4, 3), MODEL.table) == 2, "the frame does not say whose tensor it is"


def test_other_backends_are_left_alone() -> None:
    shapes = []

    def backend(graph_module, example_inputs):
        shapes.extend(example_inputs[0].shape if isinstance(example_inputs[0], Tensor) else [None])
        return graph_module.forward

    torch.compile(lambda x: x.sin(), backend=backend)(torch.randn(4, 3))
    assert shapes == [4, 3]


def test_a_torch_that_keeps_its_frame_elsewhere_costs_a_trace(monkeypatch) -> None:
    monkeypatch.setattr(capture_compilation, "_FARTHEST", 0)
    assert num_traces(Model(), torch.randn(4, 3)) == 2

    def fails(*_):
        raise RuntimeError("not known")

    monkeypatch.setattr(capture_compilation, "innermost_backend", fails)
    monkeypatch.setattr(capture_compilation, "_FARTHEST", 20)
    assert num_traces(Model(), torch.randn(4, 3)) == 2
