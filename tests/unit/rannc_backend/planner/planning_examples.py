"""The factories of examples/planning_models.py in sizes that are captured in seconds.

In: a name of `SMALL`. Out: the example ``(model, args, kwargs)``.
"""

from __future__ import annotations

from typing import Any

from examples import planning_models

SMALL: dict[str, dict[str, Any]] = {
    "bert": {"length": 8, "vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "gpt2": {"length": 8, "vocab_size": 37, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "llama": {"length": 8, "vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
              "num_key_value_heads": 2},
    "t5": {"length": 8, "vocab_size": 37, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "vit": {"image_size": 28, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "resnet": {"image_size": 32, "embedding_size": 4, "hidden_sizes": [8, 8, 16], "depths": [1, 1, 1]},
}  # fmt: skip


def small_example(name: str) -> planning_models.Example:
    """The small one of these models; on the device that is the default when this is called."""
    return getattr(planning_models, name)(**SMALL[name])
