"""A rehearsal runs everything that a step runs, and leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rannc_backend.runtime.comm.gloo import DoneWork
from rannc_backend.runtime.gradients.bucket_layout import plan_buckets
from rannc_backend.runtime.gradients.buckets import BucketMemory, GradientBuckets, PendingGradients
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.step.graph_runtime import GraphRuntime
from rannc_backend.runtime.step.rehearsal import Rehearsal
from tests.played_ranks import Fabric
from tests.played_steps import PlayedRank, Setting


def rows_of(*local_rows: int, number: int = 2) -> RowTable:
    return RowTable(local_rows=local_rows, num_micro_batches=number, stage_ranks=((0,), (1,)))


def rehearsal_of(rank: PlayedRank) -> Rehearsal:
    found = Rehearsal.of(rank.world, rank.edges)
    assert found is not None
    return found


def test_nothing_is_left_behind() -> None:
    rank = PlayedRank(Setting(replicas=(1, 1), num_micro_batches=2), Fabric(2), 0)
    stage: Any = rank.stages[0]
    counter = torch.zeros(1)
    rank.executor.buffers = {"counter": counter}
    stage.outputs.append(SimpleNamespace(name="counter", kind="buffer", fqn="counter", once=False))
    plain, given = stage.forward, []

    def forward(args: Any, destinations: Any) -> Any:
        outputs, saved = plain(args, destinations)
        given.append(args[0].clone())
        return [*outputs, counter + torch.rand(1)], saved

    stage.forward = forward
    state = rank.state(0, rows_of(3, 2))
    state.inputs["input"] += 7
    generator = torch.get_rng_state()
    ended: list[str] = []
    layout = plan_buckets([("weight", torch.zeros(4))], {"weight": (0, 1)}, (0, 1), 2.0**20)

    def reduce(buffer: torch.Tensor, ranks: tuple[int, ...]) -> DoneWork:
        ended.append("reduced")
        return DoneWork()

    pending = PendingGradients(
        layout=layout, memory=[BucketMemory(torch.ones(layout.buckets[0].numel), {})], start_reduce=reduce
    )
    rehearsal = rehearsal_of(rank)
    rehearsal.run(
        "train", rank.executor, [("train", *rank.program("train")[:2])], state, lambda: pending, dict
    )
    assert torch.equal(torch.get_rng_state(), generator) and counter.item() == 0 and not ended
    assert not (
        state.saved or state.values or state.receives or state.sends or state.partials or state.buffers_read
    )
    assert not rank.device.queued and not rank.device.unfinished, "no message was queued"
    # The rank's own rows, and in the place of the other's the first of them.
    assert [x[:, 0].tolist() for x in given] == [[7.0, 8.0, 9.0], [7.0, 7.0]]
    assert pending.in_last_micro_batch and rehearsal.num_runs == 1


def test_what_is_new_for_some_rank_is_known_to_all() -> None:
    rank = PlayedRank(Setting(replicas=(1, 1), num_micro_batches=2), Fabric(2), 0)
    connected: list[Any] = []
    rank.transport.connect = connected.append  # type: ignore[method-assign, assignment]
    rehearsal = rehearsal_of(rank)
    first = rows_of(2, 2)
    assert rehearsal.is_needed("loss", first, ())
    rehearsal.done("loss", first, ())
    channels = {channel for channel, _, _ in connected[0]}
    # Micro-batch 0 is of rank 0 alone and micro-batch 1 of rank 1: its input goes to rank 0, labels of the
    # other to rank 1.
    assert (
        ("I>0 F", 1, 0) in connected[0]
        and ("I>1 F", 0, 1) in connected[0]
        and ("0>1 F", 0, 1) in connected[0]
    )
    assert ("1>0 B", 1, 0) in connected[0] and channels == {"I>0 F", "0>I B", "I>1 F", "0>1 F", "1>0 B"}
    assert not rehearsal.is_needed("loss", first, ())
    assert not rehearsal.is_needed("loss", rows_of(3, 1), ()), "the same sizes between the same ranks"
    assert rehearsal.is_needed("infer", first, ()), "another variant of the stages"
    assert rehearsal.is_needed("loss", rows_of(4, 4), ()), "other sizes"
    uneven = rows_of(3, 2)
    assert rehearsal.is_needed("loss", uneven, ())
    rehearsal.done("loss", uneven, ())
    assert not rehearsal.is_needed("loss", rows_of(3, 3), ()), "all sizes have been there"
    assert not list(connected[1]), "connections are made once"


def test_rows_that_are_local_already_are_not_connected() -> None:
    rows = RowTable(local_rows=(3, 3), num_micro_batches=1, stage_ranks=((0, 1),))
    assert rows.pairs(-1, 0) == frozenset()
    rows = RowTable(local_rows=(4, 2), num_micro_batches=1, stage_ranks=((0, 1),))
    assert rows.pairs(-1, 0) == {(0, 1)}


def test_a_step_takes_the_buckets_of_its_rehearsal() -> None:
    """The rehearsal of a step comes before the step's own buckets are taken, so that memory holds them
    once.
    """
    weight = torch.zeros(4)
    layout = plan_buckets([("weight", weight)], {"weight": (0,)}, (0,), 2.0**20)
    buckets = GradientBuckets(
        layout=layout, parameters={"weight": weight}, stage_ranks=(0,), start_reduce=_reduced
    )
    rehearsed: list[int] = []

    def executor(kind: str, state: Any) -> None:
        if not rehearsed:
            rehearsed.append(len(buckets.pending().memory))

    def begin_backward(state: Any, outputs: frozenset[int]) -> None:
        assert outputs == {1}
        state.pending = buckets.pending()

    runtime: Any = SimpleNamespace(
        executor=executor,
        loss_index=1,
        _begin_backward=begin_backward,
        buckets=buckets,
        world=SimpleNamespace(device=None),
        _num_scalars=1,
        _loss_scalar=0,
        _run=lambda kind, phase, state: executor(kind, state),
    )
    scalars = SimpleNamespace(partial_gradients=lambda *given: {})
    state: Any = SimpleNamespace(
        shapes=SimpleNamespace(scalars=scalars),
        rows=None,
        scalars={},
        pending=None,
        loss_gradient=None,
        partial_gradients=None,
    )
    GraphRuntime._run_eager(runtime, state, 1.0)
    assert rehearsed == [1] and state.pending is not None and len(buckets.tensors()) == 1


def _reduced(buffer: torch.Tensor, ranks: tuple[int, ...]) -> DoneWork:
    return DoneWork()
