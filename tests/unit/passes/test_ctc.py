"""The CTC loss as one operator: torch's values and gradients, one loss per row, whatever the lengths are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rannc_backend.capture.analysis import analyze
from rannc_backend.capture.nonstrict.arguments import call_of
from rannc_backend.capture.nonstrict.captures import capture_call
from rannc_backend.errors import UnsupportedModelError
from rannc_backend.passes.batch.layouts import Rows
from rannc_backend.passes.ctc import LOSSES, call_ctc, takes
from tests.default_dtype import float64
from tests.nonstrict_models import graph_arguments

CLASSES = 5


def _arguments(rows: int = 4, length: int = 9) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(length, rows, CLASSES, generator=generator, dtype=torch.float64)
    targets = torch.randint(1, CLASSES, (rows, 3), generator=generator)
    lengths = torch.tensor([length - row % 3 for row in range(rows)])
    # The last one has no path: an infinite loss, unless it is set to zero.
    wanted = torch.tensor([3, 1, 2, 0][:rows])
    return scores.log_softmax(-1), targets, lengths, wanted


@pytest.mark.parametrize("reduction", ["none", "mean", "sum", 0, 1, 2])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_values_and_gradients_are_torchs(reduction: str | int, zero_infinity: bool) -> None:
    function = functional.ctc_loss if isinstance(reduction, str) else torch.ctc_loss
    results = []
    for call in (function, call_ctc):
        log_probs, *rest = _arguments()
        leaf = log_probs.requires_grad_()
        loss = call(leaf, *rest, 0, reduction, zero_infinity)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), leaf)))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_which_calls_it_takes() -> None:
    batch = _arguments()
    assert takes(torch.ctc_loss, batch) and takes(functional.ctc_loss, (*batch, 0))
    assert not takes(torch.nn.functional.nll_loss, batch)
    assert not takes(torch.ctc_loss, (*batch[:2], [9] * 4, [3] * 4)), "lengths are numbers"
    assert takes(torch.ctc_loss, (batch[0], batch[1].flatten(), *batch[2:])), "targets one after the other"
    assert not takes(torch.ctc_loss, (batch[0][:, 0], batch[1][0], *batch[2:])), "scores of one sample"


class _Selected(nn.Module):
    """The targets of all rows one after the other, as transformers' losses of speech have them."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor] = lambda mask, counts: counts) -> None:
        super().__init__()
        self.head, self.change = nn.Linear(4, CLASSES), change

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        mask = labels >= 0
        counts = self.change(mask, mask.sum(-1))
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
        targets = labels.masked_select(mask).to(torch.int32)
        return functional.ctc_loss(log_probs, targets, lengths, counts, zero_infinity=True)


def _selected_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(1, CLASSES, (4, 4), generator=generator)
    labels[0, 1], labels[1, 0], labels[2, 2:], labels[3] = (
        -100,
        -100,
        -100,
        -100,
    )  # in the middle, all of a row
    return torch.randn(4, 9, 4, generator=generator, dtype=torch.float64), labels


def test_targets_that_a_mask_selects_are_those_of_each_row() -> None:
    with float64():
        model, batch = _Selected(), _selected_batch()
        capture = capture_call(model, call_of(model, batch, {}))
        analysis = analyze(capture.recorded.captured)
        (found,) = capture.recorded.captured.graph_module(
            *graph_arguments(capture, call_of(model, batch, {}))
        )
        torch.testing.assert_close(found, model(*batch), rtol=1e-13, atol=1e-13)
    graph = capture.recorded.captured.graph_module.graph
    (node,) = graph.find_nodes(op="call_function", target=LOSSES)
    assert analysis.split.whole_batch is None and analysis.split.layouts[node.name] == Rows(0)


@pytest.mark.parametrize(
    "change",
    [
        lambda mask, counts: counts.clamp(min=1),
        lambda mask, counts: (~mask).sum(-1),
        lambda mask, counts: mask.sum(0),
    ],
)
def test_targets_of_other_lengths_are_refused(change: Callable[[Tensor, Tensor], Tensor]) -> None:
    with float64():
        model = _Selected(change)
        with pytest.raises(UnsupportedModelError, match="not as a mask of the rows selects them") as found:
            capture_call(model, call_of(model, _selected_batch(), {}))
    assert "in forward" in (found.value.location or "") and "[rows, tokens]" in (found.value.cure or "")


class _Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES)
        self.loss = nn.CTCLoss(zero_infinity=True)

    def forward(self, x: Tensor, targets: Tensor, wanted: Tensor) -> Tensor:
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
        loss: Tensor = self.loss(log_probs, targets, lengths, wanted)
        return loss


def test_a_loss_for_each_row_at_every_length() -> None:
    with float64():
        model = _Speech()
        _, targets, _, wanted = _arguments()
        call = call_of(model, (torch.randn(4, 9, 4), targets, wanted), {})
        captured = capture_call(model, call, changing={(0, 1)}).recorded.captured
        analysis = analyze(captured)
    (node,) = captured.graph_module.graph.find_nodes(op="call_function", target=LOSSES)
    assert len(captured.lengths) == 1 and analysis.split.whole_batch is None
    assert analysis.split.layouts[node.name] == Rows(0)
