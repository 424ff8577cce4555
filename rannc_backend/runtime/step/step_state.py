"""All that one call of a compiled model holds on a rank, from its inputs to its gradients.

In: the step's rows, its user tensors and scalars. Out: a container that the executor fills and empties action
by action. Values are keyed by (name, micro-batch); what is sent is dropped with its last reader, so memory is
bounded by what is in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import sympy
import torch

from rannc_backend.ir.action import Channel
from rannc_backend.ir.exchange import Edge, Value
from rannc_backend.ir.reach import OperatorCalls
from rannc_backend.kernels.record_table import CopyReport
from rannc_backend.runtime.gradients.buckets import PendingGradients, StageGradients
from rannc_backend.runtime.gradients.loss_gradients import Number
from rannc_backend.runtime.rows import Piece, RowTable
from rannc_backend.runtime.step.messages import Incoming, RowsTensors
from rannc_backend.runtime.step.scalars import ScalarGraphs
from rannc_backend.runtime.trace.copy_report import StepCopies
from rannc_backend.runtime.trace.meter import StepRecord

ValueKey = tuple[str, int]
StageKey = tuple[int, int]  # stage, micro-batch
StageValueKey = tuple[int, str, int]
MessageKey = tuple[Channel, int]
OLD_VALUE = -1  # in the place of a micro-batch: of a buffer, the value that it has when a step begins


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredRows:
    """A flat user output with rows: each rank gets its own."""

    value: Value
    differentiable: bool

    def shape(self, num_rows: int) -> tuple[int, ...]:
        """Shape of ``num_rows`` samples."""
        value = self.value
        return tuple(
            num_rows * value.outer * value.inner if i == value.dim else size
            for i, size in enumerate(value.shape)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A flat user output that the epilogue makes, at this place among its outputs; all ranks get it."""

    index: int
    differentiable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """A flat user output that is the same for all rows: rank ``root`` makes it, all ranks get it."""

    name: str
    root: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    differentiable: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantOutput:
    """A flat user output that no stage makes; an expression is one over the number of rows of all ranks."""

    constant: object
    differentiable: ClassVar[bool] = False

    def value(self, num_rows: int) -> object:
        """For a batch of so many rows on all ranks."""
        if not isinstance(self.constant, sympy.Expr):
            return self.constant
        return int(self.constant.xreplace(dict.fromkeys(self.constant.free_symbols, sympy.Integer(num_rows))))


@dataclass(frozen=True, slots=True, kw_only=True)
class NotDelivered:
    """A flat user output that nobody gets, and why. ``is_left_out``: outputs="all" would bring it."""

    why: str
    is_left_out: bool
    differentiable: ClassVar[bool] = False


RuntimeOutput = DeliveredRows | Scalar | Replicated | ConstantOutput | NotDelivered


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShapes:
    """What of a graph depends on the lengths of a step: what travels, what the user gets, the sums.

    ``lengths``: in the order of the graph's.
    """

    lengths: tuple[int, ...]
    edges: Mapping[tuple[int, int], Edge]
    outputs: tuple[RuntimeOutput, ...]
    scalars: ScalarGraphs


class StageSlot(Protocol):
    """An input or output of a stage: the value's name and what it is."""

    name: str
    kind: str


class Stage(Protocol):
    """What the executor needs of a compiled stage (`compile_stages.CompiledStage` in production)."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    grad_outputs: tuple[int, ...]
    grad_inputs: tuple[int, ...]
    grad_parameters: tuple[int, ...]
    stored_outputs: tuple[int, ...]
    stored_gradients: tuple[int, ...]
    gradient_copies: CopyReport

    def forward(
        self, args: Sequence[torch.Tensor], destinations: Destinations
    ) -> tuple[list[torch.Tensor], Any]:
        """Outputs and saved values."""

    def backward(
        self,
        saved: Any,
        grads: Sequence[torch.Tensor | None],
        sink: StageGradients,
        destinations: Destinations,
    ) -> list[torch.Tensor]:
        """Gradients of `grad_inputs`; those of `grad_parameters` go to the sink."""

    def backward_inputs(
        self, saved: Any, grads: Sequence[torch.Tensor | None], destinations: Destinations
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """The first part of `backward`: gradients of `grad_inputs`, and what the second needs."""

    def backward_weights(self, kept: list[Any], sink: StageGradients) -> None:
        """The second part."""

    def infer(self, args: Sequence[torch.Tensor], destinations: Destinations) -> list[torch.Tensor]:
        """Outputs only."""


Destinations = Mapping[int, torch.Tensor]
"""Memory for outputs, or for gradients of inputs, by position: parts of messages."""


@dataclass(slots=True, kw_only=True)
class StepState:
    """State of one step; see the fields' comments."""

    number: int
    rows: RowTable
    shapes: StepShapes
    inputs: dict[str, torch.Tensor]  # the user's tensors by placeholder name
    # rng_seed, global_rows, lengths (numbers) and prologue sums by placeholder name
    scalars: dict[str, Any]
    training: bool
    loss_gradient: Number = 1.0  # that an eager backward starts from
    apply_buffer_updates: bool = True
    pending: PendingGradients | None = None
    calls: OperatorCalls = field(default_factory=OperatorCalls)  # of the same backward
    partial_gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # gradient of each partial sum
    grad_outputs: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # gradient of each row output, this rank's rows
    keep_saved: bool = False
    record: StepRecord | None = None  # in steps that are measured
    # By (slot, micro-batch): what forwards have read, before they gave the buffer a new value. A step that
    # runs again reads it again.
    buffers_read: dict[ValueKey, torch.Tensor] = field(default_factory=dict)

    values: dict[ValueKey, torch.Tensor] = field(default_factory=dict)  # made here, not yet sent everywhere
    readers: dict[ValueKey, int] = field(default_factory=dict)
    inbox: dict[StageValueKey, torch.Tensor] = field(default_factory=dict)  # received, not yet used
    saved: dict[StageKey, Any] = field(default_factory=dict)
    stages_in_last: set[int] = field(default_factory=set)  # those whose last backward has begun
    kept: dict[StageKey, list[Any]] = field(default_factory=dict)  # between the two parts of a backward
    output_gradients: dict[tuple[str, str, int], torch.Tensor] = field(
        default_factory=dict
    )  # (kind, name, m)
    input_gradients: dict[StageValueKey, torch.Tensor] = field(
        default_factory=dict
    )  # of boundary and batch inputs, to be sent

    local_messages: dict[MessageKey, list[tuple[Piece, RowsTensors]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    sends: dict[MessageKey, list[Any]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[MessageKey, list[tuple[Incoming, Any]]] = field(default_factory=lambda: defaultdict(list))

    partials: dict[str, torch.Tensor] = field(default_factory=dict)  # summed over this rank's slices
    row_outputs: dict[ValueKey, torch.Tensor] = field(
        default_factory=dict
    )  # this rank's rows of user outputs
    user_gradients: dict[ValueKey, torch.Tensor] = field(
        default_factory=dict
    )  # gradients of this rank's input rows
    copies: StepCopies | None = field(default_factory=StepCopies)  # None: nobody counts them any more
    replicated_outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def before_forward(self) -> StepState:
        """The same step, to be run once more: it reads the buffers that were read."""
        return StepState(
            number=self.number,
            rows=self.rows,
            shapes=self.shapes,
            inputs=self.inputs,
            scalars=self.scalars,
            training=True,
            apply_buffer_updates=False,
            buffers_read=self.buffers_read,
        )

    def output_gradient(self, slot: Any, micro_batch: int) -> torch.Tensor | None:
        """Gradient of one output of the stage; None when none came."""
        if slot.kind == "partial":
            return self.partial_gradients[slot.name]
        return self.output_gradients.pop((slot.kind, slot.name, micro_batch), None)
