"""Is the scalar part after the sums linear in the sums?

In: an epilogue graph with fake values and the names of its placeholders that are partials. Out: whether no
gradient of an output with respect to a partial depends on a partial; then a slice's backward may start before
all sums are known.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.passes.batch.operator_call import operator_name
from rannc_backend.passes.graph_queries import nodes_behind, placeholders
from rannc_backend.passes.tracing import symbolic_sizes

#: only the shape of the argument matters
SHAPE_ONLY = (
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "sym_size",
)


def is_linear(epilogue: fx.GraphModule, differentiated: Collection[str], partials: Collection[str]) -> bool:
    """Trace d(outputs)/d(differentiated partials) and look whether any of it reads a partial."""
    inputs = placeholders(epilogue.graph)
    values = [node.meta["val"] for node in inputs]
    wanted = [
        place
        for place, node in enumerate(inputs)
        if node.name in differentiated
        and (node.meta["val"].is_floating_point() or node.meta["val"].is_complex())
    ]
    if not wanted:
        return True

    def gradients(*inputs: torch.Tensor) -> list[Any]:
        leaves = [
            item.detach().requires_grad_(place in wanted) if isinstance(item, torch.Tensor) else item
            for place, item in enumerate(inputs)
        ]
        with torch.enable_grad():
            outputs = fx.Interpreter(epilogue).run(*leaves)
            results: list[Any] = []
            for output in outputs:
                if output.requires_grad:
                    sources = [leaves[place] for place in wanted]
                    seed = torch.ones(output.shape, dtype=output.dtype, device=output.device)
                    results += torch.autograd.grad(
                        output, sources, seed, retain_graph=True, allow_unused=True
                    )
        return results

    with symbolic_sizes(values):
        traced = make_fx(gradients, decomposition_table={})(*values)
    by_name = {node.name: inner for node, inner in zip(inputs, placeholders(traced.graph))}
    forbidden = {by_name[name] for name in partials}
    read = nodes_behind(traced.graph.output_node().all_input_nodes, stop=_reads_no_values)
    return not read & forbidden


def _reads_no_values(node: fx.Node) -> bool:
    return operator_name(node.target).removeprefix("aten.") in SHAPE_ONLY
