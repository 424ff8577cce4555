"""Seeds of the eager backward under loss scaling, and autocast that must not act twice; one process.

Eager stages of one micro-batch run the operators that plain torch runs, so that results agree to the rounding
of float32 sums, rounding to 16 bits included.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rannc_backend.errors import UserInputError

CLOSE = 1e-6


class Regions(nn.Module):
    """Layers under the caller's autocast; one layer and the loss in float32 within a region of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        with torch.autocast("cpu", enabled=False):
            x = torch.tanh(self.layers[1](x.float()))
        x = self.layers[2](x)
        with torch.autocast("cpu", enabled=False):
            return F.mse_loss(x.float(), target)


class Pair:
    """The same model twice: compiled, and plain."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model, self.plain = Regions(), Regions()
        self.plain.load_state_dict(self.model.state_dict())
        options = {"stage_compiler": "eager", "pipeline_num": 1}
        self.compiled = torch.compile(self.model, backend="rannc", options=options)
        self.x, self.target = torch.randn(5, 6), torch.randn(5, 6)

    def step(self, scale: float, dtype: torch.dtype, *, between: Callable[[], object] = lambda: None) -> None:
        """One step of both, their losses times ``scale``; gradients must agree."""
        for module, call in ((self.model, self.compiled), (self.plain, self.plain)):
            module.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = call(self.x, self.target)
            if call is self.compiled:
                between()
            (loss * scale).backward()
        for (name, p), q in zip(self.model.named_parameters(), self.plain.parameters()):
            assert p.grad is not None and q.grad is not None, name
            largest = float(q.grad.abs().nan_to_num(posinf=0).max())
            torch.testing.assert_close(p.grad, q.grad, rtol=CLOSE, atol=CLOSE * largest, equal_nan=True)

    def has_infinities(self) -> bool:
        return any(not bool(p.grad.isfinite().all()) for p in self.plain.parameters() if p.grad is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_region_without_autocast_stays_in_float32(dtype: torch.dtype) -> None:
    Pair().step(1.0, dtype)


class OfMeans(nn.Module):
    """A loss that multiplies matrices made of batch means, in float32: outside of the stages, in what follows
    the sums.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        with torch.autocast("cpu", enabled=False):
            mean = x.float().mean(0).view(2, 3)
            return (mean @ mean.t()).square().sum()


def test_what_follows_the_sums_keeps_its_dtype_too() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, plain = OfMeans(), OfMeans()
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="rannc", options={"stage_compiler": "eager", "pipeline_num": 1})
    x = torch.randn(5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, expected = compiled(x), plain(x)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=CLOSE, atol=0)
    for p, q in zip(model.parameters(), plain.parameters()):
        # The product goes back in bfloat16 to both; sums of it are in float32.
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


def test_what_vanishes_or_overflows_in_float16_does_so_as_in_plain_torch() -> None:
    pair = Pair()
    seen = []
    # The first step's seed is 1; then scales that lose digits, that overflow, that recover at once; and zero.
    for scale in (2.0**16, 2.0**16, 2.0**-12, 2.0**24, 2.0**10, 2.0**10, 0.0, -3.0, float("inf"), 2.0**8):
        pair.step(scale, torch.float16)
        seen.append(pair.has_infinities())
    assert seen == [False, False, False, True, False, False, False, False, True, False]


def test_scales_in_a_wide_dtype_never_spoil_the_next_step() -> None:
    pair = Pair()
    # Powers of two: others round differently in bfloat16, when they multiply before the rounding and not
    # after it.
    for scale in (2.0**100, 1.0, 2.0**-100, 4.0, float("inf"), 2.0**16, 2.0**17):
        pair.step(scale, torch.bfloat16)


def test_another_scale_after_the_input_was_changed_is_refused() -> None:
    pair = Pair()
    pair.step(2.0**10, torch.float16)
    with pytest.raises(UserInputError, match="modified in place"):
        pair.step(2.0**11, torch.float16, between=lambda: pair.x.add_(1))


def test_the_same_scale_allows_the_input_to_change() -> None:
    """The gradients exist already, and are those of the input as it was."""
    pair = Pair()
    pair.step(2.0**10, torch.float16)
    expected = [p.grad.clone() for p in pair.plain.parameters() if p.grad is not None]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = pair.compiled(pair.x, pair.target)
    pair.x.add_(1)
    pair.model.zero_grad()
    (loss * 2.0**10).backward()
    for p, gradient in zip(pair.model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=CLOSE, atol=CLOSE * float(gradient.abs().max()))


def test_two_backwards_of_one_forward_with_other_scales() -> None:
    pair = Pair()
    for module, call in ((pair.model, pair.compiled), (pair.plain, pair.plain)):
        module.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = call(pair.x, pair.target)
        (loss * 2.0**12).backward(retain_graph=True)
        (loss * 2.0**4).backward()
    for p, q in zip(pair.model.parameters(), pair.plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=CLOSE, atol=CLOSE * float(q.grad.abs().max()))
