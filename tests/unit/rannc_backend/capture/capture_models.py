"""Models on which capture is tested: name -> (module, keyword inputs), float64 and without dropout.

Names beginning with `hf_` are small configurations of Hugging Face models with random weights; the ten
beginning with `rannc_` are those of RaNNC's own tests (without TorchScript: FunctionModel's loop is written
in plain Python).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rannc_backend.settings.torch_version import is_older

Built = tuple[nn.Module, dict[str, Any]]


class SmallParamModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.fc2(self.fc1(x)) * 2 * 3


class SharedInputModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        y = self.fc1(x)
        return y + self.fc2(y) + self.fc3(y) + self.fc4(y)


class ForkJoinModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        y = self.fc1(x)
        return self.fc4(self.fc2(y) + self.fc3(self.fc3(y)))


class SharedParamModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 3), nn.Linear(3, 3)
        self.fc2.weight = self.fc1.weight

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


class OneOpModel(nn.Module):
    def forward(self, x):
        return x * 2


class TensorMulModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor(3)

    def forward(self, x):
        return x * self.factor


class EmbeddingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)

    def forward(self, x):
        return self.embedding(x)


class FunctionModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)

    def forward(self, x):
        y = x.clone()
        for column in range(x.shape[1]):
            if column % 2 == 1:
                y[:, column] = (y[:, column] + 1) % 10
        return self.embedding(y)


class LossOutModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, y):
        return F.mse_loss(self.fc2(self.fc1(x)), y)


class BasicModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 16, 3)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 6 * 6, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), (2, 2))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        num_features = 1
        for size in x.size()[1:]:
            num_features *= size
        x = x.view(x.size(0), num_features)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class WithLoss(nn.Module):
    """A model followed by cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, y):
        logits = self.model(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def _ids(rows: int, vocab: int = 23, length: int = 9) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length))


def _mlp(rows: int) -> Built:
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 3))
    return WithLoss(model), dict(x=torch.randn(rows, 5), y=torch.randint(0, 3, (rows,)))


def _conv(rows: int) -> Built:
    parts = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 3),
    ]
    return WithLoss(nn.Sequential(*parts)), dict(x=torch.randn(rows, 3, 8, 8), y=torch.randint(0, 3, (rows,)))


def _gpt2(rows: int) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=23, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    ids = _ids(rows)
    return GPT2LMHeadModel(config), dict(input_ids=ids, labels=ids)


def _mask(rows: int) -> torch.Tensor:
    mask = torch.ones(rows, 9, dtype=torch.long)
    mask[0, 6:] = 0
    return mask


def _gpt2_mask(rows: int) -> Built:
    """With its key-value cache, as is the default."""
    model, inputs = _gpt2(rows)
    return model, inputs | dict(attention_mask=_mask(rows))


def _t5(rows: int) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=23, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    )  # fmt: skip
    inputs = dict(input_ids=_ids(rows), attention_mask=_mask(rows), labels=_ids(rows))
    # The cache of an encoder and decoder copies the configuration, which older versions of torch cannot trace
    # (docs/models.md).
    return T5ForConditionalGeneration(config), inputs | (
        {"use_cache": False} if is_older(torch.__version__, (2, 13)) else {}
    )


def _bert(rows: int) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=23,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    labels = torch.where(torch.rand(rows, 9) < 0.4, _ids(rows), -100)
    labels[:, 0] = 1
    return BertForMaskedLM(config), dict(input_ids=_ids(rows), attention_mask=_mask(rows), labels=labels)


def _llama(rows: int) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=23, max_position_embeddings=16,
    )  # fmt: skip
    ids = _ids(rows)
    return LlamaForCausalLM(config), dict(input_ids=ids, labels=ids.clone(), use_cache=False)


def _vit(rows: int) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config), dict(
        pixel_values=torch.randn(rows, 3, 8, 8), labels=torch.randint(0, 3, (rows,))
    )


def _resnet(rows: int) -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=3, layer_type="basic"
    )
    return ResNetForImageClassification(config), dict(
        pixel_values=torch.randn(rows, 3, 32, 32), labels=torch.randint(0, 3, (rows,))
    )


def _vector(model: Callable[[], nn.Module], *shape: int) -> Callable[[int], Built]:
    return lambda rows: (model(), dict(x=torch.randn(rows, *shape)))


MODELS: dict[str, Callable[[int], Built]] = {
    "mlp": _mlp,
    "conv": _conv,
    "hf_gpt2": _gpt2,
    "hf_gpt2_mask": _gpt2_mask,
    "hf_t5": _t5,
    "hf_bert": _bert,
    "hf_llama": _llama,
    "hf_vit": _vit,
    "hf_resnet": _resnet,
    "rannc_small_param": _vector(SmallParamModel, 3),
    "rannc_shared_input": _vector(SharedInputModel, 3),
    "rannc_fork_join": _vector(ForkJoinModel, 3),
    "rannc_shared_param": _vector(SharedParamModel, 3),
    "rannc_one_op": _vector(OneOpModel, 10),
    "rannc_tensor_mul": _vector(TensorMulModel, 10),
    "rannc_embedding": lambda rows: (EmbeddingModel(), dict(x=_ids(rows, 10))),
    "rannc_function": lambda rows: (FunctionModel(), dict(x=_ids(rows, 10))),
    "rannc_loss_out": lambda rows: (LossOutModel(), dict(x=torch.randn(rows, 3), y=torch.randn(rows, 3))),
    "rannc_basic": _vector(BasicModel, 1, 32, 32),
}

#: Relative error up to which gradients must agree: Hugging Face's causal-LM and MLM losses cast the logits to
#: float32.
TOLERANCE = {"hf_gpt2": 1e-6, "hf_gpt2_mask": 1e-6, "hf_t5": 1e-6, "hf_llama": 1e-6}


def build(name: str, rows: int, seed: int = 0) -> Built:
    """The model in float64 and training mode, and its inputs."""
    torch.manual_seed(seed)
    model, inputs = MODELS[name](rows)
    double = {
        key: value.double() if getattr(value, "dtype", None) is torch.float32 else value
        for key, value in inputs.items()
    }
    return model.double(), double
