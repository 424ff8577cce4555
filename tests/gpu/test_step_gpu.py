"""One process on a GPU: plain torch's numbers, no host wait in a step, nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rannc_backend import materialize_by_stage
from tests.gpu.small_gpt import OPTIONS, make_model, make_tokens, train, worst_difference

DEVICE = "cuda"


@contextmanager
def no_host_wait() -> Iterator[None]:
    """Within it, an operation that makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compiled(model: torch.nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="rannc", options=OPTIONS | options)


@pytest.mark.parametrize("stage_compiler", ["eager", "inductor"])
@pytest.mark.parametrize("schedule", ["auto", "fill_drain"])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_equals_plain_torch(stage_compiler: str, schedule: str, factor: float) -> None:
    """Also where the loss's gradient is not 1, and so not the seed of the first step."""
    batches = [make_tokens(DEVICE, step) for step in range(4)]
    model, plain = make_model(DEVICE, torch.float64), make_model(DEVICE, torch.float64)
    call = compiled(model, stage_compiler=stage_compiler, schedule=schedule, pipeline_num=3)
    losses = train(model, call, batches, factor=factor)
    expected = train(plain, plain, batches, factor=factor)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert worst_difference(model, plain) < 1e-8


@pytest.mark.parametrize("stage_compiler", ["eager", "inductor"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_a_step_never_waits_for_the_device(stage_compiler: str, precision: str) -> None:
    model = make_model(DEVICE, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    call = compiled(model, stage_compiler=stage_compiler, pipeline_num=2)
    tokens = make_tokens(DEVICE)

    def step() -> torch.Tensor:
        model.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=precision == "autocast"):
            loss = call(tokens)
        loss.backward()
        return loss

    for _ in range(3):
        step()
    with no_host_wait():
        for _ in range(3):
            loss = step()
    assert torch.isfinite(loss)


def test_the_check_of_host_waits_finds_one() -> None:
    value = torch.ones((), device=DEVICE)
    with no_host_wait(), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_bfloat16_is_as_good_as_plain_compile(precision: str) -> None:
    """No farther from float64 than torch.compile is, with room for another order of sums."""
    batches = [make_tokens(DEVICE, step) for step in range(4)]
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    exact = make_model(DEVICE, torch.float64)
    expected = train(exact, exact, batches)

    def losses_of(backend: dict[str, Any]) -> list[float]:
        torch._dynamo.reset()
        model = make_model(DEVICE, dtype)
        call = torch.compile(model, **backend)

        def run(tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=precision == "autocast"):
                return call(tokens)

        return train(model, run, batches)

    ours = losses_of({"backend": "rannc", "options": OPTIONS | {"pipeline_num": 2}})
    plain = losses_of({})
    error = max(abs(a - b) for a, b in zip(ours, expected, strict=True))
    plain_error = max(abs(a - b) for a, b in zip(plain, expected, strict=True))
    assert error <= 2 * plain_error + 0.02, (ours, plain, expected)


def test_memory_is_given_back() -> None:
    def run() -> int:
        model = make_model(DEVICE, torch.float32)
        train(
            model,
            compiled(model, stage_compiler="eager", pipeline_num=2),
            [make_tokens(DEVICE, step) for step in range(3)],
        )
        return torch.cuda.memory_allocated()

    before = torch.cuda.memory_allocated()
    during = run()
    torch._dynamo.reset()
    gc.collect()
    after = torch.cuda.memory_allocated()
    assert during > before and after - before < 0.1 * (during - before), (before, during, after)


def test_a_model_on_the_cpu_comes_to_the_device() -> None:
    model, plain = make_model("cpu", torch.float64), make_model("cpu", torch.float64)
    materialize_by_stage(model)
    batches = [make_tokens("cpu", step) for step in range(2)]
    losses = train(model, compiled(model, stage_compiler="eager"), [batch.to(DEVICE) for batch in batches])
    assert next(model.parameters()).is_cuda
    assert losses == pytest.approx(train(plain, plain, batches), rel=1e-9)
