"""The forwards of one call of `generate`, each together with those of the other ranks, without a key-value cache or with one.

In: on each rank what `generate` of transformers gives to the model. Out: the model's result for this rank's rows. In every
step ranks tell each other their lengths; shorter inputs are padded, at the left for a decoder and at the right for an
encoder, and masked. Terms: a step *begins anew* if it computes all tokens; others compute the last one, and find the others'
keys and values on the stages (`kernels.kept_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rannc_backend.errors import GenerationError, RanksDifferError
from rannc_backend.integrations.kept_cache import (
    GATHERED,
    EncodedCache,
    EncodedLayer,
    OwnCache,
    StageCache,
    StageCaches,
    Widths,
    encoded_layers,
)
from rannc_backend.kernels.kept_rows import KeptRows, keeping
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.world import World
from rannc_backend.session_registry import REGISTRY

# Tokens of the same sequences as these; what goes with an encoder's prompts is padded at the other end.
PROMPTS = "input_ids"
# As transformers calls its cache now and has before.
CACHES = ("cache", "past_key_values")
_DECODER = "decoder_"
_MASK = "attention_mask"
_ENCODED = "encoder_outputs"
_STEP = "a step of generate"


@dataclass(slots=True, kw_only=True)
class Steps:
    """The forwards of one call of `generate`, each together with those of the other ranks.

    ``last``: what this rank has last given to the model. ``is_checked``: that padding changes nothing was tried.
    """

    compiled: nn.Module
    world: World
    is_decoder: bool
    last: dict[str, Any] = field(default_factory=dict)
    is_checked: bool = False

    def __call__(self, **inputs: Any) -> Any:
        """A forward; ``inputs``: those of the model's forward. Gives its result with the logits alone."""
        self.last = _masked(_inputs_of(inputs))
        result = self._forward(is_done=False)
        # What else a model gives belongs to padded tokens, too.
        return type(result)(logits=result.logits)

    def take_part(self) -> None:
        """Give the last inputs again until all ranks are done."""
        while self._forward(is_done=True) is not None:
            pass

    def _forward(self, *, is_done: bool) -> Any:
        """All ranks' inputs through the stages; None where all are done."""
        own = {name: list(value.shape[1:]) for name, value in _tensors(self.last).items()}
        answers = agree(self.world, _STEP, [is_done, own])
        if all(done for done, _ in answers):
            return None
        shapes = [sizes for _, sizes in answers]
        _check_kinds(shapes)
        # Those that are done count, too: lengths grow, and a graph serves lengths that change.
        wanted = {
            name: [max(sizes) for sizes in zip(*(each[name] for each in shapes), strict=True)] for name in own
        }
        active = [sizes for done, sizes in answers if not done]
        self._check_decoders(active)
        result = self.compiled(**self._padded(self.last, wanted, filler=0))
        if not self.is_checked and any(each != wanted for each in active):
            self.is_checked = True
            self._check_padding(wanted, result)
        return result

    def _check_decoders(self, shapes: list[dict[str, list[int]]]) -> None:
        decoders = [
            {name: sizes for name, sizes in each.items() if name.startswith(_DECODER)} for each in shapes
        ]
        if not self.is_decoder and any(each != decoders[0] for each in decoders):
            raise GenerationError(
                "decoders have begun with different numbers of tokens on the ranks",
                cure="give prompts of the decoder the same length on all ranks.",
            )

    def _padded(
        self, inputs: Mapping[str, Any], wanted: Mapping[str, list[int]], *, filler: int
    ) -> dict[str, Any]:
        """Inputs at these lengths; longer ones, of a rank that is done, are cut. ``filler``: the token in the padding."""
        found = dict(inputs)
        for name, value in _tensors(inputs).items():
            missing = [size - own for size, own in zip(wanted[name], value.shape[1:], strict=True)]
            pairs = [
                each for size in reversed(missing) for each in ((size, 0) if self.is_decoder else (0, size))
            ]
            if any(pairs):
                found[name] = nn.functional.pad(value, pairs, value=filler if name == PROMPTS else 0)
        return found

    def _again(self, wanted: Mapping[str, list[int]]) -> Any:
        return self.compiled(**self._padded(self.last, wanted, filler=1))

    def _check_padding(self, wanted: Mapping[str, list[int]], result: Any) -> None:
        """Whether the model looks at what is masked: with other tokens there, the logits are the same. Collective."""
        again = self._again(wanted)
        # Of a model that leaves masked tokens out; others differ by much more than rounding.
        alike = torch.allclose(result.logits[:, -1], again.logits[:, -1], rtol=1e-4, atol=1e-5)
        if not all(agree(self.world, "whether padding is left out", alike)):
            raise GenerationError(
                "the model computes other tokens where padding has other values, though it is masked",
                cure=f"give prompts of the same length on all ranks, or {GATHERED}",
            )


@dataclass(slots=True, kw_only=True)
class CachedSteps(Steps):
    """The same with a key-value cache on the stages.

    ``cache_name``: the model's argument. ``own``: this rank's view of the cache. ``length``: tokens of the longest sequences of
    all ranks, padding included. ``num_rows``: sequences of each rank. ``encoder_sizes``: of the encoder's prompts, as padded.
    ``tokens``: what all steps have given, for steps that begin anew. ``widths``: of what ranks keep of an encoder.
    """

    root: nn.Module
    cache_name: str
    own: OwnCache = field(default_factory=OwnCache)
    store: KeptRows = field(
        default_factory=lambda: KeptRows()
    )  # a name that tests put another one in the place of
    length: int = 0
    num_rows: list[int] = field(default_factory=list)
    encoder_sizes: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)
    widths: dict[int, tuple[Any, str]] = field(default_factory=dict)

    def __call__(self, **inputs: Any) -> Any:
        """A forward; ``inputs``: those of the model's forward. Gives its result with the logits and this rank's cache."""
        self.last = self._with_masks(_inputs_of(inputs))
        num_new = self._new_of(self.last).shape[1]
        if self.own.length and num_new != 1:
            raise GenerationError(
                f"a step gives {num_new} tokens to a key-value cache that has {self.own.length}",
                cure=f"leave out prefill_chunk_size and assistants, or {GATHERED}",
            )
        self._note_tokens(num_new)
        result = self._forward(is_done=False)
        self.own.length += num_new
        self.own.parents = None
        return type(result)(logits=result.logits, **{self.cache_name: self.own})

    @property
    def _mask(self) -> str:
        """The argument that has all tokens, not only the new ones."""
        return _MASK if self.is_decoder else _DECODER + _MASK

    def _new_of(self, inputs: Mapping[str, Any]) -> Tensor:
        start = "" if self.is_decoder else _DECODER
        for name in (start + PROMPTS, start + "inputs_embeds"):
            if name in inputs:
                found: Tensor = inputs[name]
                return found
        raise GenerationError(
            "generate gives the model neither tokens nor their embeddings",
            cure=f"give input_ids, or {GATHERED}",
        )

    def _with_masks(self, found: dict[str, Any]) -> dict[str, Any]:
        if not self.is_decoder:
            found = _masked(found)
        new = self._new_of(found)
        rows, length = new.shape[0], self.own.length + new.shape[1]
        if found.get(self._mask) is None:
            found[self._mask] = torch.ones(rows, length, dtype=torch.long, device=new.device)
        if list(found[self._mask].shape) != [rows, length]:
            raise GenerationError(
                f"{self._mask} has the shape {list(found[self._mask].shape)}, not [{rows}, {length}]",
                cure=f"give a mask of tokens, generate with use_cache=False, or {GATHERED}",
            )
        return found

    def _note_tokens(self, num_new: int) -> None:
        for name, value in _tensors(self.last).items():
            if name == self._mask or value.shape[1] != num_new or not self._grows(name):
                continue
            before = self.tokens.get(name)
            if before is not None:
                before = before if self.own.parents is None else before[self.own.parents]
                value = torch.cat([before, value], 1)
            self.tokens[name] = value

    def _grows(self, name: str) -> bool:
        return self.is_decoder or name.startswith(_DECODER)

    def _forward(self, *, is_done: bool) -> Any:
        sizes = {name: list(value.shape[1:]) for name, value in _tensors(self.last).items()}
        parents = None if is_done else self.own.parents
        are_moved = parents is not None and parents.tolist() != list(range(len(parents)))
        asks = bool(self.length) and not self.is_decoder and not self.widths
        widths = [[slot, *each] for slot, each in self.store.widths().items()] if asks else []
        payload = [is_done, sizes, _num_rows(self.last), are_moved, widths]
        answers = agree(self.world, f"{_STEP} with a key-value cache", payload)
        if all(answer[0] for answer in answers):
            return None
        begins = not self.length
        active = [answer[1] for answer in answers if begins or not answer[0]]
        _check_kinds(active)
        self._check_decoders(active)
        self._check_rows([answer[2] for answer in answers])
        self.widths |= {slot: (each, dtype) for answer in answers for slot, each, dtype in answer[4]}
        # A sequence goes on from one whose keys another replica may have.
        are_moved = any(answer[3] for answer in answers)
        anew = begins or (are_moved and self._has_replicas())
        wanted = self._wanted(active, anew=anew)
        self.store.begin_step(are_moved=are_moved, anew=anew)
        result = self._call(wanted, parents, anew=anew)
        if begins and any(each != wanted for each in active):
            self._check_padding(wanted, result)
        return result

    def _wanted(self, active: list[dict[str, list[int]]], *, anew: bool) -> dict[str, list[int]]:
        """Sizes of all ranks' inputs in this step."""
        found = {
            name: [max(sizes) for sizes in zip(*(each[name] for each in active), strict=True)]
            for name in active[0]
        }
        if not self.length:
            self.length = found[self._mask][0]
            self.encoder_sizes = {name: sizes for name, sizes in found.items() if not self._grows(name)}
            return found
        self.length += 1
        found |= {self._mask: [self.length]} | self.encoder_sizes
        if anew:
            found |= {name: [self.length, *value.shape[2:]] for name, value in self.tokens.items()}
        return found

    def _check_rows(self, num_rows: list[int]) -> None:
        if self.num_rows and num_rows != self.num_rows:
            raise GenerationError(
                f"the ranks have {num_rows} sequences, and had {self.num_rows} in the step before",
                cure=f"use one of greedy search, sampling and beam search, or {GATHERED}",
            )
        self.num_rows = num_rows

    def _has_replicas(self) -> bool:
        plan = REGISTRY.sessions[self.root].plan
        return plan is not None and any(len(stage.ranks) > 1 for stage in plan.stages)

    def _call(
        self, wanted: Mapping[str, list[int]], parents: Tensor | None, *, anew: bool, filler: int = 0
    ) -> Any:
        inputs = {
            name: self.last[name] for name in self.last if name in wanted or name not in _tensors(self.last)
        }
        if anew:
            inputs |= self.tokens
        given = self._padded(inputs, wanted, filler=filler)
        grown = given[self._mask]
        numbers = self._numbers(grown.device, parents)
        cache: Any = StageCache(numbers, grown, self._new_of(given))
        if not self.is_decoder:
            layers: list[EncodedLayer] = []
            if not anew:
                nothing = _nothing_encoded(given.pop(PROMPTS), self.widths)
                layers = encoded_layers(numbers, nothing[0], self.widths)
                given[_ENCODED] = nothing
            encoded = EncodedCache(numbers, given[_MASK], layers)
            cache = StageCaches(cache, encoded)
        given[self.cache_name] = cache
        with keeping(self.store):
            result = self.compiled(**given)
        self.store.end_step()
        return result

    def _numbers(self, device: torch.device, parents: Tensor | None) -> Tensor:
        """Of this rank's rows, which are counted over all ranks: own ones and those that they continue."""
        own = torch.arange(self.num_rows[self.world.rank], device=device)
        before = own if parents is None else parents.to(device)
        return torch.stack([own, before], 1) + sum(self.num_rows[: self.world.rank])

    def _again(self, wanted: Mapping[str, list[int]]) -> Any:
        self.store.begin_step(anew=True)
        return self._call(wanted, None, anew=True, filler=1)


def _check_kinds(shapes: list[dict[str, list[int]]]) -> None:
    if any(_kinds(each) != _kinds(shapes[0]) for each in shapes):
        raise RanksDifferError(
            f"inputs of the model in {_STEP}",
            value_by_rank=list(map(str, shapes)),
            cure="give each rank a prompt, and the same kinds of arguments.",
        )


def _kinds(shapes: Mapping[str, list[int]]) -> dict[str, int]:
    return {name: len(sizes) for name, sizes in shapes.items()}


def _tensors(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 1}


def _inputs_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs as the stages get them, of those that ``generate`` makes."""
    found = {name: value for name, value in inputs.items() if value is not None}
    for name in CACHES:
        # Any other one was made for a way of generation that needs a cache.
        if name in found and not isinstance(found.pop(name), OwnCache):
            raise GenerationError(
                "generate gives the model a key-value cache that does not stay on stages",
                cure=f"use one of greedy search, sampling and beam search, or {GATHERED}",
            )
    # Counts all tokens, of this rank's length; models make it themselves.
    found.pop("cache_position", None)
    # Whole prompts are given to a model that is cut into an encoder and a decoder (`_Prompts`).
    encoded = found.pop(_ENCODED, None)
    if encoded is not None:
        found[PROMPTS] = encoded.last_hidden_state[..., 0]
    return found


def _masked(found: dict[str, Any]) -> dict[str, Any]:
    # transformers leaves out a mask that hides nothing here; there may be padding on other ranks.
    if PROMPTS in found and _MASK not in found:
        found[_MASK] = torch.ones_like(found[PROMPTS])
    return found


def _num_rows(inputs: Mapping[str, Any]) -> int:
    return next((len(value) for value in _tensors(inputs).values()), 0)


def _nothing_encoded(prompts: Tensor, widths: Widths) -> Any:
    """In the place of an encoder's result, whose keys and values are kept: sizes alone are read."""
    from transformers.modeling_outputs import BaseModelOutput

    dtype = getattr(torch, next(iter(widths.values()))[1])
    return BaseModelOutput(
        last_hidden_state=torch.zeros(*prompts.shape, 1, dtype=dtype, device=prompts.device)
    )
