"""FAQ, "Does RaNNC work with Apex AMP?": Apex is gone, the error shows the line to write instead, and that
line works.
"""

import torch
import torch.nn.functional as F
from torch import nn, optim

import rannc_backend as pyrannc
from rannc_backend.errors import UserInputError

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
optimizer = optim.SGD(net.parameters(), lr=0.1)

try:
    pyrannc.RaNNCModule(net, optimizer, use_amp_master_params=True)
except UserInputError as error:
    assert "torch.autocast" in str(error), error
else:
    raise AssertionError("Apex was accepted")

model = pyrannc.RaNNCModule(net, optimizer)
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
x = torch.randn(16, 4, generator=torch.Generator().manual_seed(pyrannc.get_rank())).to(device)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.float16):
        loss = F.mse_loss(model(x), torch.zeros_like(x))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
