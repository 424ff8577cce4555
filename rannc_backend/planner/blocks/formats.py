"""What travels in fewer bits than it has, as options ask for it, in a graph of blocks.

In: a block graph, dtypes of its values and parameters, options. Out: the graph with the share of their bytes that travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import fx

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.ir.block_graph import BlockGraph, ParameterUse
from rannc_backend.kernels.bucket_wires import GRADIENT_DTYPES, dtype_on_wire
from rannc_backend.kernels.gradient_writes import sum_dtype
from rannc_backend.kernels.message_layout import WIRES, choose_wires, share_on_wire
from rannc_backend.planner.cost.tensor_sizes import value_bytes
from rannc_backend.settings.options import Config


def in_formats(graph: BlockGraph, values: Mapping[str, torch.dtype], config: Config) -> BlockGraph:
    """The graph with what travels in fewer bits, by options; ``values``: dtypes of values by name and of parameters by
    dotted name.
    """
    wire, sums = WIRES[config.boundary_dtype], GRADIENT_DTYPES.get(config.gradient_dtype)

    def share(name: str, *, backward: bool) -> float:
        dtype = values[name]
        return share_on_wire(dtype, choose_wires([dtype], wire, backward=backward)[0])

    def sum_share(use: ParameterUse) -> float:
        dtype = sum_dtype(values[use.name], wide=config.wide_sums)
        return dtype_on_wire(dtype, sums).itemsize / dtype.itemsize

    return replace(
        graph,
        num_communicators=config.num_communicators,
        flows=tuple(
            replace(
                flow,
                value_share=share(flow.name, backward=False),
                gradient_share=share(flow.name, backward=True),
            )
            for flow in graph.flows
        ),
        parameters=tuple(replace(use, sum_share=sum_share(use)) for use in graph.parameters),
    )


def with_looked_up(graph: BlockGraph, analysis: GraphAnalysis, of_tables: str) -> BlockGraph:
    """The graph with what a batch looks up of tables whose gradients are kept as rows, by the option sparse_gradients."""
    captured, found = analysis.captured, dict[str, ParameterUse]()
    uses = {use.name: use for use in graph.parameters}
    for table in captured.sparse_tables if of_tables == "sparse" else ():
        use = uses.get(table.fqn)
        if use is None or not table.is_rows or not use.num_bytes:
            continue
        node = analysis.node(table.name)
        readers = [cast("fx.Node", reader.args[1]) for reader in node.users if reader.op != "output"]
        ids = [reader.meta["val"] for reader in readers]
        looked_up = sum(value_bytes(each) / each.element_size() for each in ids)
        found[use.name] = replace(use, table_rows=int(node.meta["val"].shape[0]), looked_up=looked_up)
    return replace(graph, parameters=tuple(found.get(use.name, use) for use in graph.parameters))
