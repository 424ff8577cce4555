"""Says, once for a model and on rank 0, where its numbers are not those of one process: the exceptions of
docs/semantics.md.

In: an analysed graph, its cut, the plan. Out: a line of the log per exception that applies, with what it
means and the option that avoids it. Whether one applies is read off the graph and the plan, never off the
names or classes of modules. Terms: a *slice* is a micro-batch on one replica.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.errors import user_location
from rannc_backend.ir.plan import Plan
from rannc_backend.passes.batch.batch_axis import is_statistic
from rannc_backend.passes.batch.batch_split import UserRows, UserScalar
from rannc_backend.passes.batch.operator_call import ADVICE
from rannc_backend.settings.options import Config
from rannc_backend.stages.cut_stages import OutputsLeftOut

logger = logging.getLogger(__name__)

_NARROW_BITS = 16
_CAST = "aten._to_copy.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """A graph as it runs: ``stage_of`` by node of the row-wise graph."""

    analysis: GraphAnalysis
    stage_of: Mapping[str, int]
    plan: Plan
    config: Config

    @property
    def num_micro_batches(self) -> int:
        """Of a step with enough rows."""
        if self.analysis.split.whole_batch is not None:
            return 1
        return self.config.pipeline_num or self.plan.num_micro_batches

    def slices(self, stage: int) -> str:
        """Into how many parts this stage takes a batch apart, in words; "" where it sees the whole batch."""
        num_replicas = len(self.plan.stages[stage].ranks)
        numbers = ((self.num_micro_batches, "micro-batches"), (num_replicas, "replicas"))
        parts = [f"{number} {what}" for number, what in numbers if number > 1]
        return " on ".join(parts)


@dataclass(slots=True)
class Notices:
    """What has been said about one model."""

    said: set[str] = field(default_factory=set)

    def say(self, deployed: Deployed) -> None:
        """Say what applies to this graph and has not been said. To be called on rank 0."""
        for kind, text_of in (*EXCEPTIONS.items(), ("lengths", _lengths)):
            text = "" if kind in self.said else text_of(deployed)
            if text:
                self.said.add(kind)
                logger.info("%s", text)
        if deployed.config.log_casts:
            _say_casts(deployed.analysis.captured.graph_module.graph)


def _say_casts(graph: fx.Graph) -> None:
    """Say where a captured model casts from one floating dtype to another, and how often in each place."""
    places: Counter[tuple[str, str, str]] = Counter()
    for node in graph.nodes:
        if node.op != "call_function" or not node.all_input_nodes:
            continue
        to, source = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
        if str(node.target) == _CAST and to.is_floating_point() and to.dtype != source.dtype:
            place = user_location(node.meta.get("stack_trace")) or "torch"
            places[str(source.dtype), str(to.dtype), place] += 1
    lines = [
        f"{number} x {source.removeprefix('torch.')} to {to.removeprefix('torch.')} at {place}"
        for (source, to, place), number in places.items()
    ]
    logger.info("casts: %s", "; ".join(lines) or "none")


def say_outputs(analysis: GraphAnalysis, rows: Sequence[int], left_out: OutputsLeftOut) -> None:
    """What outputs beside a loss cost in each step, or why they do not come back. ``rows``: of each rank."""
    names = [output.name for output in analysis.split.user_outputs if isinstance(output, UserRows)]
    scalars = any(isinstance(output, UserScalar) for output in analysis.split.user_outputs)
    bytes_per_row: int = sum(analysis.value(name).bytes_per_row for name in names)
    if names and left_out.why and not left_out.always:
        logger.info(
            "%s beside the loss (%.1f MB per step) %s not come back in training: %s; reading one raises an error, "
            "and options={'outputs': 'all'} plans room for them",
            "an output" if len(names) == 1 else f"{len(names)} outputs",
            bytes_per_row * sum(rows) / 2**20,
            "does" if len(names) == 1 else "do",
            left_out.why,
        )
    elif len(rows) > 1 and scalars and names and not left_out.why:
        logger.info(
            "%d outputs beside the loss come back as each rank's rows, which moves %.1f MB per step; "
            "options={'outputs': 'loss'} leaves them out",
            len(names),
            bytes_per_row * sum(rows) / 2**20,
        )


def _statistics(deployed: Deployed) -> str:
    layouts = deployed.analysis.split.layouts
    names = [name for name, layout in layouts.items() if is_statistic(layout) and name in deployed.stage_of]
    found = next((slices for name in names if (slices := deployed.slices(deployed.stage_of[name]))), "")
    return found and (
        f"batch normalisation in training mode uses the statistics of each slice of the batch ({found}), as "
        "it does in gradient accumulation and in DDP, not those of the whole batch, and its running "
        "statistics advance once per micro-batch; pipeline_num=1 with replica_num=1 gives the statistics of "
        "the whole batch"
    )


def _whole_batch(deployed: Deployed) -> str:
    whole = deployed.analysis.split.whole_batch
    if whole is None:
        return ""
    place, reason = user_location(whole.stack_trace), whole.reason.replace(ADVICE, "").strip(". ")
    return (
        f"samples of a batch meet in this model{f' ({place})' if place else ''}: {reason}; every step runs as one "
        "micro-batch on one replica per stage, so results are those of one process and stages do not overlap; "
        "to have micro-batches and replicas, compute each sample by itself there (whole_batch='never' refuses "
        "such models)"
    )


def _random_numbers(deployed: Deployed) -> str:
    if "rng_seed" not in deployed.analysis.input_kinds:
        return ""
    return (
        "dropout and other random operators draw numbers that depend on the seed, the operator and the row "
        "alone, not on stages, replicas or micro-batches; they are not the numbers that plain torch draws: "
        "to compare the two, switch them off (p=0, or evaluation mode)"
    )


def _narrow_sums(deployed: Deployed) -> str:
    if deployed.config.wide_sums:
        return ""
    trained = deployed.analysis.trained_parameters
    names = {fqn: name for name, fqn in trained.items()}
    for index, stage in enumerate(deployed.plan.stages):
        slices = deployed.slices(index)
        dtypes = {_dtype(deployed.analysis, names[name]) for name in stage.parameters if name in names}
        found = sorted(
            str(dtype).removeprefix("torch.") for dtype in dtypes if torch.finfo(dtype).bits <= _NARROW_BITS
        )
        if slices and found:
            return (
                f"gradients of parameters in {' and '.join(found)} are added up over slices of the batch "
                f"({slices}) in that type, and each addition rounds; gradient_accumulation_dtype='float32', "
                "parameters in float32 under torch.autocast, or pipeline_num=1 with replica_num=1, avoid it"
            )
    return ""


def _fewer_bits(deployed: Deployed) -> str:
    config, plan = deployed.config, deployed.plan
    found = []
    if config.boundary_dtype != "same" and len(plan.lanes) > 1:
        found.append(f"values between stages on different ranks (boundary_dtype={config.boundary_dtype!r})")
    is_reduced = any(len(plan.owners(name)) > 1 for stage in plan.stages for name in stage.parameters)
    if config.gradient_dtype != "same" and is_reduced:
        found.append(f"sums of gradients over ranks (gradient_dtype={config.gradient_dtype!r})")
    return found and f"{' and '.join(found)} are rounded to fewer bits; 'same' is exact" or ""


def _dtype(analysis: GraphAnalysis, name: str) -> torch.dtype:
    return analysis.node(name).meta["val"].dtype


def _mean_over_ranks(deployed: Deployed) -> str:
    outputs = deployed.analysis.split.user_outputs
    outside = any(
        isinstance(output, UserRows) and output.name in deployed.analysis.needs_grad for output in outputs
    )
    inside = any(isinstance(output, UserScalar) for output in outputs)
    num_ranks = len({rank for stage in deployed.plan.stages for rank in stage.ranks})
    # A call that is not trained, as in evaluation, has no gradients.
    is_trained = torch.is_grad_enabled() and deployed.config.gather_inputs
    if not outside or inside or num_ranks == 1 or not is_trained:
        return ""
    what = "mean" if deployed.config.mean_gradients else "sum"
    return (
        f"the loss is computed outside of the compiled model: gradients are the {what} over ranks of each "
        "rank's own, as in DDP, which is not the gradient of the mean over all rows where ranks have "
        "different numbers of rows; compute the loss in forward to have that"
    )


def _lengths(deployed: Deployed) -> str:
    """No exception: a plan that may not have room for what comes."""
    lengths = [length for length in deployed.analysis.captured.lengths if not length.longest]
    if not lengths:
        return ""
    where = ", ".join(f"dimension {length.dim} of {length.carrier}" for length in lengths)
    return (
        f"sizes differ between calls ({where}), and memory is planned for those of the first call: mark it there "
        "to have it planned for longer ones: torch._dynamo.mark_dynamic(tensor, dim, max=longest)"
    )


EXCEPTIONS: Mapping[str, Callable[[Deployed], str]] = {
    "whole batch": _whole_batch,
    "statistics": _statistics,
    "random numbers": _random_numbers,
    "narrow sums": _narrow_sums,
    "fewer bits": _fewer_bits,
    "mean over ranks": _mean_over_ranks,
}
"""By kind: the sentence about a graph, "" where the exception does not apply. A row of docs/semantics.md,
section 7, each.
"""
