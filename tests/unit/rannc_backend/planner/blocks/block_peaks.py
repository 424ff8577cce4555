"""Analysed models in blocks, and the memory that stages of them really take."""

from __future__ import annotations

import functools

import torch
from torch import nn

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.passes.stage.recompute import Recomputed, mark_segments
from rannc_backend.planner.blocks.block_partitions import needs_grad_in_training, stage_needs_grad
from rannc_backend.planner.blocks.cut_blocks import block_graph
from rannc_backend.planner.blocks.measure import example_inputs, interval_stage
from rannc_backend.planner.blocks.told_recompute import told_recompute
from rannc_backend.planner.cost.segments import Segments
from rannc_backend.planner.plan_model import analyze_model
from rannc_backend.runtime.trace.allocations import AllocationTracker
from rannc_backend.settings.options import Config
from rannc_backend.stages.compiled_stage import compile_stage
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu
from tests.unit.rannc_backend.planner.planning_graphs import Chain, Filters, gpt2, llama

CPU = torch.device("cpu")
CLUSTER = local_cpu(2)
SCALARS_BYTES = 64  # a seed, a row: no account has them


@functools.lru_cache
def analysed(name: str, told: str = "") -> tuple[GraphAnalysis, BlockGraph]:
    torch.manual_seed(0)
    if name in ("gpt2", "llama"):
        module, batch = gpt2(num_layers=2) if name == "gpt2" else llama(num_layers=4)
        args, kwargs = (), batch
    else:
        module = Chain(width=32, activation=nn.functional.gelu) if name == "chain" else Filters()
        args, kwargs = (torch.randn(4, 32) if name == "chain" else torch.randn(4, 3, 8, 8),), {}
    analysis = analyze_model(module, args, kwargs, cluster=CLUSTER)
    graph = block_graph(
        analysis.split,
        analysis.captured.inputs,
        analysis.needs_grad,
        Config(),
        cluster=CLUSTER,
        batch_rows=16,
        rows_symbol=analysis.captured.rows_symbol,
        recomputed=told_recompute(told, analysis),
    )
    return analysis, graph


def measured_peak(
    name: str,
    begin: int,
    end: int,
    rows: int,
    budget: float,
    *,
    as_trained: bool = False,
    told: str = "",
    lets_go: bool = False,
) -> int:
    """Bytes beside inputs and parameters of one forward and backward of blocks [begin, end) as a stage.

    `as_trained`: outputs that the user alone gets have no gradient where the loss alone is differentiated. `told`: what
    the user wants computed again, in place of segments. `lets_go`: as in the executor, what was received goes after its last
    use; its bytes, which the account has by themselves, are taken off.
    """
    analysis, graph = analysed(name, told)
    stage_graph = interval_stage(analysis, [block.nodes for block in graph.blocks], begin, end)
    segments = Recomputed(segment_of=Segments(graph, fused=False).of_node)
    mark_segments(stage_graph.graph_module, told_recompute(told, analysis) if told else segments)
    stage = compile_stage(
        stage_graph,
        needs_grad=stage_needs_grad(analysis, stage_graph)
        if as_trained
        else needs_grad_in_training(analysis),
        requires_grad_parameters=frozenset(analysis.trained_parameters),
        fake_mode=analysis.captured.fake_mode,
        rows_symbol=analysis.captured.rows_symbol,
        compiler="eager",
        activation_budget=budget,
        training=True,
        rows_hint=rows,
    )
    args = example_inputs(stage_graph, analysis, rows, CPU)
    sink = stage.scratch_gradients()
    received = [
        value
        for slot, value in zip(stage_graph.inputs, args, strict=True)
        if lets_go and slot.kind in ("batch", "boundary")
    ]
    tracker = AllocationTracker(value for value in args if all(value is not other for other in received))
    tracker.add(received)
    received_bytes = tracker.live_bytes
    del received
    with tracker.following():
        outputs, saved = stage.forward(args)
        if lets_go:
            args.clear()
        grads = [torch.ones_like(outputs[position]) for position in stage.grad_outputs]
        del outputs
        kept = list(saved)
        del saved
        stage.backward(kept, grads, sink)
    return tracker.peak_bytes - received_bytes
