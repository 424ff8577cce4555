"""Row intervals: every row is where it should be, once, for any batch sizes, replicas and micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.ir.action import INPUT, OUTPUT
from rannc_backend.runtime.rows import RowTable, split_interval


@given(st.integers(0, 50), st.integers(0, 60), st.integers(1, 12))
def test_split_interval_covers_evenly(start: int, length: int, num_parts: int) -> None:
    parts = split_interval(start, start + length, num_parts)
    assert len(parts) == num_parts
    assert parts[0][0] == start and parts[-1][1] == start + length
    assert all(left[1] == right[0] for left, right in zip(parts, parts[1:], strict=False))
    sizes = [stop - begin for begin, stop in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@st.composite
def row_tables(draw: st.DrawFn) -> RowTable:
    replicas = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    ranks = iter(range(sum(replicas)))
    stages = tuple(tuple(next(ranks) for _ in range(count)) for count in replicas)
    local = tuple(draw(st.lists(st.integers(0, 7), min_size=sum(replicas), max_size=sum(replicas))))
    gather = draw(st.booleans())
    return RowTable(
        local_rows=local, num_micro_batches=draw(st.integers(1, 6)), stage_ranks=stages, gather_inputs=gather
    )


@given(row_tables())
def test_fourteen_rows_and_every_other_batch_meet_once(table: RowTable) -> None:
    endpoints = [INPUT, *range(len(table.stage_ranks))]
    for endpoint in endpoints:
        seen = [
            row
            for m in range(table.num_micro_batches)
            for rank in table.ranks(endpoint)
            for row in range(*table.interval(endpoint, rank, m))
        ]
        assert sorted(seen) == list(range(table.global_rows))


@given(row_tables())
def test_both_ends_agree_about_every_message(table: RowTable) -> None:
    endpoints = [INPUT, *range(len(table.stage_ranks)), OUTPUT]
    for m in range(table.num_micro_batches):
        for source in endpoints:
            for target in endpoints:
                sent = {
                    (rank, piece.peer, piece.start, piece.stop)
                    for rank in table.ranks(source)
                    for piece in table.pieces(source, target, rank, m)
                }
                received = {
                    (piece.peer, rank, piece.start, piece.stop)
                    for rank in table.ranks(target)
                    for piece in table.pieces(target, source, rank, m)
                }
                assert sent == received


def test_without_gathering_rank_zero_has_the_batch_and_everyone_gets_the_outputs() -> None:
    table = RowTable(local_rows=(5, 3), num_micro_batches=2, stage_ranks=((0,), (1,)), gather_inputs=False)
    assert table.global_rows == 5
    assert table.owned_rows(INPUT, 0) == (0, 5) and table.owned_rows(OUTPUT, 1) == (0, 5)
    assert table.interval(INPUT, 1, 0) == (0, 0) and table.interval(OUTPUT, 1, 0) == (0, 3)


@given(row_tables())
def test_pieces_are_the_rows_that_both_have_in_rank_order(table: RowTable) -> None:
    endpoints = [INPUT, *range(len(table.stage_ranks)), OUTPUT]
    for m in range(table.num_micro_batches):
        for source in endpoints:
            for target in endpoints:
                for rank in table.ranks(source):
                    own = set(range(*table.interval(source, rank, m)))
                    common = {
                        peer: own & set(range(*table.interval(target, peer, m)))
                        for peer in table.ranks(target)
                    }
                    expected = [(peer, min(rows), max(rows) + 1) for peer, rows in common.items() if rows]
                    assert [
                        (piece.peer, piece.start, piece.stop)
                        for piece in table.pieces(source, target, rank, m)
                    ] == expected


def test_pieces_of_a_hand_made_step() -> None:
    """Two replicas feed three; rank 1 has no row of its own."""
    table = RowTable(local_rows=(4, 0, 3, 0, 0), num_micro_batches=2, stage_ranks=((0, 1), (2, 3, 4)))
    assert table.micro_batches == ((0, 4), (4, 7))
    assert [(p.peer, p.start, p.stop) for p in table.pieces(0, 1, 0, 0)] == [(2, 0, 2)]
    assert [(p.peer, p.start, p.stop) for p in table.pieces(0, 1, 1, 0)] == [(3, 2, 3), (4, 3, 4)]
    assert [(p.peer, p.start, p.stop) for p in table.pieces(1, 0, 3, 1)] == [(0, 5, 6)]
    assert table.pieces(INPUT, 0, 1, 0) == ()
    assert [(p.peer, p.start, p.stop) for p in table.pieces(INPUT, 0, 2, 1)] == [(0, 4, 6), (1, 6, 7)]
