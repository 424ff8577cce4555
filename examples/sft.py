"""TRL's SFTTrainer over ranks: a small Llama learns lines of the Python standard library, with a tokenizer made of them.

    mpirun -np 2 python examples/sft.py
    python examples/sft.py --plain          # TRL's own SFTTrainer in one process, for comparison

Two lines differ from a script for one process: `join_job()` before SFTConfig, and the import of the trainer. Rows are padded
to one length, as all ranks need the same.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer import loss_in_own_dtype
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rannc_backend.integrations.accelerate import join_job
from rannc_backend.integrations.trl import RanncSFTTrainer

_MAX_WORDS = 500


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plain", action="store_true", help="trl.SFTTrainer, in one process")
    parser.add_argument("--batch", type=int, default=8, help="rows of all ranks in a forward")
    parser.add_argument("--accumulate", type=int, default=1, help="forwards per update")
    parser.add_argument("--steps", type=int, default=10, help="updates")
    parser.add_argument("--stages", type=int, default=0, help="0: the planner decides")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; give the loss of each forward."""
    flags = parse(argv)
    world = 1 if flags.plain else join_job().size
    words = Path(os.__file__).read_text().split()
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>"])}
    for word in words:
        if len(vocabulary) < _MAX_WORDS:
            vocabulary.setdefault(word, len(vocabulary))
    splitter = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    splitter.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=splitter, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    texts = [" ".join(words[11 * row : 11 * row + 10 + row % 9]) for row in range(128)]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    model = LlamaForCausalLM(config).double()
    model.loss_function = loss_in_own_dtype
    Trainer = trl.SFTTrainer if flags.plain else RanncSFTTrainer
    losses: list[float] = []

    class Recording(Trainer):  # type: ignore[misc,valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    arguments = trl.SFTConfig(
        output_dir="sft",
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=flags.batch // world,
        gradient_accumulation_steps=flags.accumulate,
        max_steps=flags.steps,
        learning_rate=1e-2,
        pad_to_multiple_of=32,
        bf16=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    options = {} if flags.plain else {"rannc_options": {"partition_num": flags.stages}}
    trainer = Recording(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        **options,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print("losses", *(repr(loss) for loss in losses))
    return losses


if __name__ == "__main__":
    main()
