"""What Dynamo would run without the backend is refused, on torch 2.11.0 and 2.13.0."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from rannc_backend.capture.errors import graph_break_error
from rannc_backend.capture.refusals import GivenUpModels, refuse_other_count
from rannc_backend.errors import GraphBreakError, LaunchError, WrappedModelError
from tests.unit.rannc_backend.capture.capture_harness import Recorder, fresh_dynamo, trace_settings


@pytest.fixture(autouse=True)
def dynamo():
    with fresh_dynamo(begins=True):
        yield
    torch._dynamo.callback_handler.clear()  # checks that compilations were counted right
    torch._dynamo.reset_recompile_user_contexts()


def watch(recorder: Recorder) -> None:
    GivenUpModels(lambda backend: backend is recorder).watch()


@pytest.fixture
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_a_model_that_the_backend_would_not_see_is_refused(group, wrapper: type) -> None:
    model = wrapper(nn.Linear(3, 3))
    recorder = Recorder()
    before = trace_settings()
    with pytest.raises(
        BackendCompilerFailed, match=f"wrapped in {wrapper.__name__}(?s:.*)compile the plain model"
    ) as caught:
        torch.compile(model, backend=recorder)(torch.randn(4, 3))
    assert isinstance(caught.value.inner_exception, WrappedModelError)
    assert trace_settings() == before and not recorder.graphs
    torch.compile(model, backend="eager")(torch.randn(4, 3))  # other backends are none of our business


@pytest.mark.parametrize(("shared", "seen"), [({"num_processes": 1}, 1), ({"num_processes": 4}, 4)])
def test_another_number_of_processes_than_accelerate_sees_is_refused(
    shared: dict[str, int], seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(PartialState=SimpleNamespace(_shared_state=shared))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    with pytest.raises(LaunchError, match=rf"sees {seen} process\(es\), the job has 2 ranks(?s:.*)join_job"):
        refuse_other_count(2)
    refuse_other_count(seen)


def test_without_accelerate_or_before_it_starts_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace())
    refuse_other_count(2)
    state = SimpleNamespace(PartialState=SimpleNamespace(_shared_state={}))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    refuse_other_count(2)


@pytest.mark.parametrize("module", ["lightning.fabric.wrappers", "lightning.pytorch.trainer.trainer"])
def test_another_number_of_processes_than_lightning_sees_is_refused(module: str) -> None:
    of_lightning: dict[str, Any] = {"__name__": module, "refuse_other_count": refuse_other_count}
    exec("def call(self, number): refuse_other_count(number)", of_lightning)
    caller = type("Caller", (), {"call": of_lightning["call"]})()
    caller.strategy = SimpleNamespace(world_size=1)
    caller.call(1)
    with pytest.raises(
        LaunchError, match=r"Lightning sees 1 process\(es\), the job has 2 ranks(?s:.*)strategy="
    ):
        caller.call(2)
    caller.strategy = SimpleNamespace(world_size=2)
    caller.call(2)


def test_models_of_the_backend_are_compiled_beyond_dynamos_limits() -> None:
    recorder, calls = Recorder(), []
    watch(recorder)

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                calls.append(x)
            return x * 2

    compiled = torch.compile(Doubled(), backend=recorder, dynamic=False)
    before = trace_settings()
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=3):
        for length in (3, 4, 5, 6, 7):
            compiled(torch.randn(4, length))
            assert (
                torch._dynamo.config.recompile_limit,
                torch._dynamo.config.accumulated_recompile_limit,
            ) == (2, 3)
        compiled(torch.randn(6, 3))
    assert not calls and len(recorder.graphs) == 5 and trace_settings() == before
    # Others' models are none of its business.
    with torch._dynamo.config.patch(recompile_limit=1):
        other = torch.compile(
            lambda x: calls.append(x) or x if not torch.compiler.is_compiling() else x,
            backend="eager",
            dynamic=False,
        )
        for length in (3, 4):
            other(torch.randn(4, length))
    assert len(calls) == 1


class Unsupported(nn.Module):
    """A graph break from which Dynamo cannot go on within the call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            x = self.linear(x)
            torch._dynamo.graph_break()
            return x * 2


def test_a_model_that_dynamo_gives_up_is_refused() -> None:
    recorder = Recorder()
    watch(recorder)
    for _ in range(2):
        with pytest.raises(BackendCompilerFailed, match="(?s)GraphBreakError.*context manager") as caught:
            torch.compile(Unsupported(), backend=recorder)(torch.randn(4, 3))
        assert isinstance(caught.value.inner_exception, GraphBreakError) and Path(__file__).name in str(
            caught.value
        )
        torch._dynamo.reset()
        watch(recorder)
    assert not recorder.graphs


def test_recurrent_layers_that_dynamo_does_not_trace_have_a_cure() -> None:
    """Torch 2.15 traces them, so that the words of 2.13.0 and 2.14.1 stand here."""
    reason = """Attempted to wrap RNN, GRU, or LSTM
      Explanation: Dynamo does not support RNN, GRU, or LSTM."""
    text = str(graph_break_error(reason, "train.py:7 in forward"))
    assert "allow_rnn = True" in text and "train.py:7" in text


def test_what_an_older_torch_cannot_copy_has_a_cure() -> None:
    """Torch 2.13 traces it, so that Dynamo's own words (of 2.12.1) stand here."""
    reason = """Attempted to call function marked as skipped
      Explanation: Dynamo does not know how to trace the builtin `<unknown module>.T5Config.__reduce_ex__.` This function is a builtin."""
    text = str(graph_break_error(reason, "modeling_t5.py:688 in forward"))
    assert "torch 2.13" in text and "use_cache=False" in text and "modeling_t5.py:688" in text


def test_functions_around_models_may_be_given_up() -> None:
    recorder, model = Recorder(), nn.Linear(3, 3)
    watch(recorder)
    lock = threading.Lock()

    def step(x: Tensor) -> Tensor:
        with lock:
            torch._dynamo.graph_break()
            return x + 1

    torch.compile(step, backend=recorder)(torch.randn(4, 3))
    torch.compile(model, backend=recorder)(torch.randn(4, 3))
    assert len(recorder.graphs) == 1
