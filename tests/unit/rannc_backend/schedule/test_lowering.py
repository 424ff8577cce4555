"""Orders and lowering: any programs that come out are valid, run without hanging, and look as they should."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.ir.action import INPUT, OUTPUT, ActionKind, format_programs, parse_programs
from rannc_backend.schedule.edges import PHASES, EdgeSpec, active_channels
from rannc_backend.schedule.lowering import lower, lower_lanes
from rannc_backend.schedule.orders import build_order, schedule_named, schedule_names, select_phase
from rannc_backend.schedule.verify import verify
from tests.schedule_executor import run_program
from tests.schedule_lists import FIXED, SEVERAL_STAGES, num_stages_for

GOLDEN = Path(__file__).parents[3] / "golden"


def chain_edges(num_stages: int) -> list[EdgeSpec]:
    """A language model: token ids into the first stage, labels into the last, logits out, activations along
    the chain.
    """
    last = num_stages - 1
    edges = [EdgeSpec(src=INPUT, dst=stage, num_forward_values=1) for stage in sorted({0, last})]
    edges += [EdgeSpec(src=s, dst=s + 1, num_forward_values=1, num_gradient_values=1) for s in range(last)]
    return [*edges, EdgeSpec(src=last, dst=OUTPUT, num_forward_values=1, num_gradient_values=1)]


@st.composite
def edge_tables(draw, num_stages: int) -> list[EdgeSpec]:
    """Any edges: neighbours, skips, values without gradient, inputs and outputs anywhere."""
    pairs = [(src, dst) for src in range(num_stages) for dst in range(src + 1, num_stages)]
    pairs += [(INPUT, stage) for stage in range(num_stages)] + [
        (stage, OUTPUT) for stage in range(num_stages)
    ]
    neighbours = {(s, s + 1) for s in range(num_stages - 1)}
    chosen = draw(st.sets(st.sampled_from(pairs), max_size=12)) | (
        neighbours if draw(st.booleans()) else set()
    )
    return [
        EdgeSpec(
            src=src,
            dst=dst,
            num_forward_values=draw(st.integers(0, 2)),
            num_gradient_values=draw(st.integers(0, 1)),
        )
        for src, dst in sorted(chosen)
    ]


def random_order(draw, num_stages: int, num_micro_batches: int) -> tuple:
    """What a later schedule may do: each stage with its own number of forwards ahead, more than 1F1B
    needs.
    """
    order = []
    ahead = num_micro_batches
    for stage in range(num_stages):
        ahead = draw(st.integers(min(num_stages - stage, ahead), ahead))
        whole = build_order("fill_drain", num_stages, num_micro_batches)
        forwards, backwards = (select_phase(whole, phase)[stage] for phase in ("infer", "backward"))
        lane = list(forwards[:ahead])
        for m, backward in enumerate(backwards):
            lane += [backward, *forwards[ahead + m : ahead + m + 1]]
        order.append(tuple(lane))
    return tuple(order)


@settings(max_examples=300)
@given(data=st.data())
def test_any_lowered_program_is_valid_and_runs(data):
    num_stages, num_micro_batches = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 16))
    schedule, phase, window = (
        data.draw(st.sampled_from(FIXED)),
        data.draw(st.sampled_from(PHASES)),
        data.draw(st.integers(0, 4)),
    )
    num_stages = num_stages_for(schedule, num_stages)
    lanes = schedule_named(schedule).lanes(num_stages)
    edges = data.draw(edge_tables(num_stages))
    order = build_order(schedule, num_stages, num_micro_batches)
    if schedule in SEVERAL_STAGES:
        programs, window = lower_lanes(order, edges, phase, num_micro_batches), num_micro_batches
    else:
        programs = lower(order, edges, phase, num_micro_batches, window=window)
    bounds = (
        schedule_named(schedule).in_flight_bounds(num_stages, num_micro_batches) if phase == "train" else None
    )
    peaks = verify(
        programs, edges, num_micro_batches, phase, max_in_flight=bounds, window=window, lanes=lanes
    )
    if phase == "train":
        assert all(peaks[stage].num_in_flight == bound for stage, bound in enumerate(bounds))
    run_program(programs, edges, num_micro_batches, phase, data.draw(st.integers(0, 999)), lanes)
    waits = [
        [action.kind is ActionKind.WAIT_REDUCTIONS for action in program] for program in programs.values()
    ]
    assert all(lane == sorted(lane) for lane in waits), (
        "a rank does something after it has waited for reductions"
    )
    assert parse_programs(format_programs(programs)) == programs


@settings(max_examples=100)
@given(data=st.data())
def test_other_orders_lower_to_valid_programs_too(data):
    num_stages, num_micro_batches = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 10))
    edges = data.draw(edge_tables(num_stages))
    programs = lower(
        random_order(data.draw, num_stages, num_micro_batches), edges, "train", num_micro_batches
    )
    verify(programs, edges, num_micro_batches, "train")
    run_program(programs, edges, num_micro_batches, "train", data.draw(st.integers(0, 999)))


@pytest.mark.parametrize("schedule", schedule_names())
def test_500_random_delays_never_hang(schedule):
    edges = [*chain_edges(4), EdgeSpec(src=0, dst=3, num_forward_values=1, num_gradient_values=1)]
    programs = lower(build_order(schedule, 4, 6), edges, "train", 6)
    for seed in range(500):
        run_program(programs, edges, 6, "train", seed, schedule_named(schedule).lanes(4))


def test_orders():
    assert " ".join(map(str, build_order("1f1b", 3, 4)[0])) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert " ".join(map(str, build_order("1f1b", 3, 4)[2])) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert " ".join(map(str, build_order("1f1b", 4, 2)[0])) == "0F0 0F1 0B0 0B1"
    assert " ".join(map(str, build_order("fill_drain", 2, 2)[1])) == "1F0 1F1 1B0 1B1"
    assert all(
        a.kind is ActionKind.FORWARD for lane in build_order("1f1b", 3, 4, training=False) for a in lane
    )
    assert schedule_named("1f1b").in_flight_bounds(4, 3) == (3, 3, 2, 1)
    assert schedule_named("fill_drain").in_flight_bounds(2, 5) == (5, 5)
    with pytest.raises(ValueError, match="unknown schedule"):
        build_order("zero_bubble", 2, 2)
    with pytest.raises(ValueError, match="at least one stage"):
        build_order("fill_drain", 0, 1)


def test_receives_are_posted_one_micro_batch_ahead():
    words = format_programs({1: lower(build_order("1f1b", 2, 4), chain_edges(2), "train", 4)[1]}).split()
    for m in range(1, 4):
        assert (
            words.index(f"1RF{m}<0")
            < words.index(f"1F{m - 1}")
            < words.index(f"1WF{m}<0")
            < words.index(f"1F{m}")
        )
    assert words.index("1F1") < words.index("1RF3<0")


def test_window_zero_posts_right_before_use():
    words = format_programs(
        {1: lower(build_order("1f1b", 2, 4), chain_edges(2), "train", 4, window=0)[1]}
    ).split()
    assert words.index("1F1") < words.index("1RF2<0")


def test_buffers_do_not_grow_with_micro_batches():
    edges = chain_edges(4)
    few, many = (
        verify(
            lower(build_order("1f1b", 4, m), edges, "train", m),
            edges,
            m,
            "train",
            max_in_flight=schedule_named("1f1b").in_flight_bounds(4, m),
        )
        for m in (8, 64)
    )
    assert few == many
    assert max(peaks.num_receive_buffers for peaks in many.values()) <= 4
    assert max(peaks.num_send_buffers for peaks in many.values()) <= 4


def test_edges_are_checked():
    for src, dst in ((1, 1), (2, 1), (OUTPUT, 0), (0, INPUT), (INPUT, OUTPUT), (-4, 1)):
        with pytest.raises(ValueError):
            EdgeSpec(src=src, dst=dst, num_forward_values=1)
    edge = EdgeSpec(src=0, dst=1, num_forward_values=1)
    with pytest.raises(ValueError, match="twice"):
        active_channels([edge, edge], "train")
    with pytest.raises(ValueError, match="names stage 1"):
        lower(build_order("fill_drain", 1, 1), [edge], "train", 1)


def test_tangents_of_outputs_come_only_in_backward():
    edges = [EdgeSpec(src=0, dst=OUTPUT, num_forward_values=1, num_gradient_values=1)]
    assert {phase: [str(c) for c in active_channels(edges, phase)] for phase in PHASES} == {
        "train": ["0>O F"],
        "forward": ["0>O F"],
        "backward": ["O>0 B"],
        "infer": ["0>O F"],
    }


@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_micro_batches", "phase"),
    [
        ("1f1b", 2, 4, "train"),
        ("1f1b", 4, 8, "train"),
        ("fill_drain", 3, 4, "train"),
        ("fill_drain", 2, 3, "forward"),
        ("fill_drain", 2, 3, "backward"),
        ("1f1b", 2, 3, "infer"),
    ],
)
def test_golden_programs(schedule, num_stages, num_micro_batches, phase):
    programs = lower(
        build_order(schedule, num_stages, num_micro_batches),
        chain_edges(num_stages),
        phase,
        num_micro_batches,
    )
    golden = GOLDEN / f"schedule_{schedule}_{num_stages}x{num_micro_batches}_{phase}.txt"
    assert format_programs(programs) == golden.read_text()
    assert parse_programs(golden.read_text()) == programs


@pytest.mark.parametrize("schedule", schedule_names())
def test_counts_that_are_none_are_refused_in_their_order(schedule: str) -> None:
    for num_stages, num_micro_batches in ((0, 3), (2, 0), (-1, 5)):
        with pytest.raises(ValueError, match=f"got {num_stages} and {num_micro_batches}$"):
            build_order(schedule, num_stages, num_micro_batches)
