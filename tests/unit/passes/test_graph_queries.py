"""Questions about graphs."""

from __future__ import annotations

import torch
from torch import fx

from rannc_backend.passes.graph_queries import ancestors, descendants, module_of, output_values, placeholders


def test_questions():
    graph = fx.symbolic_trace(lambda x, y: (torch.relu(x), torch.relu(x) + y, None))
    names = lambda nodes: {node.name for node in nodes}  # noqa: E731
    x, y = placeholders(graph)
    first, total, nothing = output_values(graph)
    assert (x.name, y.name, nothing) == ("x", "y", None)
    assert names(ancestors([total])) == {"x", "y", "relu_1", "add"}
    assert names(descendants([first])) == {"relu", "output"}
    assert names(ancestors([])) == set()
    assert module_of(first) == ""
    first.meta["module_path"] = "h.0"
    assert module_of(first) == "h.0"
