"""Tutorial, step 2: "If you don't use an optimizer, pass only the model"; and step 3."""

import torch
from torch import nn

import rannc_backend as pyrannc

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False))
net.to(device)

model = pyrannc.RaNNCModule(net)

x = torch.randn(64, 3, requires_grad=True).to(device)
out = model(x)
out.backward(torch.randn_like(out))

assert out.shape == (64, 3)
assert all(bool(model.get_param_grad(name).any()) for name in ("0.weight", "1.weight"))
