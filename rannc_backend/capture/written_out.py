"""What traces with a symbolic batch size write out in other operators than torch does.

In: calls of functions of torch. Out: the same values, of operators that treat each row by itself.

- Cross entropy with class probabilities as labels, under torch 2.11 and 2.12: torch's own code takes the batch size as a
  number there, so that a graph would hold for one batch size only; torch 2.13 takes it as a symbol.
- The margin loss of several labels: torch's own code for traces counts places behind the last label too, so that a traced
  loss is not the eager one.
- Bags of as many ids per sample (``nn.EmbeddingBag`` of ids in two dimensions): torch numbers all ids of the batch, which
  nothing can cut; here they are rows of an embedding, summed. Bags with offsets, of the largest of their rows, with
  ``max_norm`` or ``scale_grad_by_freq`` are left to torch.

Private to torch here: the kernels that a trace asks before torch's (seen on torch 2.11.0, 2.12.1 and 2.13.0;
see tests/unit/rannc_backend/capture/test_written_out.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rannc_backend.settings import hooks
from rannc_backend.settings.torch_version import is_older

_OPERATOR = torch.ops.aten.cross_entropy_loss.default
_KEY = DispatchKey.CompositeImplicitAutograd
_NONE, _MEAN, _SUM = range(3)
_MARGIN = torch.ops.aten.multilabel_margin_loss_forward.default


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


def trace_margin_loss() -> None:
    """From now on traces have the values of `multilabel_margin_loss`. Harmless when called again."""
    kernels = _MARGIN.py_kernels
    if kernels.get(DispatchKey.Autograd, multilabel_margin_loss) is not multilabel_margin_loss:
        hooks.replace_item("margin loss", kernels, DispatchKey.Autograd, multilabel_margin_loss)
        _MARGIN._dispatch_cache.clear()


def multilabel_margin_loss(input: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """As ``aten.multilabel_margin_loss_forward``: of [rows, classes], with the labels of a row before its first -1."""
    scores, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    places = torch.arange(scores.shape[1], device=labels.device)
    end = torch.where(labels == -1, places, scores.shape[1]).amin(-1, keepdim=True)
    is_label = places < end
    known = torch.where(is_label, labels, 0)
    is_target = ((places == known.unsqueeze(-1)) & is_label.unsqueeze(-1)).any(1)
    # [rows, labels, classes]
    terms = (1.0 - scores.gather(1, known).unsqueeze(-1) + scores.unsqueeze(1)).clamp_min(0)
    counts = is_label.unsqueeze(-1) & ~is_target.unsqueeze(1)
    losses = torch.where(counts, terms, 0).sum((1, 2)) / scores.shape[1]
    loss = losses.mean() if reduction == _MEAN else losses.sum() if reduction == _SUM else losses
    if reduction == _NONE and input.dim() < 2:
        loss = loss.squeeze(0)
    return loss, is_target.to(input.dtype).reshape(target.shape)


class BagsAsRows(TorchFunctionMode):
    """Writes out bags of ids, while it is entered."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = bags(*args, **(kwargs or {})) if func is F.embedding_bag else None
        return func(*args, **(kwargs or {})) if found is None else found


def bags(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    """As ``F.embedding_bag``, [samples, width]; None where it is left to torch, errors included."""
    del norm_type, include_last_offset
    is_plain = ids.dim() == 2 and weight.dim() == 2 and offsets is None and max_norm is None
    factors = per_sample_weights
    if not is_plain or scale_grad_by_freq or mode not in ("sum", "mean") or ids.shape[1] == 0:
        return None
    if factors is not None and (mode != "sum" or factors.shape != ids.shape or factors.dtype != weight.dtype):
        return None
    rows = F.embedding(ids, weight, padding_idx, sparse=sparse)
    if factors is not None:
        rows = rows * factors.unsqueeze(-1)
    if padding_idx is None:
        total = rows.sum(1).to(weight.dtype)
        return total if mode == "sum" else total / ids.shape[1]
    counts = ids != (padding_idx if padding_idx >= 0 else padding_idx + weight.shape[0])
    total = torch.where(counts.unsqueeze(-1), rows, 0.0).sum(1).to(weight.dtype)
    # A bag of nothing but padding is zeros.
    return total if mode == "sum" else total / counts.sum(1, keepdim=True).clamp(min=1).to(total.dtype)


def as_strided_scatter(
    tensor: Tensor,
    source: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor:
    """What a write into ``tensor.as_strided(...)`` is in a graph, by places in memory: torch's own derivative sends the gradient
    of what was written to what was overwritten too. Seen on 2.11 to 2.15. For contiguous tensors of known sizes.
    """
    sizes = (*tensor.shape, *size, *stride, storage_offset or 0)
    if not all(isinstance(number, int) for number in sizes) or not tensor.is_contiguous():
        return NotImplemented
    places = torch.full((), storage_offset or 0, device=tensor.device)
    for dim, (number, step) in enumerate(zip(size, stride, strict=True)):
        steps = torch.arange(number, device=tensor.device) * step
        places = places + steps.view(-1, *(1 for _ in size[dim + 1 :]))
    flat = tensor.reshape(-1).scatter(0, places.reshape(-1), source.reshape(-1).to(tensor.dtype))
    return flat.view(tensor.shape)


class PlainOperators(TorchDispatchMode):
    """Leaves out what a graph whose values travel between ranks cannot have.

    The checks of `torch.linalg` that a matrix can be inverted: from torch 2.13 on they are effects, which
    order a graph. As with other assertions on data, stages do without; the result is not finite. And
    conjugates and negatives that are only marked as such: what is sent is the memory, without the mark.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._linalg_check_errors.default:
            return None
        return _UNMARKED.get(func, func)(*args, **(kwargs or {}))


_UNMARKED = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
