"""The CTC loss as one operator: torch's values and gradients, one loss per row, whatever the lengths are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rannc_backend.capture.analysis import analyze
from rannc_backend.capture.nonstrict.arguments import call_of
from rannc_backend.capture.nonstrict.captures import capture_call
from rannc_backend.passes.batch.layouts import Rows
from rannc_backend.passes.ctc import LOSSES, call_ctc, takes
from tests.default_dtype import float64

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
    assert not takes(torch.ctc_loss, (batch[0], batch[1].flatten(), *batch[2:])), "targets without rows"


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
