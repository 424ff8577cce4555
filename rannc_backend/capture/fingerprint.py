"""One text, and its hash, that is equal for equal models whatever process, rank, batch size or device index
captured them.

In: an ATen graph, its inputs and the symbol of the batch size. Out: the canonical text and its sha256 as hex
digits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from rannc_backend.ir.graph_input import GraphInput, StateInput
from rannc_backend.kernels.plain_memory import plain_memory


def fingerprint(text: str) -> str:
    """sha256 of a canonical text."""
    return hashlib.sha256(text.encode()).hexdigest()


def canonical_text(
    graph_module: fx.GraphModule,
    inputs: Sequence[GraphInput],
    rows_symbol: sympy.Symbol,
    *,
    num_user_outputs: int,
    buffer_updates: Sequence[str],
) -> str:
    """One line per node: number, operator with its arguments, types and shapes, the batch size written as
    `rows`.
    """
    numbers: dict[fx.Node, str] = {}
    lines: list[str] = []
    remaining = iter(inputs)
    for index, node in enumerate(graph_module.graph.nodes):
        numbers[node] = f"%{index}"
        value = _value_text(node.meta.get("val"), rows_symbol)
        if node.op == "placeholder":
            item = next(remaining)
            names = ",".join(sorted(item.aliases)) if isinstance(item, StateInput) else item.name
            lines.append(f"%{index} = {item.kind} {names} requires_grad={item.requires_grad} -> {value}")
        elif node.op == "get_attr":
            lines.append(f"%{index} = constant {_constant_text(graph_module, str(node.target))} -> {value}")
        elif node.op == "output":
            lines.append(f"return {_argument_text(node.args[0], numbers, rows_symbol)}")
        else:
            args = [_argument_text(arg, numbers, rows_symbol) for arg in node.args]
            args += [
                f"{key}={_argument_text(arg, numbers, rows_symbol)}"
                for key, arg in sorted(node.kwargs.items())
            ]
            lines.append(f"%{index} = {_target_text(node.target)}({', '.join(args)}) -> {value}")
    lines.append(f"user outputs {num_user_outputs}, buffers {', '.join(buffer_updates)}")
    return "\n".join(lines) + "\n"


def without_order_of_outputs(text: str) -> str:
    """A canonical text with the outputs sorted."""
    lines = text.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("return ["))
    items = lines[place].removeprefix("return [").removesuffix("]").split(", ")
    lines[place] = f"return [{', '.join(sorted(items))}]"
    return "\n".join(lines) + "\n"


def _target_text(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _value_text(value: Any, rows: sympy.Symbol) -> str:
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(_number_text(size, rows) for size in value.shape)
        return f"{value.dtype}[{sizes}] {value.device.type}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_value_text(item, rows) for item in value)})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _number_text(value, rows)
    return repr(value)


def _number_text(value: Any, rows: sympy.Symbol) -> str:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value.node.expr.xreplace({rows: sympy.Symbol("rows", integer=True, positive=True)}))
    return repr(value)


def _argument_text(value: Any, numbers: dict[fx.Node, str], rows: sympy.Symbol) -> str:
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument_text(item, numbers, rows) for item in value)}]"
    if isinstance(value, dict):
        parts = (f"{key}: {_argument_text(value[key], numbers, rows)}" for key in sorted(value))
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, slice):
        return f"slice{_argument_text((value.start, value.stop, value.step), numbers, rows)}"
    text = _number_text(value, rows)
    assert not re.search(r" at 0x[0-9a-f]+", text), (
        f"an address in the graph would differ between ranks: {text}"
    )
    return text


def _constant_text(graph_module: fx.GraphModule, name: str) -> str:
    value = getattr(graph_module, name)
    data = plain_memory(value.detach().cpu()).reshape(-1).view(torch.uint8) if value.numel() else None
    digest = hashlib.sha256(b"" if data is None else bytes(data.numpy())).hexdigest()
    return f"{value.dtype}{list(value.shape)} sha256:{digest}"
