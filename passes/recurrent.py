"""Recurrent layers as one operator each: the loop over a sequence stays whole, for every length of it.

In: the arguments of `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu`, on fakes. Out: the same values
by way of operators of `torch.library` whose fakes know the shapes, so that a length stays a symbol, and whose gradient
runs the layer once more and differentiates it, as those of kept functions do (kept_functions.py). Torch itself would
unroll the loop, into a graph for one length.

Terms. A *state* is what a layer hands on from token to token (`h`, and `c` of an LSTM): [layers * directions, rows,
width]. Where rows have lengths of their own, the input is padded to the longest; outputs behind a row's length are
zeros, and states are those at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from rannc_backend.passes.plain_numbers import recording_gradients

_LIBRARY = torch.library.Library("rannc_recurrent", "FRAGMENT")
_MODES: Mapping[str, Callable[..., Any]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}
_ARGUMENTS = (
    "str mode, Tensor input, Tensor[] states, Tensor[] weights, Tensor? lengths, bool has_biases, int num_layers, "
    "bool bidirectional, bool batch_first"
)
_NUM_STATES = {"lstm": 2}


def recurrent_mode(function: object) -> str:
    """Which recurrent function of torch this is; "" if it is another one."""
    return next((mode for mode, own in _MODES.items() if function is own), "")


def is_packed(args: Sequence[Any]) -> bool:
    """Whether a call is one of packed sequences, whose second argument are the rows of each token."""
    return len(args) > 2 and isinstance(args[1], Tensor) and args[1].dim() == 1


def call_recurrent(
    mode: str,
    value: Tensor,
    state: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """What torch's function gives for these arguments: the outputs, and the last states. Dropout between layers is
    an operator of its own. ``lengths``: of each row.
    """
    states = [state] if isinstance(state, Tensor) else list(state)
    operator = torch.ops.rannc_recurrent.layers.default
    settings = (lengths, has_biases, 1, bidirectional, batch_first)
    if not (train and dropout and num_layers > 1):
        return tuple(operator(mode, value, states, weights, lengths, has_biases, num_layers, *settings[3:]))
    directions = 2 if bidirectional else 1
    per_layer = len(weights) // num_layers
    last: list[list[Tensor]] = [[] for _ in states]
    for layer in range(num_layers):
        if layer:
            value = functional.dropout(value, dropout, training=True)
        own = [each.narrow(0, layer * directions, directions) for each in states]
        value, *found = operator(mode, value, own, weights[layer * per_layer :][:per_layer], *settings)
        for kept, each in zip(last, found, strict=True):
            kept.append(each)
    return (value, *(torch.cat(kept) for kept in last))


def _run(
    mode: str,
    value: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    lengths: Tensor | None,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    # In training mode: cuDNN differentiates in no other. Without dropout the values are the same.
    settings = (list(weights), has_biases, num_layers, 0.0, True, bidirectional)
    if lengths is None:
        return list(_MODES[mode](value, _given(mode, states), *settings, batch_first))
    packed = pack_padded_sequence(value, lengths.cpu(), batch_first, enforce_sorted=False)
    order, back = packed.sorted_indices, packed.unsorted_indices
    assert order is not None and back is not None, "sorted by length"
    sorted_states = [state.index_select(1, order) for state in states]
    data, *last = _MODES[mode](packed.data, packed.batch_sizes, _given(mode, sorted_states), *settings)
    outputs = PackedSequence(data, packed.batch_sizes, order, back)
    output, _ = pad_packed_sequence(outputs, batch_first, total_length=value.shape[1 if batch_first else 0])
    return [output, *(state.index_select(1, back) for state in last)]


def _given(mode: str, states: Sequence[Tensor]) -> Tensor | list[Tensor]:
    return list(states) if mode in _NUM_STATES else states[0]


def _forward(mode: str, value: Tensor, states: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    with torch.no_grad():
        return [result.contiguous() for result in _run(mode, value, states, *rest)]


def _fake(mode: str, value: Tensor, states: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    *_, bidirectional, _ = rest
    width = states[0].shape[2] * (2 if bidirectional else 1)
    output = value.new_empty((value.shape[0], value.shape[1], width))
    return [output, *(value.new_empty(state.shape) for state in states)]


def _backward(
    grads: Sequence[Tensor],
    mode: str,
    value: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    with recording_gradients():
        leaves = [each.detach().requires_grad_() for each in (value, *states, *weights)]
        own, given = leaves[1 : 1 + len(states)], leaves[1 + len(states) :]
        results = _run(mode, leaves[0], own, given, *rest)
        found = torch.autograd.grad(results, leaves, list(grads), allow_unused=True)
    return [
        torch.zeros_like(leaf) if grad is None else grad.contiguous()
        for leaf, grad in zip(leaves, found, strict=True)
    ]


def _fake_backward(
    grads: Sequence[Tensor],
    mode: str,
    value: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in (value, *states, *weights)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    mode, value, states, weights, lengths, *rest = inputs
    ctx.mode, ctx.rest, ctx.num_states = mode, rest, len(states)
    ctx.save_for_backward(lengths, value, *states, *weights, *output)
    ctx.num_weights = len(weights)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    lengths, value, *saved = ctx.saved_tensors
    states, saved = saved[: ctx.num_states], saved[ctx.num_states :]
    weights, outputs = saved[: ctx.num_weights], saved[ctx.num_weights :]
    full = [
        torch.zeros_like(output) if grad is None else grad
        for grad, output in zip(grads, outputs, strict=True)
    ]
    found = torch.ops.rannc_recurrent.layers_backward.default(
        full, ctx.mode, value, states, weights, lengths, *ctx.rest
    )
    last = 1 + ctx.num_states
    return None, found[0], found[1:last], found[last:], None, *(None for _ in ctx.rest)


_LIBRARY.define(f"layers({_ARGUMENTS}) -> Tensor[]")
_LIBRARY.define(f"layers_backward(Tensor[] grads, {_ARGUMENTS}) -> Tensor[]")
_LIBRARY.impl("layers", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("layers_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("rannc_recurrent::layers", _fake, lib=_LIBRARY)
torch.library.register_fake("rannc_recurrent::layers_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("rannc_recurrent::layers", _gradients, setup_context=_keep, lib=_LIBRARY)

LAYERS = torch.ops.rannc_recurrent.layers.default
