"""Train a byte-level GPT-2 on the sources of Python's standard library, and let it go on with lines of them.

    mpirun -np 2 python examples/generate.py
    torchrun --nproc-per-node 2 examples/generate.py --steps 300

Each rank has its own prompts. They are continued twice: inside `gathered`, where each rank has the whole model, and
through the stages, for models that no rank can hold. Both give the same tokens, those of one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from reporting import Progress, rank_and_world
from sources import standard_library_text
from transformers import GPT2Config, GPT2LMHeadModel

import rannc_backend
from rannc_backend.integrations.generation import generate

END = 10  # the byte of a new line


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seq", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stages", type=int, default=2, help="0: the planner decides")
    parser.add_argument("--tokens", type=int, default=24, help="bytes to generate")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train and generate; give the losses of all steps."""
    flags = parse(argv)
    rank, world = rank_and_world()
    text = standard_library_text()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=flags.seq + flags.tokens,
        n_embd=flags.width,
        n_layer=flags.layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=END,
        pad_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = {"partition_num": flags.stages, "stage_compiler": "eager"}
    compiled = torch.compile(model, backend="rannc", options=options)
    progress = Progress(what="bytes", every=20)
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(flags.steps):
        starts = torch.randint(len(text) - flags.seq, (flags.batch,), generator=generator)
        tokens = torch.stack([text[start : start + flags.seq] for start in starts.tolist()])
        optimizer.zero_grad()
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        progress.step(loss.item(), world * flags.batch * flags.seq)
    progress.end()
    model.eval()
    prompts = as_batch([b"import ", b"def __init__(self"][rank % 2 :])
    with rannc_backend.gathered(model):
        whole = model.generate(**prompts, max_new_tokens=flags.tokens, do_sample=False)
    staged = generate(compiled, **prompts, max_new_tokens=flags.tokens, do_sample=False)
    for line in staged.tolist():
        print(f"rank {rank}: {bytes(filter(None, line))!r}")
    assert torch.equal(whole, staged), f"rank {rank}: other tokens through the stages"
    return progress.losses


def as_batch(prompts: Sequence[bytes]) -> dict[str, torch.Tensor]:
    """Prompts padded at the left, as models that generate want them."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


if __name__ == "__main__":
    main()
