"""Small models of transformers that no test holds, trained for two steps beside plain PyTorch:
`python tests/benchmarks/model_zoo.py [--count N] [--seed S] [--capture auto|dynamo|nonstrict] [--only PATTERN]`.

The rule: every pair of a task and a model type in transformers' tables of automatic classes (`TASKS`), in the
order that the seed gives. Configurations are made small by their items' names (`SMALL`), dropout is off,
weights are random. One process, two micro-batches of uneven rows, float64; where the model has no float64
(`torch._grouped_mm`), float32 beside plain float32, both against float64 with the experts' plain loop: exact is
no further away than twice as far. Out: a line per model, and a count
of each outcome: *exact* (loss, gradients, and parameters after two steps within 1e-12), *narrow* (within 1e-6:
the model computes in float32 itself), *differs*, *refused* (an error of this package), *crashed* (any other),
*not built* (the plain model does not run in this configuration; not counted).

Each model is tried in a process of its own, which is ended after a limit.
"""

from __future__ import annotations

import argparse
import collections
import copy
import inspect
import json
import logging
import multiprocessing
import queue
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

VOCABULARY, LENGTH, ROWS = 60, 8, 5
LIMIT_SECONDS = 120.0
EXACT, NARROW = 1e-12, 1e-6
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
    **{"image_size": 32, "patch_size": 8, "num_labels": 3, "use_cache": False, "word_embed_proj_dim": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"sliding_window": 4, "attention_window": 4, "router_jitter_noise": 0.0, "layerdrop": 0.0},
    **{"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "output_router_logits": False},
}
_NO_DOUBLE = "Expected mat_a to be Float32"
_OFF = ("dropout", "drop_rate", "drop_path", "drop_prob", "_drop", "pdrop")


def entries(seed: int) -> list[tuple[str, str, str]]:
    """Task, model type and class, in the order that the seed gives."""
    from transformers.models.auto import modeling_auto

    found = []
    for task in TASKS:
        table = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for kind, classes in table.items():
            found += [(task, kind, name) for name in ([classes] if isinstance(classes, str) else classes)]
    random.Random(seed).shuffle(found)
    return found


def small_config(kind: str) -> Any:
    """The configuration of a model type, as small as its items' names allow."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    items = {**inspect.signature(cls.__init__).parameters, **getattr(cls, "__dataclass_fields__", {})}
    default = cls()
    chosen = {name: value for name, value in SMALL.items() if name in items or hasattr(default, name)}
    for name, value in vars(default).items():
        if isinstance(value, float) and any(part in name for part in _OFF):
            chosen[name] = 0.0
    return cls(**chosen)


def batch(form: str) -> dict[str, Any]:
    """Arguments of the forward, labels among them."""
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    text = {"input_ids": tokens, "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long)}
    if form == "classes":
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


def steps(model: Any, call: Any, values: dict[str, Any]) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of each of two steps, then the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = call(**values).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        yield float(loss.detach()), grads
        optimizer.step()
    yield 0.0, {name: p.detach().clone() for name, p in model.named_parameters()}


def error_of(found: list[Any], expected: list[Any]) -> float:
    """The largest difference, relative to the largest value of its kind."""
    worst = 0.0
    for (loss, tensors), (loss_alone, alone) in zip(found, expected, strict=True):
        worst = max(worst, abs(loss - loss_alone) / max(1.0, abs(loss_alone)))
        if set(tensors) != set(alone):
            return float("inf")
        scale = max((float(value.abs().max()) for value in alone.values()), default=0.0) or 1.0
        for name, value in tensors.items():
            difference = float((value - alone[name]).abs().max()) / scale
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def tried(task: str, kind: str, name: str, capture: str, built: Callable[[], object]) -> tuple[str, str]:
    """Outcome and detail of one model, in this process. ``built``: told that the plain model has run."""
    import transformers

    torch.manual_seed(0)
    try:
        cls = getattr(transformers, name)
        model = cls(small_config(kind)).double().train()
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0  # whatever the class has for a default
        values = batch(TASKS[task])
        values = {
            key: value.double() if value.is_floating_point() else value for key, value in values.items()
        }
        alone = copy.deepcopy(model)
        own_error = 0.0
        try:
            expected = list(steps(alone, alone, values))
        except RuntimeError as error:
            if _NO_DOUBLE not in str(error):
                raise
            alone = copy.deepcopy(model)
            alone.set_experts_implementation("eager")
            expected = list(steps(alone, alone, values))
            model = model.float()
            values = {
                key: value.float() if value.is_floating_point() else value for key, value in values.items()
            }
            alone = copy.deepcopy(model)
            own_error = error_of(list(steps(alone, alone, values)), expected)
        if not all(loss == loss for loss, _ in expected):
            return "not built", "its loss is no number"
    except Exception as error:  # the plain model: not ours
        return "not built", f"{type(error).__name__}: {error}"[:200]
    built()
    options = {
        "pipeline_num": 2,
        "batch_norm": "global",
        "stage_compiler": "eager",
        "costs": "rules",
        "cluster": "generic-cpu",
    }
    from rannc_backend.errors import InternalError, RanncError

    begin = time.process_time()
    try:
        compiled = torch.compile(model, backend="rannc", options={**options, "capture": capture})
        error = error_of(list(steps(model, compiled, values)), expected)
    except InternalError as failure:
        return "crashed", str(failure)[:600]
    except RanncError as failure:
        return "refused", f"{type(failure).__name__}: {failure}".replace("\n", " | ")[:600]
    except Exception as failure:
        return "crashed", f"{type(failure).__name__}: {failure}"[:600]
    outcome = "exact" if error <= max(EXACT, 2 * own_error) else "narrow" if error <= NARROW else "differs"
    alone_text = f" (plain: {own_error:.1e})" if own_error else ""
    return outcome, f"{error:.1e}{alone_text}, {time.process_time() - begin:.1f} CPU s"


def _child(entry: tuple[str, str, str], capture: str, results: Any) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results.put(tried(*entry, capture, lambda: results.put(("built", ""))))


def main() -> None:
    """Try models and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first ones")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--capture", default="auto", choices=("auto", "dynamo", "nonstrict"))
    parser.add_argument("--only", default="", help="classes whose name has a match of this pattern")
    parser.add_argument("--output", type=Path, help="write outcomes as JSON")
    flags = parser.parse_args()
    chosen = [entry for entry in entries(flags.seed) if re.search(flags.only, entry[2])]
    found = {}
    forking = multiprocessing.get_context("fork")
    for entry in chosen[flags.skip : flags.skip + flags.count]:
        results = forking.Queue()
        child = forking.Process(target=_child, args=(entry, flags.capture, results), daemon=True)
        child.start()
        outcome, detail = "not built", f"no answer in {LIMIT_SECONDS:.0f} s"
        try:
            outcome, detail = results.get(timeout=LIMIT_SECONDS)
            if outcome == "built":
                outcome, detail = "crashed", f"no answer in {LIMIT_SECONDS:.0f} s"
                outcome, detail = results.get(timeout=LIMIT_SECONDS)
        except queue.Empty:
            pass
        child.kill()
        child.join()
        found[entry[2]] = {"outcome": outcome, "detail": detail}
        print(f"{outcome:10} {entry[2]}  {detail}", flush=True)
    counts = collections.Counter(each["outcome"] for each in found.values())
    built = sum(counts.values()) - counts["not built"]
    print(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()), f"of {built} built")
    if flags.output:
        flags.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
