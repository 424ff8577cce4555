"""Made-up block graphs: random ones, and the same with other names.

In: a seed. Out: `BlockGraph`s of a line of blocks with skips and shared parameters.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import sympy

from rannc_backend.ir.block_graph import INPUT_BLOCK, Block, BlockGraph, Flow, OperatorCost, ParameterUse

ROWS = sympy.Symbol("rows", positive=True, integer=True)


def random_line(seed: int, num_blocks: int) -> BlockGraph:
    """Blocks of a few kinds, so that some are equal."""
    generator = np.random.default_rng(seed)
    kinds = [tuple(int(number) for number in generator.integers(1, 20, 4)) for _ in range(3)]
    chosen = [int(kind) for kind in generator.integers(0, len(kinds), num_blocks)]
    blocks = tuple(_block(index, kind, *kinds[kind]) for index, kind in enumerate(chosen))
    uses = [
        ParameterUse(name=f"p{index}", num_bytes=kinds[kind][2] * 10**6, trainable=True)
        for index, kind in enumerate(chosen)
    ]
    if num_blocks > 2 and generator.random() < 0.5:  # tied: the last block reads the first one's too
        blocks = (*blocks[:-1], replace(blocks[-1], parameters=("p0", *blocks[-1].parameters)))
    flows = [_flow(index, index + 1, int(generator.integers(1, 9))) for index in range(-1, num_blocks - 1)]
    if num_blocks > 3:
        flows.append(_flow(0, num_blocks - 1, int(generator.integers(1, 9))))
    return BlockGraph(
        blocks=blocks, flows=tuple(flows), parameters=tuple(sorted(uses, key=lambda use: use.name))
    )


@cache
def split_line(seed: int, num_blocks: int) -> BlockGraph:
    """The same, with backwards that have second parts: half of their FLOPs."""
    graph = random_line(seed, num_blocks)
    blocks = tuple(
        replace(
            block,
            operators=tuple(
                replace(each, weight_flops=each.backward_flops / 2, kept_bytes=block.saved_bytes)
                for each in block.operators
            ),
        )
        for block in graph.blocks
    )
    return replace(graph, blocks=blocks)


def _block(index: int, kind: int, work: int, values: int, weights: int, workspace: int) -> Block:
    operator = OperatorCost(
        name=f"mm{index}", dtype="float32", operator_class="matmul", forward_flops=work * 10**9 * ROWS,
        backward_flops=2 * work * 10**9 * ROWS, forward_bytes=values * 10**6 * ROWS, backward_bytes=values * 10**6 * ROWS,
        num_forward_launches=2, num_backward_launches=4,
    )  # fmt: skip
    return Block(
        index=index, structure=f"kind{kind}", nodes=(f"n{index}", f"m{index}"), modules=(f"layers.{index}",), parameters=(f"p{index}",),
        updated_buffers=(), operators=(operator,), saved_bytes=values * 10**6 * ROWS,
        workspace_bytes=(workspace * 10**6 * ROWS,),
    )  # fmt: skip


def _flow(producer: int, consumer: int, size: int) -> Flow:
    return Flow(
        name=f"v{producer}_{consumer}", producer=producer, consumers=(consumer,), num_bytes=size * 10**5 * ROWS,
        needs_grad=producer != INPUT_BLOCK,
    )  # fmt: skip


def renamed(graph: BlockGraph, names: dict[str, str]) -> BlockGraph:
    """With other names of nodes, modules, parameters, values, operators and structures; those not in `names`
    get one.
    """

    def name(old: str) -> str:
        return names.setdefault(old, f"{hash_of(old)}_{old}")

    blocks = tuple(
        replace(
            block,
            structure=name(block.structure),
            nodes=tuple(map(name, block.nodes)),
            modules=tuple(map(name, block.modules)),
            parameters=tuple(map(name, block.parameters)),
            operators=tuple(replace(item, name=name(item.name)) for item in block.operators),
        )
        for block in graph.blocks
    )
    return replace(
        graph,
        blocks=blocks,
        flows=tuple(replace(flow, name=name(flow.name)) for flow in graph.flows),
        parameters=tuple(
            sorted((replace(use, name=name(use.name)) for use in graph.parameters), key=lambda use: use.name)
        ),
    )


def hash_of(text: str) -> int:
    """A number that puts texts in another order than their own; the same in every process."""
    return sum((place + 1) * ord(letter) * 7919 for place, letter in enumerate(text)) % 997
