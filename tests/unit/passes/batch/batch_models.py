"""The small models on which the batch passes are tested: name -> (module, inputs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Built = tuple[nn.Module, dict[str, Any]]


def _tokens(rows: int, length: int, vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length))


def _padded_labels(rows: int, length: int, vocab: int) -> torch.Tensor:
    """Labels with padding of uneven length: row r keeps its first 1 + (5 r) % length labels."""
    labels = _tokens(rows, length, vocab)
    for row in range(rows):
        labels[row, 1 + (5 * row) % length :] = -100
    return labels


class Loss(nn.Module):
    """A model followed by a loss on its output."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.model(x)
        return self.loss(out, y), out


def mlp(rows: int) -> Built:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return Loss(model, F.cross_entropy), dict(x=torch.randn(rows, 5), y=torch.randint(0, 3, (rows,)))


def conv_eval(rows: int) -> Built:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    return Loss(model, F.mse_loss).eval(), dict(x=torch.randn(rows, 3, 8, 8), y=torch.randn(rows, 3))


def gpt2(rows: int) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=23, n_positions=16, use_cache=False)
    return GPT2LMHeadModel(config).eval(), dict(
        input_ids=_tokens(rows, 9, 23), labels=_padded_labels(rows, 9, 23)
    )


def gpt2_masked(rows: int) -> Built:
    model, inputs = gpt2(rows)
    return model, {**inputs, "attention_mask": (inputs["labels"] != -100).long()}


def bert(rows: int) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=24, vocab_size=23,
        max_position_embeddings=16,
    )  # fmt: skip
    labels = _padded_labels(rows, 9, 23)
    mask = torch.ones(rows, 9, dtype=torch.long)
    mask[::2, 7:] = 0
    return BertForMaskedLM(config).eval(), dict(
        input_ids=_tokens(rows, 9, 23), attention_mask=mask, labels=labels
    )


def llama(rows: int) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
        vocab_size=23, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    mask = torch.ones(rows, 9, dtype=torch.long)
    mask[::2, 7:] = 0
    labels = _padded_labels(rows, 9, 23)
    return LlamaForCausalLM(config).eval(), dict(
        input_ids=_tokens(rows, 9, 23), attention_mask=mask, labels=labels
    )


def llama_sequence_classification(rows: int) -> Built:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
        vocab_size=23, max_position_embeddings=16, use_cache=False, num_labels=3, pad_token_id=0,
        problem_type="single_label_classification",
    )  # fmt: skip
    return LlamaForSequenceClassification(config).eval(), dict(
        input_ids=_tokens(rows, 9, 23), labels=torch.randint(0, 3, (rows,))
    )


def vit(rows: int) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=3, problem_type="single_label_classification",
    )  # fmt: skip
    return ViTForImageClassification(config).eval(), dict(
        pixel_values=torch.randn(rows, 3, 8, 8), labels=torch.randint(0, 3, (rows,))
    )


def resnet(rows: int) -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        num_labels=3,
        problem_type="single_label_classification",
    )
    return ResNetForImageClassification(config).eval(), dict(
        pixel_values=torch.randn(rows, 3, 16, 16), labels=torch.randint(0, 3, (rows,))
    )


def t5(rows: int) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=1, d_model=16, d_kv=8, num_heads=2, d_ff=24, vocab_size=23, use_cache=False, decoder_start_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval(), dict(
        input_ids=_tokens(rows, 9, 23), labels=_padded_labels(rows, 6, 23)
    )


MODELS: dict[str, Callable[[int], Built]] = {
    "mlp": mlp,
    "conv_eval": conv_eval,
    "gpt2": gpt2,
    "gpt2_masked": gpt2_masked,
    "bert": bert,
    "llama": llama,
    "llama_sequence_classification": llama_sequence_classification,
    "vit": vit,
    "resnet": resnet,
    "t5": t5,
}
