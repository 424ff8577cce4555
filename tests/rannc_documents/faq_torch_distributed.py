"""FAQ, "Does RaNNC work with torch.distributed package?" (a heading without an answer there): beside it, and
before it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import rannc_backend as pyrannc

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
model = pyrannc.RaNNCModule(net)

# Tutorial, "Data distribution": each process loads other batches; DistributedSampler gives them.
rank, world = pyrannc.get_rank(), pyrannc.get_world_size()
data = TensorDataset(torch.randn(12 * world, 3))
sampler = DistributedSampler(data, num_replicas=world, rank=rank)
seen = 0
for (rows,) in DataLoader(data, batch_size=4, sampler=sampler):
    out = model(rows.to(device))
    out.sum().backward()
    seen += len(rows)
total = torch.tensor(float(seen)).to(device)
dist.all_reduce(total)  # the user's own collective, on the group that the backend has started
assert total.item() == 12 * world and dist.get_rank() == rank
