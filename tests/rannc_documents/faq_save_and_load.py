"""FAQ, "How to save/load a RaNNC module": state_dict on all ranks, saved by one, loaded as with PyTorch."""

import tempfile

import torch
from torch import nn, optim

import rannc_backend as pyrannc

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(
        device
    )


net = network()
opt = optim.Adam(net.parameters(), lr=0.01)
model = pyrannc.RaNNCModule(net, opt)
x = torch.randn(8, 4).to(device)
for _ in range(2):
    opt.zero_grad()
    out = model(x)
    out.backward(torch.randn_like(out))
    opt.step()

# Called from all ranks; rank 0 gets everything.
state, opt_state = model.state_dict(), opt.state_dict(from_global=True)
path = f"{tempfile.gettempdir()}/rannc_documents_{pyrannc.get_world_size()}.pt"
if pyrannc.get_rank() == 0:
    torch.save({"model": state, "optimizer": opt_state}, path)
pyrannc.barrier()
saved = torch.load(path)

plain = network()
plain.load_state_dict(saved["model"])  # a model that knows nothing of RaNNC
optim.Adam(plain.parameters(), lr=0.01).load_state_dict(saved["optimizer"])

net = network()
opt = optim.Adam(net.parameters(), lr=0.01)
again = pyrannc.RaNNCModule(net, opt)
again.load_state_dict(saved["model"])
out = again(x)
out.backward(torch.randn_like(out))
opt.load_state_dict(saved["optimizer"], from_global=True)  # once it is known who has what
for name, value in plain.named_parameters():
    assert torch.equal(again.get_param(name).to(device), value), name
opt.step()
pyrannc.barrier()
