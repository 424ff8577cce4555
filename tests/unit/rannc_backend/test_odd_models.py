"""Models of `tests.odd_models` train exactly in one process; over two stages: tests/distributed/test_odd_models.py."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.odd_models import MODELS, batch, worst_error


@pytest.mark.parametrize("name", MODELS)
def test_one_process(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]().double()
    alone = copy.deepcopy(model)
    # Batch normalisation is exact with one micro-batch.
    num_micro_batches = 1 if name == "transposed_norm" else 2
    options = {"stage_compiler": "eager", "pipeline_num": num_micro_batches}
    loss = torch.compile(model, backend="rannc", options=options)(batch(4))
    loss.backward()
    expected = alone(batch(4))
    expected.backward()
    assert abs(float(loss - expected)) <= 1e-12 * abs(float(expected))
    assert worst_error(model, alone) <= 1e-12
