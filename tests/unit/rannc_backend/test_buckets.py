"""Gradient buckets: sums over micro-batches, reductions that start early and alike on all ranks, gradients that stay the user's."""

from __future__ import annotations

import torch

from rannc_backend.runtime.buckets import GradientBuckets, plan_buckets

STAGE = (0, 1)


class Reductions:
    """Stands for the transport: notes what is reduced, and doubles it (two ranks with the same gradients)."""

    def __init__(self) -> None:
        self.started: list[tuple[int, tuple[int, ...]]] = []

    def __call__(self, buffer: torch.Tensor, ranks: tuple[int, ...]) -> Reductions:
        self.started.append((buffer.numel(), ranks))
        buffer.mul_(2)
        return self

    def wait(self) -> None:
        """Done at once."""


def make(owners: dict[str, tuple[int, ...]], capacity_bytes: float = 40) -> tuple[GradientBuckets, Reductions]:
    parameters = {name: torch.nn.Parameter(torch.zeros(4)) for name in owners}
    reductions = Reductions()
    layout = plan_buckets(list(parameters.items()), owners, STAGE, capacity_bytes)
    return GradientBuckets(layout=layout, parameters=parameters, stage_ranks=STAGE, start_reduce=reductions), reductions


def test_sum_over_micro_batches_then_over_ranks() -> None:
    buckets, reductions = make({"a": STAGE, "b": STAGE, "c": STAGE})
    pending = buckets.pending()
    for name in "abc":
        pending.accumulate(name, torch.ones(4))
    assert reductions.started == []
    pending.arm()
    pending.accumulate("a", torch.ones(4))
    pending.accumulate("b", torch.ones(4))
    assert reductions.started == [(8, STAGE)], "the first bucket goes while the rest of backward runs"
    pending.accumulate("c", torch.ones(4))
    pending.finish()
    buckets.publish(pending, 0.5, keep=False)
    assert all(torch.equal(parameter.grad, torch.full((4,), 2.0)) for parameter in buckets.parameters.values())
    assert [count for count, _ in reductions.started] == [8, 4]
    # A base would be followed by Dynamo when it compiles the next mode of the model.
    assert all(parameter.grad._base is None for parameter in buckets.parameters.values())


def test_buckets_of_a_group_start_in_order_even_when_a_later_one_fills_first() -> None:
    buckets, reductions = make({"a": STAGE, "b": STAGE}, capacity_bytes=16)
    pending = buckets.pending()
    pending.arm()
    pending.accumulate("b", torch.ones(4))
    assert reductions.started == []
    pending.accumulate("a", torch.ones(4))
    assert len(reductions.started) == 2


def test_tied_parameter_without_gradient_here_still_joins_its_group() -> None:
    buckets, reductions = make({"own": STAGE, "tied": (0, 1, 2)})
    pending = buckets.pending()
    pending.arm()
    pending.accumulate("own", torch.ones(4))
    pending.finish()
    buckets.publish(pending, 1.0, keep=False)
    assert (4, (0, 1, 2)) in reductions.started
    assert torch.equal(buckets.parameters["tied"].grad, torch.zeros(4))


def test_parameter_that_no_gradient_reaches_keeps_none() -> None:
    buckets, _ = make({"a": STAGE, "b": STAGE})
    pending = buckets.pending()
    pending.arm()
    pending.accumulate("a", torch.ones(4))
    pending.finish()
    buckets.publish(pending, 1.0, keep=False)
    assert buckets.parameters["b"].grad is None


def test_published_gradients_accumulate_and_buffers_are_reused_only_when_free() -> None:
    buckets, _ = make({"a": (0,)})
    parameter = buckets.parameters["a"]

    def step(value: float) -> None:
        pending = buckets.pending()
        pending.arm()
        pending.accumulate("a", torch.full((4,), value))
        pending.finish()
        buckets.publish(pending, 1.0, keep=False)

    step(1.0)
    address = parameter.grad.data_ptr()
    step(2.0)
    assert torch.equal(parameter.grad, torch.full((4,), 3.0)) and parameter.grad.data_ptr() == address
    kept = parameter.grad.detach()
    parameter.grad = None
    step(5.0)
    assert torch.equal(kept, torch.full((4,), 3.0)), "a gradient that the user keeps is never overwritten"
    del kept
    parameter.grad = None
    step(7.0)
    assert parameter.grad.data_ptr() == address, "zero_grad(set_to_none=True) makes no new memory"
    assert len(buckets._pool) == 2


def test_retained_graph_publishes_copies() -> None:
    buckets, _ = make({"a": (0,)})
    pending = buckets.pending()
    pending.arm()
    pending.accumulate("a", torch.ones(4))
    pending.finish()
    buckets.publish(pending, 2.0, keep=True)
    buckets.publish(pending, 3.0, keep=False)
    assert torch.equal(buckets.parameters["a"].grad, torch.full((4,), 5.0))
