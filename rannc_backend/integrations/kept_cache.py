"""A key-value cache whose keys and values stay on the stages that compute them: what transformers sees of it.

In: rows of a step and their numbers. Out: `OwnCache`, which `generate` of transformers handles on each rank and which holds
no tensor of the model, and `StageCache` or `StageCaches`, which the model's forward reads and writes through
`kernels.kept_rows`. Slots are four a layer: keys and values of a layer's own tokens, and of an encoder's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from rannc_backend.errors import GenerationError
from rannc_backend.kernels.kept_rows import KEEP_ROWS
from rannc_backend.passes.batch.row_wise import row_wise
from rannc_backend.runtime.torch_internals import register_members

GATHERED = (
    "generate inside `with rannc_backend.gathered(model):`."  # the cure where no stage can keep a cache
)
row_wise(KEEP_ROWS)
Widths = Mapping[int, tuple[Sequence[int], str]]
"""Of each slot: the sizes of a row without its length, and the dtype's name."""


def holds(config: Any) -> bool:
    """Whether the layers of a model with this configuration keep keys and values, and nothing else."""
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


class OwnCache:
    """A rank's own view: how many tokens its sequences have, and which beams have changed places."""

    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    def __init__(self) -> None:
        self.length = 0
        self.parents: Tensor | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of this rank's sequences, without the padding to other ranks' lengths."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i goes on from sequence ``beam_idx[i]``."""
        self.parents = beam_idx if self.parents is None else self.parents[beam_idx]

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise GenerationError(
            "this way of generation changes the key-value cache otherwise than by tokens and beams",
            cure=f"use one of greedy search, sampling and beam search, or {GATHERED}",
        )

    activate_past_recording = crop = batch_repeat_interleave = batch_select_indices = _refuse


class StageCache:
    """The model's own tokens: [rows, heads, length, width] of each layer.

    Args:
        numbers: Of rows, [rows, 2]; see `kernels.kept_rows`.
        grown: Any tensor [rows, length] of all tokens, the new ones included.
        new: Any tensor [rows, new] of the new tokens.
    """

    is_compileable = False

    def __init__(self, numbers: Tensor, grown: Tensor, new: Tensor) -> None:
        self.numbers, self.grown, self.new = numbers, grown, new

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the new ones."""
        return self.grown.shape[1] - self.new.shape[1]

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """All tokens, from the first."""
        return self.grown.shape[1], 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Keys and values of all tokens, given those of the new ones."""
        length, slot = self.grown.shape[1], 4 * layer_idx
        return KEEP_ROWS(keys, self.numbers, length, slot), KEEP_ROWS(values, self.numbers, length, slot + 1)


@dataclass(slots=True)
class EncodedLayer:
    """Keys and values of an encoder's tokens, as one layer keeps them. ``encoded``: any tensor [rows, tokens of the encoder, 1]."""

    numbers: Tensor
    encoded: Tensor
    slot: int
    widths: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def _kept(self, which: int) -> Tensor:
        (*sizes, width), dtype = self.widths[which]
        # Made of an input: sizes alone would not make it one, and a size of what is no input is a number.
        nothing = self.encoded[(slice(None), *[None] * len(sizes), slice(0, 0))].to(dtype)
        nothing = nothing.expand(-1, *sizes, -1, width)
        kept: Tensor = KEEP_ROWS(nothing, self.numbers, self.encoded.shape[1], self.slot + which)
        return kept

    @property
    def keys(self) -> Tensor:
        """As they were in the step before."""
        return self._kept(0)

    @property
    def values(self) -> Tensor:
        """As they were in the step before."""
        return self._kept(1)


class EncodedCache:
    """The encoder's tokens: made in the first step (``layers`` is empty), read in the others."""

    is_compileable = False

    def __init__(self, numbers: Tensor, grown: Tensor, layers: Sequence[EncodedLayer] = ()) -> None:
        self.numbers, self.grown, self.layers = numbers, grown, layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the encoder, once they are kept."""
        return self.grown.shape[1] if self.layers else 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Keep them."""
        length, slot = self.grown.shape[1], 4 * layer_idx + 2
        return KEEP_ROWS(keys, self.numbers, length, slot), KEEP_ROWS(values, self.numbers, length, slot + 1)


class _Told:
    """In the place of the dict in which layers note that they have kept the encoder's tokens."""

    def __init__(self, is_kept: bool) -> None:
        self.is_kept = is_kept

    def get(self, layer_idx: int, default: Any = None) -> bool:
        return self.is_kept

    def __setitem__(self, layer_idx: int, is_kept: bool) -> None:
        return


class StageCaches(EncoderDecoderCache):
    """Both, for a decoder that reads an encoder."""

    def __init__(self, own: StageCache, encoded: EncodedCache) -> None:
        # Not the classes that transformers has there.
        vars(self).update(
            self_attention_cache=own,
            cross_attention_cache=encoded,
            is_updated=_Told(bool(encoded.layers)),
        )


def encoded_layers(numbers: Tensor, encoded: Tensor, widths: Widths) -> list[EncodedLayer]:
    """The layers that keep an encoder's tokens, from the slots that all ranks have together."""
    found = []
    slots = [slot for slot in sorted(widths) if slot % 4 == 2]
    if slots != [4 * layer + 2 for layer in range(len(slots))] or not slots:
        raise GenerationError(
            "not every layer of the decoder keeps keys of the encoder's tokens", cure="give use_cache=False."
        )
    for slot in slots:
        pair = [widths[slot], widths[slot + 1]]
        found.append(
            EncodedLayer(
                numbers,
                encoded,
                slot,
                tuple((tuple(sizes), getattr(torch, dtype)) for sizes, dtype in pair),
            )
        )
    return found


register_members(StageCache, "numbers", "grown", "new")
register_members(EncodedLayer, "numbers", "encoded", settings=("slot", "widths"))
register_members(EncodedCache, "numbers", "grown", "layers")
register_members(StageCaches, "self_attention_cache", "cross_attention_cache")
