"""The result of splitting a graph at its reductions over the batch: data types only.

In: nothing. Out: BatchSplit, read by split_stages, the planner and the runtime.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from rannc_backend.passes.batch.layouts import Layout

GLOBAL_ROWS = "global_rows"
RNG_SEED = "rng_seed"
FIRST_ROW = "first_row"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOutput:
    """One output of the row-wise graph, or of a stage's part of it: `name` is its node in the row-wise graph, `kind` the
    type in a word, for texts and for the runtime, which does not import the passes.
    """

    kind: ClassVar[str]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOutput(GraphOutput):
    """A user output with rows."""

    kind: ClassVar[str] = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialOutput(GraphOutput):
    """A sum over the rows of a slice; the epilogue takes it summed over all slices."""

    kind: ClassVar[str] = "partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferOutput(GraphOutput):
    """The new value of the buffer of dotted name `fqn`. `once`: it has nothing to do with the rows (the vectors of a
    spectral norm), so that a step of any number of micro-batches must set it once, from what it was before; known of
    stages alone.
    """

    kind: ClassVar[str] = "buffer"
    fqn: str
    once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedOutput(GraphOutput):
    """A user output that is the same for every slice of rows."""

    kind: ClassVar[str] = "replicated"


RowwiseOutput = RowsOutput | PartialOutput | BufferOutput | ReplicatedOutput
"""One output of the row-wise graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRows:
    """A user output that the row-wise node of this name makes, row by row."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UserReplicated:
    """A user output that the row-wise node of this name makes, the same for every slice of rows."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UserScalar:
    """A user output that the epilogue makes, at this place among its outputs."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UserConstant:
    """A user output that no node makes: None, a Python constant, or an expression over lengths and the rows of the whole
    batch.
    """

    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class UserUnavailable:
    """A user output that cannot be had, and why."""

    why: str


UserOutput = UserRows | UserReplicated | UserScalar | UserConstant | UserUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatch:
    """Why a graph runs on the whole batch alone: `reason` in words, and the user's code at that place."""

    operator: str
    reason: str
    stack_trace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """A captured graph as row-wise part, sums of inputs before it, and scalar part after it.

    rowwise: placeholders of the captured graph in its order, then those added: "global_rows" (0-dim int64),
    "rng_seed",
        "first_row" (0-dim int64), and one per prologue sum that row-wise operators use. Runs on any slice of
        rows.
    outputs: one per output of rowwise, in order.
    layouts: of every node of rowwise, by name.
    prologue: inputs of a slice -> sums over its rows, named `prologue_sums`; to be summed over all slices.
    None without such.
    epilogue: global sums ("partial" outputs and prologue sums, by name) and "global_rows" -> scalar user
    outputs.
    linear: no gradient of an epilogue output with respect to a partial depends on a partial, so a slice's
    backward may start
        before the forward of the others has ended.
    whole_batch: the graph is right for one slice that holds the whole batch, and for no other; None: for any
    slices.
    """

    rowwise: fx.GraphModule
    outputs: tuple[RowwiseOutput, ...]
    layouts: dict[str, Layout]
    prologue: fx.GraphModule | None
    prologue_sums: tuple[str, ...]
    epilogue: fx.GraphModule | None
    user_outputs: tuple[UserOutput, ...]
    linear: bool
    whole_batch: WholeBatch | None = None
    has_choices: bool = False

    @property
    def partial_names(self) -> tuple[str, ...]:
        """The sums over rows that the row-wise graph makes, in the order of its outputs."""
        return tuple(output.name for output in self.outputs if isinstance(output, PartialOutput))

    def has_loss(self, needs_grad: Collection[str]) -> bool:
        """Whether the model gives a scalar, of sums over rows, that needs a gradient."""
        return any(name in needs_grad for name in self.partial_names)

    def named_graphs(self) -> dict[str, fx.GraphModule]:
        """The parts that there are."""
        parts = {"prologue": self.prologue, "rowwise": self.rowwise, "epilogue": self.epilogue}
        return {name: graph for name, graph in parts.items() if graph is not None}
