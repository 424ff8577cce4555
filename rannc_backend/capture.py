"""From what Dynamo hands to the backend to one functional ATen graph with a symbolic batch size.

In: the Dynamo `fx.GraphModule` and its example inputs. Out: a `CapturedGraph`.
Terms: *rows* is the batch size, dimension 0 of every *batch* input; a *replicated* input is a user input without rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from torch import fx, nn
from torch._subclasses import FakeTensorMode


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """One placeholder of a captured graph and where its value comes from."""

    name: str
    kind: str  # "parameter" | "buffer" | "batch" | "replicated"
    fqn: str | None  # primary dotted name in the root module (parameter, buffer)
    aliases: tuple[str, ...]  # all dotted names, fqn included (tied weights); () for user inputs
    position: int  # index into the flat argument tuple that Dynamo passes to the compiled callable
    requires_grad: bool  # of the real tensor at capture


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """A model's forward as functional ATen operators; placeholder i of `graph_module` is described by `inputs[i]`.

    `graph_module` mutates nothing. Its output is one flat tuple: the user's outputs in Dynamo's order
    (`num_user_outputs` of them), then the new value of each buffer in `buffer_updates`. Node metadata: "val" (fake
    tensors of `fake_mode`, batch sizes are expressions of `rows_symbol`), "stack_trace" (user's lines) and
    "module_path" (dotted path of the user's module, "" if none).
    """

    graph_module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    num_user_outputs: int
    buffer_updates: tuple[str, ...]
    rows_symbol: sympy.Symbol
    rows_hint: int
    fake_mode: FakeTensorMode
    fingerprint: str
    root_module: nn.Module
