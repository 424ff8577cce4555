"""Models that Dynamo refuses, and that are captured by one run of their forward: each has one reason.

In: nothing. Out: `MODELS` by reason, and `REFUSED` with what no graph holds. Each takes rows `x` of
[rows, LENGTH, WIDTH] and gives its loss, in float64, with neither dropout nor statistics over the batch.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
LENGTH = 5
LOCK = threading.Lock()
SCALE = {"of_output": 1.5}


class Ends(nn.Module):
    """A layer before and a layer after what is tested, so that it may be cut twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x)))).square().mean()


class Around(Ends):
    """One part between the layers."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def middle(self, x: Tensor) -> Tensor:
        return self.part(x)


class Locked(Ends):
    """A library takes a lock in its forward."""

    def middle(self, x: Tensor) -> Tensor:
        with LOCK:
            return x.sin()


class Recurrent(Ends):
    """Layers of torch that Dynamo does not trace, two directions, and weights that they keep in a list."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH // 2, num_layers=2, batch_first=True, bidirectional=True)

    def middle(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class InComprehension(nn.Module):
    """The root's argument is a cell, as an inner function uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(3))
        self.last = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with LOCK:
            return self.last(torch.cat([tower(x) for tower in self.towers], -1)).square().mean()


class Collecting(Ends):
    """Hooks that keep what layers give, as libraries do for `output_hidden_states`."""

    def middle(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        handle = self.first.register_forward_hook(lambda module, args, output: kept.append(output))
        try:
            self.first(x)
        finally:
            handle.remove()
        return x + kept[0].cos()


class Stopped(Ends):
    """Gradients that stop in a stretch without them, and in one that ends early."""

    def middle(self, x: Tensor) -> Tensor:
        with LOCK, torch.no_grad():
            scale = x.abs().amax(-1, keepdim=True) + 1
        with LOCK, contextlib.suppress(ValueError), torch.no_grad():
            shift = x.mean(-1, keepdim=True)
            raise ValueError
        return x / scale - shift


class Recomputed(Ends):
    """torch.utils.checkpoint in the way that torch advises against."""

    def middle(self, x: Tensor) -> Tensor:
        with LOCK:
            return checkpoint(lambda y: self.first(y).sigmoid() * y, x, use_reentrant=True)


class Penalized(Ends):
    """A gradient within the forward, which has a gradient itself."""

    def middle(self, x: Tensor) -> Tensor:
        with LOCK:
            (slope,) = torch.autograd.grad(self.first(x).tanh().sum(), x, create_graph=True)
        return x + slope


class Derived(Ends):
    """A gradient within the forward that is a number for the model."""

    def middle(self, x: Tensor) -> Tensor:
        with LOCK:
            (slope,) = torch.autograd.grad(x.sin().sum(), x)
        return x * slope


class Functional(Ends):
    """torch.func within the model."""

    def middle(self, x: Tensor) -> Tensor:
        with LOCK:
            return torch.func.vmap(lambda row: F.softmax(row @ row.T, -1) @ row)(x)


class Printing(Ends):
    """Python's own input and output."""

    def middle(self, x: Tensor) -> Tensor:
        print(end="", flush=True)  # noqa: T201 - what is tested
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: None)
            return x.exp().log1p()


class Counting(Ends):
    """A buffer in whose place each call puts another tensor, and one that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("decay", torch.ones(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        with LOCK:
            self.steps = self.steps + 1
            self.decay.mul_(0.9)
        return x * self.decay / self.steps


class PlainTensors(Ends):
    """Tensors that are plain attributes, in a list too, and numbers of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.linspace(0, 1, WIDTH)
        self.scales = [torch.full((WIDTH,), 2.0), torch.full((WIDTH,), 0.5)]

    def middle(self, x: Tensor) -> Tensor:
        with LOCK:
            return (x + self.shift) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=x.dtype)


class Tied(Ends):
    """One weight under two names, and a second time as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.first.weight
        object.__setattr__(self, "alias", self.first.weight)

    def middle(self, x: Tensor) -> Tensor:
        with LOCK:
            return x @ vars(self)["alias"].T


class Checking(Ends):
    """A library looks at values where nobody compiles, and its layer has a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def middle(self, x: Tensor) -> Tensor:
        with LOCK:
            if not torch.compiler.is_compiling() and not bool(x.isfinite().all()):
                raise ValueError("not finite")
            return self.block(x)


class Block(nn.Module):
    """See `Checking`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sigmoid()


class Global(Ends):
    """A global that is read, and an attribute of an object."""

    def middle(self, x: Tensor) -> Tensor:
        with LOCK:
            return x * SCALE["of_output"]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class _Scaled(torch.autograd.Function):
    """A parameter, a number, an input without gradient, and two values."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, Tensor]:
        context.save_for_backward(x, weight)
        context.scale = scale
        return x @ weight * scale * mask, x.sum(-1)

    @staticmethod
    def backward(context: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = context.saved_tensors
        rows = x.reshape(-1, WIDTH)
        return 3 * first @ weight.t() + second[..., None], rows.t() @ first.reshape(-1, WIDTH), None, None


doubled = _Doubled.apply  # as PyTorch's documentation takes it from its class


class OwnBackwards(Ends):
    """Functions whose backward is not the derivative of their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.1)

    def middle(self, x: Tensor) -> Tensor:
        first, second = _Scaled.apply(doubled(x), self.weight, 0.5, (x > 0).to(x.dtype))
        return first + second[..., None]


class Paths(Ends):
    """Another path for large batches: of all ranks, not of one."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 9

    def middle(self, x: Tensor) -> Tensor:
        with LOCK:
            if x.shape[0] >= 2 * self.limit:
                return x.cos()
            return x.sin() if x.shape[0] >= self.limit else 2 * x


class Written(Ends):
    """Writes what has a gradient into what had none."""

    def middle(self, x: Tensor) -> Tensor:
        with LOCK:
            found = torch.zeros_like(x)
            found[..., :2] = x[..., :2] * 2
            with torch.no_grad():
                scaled = x * 3
            scaled += x.sin()
            ones = torch.ones_like(x)
            ones *= x
            return found + scaled + ones


class ChosenByValues(Ends):
    """Takes a path by values of its inputs and by a buffer, which it sets itself the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if x[:, 0, 0].max() > 1:
            x = 2 * x
        if not self.is_ready:
            x = x.cos()
            self.is_ready.fill_(True)
        tokens = int((x.abs().sum(-1) > 0).sum(-1).max())  # all
        return super().forward(x[:, :tokens])


class ChosenByCount(Ends):
    """Takes a path by how many rows it selects."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0, 0] > 1.0).nonzero()
        if chosen.size(0) > 0:
            return super().forward(x[chosen[:, 0]])
        return super().forward(x.cos())


class Likelihood(Ends):
    """A loss of torch that refuses some values, code that says what holds, and numbers for a log in the result."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        hidden = self.first(x)
        torch._check((hidden.abs() < 99).all().item())
        loss = nn.functional.gaussian_nll_loss(self.last(hidden), x, hidden.square() + 0.1)
        largest = x.abs().max().item()
        return loss, {"logged": 2 * loss.item() + 1, "positive": (x > 0).sum().item(), "largest": largest}


class CheckingValues(Ends):
    """Checks of values that only raise, as libraries make them of lengths, masks and labels."""

    def middle(self, x: Tensor) -> Tensor:
        lengths = (x.abs().sum(-1) > 0).sum(-1)
        assert lengths.max().item() <= LENGTH, "too long"
        if not torch.isfinite(x).all():
            if (x > 0).any():
                raise ValueError(f"not finite: {x.max().item()}")
            raise ValueError("not finite, and not above 0")
        if lengths.min() < 0 or lengths.max().item() - 1 > LENGTH:
            raise ValueError("lengths of no rows")
        return x.sin()


@dataclass
class Parts:
    """What a model may give: torch knows no such container."""

    loss: Tensor
    length: int


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lock": Locked,
    "LSTM": Recurrent,
    "GRU": lambda: Recurrent(nn.GRU),
    "comprehension": InComprehension,
    "hook": Collecting,
    "no_grad": Stopped,
    "written": Written,
    "checkpoint": Recomputed,
    "gradient": Penalized,
    "slopes": Derived,
    "vmap": Functional,
    "print": Printing,
    "buffer": Counting,
    "plain_tensors": PlainTensors,
    "tied": Tied,
    "checks": Checking,
    "global": Global,
    "backward of its own": OwnBackwards,
    "checks of values": CheckingValues,
}


OUTSIDE = torch.linspace(0, 1, WIDTH)
OTHER_MODEL = nn.Linear(WIDTH, WIDTH)


def _with(middle: Callable[[Any, Tensor], Tensor], name: str) -> Callable[[], nn.Module]:
    def locked(self: Any, x: Tensor) -> Tensor:
        with LOCK:
            return middle(self, x)

    return type(name, (Ends,), {"middle": locked, "__module__": __name__})


def _count(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return x * self.calls


def _decide(self: Any, x: Tensor) -> Tensor:
    return x * 2 if (x > 0).all() else x


def _keep_and_read(self: Any, x: Tensor) -> Tensor:
    self.kept = x
    return _read(self, x)


def _read(self: Any, x: Tensor) -> Tensor:
    return x * 2 if float(x.sum()) > 0 else x


def _divide(self: Any, x: Tensor) -> Tensor:
    return x / x.abs().max().item()


def _raise_later(self: Any, x: Tensor) -> Tensor:
    if (x > 0).any():
        x = 2 * x
    if not (x > -9).all():
        raise ValueError("too small")
    return x


def _split(self: Any, x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] % 4 == 0 else x


def _backward(self: Any, x: Tensor) -> Tensor:
    self.first(x).sum().backward(retain_graph=True)
    return x


def _hook(self: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def _retain_grad(self: Any, x: Tensor) -> Tensor:
    x.retain_grad()
    return x


def _write_without_gradient(self: Any, x: Tensor) -> Tensor:
    doubled = x + 1
    with torch.no_grad():
        doubled.mul_(2.0)
    return doubled


#: All of the model runs as written.
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "hook": _with(_hook, "Hooking"),
    "value": _with(_read, "Reader"),
    "decision": _with(_decide, "Decider"),
    "divisor": _with(_divide, "Dividing"),
    "a path, then a check": _with(_raise_later, "RaisingLater"),
    "batch size": _with(_split, "Splitter"),
    "in place": _with(_write_without_gradient, "Writer"),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "random": (_with(lambda self, x: x * random.random(), "Random"), "random generator"),
    "numpy": (
        _with(lambda self, x: x * float(__import__("numpy").random.rand()), "NumpyRandom"),
        "random generator",
    ),
    "clock": (_with(lambda self, x: x * time.time(), "Clock"), "reads a clock"),
    "counter": (_with(_count, "Counter"), "changes the model.calls"),
    "kept until it fails": (_with(_keep_and_read, "KeepingReader"), "known only when the model runs"),
    "global tensor": (
        _with(lambda self, x: x * OUTSIDE, "OutsideTensor"),
        "neither an argument nor registered",
    ),
    "other model": (
        _with(lambda self, x: OTHER_MODEL(x), "OtherModel"),
        "neither an argument nor registered",
    ),
    "backward": (_with(_backward, "Backward"), "calls backward"),
    "kept gradient": (_with(_retain_grad, "Retaining"), "calls retain_grad"),
    # What fails for another reason than that it reads a value fails as it does in the model.
    "several values": (
        _with(lambda self, x: x if x > 0 else -x, "Several"),
        "__bool__ cannot be captured",
    ),
}
"""Model, and a part of why it is refused."""


def batch(num_rows: int, seed: int = 0) -> Tensor:
    """In float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


def graph_arguments(capture: Any, call: Any) -> list[Any]:
    """The values of the placeholders of a capture's graph, for a call."""
    captured, tensors = capture.recorded.captured, capture.tensors(call)
    by_name = {item.name: tensors[item.position] for item in captured.inputs if item.kind != "length"}
    by_name |= {length.name: by_name[length.carrier].shape[length.dim] for length in captured.lengths}
    return [by_name[item.name] for item in captured.inputs]
