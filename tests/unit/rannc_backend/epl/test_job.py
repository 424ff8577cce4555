"""`epl.init` and what stands beside it, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rannc_backend import epl
from rannc_backend.backend import REGISTRY
from rannc_backend.errors import OptionValueError, UserInputError
from rannc_backend.runtime.job import bootstrap
from rannc_backend.settings.options import Config as Options


@pytest.fixture(autouse=True)
def _without_defaults() -> Iterator[None]:
    REGISTRY.defaults = None
    torch._dynamo.reset()
    yield
    REGISTRY.defaults = None


def _model() -> nn.Module:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).pow(2).mean()

    return Small()


def _options(model: nn.Module, compiled: Any, rows: int = 8) -> Options:
    compiled(torch.ones(rows, 4)).backward()
    session = REGISTRY.of(model)
    assert session is not None
    return session.config


def test_models_that_are_compiled_later_have_the_options() -> None:
    before, after, last = _model(), _model(), _model()
    early = torch.compile(before, backend="rannc")
    config = epl.init(epl.Config({"pipeline.num_micro_batch": 4}))
    assert config.options() == {"pipeline_num": 4}
    late = torch.compile(after, backend="rannc")
    assert _options(after, late).pipeline_num == 4
    assert _options(before, early).pipeline_num == 0
    epl.init()
    assert _options(last, torch.compile(last, backend="rannc")).pipeline_num == 0
    # Compiled once more, for another mode, under the options that it had.
    with torch.no_grad():
        late(torch.ones(8, 4))
    assert REGISTRY.of(after).config.pipeline_num == 4  # type: ignore[union-attr]


def test_options_of_torch_compile_count_over_it() -> None:
    epl.init(epl.Config({"pipeline.num_micro_batch": 4, "amp.debug_log": True}))
    model, other, third = _model(), _model(), _model()
    compiled = torch.compile(model, backend="rannc", options={"pipeline_num": 2})
    config = _options(model, compiled)
    assert (config.pipeline_num, config.log_casts) == (2, True)
    compiled = torch.compile(other, backend="rannc", options=epl.Config({"pipeline.num_micro_batch": 1}))  # type: ignore[arg-type]
    assert _options(other, compiled).pipeline_num == 1
    third.compile(backend="rannc")
    assert _options(third, third).pipeline_num == 4


def test_a_configuration_is_options_by_itself() -> None:
    model = _model()
    compiled = torch.compile(model, backend="rannc", options=epl.Config({"zero.level": "v1"}))  # type: ignore[arg-type]
    assert _options(model, compiled).zero_stage == "2"


def test_the_environment_is_read_by_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPL_PIPELINE_NUM_MICRO_BATCH", "2")
    assert epl.init()["pipeline.num_micro_batch"] == 2
    model = _model()
    assert _options(model, torch.compile(model, backend="rannc")).pipeline_num == 2


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"epl\.Config"):
        epl.init({"pipeline.num_micro_batch": 4})  # type: ignore[arg-type]
    compiled = torch.compile(_model(), backend="rannc", options=[1])  # type: ignore[arg-type]
    with pytest.raises(OptionValueError, match="a dict"):
        compiled(torch.ones(2, 4))


def test_devices_are_set_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr("rannc_backend.runtime.job.bootstrap.os.environ", dict(os.environ))
    epl.init(epl.Config({"cluster.run_visible_devices": "1,3"}))
    assert bootstrap.os.environ["CUDA_VISIBLE_DEVICES"] == "1,3"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    epl.init(epl.Config({"cluster.run_visible_devices": "1,3"}))
    with pytest.raises(OptionValueError, match="before the first use of a GPU"):
        epl.init(epl.Config({"cluster.run_visible_devices": "2"}))
    assert bootstrap.os.environ["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_scalers() -> None:
    assert not epl.scaler().is_enabled()
    epl.init(epl.Config({"amp.level": "O1"}))
    dynamic = epl.scaler()
    assert dynamic.is_enabled() and dynamic.get_scale() == 2.0**15
    assert (dynamic.get_growth_interval(), dynamic.get_growth_factor(), dynamic.get_backoff_factor()) == (
        2000,
        2,
        0.5,
    )
    fixed = epl.scaler(epl.Config({"amp.level": "O1", "amp.loss_scale": 64}))
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 1.0)
    for gradient, expected in ((64.0, 0.0), (float("inf"), 0.0)):
        parameter.grad = torch.full((2,), gradient)
        fixed.scale(torch.ones(1))
        fixed.step(optimizer)
        fixed.update()
        assert fixed.get_scale() == 64.0 and parameter.tolist() == [expected] * 2


def test_autocast_is_the_option_unless_the_script_has_its_own() -> None:
    model, seen = _model(), []
    compiled = torch.compile(model, backend="rannc", options={"autocast": "bfloat16"})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(torch.ones(8, 4))
    assert torch.equal(compiled(torch.ones(8, 4)), expected)
    assert not torch.equal(model(torch.ones(8, 4)), expected)
    with torch.autocast("cpu", dtype=torch.float16):
        own = model(torch.ones(8, 4))
        seen.append(compiled(torch.ones(8, 4)))
    assert torch.allclose(seen[0], own, rtol=1e-3) and not torch.equal(own, expected)
    assert not torch.is_autocast_enabled("cpu")


def test_files_by_the_items() -> None:
    files = ["a", "b", "c"]
    assert epl.slice_files(files) == files
    config = epl.Config({"io.slicing": True})
    assert epl.slice_files(files, config) == files
