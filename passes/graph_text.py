"""A graph as lines that a person reads and a test compares.

In: a graph module with `meta["val"]`. Out: one line per node: its name, dtype and shape, the operator and its
arguments. Nothing of it depends on how torch prints generated code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx


def graph_text(graph_module: fx.GraphModule) -> str:
    """`input x: float32[s0, 4]`, `mm: float32[s0, 3] = aten.mm.default(x, w)`, ..., `return (mm,)`."""
    return "".join(f"{_line(node)}\n" for node in graph_module.graph.nodes)


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    shape = _shape(node.meta.get("val"))
    named = f"{node.name}: {shape}" if shape else node.name
    if node.op == "placeholder":
        return f"input {named}"
    if node.op == "get_attr":
        return f"{named} = constant {node.target}"
    arguments = [_text(value) for value in node.args]
    arguments += [f"{name}={_text(value)}" for name, value in node.kwargs.items()]
    return f"{named} = {_name(node.target)}({', '.join(arguments)})"


def _name(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload) or not callable(target):
        return str(target)
    return getattr(target, "__name__", str(target))


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_dtype(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_shape(item) for item in value)})"
    return str(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else ""


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        begin, end = ("(", ",)" if len(value) == 1 else ")") if isinstance(value, tuple) else ("[", "]")
        return f"{begin}{', '.join(map(_text, value))}{end}"
    if isinstance(value, torch.dtype):
        return _dtype(value)
    return str(value)
