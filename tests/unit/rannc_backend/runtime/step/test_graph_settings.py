"""Where the rows of a step are, by the fewest that a slice needs."""

from __future__ import annotations

import pytest

from rannc_backend.errors import TooFewSamplesError, UserInputError
from rannc_backend.runtime.step.graph_settings import RuntimeSettings, row_table_of


def settings_of(replicas: int, rows_per_slice: int) -> RuntimeSettings:
    return RuntimeSettings(
        stage_ranks=((0,), tuple(range(replicas))),
        num_micro_batches=4,
        eager_backward=True,
        narrow_range=False,
        gather_inputs=True,
        mean_gradients=True,
        step_limit_seconds=1.0,
        compile_limit_seconds=1.0,
        rows_per_slice=rows_per_slice,
    )


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("least", [1, 2])
def test_no_slice_has_fewer_rows_than_it_needs(replicas: int, least: int) -> None:
    for rows in range(replicas * least, 30):
        table = row_table_of(settings_of(replicas, least), (rows, *(0 for _ in range(replicas - 1))))
        assert table.num_micro_batches == min(4, rows // (replicas * least))
        slices = [
            table.interval(1, rank, number)
            for rank in range(replicas)
            for number in range(table.num_micro_batches)
        ]
        assert min(stop - start for start, stop in slices) >= least
        assert sum(stop - start for start, stop in slices) == rows


def test_a_batch_that_is_too_small_is_refused() -> None:
    with pytest.raises(UserInputError, match="3 rows has one on some of 2 replicas") as found:
        row_table_of(settings_of(2, 2), (2, 1))
    assert "drop_last=True" in str(found.value) and "batch_norm='global'" in str(found.value)
    with pytest.raises(TooFewSamplesError):
        row_table_of(settings_of(2, 1), (1, 0))
