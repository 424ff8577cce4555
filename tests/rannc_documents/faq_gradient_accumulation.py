"""FAQ, "How to use gradient accumulation": no all-reduce while gradients add up, then one, implicit or
explicit.
"""

import torch
import torch.nn.functional as F
from torch import nn, optim

import rannc_backend as pyrannc

NUM_STEPS = 3
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
rank, world = pyrannc.get_rank(), pyrannc.get_world_size()


def network():
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        .double()
        .to(device)
    )


batches = torch.randn(
    NUM_STEPS, world, 2, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64
).to(device)

plain = network()
for step in range(NUM_STEPS):
    for x, target in batches[step]:
        (F.mse_loss(plain(x), target) / world).backward()

net = network()
model = pyrannc.RaNNCModule(net, optim.SGD(net.parameters(), lr=0.1))
for explicitly in (False, True):
    model.zero_grad()
    for step in range(NUM_STEPS):
        pyrannc.delay_grad_allreduce(explicitly or step < NUM_STEPS - 1)
        x, target = batches[step, rank]
        F.mse_loss(model(x), target).backward()
    if explicitly:
        model.allreduce_grads()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(model.get_param_grad(name).to(device), value.grad, rtol=1e-10, atol=1e-12)
pyrannc.delay_grad_allreduce(False)
