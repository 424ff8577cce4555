"""From a captured graph to everything that planning and deployment ask about it.

In: a `CapturedGraph`. Out: a `GraphAnalysis`: the row-wise graph with its layouts, prologue and epilogue,
random operators made pure, and which values carry gradients. The same on every rank, computed by each for
itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from rannc_backend.capture.graph import CapturedGraph
from rannc_backend.errors import BatchMixedError, user_location
from rannc_backend.ir.exchange import Value
from rannc_backend.passes.batch.batch_axis import Rows, is_statistic
from rannc_backend.passes.batch.differentiability import values_needing_grad
from rannc_backend.passes.batch.split_reductions import BatchSplit, split_batch
from rannc_backend.passes.data_sizes import bound_data_sizes
from rannc_backend.passes.pipeline import PassError

EXTRA_INPUTS = ("rng_seed", "first_row", "global_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphAnalysis:
    """A captured graph, split at its reductions over the batch."""

    captured: CapturedGraph
    split: BatchSplit
    needs_grad: frozenset[str]
    input_kinds: dict[str, str]

    @property
    def trained_parameters(self) -> frozenset[str]:
        """Placeholder names of the parameters that require gradients."""
        return frozenset(
            spec.name for spec in self.captured.inputs if spec.kind == "parameter" and spec.requires_grad
        )

    def node(self, name: str) -> fx.Node:
        """Node of the row-wise graph by name."""
        return next(node for node in self.split.rowwise.graph.nodes if node.name == name)

    def value(self, name: str) -> Value:
        """What travels when the value of node ``name`` does. AssertionError when it is not row-wise."""
        layout = self.split.layouts[name]
        assert isinstance(layout, Rows), f"{name} has no rows: {layout}"
        fake = self.node(name).meta["val"]
        shape = tuple(-1 if dim == layout.dim else int(size) for dim, size in enumerate(fake.shape))
        return Value(
            name=name,
            dtype=fake.dtype,
            shape=shape,
            dim=layout.dim,
            outer=int(layout.outer),
            inner=int(layout.inner),
        )


def analyze(
    captured: CapturedGraph, *, whole_batch: str = "auto", batch_norm: str = "micro_batch"
) -> GraphAnalysis:
    """Run the passes that need no plan.

    Args:
        whole_batch: the option; "never" refuses graphs whose rows meet.
        batch_norm: the option; with "global" a graph that takes statistics of a batch runs on the whole batch.

    Raises:
        BatchMixedError: an operator mixes samples; names it and the user's line.
    """
    trained = {spec.name for spec in captured.inputs if spec.requires_grad}
    try:
        split = _split(captured, trained, together=False)
        if batch_norm == "global" and any(map(is_statistic, split.layouts.values())):
            split = _split(captured, trained, together=True)
    except PassError as error:
        if whole_batch == "never":
            raise mixed_batch_error(error) from error
        try:
            split = _split(captured, trained, together=True)
        except PassError as remaining:
            raise mixed_batch_error(remaining) from error
    bound_data_sizes(split.rowwise)
    needs_grad = values_needing_grad(split.rowwise, trained)
    return GraphAnalysis(
        captured=captured, split=split, needs_grad=needs_grad, input_kinds=_input_kinds(captured, split)
    )


def _split(captured: CapturedGraph, trained: Collection[str], *, together: bool) -> BatchSplit:
    inputs = captured.inputs
    return split_batch(
        captured.graph_module,
        batch_inputs=[spec.name for spec in inputs if spec.kind == "batch"],
        replicated_inputs=[spec.name for spec in inputs if spec.kind == "replicated"],
        gradient_inputs=trained,
        num_user_outputs=captured.num_user_outputs,
        buffer_updates=captured.buffer_updates,
        rows_symbol=captured.rows_symbol,
        together=together,
    )


#: What helps where a library's own code mixes the rows, by a part of that file's path.
_CURES_BY_FILE = {
    "transformers/integrations/moe.py": "sorting tokens by expert mixes rows; "
    "model.set_experts_implementation('batched_mm') before compiling computes each token by itself.",
}


def mixed_batch_error(error: PassError) -> BatchMixedError:
    """The user's error for what a pass refuses: operator, reason, and the line of the user's model."""
    node = error.node
    operator = "" if node is None else str(node.target)
    frames = "" if node is None else str(node.meta.get("stack_trace") or "")
    cure = next((cure for place, cure in _CURES_BY_FILE.items() if place in frames), "")
    return BatchMixedError(operator, reason=error.reason, location=user_location(frames), cure=cure)


def _input_kinds(captured: CapturedGraph, split: BatchSplit) -> dict[str, str]:
    kinds = {spec.name: spec.kind for spec in captured.inputs}
    for node in split.rowwise.graph.nodes:
        if node.op == "placeholder" and node.name not in kinds:
            kinds[node.name] = node.name if node.name in EXTRA_INPUTS else "prologue"
    return kinds
