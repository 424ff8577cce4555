"""The model as the stage search sees it: a line of blocks, the values that flow between them, and the
parameters they read.

In: what planner/blocks/cut_blocks.py finds in a row-wise graph. Out: frozen data whose amounts are sizes
(ir/size.py): expressions in the number of rows that one replica computes in one micro-batch.

Terms. Operator: one node's cost. Block: a run of consecutive nodes that is never cut. Flow: a value made by
one block (or a batch input) and read by later ones. Output: a value with rows that the user may get back.
Constant nodes belong to no block; their cost is counted with the first block that uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from rannc_backend.ir.size import Size

INPUT_BLOCK = -1  # producer of a flow that is an input of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """FLOPs and moved bytes of one node; `dtype` is that of its arithmetic. Views cost nothing and launch
    nothing.

    `operator_class`: "matmul", "attention", "convolution" or "elementwise": which of a device's efficiencies
    holds. `weight_flops`: of the backward, those for gradients of parameters, which need `kept_bytes`.
    """

    name: str
    dtype: str
    operator_class: str = "elementwise"
    forward_flops: Size
    backward_flops: Size
    forward_bytes: Size
    backward_bytes: Size
    num_forward_launches: int
    num_backward_launches: int
    weight_flops: Size = 0
    kept_bytes: Size = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`saved_bytes` are kept from forward to backward; `workspace_bytes`: for each operator what lies in memory
    while it runs (the largest counts, or the two largest). `structure`: a hash, equal for blocks with the same operators, shapes,
    dtypes, parameter shapes and wiring; such blocks cost the same at any number of rows. `again_from`: the first of the
    blocks from which the user wants something computed again together with something of this one; -1 where there is
    none."""

    index: int
    structure: str
    nodes: tuple[str, ...]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    updated_buffers: tuple[str, ...]
    operators: tuple[OperatorCost, ...]
    saved_bytes: Size
    workspace_bytes: tuple[Size, ...]
    again_from: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A value that later blocks read: sent once to each stage that reads it; its gradient comes back if it
    `needs_grad`. `is_again`: the user wants it computed again rather than kept. `value_share`, `gradient_share`: bytes
    that travel per byte, of it and of its gradient.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    num_bytes: Size
    needs_grad: bool
    is_again: bool = False
    value_share: float = 1.0
    gradient_share: float = 1.0

    def __post_init__(self) -> None:
        assert self.consumers and all(self.producer < block for block in self.consumers), (
            f"flow {self} runs backwards"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A value with rows, made in `block` by code of `module` ("" where that is not known): kept to the step's end
    where the user gets it.
    """

    name: str
    module: str
    block: int
    num_bytes: Size


NUMBER_BYTES = 8  # of the number of a row, beside the row


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUse:
    """A parameter by primary dotted name; tied names are one parameter. `has_wide_sum`: it has 16 bits, and its
    gradients are summed in 32. `sum_share`: bytes that replicas reduce per byte of the sum.

    Where the gradient of a table is kept as rows: `table_rows`, how many the table has (0: the gradient is dense);
    `looked_up`, those that the look-ups of a batch give, a number once the batch is known; `reduced_rows`, at most those
    that ranks exchange.
    """

    name: str
    num_bytes: int
    trainable: bool
    has_wide_sum: bool = False
    sum_share: float = 1.0
    table_rows: int = 0
    looked_up: Size = 0
    reduced_rows: int = 0

    @property
    def is_in_rows(self) -> bool:
        """Whether its gradient is kept as rows, of a batch that is known."""
        return self.trainable and self.table_rows > 0 and isinstance(self.looked_up, int)

    @property
    def dense_sum_bytes(self) -> int:
        """Of the sum of its gradients over micro-batches, if that is dense."""
        return self.num_bytes * (int(self.trainable) << self.has_wide_sum)

    @property
    def sum_bytes(self) -> int:
        """Of the sum of its gradients over micro-batches. As rows: what was looked up, once as it came and once beside
        that of the other ranks, and the sum, which has no number twice.
        """
        if not self.is_in_rows:
            return self.dense_sum_bytes
        looked_up = cast("int", self.looked_up)
        in_memory = 2 * looked_up + min(looked_up, self.table_rows)
        return in_memory * (self.dense_sum_bytes // self.table_rows + NUMBER_BYTES)

    @property
    def reduced_bytes(self) -> float:
        """Of what replicas reduce of it."""
        if not self.is_in_rows:
            return self.sum_bytes * self.sum_share
        return self.reduced_rows * (self.dense_sum_bytes // self.table_rows * self.sum_share + NUMBER_BYTES)

    @property
    def gradient_bytes(self) -> int:
        """Of its gradients: the sum, and where that is wider what is rounded from it."""
        is_rounded = self.trainable and self.has_wide_sum and not self.is_in_rows
        return self.sum_bytes + (self.num_bytes if is_rounded else 0)

    def held_bytes(self, optimizer_factor: float, *, offload: bool) -> float:
        """On a device: it, its gradients and so much optimizer state per byte; where they lie on the host, its copy and the
        sum of its gradients.
        """
        if offload:
            return self.num_bytes + self.sum_bytes
        return self.num_bytes * (1 + optimizer_factor * self.trainable) + self.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConstraints:
    """What the user asked of the stages, for the search: blocks that must be the first of a stage, ascending,
    and (block, stage index) of blocks that must be in that stage, ascending by block; `legal_starts`: the
    only ones at which a stage may start, 0 among them, or () for any."""

    starts: tuple[int, ...] = ()
    stage_of: tuple[tuple[int, int], ...] = ()
    legal_starts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGraph:
    """Blocks in topological order; every flow runs forwards; `parameters` are those that some block reads, by
    name. `whole_batch`: rows meet, so that a step has one micro-batch and a stage one replica. `has_loss`: a
    scalar that needs a gradient comes back beside the outputs. `num_communicators`: of the replicas of a stage.
    """

    blocks: tuple[Block, ...]
    flows: tuple[Flow, ...]
    parameters: tuple[ParameterUse, ...]
    outputs: tuple[Output, ...] = ()
    constraints: StageConstraints = StageConstraints()
    whole_batch: bool = False
    has_loss: bool = False
    num_communicators: int = 1

    @property
    def is_exact(self) -> bool:
        """Whether all travels as it is."""
        shares = (share for flow in self.flows for share in (flow.value_share, flow.gradient_share))
        return all(share == 1 for share in (*shares, *(use.sum_share for use in self.parameters)))

    def as_it_is(self) -> BlockGraph:
        """The same, where nothing travels in fewer bits."""
        flows = (replace(flow, value_share=1.0, gradient_share=1.0) for flow in self.flows)
        uses = (replace(use, sum_share=1.0) for use in self.parameters)
        return replace(self, flows=tuple(flows), parameters=tuple(uses))

    @property
    def wide_sums(self) -> bool:
        """Whether gradients of 16 bits are summed in 32."""
        return any(use.has_wide_sum for use in self.parameters)

    def without_outputs(self) -> BlockGraph:
        """The same, where the user gets no values with rows."""
        return replace(self, outputs=())
