"""FAQ, "Custom cpp functions does not work with RaNNC" (a heading without an answer there): a custom operator
of torch.library.
"""

import torch
from torch import nn

import rannc_backend as pyrannc

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# The tag says that rows of a batch stay apart in it, which nobody but its author can know.
@torch.library.custom_op("rannc_documents::doubled", mutates_args=(), tags=(torch.Tag.pointwise,))
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: grad * 2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(3, 8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc2(doubled(self.fc1(x)))


torch.manual_seed(0)
net = Net().to(device)
plain = Net().to(device)
plain.load_state_dict(net.state_dict())
model = pyrannc.RaNNCModule(net)
x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).to(device)  # the same on every rank
out = model(x)
torch.testing.assert_close(out, plain(x))
out.square().mean().backward()
plain(x).square().mean().backward()
for name, parameter in plain.named_parameters():
    torch.testing.assert_close(model.get_param_grad(name).to(device), parameter.grad)
