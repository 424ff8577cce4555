"""README, "The code below shows a simple usage": one line is added to a training script; the model returns
its loss.
"""

import torch
import torch.nn.functional as F
from torch import nn, optim

import rannc_backend as pyrannc

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
        )

    def forward(self, x):
        return F.cross_entropy(self.layers(x), torch.argmax(x[:, :4], dim=1))


torch.manual_seed(0)
model = Net()  # Define a network
model.to(device)  # Move parameters to a cuda device
optimizer = optim.Adam(model.parameters(), lr=0.01)  # Define an optimizer
model = pyrannc.RaNNCModule(model, optimizer)  # Wrap by RaNNCModule
input = torch.randn(16, 8, generator=torch.Generator().manual_seed(pyrannc.get_rank())).to(device)
losses = []
for _ in range(10):
    optimizer.zero_grad()
    loss = model(input)  # Run a forward pass
    loss.backward()  # Run a backward pass
    optimizer.step()  # Update parameters
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
