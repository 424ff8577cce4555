"""Files of other libraries: a GPT-2 that is read by stage from Hugging Face's files, trained, and saved for
transformers and for torch.distributed.checkpoint (FSDP's scripts).

    mpirun -n 2 python examples/other_files.py --directory /tmp/files
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import rannc_backend


def build(seed: int) -> GPT2LMHeadModel:
    """A small GPT-2; on "meta" where torch's default device is that."""
    torch.manual_seed(seed)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    config = GPT2Config(bos_token_id=0, eos_token_id=1, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes)
    return GPT2LMHeadModel(config)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> float:
    """Steps on this rank's own rows; the loss of the last one, over all ranks' rows."""
    generator = torch.Generator().manual_seed(rannc_backend.get_rank())
    for _ in range(num_steps):
        ids = torch.randint(2, 64, (4, 16), generator=generator)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Read, train, save, and go on from what was saved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="a new directory, seen by all ranks")
    parser.add_argument("--stages", type=int, default=2)
    arguments = parser.parse_args()
    options = {"partition_num": arguments.stages}

    # Stands for a model from the Hub.
    start = build(0)
    rannc_backend.save_pretrained(start, arguments.directory / "start")
    with torch.device("meta"):
        net = build(0)
    rannc_backend.load_pretrained(net, arguments.directory / "start")
    model = torch.compile(net, backend="rannc", options=options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    train(model, optimizer, 5)

    rannc_backend.save_pretrained(model, arguments.directory / "trained", max_shard_size="500MB")
    rannc_backend.save_distributed_checkpoint(arguments.directory / "dcp", model, optimizer)
    went_on = train(model, optimizer, 5)

    torch._dynamo.reset()
    with torch.device("meta"):
        other = build(0)
    again = torch.compile(other, backend="rannc", options=options)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    rannc_backend.load_distributed_checkpoint(arguments.directory / "dcp", again, optimizer)
    resumed = train(again, optimizer, 5)
    if rannc_backend.get_rank() == 0:
        loaded = GPT2LMHeadModel.from_pretrained(arguments.directory / "trained")
        print(f"read by transformers: {loaded.num_parameters()} parameters")
        print(f"loss went on {went_on!r}, resumed {resumed!r}")


if __name__ == "__main__":
    main()
