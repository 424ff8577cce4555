"""When messages are queued: shared communicators, and any action waiting for its whole device, let every
program end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.errors import ScheduleError
from rannc_backend.ir.action import INPUT, OUTPUT, OrderedMessage, Program, parse_programs
from rannc_backend.ir.exchange import Edge
from rannc_backend.ir.updates import Update, divide, ranks_of_updates
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.step.queue_order import queued_messages, routes_of
from rannc_backend.schedule.edges import PHASES, EdgeSpec, Phase
from rannc_backend.schedule.lowering import lower_lanes
from rannc_backend.schedule.message_order import message_order
from rannc_backend.schedule.orders import ScheduleName, build_order, schedule_named, schedule_names
from tests.played_ranks import Fabric
from tests.played_steps import transport_of
from tests.schedule_lists import ONE_STAGE, num_stages_for


def link_of(message: OrderedMessage, num_lanes: int) -> tuple[int, ...]:
    """Messages between the same two lanes share a communicator; those of the endpoints do, and where there are no other
    lanes all.
    """
    is_of_all = min(message.channel[:2]) < 0 or num_lanes == 2
    return (INPUT,) if is_of_all else tuple(sorted((message.sender, message.receiver)))


def never_ends(
    programs: Mapping[int, Program], ordered: tuple[OrderedMessage, ...], *, synchronise: bool
) -> dict[int, str]:
    """Where lanes stand for ever: queues run their operations in order, and with ``synchronise`` each
    computation waits for all queued.
    """
    operations: dict[int, list[tuple[int, OrderedMessage]]] = defaultdict(list)
    for message in ordered:
        if message.sender != message.receiver:
            operations[message.sender].append((message.sender_place, message))
            operations[message.receiver].append((message.receiver_place, message))
    for waiting in operations.values():
        waiting.sort(key=lambda operation: operation[0])
    place = dict.fromkeys(programs, 0)
    queues: dict[tuple[int, tuple[int, ...]], list[OrderedMessage]] = defaultdict(list)
    unfinished: dict[int, set[OrderedMessage]] = defaultdict(set)
    moved = True
    while moved:
        moved = False
        for lane, program in programs.items():
            while True:
                while operations[lane] and operations[lane][0][0] <= place[lane]:
                    message = operations[lane].pop(0)[1]
                    queues[lane, link_of(message, len(programs))].append(message)
                    unfinished[lane].add(message)
                if place[lane] == len(program) or (
                    synchronise and program[place[lane]].is_compute and unfinished[lane]
                ):
                    break
                place[lane] += 1
                moved = True
        for (_, link), queue in list(queues.items()):
            while (
                queue
                and queues[queue[0].sender, link][:1] == queue[:1] == queues[queue[0].receiver, link][:1]
            ):
                message = queue[0]
                for end in (message.sender, message.receiver):
                    queues[end, link].pop(0)
                    unfinished[end].discard(message)
                moved = True
    stuck = {
        lane: str(program[place[lane]]) for lane, program in programs.items() if place[lane] < len(program)
    }
    return stuck or {lane: "the end" for lane, left in unfinished.items() if left}


def made_programs(
    schedule: ScheduleName, phase: Phase, num_stages: int, number: int, skips: tuple[tuple[int, int], ...]
) -> dict[int, Program]:
    pairs = [(stage, stage + 1) for stage in range(num_stages - 1)] + [
        skip for skip in skips if skip[1] < num_stages
    ]
    pairs += [(INPUT, 0), (num_stages - 1, OUTPUT)]
    edges = [
        EdgeSpec(src=source, dst=destination, num_forward_values=1, num_gradient_values=1)
        for source, destination in set(pairs)
    ]
    if num_stages > 1:
        edges.append(EdgeSpec(src=INPUT, dst=num_stages - 1, num_forward_values=1))
    return lower_lanes(build_order(schedule, num_stages, number), edges, phase, number)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(schedule_names()),
    st.sampled_from(PHASES),
    st.integers(2, 8),
    st.integers(1, 16),
    st.sets(
        st.tuples(st.integers(0, 6), st.integers(2, 7)).filter(lambda skip: skip[0] + 1 < skip[1]), max_size=3
    ),
    st.booleans(),
)
def test_programs_end_whatever_waits_for_its_device(
    schedule: ScheduleName,
    phase: Phase,
    num_stages: int,
    number: int,
    skips: set[tuple[int, int]],
    idle: bool,
) -> None:
    num_stages = num_stages_for(schedule, num_stages)
    programs = made_programs(schedule, phase, num_stages, number, tuple(sorted(skips)))
    if idle:
        programs[len(programs)] = tuple(action for action in programs[0] if action.stage < 0)
    ordered = message_order(programs)
    for synchronise in (False, True):
        assert not never_ends(programs, ordered, synchronise=synchronise)
    # Posted before its place, and queued before it is waited for.
    numbers = {
        lane: {str(action): index for index, action in enumerate(program)}
        for lane, program in programs.items()
    }
    for message in ordered:
        letter = message.channel.direction
        names = {place: "IO"[-1 - place] if place < 0 else str(place) for place in message.channel[:2]}
        source, destination = names[message.channel.source], names[message.channel.destination]
        send, done = (f"{source}{kind}{letter}{message.micro_batch}>{destination}" for kind in "SD")
        receive, wait = (f"{destination}{kind}{letter}{message.micro_batch}<{source}" for kind in "RW")
        assert numbers[message.sender][send] < message.sender_place <= numbers[message.sender][done]
        assert numbers[message.receiver][receive] < message.receiver_place <= numbers[message.receiver][wait]


def test_the_model_sees_a_hang() -> None:
    """As programs post them, the ends of a shared communicator have their operations in different orders."""
    programs = made_programs("fill_drain", "train", 2, 4, ())
    ordered = message_order(programs)
    posted = []
    for message in ordered:
        places = []
        for lane, kind in ((message.sender, "S"), (message.receiver, "R")):
            found = [
                i
                for i, a in enumerate(programs[lane])
                if a.kind.value[0] == kind and a.kind.value[1:] and a.channel == message.channel
            ]
            places.append(next(i for i in found if programs[lane][i].micro_batch == message.micro_batch) + 1)
        posted.append(message._replace(sender_place=places[0], receiver_place=places[1]))
    assert never_ends(programs, tuple(posted), synchronise=False)


def test_with_one_micro_batch_no_gradient_is_received_before_the_forward() -> None:
    for schedule in ONE_STAGE:
        for num_stages in range(2, 9):
            programs = made_programs(schedule, "train", num_stages, 1, ())
            for message in message_order(programs):
                if message.channel.direction == "B" and message.receiver != message.sender:
                    forward = next(
                        i
                        for i, action in enumerate(programs[message.receiver])
                        if str(action) == f"{message.receiver}F0"
                    )
                    assert message.receiver_place > forward


def test_programs_that_get_stuck_have_no_turns() -> None:
    programs = parse_programs("lane 0: 0WF0<1 0RF0<1 0SF0>1\nlane 1: 1RF0<0 1WF0<0 1SF0>0\n")
    with pytest.raises(ScheduleError, match="never ends"):
        message_order(programs)


@st.composite
def plans(
    draw: st.DrawFn,
) -> tuple[int, tuple[tuple[int, ...], ...], list[tuple[int, int]], list[tuple[int, ...]]]:
    """Ranks, stages, edges between stages, and the stages of tied parameters."""
    size = draw(st.integers(2, 64))
    replicas: list[int] = []
    while sum(replicas) < size and len(replicas) < 12:
        replicas.append(draw(st.integers(1, size - sum(replicas))))
    starts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    ranks = tuple(tuple(range(start, start + number)) for start, number in zip(starts, replicas, strict=True))
    stages = range(len(ranks))
    skips = draw(
        st.sets(
            st.tuples(st.sampled_from(stages), st.sampled_from(stages)).filter(
                lambda pair: pair[0] < pair[1]
            ),
            max_size=3,
        )
    )
    tied = draw(st.lists(st.sets(st.sampled_from(stages), min_size=2), max_size=2)) if len(ranks) > 1 else []
    return (
        size,
        ranks,
        sorted(skips | {(s, s + 1) for s in stages[:-1]}),
        [tuple(sorted(stages)) for stages in tied],
    )


def communicators(
    size: int,
    ranks: tuple[tuple[int, ...], ...],
    pairs: list[tuple[int, int]],
    tied: list[tuple[int, ...]],
    updates: Iterable[Update] = (),
) -> list[int]:
    """By rank, as a deployment asks for them."""
    edges = {pair: Edge(src=pair[0], dst=pair[1], forward=(), gradient=(1,)) for pair in pairs}  # type: ignore[arg-type]
    for pair in ((INPUT, 0), (INPUT, len(ranks) - 1), (len(ranks) - 1, OUTPUT)):
        edges[pair] = Edge(src=pair[0], dst=pair[1], forward=(), gradient=(1,))  # type: ignore[arg-type]
    owners = [tuple(rank for stage in stages for rank in ranks[stage]) for stages in tied]
    transport = transport_of(Fabric(size).devices[0], size)
    transport.prepare(
        channels=["state"],
        routes=routes_of(edges, ranks, size),
        groups=sorted({tuple(range(size)), *ranks, *owners, *ranks_of_updates(updates)}),
    )
    transport.share(sorted({*ranks, *owners}))
    created: list[tuple[int, ...]] = transport._calls.created  # type: ignore[attr-defined]
    return [sum(rank in group for group in created) for rank in range(size)]


@settings(max_examples=60, deadline=None)
@given(plans())
def test_a_rank_has_few_communicators(
    plan: tuple[int, tuple[tuple[int, ...], ...], list[tuple[int, int]], list[tuple[int, ...]]],
) -> None:
    """Two for all ranks, one for each stage that a rank's stage talks to, one for each group that reduces:
    however many ranks there are.
    """
    size, ranks, pairs, tied = plan
    counts = communicators(size, ranks, pairs, tied)
    for stage, members in enumerate(ranks):
        neighbours = {other for pair in pairs for other in pair if stage in pair} - {stage}
        groups = {
            tuple(rank for stage in stages for rank in ranks[stage]) for stages in tied if stage in stages
        }
        groups |= {members} if len(members) > 1 else set()
        for rank in members:
            assert counts[rank] <= 2 + len(neighbours) + len(groups - {tuple(range(size))})


@pytest.mark.parametrize("size", [2, 8, 64])
def test_communicators_of_chains_and_of_data_parallelism(size: int) -> None:
    chain = communicators(
        size, tuple((rank,) for rank in range(size)), [(s, s + 1) for s in range(size - 1)], []
    )
    assert max(chain) == (2 if size == 2 else 4)
    assert communicators(size, (tuple(range(size)),), [], []) == [2] * size


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("schedule", schedule_names())
def test_communicators_of_chains_under_every_schedule(schedule: str, size: int) -> None:
    """Lanes of several stages talk to no more others than those of one, whatever the number of stages."""
    described = schedule_named(schedule)
    several = [described.stages_per_lane] if described.stages_per_lane > 1 else [1, 2]
    for per_lane in [*several, 4] if described.with_stages_per_lane(4) else several:
        made = described.with_stages_per_lane(per_lane) or schedule_named("interleaved")
        num_stages = size * per_lane
        lanes = made.lanes(num_stages)
        assert len(lanes) == size
        rank_of = {stage: (rank,) for rank, lane in enumerate(lanes) for stage in lane}
        ranks = tuple(rank_of[stage] for stage in range(num_stages))
        pairs = [(stage, stage + 1) for stage in range(num_stages - 1)]
        assert max(communicators(size, ranks, pairs, [])) <= 4


@pytest.mark.parametrize("size", [8, 64])
def test_communicators_of_replicas_that_divide_updates(size: int) -> None:
    """New values go over the group that sums the gradients; groups within it are one more."""
    everyone = tuple(range(size))
    owners = {name: everyone for name in "abc"}
    for num_groups, most in ((1, 2), (2, 3), (4, 3)):
        updates = divide({"a": 9, "b": 7, "c": 7}, owners, num_groups).values()
        assert communicators(size, (everyone,), [], [], updates) == [most] * size
    half = (everyone[: size // 2], everyone[size // 2 :])
    updates = divide({"a": 9, "b": 7}, {"a": half[0], "b": half[1]}).values()
    assert communicators(size, half, [(0, 1)], [], updates) == [3] * size


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 5), st.booleans(), st.data())
def test_ranks_have_the_same_order_and_every_message_once(
    replicas: list[int], number: int, gather: bool, data: st.DataObject
) -> None:
    starts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    ranks = tuple(tuple(range(start, start + count)) for start, count in zip(starts, replicas, strict=True))
    size = sum(replicas)
    local = data.draw(
        st.lists(st.integers(0, 5), min_size=size, max_size=size).filter(lambda rows: sum(rows) and rows[0])
    )
    rows = RowTable(
        local_rows=tuple(local), num_micro_batches=number, stage_ranks=ranks, gather_inputs=gather
    )
    ordered = message_order(made_programs("1f1b", "forward", len(ranks), number, ()))
    mine = [queued_messages(ordered, rank, rows) for rank in range(size)]
    for rank, own in enumerate(mine):
        places = [message.place for message in own]
        assert places == sorted(places)
        for other in range(rank + 1, size):
            here = [(message.channel, message.is_send) for message in own if message.peer == other]
            there = [
                (message.channel, not message.is_send) for message in mine[other] if message.peer == rank
            ]
            assert here == there
    wanted = sum(
        piece.peer != rank
        for rank in range(size)
        for channel, micro_batch in {(message.channel, message.micro_batch) for message in ordered}
        if rank in rows.ranks(channel.source)
        for piece in rows.pieces(channel.source, channel.destination, rank, micro_batch)
    )
    assert sum(message.is_send for own in mine for message in own) == wanted
    for source, destination in {message.channel[:2] for message in ordered}:
        named = {
            (rank, piece.peer)
            for m in range(number)
            for rank in rows.ranks(source)
            for piece in rows.pieces(source, destination, rank, m)
            if piece.peer != rank
        }
        assert rows.pairs(source, destination) == named
