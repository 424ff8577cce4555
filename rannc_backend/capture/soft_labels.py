"""Cross entropy with class probabilities as labels, for traces with a symbolic batch size under torch 2.11
and 2.12.

In: the version of torch. Out: what traces use in place of torch's own code, which in those versions takes the
batch size as a number, so that a graph would hold for one batch size only; torch 2.13 takes it as a symbol.

Private to torch here: the kernels that a trace asks before torch's (seen on torch 2.11.0, 2.12.1 and 2.13.0;
see tests/unit/rannc_backend/capture/test_soft_labels.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import DispatchKey

from rannc_backend.settings import hooks
from rannc_backend.settings.torch_version import is_older

_OPERATOR = torch.ops.aten.cross_entropy_loss.default
_KEY = DispatchKey.CompositeImplicitAutograd
_NONE, _MEAN, _SUM = range(3)


def trace_soft_labels(version: str = torch.__version__) -> None:
    """From now on traces have symbolic sizes here, where torch itself has not. Harmless when called again."""
    if is_older(version, (2, 13)) and _KEY not in _OPERATOR.py_kernels:
        hooks.register("soft labels", _OPERATOR.py_impl(_KEY), cross_entropy)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """As ``aten.cross_entropy_loss``: the loss of class probabilities is written out, everything else is left
    to torch.
    """
    if (
        target.shape != logits.shape
        or not target.is_floating_point()
        or ignore_index >= 0
        or logits.dim() == 0
    ):
        loss: Tensor = _OPERATOR._op_dk(
            _KEY, logits, target, weight, reduction, ignore_index, label_smoothing
        )
        return loss
    class_dim = 0 if logits.dim() == 1 else 1
    num_classes = logits.shape[class_dim]
    if label_smoothing > 0.0:
        target = target * (1 - label_smoothing) + label_smoothing / num_classes
    terms = logits.log_softmax(class_dim) * target
    if weight is not None:
        terms = terms * weight.view([num_classes if dim == class_dim else 1 for dim in range(logits.dim())])
    if reduction == _NONE:
        return -terms.sum(class_dim)
    total = -terms.sum()
    return total / (logits.numel() // num_classes) if reduction == _MEAN else total
