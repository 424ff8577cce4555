"""Make random operators pure functions of seed, row and element (work in progress: the interface is final)."""
from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch import fx

from .layouts import Layout


def make_random_ops_pure(graph_module: fx.GraphModule, layouts: Mapping[str, Layout], rows_symbol: sympy.Symbol) -> dict[str, Layout]:
    """Rewrite the random operators of the graph in place; gives the layouts of all nodes after it."""
    return dict(layouts)
