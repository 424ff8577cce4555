"""Inputs of a captured graph: a type for each kind of thing that a placeholder stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """One placeholder of a captured graph and where its value comes from.

    Members:
        name: of the placeholder; the same on all ranks.
        position: index into the flat arguments that Dynamo passes to the compiled callable; -1: not among them.
        requires_grad: of the real tensor at capture.
        kind: the type in a word, for texts and for the inputs of stages.
    """

    kind: ClassVar[str]
    name: str
    position: int
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateInput(GraphInput):
    """A tensor of the model. ``fqn``: its primary dotted name; ``aliases``: all its names (tied weights)."""

    fqn: str
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInput(StateInput):
    """A parameter."""

    kind: ClassVar[str] = "parameter"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferInput(StateInput):
    """A buffer."""

    kind: ClassVar[str] = "buffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput(GraphInput):
    """A tensor of the user's with a batch dimension."""

    kind: ClassVar[str] = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedInput(GraphInput):
    """A tensor of the user's that is the same for all rows and ranks."""

    kind: ClassVar[str] = "replicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthInput(GraphInput):
    """A size that may change from step to step (`ir.length`)."""

    kind: ClassVar[str] = "length"
    position: int = -1


UserInput = BatchInput | ReplicatedInput
"""A tensor of the user's."""
