"""Elements that a mask chooses: what is taken is the model on any slices, and what is not is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rannc_backend.passes.batch.batch_split import BatchSplit, UserScalar, UserUnavailable
from rannc_backend.passes.data_sizes import has_data_sizes
from rannc_backend.passes.pipeline import PassError
from tests.choice_models import IGNORED, MODELS, TOKENS, WIDTH, batch
from tests.unit.passes.batch.batch_tracing import Traced, trace
from tests.unit.passes.batch.slice_runner import split_traced, worst_error

NUM_ROWS = 5
SLICES = ([5], [2, 3], [1, 1, 1, 1, 1])


def _traced(model: nn.Module) -> Traced:
    x, labels = batch(NUM_ROWS, 0)
    return trace(model.double(), {"x": x, "labels": labels})


@pytest.mark.parametrize("name", MODELS)
def test_every_way_of_choosing_is_exact_in_slices(name: str) -> None:
    """One of the slices chooses nothing."""
    torch.manual_seed(0)
    traced = _traced(MODELS[name]())
    split = split_traced(traced)
    assert split.whole_batch is None
    assert max(worst_error(traced, split, sizes) for sizes in SLICES) < 1e-12


def test_sizes_are_what_they_were_afterwards() -> None:
    """Numbers depend on data still, values are counted at a bound, and nothing is left of what they were followed as."""
    split: BatchSplit = split_traced(traced := _traced(MODELS["masked language head"]()))
    given = [node.meta.get("val") for node in traced.graph_module.graph.nodes]
    assert split.has_choices and any(map(has_data_sizes, given)), "the graph that was split has changed"
    values = [node.meta["val"] for node in split.rowwise.graph.nodes if "val" in node.meta]
    sizes = [value for value in values if isinstance(value, torch.SymInt)]
    shapes = [size for value in values if isinstance(value, Tensor) for size in value.shape]
    symbols = {
        symbol
        for size in (*sizes, *shapes)
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }
    assert not any(has_data_sizes(value) for value in values if isinstance(value, Tensor))
    assert {symbol for symbol in symbols if not str(symbol).startswith("u")} == {traced.rows_symbol}
    bounds = {size.node.expr for size in shapes if isinstance(size, torch.SymInt)}
    assert TOKENS * traced.rows_symbol in bounds


class Written(nn.Module):
    """A model of one function of (values, a mask)."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.function(self.first(x), labels != IGNORED)


class WithScores(nn.Module):
    """A library's model for masked tokens: it gives their scores beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(x[labels != IGNORED])
        return F.cross_entropy(scores, labels[labels != IGNORED]), scores


def test_values_of_what_is_chosen_are_not_given_back() -> None:
    loss, scores = split_traced(_traced(WithScores())).user_outputs
    assert isinstance(loss, UserScalar) and isinstance(scores, UserUnavailable)
    assert f"of shape (?, {WIDTH}) cannot be taken apart" in scores.why


REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "turned": lambda x, mask: (x[mask].flip(0) * x[mask]).sum(),
    "counted along": lambda x, mask: x[mask].cumsum(0).square().sum(),
    "sorted": lambda x, mask: (x[mask][:, 0].sort()[0] * torch.arange(x[mask].shape[0])).sum(),
    "numbers": lambda x, mask: (x[mask] * torch.arange(x[mask].shape[0])[:, None]).sum(),
    "pairs": lambda x, mask: (x[mask] @ x[mask].t()).square().sum(),
    "first ones": lambda x, mask: x[mask][:2].sum(),
    "softmax over all": lambda x, mask: (x[mask].softmax(0) * x[mask]).sum(),
    "put at another mask": lambda x, mask: x.index_put((~mask & mask.flip(1),), x[mask]).sum(),
    "chosen of chosen": lambda x, mask: x[mask][x[mask][:, 0] > 0].square().sum(),
    "dropout": lambda x, mask: F.dropout(x[mask], 0.5).sum(),
    "beside an index": lambda x, mask: x[mask[:, 0], torch.tensor([1])].square().sum(),
    "other rows": lambda x, mask: x.transpose(0, 1).reshape(-1, WIDTH)[mask.reshape(-1)].square().sum(),
    "flattened": lambda x, mask: x[mask].view(-1).cumsum(0).square().sum(),
    "columns": lambda x, mask: x[:, mask[0]].sum(),
    "beside others": lambda x, mask: torch.cat([x[mask], x.view(-1, WIDTH)]).square().sum(),
    "nonzero": lambda x, mask: x[mask.nonzero(as_tuple=True)].sum() + x[mask].sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_whatever_else_touches_them_is_refused_or_exact(name: str) -> None:
    torch.manual_seed(0)
    traced = _traced(Written(REFUSED[name]))
    with pytest.raises(PassError):
        split_traced(traced)


def test_on_the_whole_batch_they_are_as_before() -> None:
    traced = _traced(MODELS["two masks"]())
    split = split_traced(traced, together=True)
    assert split.whole_batch is not None
    assert worst_error(traced, split, [NUM_ROWS]) < 1e-12
