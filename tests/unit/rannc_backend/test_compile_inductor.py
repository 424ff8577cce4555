"""Inductor's part in a job's start and speed: a second process compiles nothing, and recorded stages compute what plain ones do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rannc_backend.compile_cuda_graphs import GraphRecorder, recording
from tests.unit.rannc_backend.test_cuda_graphs import PlayedGraphs
from tests.unit.stage_models import capture, relative_error, run_pipeline

TRAIN = """
import json, torch
from torch import nn
from torch._dynamo.utils import counters
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 8))
call = torch.compile(model, backend="rannc", options={"stage_compiler": "inductor", "report_steps": 0})
call(torch.randn(6, 8)).square().mean().backward()
found = {name: count for name, count in counters["inductor"].items() if name.startswith("fxgraph_cache")}
print(json.dumps([found, [parameter.grad.double().sum().item() for parameter in model.parameters()]]))
"""


@pytest.mark.full
def test_a_second_process_finds_what_the_first_one_compiled(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "RANNC_CLUSTER": "generic-cpu"}
    results = []
    for _ in range(2):
        process = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, timeout=400, env=environment)
        assert process.returncode == 0, process.stderr[-3000:]
        results.append(json.loads(process.stdout.splitlines()[-1]))
    (first, gradients), (second, again) = results
    assert first.get("fxgraph_cache_miss", 0) > 0 and not first.get("fxgraph_cache_hit")
    assert second == {"fxgraph_cache_hit": first["fxgraph_cache_miss"]}, "every graph was found, none was compiled"
    assert gradients == again


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.leave = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.norm(torch.tanh(self.enter(x)))) + x


def _function(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    result = model(x)
    return result, (result * result).sum()


@pytest.mark.full
def test_recorded_stages_equal_the_uncut_model() -> None:
    """Several micro-batches in flight, two sizes, parameters that change in between."""
    torch.manual_seed(0)
    model = _Small().double()
    rowwise = capture(model, _function, [torch.randn(6, 6, dtype=torch.float64)], ["rows", "partial"])
    layer = PlayedGraphs()
    with recording(GraphRecorder(mode="on", layer=layer)):
        stages = rowwise.compile(rowwise.cut(2), "inductor")
    rows_name, partial_name = (output.name for output in rowwise.outputs)
    seed = torch.tensor(0.5, dtype=torch.float64)
    sizes = (3, 3, 2)
    for _ in range(4):
        x, grad = torch.randn(sum(sizes), 6, dtype=torch.float64), torch.randn(sum(sizes), 6, dtype=torch.float64)
        actual = run_pipeline(rowwise, stages, [x], sizes, {rows_name: grad}, {partial_name: seed})
        leaf = x.clone().requires_grad_()
        result, partial = _function(model, leaf)
        ((result * grad).sum() + 0.5 * partial).backward()
        assert relative_error(actual.rows[rows_name], result.detach()) <= 1e-12
        assert relative_error(actual.input_gradients[rowwise.batch_names[0]], leaf.grad) <= 1e-12
        for name, gradient in actual.parameter_gradients.items():
            assert relative_error(gradient, rowwise.parameters[name].grad) <= 1e-12
        del actual
        model.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
    assert layer.num_captures > 0 and layer.num_replays > layer.num_captures
