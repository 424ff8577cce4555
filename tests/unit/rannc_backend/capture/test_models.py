"""The captured ATen graph computes what the model computes: outputs, every gradient and buffers, in
float64.
"""

from __future__ import annotations

import copy

import pytest
import torch

from tests.choice import mostly
from tests.unit.rannc_backend.capture.capture_harness import (
    Recorder,
    fresh_dynamo,
    relative_error,
    scalar_of,
    tensors_of,
)
from tests.unit.rannc_backend.capture.capture_models import MODELS, TOLERANCE, build


@pytest.fixture(autouse=True)
def dynamo():
    with fresh_dynamo(begins=True):
        yield


@pytest.mark.parametrize(
    ("name", "training"),
    # Those of Hugging Face that are left to the full tests train over ranks in
    # tests/distributed/test_equality.py.
    mostly(
        [(name, True) for name in MODELS]
        + [(name, False) for name in ("conv", "hf_gpt2", "hf_gpt2_mask", "hf_resnet")],
        [(name, True) for name in MODELS if not name.startswith("hf_")]
        + [("hf_gpt2_mask", True), ("hf_t5", True), ("conv", False)],
    ),
)
def test_outputs_and_gradients_equal_the_models(name, training):
    model, inputs = build(name, rows=4)
    model.train(training)
    reference = copy.deepcopy(model)
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder)
    tolerance = TOLERANCE.get(name, 1e-12)
    for _ in range(2):  # the second step sees the buffers that the first one left
        expected, actual = reference(**inputs), compiled(**inputs)
        pairs = list(zip(tensors_of(actual), tensors_of(expected), strict=True))
        assert pairs
        for mine, theirs in pairs:
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            assert relative_error(mine, theirs) <= tolerance
        loss = scalar_of(expected)
        if loss is not None:
            loss.backward()
            scalar_of(actual).backward()
        recorder.by_arguments = True
    # Some Hugging Face models write to their config in the first call, so that Dynamo traces the second one
    # again.
    assert len({graph.fingerprint for graph in recorder.graphs}) == 1
    assert all(graph.root_module is model for graph in recorder.graphs)
    for (fqn, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), fqn
        if theirs.grad is not None:
            assert relative_error(mine.grad, theirs.grad) <= tolerance, fqn
    for (fqn, mine), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=fqn)


@pytest.mark.parametrize(
    "name",
    mostly(["conv", "hf_llama", "hf_gpt2_mask", "rannc_function"], ["conv", "hf_llama", "rannc_function"]),
)
def test_one_graph_serves_every_batch_size(name):
    """From 16 rows convolutions prefer another memory layout; sizes 0 and 1 are special to torch, and 1 to
    models.
    """
    model, _ = build(name, rows=2)
    reference = copy.deepcopy(model)
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder)
    for rows in (4, 6, 1, 3, 17):
        _, inputs = build(name, rows=rows, seed=rows)
        for mine, theirs in zip(tensors_of(compiled(**inputs)), tensors_of(reference(**inputs)), strict=True):
            assert relative_error(mine, theirs) <= TOLERANCE.get(name, 1e-12)
    assert len(recorder.graphs) == recorder.num_calls == 1


@pytest.mark.parametrize(
    "name", mostly(["mlp", "conv", "hf_gpt2", "hf_gpt2_mask", "rannc_basic"], ["mlp", "conv", "rannc_basic"])
)
def test_a_first_batch_of_one_gives_the_same_graph(name):
    fingerprints = set()
    for rows in (1, 5, 9):  # 9 is the sequence length of the inputs
        torch._dynamo.reset()
        model, inputs = build(name, rows=rows)
        reference = copy.deepcopy(model)
        recorder = Recorder()
        compiled = torch.compile(model, backend=recorder)
        for other in (rows, 3):
            _, inputs = build(name, rows=other)
            for mine, theirs in zip(
                tensors_of(compiled(**inputs)), tensors_of(reference(**inputs)), strict=True
            ):
                assert relative_error(mine, theirs) <= TOLERANCE.get(name, 1e-12)
        fingerprints.add(recorder.graph.fingerprint)
        assert recorder.num_calls == (2 if rows == 1 else 1)
        assert {item.kind for item in recorder.graph.inputs if item.name.startswith("x_")} == {"batch"}
    assert len(fingerprints) == 1


def test_evaluation_without_gradients_and_a_first_batch_of_one():
    fingerprints = set()
    for sizes in ((4, 1), (1, 4)):
        torch._dynamo.reset()
        model, _ = build("hf_gpt2_mask", rows=2)
        recorder = Recorder()
        compiled = torch.compile(model.eval(), backend=recorder)
        with torch.no_grad():
            for rows in sizes:
                _, inputs = build("hf_gpt2_mask", rows=rows)
                for mine, theirs in zip(
                    tensors_of(compiled(**inputs)), tensors_of(model(**inputs)), strict=True
                ):
                    assert relative_error(mine, theirs) <= 1e-6
        fingerprints.add(recorder.graph.fingerprint)
    assert len(fingerprints) == 1
