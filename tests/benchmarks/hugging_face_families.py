"""One step of small models of many Hugging Face families over two stages, beside one process; prints a row of
a table for each.

    mpirun -np 2 python tests/benchmarks/hugging_face_families.py [FAMILY ...]

In: nothing; configurations are small and weights random. Out: on rank 0 a line per family: the model's class,
and how far any gradient is from that of one process in float64, relative, or why the model is refused. The
table is in docs/models.md.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from rannc_backend.errors import RanncError

VOCABULARY, LENGTH, ROWS = 40, 8, 4
OPTIONS = {
    "partition_num": 2,
    "pipeline_num": 2,
    "stage_compiler": "eager",
    "cluster": "generic-cpu",
    "costs": "rules",
}
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")

Batch = dict[str, Any]
Settings = Mapping[str, Any]


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH))


def text(**labels: Tensor) -> Batch:
    """Tokens, all of them attended to, and labels."""
    return {"input_ids": _tokens(), "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long), **labels}


def language() -> Batch:
    """Labels are tokens."""
    return text(labels=_tokens())


def classes() -> Batch:
    """A class per row."""
    return text(labels=torch.randint(2, (ROWS,)))


def token_classes() -> Batch:
    """A class per token."""
    return text(labels=torch.randint(2, (ROWS, LENGTH)))


def answers() -> Batch:
    """Where the answer begins and ends."""
    return text(start_positions=torch.randint(LENGTH, (ROWS,)), end_positions=torch.randint(LENGTH, (ROWS,)))


def images(size: int = 16) -> Batch:
    """Pictures and a class for each."""
    return {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.randint(2, (ROWS,))}


def large_images() -> Batch:
    """For models that halve the size often."""
    return images(32)


def spectra() -> Batch:
    """Sound as bands over time, and tokens."""
    return {"input_features": torch.randn(ROWS, 8, 32), "labels": _tokens()}


def pairs() -> Batch:
    """Texts and pictures that belong together."""
    return {**text(), "pixel_values": torch.randn(ROWS, 3, 16, 16), "return_loss": True}


_SMALL: Settings = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_SPECIAL: Settings = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_PLAIN: Settings = {**_SMALL, **_SPECIAL, "max_position_embeddings": 32, "use_cache": False}
_GROUPED: Settings = {**_PLAIN, "num_key_value_heads": 2}
_NO_DROPOUT: Settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER: Settings = {**_SMALL, **_NO_DROPOUT, "max_position_embeddings": 32}
_PICTURE: Settings = (
    {key: value for key, value in _SMALL.items() if key != "vocab_size"}
    | _NO_DROPOUT
    | {"image_size": 16, "patch_size": 4}
)
_TWO_PARTS: Settings = {
    **_SPECIAL, "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "use_cache": False,
    "decoder_start_token_id": 0,
}  # fmt: skip
_GPT2: Settings = {
    **_SPECIAL, "vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
}  # fmt: skip
_NO_RESIDUAL_DROPOUT: Settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}


@dataclass(frozen=True, slots=True)
class Family:
    """`prefix` of the configuration's class, the model's class without it, a batch, and the configuration."""

    prefix: str
    head: str
    make_batch: Callable[[], Batch]
    settings: Settings
    config: str = ""  # where its prefix is another
    prepare: Callable[[Any], None] = field(default=lambda model: None)

    @property
    def model_class(self) -> str:
        return self.prefix + self.head

    def build(self) -> nn.Module:
        """The model, training, in float64."""
        config = getattr(transformers, f"{self.config or self.prefix}Config")(**self.settings)
        model = getattr(transformers, self.model_class)(config).double().train()
        self.prepare(model)
        return model


def _causal(prefix: str, settings: Settings = _PLAIN, **more: Any) -> Family:
    return Family(prefix, "ForCausalLM", language, {**settings, **more})


def _each_token_by_itself(model: Any) -> None:
    model.set_experts_implementation("batched_mm")


_MIXTRAL = _causal("Mixtral", _GROUPED, num_local_experts=4, num_experts_per_tok=2)
_QWEN_MOE = _causal(
    "Qwen3Moe", _GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT2", "LMHeadModel", language, _GPT2),
    "gpt2, classes": Family("GPT2", "ForSequenceClassification", classes, _GPT2),
    "gpt_neo": _causal(
        "GPTNeo", {**_SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 32},
        attention_types=[[["global", "local"], 1]], window_size=4, use_cache=False, resid_dropout=0.0, embed_dropout=0.0,
        attention_dropout=0.0,
    ),
    "gpt_neox": _causal("GPTNeoX"),
    "gptj": _causal("GPTJ", _GPT2, rotary_dim=4),
    "opt": _causal("OPT", ffn_dim=48, dropout=0.0, word_embed_proj_dim=32),
    "bloom": _causal("Bloom", {**_SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}, use_cache=False),
    "falcon": _causal("Falcon"),
    "mpt": _causal("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY, "max_seq_len": 32, "use_cache": False}),
    "llama": _causal("Llama", _GROUPED),
    "mistral": _causal("Mistral", _GROUPED),
    "qwen2": _causal("Qwen2", _GROUPED),
    "qwen3": _causal("Qwen3", _GROUPED, head_dim=8),
    "gemma": _causal("Gemma", _GROUPED, head_dim=8),
    "gemma2": _causal("Gemma2", _GROUPED, head_dim=8, sliding_window=4),
    "gemma3": Family("Gemma3", "ForCausalLM", language, {**_GROUPED, "head_dim": 8, "sliding_window": 4}, config="Gemma3Text"),
    "phi": _causal("Phi", _GROUPED, **_NO_RESIDUAL_DROPOUT),
    "phi3": _causal("Phi3", _GROUPED, **_NO_RESIDUAL_DROPOUT),
    "stablelm": _causal("StableLm", _GROUPED),
    "starcoder2": _causal("Starcoder2", _GROUPED, residual_dropout=0.0, embedding_dropout=0.0),
    "olmo2": _causal("Olmo2", _GROUPED),
    "cohere": _causal("Cohere", _GROUPED),
    "granite": _causal("Granite", _GROUPED),
    "mamba": _causal("Mamba", {**_SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "mixtral": _MIXTRAL,
    "mixtral, batched_mm": replace(_MIXTRAL, prepare=_each_token_by_itself),
    "qwen3_moe, batched_mm": replace(_QWEN_MOE, prepare=_each_token_by_itself),
    "bert": Family("Bert", "ForMaskedLM", language, _ENCODER),
    "bert, classes": Family("Bert", "ForSequenceClassification", classes, _ENCODER),
    "bert, answers": Family("Bert", "ForQuestionAnswering", answers, _ENCODER),
    "bert, tokens": Family("Bert", "ForTokenClassification", token_classes, _ENCODER),
    "roberta": Family("Roberta", "ForMaskedLM", language, _ENCODER),
    "electra": Family("Electra", "ForMaskedLM", language, {**_ENCODER, "embedding_size": 16}),
    "albert": Family("Albert", "ForMaskedLM", language, {**_ENCODER, "embedding_size": 16}),
    "distilbert": Family(
        "DistilBert", "ForMaskedLM", language,
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0},
    ),
    "deberta_v2": Family(
        "DebertaV2", "ForMaskedLM", language,
        {**_ENCODER, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["c2p", "p2c"]},
    ),
    "mpnet": Family("MPNet", "ForMaskedLM", language, _ENCODER),
    "modernbert": Family("ModernBert", "ForMaskedLM", language, {**_SMALL, **_SPECIAL, "cls_token_id": 0, "sep_token_id": 1}),
    "t5": Family(
        "T5", "ForConditionalGeneration", language,
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
         "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 2},
    ),
    "bart": Family("Bart", "ForConditionalGeneration", language, {**_TWO_PARTS, "max_position_embeddings": 32, "forced_eos_token_id": 1}),
    "marian": Family("Marian", "MTModel", language, {**_TWO_PARTS, "max_position_embeddings": 32, "forced_eos_token_id": 1}),
    "whisper": Family(
        "Whisper", "ForConditionalGeneration", spectra,
        {**_TWO_PARTS, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
    ),
    "vit": Family("ViT", "ForImageClassification", images, _PICTURE),
    "deit": Family("DeiT", "ForImageClassification", images, _PICTURE),
    "beit": Family("Beit", "ForImageClassification", images, {**_PICTURE, "drop_path_rate": 0.0}),
    "dinov2": Family("Dinov2", "ForImageClassification", images, {**_PICTURE, "drop_path_rate": 0.0}),
    "swin": Family(
        "Swin", "ForImageClassification", large_images,
        {**_NO_DROPOUT, "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4,
         "drop_path_rate": 0.0},
    ),
    "convnext": Family("ConvNext", "ForImageClassification", large_images, {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}),
    "clip": Family(
        "CLIP", "Model", pairs,
        {"text_config": {**_SMALL, **_SPECIAL, "max_position_embeddings": 32}, "vision_config": dict(_PICTURE), "projection_dim": 16},
    ),
    "wav2vec2": Family(
        "Wav2Vec2", "ForSequenceClassification", lambda: {"input_values": torch.randn(ROWS, 800), "labels": torch.randint(2, (ROWS,))},
        {**_SMALL, "conv_dim": (8, 8), "conv_stride": (5, 5), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
         "feat_extract_norm": "layer", "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False},
    ),
}  # fmt: skip


def _in_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def rank_of_environment() -> int:
    """Before torch.distributed knows."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)


def worst_error(family: Family, rank: int) -> float:
    """Relative, of every gradient that this rank has.

    Raises:
        RanncError: the model is refused.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = family.build()
    alone = copy.deepcopy(model)
    batch = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in family.make_batch().items()
    }
    own = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    compiled = torch.compile(model, backend="rannc", options=OPTIONS)
    loss = compiled(
        **{name: value[own] if isinstance(value, Tensor) else value for name, value in batch.items()}
    ).loss
    loss.backward()
    alone(**batch).loss.backward()
    worst = 0.0
    for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
        if parameter.grad is not None and parameter.numel():
            exact = torch.zeros_like(parameter) if other.grad is None else other.grad
            worst = max(worst, float((parameter.grad - exact).norm() / exact.norm().clamp_min(1e-9)))
    return worst


def first_cause(error: BaseException) -> str:
    """The innermost error of ours, its first line."""
    while error.__cause__ is not None and not isinstance(error, RanncError):
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def main(names: list[str]) -> None:
    """Print the rows of `names`, of all by default."""
    rank = rank_of_environment()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in names or list(FAMILIES):
        try:
            worst = worst_error(FAMILIES[name], rank)
            worsts: list[Any] = [None, None]
            torch.distributed.all_gather_object(worsts, worst)
            result = f"{max(worsts):.1e}"
        except Exception as error:  # noqa: BLE001 - the table says what it was
            result = first_cause(error)
        if rank == 0:
            sys.stdout.write(f"| {name} | `{FAMILIES[name].model_class}` | {result} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
