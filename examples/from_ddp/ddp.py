"""DistributedDataParallel: `torchrun --nproc-per-node 2 ddp.py`."""

import os

import torch
import torch.distributed as dist
from model import LanguageModel, batches
from torch.nn.parallel import DistributedDataParallel

has_cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_cuda else torch.device("cpu")
dist.init_process_group("nccl" if has_cuda else "gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(LanguageModel().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, words in enumerate(batches(num_steps=10)):
    optimizer.zero_grad()
    loss = model(words.chunk(num_ranks)[rank].to(device))
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())  # of this rank's rows alone until here
    if rank == 0:
        print(f"step {step}: loss {loss.item() / num_ranks:.4f}")
dist.destroy_process_group()
