"""Models with parts whose code decides by values that are known only when it runs: each has one way.

In: nothing. Out: `MODELS` by way, each with the classes that stay whole, and `REFUSED`. Each takes rows `x` of
[rows, LENGTH, WIDTH] and gives its loss, in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rannc_backend import row_wise
from tests.nonstrict_models import WIDTH, Around, Ends

NUM_EXPERTS = 4


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.linspace(-1, 1, NUM_EXPERTS * WIDTH * 8).view(NUM_EXPERTS, WIDTH, 8))
        self.down = nn.Parameter(torch.linspace(1, -1, NUM_EXPERTS * WIDTH * 8).view(NUM_EXPERTS, 8, WIDTH))

    def of(self, expert: int, tokens: Tensor) -> Tensor:
        return F.silu(tokens @ self.up[expert]) @ self.down[expert]


class HitExperts(_Experts):
    """A loop over the experts that have tokens, as transformers wrote mixtures until version 5."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        mask = F.one_hot(chosen, NUM_EXPERTS).permute(2, 1, 0)
        for expert in mask.sum((-1, -2)).nonzero():
            number = int(expert.item())
            place, token = torch.where(mask[number])
            result.index_add_(0, token, self.of(number, tokens[token]) * weights[token, place, None])
        return result


class SkippedExperts(_Experts):
    """All experts, but for those without tokens."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for number in range(NUM_EXPERTS):
            token, place = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            result[token] += self.of(number, tokens[token]) * weights[token, place, None]
        return result


class SplitExperts(_Experts):
    """Tokens sorted by expert, and split by their counts as numbers."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=NUM_EXPERTS).tolist()
        parts = tokens[order // chosen.shape[1]].split(counts)
        done = torch.cat([self.of(number, part) for number, part in enumerate(parts)])
        back = torch.empty_like(done).index_copy(0, order, done)
        return (back.view(*chosen.shape, -1) * weights[..., None]).sum(1)


class Mixture(Ends):
    """Two blocks with experts of a kind. The last expert has no token."""

    def __init__(self, kind: type[_Experts]) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, NUM_EXPERTS) for _ in range(2))
        self.experts = nn.ModuleList(kind() for _ in range(2))
        with torch.no_grad():
            for gate in self.gates:
                gate.bias[-1] = -1e3  # type: ignore[index]

    def middle(self, x: Tensor) -> Tensor:
        for gate, experts in zip(self.gates, self.experts, strict=True):
            tokens = x.reshape(-1, x.shape[-1])
            weights, chosen = gate(tokens).softmax(-1).topk(2, -1)
            x = x + experts(tokens, chosen, weights).view_as(x)
        return x


class _Fixpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        y, moved, steps = torch.zeros_like(x), torch.ones(()), 0
        while moved > 1e-3 and steps < 50:
            following = torch.tanh(x + 0.3 * self.inner(y))
            moved, y, steps = (following - y).detach().abs().max(), following, steps + 1
        return y, {"moved": moved, "factor": 0.5}


class Searching(Ends):
    """A loop that ends when it has converged (a deep equilibrium); gives a dictionary too."""

    def __init__(self) -> None:
        super().__init__()
        self.search = _Fixpoint()

    def middle(self, x: Tensor) -> Tensor:
        y, more = self.search(x)
        return y + more["moved"] * more["factor"]


class _Normalizing(nn.Module):
    """Writes buffers: BatchNorm's kernels do not count as writing, one is replaced, one changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.flatten(0, 1)).view_as(x)
        if float(y.detach().abs().max()) > 1e9:
            y = y / 2
        if self.training:
            self.average = 0.9 * self.average + 0.1 * y.detach().square().mean((0, 1))
            self.num_calls += 1  # type: ignore[operator]
        return y + self.average * self.num_calls


class Normalized(Ends):
    """Steps and evaluations use what was written before."""

    def __init__(self) -> None:
        super().__init__()
        self.normalizing = _Normalizing()

    def middle(self, x: Tensor) -> Tensor:
        return self.normalizing(x)


class OwnValues(Ends):
    """Its own forward, not that of a part, asks for values: as many positions of each row as the row says."""

    def middle(self, x: Tensor) -> Tensor:
        lengths = x.detach().sum(-1).gt(0).sum(-1).clamp(min=1).tolist()
        return torch.stack([row + row[:length].mean(0) for row, length in zip(x, lengths, strict=True)])


class _Counted(nn.Module):
    """Keeps, for whoever looks, how many steps it took, as miners of pairs keep how many they have found."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.steps, self.largest = 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.steps = 0
        y = self.inner(x)
        while float(y.detach().abs().max()) > 0.1 * (1 + self.steps):
            y, self.steps = y * 0.5, self.steps + 1
        self.largest = y.detach().abs().max()
        return x + y


class Counted(Ends):
    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.part, self.reads = _Counted(), reads

    def middle(self, x: Tensor) -> Tensor:
        y = self.part(x)
        return y / max(1, self.part.steps) if self.reads else y


class _Masking(nn.Module):
    """Gives a mask and numbers beside values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.inner(x)
        if float(y.detach().abs().max()) > 0.1:
            y = y * 2
        return y, y > 0, y.argmax(-1)


class Masking(Ends):
    def __init__(self) -> None:
        super().__init__()
        self.part = _Masking()

    def middle(self, x: Tensor) -> Tensor:
        y, mask, places = self.part(x)
        return y * mask + y.gather(-1, places[..., None])


class _Adapting(nn.Module):
    """Steps of its own on its own weight, as inner loops of meta-learning take them, until the loss is small."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            weight = self.inner.weight
            loss = (F.linear(x, weight) - x).square().mean()
            for _ in range(3):
                if float(loss) < 1e-3:
                    break
                (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
                weight = weight - 0.1 * gradient
                loss = (F.linear(x, weight) - x).square().mean()
        return F.linear(x, weight)


class _Hooked(nn.Module):
    """Gradients are changed by a hook of a value, as recurrent networks clip theirs and domains are confused."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3) * -0.5)
        return torch.tanh(y)


class _Scaled(nn.Module):
    """Its gradients are changed by hooks of the module, of what comes and of what goes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_full_backward_hook(lambda module, inward, outward: (2 * inward[0],))
        self.register_full_backward_pre_hook(lambda module, outward: (3 * outward[0],))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def _scaled_layer() -> nn.Module:
    """A layer of torch with such a hook."""
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_full_backward_hook(lambda module, inward, outward: (2 * inward[0],))
    return layer


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "experts that are hit": (lambda: Mixture(HitExperts), "HitExperts"),
    "experts that are skipped": (lambda: Mixture(SkippedExperts), "SkippedExperts"),
    "experts by counts": (lambda: Mixture(SplitExperts), "SplitExperts"),
    "fixpoint": (Searching, "_Fixpoint"),
    "buffers": (Normalized, "_Normalizing"),
    "attributes": (Counted, "_Counted"),
    "masks": (Masking, "_Masking"),
    "gradients within": (lambda: Around(_Adapting()), "_Adapting"),
    "hooks of values": (lambda: Around(_Hooked()), "_Hooked"),
    "hooks of a module": (lambda: Around(_Scaled()), "_Scaled"),
    "hooks of a layer": (lambda: Around(_scaled_layer()), "Linear"),
    "values in the model's own forward": (OwnValues, "OwnValues"),
}


@row_wise
class DeclaredHitExperts(HitExperts):
    """Each token by itself: so it keeps micro-batches and replicas."""


@row_wise
class DeclaredSplitExperts(SplitExperts):
    """The same of a sort."""


@row_wise
class CenteredExperts(SkippedExperts):
    """Declared, and wrongly so."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens - tokens.mean(0), chosen, weights)


DECLARED: dict[str, Callable[[], nn.Module]] = {
    "declared experts that are hit": lambda: Mixture(DeclaredHitExperts),
    "declared experts by counts": lambda: Mixture(DeclaredSplitExperts),
}


class _Deciding(nn.Module):
    """What a kept module may not do, behind a decision by a value."""

    def __init__(self, what: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.what(self, x * 2 if x.detach().sum() > 0 else x)


class _Holding(Ends):
    def __init__(self, what: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.part = _Deciding(what)

    def middle(self, x: Tensor) -> Tensor:
        return self.part(x)


_CALLS = itertools.count(1)


def recounting() -> nn.Module:
    """A part gives another number at each call, of C code that no guard sees."""
    return _Holding(lambda module, x: x * next(_CALLS))


def drawing() -> nn.Module:
    """A part draws random numbers."""
    return _Holding(lambda module, x: F.dropout(x, 0.5))


def _tokens_above(module: nn.Module, x: Tensor) -> Tensor:
    return x[x > 0]


#: By what they do.
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "gives a size of data": lambda: _Holding(_tokens_above),
}
