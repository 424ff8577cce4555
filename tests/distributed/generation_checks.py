"""Checks of generation by models whose parameters are spread over ranks: the tokens of one process.

In: a context. Out: findings. Ranks have prompts of their own number and length, and end at tokens of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

from rannc_backend import gathered
from rannc_backend.integrations import generation
from rannc_backend.integrations.generation import generate
from rannc_backend.session_registry import REGISTRY
from tests.distributed.harness.context import Context

NUM_TOKENS = 50
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": NUM_TOKENS}


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, **_SPECIAL)
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **_SPECIAL,
    )
    return transformers.LlamaForCausalLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        num_layers=2, d_model=32, d_ff=64, num_heads=2, d_kv=16, decoder_start_token_id=0, **_SPECIAL
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = {"gpt2": _gpt2, "llama": _llama, "t5": _t5}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, other ends": {"do_sample": False, "ends": True},
    "sampling": {"do_sample": True, "top_k": 0, "ends": True},
    "beams": {"do_sample": False, "num_beams": 3, "ends": True},
    "sampled beams": {"do_sample": True, "num_beams": 2, "ends": True},
    "processors": {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 3, "ends": True},
}


def _make(context: Context) -> nn.Module:
    model = MODELS[context.case.parameters["model"]]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # or all tokens are as likely, and one comes for ever
    return model


def _prompts(rank: int, *, length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, NUM_TOKENS, (1 + 2 * rank, length), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones_like(ids)
    # Shorter than the others of this rank.
    ids[0, :2], mask[0, :2] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _arguments(way: Mapping[str, Any], rank: int) -> dict[str, Any]:
    ends = [token for token in range(3, NUM_TOKENS) if (token * 7 + rank) % 5 == 0]
    told = {name: value for name, value in way.items() if name != "ends"}
    more = {"eos_token_id": ends} if "ends" in way else {}
    return {"max_new_tokens": 8 + rank, **told, **more}


def _compare(context: Context, what: str, make: Callable[..., Any], alone: Any, ways: Any) -> list[int]:
    prompts = _prompts(context.rank, length=5 + 2 * context.rank)
    lengths = []
    for name in ways:
        arguments = _arguments(WAYS[name], context.rank)
        found = []
        for call in (alone.generate, make):
            torch.manual_seed(context.rank + 3)
            found.append((call(**prompts, **arguments), torch.rand(1)))
        (expected, after), (tokens, own_after) = found
        context.findings.that(
            torch.equal(expected, tokens), f"{what}, {name}: {tokens.tolist()} is not {expected.tolist()}"
        )
        context.findings.that(torch.equal(after, own_after), f"{what}, {name}: more numbers were drawn")
        lengths.append(expected.shape[1])
    return lengths


def _train(compiled: Any, alone: nn.Module) -> None:
    ids = torch.randint(3, NUM_TOKENS, (3, 6), generator=torch.Generator().manual_seed(9))
    compiled(input_ids=ids, labels=ids).loss.backward()
    alone.zero_grad()


def generation_equal(context: Context) -> dict[str, Any]:
    """Through the stages and inside `gathered`, before and after the same model has trained."""
    with torch.random.fork_rng():
        model, alone, compiled, _ = context.pair(lambda: _make(context))
    if context.case.parameters.get("in_place"):
        model.compile(**context.compile_arguments())
        compiled = model
    if context.case.parameters.get("trains", True):
        _train(compiled, alone)
    lengths = _compare(context, "stages", lambda **rest: generate(compiled, **rest), alone, WAYS)
    number = len(REGISTRY.sessions[model].compiled)
    context.findings.that(number <= 3, f"compiled {number} times")
    with gathered(model):
        _compare(context, "gathered", compiled.generate, alone, WAYS)
        _compare(context, "both", lambda **rest: generate(compiled, **rest), alone, ["greedy"])
    with mock.patch.object(generation, "mention_untried") as mentioned:
        _compare(context, "stages again", lambda **rest: generate(compiled, **rest), alone, ["beams"])
    seen = {call.args[0].__name__ for call in mentioned.call_args_list}
    context.findings.that(seen == {"transformers"}, f"versions of {seen} are looked at")
    again = len(REGISTRY.sessions[model].compiled)
    context.findings.that(again == number, f"compiled {again - number} times after it was gathered")
    plan = REGISTRY.sessions[model].plan
    if context.case.options.get("training") is False:
        trained = [stage.predicted.optimizer_bytes + stage.predicted.gradient_bytes for stage in plan.stages]
        context.findings.that(not any(trained), f"a plan for training, of {trained} bytes")
    return {"lengths": lengths}


def generation_refused(context: Context) -> dict[str, Any]:
    """What does not go through stages is refused, on all ranks, before any token is chosen."""
    model, _, compiled, _ = context.pair(lambda: _make(context))
    prompts = _prompts(context.rank, length=4)
    find = context.findings
    refused: Mapping[str, tuple[Any, Mapping[str, Any], str]] = {
        "a plain model": (model, {}, "not compiled"),
        "a model that does not generate": (nn.Linear(1, 1), {}, "no method generate"),
        "a cache": (compiled, {"use_cache": True}, "key-value cache"),
        "attentions": (compiled, {"output_attentions": True}, "output_attentions"),
    }
    for what, (which, more, word) in refused.items():
        error = find.raises(
            what, ("GenerationError",), lambda w=which, m=more: generate(w, **prompts, max_new_tokens=2, **m)
        )
        find.that(word in str(error), f"{what}: {error}")
    model.train()
    error = find.raises(
        "training mode", ("GenerationError",), lambda: generate(compiled, **prompts, max_new_tokens=2)
    )
    find.that("eval" in str(error), f"training mode: {error}")
    model.eval()
    _look_at_padding(model)
    uneven = _prompts(context.rank, length=4 + context.rank)
    error = find.raises(
        "padding that counts", ("GenerationError",), lambda: generate(compiled, **uneven, max_new_tokens=2)
    )
    find.that("though it is masked" in str(error), f"padding that counts: {error}")
    return {}


def _look_at_padding(model: nn.Module) -> None:
    """From now on the first token counts for all, whatever its mask says."""
    embed, transformer = model.transformer.wte, model.transformer

    def add_first(module: nn.Module, args: Any, kwargs: Any) -> Any:
        ids = args[0] if args else kwargs["input_ids"]
        return (), kwargs | {"input_ids": None, "inputs_embeds": embed(ids) + embed(ids[:, :1])}

    transformer.register_forward_pre_hook(add_first, with_kwargs=True)


def generation_one_fails(context: Context) -> dict[str, Any]:
    """One rank's own code fails in the midst of it: on all ranks, which then go on."""
    model, alone, compiled, _ = context.pair(lambda: _make(context))

    def fail(ids: Tensor, scores: Tensor) -> Tensor:
        if context.rank == 1 and ids.shape[1] > 8:
            raise ValueError("of this rank's processor")
        return scores

    prompts = _prompts(context.rank, length=6)
    error = context.findings.raises(
        "a processor",
        ("ValueError",),
        lambda: generate(compiled, **prompts, logits_processor=[fail], max_new_tokens=6),
    )
    context.findings.that("of this rank's processor" in str(error), f"another error: {error}")
    _compare(context, "after a failure", lambda **rest: generate(compiled, **rest), alone, ["greedy"])
    return {}
