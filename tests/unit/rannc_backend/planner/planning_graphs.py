"""Graphs for planner tests: any module, exported with a symbolic batch size and split at its reductions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import nn
from torch.export.graph_signature import InputKind

from rannc_backend.ir.graph_input import BatchInput, BufferInput, GraphInput, ParameterInput, StateInput
from rannc_backend.ir.plan import Plan
from rannc_backend.passes.batch.batch_split import BatchSplit
from rannc_backend.passes.batch.differentiability import outputs_by_value
from rannc_backend.passes.batch.split_reductions import split_batch
from rannc_backend.passes.canonicalize import CANONICAL
from rannc_backend.passes.pipeline import with_facts
from rannc_backend.planner.blocks.cut_blocks import block_graph
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cost.pricing import BlockPricer
from rannc_backend.planner.plan_fits_graph import exact_schedules
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu


class Chain(nn.Module):
    """Equal layers, loss outside."""

    def __init__(
        self,
        num_layers: int = 6,
        width: int = 64,
        activation: Callable[[torch.Tensor], torch.Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


class Filters(nn.Module):
    """Convolutions with batch statistics and residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(x))
            x = torch.relu(y + x if index else y)
        return x.mean((2, 3))


@dataclass(frozen=True, kw_only=True)
class SplitModel:
    split: BatchSplit
    inputs: tuple[GraphInput, ...]
    needs_grad: frozenset[str]
    parameter_names: dict[str, str]


def split_model(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SplitModel:
    """`model(**batch)` with a symbolic number of rows in dimension 0 of every tensor of `batch`."""
    rows = torch.export.Dim("rows", min=2, max=1 << 20)
    shapes = {name: {0: rows} for name in batch}
    program = torch.export.export(
        model, (), dict(batch), dynamic_shapes=shapes, strict=False
    ).run_decompositions()
    graph_module = program.graph_module
    primary = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    state: dict[str, Any] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    first: dict[str, torch.fx.Node] = {}
    inputs: list[GraphInput] = []
    graph_module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    placeholders = {node.name: node for node in graph_module.graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        name = node.target = node.name = (
            f"in_{spec.arg.name}"  # never the name of a builtin, which fx would change
        )
        if spec.kind == InputKind.USER_INPUT:
            inputs.append(BatchInput(name=name, position=len(inputs)))
            continue
        tensor = state[spec.target] if spec.target in state else program.constants[spec.target]
        fqn = primary.get(id(tensor), spec.target)
        if fqn in first:  # tied: one placeholder, as Dynamo gives it
            node.replace_all_uses_with(first[fqn])
            graph_module.graph.erase_node(node)
            continue
        first[fqn] = node
        kind = ParameterInput if spec.kind == InputKind.PARAMETER else BufferInput
        inputs.append(
            kind(
                name=name,
                position=len(inputs),
                fqn=fqn,
                aliases=(fqn,),
                requires_grad=bool(tensor.requires_grad),
            )
        )
    for node in graph_module.graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        node.meta["module_path"] = stack[-1][0] if stack else ""
    (output,) = graph_module.graph.find_nodes(op="output")
    kinds = [str(spec.kind).rsplit(".", 1)[-1] for spec in program.graph_signature.output_specs]
    buffers = [
        spec.target for spec in program.graph_signature.output_specs if spec.kind.name == "BUFFER_MUTATION"
    ]
    values = list(output.args[0])
    order = [v for v, k in zip(values, kinds, strict=True) if k != "BUFFER_MUTATION"]
    order += [v for v, k in zip(values, kinds, strict=True) if k == "BUFFER_MUTATION"]
    output.args = (tuple(order),)
    graph_module.recompile()
    symbol = next(iter(placeholders[next(iter(batch))].meta["val"].shape[0].node.expr.free_symbols))
    gradient = [item.name for item in inputs if item.requires_grad]
    split = split_batch(
        with_facts(graph_module, CANONICAL),
        batch_inputs=[item.name for item in inputs if item.kind == "batch"],
        gradient_inputs=gradient,
        num_user_outputs=len(order) - len(buffers),
        buffer_updates=buffers,
        rows_symbol=symbol,
    )
    needs_grad = frozenset(outputs_by_value(split.rowwise, gradient))
    names = {item.name: item.fqn for item in inputs if isinstance(item, StateInput)}
    return SplitModel(split=split, inputs=tuple(inputs), needs_grad=needs_grad, parameter_names=names)


def gpt2(
    num_layers: int = 2, width: int = 64, length: int = 16, vocabulary: int = 100
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=num_layers, n_embd=width, n_head=4, vocab_size=vocabulary, n_positions=length, use_cache=False
    )
    torch.manual_seed(0)
    ids = torch.randint(0, vocabulary, (4, length))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def bert(
    num_layers: int = 2, width: int = 64, length: int = 16, vocabulary: int = 100
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=num_layers,
        hidden_size=width,
        num_attention_heads=4,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
        max_position_embeddings=length,
    )
    torch.manual_seed(0)
    ids = torch.randint(0, vocabulary, (4, length))
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def llama(
    num_layers: int = 2, width: int = 64, length: int = 16, vocabulary: int = 100
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=width,
        num_attention_heads=4,
        intermediate_size=2 * width,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
    )
    torch.manual_seed(0)
    ids = torch.randint(0, vocabulary, (4, length))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def plan_stages(
    split: BatchSplit,
    inputs: Sequence[GraphInput],
    needs_grad: Collection[str],
    config: Config,
    *,
    world_size: int,
    batch_rows: int,
    fingerprint: str,
    cluster: Cluster | None = None,
    rows_symbol: sympy.Symbol | None = None,
    pricer: BlockPricer | None = None,
    **more: Any,
) -> Plan:
    """Blocks of a split graph and their plan; `cluster`: None for processes of a made-up CPU."""
    cluster = local_cpu(world_size) if cluster is None else replace(cluster, num_devices=world_size)
    graph = block_graph(
        split, inputs, needs_grad, config, cluster=cluster, batch_rows=batch_rows, rows_symbol=rows_symbol
    )
    possible = exact_schedules(split, needs_grad)
    return plan_blocks(
        graph,
        config,
        cluster=cluster,
        batch_rows=batch_rows,
        schedules=(config.schedule,) if config.schedule in possible else possible,
        fingerprint=fingerprint,
        pricer=pricer,
        **more,
    )
