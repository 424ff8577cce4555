"""FAQ, "My model takes too long until partitioning is determined": the deployment is saved once, and loaded
in later runs.
"""

import os
import tempfile

import torch
from torch import nn, optim

import rannc_backend as pyrannc

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
world = pyrannc.get_world_size()
path = f"{tempfile.gettempdir()}/rannc_documents_deployment_{world}.bin"
x = torch.randn(8, 4).to(device)


def train(learning_rate):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    opt = optim.SGD(net.parameters(), lr=learning_rate)
    model = pyrannc.RaNNCModule(net, opt)
    out = model(x)
    out.backward(torch.randn_like(out))
    opt.step()
    return model


os.environ["RANNC_DEPLOYMENT_FILE"] = path
os.environ["RANNC_SAVE_DEPLOYMENT"] = "true"
train(0.1)
pyrannc.barrier()
os.environ["RANNC_SAVE_DEPLOYMENT"] = "false"
os.environ["RANNC_LOAD_DEPLOYMENT"] = "true"
train(0.01)
del (
    os.environ["RANNC_DEPLOYMENT_FILE"],
    os.environ["RANNC_SAVE_DEPLOYMENT"],
    os.environ["RANNC_LOAD_DEPLOYMENT"],
)

# The same by a method and an argument.
model = train(0.1)
model.save_deployment(path + "2")
pyrannc.barrier()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
again = pyrannc.RaNNCModule(net, load_deployment=path + "2")
again(x).sum().backward()
if pyrannc.get_rank() == 0:
    pyrannc.show_deployment(path + "2", 8 * world)
pyrannc.barrier()
