"""The norm of all gradients and clipping by it, as rank 0 of two computes them; the other rank is played
here.
"""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rannc_backend.errors import UserInputError
from rannc_backend.runtime.gradients import clipping
from rannc_backend.runtime.gradients.clipping import clip_gradients

OTHERS = (2.0, -7.0, 1.5)  # gradients of the parameters that the other rank answers for


class Table:
    """Two ranks: parameter `own` is here, `tied` is on both and the other answers for it, `far` is there
    alone.
    """

    def __init__(self, norm_type: float, others: tuple[float, ...] = OTHERS) -> None:
        self.module = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.zeros(3)) for name in ("own", "tied", "far")}
        )
        self.module["own"].grad = torch.tensor([3.0, -4.0, 0.5])
        self.module["tied"].grad = torch.tensor(OTHERS)
        self.names = {id(parameter): name for name, parameter in self.module.items()}
        self.everyone = (0, 1)
        values = torch.tensor(others, dtype=torch.float64)
        self._other = values.abs().max() if math.isinf(norm_type) else values.abs().pow(norm_type).sum()
        transport = SimpleNamespace(allreduce=self._allreduce)
        self.world = SimpleNamespace(rank=0, size=2, device=torch.device("cpu"), transport=transport)

    def _allreduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        assert ranks == (0, 1) and tensor.dtype == torch.float64
        tensor[1] += self._other
        return SimpleNamespace(wait=lambda: None)

    def name_of(self, parameter: torch.Tensor) -> str | None:
        return self.names.get(id(parameter))

    def answers_for(self, parameter: torch.Tensor) -> bool:
        return self.name_of(parameter) == "own"

    def require_reduced_gradients(self, what: str) -> None:
        """They are."""

    def root(self) -> torch.nn.Module:
        return self.module


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "agree", lambda *_: [])
    monkeypatch.setattr(clipping, "exchanging", lambda _: contextlib.nullcontext())


def whole(norm_type: float, *more: float) -> float:
    """What one process has: tied parameters once."""
    return float(
        torch.linalg.vector_norm(
            torch.tensor([3.0, -4.0, 0.5, *OTHERS, *more], dtype=torch.float64), norm_type
        )
    )


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("outside", [False, True])
def test_the_norm_is_that_of_all_parameters(norm_type: float, outside: bool) -> None:
    table = Table(norm_type)
    parameters = [*table.module.values()]
    more = (0.25, 9.0) if outside else ()
    if outside:
        parameters.append(torch.nn.Parameter(torch.zeros(2)))
        parameters[-1].grad = torch.tensor(more)
    norm = clip_gradients(parameters, [table], 1.0, norm_type)
    expected = whole(norm_type, *more)
    assert norm.dtype == torch.float32 and float(norm) == pytest.approx(expected, rel=1e-6)
    for parameter, before in ((table.module["own"], [3.0, -4.0, 0.5]), (table.module["tied"], OTHERS)):
        assert parameter.grad.tolist() == pytest.approx(
            [value / (expected + 1e-6) for value in before], rel=1e-6
        )
    if outside:
        assert parameters[-1].grad.tolist() == pytest.approx(
            [value / (expected + 1e-6) for value in more], rel=1e-6
        )
    assert table.module["far"].grad is None


@pytest.mark.parametrize("most", [1e3, math.inf])
def test_gradients_within_the_bound_keep_their_bits(most: float) -> None:
    table = Table(2.0)
    clip_gradients(table.module.values(), [table], most)
    assert table.module["own"].grad.tolist() == [3.0, -4.0, 0.5] and table.module[
        "tied"
    ].grad.tolist() == list(OTHERS)


def test_an_infinity_elsewhere() -> None:
    table = Table(2.0, (math.inf,))
    with pytest.raises(UserInputError, match="order 2.0 of the gradients is inf"):
        clip_gradients(table.module.values(), [table], 1.0, error_if_nonfinite=True)
    assert table.module["own"].grad.tolist() == [3.0, -4.0, 0.5], "an error changes nothing"
    assert math.isinf(clip_gradients(table.module.values(), [table], math.inf))
    assert table.module["own"].grad.tolist() == [3.0, -4.0, 0.5]
    assert clip_gradients(table.module.values(), [Table(2.0)], 1e-3, error_if_nonfinite=False).isfinite()


def test_a_rank_without_gradients_answers_in_the_same_dtype() -> None:
    table = Table(2.0)
    for parameter in table.module.values():
        parameter.grad = None
    assert clip_gradients([], [table], 1.0).dtype == torch.float32
    table.module.double()
    norm = clip_gradients([], [table], 1.0)
    assert norm.dtype == torch.float64 and float(norm) == pytest.approx(
        math.sqrt(sum(value**2 for value in OTHERS))
    )
    assert clip_gradients([], [], 1.0).item() == 0.0


def test_values_are_clipped_by_size_also_where_a_rank_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(2.0)
    end = clipping.norms_over_ranks(lambda: [table])  # type: ignore[list-item]
    try:
        torch.nn.utils.clip_grad_value_(table.module.values(), 1.0)
        gradient = table.module["own"].grad
        assert gradient is not None and gradient.tolist() == [1.0, -1.0, 0.5]
        torch.nn.utils.clip_grad_value_([table.module["far"]], 1.0)
        assert table.module["far"].grad is None

        def refuse(what: str) -> None:
            raise UserInputError(what, cure="")

        monkeypatch.setattr(table, "require_reduced_gradients", refuse)
        with pytest.raises(UserInputError, match="were to be clipped"):
            torch.nn.utils.clip_grad_value_(table.module["own"], 1.0)
    finally:
        end()
