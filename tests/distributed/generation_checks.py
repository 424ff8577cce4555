"""Checks of generation by models whose parameters are spread over ranks: the tokens of one process.

In: a context. Out: findings. Ranks have prompts of their own number and length, and end at tokens of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

from rannc_backend import gathered
from rannc_backend.integrations import generation, generation_steps
from rannc_backend.integrations.generation import generate
from rannc_backend.kernels.kept_rows import KeptRows
from rannc_backend.runtime.job import bootstrap
from rannc_backend.session_registry import REGISTRY
from tests.distributed.harness.context import Context

NUM_TOKENS = 50
NUM_LAYERS = 2
# Training; without a cache, and prompts and later tokens with one: each for one length and then for all.
_MAX_GRAPHS = 6
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": NUM_TOKENS}


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=NUM_LAYERS, n_embd=32, n_head=2, n_positions=64, **_SPECIAL)
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=NUM_LAYERS,
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
        num_layers=NUM_LAYERS, d_model=32, d_ff=64, num_heads=2, d_kv=16, decoder_start_token_id=0, **_SPECIAL
    )
    return transformers.T5ForConditionalGeneration(config)


def _bart() -> nn.Module:
    config = transformers.BartConfig(
        encoder_layers=1,
        decoder_layers=NUM_LAYERS,
        d_model=32,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        max_position_embeddings=64,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        **_SPECIAL,
    )
    return transformers.BartForConditionalGeneration(config)


def _sliding() -> nn.Module:
    """Its second layer sees the last four tokens alone."""
    config = transformers.Qwen2Config(
        num_hidden_layers=NUM_LAYERS,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention"],
        max_position_embeddings=64,
        **_SPECIAL,
    )
    return transformers.Qwen2ForCausalLM(config)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5,
    "bart": _bart,
    "sliding": _sliding,
}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, other ends": {"do_sample": False, "ends": True},
    "sampling": {"do_sample": True, "top_k": 0, "ends": True},
    "beams": {"do_sample": False, "num_beams": 3, "ends": True},
    "sampled beams": {"do_sample": True, "num_beams": 2, "ends": True},
    "processors": {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 3, "ends": True},
    "greedy, no cache": {"do_sample": False, "ends": True, "use_cache": False},
    "beams, no cache": {"do_sample": False, "num_beams": 3, "ends": True, "use_cache": False},
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


class _WatchedRows(KeptRows):
    """A store that notes its steps: whether each began anew, and the slots that this rank had then."""

    def __init__(self, steps: list[list[tuple[bool, bool, set[int]]]]) -> None:
        super().__init__()
        self.steps: list[tuple[bool, bool, set[int]]] = []
        self.begun = (False, False)
        steps.append(self.steps)

    def begin_step(self, *, are_moved: bool = False, anew: bool = False) -> None:
        self.begun = (are_moved, anew)
        super().begin_step(are_moved=are_moved, anew=anew)

    def end_step(self) -> None:
        self.steps.append((*self.begun, set(self.widths())))
        super().end_step()


@contextmanager
def _watched_stores() -> Iterator[list[list[tuple[bool, bool, set[int]]]]]:
    stores: list[list[tuple[bool, bool, set[int]]]] = []
    make = functools.partial(_WatchedRows, stores)
    with mock.patch.object(generation_steps, "KeptRows", make):
        yield stores


def _check_stores(context: Context, model: nn.Module, stores: list[Any]) -> None:
    """Prompts are computed once; each rank keeps what its stages compute, and nothing else."""
    find = context.findings
    num_cached = sum("use_cache" not in way for way in WAYS.values())
    find.that(len(stores) == num_cached, f"{len(stores)} of {num_cached} ways have a cache")
    replicated = any(len(stage.ranks) > 1 for stage in REGISTRY.sessions[model].plan.stages)
    # The first step is repeated where padding is tried.
    later = [step for steps in stores for step in steps[2:]]
    find.that(any(moved for moved, _, _ in later), "no beam has changed its place")
    wrong = [(moved, anew) for moved, anew, _ in later if anew != (moved and replicated)]
    find.that(not wrong, f"steps that began anew or did not: {wrong[:3]} of {len(later)}")
    slots = set().union(*(own for _, _, own in later))
    parts = bootstrap.start().control.allgather(sorted(slots), what="slots")
    whole = sorted(slot for part in {tuple(part) for part in parts} for slot in part)
    per_layer = 4 if model.config.is_encoder_decoder else 2
    find.that(len(whole) == len(set(whole)) == NUM_LAYERS * per_layer, f"slots of the ranks: {parts}")


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
    with _watched_stores() as stores:
        lengths = _compare(context, "stages", lambda **rest: generate(compiled, **rest), alone, WAYS)
    number = len(REGISTRY.sessions[model].compiled)
    context.findings.that(number <= _MAX_GRAPHS, f"compiled {number} times")
    _check_stores(context, model, stores)
    session, planned = REGISTRY.sessions[model], context.case.num_micro_batches
    numbers = {each.settings.num_micro_batches for each in session.runtimes.values()}
    # A step of one token each is one micro-batch where no other replica has the keys of its rows.
    replicated = any(len(stage.ranks) > 1 for stage in session.plan.stages)
    wanted = {planned} if replicated else {planned, 1}
    context.findings.that(numbers == wanted, f"steps of {numbers} micro-batches, not {wanted}")
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
        "a cache": (compiled, {"cache": transformers.DynamicCache()}, "cache of one process"),
        "a static cache": (compiled, {"cache_implementation": "static"}, "cache_implementation"),
        "prompts in parts": (compiled, {"prefill_chunk_size": 2}, "prefill_chunk_size"),
        "an assistant": (compiled, {"prompt_lookup_num_tokens": 2}, "otherwise than by tokens and beams"),
        "attentions": (compiled, {"output_attentions": True}, "output_attentions"),
    }
    for what, (which, more, word) in refused.items():
        error = find.raises(
            what, ("GenerationError",), lambda w=which, m=more: generate(w, **prompts, max_new_tokens=2, **m)
        )
        find.that(word in str(error), f"{what}: {error}")
    find.raises(
        "a cache on one rank",
        ("CallsDifferError",),
        lambda: generate(compiled, **prompts, max_new_tokens=2, use_cache=context.rank == 0),
    )
    _check_other_layers(context, prompts)
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


def _check_other_layers(context: Context, prompts: Mapping[str, Tensor]) -> None:
    """Layers that keep another state: an error where a cache is asked for, and no cache else."""
    config = transformers.MambaConfig(num_hidden_layers=2, hidden_size=32, state_size=4, **_SPECIAL)
    model = transformers.MambaForCausalLM(config).eval()
    model.compile(**context.compile_arguments())
    error = context.findings.raises(
        "another state",
        ("GenerationError",),
        lambda: generate(model, **prompts, max_new_tokens=2, use_cache=True),
    )
    context.findings.that("keep other things" in str(error), f"another state: {error}")
    is_cached = generation._is_cached(model, {})
    context.findings.that(not is_cached, "another state is kept")


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
