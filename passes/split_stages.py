"""Cut a row-wise graph into one graph per pipeline stage, along a map from nodes to stages.

In: the `rowwise` graph (functional ATen ops, ``meta["val"]`` fakes, every batch size an expression of one symbol
``rows``), what each of its outputs is, the layout of every node, and the stage of every node that depends on the batch.
Out: one `StageGraph` per stage.

Terms. A *constant* node does not depend on the batch: it is computed again in every stage that uses it. A *sym* node is a
SymInt (a batch size or arithmetic on it): it is rebuilt in each stage from a tensor that the stage receives. A *boundary*
value is made in one stage and used in a later one, be it the next or not. A value keeps its name (the node's name in the
row-wise graph) in the inputs and outputs of all stages; names inside a stage graph are canonical (``n0``, ``n1``, ...),
so that stages with the same layers have the same graph text.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

INPUT_KINDS = ("parameter", "buffer", "batch", "replicated", "boundary", "rng_seed", "first_row", "global_rows", "prologue")
OUTPUT_KINDS = ("boundary", "rows", "partial", "buffer", "replicated")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """One placeholder of a stage graph: the row-wise graph's node of that name, and where it comes from."""

    name: str
    kind: str

    def __post_init__(self) -> None:
        assert self.kind in INPUT_KINDS, f"stage input {self.name} has unknown kind {self.kind!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """One output of a stage graph: the row-wise graph's node of that name, and what it serves.

    `fqn` is the buffer's dotted name if `kind` is "buffer", else None.
    """

    name: str
    kind: str
    fqn: str | None = None

    def __post_init__(self) -> None:
        assert self.kind in OUTPUT_KINDS, f"stage output {self.name} has unknown kind {self.kind!r}"
        assert (self.fqn is not None) == (self.kind == "buffer"), f"stage output {self.name}: fqn is for buffers only"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraph:
    """One stage: `graph_module`'s placeholder i is `inputs[i]`, element i of its output tuple is `outputs[i]`.

    A value that serves several purposes (a boundary value that is a user output too) is listed once per kind.
    """

    index: int
    graph_module: fx.GraphModule
    inputs: tuple[StageInput, ...]
    outputs: tuple[StageOutput, ...]
