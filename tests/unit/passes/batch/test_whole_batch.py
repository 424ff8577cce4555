"""Graphs whose rows meet are refused for slices, and are the model on one slice that holds the whole batch."""

from __future__ import annotations

import pytest
import torch

from rannc_backend.passes.batch.batch_split import UserScalar, UserUnavailable
from rannc_backend.passes.batch.layouts import Reduced, RowIndex, Rows, Several
from rannc_backend.passes.pipeline import PassError
from tests.unit.passes.batch.batch_tracing import Traced, trace
from tests.unit.passes.batch.slice_runner import split_traced, worst_error
from tests.whole_batch_models import MODELS, batch

NUM_ROWS = 7
#: Without those that change buffers or have an operator of their own, which are captured elsewhere
#: (tests/distributed/test_whole_batch.py).
MEETING = [name for name in MODELS if name not in ("normalized", "gradients", "codebook", "queue")]


def _traced(name: str) -> Traced:
    torch.manual_seed(0)
    x, y = batch(NUM_ROWS, 0)
    return trace(MODELS[name]().double(), {"x": x.double(), "y": y})


@pytest.mark.parametrize("name", MEETING)
def test_the_whole_batch_is_one_slice(name: str) -> None:
    with pytest.raises(PassError) as refused:
        split_traced(_traced(name))
    traced = _traced(name)
    split = split_traced(traced, together=True)
    assert split.whole_batch is not None and split.whole_batch.reason == refused.value.reason
    assert worst_error(traced, split, [NUM_ROWS]) < 1e-12


@pytest.mark.parametrize("name", [name for name in MEETING if name != "clamped"])
def test_several_slices_are_another_model(name: str) -> None:
    """Or the rule of slices could have been more generous; the others differ for some batches alone."""
    traced = _traced(name)
    split = split_traced(traced, together=True)
    try:
        error = worst_error(traced, split, [4, 3])
    except (RuntimeError, ValueError, IndexError):
        return  # sizes that only the whole batch has
    assert error > 1e-9


def test_statistics_of_the_whole_batch() -> None:
    traced = _traced("normalized")
    assert split_traced(traced).whole_batch is None
    split = split_traced(_traced("normalized"), together=True)
    assert split.whole_batch is not None and "batch_norm" in split.whole_batch.operator
    assert worst_error(traced, split, [NUM_ROWS]) < 1e-12


def test_whoever_asks_for_it_gets_the_whole_batch() -> None:
    """Layouts were given that slices may not have: never without the mark."""
    model = torch.nn.Linear(3, 2).double()
    traced = trace(model, {"input": torch.randn(NUM_ROWS, 3, dtype=torch.float64)})
    assert split_traced(traced, together=True).whole_batch is not None


def test_nothing_of_rows_that_met_is_summed_before_the_step() -> None:
    """Sums of inputs are had from each rank's own rows: not where these rows have met."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = x[:, 0].argsort()
            return (x * x[order].cumsum(0).square().sum()).sum()

    traced = trace(Model(), {"x": torch.randn(NUM_ROWS, 3, dtype=torch.float64)})
    split = split_traced(traced, together=True)
    assert split.prologue is None and worst_error(traced, split, [NUM_ROWS]) < 1e-12


@pytest.mark.parametrize("form", ["twice the rows", "pairs of rows"])
def test_what_cannot_be_taken_apart_is_said(form: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            sorted_rows = x[x[:, 0].argsort()]
            value = torch.cat([sorted_rows, x]) if form == "twice the rows" else sorted_rows @ x.t()
            return x.sum(), value

    split = split_traced(trace(Model(), {"x": torch.randn(NUM_ROWS, 3).double()}), together=True)
    total, value = split.user_outputs
    assert isinstance(total, UserScalar)
    assert isinstance(value, UserUnavailable) and "cannot be taken apart" in value.why


def test_no_layout_of_a_value_that_is_computed_again_is_constant() -> None:
    """What follows a sum over rows, and feeds rows, belongs to the stage that has the rows."""
    split = split_traced(_traced("centered"), together=True)
    for node in split.rowwise.graph.nodes:
        if node.op == "call_function" and any(
            _has_rows(split.layouts[item.name]) for item in node.all_input_nodes
        ):
            assert not isinstance(split.layouts[node.name], Reduced)


def _has_rows(layout: object) -> bool:
    return isinstance(layout, (Rows, RowIndex, Several))
