"""Packed sequences in a forward that runs on fakes: tokens stay padded, with the length of each row beside them.

In: the calls of torch's functions that pack, unpack and run over packed sequences. Out: their results as a graph can
hold them. A packed sequence has the tokens of all rows in one dimension, in an order and a number that depend on the
lengths; what stands for it here is a tensor of that shape that nothing but those functions may read. Packing unsorted
rows sorts them first, so that the whole batch meets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from rannc_backend.capture.aten_trace import traced_node
from rannc_backend.capture.detached_writes import tensors_in
from rannc_backend.errors import UnsupportedModelError, user_location
from rannc_backend.passes import ctc
from rannc_backend.passes.recurrent import call_recurrent, recurrent_mode

_PACK = torch._VF._pack_padded_sequence
_PAD = torch._VF._pad_packed_sequence
# What may be asked of tokens and of the numbers of rows by anybody.
_HARMLESS = {
    torch.Tensor.dim,
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.__len__,
}


@dataclass(frozen=True, slots=True)
class _Packed:
    """One packed sequence: `tokens` and `counts` stand for its data and batch sizes."""

    padded: Tensor
    lengths: Tensor
    batch_first: bool
    tokens: Tensor
    counts: Tensor
    longest: Any  # stands for the largest length, until that is known to be all there is

    @property
    def num_rows(self) -> Any:
        return self.padded.shape[0 if self.batch_first else 1]


@dataclass(slots=True)
class PackedSequences:
    """See the module docstring. ``is_whole(lengths, size)``: whether the longest row has that length."""

    is_whole: Callable[[Tensor, Any, str], bool]
    _by_id: dict[int, _Packed] = field(default_factory=dict)

    def holds(self, value: object) -> bool:
        """Whether a value stands for the tokens of a packed sequence."""
        return id(value) in self._by_id

    def takes(self, func: object, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether `call` serves a call."""
        return func is _PACK or (
            bool(self._by_id) and any(self.holds(tensor) for tensor in tensors_in((args, kwargs)))
        )

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], trace: str) -> Any:
        """What a function gives.

        Raises:
            UnsupportedModelError: for what reads the tokens otherwise, and sizes that depend on the lengths.
        """
        if func is _PACK:
            padded, lengths, batch_first = args
            tokens = padded.detach().flatten(0, 1)
            return self._kept(padded, lengths, batch_first, tokens, lengths.detach().to(torch.int64))
        if func is _PAD:
            return self._padded(*args, trace=trace)
        if (mode := recurrent_mode(func)) and self.holds(args[0]):
            return self._run(mode, *args)
        asked = self._by_id[next(id(tensor) for tensor in tensors_in((args, kwargs)) if self.holds(tensor))]
        if args[0] is asked.counts and func is Tensor.__getitem__ and args[1] == 0:
            return asked.num_rows
        if args[0] is asked.counts and func is Tensor.size and args[1:] == (0,):
            return asked.longest
        if func in _HARMLESS or (args[0] is asked.tokens and func is Tensor.size and args[1:] == (-1,)):
            return func(*args, **kwargs)
        raise UnsupportedModelError(
            f"{getattr(func, '__name__', func)} reads the tokens of a packed sequence, in an order that depends on "
            "the lengths of all rows",
            location=user_location(trace),
            cure="unpack it first (torch.nn.utils.rnn.pad_packed_sequence), and mask what is behind each length.",
        )

    def expected_size(self, layer: nn.RNNBase, width: int, counts: object) -> tuple[Any, ...] | None:
        """Of a state of a layer for these numbers of rows, where they stand for a packed sequence."""
        packed = self._by_id.get(id(counts))
        directions = 2 if layer.bidirectional else 1
        return None if packed is None else (layer.num_layers * directions, packed.num_rows, width)

    def _kept(
        self, padded: Tensor, lengths: Tensor, batch_first: bool, tokens: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        longest = padded.shape[1 if batch_first else 0]
        # A number of its own, to tell it from one that the user passes.
        packed = _Packed(padded, lengths, batch_first, tokens, counts, longest + 0)
        self._by_id |= {id(tokens): packed, id(counts): packed}
        return tokens, counts

    def _run(
        self,
        mode: str,
        tokens: Tensor,
        counts: Tensor,
        state: Any,
        weights: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Any, ...]:
        packed = self._by_id[id(tokens)]
        output, *states = call_recurrent(
            mode, packed.padded, state, weights, has_biases, num_layers, dropout, train, bidirectional,
            packed.batch_first, packed.lengths,
        )  # fmt: skip
        made = output.detach().flatten(0, 1)
        again = _Packed(output, packed.lengths, packed.batch_first, made, packed.counts, packed.longest)
        self._by_id[id(made)] = again
        return (made, *states)

    def _padded(
        self, tokens: Tensor, counts: Tensor, batch_first: bool, padding: float, total: Any, *, trace: str
    ) -> tuple[Tensor, Tensor]:
        packed = self._by_id[id(tokens)]
        value, dim = packed.padded, 1 if packed.batch_first else 0
        size = value.shape[dim]
        if total is packed.longest and not self.is_whole(packed.lengths, size, trace):
            raise UnsupportedModelError(
                "a packed sequence is unpacked to the longest row, which is shorter than what was packed",
                location=user_location(trace),
                cure="pass total_length=x.shape[1] to pad_packed_sequence, or cut the batch before it is packed.",
            )
        if total is not packed.longest and not bool(total == size):
            raise UnsupportedModelError(
                "a packed sequence is unpacked to another length than it was packed from",
                location=user_location(trace),
                cure="pass total_length=x.shape[1] to pad_packed_sequence, and pad or cut the result.",
            )
        if padding:
            places = torch.arange(size, device=value.device)
            behind = places[None, :] >= packed.lengths.to(value.device)[:, None]
            behind = behind if packed.batch_first else behind.transpose(0, 1)
            value = value.masked_fill(behind[..., None], padding)
        value = value if batch_first == packed.batch_first else value.transpose(0, 1)
        return value, packed.lengths.clone()


class SelectedTargets:
    """What masks have selected from rows in the forward that runs: a CTC loss may get it as its targets."""

    def __init__(self) -> None:
        self._by_node: dict[fx.Node, tuple[Tensor, Tensor]] = {}  # from what, by which mask

    def note(self, func: object, args: Sequence[Any], result: Any) -> None:
        """A function has been called."""
        if ctc.is_selection(func, args) and (node := traced_node(result)):
            self._by_node[node] = args[0], args[1]

    def in_rows(self, targets: Tensor, lengths: Tensor, trace: str) -> Tensor:
        """Targets of a CTC loss as [rows, tokens], also where they come one after the other.

        Raises:
            UnsupportedModelError: these are not what a mask has selected from the rows, of the lengths that it counts.
        """
        if targets.dim() == 2:
            return targets
        node, counts = traced_node(targets), traced_node(lengths)
        if node is None or counts is None:  # a run for shapes alone
            return targets.new_zeros((lengths.shape[0], 1))
        selection = ctc.selection_behind(node)
        if selection in self._by_node:
            values, mask = self._by_node[selection]
            source, chooser = traced_node(values), traced_node(mask)
            # Neither has been written to since.
            is_unchanged = {source, chooser} <= set(selection.all_input_nodes)
            if is_unchanged and chooser is not None and ctc.counts_of(chooser, counts):
                return ctc.in_rows(values, mask)
        raise UnsupportedModelError(
            "ctc_loss gets the targets of all rows one after the other, and not as a mask of the rows selects them",
            location=user_location(trace),
            cure="give it targets of [rows, tokens], padded behind each row's length, and the lengths as they are.",
        )
