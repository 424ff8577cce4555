"""A first look: a small GPT-2 as the planner places it, as a pipeline of two stages, and in one process.

    mpirun -np 2 python examples/hello_gpt2.py      # or: torchrun --nproc-per-node 2 examples/hello_gpt2.py

In: nothing (random weights, random tokens). Out: the losses of three steps of each, and the plan of the
pipeline in plan.json.
"""

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel

STEPS, ROWS, TOKENS = 3, 8, 128


def train(model: torch.nn.Module, module: torch.nn.Module, batches: list[torch.Tensor]) -> list[float]:
    """Losses of a few steps: the usual loop."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4)
    losses = []
    for ids in batches:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train three copies of a model on the same batches."""
    torch.manual_seed(0)
    # Without dropout, as plain torch draws other random numbers.
    sizes = {
        "n_layer": 4,
        "n_embd": 128,
        "n_head": 4,
        "n_positions": TOKENS,
        "vocab_size": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    alone = GPT2LMHeadModel(config)
    planned, piped = copy.deepcopy(alone), copy.deepcopy(alone)
    batches = [torch.randint(0, config.vocab_size, (ROWS, TOKENS)) for _ in range(STEPS)]

    import rannc_backend  # only for the number of this rank: the backend is found by its name

    size, rank = rannc_backend.get_world_size(), rannc_backend.get_rank()
    shares = [batch.chunk(size)[rank] for batch in batches]  # each rank loads its own rows
    two_stages = {
        "partition_num": min(2, size),
        "pipeline_num": 4,
        "save_deployment": True,
        "deployment_file": "plan.json",
    }
    found = {
        "planned": train(torch.compile(planned, backend="rannc"), planned, shares),
        "two stages": train(torch.compile(piped, backend="rannc", options=two_stages), piped, shares),
    }
    if rank == 0:
        found["one process"] = train(alone, alone, batches)
        for name, losses in found.items():
            print(f"{name:12}", *(f"{loss:.6f}" for loss in losses))


if __name__ == "__main__":
    main()
