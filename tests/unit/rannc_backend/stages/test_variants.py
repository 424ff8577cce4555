"""One build of a stage serves the batch sizes that its conditions allow; another is made for the others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from rannc_backend.errors import UnsupportedModelError
from rannc_backend.stages.compiled_stage import compile_stage
from rannc_backend.stages.variants import Variants, with_hints
from tests.unit.stage_models import Rowwise, capture


@dataclass
class FakeBuild:
    """Serves sizes on the hint's side of ten."""

    hint: int | None

    def broken_condition(self, sizes: tuple[int, ...]) -> str | None:
        (rows,) = sizes
        return (
            None
            if (self.hint or 53) // 10 == rows // 10 or (rows > 9 and (self.hint or 53) > 9)
            else "rows > 9"
        )


def test_another_build_is_made_once_for_the_sizes_that_need_it() -> None:
    made: list[int | None] = []

    def build(sizes: tuple[int, ...] | None) -> FakeBuild:
        made.append(None if sizes is None else sizes[0])
        return FakeBuild(made[-1])

    variants = Variants(build, [build(None)])
    assert [variants.of((rows,)).hint for rows in (20, 5, 20, 7, 5)] == [None, 5, None, 5, 5]
    assert made == [None, 5]


def test_a_size_that_no_build_serves_is_refused() -> None:
    @dataclass
    class Stubborn:
        def broken_condition(self, sizes: tuple[int, ...]) -> str | None:
            return "Eq(rows, 4)" if sizes != (4,) else None

    variants = Variants(lambda sizes: Stubborn(), [Stubborn()])
    assert variants.of((4,)) is variants.built[0]
    with pytest.raises(UnsupportedModelError, match=r"Eq\(rows, 4\) only.*5 rows"):
        variants.of((5,))


def rowwise() -> tuple[nn.Module, Rowwise]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, capture(model, lambda m, x: (m(x),), (torch.randn(6, 4, dtype=torch.float64),), ["rows"])


@pytest.mark.parametrize("hint", [1, 2, 9])
def test_a_stage_over_new_fakes_gives_the_same(hint: int) -> None:
    model, graph = rowwise()
    (stage,) = graph.cut(1)
    hinted, fake_mode, (symbol,) = with_hints(stage, (graph.rows_symbol,), (hint,))
    needs_grad = frozenset(source.name for source in stage.outputs)
    trained = frozenset(graph.parameters)
    compiled = compile_stage(
        hinted,
        needs_grad=needs_grad,
        requires_grad_parameters=trained,
        fake_mode=fake_mode,
        rows_symbol=symbol,
        compiler="eager",
        training=True,
    )
    for rows in (1, 2, 5):
        x = torch.randn(rows, 4, dtype=torch.float64)
        args = [graph.parameters.get(source.name, x) for source in stage.inputs]
        (output,), saved = compiled.forward(args)
        expected = model(x)
        torch.testing.assert_close(output, expected.detach(), rtol=1e-12, atol=1e-12)
        model.zero_grad()
        expected.sum().backward()
        sink = compiled.scratch_gradients()
        compiled.backward(saved, [torch.ones_like(output)], sink)
        gradients = {stage.inputs[position].name: gradient for position, gradient in sink.gradients.items()}
        by_value = {id(parameter): parameter.grad for parameter in model.parameters()}
        for name, parameter in graph.parameters.items():
            torch.testing.assert_close(gradients[name], by_value[id(parameter)], rtol=1e-12, atol=1e-12)
