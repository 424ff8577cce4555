"""Hugging Face models in small configurations with random weights; nothing is downloaded.

In: nothing. Out: `HUGGING_FACE`, entries by name. Terms as in model_entry.py. Every model computes its loss
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.model_entry import EXACT, FLOAT32_INSIDE, Batch, Entry

VOCABULARY = 37
LENGTH = 8
IGNORED = -100


def _causal(rows: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    # Rows are padded on the right by their number modulo 4, so that micro-batches differ in their counts.
    padding = torch.arange(LENGTH).unsqueeze(0) >= LENGTH - (torch.arange(rows) % 4).unsqueeze(1)
    return {
        "input_ids": tokens,
        "attention_mask": (~padding).long(),
        "labels": tokens.masked_fill(padding, IGNORED),
    }


def _masked(rows: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    batch = _causal(rows, generator, dtype)
    hidden = torch.rand(rows, LENGTH, generator=generator) < 0.5
    # The first word is always to be guessed: a batch without any label has no mean.
    hidden[:, 0] = True
    batch["labels"] = batch["labels"].masked_fill(~hidden, IGNORED)
    batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 1)
    return batch


def _images(size: int) -> Callable[[int, torch.Generator, torch.dtype], Batch]:
    def make(rows: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
        pixels = torch.randn(rows, 3, size, size, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels.to(dtype), "labels": torch.randint(5, (rows,), generator=generator)}

    return make


def _gpt2(dtype: torch.dtype, *, use_cache: bool = False) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=use_cache,
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def _bert(dtype: torch.dtype) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config).to(dtype)


# Decoders with fewer heads for keys and values than for queries.
_GROUPED: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip


def _llama(dtype: torch.dtype) -> nn.Module:
    config = transformers.LlamaConfig(**_GROUPED, intermediate_size=32)
    return transformers.LlamaForCausalLM(config).to(dtype)


def mixtral(dtype: torch.dtype, *, experts: str = "batched_mm") -> nn.Module:
    """Experts for each token; `experts`: how they are computed, of which "batched_mm" computes each token by
    itself.
    """
    config = transformers.MixtralConfig(**_GROUPED, intermediate_size=24, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config).to(dtype)
    model.set_experts_implementation(experts)
    return model


def _vit(dtype: torch.dtype) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config).to(dtype)


def _resnet(dtype: torch.dtype) -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[8, 8, 16], depths=[1, 1, 1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config).to(dtype)


def _loss(outputs: Any, batch: Batch) -> Tensor:
    return outputs.loss


def _logits(outputs: Any) -> Mapping[str, Tensor]:
    return {"logits": outputs.logits}


def _logits_and_cache(outputs: Any) -> Mapping[str, Tensor]:
    rows = {"logits": outputs.logits}
    for index, layer in enumerate(outputs.past_key_values.layers):
        rows |= {f"keys.{index}": layer.keys, f"values.{index}": layer.values}
    return rows


def _entry(name: str, build: Callable[[torch.dtype], nn.Module], make_batch: Any, **options: Any) -> Entry:
    defaults: dict[str, Any] = {"rows_of": _logits, "deep": True}
    return Entry(
        name=name,
        build=lambda dtype: build(dtype).train(),
        make_batch=make_batch,
        loss_of=_loss,
        loss_inside=True,
        positional=(),
        **(defaults | options),
    )


# Gradients of attention's key biases are zero but for rounding; Adam must not turn float32 noise into full
# steps.
_NOISY: Mapping[str, Any] = {"tolerance": FLOAT32_INSIDE, "adam_epsilon": 1e-3}
HUGGING_FACE: Mapping[str, Entry] = {
    entry.name: entry
    for entry in (
        _entry("gpt2", _gpt2, _causal, shared=frozenset({"transformer.wte.weight"}), **_NOISY),
        _entry(
            "gpt2_cache",
            lambda dtype: _gpt2(dtype, use_cache=True),
            _causal,
            shared=frozenset({"transformer.wte.weight"}),
            rows_of=_logits_and_cache,
            **_NOISY,
        ),
        _entry(
            "bert",
            _bert,
            _masked,
            shared=frozenset({"bert.embeddings.word_embeddings.weight"}),
            tolerance=EXACT,
            adam_epsilon=1e-4,
        ),
        _entry("llama", _llama, _causal, **_NOISY),
        _entry("mixtral", mixtral, _causal, **_NOISY),
        _entry("vit", _vit, _images(8), tolerance=EXACT, adam_epsilon=1e-4),
        _entry("resnet", _resnet, _images(16), tolerance=EXACT, batch_statistics=True, adam_epsilon=1e-4),
    )
}
