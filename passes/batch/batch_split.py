"""The result of splitting a graph at its reductions over the batch: data types only.

In: nothing. Out: BatchSplit, read by split_stages, the planner and the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from rannc_backend.passes.batch.layouts import Layout

GLOBAL_ROWS = "global_rows"
RNG_SEED = "rng_seed"
FIRST_ROW = "first_row"

ROWWISE_KINDS = ("rows", "partial", "buffer", "replicated")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowwiseOutput:
    """One output of the row-wise graph. `name` is its node there; `fqn` the buffer that it replaces (kind
    "buffer").
    """

    kind: str
    name: str
    fqn: str | None = None

    def __post_init__(self) -> None:
        assert self.kind in ROWWISE_KINDS, f"unknown output kind {self.kind}"
        assert (self.fqn is not None) == (self.kind == "buffer"), (
            f"output {self.name}: only a buffer has a dotted name"
        )


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
    """A user output that no node makes: None, a Python constant, or an expression over lengths."""

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

    def named_graphs(self) -> dict[str, fx.GraphModule]:
        """The parts that there are."""
        parts = {"prologue": self.prologue, "rowwise": self.rowwise, "epilogue": self.epilogue}
        return {name: graph for name, graph in parts.items() if graph is not None}
