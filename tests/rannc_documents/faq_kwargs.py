"""FAQ, "How to use a model that takes kwargs" (a heading without an answer there): as any module is
called.
"""

import torch
from torch import nn

import rannc_backend as pyrannc

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(3, 8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x, *, shift, scale=2.0):
        return {"out": self.fc2(torch.tanh(self.fc1(x + shift))) * scale}


torch.manual_seed(0)
net = Net().to(device)
plain = Net().to(device)
plain.load_state_dict(net.state_dict())
model = pyrannc.RaNNCModule(net)
x = torch.randn(6, 3).to(device)
shift = torch.randn(6, 3).to(device)
out = model(x, shift=shift, scale=3.0)["out"]
torch.testing.assert_close(out, plain(x, shift=shift, scale=3.0)["out"])
out.sum().backward()
