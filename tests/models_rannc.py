"""Models of RaNNC's own test suite, and those that it defined and no longer used.

In: nothing. Out: modules of a few small layers each; tests/models.py says how they are called.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6
VOCABULARY = 11
IGNORED = -100


class SmallParam(nn.Module):
    """Two small layers and a tail without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 4, bias=False)
        self.fc2 = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x)) * 2 * 3


class SharedInput(nn.Module):
    """One value feeds three layers and the sum at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        return y + self.layers[1](y) + self.layers[2](y) + self.layers[3](y)


class ForkJoin(nn.Module):
    """Two branches that join."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 3, bias=False)
        self.fc2 = nn.Linear(3, 3, bias=False)
        self.fc3 = nn.Linear(3, 3, bias=False)
        self.fc4 = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.fc4(self.fc2(x) + self.fc3(x) * 2)


class SharedParam(nn.Module):
    """The second layer's weight is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 3, bias=False)
        self.fc2 = nn.Linear(3, 3, bias=False)
        self.fc2.weight = self.fc1.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x)) * 2 * 3


class OneOp(nn.Module):
    """No parameters and one operator."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class TensorMul(nn.Module):
    """A tensor attribute that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.two = torch.tensor([2])

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(x, self.two)


class Embedding(nn.Module):
    """Integer inputs, which have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x)


class Function(nn.Module):
    """A loop with a branch and writes in place on a copy of the input, before an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for column in range(x.size(1)):
            if column % 2 == 0:
                x[:, column] = torch.where(x[:, column] % 2 == 0, 0, x[:, column])
        return self.embedding(x)


class LossOut(nn.Module):
    """The loss is the only output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 3, bias=False)
        self.fc2 = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.fc2(self.fc1(x)), y)


class Basic(nn.Module):
    """A small convolutional network that computes shapes from x.size()."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3)
        self.conv2 = nn.Conv2d(6, 16, 3)
        self.fc1 = nn.Linear(16 * 6 * 6, 20)
        self.fc2 = nn.Linear(20, 14)
        self.fc3 = nn.Linear(14, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), (2, 2))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), x.size(1) * x.size(2) * x.size(3))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Nested(nn.Module):
    """A module inside a module, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SmallParam()
        self.outer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.outer(self.inner(x))))


@torch.library.custom_op("rannc_tests::cubed", mutates_args=(), tags=(torch.Tag.pointwise,))
def cubed(x: Tensor) -> Tensor:
    """The third power, by an operator that torch does not know; the tag says that it works element by
    element.
    """
    return x**3


def _keep_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient_of_cubed(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * 3 * x**2


cubed.register_fake(torch.empty_like)
cubed.register_autograd(_gradient_of_cubed, setup_context=_keep_input)


class CustomOperator(nn.Module):
    """An operator of torch.library between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 3)
        self.fc2 = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(cubed(self.fc1(x)))


class TiedEmbedding(nn.Module):
    """Embedding and head are one tensor, with layers between them; the head lies in the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y = self.embedding(x)
        for layer in self.layers:
            y = y + torch.tanh(layer(y))
        logits = self.head(y)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), logits


class HandLayerNorm(nn.Module):
    """A layer normalisation written out, with a cast when the dtypes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 4, bias=False)
        self.weight = nn.Parameter(torch.ones(4))
        self.bias = nn.Parameter(torch.zeros(4))
        self.fc2 = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.fc2(self.weight * centred * scale + self.bias)


class OneNorm(nn.Module):
    """A layer and a BatchNorm with or without weights and running statistics."""

    def __init__(self, *, affine: bool, track_running_stats: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(10, 10)
        self.norm = nn.BatchNorm1d(10, affine=affine, track_running_stats=track_running_stats)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x))
