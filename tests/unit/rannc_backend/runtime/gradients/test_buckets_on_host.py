"""Buckets whose sums go to the host (option offload): the same gradients as without, and nothing left on the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rannc_backend.ir.updates import Update
from rannc_backend.kernels.message_layout import ALIGNMENT_BYTES
from rannc_backend.runtime.comm.host_link import HostLink
from rannc_backend.runtime.gradients.bucket_layout import UNDIVIDED, Division, plan_buckets
from rannc_backend.runtime.gradients.buckets import GradientBuckets
from rannc_backend.runtime.trace.allocations import AllocationTracker

STAGE = (0, 1)


class Doubled:
    """A started sum over two ranks with the same gradients, which is there when it is waited for."""

    def __init__(self, buffer: torch.Tensor, ranks: tuple[int, ...], takers: tuple[int, ...] = ()) -> None:
        self.buffer = buffer

    def wait(self) -> None:
        self.buffer.mul_(2)


class Late(HostLink):
    """A link whose copies to the host are there when the host has waited for them, and not before."""

    def bring(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        made = source.clone()
        return SimpleNamespace(wait=lambda: None, wait_on_host=lambda: target.copy_(made))


def make(
    owners: dict[str, tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    division: Division = UNDIVIDED,
    *,
    wide: bool = False,
    stage: tuple[int, ...] = STAGE,
    kind: type[HostLink] = HostLink,
) -> tuple[GradientBuckets, GradientBuckets, HostLink]:
    """Buckets without a host, and with one."""
    made: list[Any] = []
    host = kind(device=torch.device("cpu"), parameters=AllocationTracker(), gradients=AllocationTracker())
    for link in (None, host):
        parameters = {name: torch.nn.Parameter(torch.zeros(4, dtype=dtype)) for name in owners}
        layout = plan_buckets(
            list(parameters.items()), owners, stage, ALIGNMENT_BYTES, division, wide_sums=wide
        )
        made.append(
            GradientBuckets(
                layout=layout,
                parameters=parameters,
                stage_ranks=stage,
                start_reduce=Doubled,
                host_link=link,
            )
        )
    return made[0], made[1], host


def step(buckets: GradientBuckets, value: float, *, keep: bool = False, missing: str = "") -> None:
    """Two micro-batches, the second of which makes each bucket's last gradient in turn."""
    pending = buckets.pending()
    for m in range(2):
        if m == 1:
            pending.begin_last_micro_batch()
        for place, name in enumerate(buckets.parameters):
            if name != missing:
                view, holds = pending.target(name)
                gradient = torch.full((4,), value + place + m, dtype=view.dtype)
                view.copy_(view + gradient if holds else gradient)
                pending.made(name)
    pending.finish()
    buckets.publish(pending, 0.5, keep=keep)
    if keep:
        buckets.publish(pending, 0.25, keep=False)


def same(one: GradientBuckets, other: GradientBuckets) -> bool:
    """Whether the gradients are bit by bit the same, and are missing alike."""
    pairs = [(one.parameters[name].grad, other.parameters[name].grad) for name in one.parameters]
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize("ranks", [STAGE, (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", [HostLink, Late])
def test_gradients_are_the_same_and_accumulate_on_the_host(
    ranks: tuple[int, ...], dtype: torch.dtype, wide: bool, kind: type[HostLink]
) -> None:
    plain, offloaded, host = make(dict.fromkeys("abc", ranks), dtype, wide=wide, kind=kind)
    for value in (1.0, 3.0, 1000.0):
        for buckets in (plain, offloaded):
            step(buckets, value, keep=value == 3.0, missing="b" if value == 1.0 else "")
        assert same(plain, offloaded)
        assert host.gradients.live_bytes == 0, "nothing stays on the device"
    assert host.gradients.peak_bytes == sum(
        spec.numel * spec.dtype.itemsize for spec in offloaded.layout.buckets
    )


def test_a_gradient_that_is_kept_is_not_overwritten_and_memory_of_the_host_is_used_again() -> None:
    _, buckets, _ = make(dict.fromkeys("ab", STAGE))
    parameter = buckets.parameters["a"]
    step(buckets, 1.0)
    kept, expected = parameter.grad, parameter.grad.clone()
    for value in (5.0, 6.0, 7.0):
        for each in buckets.parameters.values():
            each.grad = None
        step(buckets, value)
    assert torch.equal(kept, expected)
    assert len(buckets.tensors()) == 2 + 1, "two buckets, and the one that is kept"


def test_buckets_leave_the_device_one_by_one() -> None:
    _, buckets, host = make(dict.fromkeys("abc", (0,)), stage=(0,))
    pending = buckets.pending()
    whole = host.gradients.live_bytes
    pending.begin_last_micro_batch()
    for number, name in enumerate("abc", start=1):
        view, _ = pending.target(name)
        view.fill_(1.0)
        del view
        pending.made(name)
        assert host.gradients.live_bytes == whole * (3 - number) // 3
    pending.finish()
    buckets.publish(pending, 1.0, keep=False)
    assert all(torch.equal(p.grad, torch.ones(4)) for p in buckets.parameters.values())


def test_what_others_update_is_forgotten_unless_it_is_to_be_summed_later() -> None:
    updates = {"a": Update(groups=(STAGE,), updaters=(0,)), "b": Update(groups=(STAGE,), updaters=(1,))}
    for keeps_all in (True, False):
        division = Division(updates=updates, rank=0, keeps_all=keeps_all)
        plain, offloaded, host = make(dict.fromkeys("ab", STAGE), division=division)
        for buckets in (plain, offloaded):
            step(buckets, 1.0)
        assert same(plain, offloaded) and offloaded.parameters["b"].grad is None
        assert host.gradients.live_bytes == 0
        pending = offloaded.pending()
        pending.is_local = True
        pending.finish()
        assert all(pending.view(name).numel() == 4 for name in "ab")


def test_rounded_gradients_are_on_the_host() -> None:
    _, buckets, _ = make({"a": STAGE}, torch.bfloat16, wide=True)
    assert {spec.dtype for spec in buckets.layout.buckets} == {torch.float32}
    step(buckets, 1.0)
    grad = buckets.parameters["a"].grad
    assert grad is not None and (grad.dtype, grad.device.type) == (torch.bfloat16, "cpu")
