"""Stages and replicas: torchrun --nproc-per-node 8 with_rannc.py, or mpirun -np 8 python with_rannc.py."""

import torch
from model import LanguageModel, batches

import rannc_backend

rank, num_ranks = rannc_backend.get_rank(), rannc_backend.get_world_size()
num_devices = torch.cuda.device_count()
device = torch.device("cuda", rank % num_devices) if num_devices else torch.device("cpu")
torch.manual_seed(0)
model = LanguageModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model = torch.compile(model, backend="rannc")
for step, words in enumerate(batches(num_steps=10)):
    optimizer.zero_grad()
    loss = model(words.chunk(num_ranks)[rank].to(device))
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
