"""Gradient buckets: sums over micro-batches, reductions that start early and alike on all ranks, gradients
that stay the user's.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.ir.updates import Update
from rannc_backend.kernels.message_layout import ALIGNMENT_BYTES
from rannc_backend.runtime.gradients.bucket_layout import UNDIVIDED, Division, plan_buckets
from rannc_backend.runtime.gradients.buckets import (
    BufferPool,
    GradientBuckets,
    PendingGradients,
    StageGradients,
)
from rannc_backend.runtime.gradients.delayed_reduction import reduce_gradients

STAGE = (0, 1)
SLOT = ALIGNMENT_BYTES // 4  # elements that a gradient of four floats takes


class Reductions:
    """Stands for the transport: notes what is reduced, and doubles it (two ranks with the same gradients)."""

    def __init__(self) -> None:
        self.started: list[tuple[int, tuple[int, ...]]] = []
        self.takers: list[tuple[int, ...]] = []

    def __call__(
        self, buffer: torch.Tensor, ranks: tuple[int, ...], takers: tuple[int, ...] = ()
    ) -> Reductions:
        self.started.append((buffer.numel(), ranks))
        self.takers.append(takers)
        buffer.mul_(2)
        return self

    def wait(self) -> None:
        """Done at once."""


def make(
    owners: dict[str, tuple[int, ...]],
    capacity_bytes: float = 1.5 * ALIGNMENT_BYTES,
    division: Division = UNDIVIDED,
) -> tuple[GradientBuckets, Reductions]:
    parameters = {name: torch.nn.Parameter(torch.zeros(4)) for name in owners}
    reductions = Reductions()
    layout = plan_buckets(list(parameters.items()), owners, STAGE, capacity_bytes, division)
    return GradientBuckets(
        layout=layout, parameters=parameters, stage_ranks=STAGE, start_reduce=reductions
    ), reductions


def give(pending: PendingGradients, name: str, gradient: torch.Tensor) -> None:
    """What a backward does with one gradient."""
    view, holds = pending.target(name)
    view.copy_(view + gradient if holds else gradient)
    pending.made(name)


def step(buckets: GradientBuckets, value: float, scale: float = 1.0) -> None:
    """One step in which every parameter gets one gradient."""
    pending = buckets.pending()
    pending.begin_last_micro_batch()
    for name in buckets.parameters:
        give(pending, name, torch.full((4,), value))
    pending.finish()
    buckets.publish(pending, scale, keep=False)


def wide(**dtypes: torch.dtype) -> tuple[GradientBuckets, Reductions]:
    """Buckets in which gradients of 16 bits are summed in float32."""
    parameters = {name: torch.nn.Parameter(torch.zeros(4, dtype=dtype)) for name, dtype in dtypes.items()}
    reductions = Reductions()
    owners = dict.fromkeys(dtypes, STAGE)
    layout = plan_buckets(list(parameters.items()), owners, STAGE, 2**20, wide_sums=True)
    return GradientBuckets(
        layout=layout, parameters=parameters, stage_ranks=STAGE, start_reduce=reductions
    ), reductions


def test_gradients_of_16_bits_are_summed_in_float32_and_rounded_once() -> None:
    dtypes = {"a": torch.bfloat16, "b": torch.float32, "c": torch.float16, "d": torch.float64}
    buckets, _ = wide(**dtypes)
    assert {(spec.dtype, spec.rounded_to) for spec in buckets.layout.buckets} == {
        (torch.float32, torch.bfloat16),
        (torch.float32, None),
        (torch.float32, torch.float16),
        (torch.float64, None),
    }
    pending = buckets.pending()
    # 256 and 1, 256 times: in bfloat16 each addition would be lost.
    for value in (256.0, *[1.0] * 256):
        for name in dtypes:
            give(pending, name, torch.full((4,), value))
    pending.finish()
    buckets.publish(pending, 0.5, keep=True)
    buckets.publish(pending, 0.5, keep=False)
    for name, parameter in buckets.parameters.items():
        assert parameter.grad is not None and parameter.grad.dtype == dtypes[name]
        # The sum of two ranks, half of it, twice.
        assert torch.equal(parameter.grad, torch.full((4,), 1024.0, dtype=dtypes[name]))


def test_delayed_sums_over_owners_are_made_in_float32_too() -> None:
    module = torch.nn.Linear(4, 1, dtype=torch.bfloat16)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 256.0)
    table = SimpleNamespace(
        module=lambda: module,
        owners=dict.fromkeys(("weight", "bias"), STAGE),
        updates={},
        world=SimpleNamespace(rank=0, device=torch.device("cpu")),
        gradients_are_local=True,
    )
    dtypes = []

    def add_others(buffer: torch.Tensor, ranks: tuple[int, ...], takers: tuple[int, ...] = ()) -> Reductions:
        dtypes.append(buffer.dtype)
        for _ in range(8):  # in bfloat16 each of them would be lost
            buffer.add_(0.5)
        return Reductions()

    reduce_gradients(table, add_others, 2**20, wide_sums=True)  # type: ignore[arg-type]
    assert dtypes == [torch.float32] and not table.gradients_are_local
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, 260.0))


def test_a_rounded_gradient_that_is_kept_is_not_overwritten_and_its_memory_is_used_again() -> None:
    buckets, _ = wide(a=torch.bfloat16)
    parameter = buckets.parameters["a"]
    step(buckets, 1.0)
    kept, parameter.grad = parameter.grad, None
    step(buckets, 2.0)
    assert torch.equal(kept, torch.full((4,), 2.0, dtype=torch.bfloat16)), "two ranks"
    num_buffers = len(buckets.tensors())
    assert num_buffers == 3, "one sum, the gradient that is kept and the newest"
    parameter.grad = kept = None
    for _ in range(3):
        step(buckets, 3.0)
        parameter.grad = None
    assert len(buckets.tensors()) == num_buffers


def test_buckets_are_filled_to_the_last_byte() -> None:
    buckets, _ = make(dict.fromkeys("abcd", STAGE), 4.0 * (SLOT + 4))
    assert [bucket.names for bucket in buckets.layout.buckets] == [("a", "b"), ("c", "d")]
    buckets, _ = make(dict.fromkeys("abcd", STAGE), 4.0 * (SLOT + 4) - 1)
    assert [bucket.names for bucket in buckets.layout.buckets] == [("a",), ("b",), ("c",), ("d",)]


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=20),
    st.integers(1, 8),
    st.sampled_from([(), ("a", "b")]),
)
def test_there_are_no_more_buckets_than_asked_for(sizes: list[int], most: int, tied: tuple[str, ...]) -> None:
    parameters = [(f"p{number}", torch.zeros(size)) for number, size in enumerate(sizes)]
    parameters += [(name, torch.zeros(5)) for name in tied]
    owners = {name: (0, 1, 2) if name in tied else STAGE for name, _ in parameters}
    layout = plan_buckets(parameters, owners, STAGE, 1.0, max_buckets=most)
    for ranks in {STAGE, *((0, 1, 2) for _ in tied)}:
        found = [bucket.names for bucket in layout.buckets if bucket.ranks == ranks]
        assert len(found) <= most
        assert [name for names in found for name in names] == [
            name for name, _ in parameters if owners[name] == ranks
        ]
    least = max(sum(sizes) / most, max(sizes))
    numels = [
        sum(layout.slots[name].numel for name in bucket.names)
        for bucket in layout.buckets
        if bucket.ranks == STAGE
    ]
    assert max(numels) <= sum(sizes) / most + max(sizes) <= 2 * least


def test_as_many_buckets_as_parameters_of_equal_size() -> None:
    parameters = [(name, torch.zeros(8)) for name in "abcd"]
    layout = plan_buckets(parameters, dict.fromkeys("abcd", STAGE), STAGE, 1e9, max_buckets=2)
    assert [bucket.names for bucket in layout.buckets] == [("a", "b"), ("c", "d")]


def test_sums_over_several_stages_start_after_the_last_backward() -> None:
    """Other stages may need what this backward sends before they come to theirs."""
    buckets, reductions = make({"a": STAGE, "b": (0, 1, 2), "c": STAGE})
    pending = buckets.pending()
    pending.begin_last_micro_batch()
    for name in "bac":
        give(pending, name, torch.ones(4))
    assert [ranks for _, ranks in reductions.started] == [STAGE]
    pending.finish()
    assert [ranks for _, ranks in reductions.started] == [STAGE, (0, 1, 2)]


def test_sum_over_micro_batches_then_over_ranks() -> None:
    buckets, reductions = make({"a": STAGE, "b": STAGE, "c": STAGE})
    pending = buckets.pending()
    for name in "abc":
        give(pending, name, torch.ones(4))
    assert reductions.started == []
    pending.begin_last_micro_batch()
    give(pending, "a", torch.ones(4))
    give(pending, "b", torch.ones(4))
    assert reductions.started == [(2 * SLOT, STAGE)], "the first bucket goes while the rest of backward runs"
    give(pending, "c", torch.ones(4))
    pending.finish()
    buckets.publish(pending, 0.5, keep=False)
    assert all(
        torch.equal(parameter.grad, torch.full((4,), 2.0)) for parameter in buckets.parameters.values()
    )
    assert [count for count, _ in reductions.started] == [2 * SLOT, SLOT]
    # A base would be followed by Dynamo when it compiles the next mode of the model.
    assert all(parameter.grad._base is None for parameter in buckets.parameters.values())


def test_gradients_begin_at_multiples_of_128_bytes() -> None:
    parameters = [
        ("a", torch.zeros(3, 5)),
        ("b", torch.zeros(1)),
        ("c", torch.zeros(40)),
        ("d", torch.zeros(0)),
        ("e", torch.zeros(2)),
    ]
    layout = plan_buckets(parameters, {name: STAGE for name, _ in parameters}, STAGE, 2**20)
    assert [slot.offset * 4 % ALIGNMENT_BYTES for slot in layout.slots.values()] == [0] * 5
    spans = sorted((slot.offset, slot.offset + slot.numel) for slot in layout.slots.values())
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert spans[-1][1] <= layout.buckets[0].numel


def test_positions_of_a_stage_are_names_of_the_buckets() -> None:
    buckets, _ = make({"a": STAGE, "b": STAGE})
    pending = buckets.pending()
    sink = StageGradients(pending, {5: "b", 0: "a"})
    assert sink.target(5)[0] is pending.view("b") and sink.target(5)[1] is False
    sink.made(5)
    assert pending.received == {"b"} and sink.target(5)[1] is True and sink.target(0)[1] is False


def test_several_gradients_at_once_are_as_one_after_the_other() -> None:
    buckets, reductions = make({"a": STAGE, "b": STAGE, "c": STAGE})
    pending = buckets.pending()
    sink = StageGradients(pending, {5: "b", 0: "a", 7: "c"})
    views, holding = sink.targets([5, 7])
    assert views[0] is pending.view("b") and views[1] is pending.view("c") and holding == [False, False]
    sink.all_made([5])
    assert sink.targets([0, 5])[1] == [False, True] and pending.received == {"b"}
    pending.begin_last_micro_batch()
    sink.all_made([5, 0])
    assert reductions.started == [(2 * SLOT, STAGE)], "both gradients of the first bucket are there"
    sink.all_made([7])
    assert len(reductions.started) == 2


def test_buckets_of_a_group_start_in_order_even_when_a_later_one_fills_first() -> None:
    buckets, reductions = make({"a": STAGE, "b": STAGE}, capacity_bytes=16)
    pending = buckets.pending()
    pending.begin_last_micro_batch()
    give(pending, "b", torch.ones(4))
    assert reductions.started == []
    give(pending, "a", torch.ones(4))
    assert len(reductions.started) == 2


def test_tied_parameter_without_gradient_here_still_joins_its_group() -> None:
    buckets, reductions = make({"own": STAGE, "tied": (0, 1, 2)})
    pending = buckets.pending()
    pending.begin_last_micro_batch()
    give(pending, "own", torch.ones(4))
    pending.finish()
    buckets.publish(pending, 1.0, keep=False)
    assert (SLOT, (0, 1, 2)) in reductions.started
    assert torch.equal(buckets.parameters["tied"].grad, torch.zeros(4))


def test_parameter_that_no_gradient_reaches_keeps_none() -> None:
    buckets, _ = make({"a": STAGE, "b": STAGE})
    pending = buckets.pending()
    pending.begin_last_micro_batch()
    give(pending, "a", torch.ones(4))
    pending.finish()
    buckets.publish(pending, 1.0, keep=False)
    assert buckets.parameters["b"].grad is None


def test_published_gradients_accumulate_and_buffers_are_reused_only_when_free() -> None:
    buckets, _ = make({"a": (0,)})
    parameter = buckets.parameters["a"]
    step(buckets, 1.0)
    address = parameter.grad.data_ptr()
    step(buckets, 2.0)
    assert torch.equal(parameter.grad, torch.full((4,), 3.0)) and parameter.grad.data_ptr() == address
    kept = parameter.grad.detach()
    parameter.grad = None
    step(buckets, 5.0)
    assert torch.equal(kept, torch.full((4,), 3.0)), "a gradient that the user keeps is never overwritten"
    del kept
    parameter.grad = None
    step(buckets, 7.0)
    assert parameter.grad.data_ptr() == address, "zero_grad(set_to_none=True) makes no new memory"
    assert len(buckets.pool.tensors()) == 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_costs_no_memory_and_the_gradient_is_born_where_it_is_published(set_to_none: bool) -> None:
    buckets, _ = make({"a": (0,), "b": (0,)}, capacity_bytes=16)
    optimizer = torch.optim.SGD(buckets.parameters.values(), lr=0.1)
    addresses = set()
    for number in range(5):
        optimizer.zero_grad(set_to_none=set_to_none)
        step(buckets, float(number))
        addresses.add(tuple(parameter.grad.data_ptr() for parameter in buckets.parameters.values()))
        assert all(torch.equal(p.grad, torch.full((4,), float(number))) for p in buckets.parameters.values())
    assert len(addresses) == 1
    # Where gradients stay and are added to, what is added needs memory as well.
    assert len(buckets.pool.tensors()) == (2 if set_to_none else 4)


def test_one_kept_gradient_keeps_one_bucket() -> None:
    buckets, _ = make({"a": (0,), "b": (0,)}, capacity_bytes=16)
    step(buckets, 1.0)
    kept = buckets.parameters["a"].grad
    for parameter in buckets.parameters.values():
        parameter.grad = None
    step(buckets, 2.0)
    assert torch.equal(kept, torch.ones(4))
    assert len(buckets.pool.tensors()) == 3, "the other bucket was used again"


@pytest.mark.parametrize("keep", ["detach", "numpy", "view", "alias"])
def test_whatever_refers_to_a_gradient_keeps_it(keep: str) -> None:
    buckets, _ = make({"a": (0,)})
    step(buckets, 1.0)
    parameter = buckets.parameters["a"]
    match keep:
        case "detach":
            kept = parameter.grad.detach()
        case "numpy":
            kept = parameter.grad.numpy()
        case "view":
            kept = parameter.grad[1:3]
        case _:
            kept = parameter.grad
    buckets.parameters["a"].grad = None
    step(buckets, 2.0)
    assert all(value == 1.0 for value in kept), "a gradient that the user keeps is never overwritten"


def test_graphs_of_a_model_share_buffers() -> None:
    first, _ = make({"a": (0,)})
    second, _ = make({"a": (0,)})
    second.pool = first.pool = BufferPool()
    step(first, 1.0)
    first.parameters["a"].grad = None
    step(second, 2.0)
    second.parameters["a"].grad = None
    step(first, 3.0)
    assert len(first.pool.tensors()) == 1


def test_retained_graph_publishes_copies() -> None:
    buckets, _ = make({"a": (0,)})
    pending = buckets.pending()
    pending.begin_last_micro_batch()
    give(pending, "a", torch.ones(4))
    pending.finish()
    buckets.publish(pending, 2.0, keep=True)
    buckets.publish(pending, 3.0, keep=False)
    assert torch.equal(buckets.parameters["a"].grad, torch.full((4,), 5.0))


@given(data=st.data())
def test_ranks_that_wait_for_sums_in_their_order_all_get_there(data: st.DataObject) -> None:
    """A sum in shared memory goes on while its ranks wait for it, so no ranks may wait for each other in a
    ring.
    """
    sizes = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=4))
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    stages = [tuple(range(first, first + size)) for first, size in zip(firsts, sizes, strict=True)]
    users = data.draw(
        st.lists(st.sets(st.sampled_from(range(len(stages))), min_size=1), min_size=1, max_size=7)
    )
    dtypes = data.draw(
        st.lists(st.sampled_from([torch.float32, torch.bfloat16]), min_size=len(users), max_size=len(users))
    )
    owners = {
        f"p{i}": tuple(sorted(rank for stage in used for rank in stages[stage]))
        for i, used in enumerate(users)
    }
    waits: dict[int, list[tuple[tuple[int, ...], tuple[str, ...]]]] = {}
    for index, ranks in enumerate(stages):
        mine = data.draw(st.permutations([i for i, used in enumerate(users) if index in used]))
        parameters = [(f"p{i}", torch.empty(4, dtype=dtypes[i], device="meta")) for i in mine]
        layout = plan_buckets(parameters, owners, ranks, 2 * ALIGNMENT_BYTES)
        for rank in ranks:
            waits[rank] = [(bucket.ranks, bucket.names) for bucket in layout.buckets]
    while any(waits.values()):
        ready = [
            wait[0]
            for wait in waits.values()
            if wait and all(waits[other][:1] == wait[:1] for other in wait[0][0])
        ]
        assert ready, f"nobody can go on: {waits}"
        for rank in ready[0][0]:
            waits[rank].pop(0)


def test_absent_gradients_of_a_shared_parameter_are_zero_in_a_buffer_that_was_used_before() -> None:
    buckets, _ = make({"own": STAGE, "tied": (0, 1, 2)})
    step(buckets, 3.0)
    for parameter in buckets.parameters.values():
        parameter.grad = None
    pending = buckets.pending()
    pending.begin_last_micro_batch()
    give(pending, "own", torch.ones(4))
    pending.finish()
    buckets.publish(pending, 1.0, keep=False)
    assert torch.equal(buckets.parameters["tied"].grad, torch.zeros(4)), "of the step before"
    assert torch.equal(buckets.parameters["own"].grad, torch.full((4,), 2.0))


@pytest.mark.parametrize("keep", [False, True])
def test_hooks_change_the_whole_gradient_once_and_see_its_sum(keep: bool) -> None:
    buckets, _ = make({"a": (0,), "b": (0,)})
    seen: list[torch.Tensor] = []
    told: list[torch.Tensor] = []
    changed = buckets.parameters["a"]
    changed.register_hook(lambda gradient: seen.append(gradient.clone()))
    changed.register_hook(lambda gradient: gradient * 10)
    changed.register_post_accumulate_grad_hook(lambda parameter: told.append(parameter.grad.clone()))
    assert buckets.has_hooks()
    for number in (1.0, 2.0):
        pending = buckets.pending()
        pending.begin_last_micro_batch()
        for name in buckets.parameters:
            give(pending, name, torch.full((4,), number))
        pending.finish()
        for _ in range(2 if keep else 1):
            buckets.publish(pending, 0.5, keep=keep)
    times = 2 if keep else 1
    assert [gradient[0].item() for gradient in seen] == [0.5] * times + [1.0] * times
    assert (
        changed.grad.tolist() == [15.0 * times] * 4
        and buckets.parameters["b"].grad.tolist() == [1.5 * times] * 4
    )
    assert told[-1].tolist() == changed.grad.tolist() and len(told) == 2 * times


def divided(rank: int, *, keeps_all: bool = True) -> Division:
    """Rank 0 updates a and c, rank 1 updates b and d; e is updated by both."""
    updates = {
        name: Update(groups=(STAGE,), updaters=(place % 2,))
        for place, name in enumerate(("a", "b", "c", "d"))
    }
    return Division(updates=updates, rank=rank, keeps_all=keeps_all)


@pytest.mark.parametrize("rank", STAGE)
@pytest.mark.parametrize("keeps_all", [True, False])
def test_sums_go_to_those_that_update(rank: int, keeps_all: bool) -> None:
    buckets, reductions = make(
        dict.fromkeys("abcde", STAGE), 4 * ALIGNMENT_BYTES, divided(rank, keeps_all=keeps_all)
    )
    # In the order in which the last gradient of each comes, the same on both ranks.
    assert [bucket.names for bucket in buckets.layout.buckets] == [("a", "c"), ("b", "d"), ("e",)]
    for number in range(2):
        pending = buckets.pending()
        pending.begin_last_micro_batch()
        for name in "abcde":
            give(pending, name, torch.full((4,), 1.0 + number))
        pending.finish()
        kept = [memory.flat.numel() > 0 for memory in pending.memory]
        assert kept == [keeps_all or rank == 0, keeps_all or rank == 1, True]
        buckets.publish(pending, 0.5, keep=False)
        assert reductions.takers[3 * number :] == [(0,), (1,), ()]
        mine = "ace" if rank == 0 else "bde"
        for name, parameter in buckets.parameters.items():
            expected = torch.full((4,), 3.0 if number else 1.0) if name in mine else None
            assert (parameter.grad is None) if expected is None else torch.equal(parameter.grad, expected), (
                name
            )


def test_local_gradients_stay_with_every_owner() -> None:
    """Those that are summed later: each owner has a part of the sum."""
    buckets, _ = make(dict.fromkeys("abcde", STAGE), 4 * ALIGNMENT_BYTES, divided(0, keeps_all=False))
    pending = buckets.pending()
    pending.is_local = True
    pending.begin_last_micro_batch()
    for name in "abcde":
        give(pending, name, torch.ones(4))
    pending.finish()
    buckets.publish(pending, 1.0, keep=False)
    assert all(parameter.grad is not None for parameter in buckets.parameters.values())


def test_a_gradient_of_two_stages_of_a_rank_is_reduced_when_both_have_made_it() -> None:
    buckets, reductions = make({"tied": STAGE, "own": STAGE}, capacity_bytes=0.5 * ALIGNMENT_BYTES)
    pending = buckets.pending()
    names = {0: "tied", 1: "own"}
    first, second = (StageGradients(pending, names, is_last=is_last) for is_last in (True, False))

    def give_tied(sink: StageGradients) -> None:
        view, holds = sink.target(0)
        view.copy_(view + 1.0 if holds else torch.ones(4))
        sink.all_made([0])

    pending.begin_last_micro_batch({"tied": 1})
    give_tied(first)
    assert not reductions.started
    give_tied(second)  # another backward of that stage is to come
    assert not reductions.started
    give_tied(StageGradients(pending, names))
    assert len(reductions.started) == 1
    pending.finish()
    pending.finish()  # once for each stage
    assert len(reductions.started) == 2
    buckets.publish(pending, 1.0, keep=False)
    assert torch.equal(buckets.parameters["tied"].grad, torch.full((4,), 6.0))
