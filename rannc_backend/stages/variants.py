"""More than one compilation of a stage, where one does not serve every batch size and every length.

In: how to build the stage for given sizes. Out: the build that serves given ones, made when it is first needed.

Terms. The *sizes* of a call are its number of rows and its lengths (signature.py). The *hints* are the sizes that
a trace takes where it has to decide something; what it decides may hold for some sizes only (Inductor sums long
rows in two steps, say), which the build's conditions record. A *variant* is one such build.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import sympy
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from rannc_backend.errors import UnsupportedModelError
from rannc_backend.passes.pipeline import facts_of, with_facts
from rannc_backend.passes.plain_numbers import new_size
from rannc_backend.passes.size_nodes import number_of
from rannc_backend.passes.stage.split_stages import StageGraph
from rannc_backend.stages.signature import Sizes

logger = logging.getLogger(__name__)


class Conditioned(Protocol):
    """A build that knows for which sizes it was made."""

    def broken_condition(self, sizes: Sizes) -> object | None:
        """A condition that ``sizes`` break; None when the build serves them."""
        ...


Build = TypeVar("Build", bound=Conditioned)


@dataclass(slots=True)
class Variants(Generic[Build]):
    """Builds of one stage; ``build(sizes)`` makes another with those hints (None: the hints of the capture)."""

    build: Callable[[Sizes | None], Build]
    built: list[Build]
    _by_sizes: dict[Sizes, Build] = field(default_factory=dict)

    def of(self, sizes: Sizes) -> Build:
        """The build for ``sizes``.

        Raises:
            UnsupportedModelError: even a build made for ``sizes`` does not serve them.
        """
        if sizes not in self._by_sizes:
            self._by_sizes[sizes] = self._find(sizes)
        return self._by_sizes[sizes]

    def forget(self) -> None:
        """The conditions of a build have changed: look again."""
        self._by_sizes.clear()

    def _find(self, sizes: Sizes) -> Build:
        for build in self.built:
            if build.broken_condition(sizes) is None:
                return build
        logger.debug("compiling a stage again for sizes %s: %s", sizes, self.built[0].broken_condition(sizes))
        made = self.build(sizes)
        condition = made.broken_condition(sizes)
        if condition is not None:
            raise UnsupportedModelError(
                f"a stage compiles for batch sizes with {condition} only, and a micro-batch has {sizes[0]} rows",
                cure="change the number of micro-batches (RANNC_PIPELINE_NUM), so that they have other "
                "sizes.",
            )
        self.built.append(made)
        return made


def with_hints(
    stage: StageGraph, symbols: Sequence[sympy.Symbol], sizes: Sizes
) -> tuple[StageGraph, FakeTensorMode, tuple[sympy.Symbol, ...]]:
    """The same stage over new fakes whose batch size and lengths (``symbols``) have the hints ``sizes`` (at least
    2, as 1 is a constant to torch); with the new symbols.
    """
    shape_env = ShapeEnv()
    fake_mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    # 0 and 1 are constants to torch.
    numbers = [new_size(shape_env, f"size_{index}", max(size, 2)) for index, size in enumerate(sizes)]

    @functools.cache
    def function_of(expression: sympy.Expr) -> Any:
        return number_of(expression, symbols, numbers)

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
            elif node.op == "placeholder":
                copy.meta["val"] = renewed(value)
            else:
                copy.meta.pop("val", None)
    hinted = with_facts(fx.GraphModule(stage.graph_module, graph), facts_of(stage.graph_module))
    return replace(stage, graph_module=hinted), fake_mode, tuple(number.node.expr for number in numbers)
