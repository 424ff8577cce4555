"""Plans made of numbers, without a model: what the tests of reports and simulation look at.

In: layers, stages, seconds. Out: a `Plan` whose parts agree and whose prediction is what the simulation says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rannc_backend.ir.plan import (
    SCHEMA_VERSION,
    Alternative,
    BlockPlan,
    ClusterAssumption,
    DtypeRate,
    Plan,
    RowCost,
    StageCost,
    StagePlan,
    WhatIf,
)
from rannc_backend.schedule.plan_simulation import simulate_plan

MB, GB = 1024**2, 1024**3


def sample_cluster(num_devices: int, devices_per_node: int = 8) -> ClusterAssumption:
    return ClusterAssumption(
        name="a100-80gb",
        num_devices=num_devices,
        devices_per_node=devices_per_node,
        device_name="NVIDIA A100 80GB",
        device_memory_bytes=80 * GB,
        peak_flops=(
            DtypeRate(dtype="bfloat16", flops_per_second=312e12),
            DtypeRate(dtype="float32", flops_per_second=19.5e12),
        ),
        memory_bytes_per_second=2.039e12,
        launch_seconds=4e-6,
        intra_node_latency_seconds=5e-6,
        intra_node_bytes_per_second=250e9,
        inter_node_latency_seconds=1e-5,
        inter_node_bytes_per_second=25e9,
    )


def layer_modules(num_layers: int, prefix: str = "model") -> list[tuple[str, ...]]:
    """Two blocks per layer, an embedding before and a head behind."""
    blocks: list[tuple[str, ...]] = [(f"{prefix}.embed_tokens",)]
    for layer in range(num_layers):
        path = f"{prefix}.layers.{layer}"
        blocks.append(
            (
                f"{path}.input_layernorm",
                f"{path}.self_attn.q_proj",
                f"{path}.self_attn",
                f"{path}.self_attn.o_proj",
            )
        )
        blocks.append(
            (
                f"{path}.post_attention_layernorm",
                f"{path}.mlp.up_proj",
                f"{path}.mlp.act_fn",
                f"{path}.mlp.down_proj",
            )
        )
    return [*blocks, (f"{prefix}.norm", "lm_head"), ()]


def sample_plan(
    *,
    num_layers: int = 12,
    replicas: Sequence[int] = (2, 2, 2, 2),
    num_micro_batches: int = 8,
    batch_rows: int = 256,
    schedule: str = "1f1b",
    forward: Sequence[float] | float = 0.010,
    backward: Sequence[float] | float = 0.020,
    message_bytes_per_row: float = 4 * MB,
    allreduce: float = 0.015,
    recompute: Sequence[float] | float = 1.0,
    modules: Sequence[tuple[str, ...]] | None = None,
    bounds: Sequence[int] | None = None,
    model_name: str = "Llama",
    idle_ranks: int = 0,
    fingerprint: str = "f" * 64,
) -> Plan:
    """A transformer cut into len(replicas) stages; `forward`, `backward`: seconds of one micro-batch by stage
    at these settings.
    """
    names = list(modules or layer_modules(num_layers))
    num_stages = len(replicas)
    bounds = list(bounds or [round(index * len(names) / num_stages) for index in range(num_stages + 1)])
    blocks = tuple(
        BlockPlan(
            index=index,
            structure=f"s{min(index, 1 + index % 2)}",
            nodes=(f"op_{index}", f"view_{index}"),
            modules=paths,
            parameters=(f"{paths[0]}.weight",) if paths else (),
            forward_flops=10**12,
            backward_flops=2 * 10**12,
            moved_bytes=10**9,
            activation_bytes=10**8,
            parameter_bytes=100 * MB if paths else 0,
        )
        for index, paths in enumerate(names)
    )
    world_size = sum(replicas) + idle_ranks
    cluster = sample_cluster(world_size)

    def per_stage(value: Sequence[float] | float) -> list[float]:
        return [float(value)] * num_stages if isinstance(value, (int, float)) else list(value)

    stages, first_rank = [], 0
    for index, count in enumerate(replicas):
        own = blocks[bounds[index] : bounds[index + 1]]
        stages.append(
            _stage(
                index,
                own,
                range(first_rank, first_rank + count),
                cluster,
                seconds=(
                    per_stage(forward)[index],
                    per_stage(backward)[index],
                    allreduce if count > 1 else 0.0,
                ),
                kept=per_stage(recompute)[index],
                row_bytes=message_bytes_per_row if index else 0.0,
                batch_rows=batch_rows,
                num_micro_batches=num_micro_batches,
                in_flight=num_micro_batches
                if schedule == "fill_drain"
                else min(num_micro_batches, num_stages - index),
                neighbour=first_rank - 1,
            )  # fmt: skip
        )
        first_rank += count
    plan = Plan(
        schema_version=SCHEMA_VERSION, fingerprint=fingerprint, model_name=model_name, cluster=cluster, world_size=world_size,
        batch_rows=batch_rows, num_micro_batches=num_micro_batches, schedule=schedule, memory_limit_bytes=72 * GB,
        blocks=blocks, stages=tuple(stages), predicted_step_seconds=1.0, equal_split_seconds=None, proven_gap=0.0,
        costs_from="analytic", binding="computing of stage 0: 96 % of the step", alternatives=(), what_if=(),
    )  # fmt: skip
    return _with_prediction(plan)


def _stage(
    index: int,
    own: Sequence[BlockPlan],
    ranks: range,
    cluster: ClusterAssumption,
    *,
    seconds: tuple[float, float, float],
    kept: float,
    row_bytes: float,
    batch_rows: int,
    num_micro_batches: int,
    in_flight: int,
    neighbour: int,
) -> StagePlan:
    forward, backward, allreduce = seconds
    numbers = {1, num_micro_batches // 2 or 1, num_micro_batches, 2 * num_micro_batches}

    def rows_of(number: int) -> int:
        return math.ceil(math.ceil(batch_rows / number) / len(ranks))

    own_rows = rows_of(num_micro_batches)
    all_rows = sorted({rows_of(number) for number in numbers})
    at_rows = tuple(
        RowCost(
            rows=rows,
            forward_seconds=forward * rows / own_rows,
            backward_seconds=backward * rows / own_rows,
            activation_bytes=rows * len(own) * 8 * MB,
            workspace_bytes=rows * 4 * MB,
        )
        for rows in all_rows
    )
    near = {rank // cluster.devices_per_node for rank in (max(neighbour, 0), *ranks)}
    latency = cluster.intra_node_latency_seconds if len(near) == 1 else cluster.inter_node_latency_seconds
    rate = cluster.intra_node_bytes_per_second if len(near) == 1 else cluster.inter_node_bytes_per_second
    transfer = 2 * (latency + own_rows * row_bytes / rate) if row_bytes else 0.0
    weights = sum(block.parameter_bytes for block in own)
    planned = next(entry for entry in at_rows if entry.rows == own_rows)
    parts = {
        "parameter_bytes": weights,
        "gradient_bytes": weights,
        "optimizer_bytes": 2 * weights,
        "activation_bytes": in_flight * planned.activation_bytes,
        "buffer_bytes": int(3 * own_rows * row_bytes),
        "workspace_bytes": planned.workspace_bytes,
    }
    return StagePlan(
        index=index,
        blocks=tuple(block.index for block in own),
        nodes=tuple(name for block in own for name in block.nodes),
        modules=tuple(dict.fromkeys(path for block in own for path in block.modules)),
        parameters=tuple({name for block in own for name in block.parameters}),
        updated_buffers=(),
        ranks=tuple(ranks),
        recompute=kept,
        predicted=StageCost(
            forward_seconds=forward, backward_seconds=backward, transfer_seconds=transfer, allreduce_seconds=allreduce,
            **parts, peak_bytes=sum(parts.values()), idle_share=0.0,
        ),
        at_rows=at_rows,
        received_bytes_per_row=row_bytes,
        gradient_bytes_per_row=row_bytes,
        num_buckets=4,
    )  # fmt: skip


def _with_prediction(plan: Plan) -> Plan:
    """`plan` with the simulated step in the place of made-up numbers, and alternatives beside it."""
    simulation = simulate_plan(plan)
    step = simulation.step_seconds
    stages = tuple(
        replaced(
            stage, predicted=replaced(stage.predicted, idle_share=simulation.stages[stage.index].idle_share)
        )
        for stage in plan.stages
    )
    ranks = sum(plan.stage_replicas)
    alternatives = (
        Alternative(
            num_stages=1, stage_replicas=(ranks,), num_micro_batches=1, schedule="fill_drain", recompute=(0.0,),
            predicted_step_seconds=None, reason="does not fit: needs 96.4 GB on one device, and plans may "
            "use 72 GB",
        ),
        Alternative(
            num_stages=2, stage_replicas=(ranks - ranks // 2 or 1, max(ranks // 2, 1)), num_micro_batches=16, schedule="1f1b",
            recompute=(1.0, 0.5), predicted_step_seconds=1.14 * step,
            reason="its all-reduce between nodes takes 92 ms that no backward hides",
        ),
    )  # fmt: skip
    what_if = (
        WhatIf(
            change="twice the memory", predicted_step_seconds=0.93 * step, num_stages=2, stage_replicas=(4, 4)
        ),
        WhatIf(
            change="half the memory", predicted_step_seconds=None, num_stages=4, stage_replicas=(2, 2, 2, 2)
        ),
        WhatIf(
            change="links twice as fast",
            predicted_step_seconds=0.99 * step,
            num_stages=4,
            stage_replicas=(2, 2, 2, 2),
        ),
    )
    return replaced(
        plan,
        stages=stages,
        predicted_step_seconds=step,
        equal_split_seconds=1.25 * step,
        alternatives=alternatives,
        what_if=what_if,
    )


def replaced(record, **changes):
    """The record with some fields changed, checked again."""
    values = {name: getattr(record, name) for name in type(record).model_fields}
    return type(record)(**{**values, **changes})
