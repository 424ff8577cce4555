"""Checks of `rannc_backend.gathered`: the model whole for a while, and given back exactly.

In: a context. Out: findings. Steps go on after every block, and equal one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import rannc_backend
from rannc_backend import gathered, is_held
from rannc_backend.api import gathering
from rannc_backend.session_registry import REGISTRY
from tests.distributed.harness.context import Context
from tests.odd_models import worst_error

EXACT = 1e-12
WIDTH, ROWS = 6, 5


class Net(nn.Module):
    """Tied and transposed weights, and a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.rand(3, WIDTH).t())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.add_(0.125)
        y = self.last(self.second(self.first(x).tanh()).tanh() + self.seen) @ self.scale
        return y.square().mean(), y


class _Pair:
    """The model on the ranks and in one process."""

    def __init__(self, context: Context, **options: Any) -> None:
        self.context = context
        self.model, self.alone, self.compiled, self.optimizers = context.pair(
            lambda: Net().double(), **options
        )
        self.held = [True]
        self.step("first")
        self.held = self._held()
        self.number = len(REGISTRY.sessions[self.model].compiled)

    def _held(self) -> list[bool]:
        return [is_held(each) for each in (*self.model.parameters(), *self.model.buffers())]

    def step(self, what: str) -> None:
        generator = torch.Generator().manual_seed(3)
        whole = torch.rand(sum(self.context.case.local_rows), WIDTH, generator=generator).double()
        start, stop = self.context.interval
        loss, rows = self.compiled(whole[start:stop].clone())
        expected, expected_rows = self.alone(whole)
        loss.backward()
        expected.backward()
        error = max(
            abs(float(loss.detach() / expected.detach()) - 1.0),
            float((rows.detach() - expected_rows[start:stop].detach()).abs().max()),
            worst_error(self.model, self.alone),
        )
        self.context.findings.that(error <= EXACT, f"{what}: the next step is off by {error}")
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def compare(self, what: str) -> None:
        """The model as it lies here with that of one process."""
        for name, value in self.alone.state_dict().items():
            own = self.model.state_dict()[name]
            error = float((own.double() - value.double()).abs().max())
            self.context.findings.that(error <= EXACT, f"{what}: {name} is off by {error}")

    def after(self, what: str) -> None:
        """The block has left nothing behind, and training goes on."""
        find = self.context.findings.that
        find(self._held() == self.held, f"{what}: other values are held than before")
        find(not REGISTRY.gathered, f"{what}: calls still run plainly")
        self.step(what)
        number = len(REGISTRY.sessions[self.model].compiled)
        find(number == self.number, f"{what}: compiled again")

    @contextmanager
    def refused(self, what: str, *words: str, error: str = "GatheringError") -> Iterator[None]:
        try:
            yield
        except Exception as found:
            text = "\n".join([str(found), *getattr(found, "__notes__", ())])
            self.context.findings.that(type(found).__name__ == error, f"{what}: {found!r}")
            self.context.findings.that(all(word in text for word in words), f"{what}: {text}")
        else:
            self.context.findings.that(False, f"{what} is taken")


def gathered_works(context: Context) -> dict[str, Any]:
    """Whole and plain inside, also on one rank alone, in a block within a block and by other numbers of calls."""
    pair = _Pair(context)
    x = torch.rand(ROWS, WIDTH).double()
    find, model, rank = context.findings.that, pair.model, context.rank
    with gathered(pair.compiled) as plain:
        find(plain is model, "another model is given")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        pair.compare("inside")
        for _ in range(1 + rank):
            for call in (pair.compiled, model):
                error = float((call(x)[1] - pair.alone(x)[1]).detach().abs().max())
                find(error <= EXACT, f"a call inside is off by {error}")
        with gathered(model), torch.no_grad():
            find(bool(torch.equal(model.first(x), pair.compiled.first(x))), "a submodule")
        copy.deepcopy(model)
        # Ranks have called it differently often.
        model.load_state_dict(before)
        pair.alone.load_state_dict(before)
        pair.compare("at the end")
    pair.after("gathered")
    with torch.inference_mode(), gathered(model):
        pair.compare("in inference mode")
    pair.after("inference mode")
    with gathered(model.second, rank0_only=True):
        if rank == 0:
            pair.compare("on rank 0 alone")
    pair.after("rank 0 alone")
    return {}


def _scale(pair: _Pair, on_model: bool = True) -> None:
    with torch.no_grad():
        for number, tensor in enumerate(pair.model.parameters() if on_model else pair.alone.parameters()):
            # With a version, without one, and by another tensor.
            if number % 3 == 0:
                tensor.mul_(0.9)
            elif number % 3 == 1:
                tensor.data.mul_(0.9)
            else:
                tensor.data = tensor.data * 0.9


def gathered_changes(context: Context) -> dict[str, Any]:
    """Values that are changed inside come to all owners, or are refused."""
    pair = _Pair(context, **context.case.parameters)
    last = context.case.world - 1
    with gathered(pair.model):
        _scale(pair)
    _scale(pair, on_model=False)
    pair.after("the same change")
    with gathered(pair.model, modifier_rank=last):
        if context.rank == last:
            _scale(pair)
    _scale(pair, on_model=False)
    pair.after("a change of the last rank")
    with gathered(pair.model, modifier_rank=0, rank0_only=True):
        if context.rank == 0:
            _scale(pair)
            pair.model.seen.add_(1.0)
    _scale(pair, on_model=False)
    pair.alone.seen.add_(1.0)
    pair.after("a change of rank 0 alone")
    owner = REGISTRY.sessions[pair.model].table.owners["second.weight"][0]
    other = (owner + 1) % context.case.world
    for what, modifier in (("of one rank", None), ("of another than the modifier", owner)):
        with pair.refused(f"a change {what}", "'second.weight'", "some ranks only"):
            with gathered(pair.model, modifier_rank=modifier):
                if context.rank == other:
                    pair.model.second.weight.data.add_(1.0)
        # The first owner's value stays.
        pair.after(f"a change {what}")
    return {}


def _raise(pair: _Pair) -> None:
    if pair.context.rank == 1:
        raise ValueError("of the script")


def _replace(pair: _Pair) -> None:
    pair.model.second.weight.data = pair.model.second.weight.data.float()


def _compiled_function(pair: _Pair) -> None:
    torch.compile(lambda x: pair.model(x)[0], **pair.context.compile_arguments())(
        torch.rand(2, WIDTH).double()
    )


def _nested(pair: _Pair) -> None:
    with gathered(pair.model, modifier_rank=0):
        pass


REFUSED: dict[str, tuple[Callable[[_Pair], object], str]] = {
    "another dtype": (_replace, "another shape, dtype or device"),
    "undeploy": (lambda pair: rannc_backend.undeploy(pair.model), "undeploy"),
    "more than the outer block": (_nested, "outer block"),
    "a compiled function": (_compiled_function, "compiled function"),
}


def gathered_refused(context: Context) -> dict[str, Any]:
    """What cannot be done inside is an error on all ranks, after which the model is as before."""
    pair = _Pair(context)
    for what, (act, word) in REFUSED.items():
        with pair.refused(what, word), gathered(pair.model):
            act(pair)
        pair.after(what)
    with (
        pair.refused("an error of one rank", "of the script", error="ValueError"),
        gathered(pair.model),
    ):
        _raise(pair)
    pair.after("an error of one rank")
    before = gathering.available_bytes
    gathering.available_bytes = lambda device: 8 if context.rank == 1 else 10**12
    try:
        with pair.refused("no room", "bytes more", "8 bytes are free", "rank0_only"), gathered(pair.model):
            context.findings.that(False, "the block was entered")
    finally:
        gathering.available_bytes = before
    pair.after("no room")
    with pair.refused("other arguments", "different arguments"):
        with gathered(pair.model, modifier_rank=context.rank):
            pass
    pair.after("other arguments")
    torch.manual_seed(context.rank)
    with pair.refused("values of each rank", "other values on other ranks"), gathered(Net()):
        pass
    with pair.refused("gradients", "gradients of"), gathered(pair.model):
        pair.model(torch.rand(ROWS, WIDTH).double())[0].backward()
    return {}
