"""Models to plan on a machine that could never hold them: `rannc plan examples/planning_models.py:gpt2 --np
32 --cluster a100-80gb ...`.

In: nothing, or values of the model's configuration to change. Out: each factory gives ``(model, args,
kwargs)``, where the keyword arguments are an example batch of two samples; its batch size is not what is
planned for. `rannc plan` calls a factory under ``torch.device("meta")``: no parameter gets any memory. All
compute their loss inside of the model, and none is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Tensor]]

_ROWS = 2


def bert(*, length: int = 512, **changes: Any) -> Example:
    """BERT-large, masked words: 335 million parameters."""
    values = _transformer(1024, 24, 16) | {"intermediate_size": 4096, "max_position_embeddings": length}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**(values | changes)))
    return model, (), _text(length)


def gpt2(*, length: int = 1024, **changes: Any) -> Example:
    """GPT-2 XL: 1.6 billion parameters."""
    values = {"n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": length, "use_cache": False}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**(values | changes)))
    return model, (), _text(length)


def llama(*, length: int = 2048, **changes: Any) -> Example:
    """Llama 2 7B: 6.7 billion parameters."""
    values = _transformer(4096, 32, 32) | {
        "intermediate_size": 11008,
        "max_position_embeddings": length,
        "use_cache": False,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(values | changes)))
    return model, (), _text(length)


def heavy_head(*, length: int = 512, **changes: Any) -> Example:
    """A GPT-2 of 12 layers with a vocabulary of 256,000 words, as multilingual models have: most of the work
    is in the head.
    """
    values = {
        "n_embd": 1024,
        "n_layer": 12,
        "n_head": 16,
        "n_positions": length,
        "vocab_size": 256000,
        "use_cache": False,
    }
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**(values | changes)))
    return model, (), _text(length)


def t5(*, length: int = 512, **changes: Any) -> Example:
    """T5-3B, encoder and decoder: 2.9 billion parameters."""
    values = {
        "d_model": 1024,
        "d_kv": 128,
        "d_ff": 16384,
        "num_layers": 24,
        "num_heads": 32,
        "use_cache": False,
    }
    values |= {"decoder_start_token_id": 0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**(values | changes)))
    return model, (), _text(length)


def vit(*, image_size: int = 224, **changes: Any) -> Example:
    """ViT-huge with patches of 14 x 14: 0.6 billion parameters."""
    values = _transformer(1280, 32, 16) | {
        "intermediate_size": 5120,
        "patch_size": 14,
        "image_size": image_size,
        "num_labels": 1000,
    }
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**(values | changes)))
    return model, (), _images(image_size)


def resnet(*, image_size: int = 224, **changes: Any) -> Example:
    """ResNet-152, eight times as wide: 3.7 billion parameters."""
    values = {
        "embedding_size": 512,
        "hidden_sizes": [2048, 4096, 8192, 16384],
        "depths": [3, 8, 36, 3],
        "num_labels": 1000,
    }
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**(values | changes)))
    return model, (), _images(image_size)


def bert_4_9b() -> Example:
    """BERT with hidden size 2048 and 96 layers: 4.9 billion parameters, the largest model that RaNNC's paper
    planned by search.
    """
    return bert(hidden_size=2048, num_hidden_layers=96, num_attention_heads=32, intermediate_size=8192)


def bert_100b() -> Example:
    """BERT with hidden size 8192 and 124 layers: 100 billion parameters."""
    return bert(hidden_size=8192, num_hidden_layers=124, num_attention_heads=64, intermediate_size=32768)


def _transformer(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}


def _text(length: int) -> dict[str, Tensor]:
    tokens = torch.zeros(_ROWS, length, dtype=torch.long)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.zeros_like(tokens),
    }


def _images(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(_ROWS, 3, size, size), "labels": torch.zeros(_ROWS, dtype=torch.long)}
