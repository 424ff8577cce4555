"""Tokens per second of a GPT-2 that is spread over two ranks: with and without a cache, gathered, and in one process.

    mpirun -n 2 python tests/benchmarks/generation.py

In: sizes. Out: a JSON line for each way, from rank 0: seconds of one `generate` (the median), tokens per second of all
ranks, and for `gathered` the seconds until the values are there and until they are given back. "one process" is rank 0
with the prompts of all ranks, while the others wait.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import rannc_backend
from rannc_backend.integrations.generation import generate


def parse() -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rows", type=int, default=4, help="prompts per rank")
    parser.add_argument("--length", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="to generate")
    parser.add_argument(
        "--micro-batches", type=int, default=0, help="of the stages; 0: the planner decides, for the prompts"
    )
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Measure all ways."""
    flags = parse()
    rank, world = rannc_backend.get_rank(), rannc_backend.get_world_size()
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=flags.layers, n_embd=flags.width, n_head=8, vocab_size=8000, pad_token_id=0, eos_token_id=1
    )
    model = GPT2LMHeadModel(config).eval()
    whole = torch.randint(2, 8000, (flags.rows * world, flags.length))
    own = whole[rank * flags.rows : (rank + 1) * flags.rows]
    # Nothing ends early: all ways make the same number of tokens.
    told = {"max_new_tokens": flags.tokens, "min_new_tokens": flags.tokens, "do_sample": False}
    made = flags.rows * world * flags.tokens

    def measure(way: str, call: Callable[[], Any], *, alone: bool = False, **more: float) -> None:
        seconds = []
        if rank == 0 or not alone:
            call()
            for _ in range(flags.repeats):
                begin = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - begin)
        rannc_backend.barrier()
        if rank == 0:
            median = statistics.median(seconds)
            print(
                json.dumps({"way": way, "seconds": median, "tokens_per_second": made / median, **more}),
                flush=True,
            )

    mask = torch.ones_like(whole)
    for name, cache in (("one process, with a cache", True), ("one process, without", False)):
        measure(
            name,
            lambda cache=cache: model.generate(whole, attention_mask=mask, use_cache=cache, **told),
            alone=True,
        )
    options = {
        "training": False,
        "stage_replicas": ",".join("1" * world),
        "stage_compiler": "eager",
        "pipeline_num": flags.micro_batches,
    }
    compiled = torch.compile(model, backend="rannc", options=options)
    for name, cache in (("stages, with a cache", True), ("stages, without", False)):
        measure(
            name,
            lambda cache=cache: generate(
                compiled, own, attention_mask=mask[: len(own)], use_cache=cache, **told
            ),
        )
    begin = time.perf_counter()
    with rannc_backend.gathered(model):
        until = time.perf_counter() - begin
        measure(
            "gathered",
            lambda: model.generate(own, attention_mask=mask[: len(own)], **told),
            until_there=until,
        )
        begin = time.perf_counter()
    if rank == 0:
        print(json.dumps({"given back, seconds": time.perf_counter() - begin}), flush=True)


if __name__ == "__main__":
    main()
