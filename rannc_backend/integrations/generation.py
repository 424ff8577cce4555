"""`generate` of Hugging Face's models through the stages of their plan: `model.generate` with every forward on all ranks.

In: a compiled model, and what its ``generate`` takes, on each rank for its own prompts. Out: the tokens that one process
gives for these prompts. Ranks may have different numbers of prompts, lengths and ends: in every step they tell each other
their lengths, shorter prompts are padded at the left (at the right for an encoder) and masked, and a rank that is done
gives its last inputs again until all are.

Tried with transformers 5.24: GPT-2, Llama, T5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rannc_backend.api.gathered import gathered
from rannc_backend.capture.module_compile import is_compiled
from rannc_backend.errors import GenerationError, RanksDifferError
from rannc_backend.integrations.tried_versions import mention_untried
from rannc_backend.runtime.agreement import agree, failing_together
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.torch_internals import root_of
from rannc_backend.runtime.world import World
from rannc_backend.session_registry import REGISTRY

_STEP = "a step of generate"
# Tokens of the same sequences as these; what goes with an encoder's prompts is padded at the other end.
_PROMPTS = "input_ids"
_DECODER = "decoder_"
_MASK = "attention_mask"
# Every row of an output would be gathered anew in each step.
_REFUSED = ("output_attentions", "output_hidden_states")


def generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Generates tokens through the stages, as ``model.generate``. Collective; each rank gives its own prompts.

    There is no key-value cache: each step computes all tokens so far, with one compilation for all lengths. Where a
    whole model fits into a rank's memory, ``model.generate`` inside `rannc_backend.gathered` has the cache.

    Args:
        model: A model of transformers with ``generate``, compiled by ``torch.compile(model, backend="rannc")`` or
            ``model.compile(backend="rannc")``, in ``eval`` mode.
        args, kwargs: As of ``model.generate``; with options of generation the same on all ranks.

    Returns:
        What ``model.generate(..., use_cache=False)`` returns in one process for the prompts of this rank.

    Raises:
        GenerationError: The model or an argument does not go through stages; it says which.
    """
    root: Any = root_of(model)
    world = bootstrap.start()
    if not callable(getattr(root, "generate", None)):
        raise GenerationError(
            f"{type(root).__name__} has no method generate",
            cure="give a model of transformers that generates.",
        )
    if world.size == 1 or REGISTRY.is_gathered(root):
        with gathered(root):
            return root.generate(*args, **kwargs)
    with failing_together(world, "generate"):
        _check(model, root, kwargs)
        import transformers

        mention_untried(transformers)
        steps = _Steps(compiled=model, world=world, is_decoder=not root.config.is_encoder_decoder)
        with torch.no_grad():
            found = _twin(root, steps).generate(*args, **kwargs | {"use_cache": False})
            steps.take_part()
        return found


def _check(model: nn.Module, root: Any, kwargs: Mapping[str, Any]) -> None:
    if not is_compiled(model):
        raise GenerationError(
            "the model is not compiled for this backend",
            cure='compile it before: model.compile(backend="rannc"), or give what torch.compile returned.',
        )
    if root.training:
        raise GenerationError(
            "the model is in training mode, where its dropout would choose the tokens",
            cure="call model.eval() before.",
        )
    if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
        raise GenerationError(
            "generation through stages keeps no key-value cache",
            cure="leave use_cache out, or generate inside `with rannc_backend.gathered(model):`, with a cache.",
        )
    told = kwargs.get("generation_config")
    for name in _REFUSED:
        if kwargs.get(name) or getattr(told, name, False):
            raise GenerationError(
                f"{name} is not given by generation through stages",
                cure="leave it out, or generate inside `with rannc_backend.gathered(model):`.",
            )


@dataclass(slots=True, kw_only=True)
class _Steps:
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
        self.last = _inputs_of(inputs)
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
        answers = agree(self.world, "a step of generate", [is_done, own])
        if all(done for done, _ in answers):
            return None
        shapes = [sizes for _, sizes in answers]
        if any(_kinds(each) != _kinds(shapes[0]) for each in shapes):
            cure = "give each rank a prompt, and the same kinds of arguments."
            raise RanksDifferError(
                "inputs of the model in a step of generate", value_by_rank=list(map(str, shapes)), cure=cure
            )
        # Those that are done count, too: lengths grow, and a graph serves lengths that change.
        wanted = {
            name: [max(sizes) for sizes in zip(*(each[name] for each in shapes), strict=True)] for name in own
        }
        active = [sizes for done, sizes in answers if not done]
        decoders = [
            {name: sizes for name, sizes in each.items() if name.startswith(_DECODER)} for each in active
        ]
        if not self.is_decoder and any(each != decoders[0] for each in decoders):
            raise GenerationError(
                "decoders have begun with different numbers of tokens on the ranks",
                cure="give prompts of the decoder the same length on all ranks.",
            )
        padded = self._padded(wanted, filler=0)
        result = self.compiled(**padded)
        if not self.is_checked and any(each != wanted for each in active):
            self.is_checked = True
            self._check_padding(wanted, result)
        return result

    def _padded(self, wanted: Mapping[str, list[int]], *, filler: int) -> dict[str, Any]:
        """The last inputs at these lengths. ``filler``: the token in the padding."""
        found = dict(self.last)
        for name, value in _tensors(self.last).items():
            missing = [size - own for size, own in zip(wanted[name], value.shape[1:], strict=True)]
            pairs = [
                each for size in reversed(missing) for each in ((size, 0) if self.is_decoder else (0, size))
            ]
            if any(pairs):
                found[name] = nn.functional.pad(value, pairs, value=filler if name == _PROMPTS else 0)
        return found

    def _check_padding(self, wanted: Mapping[str, list[int]], result: Any) -> None:
        """Whether the model looks at what is masked: with other tokens there, the logits are the same. Collective."""
        again = self.compiled(**self._padded(wanted, filler=1))
        # Of a model that leaves masked tokens out; others differ by much more than rounding.
        alike = torch.allclose(result.logits[:, -1], again.logits[:, -1], rtol=1e-4, atol=1e-5)
        if not all(agree(self.world, "whether padding is left out", alike)):
            raise GenerationError(
                "the model computes other tokens where padding has other values, though it is masked",
                cure="give prompts of the same length on all ranks, or generate inside `with "
                "rannc_backend.gathered(model):`.",
            )


def _kinds(shapes: Mapping[str, list[int]]) -> dict[str, int]:
    return {name: len(sizes) for name, sizes in shapes.items()}


def _tensors(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim() > 1
    }


def _inputs_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs as the stages get them, of those that ``generate`` makes."""
    found = {name: value for name, value in inputs.items() if value is not None}
    if "past_key_values" in found:
        raise GenerationError(
            "generate gives the model a key-value cache, which generation through stages does not keep",
            cure="use one of greedy search, sampling and beam search, or generate inside `with "
            "rannc_backend.gathered(model):`.",
        )
    # Counts all tokens, of this rank's length; models make it themselves.
    found.pop("cache_position", None)
    # Whole prompts are given to a model that is cut into an encoder and a decoder (`_Prompts`).
    encoded = found.pop("encoder_outputs", None)
    if encoded is not None:
        found[_PROMPTS] = encoded.last_hidden_state[..., 0]
    # transformers leaves out a mask that hides nothing here; there may be padding on other ranks.
    if _PROMPTS in found and _MASK not in found:
        found[_MASK] = torch.ones_like(found[_PROMPTS])
    return found


class _Prompts(nn.Module):
    """In the place of an encoder: its "hidden states" are the prompts, which each step gives to the model."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=input_ids[..., None])


def _twin(root: nn.Module, steps: Callable[..., Any]) -> Any:
    """The model with all that it has, whose calls are ``steps``."""
    original: Any = type(root)
    twin = object.__new__(_twin_class(original))
    twin.__dict__ = dict(root.__dict__)
    twin._steps = steps
    return twin


@functools.cache
def _twin_class(original: Any) -> Any:
    def call(self: Any, **kwargs: Any) -> Any:
        return self._steps(**kwargs)

    def get_encoder(self: Any, *args: Any, **kwargs: Any) -> nn.Module:
        return _Prompts()

    return type(original.__name__, (original,), {"__call__": call, "get_encoder": get_encoder})
