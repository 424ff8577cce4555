"""More than one compilation of a stage, where one does not serve every batch size.

In: how to build the stage for a number of rows. Out: the build that serves a given number, made when it is
first needed.

Terms. The *hint* is the batch size that a trace takes where it has to decide something; what it decides may
hold for some sizes only (Inductor sums long rows in two steps, say), which the build's conditions record. A
*variant* is one such build.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from rannc_backend.errors import UnsupportedModelError
from rannc_backend.passes.pipeline import facts_of, with_facts
from rannc_backend.passes.stage.split_stages import StageGraph

logger = logging.getLogger(__name__)


class Conditioned(Protocol):
    """A build that knows for which numbers of rows it was made."""

    def broken_condition(self, rows: int) -> object | None:
        """A condition that ``rows`` breaks; None when the build serves it."""
        ...


Build = TypeVar("Build", bound=Conditioned)


@dataclass(slots=True)
class Variants(Generic[Build]):
    """Builds of one stage; ``build(rows)`` makes another with that hint (None: the hint of the capture)."""

    build: Callable[[int | None], Build]
    built: list[Build]
    _by_rows: dict[int, Build] = field(default_factory=dict)

    def of(self, rows: int) -> Build:
        """The build for ``rows``.

        Raises:
            UnsupportedModelError: even a build made for ``rows`` does not serve it.
        """
        if rows not in self._by_rows:
            self._by_rows[rows] = self._find(rows)
        return self._by_rows[rows]

    def forget(self) -> None:
        """The conditions of a build have changed: look again."""
        self._by_rows.clear()

    def _find(self, rows: int) -> Build:
        for build in self.built:
            if build.broken_condition(rows) is None:
                return build
        logger.debug("compiling a stage again for %d rows: %s", rows, self.built[0].broken_condition(rows))
        made = self.build(rows)
        condition = made.broken_condition(rows)
        if condition is not None:
            raise UnsupportedModelError(
                f"a stage compiles for batch sizes with {condition} only, and a micro-batch has {rows} rows",
                cure="change the number of micro-batches (RANNC_PIPELINE_NUM), so that they have other "
                "sizes.",
            )
        self.built.append(made)
        return made


def with_hint(
    stage: StageGraph, rows_symbol: sympy.Symbol, rows: int
) -> tuple[StageGraph, FakeTensorMode, sympy.Symbol]:
    """The same stage over new fakes whose batch size has the hint ``rows`` (at least 2, as 1 is a constant to
    torch).
    """
    shape_env = ShapeEnv()
    fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    source, hint = ConstantSource("rows"), max(rows, 2)
    symbol = shape_env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    size = shape_env.create_symintnode(symbol, hint=hint, source=source)

    @functools.cache
    def function_of(expression: sympy.Expr) -> Any:
        return sympy.lambdify([rows_symbol], expression, modules=[{}])(size)

    def renewed(number: Any) -> Any:
        return function_of(number.node.expr) if isinstance(number, torch.SymInt) else number

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    outputs = graph.graph_copy(stage.graph_module.graph, copies)
    graph.output(outputs)
    with fake_mode:
        for node, copy in copies.items():
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                shape, stride = map(renewed, value.shape), map(renewed, value.stride())
                copy.meta["val"] = torch.empty_strided(
                    tuple(shape), tuple(stride), dtype=value.dtype, device=value.device
                )
            else:
                copy.meta.pop("val", None)
    hinted = with_facts(fx.GraphModule(stage.graph_module, graph), facts_of(stage.graph_module))
    return replace(stage, graph_module=hinted), fake_mode, symbol
