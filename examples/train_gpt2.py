"""Train a byte-level GPT-2 on the text of the Python standard library's own sources.

    mpirun -np 2 python examples/train_gpt2.py --layers 6 --width 256
    torchrun --nproc-per-node 2 examples/train_gpt2.py
    python examples/train_gpt2.py

The model is Hugging Face's, unmodified, and returns its loss. Each rank draws its own sequences.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from reporting import Progress, rank_and_world
from sources import standard_library_text
from transformers import AutoModelForCausalLM, GPT2Config


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument(
        "--clip", type=float, default=1.0, help="largest norm of all gradients; 0: no clipping"
    )
    parser.add_argument("--micro-batches", type=int, default=0, help="0: the planner decides")
    parser.add_argument("--stages", type=int, default=0, help="0: the planner decides")
    parser.add_argument("--stage-compiler", default="inductor" if torch.cuda.is_available() else "eager")
    parser.add_argument("--every", type=int, default=10, help="steps between two lines")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; give the losses of all steps."""
    flags = parse(argv)
    rank, world = rank_and_world()
    text = standard_library_text()
    config = GPT2Config(
        vocab_size=256,
        n_positions=flags.seq,
        n_embd=flags.width,
        n_layer=flags.layers,
        n_head=flags.heads,
        resid_pdrop=flags.dropout,
        embd_pdrop=flags.dropout,
        attn_pdrop=flags.dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    options = {
        "pipeline_num": flags.micro_batches,
        "partition_num": flags.stages,
        "stage_compiler": flags.stage_compiler,
        "outputs": "loss",
    }
    compiled = torch.compile(model, backend="rannc", options=options)
    progress = Progress(what="bytes", every=flags.every)
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(flags.steps):
        starts = torch.randint(len(text) - flags.seq, (flags.batch,), generator=generator)
        tokens = torch.stack([text[start : start + flags.seq] for start in starts.tolist()])
        optimizer.zero_grad()
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if flags.clip:
            clip(model, flags.clip)
        optimizer.step()
        progress.step(loss.item(), world * flags.batch * flags.seq)
    progress.end()
    return progress.losses


def clip(model: torch.nn.Module, max_norm: float) -> None:
    """Clip by the norm over all stages: torch's own function sees the parameters of this rank only."""
    from rannc_backend import clip_grad_norm_

    clip_grad_norm_(model, max_norm)


if __name__ == "__main__":
    main()
