"""Small models, each of a kind that once ended in a raw error: what is odd about it is said of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LENGTH = 8, 6


class TransposedNorm(nn.Module):
    """Batch normalisation of a transposed value, then a view: on the CPU it lies in memory otherwise than
    torch's shape function says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(y).square().mean()


class GatedDecay(nn.Module):
    """The derivative of softplus lies in memory as its operands do, and not as the shape function says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        decay = (-F.softplus(self.gate(y)).transpose(1, 2)).cumsum(-1).exp()
        return self.last(y * decay.transpose(1, 2)).square().mean()


class Experts(nn.Module):
    """Each product's gradient is a transposed view of a parameter's, which no view of the bucket gives
    back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.linspace(-1, 1, 4 * WIDTH * 5).view(4, WIDTH, 5))
        self.down = nn.Parameter(torch.linspace(1, -1, 4 * 5 * WIDTH).view(4, 5, WIDTH))
        self.gate, self.last = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        hidden = torch.einsum("bsd,edh->bseh", x, self.up).relu()
        y = torch.einsum("bseh,ehd->bsed", hidden, self.down)
        return self.last((y * gates.unsqueeze(-1)).sum(2)).square().mean()


class Heads(nn.Module):
    """A parameter of [width, heads, width of a head] in einsum, as relative attention has it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (
            nn.Parameter(torch.linspace(-1, 1 + k, WIDTH * WIDTH).view(WIDTH, 2, 4)) for k in range(3)
        )
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(1, 0, 2).contiguous()
        query, key = (torch.einsum("ibh,hnd->ibnd", x, weight) for weight in (self.query, self.key))
        weights = torch.einsum("ibnd,jbnd->bnij", query, key).softmax(-1)
        y = torch.einsum("bnij,jbnd->ibnd", weights, key)
        return self.last(torch.einsum("ibnd,hnd->ibh", y, self.out)).permute(1, 0, 2).square().mean()


class ChannelsFirstAttention(nn.Module):
    """Attention over channels: torch chooses its kernel by how the operands lie, which is otherwise behind a
    stage boundary.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        for number, layer in enumerate(self.layers):
            heads = y.unflatten(1, (2, WIDTH // 2)).transpose(2, 3)
            attended = F.scaled_dot_product_attention(heads, heads * (1 + number), heads + number)
            y = y + layer(attended.transpose(1, 2).flatten(2)).transpose(1, 2)
        return y.square().mean()


class Windows(nn.Module):
    """Overlapping windows of tokens as views of memory, of values that lie row by row and token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        by_row = y.as_strided((y.shape[0], 4, 3, WIDTH), (*y.stride()[:2], *y.stride()[1:]))
        z = torch.tanh(y.transpose(0, 1).contiguous()).transpose(0, 1).unflatten(1, (3, 2))
        size, stride = list(z.shape), list(z.stride())
        size[1], stride[1] = 2 * size[1] - 1, stride[1] // 2
        by_token = z.as_strided(size, stride)
        return self.last(by_row.amax(2)).square().mean() + self.last(by_token).relu().mean()


class FourierOperator(nn.Module):
    """A Fourier neural operator: slices of complex numbers are written, from both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.low, self.high = (
            nn.Parameter(torch.linspace(-1, 1 + k, WIDTH * WIDTH * 4).view(WIDTH, WIDTH, 2, 2))
            for k in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).transpose(1, 2)
        modes = torch.fft.rfft(y)
        out = torch.zeros_like(modes)
        out[..., :2] = torch.einsum("bim,iom->bom", modes[..., :2], torch.view_as_complex(self.low))
        out[..., -2:] = torch.einsum("bim,iom->bom", modes[..., -2:], torch.view_as_complex(self.high))
        out[:, 0] = modes[:, 1]
        return self.last(torch.fft.irfft(out, n=LENGTH).transpose(1, 2)).square().mean()


class Conjugates(nn.Module):
    """Values that torch only marks as conjugate or negative, at places where the model may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.phases = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.complex(self.first(x), x).conj()
        y = y.conj() * torch.polar(torch.ones_like(self.phases), self.phases).conj()
        return self.last(y.conj().imag).square().mean() + y.conj().real.sin().mean()


class MarkedTensors(nn.Module):
    """A parameter and a buffer that are only marked as conjugate and negative, and the size of a complex sum
    over the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        numbers = torch.polar(
            torch.ones(WIDTH, dtype=torch.float64), torch.linspace(0, 2, WIDTH, dtype=torch.float64)
        )
        self.turned = nn.Parameter(numbers.conj())
        self.register_buffer("shift", numbers.conj().imag)
        self.register_buffer("phases", numbers.conj())

    def forward(self, x: Tensor) -> Tensor:
        y = torch.complex(self.first(x), x) * self.turned
        z = self.last(y.real + self.shift) * self.phases
        return z.imag.square().mean() + (y * z).sum().abs() / 64


class NamedLikeInternals(nn.Module):
    """Finds its parts by way of the dictionary that modules have, and has parts of equal names on two
    levels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.nets = (
            nn.Linear(WIDTH, WIDTH),
            nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "nets": nn.Linear(WIDTH, WIDTH)}),
        )

    def forward(self, x: Tensor) -> Tensor:
        nets = self.__dict__["_modules"]["nets"]
        return nets["nets"](nets["first"](self.first(x)).tanh()).square().mean()


class ComplexMean(nn.Module):
    """The loss is made of a complex sum over the batch; so are two other outputs in `parts`."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.rfft(self.mix(x)) * torch.view_as_complex(self.gain)
        return spectrum.sum(0).mean(0) / x.shape[0], spectrum

    def forward(self, x: Tensor) -> Tensor:
        mean = self.parts(x)[0].sum()
        return mean.real + mean.imag


class ComplexOutputs(ComplexMean):
    """Outputs by `how`: numbers, a vector, or a complex number, all summed over the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        mean, spectrum = self.parts(x)
        loss, total = spectrum.abs().mean(), mean.sum()
        return {
            "numbers": (loss, total.real, total.imag),
            "vector": (loss, mean.real),
            "complex": (loss, total),
        }[self.how]


class EncoderLayers(nn.Module):
    """Layers of torch that read all their parameters in one operator in evaluation mode, where training may be cut
    within them.
    """

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x, src_key_padding_mask=torch.isclose(x.sum(-1), x.amax(-1), atol=0.5))
        found, weights = self.attention(hidden, hidden, hidden)
        return found.square().mean() + weights.square().sum(-1).mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transposed_norm": TransposedNorm,
    "gated_decay": GatedDecay,
    "experts": Experts,
    "heads": Heads,
    "channels_first": ChannelsFirstAttention,
    "windows": Windows,
    "fourier": FourierOperator,
    "conjugates": Conjugates,
    "marked_tensors": MarkedTensors,
    "complex_mean": ComplexMean,
    "named_like_internals": NamedLikeInternals,
}


def batch(num_rows: int, seed: int = 0) -> Tensor:
    """In float64."""
    return torch.randn(
        num_rows, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def worst_error(model: nn.Module, alone: nn.Module) -> float:
    """The largest difference of a gradient that `model` has, relative to the largest gradient of `alone`."""
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    scale = max(float(gradient.abs().max()) for gradient in expected.values() if gradient is not None)
    pairs = [
        (parameter.grad, expected[name])
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    ]
    return max(
        (float((mine - theirs).abs().max()) / scale for mine, theirs in pairs if theirs is not None),
        default=0.0,
    )
