"""Checks of models whose code decides by values which of its parts a step uses: one process has no gradient of the others,
and of what only they would bring a gradient to, so no weight decay or momentum acts on these.

In: a context. Out: findings. The reference is one process on the batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rannc_backend import row_wise
from tests.distributed.harness.context import Context
from tests.distributed.loop_checks import WIDTH
from tests.distributed.several_outputs_checks import ROWS, compare_steps, two_inputs

NOBODY = 7
Outputs = tuple[Tensor, Tensor]
Step = Callable[[Outputs, bool, int], Tensor]


class Chosen(nn.Module):
    """Each row goes through the part that it names, if there is one; a part that no row names is not called.

    That is known within the step only, as of experts: what an input alone decides is known before it.
    """

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_parts))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        chosen = chosen + (x.detach().sum(-1) > 1e6)
        for number, part in enumerate(self.parts):
            rows = chosen == number
            if rows.any():
                out = out.index_put((rows,), part(x[rows]).tanh())
        return out


@row_wise
class ChosenByRow(Chosen):
    """The same, declared."""


class TwoResults(nn.Module):
    """Two results of parts of their own, of which a step may differentiate one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.negative = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, beside: Tensor) -> Outputs:
        part = self.right if beside.sum() > 0 else self.negative
        return self.left(x), part(beside)


class Path(nn.Module):
    """Two choices one after the other, and a way past both."""

    def __init__(self, choice: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.beside, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.early, self.late = choice(3), choice(2)

    def forward(self, x: Tensor, y: Tensor, early: Tensor, late: Tensor) -> Outputs:
        hidden = self.early(self.first(x).tanh(), early)
        hidden = self.late(self.second(hidden).tanh(), late)
        return self.last(hidden + self.beside(y)).square().mean(), hidden


class Pair(nn.Module):
    """Both results are outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), TwoResults()

    def forward(self, x: Tensor, y: Tensor) -> Outputs:
        left, right = self.both(self.first(x).tanh(), self.second(y).tanh())
        return left, right.square().mean()


class Whole(nn.Module):
    """The model's own forward decides: all of it is one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.negative = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Outputs:
        hidden = self.first(x)
        part = self.right if hidden.sum() > 0 else self.negative
        return self.left(x).tanh(), part(hidden + y).square().mean()


#: of each step: the parts that rows name in turn; the first half of the rows are the first rank's, of two
CHOICES: Sequence[tuple[Sequence[int], Sequence[int]]] = (
    ([0, 1], [0, 1]),
    ([0] * 6 + [1] * 6, [0]),
    ([2], [NOBODY]),
    ([NOBODY], [1]),
    ([NOBODY] * 6 + [2] * 6, [1] * 6 + [NOBODY] * 6),
    ([0, 1, 2], [1, 0]),
)


#: what a step differentiates
STEPS: dict[str, Step] = {
    "first": lambda outputs, own, rank: outputs[0],
    "second": lambda outputs, own, rank: outputs[1],
    "rows of first": lambda outputs, own, rank: outputs[0].square().mean(),
    "rows of second": lambda outputs, own, rank: outputs[1].square().mean(),
}


def unused_parts(context: Context) -> None:
    """Parts that no row of a step has chosen, and what lies before a part that nothing went through."""

    def inputs(number: int) -> list[Tensor]:
        chosen = [torch.tensor((list(each) * ROWS)[:ROWS]) for each in CHOICES[number]]
        return [*two_inputs(context, number), *chosen]

    make = Chosen if context.case.replicas == "1,1" else ChosenByRow
    steps = [STEPS["first"]] * (len(CHOICES) - 1) + [STEPS["rows of second"]]
    compare_steps(context, lambda: Path(make), steps, inputs)


def unused_results(context: Context) -> None:
    """Results of one call of which a step differentiates one; the sign of an input chooses a part."""
    _compare_signs(context, Pair, ["second", "second", "rows of first", "second", "rows of first"])


def unused_whole(context: Context) -> None:
    """The same where the model itself runs as written."""
    _compare_signs(context, Whole, ["second", "rows of first", "second", "rows of first"])


def _compare_signs(context: Context, make: Callable[[], nn.Module], steps: Sequence[str]) -> None:
    def inputs(number: int) -> list[Tensor]:
        return [each.abs() * (-1) ** number for each in two_inputs(context, number)]

    compare_steps(context, make, [STEPS[step] for step in steps], inputs)
