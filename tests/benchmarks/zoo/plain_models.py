"""Models after PyTorch's tutorials and examples, as users write them: each a module whose forward gives a loss.

The name of a class is that of the tutorial or example it follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.benchmarks.zoo.row_models import ROW_MODELS
from tests.benchmarks.zoo.sequence_models import (
    CharRnn,
    MaskedTokens,
    PackedTagger,
    Seq2Seq,
    SpeechCtc,
    TextSentiment,
    TextSentimentOffsets,
    TimeSequence,
    TransformerTutorial,
    TranslationTransformer,
    WordLanguageModel,
)

ROWS = 5


class MnistNet(nn.Module):
    """examples/mnist."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 8, 3, 1)
        self.fc1, self.fc2 = nn.Linear(8 * 144, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = torch.flatten(functional.max_pool2d(x, 2), 1)
        return functional.nll_loss(functional.log_softmax(self.fc2(functional.relu(self.fc1(x))), dim=1), y)


class Vae(nn.Module):
    """examples/vae, with its noise passed in and its loss a sum over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        h = functional.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + noise * torch.exp(0.5 * logvar)
        found = torch.sigmoid(self.fc4(functional.relu(self.fc3(z))))
        bce = functional.binary_cross_entropy(found, x.view(-1, 64), reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


class SpatialTransformer(nn.Module):
    """tutorials/spatial_transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 5), nn.Linear(4 * 144, 10)
        self.localization = nn.Sequential(nn.Conv2d(1, 4, 7), nn.MaxPool2d(2, stride=2), nn.ReLU(True))
        self.fc_loc = nn.Sequential(nn.Linear(4 * 121, 8), nn.ReLU(True), nn.Linear(8, 6))
        self.fc_loc[2].bias.data.copy_(torch.tensor([1, 0, 0.1, 0, 1, 0.2]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        theta = self.fc_loc(self.localization(x).view(-1, 4 * 121)).view(-1, 2, 3)
        x = functional.grid_sample(x, functional.affine_grid(theta, x.size(), False), align_corners=False)
        x = functional.relu(functional.max_pool2d(self.conv(x), 2)).view(-1, 4 * 144)
        return functional.cross_entropy(self.fc(x), y)


class SuperResolution(nn.Module):
    """examples/super_resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 5, 1, 2), nn.Conv2d(8, 4, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.pixel_shuffle(self.conv2(self.relu(self.conv1(x)))), y)


class DcganDiscriminator(nn.Module):
    """tutorials/dcgan: batch normalization, strided convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy(self.main(x).view(-1), y)


class Siamese(nn.Module):
    """examples/siamese_network: one tower, two images."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 16))
        self.fc = nn.Sequential(nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))

    def forward(self, first: torch.Tensor, second: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = torch.sigmoid(self.fc(torch.cat((self.tower(first), self.tower(second)), 1)))
        return functional.binary_cross_entropy(found.squeeze(), y)


class GraphConvolution(nn.Module):
    """examples/gcn, for a batch of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 16) / 4), nn.Parameter(torch.randn(16, 3) / 4)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(torch.bmm(adjacency, x @ self.first))
        found = functional.log_softmax(torch.bmm(adjacency, hidden @ self.second), dim=-1)
        return functional.nll_loss(found.reshape(-1, 3), y.reshape(-1))


class ActorCritic(nn.Module):
    """examples/reinforcement_learning: policy and value, summed losses."""

    def __init__(self) -> None:
        super().__init__()
        self.affine, self.action, self.value = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, taken: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.affine(x))
        chances = torch.distributions.Categorical(logits=self.action(hidden), validate_args=False)
        value = self.value(hidden).squeeze(-1)
        policy = -chances.log_prob(taken) * (gain - value).detach()
        return policy.sum() + functional.smooth_l1_loss(value, gain, reduction="sum")


class DeepQ(nn.Module):
    """tutorials/reinforcement_q_learning: the value of the action taken."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
        )

    def forward(self, x: torch.Tensor, taken: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        found = self.layers(x).gather(1, taken.unsqueeze(1))
        return functional.smooth_l1_loss(found, gain.unsqueeze(1))


class SimClr(nn.Module):
    """Contrastive learning of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        views = functional.normalize(torch.cat([self.net(first), self.net(second)]), dim=1)
        scores = (views @ views.t() / 0.5).fill_diagonal_(-1e9)
        rows = first.shape[0]
        labels = torch.cat([torch.arange(rows) + rows, torch.arange(rows)])
        return functional.cross_entropy(scores, labels)


class MixtureOfExperts(nn.Module):
    """Tokens to their best expert, in a loop over experts with `nonzero`."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(12, 3), nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 12)
        weight, expert = torch.softmax(self.router(flat), -1).max(-1)
        mixed = torch.zeros_like(flat)
        for index, layer in enumerate(self.experts):
            place = torch.where(expert == index)[0]
            mixed.index_add_(0, place, layer(flat[place]) * weight[place, None])
        return functional.cross_entropy(self.out(mixed).view(*x.shape[:2], 4).transpose(1, 2), y)


class Gan(nn.Module):
    """A generator and a critic with a penalty on the critic's gradient, in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))
        self.judge = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        made = self.make(noise)
        between = (0.5 * made + 0.5 * real).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        return self.judge(made).mean() - self.judge(real).mean() + 10 * penalty


class NeuralStyleBlock(nn.Module):
    """examples/fast_neural_style: instance normalization, reflection padding, Gram matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.pad, self.conv = nn.ReflectionPad2d(1), nn.Conv2d(3, 8, 3)
        self.norm, self.up = nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.norm(self.conv(self.pad(x))))
        found = self.up(functional.interpolate(hidden, scale_factor=2, mode="nearest"))
        rows, channels, height, width = found.size()
        features = found.view(rows, channels, height * width)
        gram = features.bmm(features.transpose(1, 2)) / (channels * height * width)
        return functional.mse_loss(gram, style.expand_as(gram)) + found.abs().mean()


class ForwardModeJacobian(nn.Module):
    """tutorials/jacobians_hessians: `torch.func.jacrev` and `vmap` inside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        jacobian = torch.func.vmap(torch.func.jacrev(self.net))(x)
        return functional.mse_loss(self.net(x), y) + 0.1 * jacobian.pow(2).sum(dim=(1, 2)).mean()


class Parametrized(nn.Module):
    """tutorials/parametrizations: weight norm, spectral norm off, an orthogonal weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(12, 16))
        self.second = nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.out(torch.tanh(self.second(torch.relu(self.first(x))))), y)


class Checkpointed(nn.Module):
    """Blocks under `torch.utils.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(4))
        self.out = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return functional.cross_entropy(self.out(x), y)


class Detached(nn.Module):
    """A loss with a check of its values, a path by a mask and a logged number."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)), []

    def forward(self, x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if mask.all():
            found = self.net(x)
        else:
            found = self.net(x * mask)
        return functional.cross_entropy(found, y)


def _image(size: int, channels: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, channels, size, size)


def _labels(number: int, *shape: int) -> torch.Tensor:
    return torch.randint(number, (ROWS, *shape))


def _masked(share: int) -> torch.Tensor:
    labels = _labels(40, 8)
    labels[:, ::share] = -100
    return labels


MODELS: dict[str, tuple[type[nn.Module], Callable[[], dict[str, Any]]]] = {
    "MnistNet": (MnistNet, lambda: {"x": _image(28), "y": _labels(10)}),
    "Vae": (Vae, lambda: {"x": torch.rand(ROWS, 1, 8, 8), "noise": torch.randn(ROWS, 4)}),
    "WordLanguageModel": (WordLanguageModel, lambda: {"x": _labels(40, 8), "y": _labels(40, 8)}),
    "TransformerTutorial": (TransformerTutorial, lambda: {"x": _labels(40, 8), "y": _labels(40, 8)}),
    "TranslationTransformer": (
        TranslationTransformer,
        lambda: {"source": _labels(40, 8), "target": _labels(40, 7)},
    ),
    "TextSentiment": (TextSentiment, lambda: {"x": _labels(40, 8), "y": _labels(4)}),
    "TextSentimentOffsets": (TextSentimentOffsets, lambda: {"x": _labels(40, 8), "y": _labels(4)}),
    "CharRnn": (CharRnn, lambda: {"x": torch.randn(ROWS, 6, 20), "y": _labels(5)}),
    "TimeSequence": (TimeSequence, lambda: {"x": torch.randn(ROWS, 6), "y": torch.randn(ROWS, 6)}),
    "Seq2Seq": (Seq2Seq, lambda: {"source": _labels(40, 6), "target": _labels(40, 5)}),
    "SpatialTransformer": (SpatialTransformer, lambda: {"x": _image(28), "y": _labels(10)}),
    "SuperResolution": (SuperResolution, lambda: {"x": _image(8), "y": _image(16)}),
    "DcganDiscriminator": (DcganDiscriminator, lambda: {"x": _image(16, 3), "y": torch.rand(ROWS)}),
    "Siamese": (Siamese, lambda: {"first": _image(8), "second": _image(8), "y": torch.rand(ROWS)}),
    "GraphConvolution": (
        GraphConvolution,
        lambda: {"x": torch.randn(ROWS, 7, 6), "adjacency": torch.rand(ROWS, 7, 7), "y": _labels(3, 7)},
    ),
    "ActorCritic": (
        ActorCritic,
        lambda: {"x": torch.randn(ROWS, 4), "taken": _labels(2), "gain": torch.randn(ROWS)},
    ),
    "DeepQ": (DeepQ, lambda: {"x": torch.randn(ROWS, 4), "taken": _labels(2), "gain": torch.randn(ROWS)}),
    "PackedTagger": (
        PackedTagger,
        lambda: {"x": _labels(40, 6), "lengths": torch.tensor([6, 4, 5, 2, 3]), "y": _labels(4, 6)},
    ),
    "MaskedTokens": (MaskedTokens, lambda: {"x": _labels(40, 8), "y": _masked(3)}),
    "SpeechCtc": (
        SpeechCtc,
        lambda: {
            "x": torch.randn(ROWS, 6, 12),
            "y": torch.randint(1, 10, (ROWS, 4)),
            "lengths": torch.tensor([4, 3, 2, 4, 1]),
        },
    ),
    "SimClr": (SimClr, lambda: {"first": torch.randn(ROWS, 12), "second": torch.randn(ROWS, 12)}),
    "MixtureOfExperts": (MixtureOfExperts, lambda: {"x": torch.randn(ROWS, 6, 12), "y": _labels(4, 6)}),
    "Gan": (Gan, lambda: {"noise": torch.randn(ROWS, 4), "real": torch.randn(ROWS, 12)}),
    "NeuralStyleBlock": (
        NeuralStyleBlock,
        lambda: {"x": _image(8, 3), "style": torch.randn(1, 3, 3)},
    ),
    "ForwardModeJacobian": (
        ForwardModeJacobian,
        lambda: {"x": torch.randn(ROWS, 4), "y": torch.randn(ROWS, 2)},
    ),
    "Parametrized": (Parametrized, lambda: {"x": torch.randn(ROWS, 12), "y": _labels(4)}),
    "Checkpointed": (Checkpointed, lambda: {"x": torch.randn(ROWS, 12), "y": _labels(4)}),
    "Detached": (
        Detached,
        lambda: {"x": torch.randn(ROWS, 12), "mask": torch.ones(ROWS, 12), "y": _labels(4)},
    ),
    **ROW_MODELS,
}


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training mode and the arguments of its forward."""
    model, batch = MODELS[name]
    return model().train(), batch()
