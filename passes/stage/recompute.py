"""What forward keeps for backward, and how many bytes that is.

In: a stage graph, or its joint graph of forward and backward, with the segment of each value. Out: which values may
be kept. In: the forward graph after the split. Out: bytes as an expression in the batch size.

Terms. *Saved* values are the forward graph's outputs after the stage's own. Saved bytes count each distinct
storage once, whole (a view keeps its base alive). Parameters, buffers and other inputs that live as long as
the stage count nothing; a saved batch input or boundary input counts, since only backward still needs it, and
so does a saved output. A *segment* is a part of the stage that is computed again just before its backward; what
belongs to no segment is kept as elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from rannc_backend.kernels.checkpoint_mark import MARK

KEPT = "kept"  # of nodes: the user has marked the value
_SEGMENT = "ac_graph_id"  # torch's name for a region that is checkpointed: traces pass it on


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What stages compute again, by names of the row-wise graph. `segment_of`: of values; `kept`: those that are kept
    although they do not leave their segment. `part_of`: where segments have parts that are computed again one after the
    other, as far as each does without the rest.
    """

    segment_of: Mapping[str, int]
    kept: frozenset[str] = frozenset()
    part_of: Mapping[str, int] | None = None

    def parts_of(self, nodes: Iterable[fx.Node]) -> set[int]:
        """The segments of nodes, or parts of such."""
        part_of = self.segment_of if self.part_of is None else self.part_of
        return {part_of[node.name] for node in nodes if node.name in part_of}

    def is_again(self, node: fx.Node) -> bool:
        """Whether a value of the row-wise graph is computed again, wherever stages end."""
        segment = self.segment_of.get(node.name)
        if segment is None or node.name in self.kept:
            return False
        return all(
            self.segment_of.get(user.name) == segment for user in node.users if user.op == "call_function"
        )

    def marks_of(self, nodes: Sequence[fx.Node]) -> tuple[tuple[int, bool], ...]:
        """What is said of nodes, with segments counted from the first of theirs on; () where nothing is."""
        numbers: dict[int, int] = {}
        marks = []
        for node in nodes:
            segment = self.segment_of.get(node.name)
            number = -1 if segment is None else numbers.setdefault(segment, len(numbers))
            marks.append((number, self.is_again(node)))
        return tuple(marks) if numbers else ()


NOTHING_RECOMPUTED = Recomputed(segment_of=MappingProxyType({}))


def mark_segments(stage: fx.GraphModule, recomputed: Recomputed) -> None:
    """Say to which segment the values of a stage graph belong. The joint graph of the stage will say it too."""
    for node in stage.graph.nodes:
        name = node.meta.get("value_name")
        if node.op == "call_function" and name in recomputed.segment_of:
            node.meta[_SEGMENT] = recomputed.segment_of[name]
            node.meta[KEPT] = name in recomputed.kept


def segments_of(stage: fx.GraphModule) -> tuple[int, ...]:
    """What `mark_segments` has said, by node, from 0 on; -1 of those that belong to none."""
    marks = [node.meta.get(_SEGMENT, -1) for node in stage.graph.nodes]
    first = min((mark for mark in marks if mark >= 0), default=0)
    return tuple(mark - first if mark >= 0 else mark for mark in marks)


def lift_marks(graph: fx.Graph) -> None:
    """Take the marks of `checkpoint_tensor` out of a graph; the values that they mark have `KEPT` set. The caller
    recompiles.
    """
    for node in graph.find_nodes(op="call_function", target=MARK):
        (value,) = node.args
        value.meta[KEPT] = True
        node.replace_all_uses_with(value)
        graph.erase_node(node)


def with_mark(node: fx.Node, value: Any) -> Any:
    """What a node has given, with a mark where it has `KEPT` set: a trace passes the mark on, and not what is set."""
    return MARK(value) if node.meta.get(KEPT) and isinstance(value, torch.Tensor) else value


def choose_recomputed(joint: fx.GraphModule) -> bool:
    """Tag the values of segments for the partitioner: those that leave their segment or are marked are kept where
    backward needs them, all others are computed again. False where there is no segment.
    """
    own = [node for node in joint.graph.nodes if _SEGMENT in node.meta]
    for node in own:
        leaves = node.meta.get(KEPT) or any(_takes_out(user, node.meta[_SEGMENT]) for user in node.users)
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if leaves else CheckpointPolicy.MUST_RECOMPUTE
    return bool(own)


def _takes_out(user: fx.Node, segment: int) -> bool:
    """Whether a node of the forward computes outside of the segment with a value of it."""
    if user.op == "output" or user.meta.get("partitioner_tag") == "is_backward":
        return False
    return user.meta.get(_SEGMENT) != segment and not isinstance(user.meta.get("val"), torch.SymInt)


def saved_bytes(forward: fx.GraphModule, num_outputs: int, kept_anyway: Collection[str]) -> sympy.Expr:
    """Bytes of the saved values of one micro-batch, as an expression in the batch size.

    `kept_anyway` are the names of placeholders that live as long as the stage (parameters, buffers,
    constants).
    """
    placeholders = forward.graph.find_nodes(op="placeholder")
    kept = [node for node in placeholders if node.name in kept_anyway]
    (output,) = forward.graph.find_nodes(op="output")
    return bytes_beside(output.args[0][num_outputs:], kept)


def bytes_beside(nodes: Iterable[fx.Node], free: Iterable[fx.Node]) -> sympy.Expr:
    """Bytes of the distinct storages of `nodes` that are no storage of a node of `free`; numbers count nothing."""
    seen = {_storage(node.meta["val"]) for node in free if isinstance(node.meta["val"], torch.Tensor)}
    total: sympy.Expr = sympy.Integer(0)
    for node in nodes:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and _storage(value) not in seen:
            seen.add(_storage(value))
            total = total + _expression(value.untyped_storage().nbytes())
    return sympy.expand(total)


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _expression(size: int | torch.SymInt) -> sympy.Expr:
    return sympy.Integer(size) if isinstance(size, int) else sympy.sympify(size.node.expr)
