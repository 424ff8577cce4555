"""`generate` of Hugging Face's models through the stages of their plan: `model.generate` with every forward on all ranks.

In: a compiled model, and what its ``generate`` takes, on each rank for its own prompts. Out: the tokens that one process
gives for these prompts. Ranks may have different numbers of prompts, lengths and ends: in every step they tell each other
their lengths, shorter prompts are padded at the left (at the right for an encoder) and masked, and a rank that is done
gives its last inputs again until all are. Keys and values stay on the stages that compute them.

Tried with transformers 5.24: GPT-2, Llama, T5.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rannc_backend.api.gathered import gathered
from rannc_backend.capture.module_compile import is_compiled
from rannc_backend.errors import GenerationError
from rannc_backend.integrations.generation_steps import CACHES, CachedSteps, Steps
from rannc_backend.integrations.kept_cache import GATHERED, OwnCache, holds
from rannc_backend.integrations.tried_versions import mention_untried
from rannc_backend.log.logger import say_once
from rannc_backend.runtime.agreement import failing_together
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.torch_internals import root_of
from rannc_backend.session_registry import REGISTRY

logger = logging.getLogger(__name__)

# Every row of an output would be gathered anew in each step.
_REFUSED = ("output_attentions", "output_hidden_states")
_OTHER_CACHES = ("cache_implementation", "prefill_chunk_size")


def generate(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Generates tokens through the stages, as ``model.generate``. Collective; each rank gives its own prompts.

    Keys and values stay on the stages that compute them, and grow there: [rows, heads, tokens, width] for each layer of
    the rank's stages. With ``use_cache=False`` nothing is kept, and each step computes all tokens so far.

    Args:
        model: A model of transformers with ``generate``, compiled by ``torch.compile(model, backend="rannc")`` or
            ``model.compile(backend="rannc")``, in ``eval`` mode.
        args, kwargs: As of ``model.generate``; with options of generation the same on all ranks.

    Returns:
        What ``model.generate`` returns in one process for the prompts of this rank, without the cache.

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
        steps: Steps
        common: dict[str, Any] = {
            "compiled": model,
            "world": world,
            "is_decoder": not root.config.is_encoder_decoder,
        }
        if _is_cached(root, kwargs):
            steps = CachedSteps(**common, root=root, cache_name=str(_cache_name(root)))
            kwargs |= {"use_cache": True, steps.cache_name: steps.own}
        else:
            steps = Steps(**common)
            kwargs |= {"use_cache": False}
        with torch.no_grad():
            twin = _twin(root, steps)
            found = type(twin).generate(
                twin, *args, **kwargs
            )  # a Trainer's model has another one of its own meanwhile
            steps.take_part()
        return _without_cache(found)


def _without_cache(found: Any) -> Any:
    """Of a result with members (``return_dict_in_generate``): all but the cache, of which this rank has no tensor."""
    if not isinstance(found, dict):
        return found
    return type(found)(**{name: value for name, value in found.items() if not isinstance(value, OwnCache)})


def _cache_name(root: Any) -> str | None:
    """The argument of the model's forward that takes a cache of transformers."""
    names = inspect.signature(type(root).forward).parameters
    return next((name for name in CACHES if name in names), None)


def _is_cached(root: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether keys and values are kept: unless the call or the model's own settings say no, or layers keep other things."""
    asked = kwargs.get("use_cache")
    settings = [kwargs.get("generation_config"), getattr(root, "generation_config", None)]
    told = [asked, *(getattr(each, "use_cache", None) for each in settings)]
    if not next((each for each in told if each is not None), True):
        return False
    if _cache_name(root) is not None and holds(root.config):
        return True
    problem = f"layers of {type(root).__name__} keep other things than keys and values, or no cache"
    if asked:
        raise GenerationError(problem, cure=f"leave use_cache out, or {GATHERED}")
    say_once(logger, f"{problem}: each step of generate computes all tokens", level=logging.WARNING)
    return False


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
    for name in CACHES:
        if kwargs.get(name) is not None:
            raise GenerationError(
                f"{name} is a key-value cache of one process, and stages keep their own",
                cure=f"leave it out and give whole prompts, or {GATHERED}",
            )
    told = kwargs.get("generation_config")
    for name in _REFUSED:
        if kwargs.get(name) or getattr(told, name, False):
            raise GenerationError(
                f"{name} is not given by generation through stages", cure=f"leave it out, or {GATHERED}"
            )
    for name in _OTHER_CACHES:
        if kwargs.get(name) is not None or getattr(told, name, None) is not None:
            raise GenerationError(
                f"{name} chooses another key-value cache than the one that stays on stages",
                cure=f"leave it out, or {GATHERED}",
            )


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
