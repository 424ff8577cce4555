"""Tutorial, steps 1 to 3 and the whole program at their end (tutorial_usage.py)."""

import torch
import torch.nn as nn
import torch.optim as optim

import rannc_backend as pyrannc

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()  # noqa: UP008 - as users have it
        self.fc1 = nn.Linear(3, 2, bias=False)
        self.fc2 = nn.Linear(2, 3, bias=False)

    def forward(self, x):
        x = self.fc1(x)
        x = self.fc2(x)
        return x


model = Net()
model.to(device)
opt = optim.SGD(model.parameters(), lr=0.01)
model = pyrannc.RaNNCModule(model, opt)

before = {name: model.get_param(name).clone() for name in ("fc1.weight", "fc2.weight")}
x = torch.randn(64, 3, requires_grad=True).to(device)
out = model(x)
target = torch.randn_like(out)
out.backward(target)
opt.step()

assert out.shape == (64, 3)
# Rank 0's values have been trained, whatever the other ranks had drawn.
for name, value in before.items():
    after = model.get_param(name)
    assert pyrannc.get_rank() != 0 or not torch.equal(after, value), name
