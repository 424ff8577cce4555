"""What traces with a symbolic batch size write out in other operators than torch does.

In: calls of functions of torch. Out: the same values, of operators that treat each row by itself.

- Cross entropy with class probabilities as labels, under torch 2.11 and 2.12: torch's own code takes the batch size as a
  number there, so that a graph would hold for one batch size only; torch 2.13 takes it as a symbol.
- The margin loss of several labels: torch's own code for traces counts places behind the last label too, so that a traced
  loss is not the eager one.
- Bags of as many ids per sample (``nn.EmbeddingBag`` of ids in two dimensions): torch numbers all ids of the batch, which
  nothing can cut; here they are rows of an embedding, summed. Bags with offsets, of the largest of their rows, with
  ``max_norm`` or ``scale_grad_by_freq`` are left to torch.

- What is written in place into a tensor without a gradient: its values without theirs, as autograd has it. A graph, which
  has no places, would follow them.

Private to torch here: the kernels that a trace asks before torch's (seen on torch 2.11.0, 2.12.1 and 2.13.0;
see tests/unit/rannc_backend/capture/test_written_out.py), and what transforms of torch.func wrap (seen on torch 2.13.0
to 2.15.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rannc_backend.errors import UnsupportedModelError, needing_value
from rannc_backend.passes.plain_numbers import fill_diagonal
from rannc_backend.settings import hooks
from rannc_backend.settings.torch_version import is_older

_IN_PLACE = frozenset(
    f"__{name}__"
    for name in (
        "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "imatmul", "ipow", "iand", "ior",
        "ixor", "ilshift", "irshift",
    )
)  # fmt: skip
_WRITING_NOTHING = frozenset({"requires_grad_", "share_memory_"})
DETACHING = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
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


class DetachedWrites(TorchFunctionMode):
    """Writes into `x.data`, `x.detach()` and, where gradients are switched off, into tensors that have none: while it is
    entered, what is written has none either.

    A detached tensor itself has the gradient of what is written into it (`y = x.detach(); y[mask] = token`), which x does
    not see. A functional trace makes a tensor anew from what it is a view of, where the gradient would end: such a tensor
    gets memory of its own, and x the values. What would no longer be the same in both is an error when it is read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._apart: dict[
            int, Tensor
        ] = {}  # by id of a detached tensor with its own memory: one over that it had
        self._stale: set[int] = set()  # memory that lacks what was written in the other place
        self._inputs: frozenset[int] = frozenset()  # their memory
        self._trained: dict[int, Tensor] = {}  # inputs with a gradient, by memory
        self._before: dict[int, Tensor] = {}  # what those had that are written to, by their id
        self._detached: dict[int, Tensor] = {}  # by id, which is theirs as long as they are here
        self._hiding: set[int] = set()  # memory of values that have a gradient

    def begin(self, inputs: Sequence[Tensor]) -> None:
        """The inputs of the graph, whose changes it gives."""
        self._inputs = frozenset(map(_memory, inputs))
        self._trained = {_memory(tensor): tensor for tensor in inputs if needs_gradient(tensor)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.fill_diagonal_:
            with self:
                return fill_diagonal(*args, **kwargs)
        if func == _SET_DATA:
            return self._set_data(*args)
        if func is Tensor.detach_ and needs_gradient(args[0]):
            raise needing_value(
                "the forward drops the gradient of a value in place (x.detach_())",
                cure="write x = x.detach().",
            )
        if self._apart and any(map(self._is_lost, tensors_in((args, kwargs)))):
            result = func(*args, **kwargs)
            if tensors_in(result):
                raise _hidden_write()
            return result  # its sizes
        if is_in_place(func):
            written = tensors_in(args[:1])
            self._note_other_places(written)
            if any(map(self._is_written_apart, written)) or self._gives_gradient(written, (args[1:], kwargs)):
                return self._write_apart(func, args, kwargs)
            if not any(needs_gradient(tensor) for tensor in written):
                if not torch.is_grad_enabled():
                    args, kwargs = pytree.tree_map_only(Tensor, _detached, (args, kwargs))
                for tensor in written:
                    if _memory(tensor) in self._trained:
                        self._keep(self._trained[_memory(tensor)])
        elif self._before and func not in DETACHING and torch.is_grad_enabled():
            args, kwargs = pytree.tree_map_only(Tensor, self._with_gradient, (args, kwargs))
        result = func(*args, **kwargs)
        if func in DETACHING:
            self._note(result)
            if needs_gradient(args[0]) and _memory(result) not in self._inputs:
                self._hiding.add(_memory(result))
        elif self._detached:
            operands = {_memory(tensor) for tensor in tensors_in(args) if id(tensor) in self._detached}
            for tensor in tensors_in(result) if operands else ():
                if not needs_gradient(tensor) and _memory(tensor) in operands:
                    self._note(tensor)
        return result

    def check(self, results: object) -> None:
        """Raises UnsupportedModelError where one of the results lacks what was written."""
        if any(map(self._is_lost, tensors_in(results))):
            raise _hidden_write()

    def _is_lost(self, tensor: Tensor) -> bool:
        """Whether a tensor has other values, or another gradient, than in one process."""
        memory = _memory(tensor)
        if memory in self._stale:
            return True
        # Another detached tensor, or a view of one, from before the write.
        return id(tensor) in self._detached and any(memory == _memory(base) for base in self._apart.values())

    def _note_other_places(self, written: Sequence[Tensor]) -> None:
        """What a write that goes to one of two memories leaves behind in the other."""
        memories = {_memory(tensor) for tensor in written if id(tensor) not in self._apart}
        for place, base in self._apart.items():
            own = _memory(self._detached[place])
            if own in memories:
                self._lose(_memory(base))
            if _memory(base) in memories:
                self._lose(own)

    def _lose(self, memory: int) -> None:
        if memory in self._inputs:
            raise _hidden_write()  # the graph gives its value
        self._stale.add(memory)

    def _is_written_apart(self, tensor: Tensor) -> bool:
        return id(tensor) in self._apart or (id(tensor) in self._detached and _memory(tensor) in self._hiding)

    def _gives_gradient(self, written: Sequence[Tensor], operands: object) -> bool:
        """Whether a detached tensor gets a gradient by a write."""
        is_detached = bool(written) and all(id(tensor) in self._detached for tensor in written)
        return is_detached and torch.is_grad_enabled() and any(map(needs_gradient, tensors_in(operands)))

    def _write_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """To a detached tensor with gradients, and to what it shares memory with without, unless that has one of its own."""
        target, *rest = args
        if not isinstance(target, FunctionalTensor):
            raise _hidden_write()
        base = self._apart.get(id(target))
        if base is None:
            base = self._apart[id(target)] = target.detach()
            if _memory(target) in self._hiding:
                self._lose(_memory(target))
            copy = target.clone()
            assert isinstance(copy, FunctionalTensor), "a copy within the trace"
            target.elem = copy.elem
        if _memory(base) not in self._stale:
            func(
                base,
                *pytree.tree_map_only(Tensor, _detached, rest),
                **pytree.tree_map_only(Tensor, _detached, kwargs),
            )
        return func(target, *rest, **kwargs)

    def _note(self, tensor: Tensor) -> None:
        self._detached[id(tensor)] = tensor

    def _keep(self, tensor: Tensor) -> None:
        """What a trained input has before the first write to it."""
        if id(tensor) not in self._before:
            with torch.enable_grad():
                self._before[id(tensor)] = tensor.clone()

    def _with_gradient(self, tensor: Tensor) -> Tensor:
        """A trained input that has been written to, as autograd has it: its new values, and the gradient goes to it. The
        graph has the write in between, at which the gradient would end.
        """
        before = self._before.get(id(tensor))
        if before is not None:
            return tensor.detach() + (before - before.detach())
        source = self._trained.get(_memory(tensor)) if needs_gradient(tensor) else None
        if source is not None and id(source) in self._before:
            raise _hidden_write()  # a view from before
        return tensor

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        if _is_same_view(tensor, value):
            return
        if needs_gradient(tensor) and _memory(tensor) not in self._inputs:
            raise _hidden_write()
        if self._trained.get(_memory(tensor)) is tensor:
            self._keep(tensor)
        with torch.no_grad():
            tensor.set_(value.detach())  # type: ignore[call-overload]


def _hidden_write() -> UnsupportedModelError:
    return needing_value(
        "the forward changes values that have a gradient by way of x.data or x.detach()",
        cure="write x = x + (new - x).detach(), which has the new values and the gradient of the old.",
    )


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if needs_gradient(tensor) else tensor


def innermost(tensor: Tensor) -> Tensor:
    """The tensor that transforms of torch.func wrap, which alone has memory, a place in a graph, and the gradient that
    those outside of all transforms ask for.
    """
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def needs_gradient(tensor: Tensor) -> bool:
    """Whether autograd outside of all transforms of torch.func has a gradient for it."""
    return innermost(tensor).requires_grad


def _memory(tensor: Tensor) -> int:
    """What is equal for views of the same memory, also in a functional trace."""
    tensor = innermost(tensor)
    return int((tensor.elem if isinstance(tensor, FunctionalTensor) else tensor).untyped_storage()._cdata)


def _is_same_view(tensor: Tensor, other: Tensor) -> bool:
    """Whether the other tensor is what `tensor.data` gives, as `x.data = x.data.to(device)` has it."""
    return (
        _memory(tensor) == _memory(other)
        and (tensor.dtype, tensor.shape, tensor.stride()) == (other.dtype, other.shape, other.stride())
        and tensor.storage_offset() == other.storage_offset()
    )


def check_own_memory(tensor: Tensor, inputs: Sequence[Tensor]) -> None:
    """After a change of a tensor, such as `x.data = value`: a value that is written into x does as much, unless x shares
    it with another input, which is an UnsupportedModelError.
    """
    if sum(_memory(item) == _memory(tensor) for item in inputs) > 1:
        raise UnsupportedModelError(
            "the model lets one of its tensors share the memory of another one (x.data = y.data)",
            cure="copy the values: x.data = y.data.clone(), or x.copy_(y) under torch.no_grad().",
        )


def is_in_place(func: Any) -> bool:
    """Whether a function of torch writes into its first argument."""
    name = getattr(func, "__name__", None) or str(func)
    if name in _WRITING_NOTHING:
        return False
    return name in _IN_PLACE or func == _SET_DATA or (name.endswith("_") and not name.endswith("__"))


def tensors_in(values: object) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
