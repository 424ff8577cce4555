"""Cross entropy with class probabilities: as torch computes it, and with any batch size under each torch
(seen on 2.11, 2.12 and 2.13).
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from rannc_backend.capture.soft_labels import cross_entropy, trace_soft_labels
from rannc_backend.settings.torch_version import is_older

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
