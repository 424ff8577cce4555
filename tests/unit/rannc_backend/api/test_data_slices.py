"""What each rank reads: everything once, alike, for any number of files, samples and ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from rannc_backend import RankBatches, slice_files
from rannc_backend.errors import UserInputError

NUMBERS = st.integers(1, 9)


@given(st.integers(0, 40), NUMBERS, st.booleans(), st.booleans())
def test_every_file_is_read_once(number: int, num_ranks: int, uneven: bool, drop_last: bool) -> None:
    files = [f"part-{index:05d}" for index in range(number)]
    try:
        parts = [
            slice_files(files, uneven=uneven, drop_last=drop_last, rank=rank, num_ranks=num_ranks)
            for rank in range(num_ranks)
        ]
    except UserInputError:
        assert (
            (uneven and drop_last) or number < num_ranks or (number % num_ranks and not (uneven or drop_last))
        )
        return
    assert not (uneven and drop_last) and number >= num_ranks
    read = sorted(file for part in parts for file in part)
    assert read == files[: number - number % num_ranks if drop_last else number]
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= (1 if uneven else 0)
    assert parts[0] == read[::num_ranks]


@given(
    st.integers(0, 60), st.integers(1, 5), NUMBERS, st.booleans(), st.booleans(), st.integers(0, 3)
)  # fmt: skip
def test_every_sample_is_read_once(
    number: int, batch_size: int, num_ranks: int, drop_last: bool, shuffle: bool, epoch: int
) -> None:
    samplers = []
    try:
        for rank in range(num_ranks):
            sampler = RankBatches(
                range(number),
                batch_size,
                drop_last=drop_last,
                shuffle=shuffle,
                rank=rank,
                num_ranks=num_ranks,
            )
            sampler.set_epoch(epoch)
            samplers.append(sampler)
    except UserInputError:
        rest = number % (batch_size * num_ranks)
        assert 0 < rest < num_ranks and not drop_last and (batch_size == 1 or number < num_ranks)
        return
    batches = [list(sampler) for sampler in samplers]
    assert {len(each) for each in batches} == {len(samplers[0])}
    steps = [[each[step] for each in batches] for step in range(len(samplers[0]))]
    for step in steps:
        sizes = {len(batch) for batch in step}
        assert 1 <= min(sizes) and max(sizes) <= batch_size and max(sizes) - min(sizes) <= 1
    read = [sample for step in steps for batch in step for sample in batch]
    kept = number - number % (batch_size * num_ranks) if drop_last else number
    assert len(read) == kept and len(set(read)) == kept
    if not shuffle:
        assert read == list(range(kept))


def test_epochs_have_orders_of_their_own() -> None:
    sampler = RankBatches(range(64), 8, shuffle=True, seed=3, rank=1, num_ranks=2)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_a_loader_takes_them() -> None:
    loader = DataLoader(list(range(10)), batch_sampler=RankBatches(range(10), 3, rank=1, num_ranks=2))
    assert [batch.tolist() for batch in loader] == [[3, 4, 5], [8, 9]]


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: slice_files("abc", rank=2, num_ranks=2), "no rank 2 of 2"),
        (lambda: slice_files("abc", rank=-1, num_ranks=2), "no rank -1"),
        (lambda: slice_files("abc", rank=0, num_ranks=2), "1 would be left over"),
        (lambda: slice_files("a", rank=0, num_ranks=2, drop_last=True), "some would read nothing"),
        (lambda: RankBatches("abc", 0, rank=0, num_ranks=2), "batch_size is 0"),
        (lambda: RankBatches("abc", 1, rank=0, num_ranks=2), "leave 1 for the last"),
    ],
)
def test_what_cannot_be_divided_is_refused(call: object, what: str) -> None:
    with pytest.raises(UserInputError, match=what):
        call()  # type: ignore[operator]


def test_one_process_reads_everything() -> None:
    assert slice_files(["a", "b", "c"]) == ["a", "b", "c"]


def test_what_is_not_said_is_that_of_the_job() -> None:
    assert slice_files(["a", "b", "c", "d"], num_ranks=2) == ["a", "c"]
    assert slice_files(["a", "b"], rank=0) == ["a", "b"]
    with pytest.raises(UserInputError, match="no rank 1 of 1"):
        slice_files(["a", "b"], rank=1)
