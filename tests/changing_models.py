"""Models whose forward changes what is theirs: momentum encoders, codebooks, queues, trained parameters, attributes.

In: nothing. Out: `WAYS` of changing one tensor by another one; `Momentum`, which does so to a frozen parameter or a
buffer; `MODELS`, as people write them; `TRAINED` and `UNCHANGED` ways for `Prototypes`. Each takes rows of
[rows, WIDTH] and gives its loss, in float64. `Reporting`, which takes what `Ends` takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nonstrict_models import LOCK, Ends

WIDTH = 6
NUM_CODES = 5
QUEUE = 60


def batch(num_rows: int, seed: int = 0) -> Tensor:
    """Rows in float64, whatever the default."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, WIDTH, generator=generator, dtype=torch.float64)


def _average_of_data(key: Tensor, query: Tensor) -> None:
    key.data = key.data * 0.75 + query.data * 0.25


def _average_in_data(key: Tensor, query: Tensor) -> None:
    key.data.mul_(0.75).add_(query.data, alpha=0.25)


def _average_in_place(key: Tensor, query: Tensor) -> None:
    key.lerp_(query, 0.25)


def _copy(key: Tensor, query: Tensor) -> None:
    key.data.copy_(query)


def _clone(key: Tensor, query: Tensor) -> None:
    key.data = query.data.clone()


def _transpose(key: Tensor, query: Tensor) -> None:
    key.data = key.data.t()


def _set_item(key: Tensor, query: Tensor) -> None:
    key.data[:, 1:] = query[:, 1:] * 0.5


def _many(key: Tensor, query: Tensor) -> None:
    torch._foreach_mul_([key], 0.75)
    torch._foreach_add_([key], [query])


def _item(key: Tensor, query: Tensor) -> None:
    key.data[:, 1:] = query[:, 1:]


def _copy_with_gradients(key: Tensor, query: Tensor) -> None:
    with torch.enable_grad():
        key.data.copy_(query)


def _add_with_gradients(key: Tensor, query: Tensor) -> None:
    with torch.enable_grad():
        key.detach().mul_(0.75).add_(query, alpha=0.25)


WAYS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "average of data": _average_of_data,
    "average in data": _average_in_data,
    "average in place": _average_in_place,
    "copy": _copy,
    "clone": _clone,
    "transpose": _transpose,
    "item": _set_item,
    "item itself": _item,
    "copy with gradients": _copy_with_gradients,
    "add with gradients": _add_with_gradients,
    "many": _many,
}


class Momentum(nn.Module):
    """A query is trained towards a key that follows it. `decides`: asks for values, so that it runs as written."""

    def __init__(
        self, way: Callable[[Tensor, Tensor], None], *, is_buffer: bool = False, decides: bool = False
    ) -> None:
        super().__init__()
        self.way, self.decides = way, decides
        self.first, self.query = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        key = torch.linspace(-1.0, 1.0, WIDTH * WIDTH).view(WIDTH, WIDTH)
        if is_buffer:
            self.register_buffer("key", key)
        else:
            self.key = nn.Parameter(key, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.way(self.key, self.query.weight)
            target = x @ self.key
        h = self.first(x).tanh()
        if self.decides and h.sum().item() > 1e6:
            h = 2 * h
        return (self.query(h) - target).pow(2).mean()


def _round_in_data(h: Tensor) -> Tensor:
    h.data.round_()
    return h


def _new_data(h: Tensor) -> Tensor:
    h.data = h.data.round()
    return h


def _round_in_place(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.round_()
    return h


def _sign_of_part(h: Tensor) -> Tensor:
    signs = h * 2
    signs.data = signs.data.sign()
    return signs + h


def _through_detached(h: Tensor) -> Tensor:
    h.detach().mul_(2)
    return h * h


def _detached_in_place(h: Tensor) -> Tensor:
    found = h * 2
    found.detach_()
    return found * h


def _filled(h: Tensor) -> Tensor:
    found = torch.zeros_like(h)
    with torch.no_grad():
        found.copy_(h)
    return found * h


def _filled_in_data(h: Tensor) -> Tensor:
    found = torch.zeros_like(h)
    found.data[0].copy_(h[0])
    return found * h


def _filled_in_detached(h: Tensor) -> Tensor:
    found = torch.zeros_like(h)
    found.detach().add_(h)
    return found * h


def _filled_in_part(h: Tensor) -> Tensor:
    found = torch.zeros_like(h)
    with torch.no_grad():
        found[:, 0] = h[:, 0]
    found[:, 1] = h[:, 1]
    return found * h


def _grown(h: Tensor) -> Tensor:
    found = h.detach().clone()
    found += h
    return found * h


#: Values that change in place: what a graph takes, and what code that runs as written may do only.
FILLED = {
    "copy": _filled,
    "data": _filled_in_data,
    "detached": _filled_in_detached,
    "part": _filled_in_part,
    "clone": _grown,
}
HIDDEN = {
    "in data": _round_in_data,
    "new data": _new_data,
    "in place": _round_in_place,
    "part": _sign_of_part,
    "detached": _through_detached,
    "detached in place": _detached_in_place,
}


class Quantized(nn.Module):
    """Changes an inner value in a way."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(3 * self.first(x))).pow(2).mean()


def _shrink(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.3, 0.3)
    weight.data.mul_(0.9)


def _normalize(weight: nn.Parameter) -> None:
    weight.data = F.normalize(weight.data, dim=1)


def _normalize_in_data(weight: nn.Parameter) -> None:
    weight.data.copy_(F.normalize(weight.data, dim=1))


def _forget_a_row(weight: nn.Parameter) -> None:
    weight.data[0].zero_()


def _shrink_detached(weight: nn.Parameter) -> None:
    weight.detach().mul_(0.9)


def _shrink_in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.9)


def _normalize_twice(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.copy_(F.normalize(weight, dim=1))
    weight.data = torch.renorm(weight.data, p=2, dim=1, maxnorm=0.5)
    weight.data = weight.data * 0.9


def _forget_elements(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[:, 1:3] = 0.0
    weight.data *= torch.ones_like(weight).tril()


#: Ways of changing a parameter that gets a gradient from what it is used for then.
TRAINED: dict[str, Callable[[nn.Parameter], None]] = {
    "clamp": _shrink,
    "new data": _normalize,
    "copy": _normalize_in_data,
    "row": _forget_a_row,
    "detached": _shrink_detached,
    "in place": _shrink_in_place,
    "several times": _normalize_twice,
    "elements": _forget_elements,
}


def _own_data(weight: nn.Parameter) -> None:
    weight.data = weight.data


def _own_dtype(weight: nn.Parameter) -> None:
    weight.data = weight.data.to(weight.dtype)


def _own_values(weight: nn.Parameter) -> None:
    weight.data = weight.detach()


#: Ways that change nothing, as libraries write them that move a parameter to where its input is.
UNCHANGED: dict[str, Callable[[nn.Parameter], None]] = {
    "data": _own_data,
    "to": _own_dtype,
    "detached": _own_values,
}


class Prototypes(nn.Module):
    """Cosine-like products with rows that are changed first, or after a view of them was made."""

    def __init__(self, way: Callable[[nn.Parameter], None], *, view_first: bool = False) -> None:
        super().__init__()
        self.way, self.view_first = way, view_first
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rows = nn.Parameter(torch.linspace(-1.0, 1.0, NUM_CODES * WIDTH).view(NUM_CODES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows.t() if self.view_first else None
        self.way(self.rows)
        return (self.first(x) @ (self.rows.t() if rows is None else rows)).pow(2).mean()


class ActNorm(nn.Module):
    """Shifts and scales that are set by the first batch of training, and trained from then on (Glow). `by_number`: the
    code asks its flag for a number.
    """

    def __init__(self, *, by_number: bool) -> None:
        super().__init__()
        self.by_number = by_number
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shift, self.log_scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("is_set", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        h = x + torch.tanh(self.first(x))
        if self.training and ((self.is_set.item() == 0) if self.by_number else not self.is_set):
            self.begin(h)
        h = h * self.log_scale.exp() + self.shift
        return self.last(h).pow(2).mean() - self.log_scale.sum()

    def begin(self, h: Tensor) -> None:
        if self.by_number:
            with torch.no_grad():
                self.shift.data.copy_(-h.mean(0))
                self.log_scale.data.copy_(-h.std(0).log())
            self.is_set.fill_(1)
        else:
            self.shift.data, self.log_scale.data = -h.mean(0).detach(), -h.std(0).log().detach()
            self.is_set.data = torch.ones_like(self.is_set)


class ShortWords(nn.Module):
    """Words whose vectors are kept short, looked up by themselves and in bags."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_CODES, WIDTH, max_norm=1.0)
        self.bags = nn.EmbeddingBag(NUM_CODES, WIDTH, max_norm=0.5, norm_type=1.0, mode="sum")
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ids = x.abs().mul(1.5).long().clamp(max=NUM_CODES - 1)
        return self.last(self.words(ids).sum(1) + self.bags(ids)).pow(2).mean()


class LateChange(nn.Module):
    """A scale that is used first and changed last: by rows of the batch, by another parameter, or by itself."""

    def __init__(self, way: Callable[[nn.Parameter, nn.Parameter, Tensor], object]) -> None:
        super().__init__()
        self.way = way
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        with torch.no_grad():
            self.way(self.scale, self.layers[-1].bias, h)
        return h.pow(2).mean()


#: Ways of `LateChange`.
LATE: dict[str, Callable[[nn.Parameter, nn.Parameter, Tensor], object]] = {
    "by rows": lambda scale, bias, rows: scale.copy_(rows.mean(0)),
    "towards rows": lambda scale, bias, rows: scale.lerp_(rows.mean(0), 0.1),
    "by another": lambda scale, bias, rows: scale.copy_(bias + 1),
    "by itself": lambda scale, bias, rows: scale.mul_(0.9).sub_(0.01),
}


class Teacher(nn.Module):
    """An average of a layer that could be trained, whose results are detached."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data.mul_(0.9).add_(query.data, alpha=0.1)
        return F.mse_loss(self.query(x), self.key(x).detach())


class Reporting(Ends):
    """Puts what it finds into attributes, for whoever looks at them after a call: of itself and of a layer of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.share, self.report = None, {}

    def middle(self, x: Tensor) -> Tensor:
        with LOCK:
            y = x * self.scale
        self.first.seen = x
        self.hidden, self.num_rows = y.detach(), x.shape[0]
        self.share = (y > 0).double().mean().item()
        self.report = {"norm": y.detach().norm().item(), "kind": "norm"}
        self.penalty = y.pow(2).mean()
        return y


class Codebook(nn.Module):
    """Vector quantisation by moving averages, whose parameters are new ones in each step and get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.codes = nn.Embedding(NUM_CODES, WIDTH)
        self.register_buffer("counts", torch.ones(NUM_CODES))
        self.sums = nn.Parameter(torch.linspace(-1.0, 1.0, NUM_CODES * WIDTH).view(NUM_CODES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        distances = (
            z.pow(2).sum(1, keepdim=True) + self.codes.weight.pow(2).sum(1) - 2 * z @ self.codes.weight.t()
        )
        chosen = torch.zeros(len(x), NUM_CODES, dtype=x.dtype).scatter_(
            1, distances.argmin(1, keepdim=True), 1
        )
        quantized = chosen @ self.codes.weight
        if self.training:
            counts = self.counts * 0.9 + 0.1 * chosen.sum(0)
            self.counts = (counts + 1e-5) / (counts.sum() + NUM_CODES * 1e-5) * counts.sum()
            self.sums = nn.Parameter(self.sums * 0.9 + 0.1 * chosen.t() @ z)
            self.codes.weight = nn.Parameter(self.sums / self.counts.unsqueeze(1))
        straight = z + (quantized - z).detach()
        return 0.25 * F.mse_loss(quantized.detach(), z) + F.mse_loss(self.decoder(straight), x)


class Queue(nn.Module):
    """Contrast with keys of earlier steps, in a queue that is filled by whole batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            mine.data.copy_(theirs.data)
            mine.requires_grad = False
        self.register_buffer(
            "queue", F.normalize(torch.linspace(-1.0, 1.0, WIDTH * QUEUE).view(WIDTH, QUEUE), dim=0)
        )
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        rows, place = keys.shape[0], int(self.place)
        assert QUEUE % rows == 0
        self.queue[:, place : place + rows] = keys.T
        self.place[0] = (place + rows) % QUEUE

    def forward(self, x: Tensor) -> Tensor:
        query = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.data = mine.data * 0.9 + theirs.data * 0.1
            keys = F.normalize(self.key(x.flip(1)), dim=1)
        own = (query * keys).sum(1, keepdim=True)
        scores = torch.cat([own, query @ self.queue.clone().detach()], 1) / 0.1
        self._enqueue(keys)
        return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        return -0.3 * grad


class Adversarial(nn.Module):
    """A gradient is reversed, and labels are made with `len`. `decides`: as `Momentum`."""

    def __init__(self, *, decides: bool = False) -> None:
        super().__init__()
        self.decides = decides
        self.first, self.domain = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.decides and h.sum().item() > 1e6:
            h = 2 * h
        return h.pow(2).mean() + F.cross_entropy(self.domain(_Reversed.apply(h)), torch.zeros(len(x)).long())


class Episode(nn.Module):
    """Two rows for each of three classes: a batch of six."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(self.first(x).tanh()).view(3, 2, 4)
        return F.cross_entropy(-torch.cdist(h[:, 1], h[:, 0]), torch.arange(3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "codebook": Codebook,
    "queue": Queue,
    "adversarial": Adversarial,
    "adversarial as written": lambda: Adversarial(decides=True),
    "episode": Episode,
    "rounded": lambda: Quantized(_round_in_data),
    "teacher": Teacher,
    "own data": lambda: Prototypes(UNCHANGED["data"]),
    "first batch": lambda: ActNorm(by_number=False),
    "first batch, by number": lambda: ActNorm(by_number=True),
    "short words": ShortWords,
}
