"""Inductor's part in a job's start and speed: a second process compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "RANNC_CLUSTER": "generic-cpu",
    }
    results = []
    for _ in range(2):
        process = subprocess.run(
            [sys.executable, "-c", TRAIN], capture_output=True, text=True, timeout=400, env=environment
        )
        assert process.returncode == 0, process.stderr[-3000:]
        results.append(json.loads(process.stdout.splitlines()[-1]))
    (first, gradients), (second, again) = results
    assert first.get("fxgraph_cache_miss", 0) > 0 and not first.get("fxgraph_cache_hit")
    assert second == {"fxgraph_cache_hit": first["fxgraph_cache_miss"]}, (
        "every graph was found, none was compiled"
    )
    assert gradients == again
