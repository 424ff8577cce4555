"""Models of transformers in small: heads of its tables of automatic classes, with random weights.

Configurations are made small by their items' names (`SMALL`), dropout is off.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

VOCABULARY, LENGTH, ROWS = 60, 8, 5
TASKS = {
    "CAUSAL_LM": "tokens",
    "MASKED_LM": "tokens",
    "SEQUENCE_CLASSIFICATION": "classes",
    "TOKEN_CLASSIFICATION": "token classes",
    "QUESTION_ANSWERING": "answers",
    "MULTIPLE_CHOICE": "choices",
    "SEQ_TO_SEQ_CAUSAL_LM": "sequence to sequence",
    "IMAGE_CLASSIFICATION": "images",
}
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("hidden_dim", "n_inner", "d_inner"), 48),
    **dict.fromkeys(("vocab_size", "vocab_size_or_config_json_file"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim"), 8),
    **{"qk_rope_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "moe_intermediate_size": 16},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "state_size": 4, "conv_kernel": 2},
    **{"image_size": 32, "patch_size": 8, "use_cache": False, "word_embed_proj_dim": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"sliding_window": 4, "attention_window": 4, "router_jitter_noise": 0.0, "layerdrop": 0.0},
    **{"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "output_router_logits": False},
}
# What a model type cannot do without, where the names above do not say it.
OF_KIND: dict[str, dict[str, Any]] = {
    "zaya": {"num_experts_per_tok": 1},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "input_size": 32},
    "mobilevitv2": {"patch_size": 2},
    "levit": {"patch_size": 16},
    "esmc": {"num_key_value_heads": 4},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "codegen": {"rotary_dim": 4},
    "switch_transformers": {"decoder_start_token_id": 0},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0}},
}
_PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type")
_OFF = ("dropout", "drop_rate", "drop_path", "drop_prob", "_drop", "pdrop")


def heads() -> list[tuple[str, str, str]]:
    """Class, task and model type of all."""
    from transformers.models.auto import modeling_auto

    found = []
    for task in TASKS:
        table = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for kind, classes in table.items():
            found += [(name, task, kind) for name in ([classes] if isinstance(classes, str) else classes)]
    return found


def small_config(kind: str, task: str) -> Any:
    """The configuration of a model type, as small as its items' names allow; answers have two labels."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    chosen = _small(CONFIG_MAPPING[kind](), kind)
    chosen["num_labels"] = 2 if task == "QUESTION_ANSWERING" else 3
    return CONFIG_MAPPING[kind](**chosen)


def _small(default: Any, kind: str) -> dict[str, Any]:
    """Items of a configuration, and of those inside it, by name; what a model type asks for beside (`OF_KIND`)."""
    cls = type(default)
    items = {**inspect.signature(cls.__init__).parameters, **getattr(cls, "__dataclass_fields__", {})}
    chosen = {
        name: value
        for name, value in SMALL.items()
        if (name in items or hasattr(default, name)) and _takes_number(default, name)
    }
    if "kv_lora_rank" in chosen and getattr(default, "num_key_value_heads", None) is not None:
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]  # latent attention has no groups
    for name, value in vars(default).items():
        if isinstance(value, float) and any(part in name for part in _OFF):
            chosen[name] = 0.0
        elif hasattr(value, "to_diff_dict") and name in items:
            chosen[name] = {**_small(value, value.model_type), "model_type": value.model_type}
        elif name in _PER_LAYER and isinstance(value, list) and value:
            chosen[name] = (2 * list(dict.fromkeys(value)))[-2:]  # two layers, of two types if there are
    return chosen | OF_KIND.get(kind, {})


def _takes_number(config: Any, name: str) -> bool:
    """Whether it is one number, neither one per layer nor derived from other items."""
    value = inspect.getattr_static(config, name, None)
    return not isinstance(value, list | tuple | property)


def batch(form: str) -> dict[str, Any]:
    """Arguments of the forward, labels among them."""
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    text = {"input_ids": tokens, "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long)}
    if form == "classes":
        tokens[:, -1] = SMALL["eos_token_id"]  # where some heads look
        return {**text, "labels": torch.randint(3, (ROWS,))}
    if form == "token classes":
        return {**text, "labels": torch.randint(3, (ROWS, LENGTH))}
    if form == "answers":
        places = {name: torch.randint(LENGTH, (ROWS,)) for name in ("start_positions", "end_positions")}
        return {**text, **places}
    if form == "choices":
        pairs = {name: torch.stack([value, value.flip(1)], 1) for name, value in text.items()}
        return {**pairs, "labels": torch.randint(2, (ROWS,))}
    if form == "images":
        return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(3, (ROWS,))}
    return {**text, "labels": tokens.clone()}


def make(name: str, task: str, kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model in training mode and the arguments of its forward."""
    import transformers

    cls, config = getattr(transformers, name), small_config(kind, task)
    if cls.config_class is not type(config) and isinstance(config.get_text_config(), cls.config_class):
        config = config.get_text_config()  # as automatic classes do
    return cls(config).train(), batch(TASKS[task])
