"""Cross entropy with class probabilities, and bags: as torch computes them, and with any batch size (the first seen on
torch 2.11, 2.12 and 2.13).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from rannc_backend.capture.written_out import (
    BagsAsRows,
    bags,
    cross_entropy,
    multilabel_margin_loss,
    trace_margin_loss,
    trace_soft_labels,
)
from rannc_backend.errors import UnsupportedModelError
from rannc_backend.settings.torch_version import is_older
from tests.default_dtype import float64

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
OPERATOR = torch.ops.aten.cross_entropy_loss.default
OLD = is_older(torch.__version__, (2, 13))


@pytest.mark.parametrize(
    ("shape", "reduction"), list(itertools.product([(5,), (4, 5), (4, 5, 3), (2, 5, 3, 2)], REDUCTIONS))
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_as_torch_computes_it(
    shape: tuple[int, ...], reduction: str, smoothing: float, weighted: bool
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    again = logits.detach().clone().requires_grad_()
    target = torch.rand(shape, dtype=torch.float64)
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    expected = F.cross_entropy(logits, target, weight, reduction=reduction, label_smoothing=smoothing)
    found = cross_entropy(again, target, weight, REDUCTIONS[reduction], -100, smoothing)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    expected.sum().backward()
    found.sum().backward()
    torch.testing.assert_close(again.grad, logits.grad, rtol=1e-12, atol=1e-15)


def test_other_labels_are_left_to_torch() -> None:
    logits, target = torch.randn(4, 5), torch.tensor([0, 4, -100, 2])
    assert torch.equal(cross_entropy(logits, target), F.cross_entropy(logits, target))
    for wrong in (torch.zeros(4, 5, dtype=torch.int64), torch.rand(4, 6)):
        with pytest.raises((RuntimeError, ValueError)) as own:
            cross_entropy(logits, wrong)
        with pytest.raises((RuntimeError, ValueError)) as theirs:
            F.cross_entropy(logits, wrong)
        assert str(own.value).splitlines()[0] == str(theirs.value).splitlines()[0]


def test_the_batch_size_stays_a_symbol() -> None:
    trace_soft_labels()
    trace_soft_labels()
    assert (DispatchKey.CompositeImplicitAutograd in OPERATOR.py_kernels) == OLD
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes, static_shapes=False), enable_python_dispatcher():
        size = shapes.create_unbacked_symint()
        torch._check(size >= 2)
        F.cross_entropy(torch.empty(size, 5), torch.empty(size, 5))


IDS = torch.tensor([[1, 4, 4, 0], [2, 2, 2, 2], [5, 2, 3, 1], [2, 4, 2, 2]])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding", [None, 2, -4])
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
def test_bags_are_as_torch_computes_them(mode: str, padding: int | None, sparse: bool) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(6, 3, dtype=torch.float64).requires_grad_()]
    weights.append(weights[0].detach().clone().requires_grad_())
    factors = torch.rand(IDS.shape, dtype=torch.float64) if mode == "weighted" else None
    options = {
        "mode": "sum" if mode == "weighted" else mode,
        "padding_idx": padding,
        "sparse": sparse,
        "per_sample_weights": factors,
    }
    expected = F.embedding_bag(IDS, weights[0], **options)
    found = bags(IDS, weights[1], **options)
    assert found is not None and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)
    for result in (expected, found):
        result.square().sum().backward()
    grads = [weight.grad for weight in weights]
    assert (
        grads[0] is not None and grads[1] is not None and grads[0].is_sparse == grads[1].is_sparse == sparse
    )
    torch.testing.assert_close(grads[1].to_dense(), grads[0].to_dense(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    "left",
    [
        {"mode": "max"},
        {"scale_grad_by_freq": True},
        {"max_norm": 1.0},
        {"per_sample_weights": torch.ones(4, 4), "mode": "mean"},
        {"per_sample_weights": torch.ones(4, 3), "mode": "sum"},
    ],
)
def test_other_bags_are_left_to_torch(left: dict[str, object]) -> None:
    weight = torch.randn(6, 3)
    assert bags(IDS, weight, **left) is None  # type: ignore[arg-type]
    assert bags(IDS.flatten(), weight, torch.tensor([0, 4])) is None
    assert bags(IDS[:, :0], weight) is None


def test_bags_are_written_out_while_a_trace_runs() -> None:
    weight = torch.randn(6, 3)
    with BagsAsRows():
        inside = F.embedding_bag(IDS, weight, mode="max")
        assert torch.equal(F.embedding_bag(IDS, weight, mode="sum"), F.embedding(IDS, weight).sum(1))
    assert torch.equal(inside, F.embedding_bag(IDS, weight, mode="max"))


LABELS = torch.tensor([[0, -1, 0, 0], [1, 2, -1, 3], [3, -1, 1, 1], [0, 1, 2, 3], [-1, 2, 2, 1]])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", [slice(None), 1])
def test_margin_loss_as_torch_computes_it(reduction: str, rows: slice | int) -> None:
    torch.manual_seed(0)
    scores = torch.randn(5, 4, dtype=torch.float64)[rows].requires_grad_()
    again = scores.detach().clone().requires_grad_()
    expected, are_targets = torch.ops.aten.multilabel_margin_loss_forward(
        scores, LABELS[rows], REDUCTIONS[reduction]
    )
    found, are_found = multilabel_margin_loss(again, LABELS[rows], REDUCTIONS[reduction])
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    assert torch.equal(are_found, are_targets)
    (gradient,), (own,) = torch.autograd.grad(expected.sum(), scores), torch.autograd.grad(found.sum(), again)
    torch.testing.assert_close(own, gradient, rtol=1e-13, atol=0)


def test_traces_have_the_margin_loss() -> None:
    trace_margin_loss()
    trace_margin_loss()
    scores = torch.randn(5, 4, dtype=torch.float64)
    with enable_python_dispatcher():
        traced = make_fx(lambda *values: F.multilabel_margin_loss(*values), tracing_mode="symbolic")(
            scores, LABELS
        )
    expected = F.multilabel_margin_loss(scores, LABELS)
    torch.testing.assert_close(traced(scores, LABELS), expected, rtol=1e-13, atol=0)


def test_scores_without_dimensions_are_torchs_error() -> None:
    score = torch.tensor(1.5)
    with pytest.raises(IndexError) as expected:
        F.cross_entropy(score, score)
    with pytest.raises(IndexError) as found:
        cross_entropy(score, score)
    assert str(found.value) == str(expected.value)


class _Writes(nn.Module):
    """Writes into a product with a gradient, of sizes that are numbers or the batch size."""

    def __init__(self, write: Callable[[Tensor, Tensor], object], *, of_rows: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(3, 4)
        self.write, self.of_rows = write, of_rows

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x)
        product = rows @ rows.t() if self.of_rows else self.last.weight @ self.last.weight.t()
        self.write(product, self.last.bias)
        return rows.pow(2).mean() + product.pow(2).mean() + product.mean()


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "diagonal": lambda product, values: product.fill_diagonal_(0),
    "filled": lambda product, values: product.as_strided((4,), (5,)).fill_(0.5),
    "multiplied": lambda product, values: product.as_strided((2, 3), (8, 1), 1).mul_(2.0),
    "copied": lambda product, values: product.as_strided((2, 2), (4, 2)).copy_(values.view(2, 2)),
}


def _gradients(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    call(x).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("write", "of_rows", "capture"),
    [
        *((name, False, capture) for name in WRITES for capture in ("dynamo", "nonstrict")),
        ("diagonal", True, "nonstrict"),
    ],
)
def test_what_is_overwritten_has_no_gradient(write: str, of_rows: bool, capture: str) -> None:
    """torch's own derivative of `as_strided_scatter` gives it one."""
    with float64():
        model = _Writes(WRITES[write], of_rows=of_rows)
        x = torch.randn(5, 6)
        options = {"stage_compiler": "eager", "capture": capture}
        torch._dynamo.reset()
        found = _gradients(model, torch.compile(model, backend="rannc", options=options), x)
        alone = copy.deepcopy(model)
        for mine, theirs in zip(found, _gradients(alone, alone, x), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_writes_by_strides_into_rows_are_refused() -> None:
    class Strided(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rows = super().forward(x)
            rows.as_strided((rows.shape[0],), (4,)).mul_(2.0)
            return rows.pow(2).mean()

    compiled = torch.compile(Strided(6, 4), backend="rannc", options={"stage_compiler": "eager"})
    with pytest.raises(UnsupportedModelError, match="wrong gradients for aten.as_strided_scatter") as found:
        compiled(torch.randn(5, 6))
    assert "test_written_out.py" in found.value.location


class _Transformed(nn.Module):
    """Derivatives of a network, as torch.func has them (tutorials/jacobians_hessians): at each sample, or of all of them
    where gradients are switched off.
    """

    def __init__(self, transform: Callable[..., Callable[[Tensor], Tensor]], num_outputs: int) -> None:
        super().__init__()
        self.transform = transform
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        net = self.net if self.net[2].out_features > 1 else (lambda row: self.net(row).squeeze(-1))
        derivatives = torch.func.vmap(self.transform(net))(x)
        with torch.no_grad():
            slopes = torch.func.grad(lambda rows: self.net(rows).sum())(x)
        return (slopes * x).mean() + derivatives.pow(2).flatten(1).sum(1).mean() + self.net(x).mean()


def _stopped(net: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def derivative(row: Tensor) -> Tensor:
        with torch.no_grad():
            slope = torch.func.jacrev(net)(row)
        return slope @ row + net(row)

    return derivative


def _stopped_within(net: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def stopped(row: Tensor) -> Tensor:
        with torch.no_grad():
            scale = net(row).abs().sum()
        return (row * scale).sin().sum() + net(row).sum()

    return torch.func.grad(stopped)


TRANSFORMS: dict[str, tuple[Callable[..., Callable[[Tensor], Tensor]], int]] = {
    "grad": (torch.func.grad, 1),
    "jacrev": (torch.func.jacrev, 3),
    "jacfwd": (torch.func.jacfwd, 3),
    "hessian": (torch.func.hessian, 1),
    "jacrev of jacrev": (lambda net: torch.func.jacrev(torch.func.jacrev(net)), 3),
    "without gradient": (_stopped, 3),
    "without gradient within": (_stopped_within, 3),
    "divergence": (lambda net: lambda row: torch.func.jacrev(net)(row).diagonal().sum()[None], 6),
}


@pytest.mark.parametrize("capture", ["auto", "nonstrict"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_are_differentiated(transform: str, capture: str) -> None:
    with float64():
        model = _Transformed(*TRANSFORMS[transform])
        x = torch.randn(4, 6)
        torch._dynamo.reset()
        options = {"stage_compiler": "eager", "capture": capture}
        found = _gradients(model, torch.compile(model, backend="rannc", options=options), x)
        alone = copy.deepcopy(model)
        for mine, theirs in zip(found, _gradients(alone, alone, x), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
