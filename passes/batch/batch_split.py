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
USER_KINDS = ("rows", "scalar", "replicated", "none", "unavailable")


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
class UserOutput:
    """Where one user output comes from: a row-wise node (kinds "rows", "replicated"), an epilogue output
    ("scalar"), or nowhere ("none": `value` itself, None, a Python constant or an expression over lengths; "unavailable": `value` says why
    it cannot be had)."""

    kind: str
    name: str | None = None
    index: int | None = None
    value: object = None

    def __post_init__(self) -> None:
        assert self.kind in USER_KINDS, f"unknown output kind {self.kind}"
        assert (self.name is not None) == (self.kind in ("rows", "replicated")), (
            "rows and replicated outputs have a name"
        )
        assert (self.index is not None) == (self.kind == "scalar"), "scalar outputs have an index"


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
