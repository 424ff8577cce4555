"""Row-wise part on slices, sums, and epilogue give what the model gives on the whole batch: values and
gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rannc_backend.passes.batch.batch_split import UserReplicated, UserRows, UserScalar
from rannc_backend.passes.batch.layouts import Constant, PartialSum, Rows
from rannc_backend.passes.pipeline import PassError
from tests.choice import mostly
from tests.models import ENTRIES
from tests.unit.passes.batch.batch_models import MODELS
from tests.unit.passes.batch.batch_tracing import Traced, trace
from tests.unit.passes.batch.slice_runner import (
    Faults,
    relative_error,
    run_in_slices,
    run_whole,
    split_traced,
    worst_error,
)

SIZES = (4, 4, 4, 2)
ROWS = sum(SIZES)
EXACT = 1e-12
#: Hugging Face's causal loss computes in float32
FLOAT32_LOSS = {"gpt2", "gpt2_masked", "llama"}


def traced_model(name: str) -> Traced:
    torch.manual_seed(0)
    model, inputs = MODELS[name](ROWS)
    return trace(
        model.double(),
        {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()},
    )


@pytest.mark.parametrize("name", mostly(MODELS, ["mlp", "conv_eval", "gpt2_masked"]))
def test_model_families_are_the_same_in_slices(name: str) -> None:
    graph = traced_model(name)
    split = split_traced(graph)
    assert split.linear
    tolerance = 1e-6 if name in FLOAT32_LOSS else EXACT
    for sizes in (SIZES, (1, 13)):
        assert worst_error(graph, split, sizes) <= tolerance
    assert worst_error(graph, split, SIZES, Faults(drop_slice=1)) > 1e-3


@pytest.mark.parametrize("name", mostly(["mlp", "gpt2", "t5"], ["mlp"]))
def test_mean_of_means_is_noticed(name: str) -> None:
    graph = traced_model(name)
    split = split_traced(graph)
    expected, _, weights = run_whole(graph)
    wrong, _ = run_in_slices(graph, split, SIZES, weights, Faults(mean_of_means=True))
    assert abs(wrong[0] - expected[0]) > 1e-6 * expected[0]


class Called(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.entry = ENTRIES[name]
        self.model = self.entry.model(0, torch.float64)

    def forward(self, **inputs: Tensor) -> Any:
        return self.entry.call(self.model, inputs)


# Masks are of the backend's own; that a spectral norm advances once per step is the executor's work, and
# there are no steps here.
NOT_IN_SLICES = {"dropout", "spectral_norm"}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, entry in ENTRIES.items()
        if not entry.batch_statistics and name not in NOT_IN_SLICES and entry.tolerance == EXACT
    ],
)
def test_models_of_the_suite_are_the_same_in_slices(name: str) -> None:
    entry = ENTRIES[name]
    batch = entry.batch(ROWS, 1, torch.float64)
    inputs = {key: value for key, value in batch.items() if key not in entry.outside}
    graph = trace(Called(name), inputs, replicated=tuple(entry.replicated))
    assert worst_error(graph, split_traced(graph), SIZES) <= EXACT


class Step(nn.Module):
    """A function of x [rows, 5], labels y [rows] in [0, 3) or -100, a mask m [rows] of 0 and 1, and a linear
    layer.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(5, 3)
        self.register_buffer("weights", torch.tensor([0.5, 2.0, 1.0]))

    def forward(self, x: Tensor, y: Tensor, m: Tensor) -> Any:
        given = dict(z=self.layer(x), x=x, y=y, m=m, w=self.layer.weight, weights=self.weights)
        return self.function(**{key: given[key] for key in inspect.signature(self.function).parameters})


def traced_step(function: Callable[..., Any]) -> Traced:
    torch.manual_seed(0)
    y = torch.randint(0, 3, (ROWS,))
    y[[0, 3, 4, 5, 13]] = -100
    return trace(
        Step(function).double(),
        dict(x=torch.randn(ROWS, 5).double(), y=y, m=(torch.arange(ROWS) % 3 != 0).double()),
    )


def one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y.clamp(min=0), 3).double()


def len_(x: Tensor) -> int:
    return x.size(0)


#: name -> (function, linear)
STEPS: dict[str, tuple[Callable[..., Any], bool]] = {
    "cross_entropy": (lambda z, y: F.cross_entropy(z, y), True),
    "cross_entropy_sum": (lambda z, y: F.cross_entropy(z, y, reduction="sum"), True),
    "cross_entropy_each": (lambda z, y: F.cross_entropy(z, y, reduction="none"), True),
    "cross_entropy_smoothed": (lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1), True),
    "cross_entropy_soft": (lambda z, y: F.cross_entropy(z, one_hot(y)), True),
    # the weights are a buffer of one stage, so their sum is no prologue sum
    "cross_entropy_weighted": (lambda z, y, weights: F.cross_entropy(z, y, weights), False),
    "nll_2d": (lambda z, y: F.nll_loss(z[:, :, None, None].log_softmax(1), y[:, None, None]), True),
    "cross_entropy_2d": (lambda z, y: F.cross_entropy(z[:, :, None].expand(-1, -1, 2), y[:, None].expand(-1, 2)), True),
    "mse": (lambda z, y: F.mse_loss(z, one_hot(y)), True),
    "mse_sum": (lambda z, y: F.mse_loss(z, one_hot(y), reduction="sum"), True),
    "mse_each": (lambda z, y: F.mse_loss(z, one_hot(y), reduction="none"), True),
    "l1": (lambda z, y: F.l1_loss(z, one_hot(y)), True),
    "smooth_l1": (lambda z, y: F.smooth_l1_loss(z, one_hot(y)), True),
    "huber": (lambda z, y: F.huber_loss(z, one_hot(y)), True),
    "bce": (lambda z, y: F.binary_cross_entropy(z.sigmoid(), one_hot(y)), True),
    "bce_logits": (lambda z, y: F.binary_cross_entropy_with_logits(z, one_hot(y), pos_weight=z.new_ones(3) * 2), True),
    "kl_div": (lambda z, y: F.kl_div(z.log_softmax(-1), one_hot(y), reduction="batchmean"), True),
    "soft_margin": (lambda z, y: F.soft_margin_loss(z, one_hot(y) * 2 - 1), True),
    "poisson": (lambda z, y: F.poisson_nll_loss(z, one_hot(y)), True),
    "cosine": (lambda z, y: F.cosine_embedding_loss(z, one_hot(y), z[:, 0].detach().sign()), True),
    "triplet": (lambda z, x: F.triplet_margin_loss(z, x[:, :3], x[:, 2:]), True),
    "mean_over_dims": (lambda z: z.view(-1, 3, 1).mean((0, 2)), True),
    "mean_of_other_layout": (lambda z: z.t().reshape(-1).exp().mean(), True),
    "several_losses": (lambda z, y: (F.cross_entropy(z, y) + 0.01 * z.pow(2).mean(), z.abs().sum() / 7, z.relu()), True),
    "masked_mean": (lambda z, m: (z.sum(-1) * m).sum() / m.sum().clamp(min=1), True),
    "mask_weights_on_rows": (lambda z, m: (z * (m / m.sum())[:, None], ((z * (m / m.mean())[:, None]) ** 2).sum()), True),
    "batch_size_as_number": (lambda z, x: (z / len_(x), z.sum() / len_(x), z * len_(x) ** 0.5, z.sum() / (len_(x) * 3 - 1)), True),
    "batch_size_tensor": (lambda z, x: z * torch.full((), x.shape[0], dtype=torch.float64) + torch.full((x.shape[0], 1), x.shape[0]), True),
    "weight_penalty": (lambda z, y, w: F.cross_entropy(z, y) + 1e-2 * (w**2).sum(), True),
    "penalty_alone": (lambda z, w: ((w**2).sum(), z), True),
    "weight_matrix_after_sum": (lambda z, w: (z.mean(0) @ w).sum(), False),
    "replicated": (lambda z, weights: (z, weights * 2, weights.sum() > 3), True),
    "constant_integers_after_sum": (lambda z, weights: z.sum() * weights.long().sum(), False),
    "variance": (lambda z: z.var(0).sum() + z.std(), False),
    "norm": (lambda z: z.norm() + z.norm(p=1) + torch.linalg.vector_norm(z, 3, dim=0).sum(), False),
    "square_of_mean": (lambda z: z.mean() ** 2, False),
    "ratio": (lambda z: z.exp().sum() / z.abs().sum(), False),
    "log_of_mean": (lambda z: z.exp().mean().log(), False),
    "covariance": (lambda z: (z.t() @ z / z.shape[0]).pow(2).sum(), False),
    "dot": (lambda z: torch.dot(z[:, 0], z[:, 1]), True),
    "vdot": (lambda z: torch.vdot(z[:, 0], z[:, 1]), True),
    "balance": (lambda z: (z.softmax(-1).mean(0) * F.one_hot(z.argmax(-1), 3).double().mean(0)).sum() * 3, False),
    "counts": (lambda z, y: (z.sum(), (y != -100).sum(), (y == -100).any(), (y > 5).all(), torch.count_nonzero(y)), True),
    "accuracy": (lambda z, y: (F.cross_entropy(z, y), (z.argmax(-1) == y).double().mean()), True),
    "average_of_rows_then_weights": (lambda z, x, w: (F.linear(x.mean(0), w).sum(), z), True),
    "same_output_twice": (lambda z: (z.sum(), z.sum(), z, z), True),
    "simclr_blocks": (lambda z: F.normalize(torch.cat([z, z * 2]), dim=-1).chunk(2)[0].sum(), True),
    "nansum": (lambda z: torch.nansum(torch.where(z > 0, z, float('nan')), 0).sum(), True),
    "empty_labels": (lambda z, y: F.cross_entropy(z, y * 0 - 100, reduction="sum"), True),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_reductions_are_the_same_in_slices(name: str) -> None:
    function, linear = STEPS[name]
    graph = traced_step(function)
    split = split_traced(graph)
    for sizes in (SIZES, (1, 13), (ROWS,)):
        assert worst_error(graph, split, sizes) <= EXACT, sizes
    assert split.linear == linear


def test_variance_far_from_zero_keeps_float32_digits() -> None:
    graph = traced_step(lambda z: (z + 100).float().var(0))
    (expected,), _, weights = run_whole(graph)
    (actual,), _ = run_in_slices(graph, split_traced(graph), SIZES, weights)
    assert relative_error(actual, expected) <= 1e-6


def test_counts_of_labels_are_prologue_sums() -> None:
    split = split_traced(traced_step(STEPS["cross_entropy"][0]))
    assert split.prologue is not None and len(split.prologue_sums) == 1
    (label_input,) = [node.name for node in split.prologue.graph.nodes if node.op == "placeholder"]
    assert isinstance(split.layouts[label_input], Rows)
    (count,) = split.prologue.graph.output_node().args[0]
    assert count.meta["val"].dtype == torch.int64


def test_batch_size_as_number_comes_from_the_global_batch() -> None:
    graph = traced_step(STEPS["batch_size_as_number"][0])
    split = split_traced(graph)
    names = [node.name for node in split.rowwise.graph.nodes if node.op == "placeholder"]
    assert names == [*graph.values, "global_rows"]
    assert split.layouts["global_rows"] == Constant()


def test_shapes_do_not_ask_for_the_global_batch() -> None:
    split = split_traced(traced_step(lambda z, x: z.view(x.shape[0], 3, 1) + z.new_zeros(x.shape[0], 1, 1)))
    assert not any(node.name == "global_rows" for node in split.rowwise.graph.nodes)


def test_split_keeps_names_and_describes_every_value() -> None:
    graph = traced_step(STEPS["weight_penalty"][0])
    split = split_traced(graph)
    nodes = [node for node in split.rowwise.graph.nodes if node.op != "output"]
    assert {node.name for node in nodes} == set(split.layouts)
    names = [node.name for node in split.rowwise.graph.output_node().args[0]]
    assert names == [item.name for item in split.outputs]
    partials = [item.name for item in split.outputs if item.kind == "partial"]
    assert len(partials) == 2 and all(isinstance(split.layouts[name], PartialSum) for name in partials)
    before = [node.name for node in graph.graph_module.graph.nodes]
    split_traced(graph)
    assert [node.name for node in graph.graph_module.graph.nodes] == before, "the given graph is not changed"


def test_half_precision_sums_are_taken_in_float32() -> None:
    torch.manual_seed(0)
    graph = trace(Step(lambda z: (z.mean(), z.sum(0))).to(torch.bfloat16), _half_inputs())
    split = split_traced(graph)
    for node in split.rowwise.graph.output_node().args[0]:
        assert node.meta["val"].dtype == torch.float32
    assert worst_error(graph, split, SIZES) <= 2e-2
    assert [node.meta["val"].dtype for node in split.epilogue.graph.output_node().args[0]] == [
        torch.bfloat16
    ] * 2


def _half_inputs() -> dict[str, Tensor]:
    return dict(
        x=torch.randn(ROWS, 5, dtype=torch.bfloat16),
        y=torch.zeros(ROWS, dtype=torch.long),
        m=torch.ones(ROWS),
    )


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "centred_by_parameters": (lambda z: (z - z.mean(0)) ** 2, r"aten\.sub .*mixes rows"),
    "normalised_loss": (lambda z: z / z.abs().sum(), r"aten\.div .*mixes rows"),
    "batch_softmax_of_sums": (lambda z: z * z.sum(0).softmax(0), r"aten\.mul .*mixes rows"),
    "second_sum_of_inputs": (lambda z, x: z + ((x - x.mean(0)) ** 2).sum(0).sum(), r"aten\.add .*mixes rows"),
    "row_numbers_returned": (lambda z, x: (z, torch.arange(x.shape[0])), "numbers of rows"),
    "maximum": (lambda z: z.max(), r"aten\.max"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_slice_can_give_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(PassError, match=message):
        split_traced(traced_step(function))


class Tracker(nn.Module):
    def __init__(self, *, of_rows: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(5))
        self.of_rows = of_rows

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.mean(0) if self.of_rows else 1)
        return x * self.seen.sum() if not self.of_rows else x * 2


def test_buffers_may_count_steps_but_not_follow_rows() -> None:
    counted = split_traced(trace(Tracker(of_rows=False), dict(x=torch.randn(ROWS, 5))))
    assert [item.kind for item in counted.outputs] == ["rows", "buffer"]
    with pytest.raises(PassError, match="buffer .* is set from rows of the batch"):
        split_traced(trace(Tracker(of_rows=True), dict(x=torch.randn(ROWS, 5))))


def test_batch_norm_in_training_is_row_wise_by_its_stated_rule() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    graph = trace(model, dict(input=torch.randn(ROWS, 2, 5, 5)))
    split = split_traced(graph)
    assert [item.kind for item in split.outputs] == ["rows", "buffer", "buffer", "buffer"]
    assert {item.fqn for item in split.outputs if item.kind == "buffer"} == set(graph.buffer_updates)


def test_frozen_parameters_alone_are_replicated() -> None:
    graph = traced_step(STEPS["penalty_alone"][0])
    assert [type(item) for item in split_traced(graph).user_outputs] == [UserScalar, UserRows]
    assert [type(item) for item in split_traced(graph, frozen=graph.parameters).user_outputs] == [
        UserReplicated,
        UserRows,
    ]


@pytest.mark.parametrize("name", [name for name, (_, linear) in STEPS.items() if not linear])
def test_a_loss_that_is_not_linear_stays_so_where_every_input_is_trained(name: str) -> None:
    """An eager backward of such a loss would have another gradient, without a word."""
    graph = traced_step(STEPS[name][0])
    trained = [batch for batch in graph.batch if graph.values[batch].is_floating_point()]
    assert not split_traced(graph, gradient_batch=trained).linear
