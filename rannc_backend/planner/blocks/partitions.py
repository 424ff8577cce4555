"""The forward and backward graphs of a stage at several activation budgets, to be looked at: nothing is
compiled, nothing runs.

In: a `StageGraph` on fake tensors, the compiler that it is meant for. Out: a `StagePartition` per budget.
Terms as in compile_joint.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from rannc_backend.kernels.gradient_writes import FIRST
from rannc_backend.passes.pipeline import run_pass
from rannc_backend.passes.stage.gradient_buckets import WriteIntoBuckets
from rannc_backend.passes.stage.partition_backward import DeliverEarly
from rannc_backend.passes.stage.recompute import saved_bytes
from rannc_backend.passes.stage.split_backward import SplitBackward
from rannc_backend.passes.stage.split_stages import StageGraph
from rannc_backend.stages.build import Gradients
from rannc_backend.stages.compiled_stage import StageBuilder
from rannc_backend.stages.joint_graph import TracedStage
from rannc_backend.stages.signature import StageSignature, signature_of
from rannc_backend.stages.variants import with_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePartition:
    """A stage's graphs at one activation budget, as they would be compiled; `backward` is None where nothing
    is trained.

    forward: (batch size, *inputs, *constants) to (*`num_outputs` outputs, *saved). backward: (sink, *saved,
    *tangents) to the gradients of inputs; parameter gradients go to the sink as they are made, unless
    `gradients_at_end`: then it takes no sink and returns them too. `kept_anyway` are the names of forward's
    placeholders that live as long as the stage. `second`: the part of a backward that computes gradients of parameters, and
    `kept_bytes` what it needs of the first, if a schedule splits backwards. All sizes are over `rows_symbol`; `saved_bytes`: see
    `passes.recompute`. `output_index[i]` is where output i of the stage is found among the outputs.
    """

    budget: float
    signature: StageSignature
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_outputs: int
    num_tangents: int
    output_index: tuple[int, ...]
    kept_anyway: frozenset[str]
    written_in_place: frozenset[
        str
    ]  # values of the backward graph that are computed in the memory of a gradient bucket
    gradients_at_end: bool
    saved_bytes: sympy.Expr
    second: fx.GraphModule | None = None
    kept_bytes: sympy.Expr = sympy.Integer(0)
    rows_symbol: sympy.Symbol


def partitions_of(
    stage: StageGraph,
    *,
    needs_grad: frozenset[str],
    requires_grad_parameters: frozenset[str],
    rows_symbol: sympy.Symbol,
    compiler: str,
    budgets: Sequence[float] = (1.0,),
    rows_hint: int = 61,
    wide_sums: bool = False,
) -> tuple[StagePartition, ...]:
    """Split a stage into forward and backward at each activation budget; traces once. Arguments as for
    `compile_stage`.

    The stage is traced over fakes of its own, so that what torch assumes of the batch size there binds
    nothing else; their symbol for the batch size is each result's `rows_symbol`.
    """
    hinted, fake_mode, symbols = with_hints(stage, (rows_symbol,), (rows_hint,))
    signature = signature_of(hinted, needs_grad, requires_grad_parameters, symbols[0], wide_sums=wide_sums)
    builder = StageBuilder(hinted, signature, fake_mode, compiler, 1.0)
    traced = builder.trace()
    found = []
    for budget in budgets:
        builder.activation_budget = budget
        found.append(_partition(builder, traced))
    return tuple(found)


def _partition(builder: StageBuilder, traced: TracedStage) -> StagePartition:
    forward, backward, saved, in_place = traced.joint, None, sympy.Integer(0), frozenset[str]()
    second, kept = None, sympy.Integer(0)
    if traced.tangent_of:
        split, gradients = builder.split_safely(traced)
        forward, backward = split.forward, split.backward
        saved = saved_bytes(forward, traced.num_outputs, builder.kept_anyway(forward))
        in_place = _written_in_place(builder, backward, gradients)
        if gradients.parameters:
            parts = run_pass(SplitBackward(tuple(gradients.parameters)), backward)
            second, kept = parts.second, parts.kept_bytes(builder.kept_anyway(forward))
        if not builder.inductor:
            backward = run_pass(DeliverEarly(gradients.parameters, gradients.num_gradients), backward)
    return StagePartition(
        budget=builder.activation_budget,
        signature=builder.signature,
        forward=forward,
        backward=backward,
        num_outputs=traced.num_outputs,
        num_tangents=len(traced.tangent_of),
        output_index=builder.output_index,
        kept_anyway=builder.kept_anyway(forward),
        written_in_place=in_place,
        gradients_at_end=builder.inductor,
        saved_bytes=saved,
        second=second,
        kept_bytes=kept,
        rows_symbol=builder.signature.rows_symbol,
    )


def _written_in_place(
    builder: StageBuilder, backward: fx.GraphModule, gradients: Gradients
) -> frozenset[str]:
    """Names of the matrix products, and of their views, that `passes.gradient_buckets` lets write to a
    bucket.
    """
    with builder.fake_mode:
        slots = {
            position: builder.signature.gradient_sum(position) for position in gradients.parameters.values()
        }
        writes = WriteIntoBuckets(
            parameters=gradients.parameters, slots=slots, accumulate=FIRST, fuse=builder.inductor
        )
        how = run_pass(writes, backward).how
    (output,) = backward.graph.find_nodes(op="output")
    names: set[str] = set()
    for index, position in gradients.parameters.items():
        node = output.args[0][index]
        while how[position] == ("product",) and len(node.users) == 1:
            names.add(node.name)
            if node.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
                break
            node = node.all_input_nodes[0]
    return frozenset(names)
