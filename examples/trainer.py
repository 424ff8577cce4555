"""Hugging Face's Trainer over ranks: a small GPT-2 learns the text of the Python standard library's own sources.

    mpirun -np 2 python examples/trainer.py --save run
    mpirun -np 2 python examples/trainer.py --save run --steps 40 --resume
    python examples/trainer.py --plain              # transformers' own Trainer in one process, for comparison

Two lines differ from a script for one process: those that import the Trainer and its arguments. The batch is that of all
ranks, so that runs on any number of ranks train the same; in float64 losses are equal to 1e-10.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from sources import standard_library_text
from torch import nn
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel

from rannc_backend.integrations.trainer import RanncTrainer, RanncTrainingArguments

VOCABULARY = 256
IGNORED = -100


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plain", action="store_true", help="transformers.Trainer, in one process")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--length", type=int, default=32, help="bytes of a row")
    parser.add_argument("--batch", type=int, default=8, help="rows of all ranks in a forward")
    parser.add_argument("--accumulate", type=int, default=2, help="forwards per update")
    parser.add_argument(
        "--rows", type=int, default=253, help="rows of an epoch; its last batch may have fewer"
    )
    parser.add_argument("--steps", type=int, default=20, help="updates")
    parser.add_argument(
        "--every", type=int, default=10, help="updates between two evaluations and checkpoints"
    )
    parser.add_argument("--smoothing", type=float, default=0.0, help="of labels")
    parser.add_argument("--precision", choices=("float64", "float32", "bfloat16"), default="float64")
    parser.add_argument("--lora", action="store_true", help="train adapters of PEFT alone")
    parser.add_argument("--stages", type=int, default=0, help="0: the planner decides")
    parser.add_argument("--save", default="run", help="directory of checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --save")
    return parser.parse_args(argv)


def rows_of_text(num_rows: int, length: int, first: int) -> list[dict[str, torch.Tensor]]:
    """Rows of bytes of the text; the labels of some are ignored from a place on, as where a row is padded."""
    text = standard_library_text(first + num_rows * length)
    rows = []
    for row in range(num_rows):
        start = first + row * length
        ids = text[start : start + length].clone()
        labels = ids.clone()
        labels[length - row % (length // 2) :] = IGNORED
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def loss_in_own_dtype(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> torch.Tensor:
    """The loss of transformers' causal models without its cast to float32."""
    shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    how = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction=how)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def build(flags: argparse.Namespace) -> nn.Module:
    """The model; its adapters' alone is trained with --lora."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=flags.length,
        n_embd=flags.width,
        n_layer=flags.layers,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(config)
    if flags.precision == "float64":
        model = model.double()
        model.loss_function = loss_in_own_dtype
    if flags.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=4,
            target_modules=["c_attn"],
            modules_to_save=["ln_f"],
            lora_dropout=0.0,
            init_lora_weights="gaussian",
        )
        dtype = next(model.parameters()).dtype
        model = get_peft_model(model, adapters).to(dtype)
    return model


def best_bytes(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """The most likely byte of each place: less to gather than the logits."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def accuracy(prediction: Any) -> dict[str, float]:
    """Share of the bytes that are guessed, and the number of rows."""
    guessed, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    right = (guessed == labels)[labels != IGNORED]
    return {"accuracy": float(np.mean(right)), "rows": float(len(labels))}


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; give the loss of each update that was made."""
    flags = parse(argv)
    Arguments = transformers.TrainingArguments if flags.plain else RanncTrainingArguments
    Trainer = transformers.Trainer if flags.plain else RanncTrainer
    options = {} if flags.plain else {"rannc_options": {"partition_num": flags.stages}}
    losses: list[float] = []

    class Recording(Trainer):  # type: ignore[misc,valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(self.accelerator.reduce(loss.double(), "mean").item())
            return loss

    world = int(os.environ.get("WORLD_SIZE", 1)) if flags.plain else rank_count()
    arguments = Arguments(
        output_dir=flags.save,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=flags.batch // world,
        per_device_eval_batch_size=flags.batch // world,
        gradient_accumulation_steps=flags.accumulate,
        max_steps=flags.steps,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.01,
        max_grad_norm=0.5,
        label_smoothing_factor=flags.smoothing,
        bf16=flags.precision == "bfloat16",
        eval_strategy="steps",
        eval_steps=flags.every,
        save_strategy="steps",
        save_steps=flags.every,
        logging_steps=flags.every,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    text_of_evaluation = 32 * 256
    trainer = Recording(
        build(flags),
        arguments,
        train_dataset=rows_of_text(flags.rows, flags.length, text_of_evaluation),
        eval_dataset=rows_of_text(4 * flags.batch - 3, flags.length, 0),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=best_bytes,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
        **options,
    )
    trainer.train(resume_from_checkpoint=True if flags.resume else None)
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        names = ("eval_loss", "eval_accuracy", "eval_rows")
        print("losses", *(repr(loss) for loss in losses))
        print("evaluated", *(repr(found[name]) for name in names))
    return losses


def rank_count() -> int:
    """Ranks of the job."""
    from rannc_backend import get_world_size

    return get_world_size()


if __name__ == "__main__":
    main()
