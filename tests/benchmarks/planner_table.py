"""Chosen plans beside equal splits: `python -m tests.benchmarks.planner_table [--devices 8,32,256] [--brute] [--ilp]
[--json FILE] [MODEL ...]`.

In: the families of examples/planning_models.py, wide enough that none fits on one device, in float32 with
Adam for v100-32gb with eight devices per node. Out: a Markdown table, and JSON where asked for. Every model
is captured once, in a process of its own. `--brute` looks at every plan of the model in few blocks on few
devices, and prints what the search finds there beside it. `--ilp` plans each again with solver "ilp".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CLUSTER = "v100-32gb"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A factory of examples/planning_models.py with other sizes, and options. Few layers are captured
    sooner.
    """

    factory: str
    sizes: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "gpt2": Model(factory="gpt2", sizes={"n_embd": 3072, "n_layer": 16, "n_head": 24}),
    "bert": Model(
        factory="bert",
        sizes={"hidden_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 16384},
    ),
    "llama": Model(factory="llama", sizes={"num_hidden_layers": 16, "length": 1024}),
    "t5": Model(factory="t5", sizes={"num_layers": 12, "d_model": 1536}),
    "vit": Model(
        factory="vit",
        sizes={"hidden_size": 3840, "num_hidden_layers": 16, "num_attention_heads": 30, "intermediate_size": 15360},
    ),
    "resnet": Model(factory="resnet", sizes={"depths": [3, 4, 6, 3]}),
    "heavy_head": Model(
        factory="llama",
        sizes={
            "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
            "intermediate_size": 4096, "vocab_size": 256_000, "length": 512,
        },
        options={"mem_limit_gb": 20.0},
    ),
}  # fmt: skip
_ROWS_PER_DEVICE = 8
_BRUTE_BLOCKS, _BRUTE_DEVICES, _BRUTE_ROWS = 6, 6, 48


def rows_of(name: str, devices: list[int], brute: bool, ilp: bool) -> Iterator[dict[str, Any]]:
    """One row of the table per number of devices."""
    import torch

    from examples import planning_models
    from rannc_backend.errors import InfeasiblePlanError
    from rannc_backend.planner.cluster.cluster_file import load_cluster
    from rannc_backend.planner.plan_blocks import PlanningQuestion, plan_prepared
    from rannc_backend.planner.plan_model import analyze_model, prepare
    from rannc_backend.settings.sources import resolve_config

    chosen = MODELS[name]
    config = resolve_config(chosen.options, {})
    with torch.device("meta"):
        model, args, kwargs = getattr(planning_models, chosen.factory)(**chosen.sizes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    start = time.process_time()
    analysis = analyze_model(model, args, kwargs, cluster=load_cluster(CLUSTER, devices[0], 8))

    def question(count: int) -> PlanningQuestion:
        return PlanningQuestion(
            config=config, cluster=load_cluster(CLUSTER, count, 8), batch_rows=_ROWS_PER_DEVICE * count
        )

    prepared = prepare(analysis, question(devices[-1]))
    captured = time.process_time() - start
    for count in devices:
        start, began = time.process_time(), time.perf_counter()
        row = {
            "model": name,
            "billion_parameters": parameters / 1e9,
            "devices": count,
            "options": chosen.options,
        }
        try:
            plan = plan_prepared(prepared, question(count))
        except InfeasiblePlanError as error:
            yield row | {"infeasible": str(error)}
            continue
        seconds = time.perf_counter() - began
        if ilp:
            row |= ilp_of(prepared, question(count))
        yield row | {
            "search_seconds": seconds,
            "blocks": len(plan.blocks),
            "stage_replicas": list(plan.stage_replicas),
            "recompute": [stage.recompute for stage in plan.stages],
            "micro_batches": plan.num_micro_batches,
            "schedule": plan.schedule,
            "step_seconds": plan.predicted_step_seconds,
            "equal_split_seconds": plan.equal_split_seconds,
            "proven_gap": plan.proven_gap,
            "search_cpu_seconds": time.process_time() - start,
            "capture_cpu_seconds": captured,
        }
    if brute:
        yield brute_force_row(name, analysis)


def ilp_of(prepared: Any, question: Any) -> dict[str, Any]:
    """The same question, answered by mixed-integer programmes."""
    from rannc_backend.planner.plan_blocks import plan_prepared

    config = question.config.model_copy(update={"solver": "ilp"})
    began = time.perf_counter()
    plan = plan_prepared(prepared, replace(question, config=config))
    return {
        "ilp_step_seconds": plan.predicted_step_seconds,
        "ilp_proven_gap": plan.proven_gap,
        "ilp_seconds": time.perf_counter() - began,
    }


def brute_force_row(name: str, analysis: Any) -> dict[str, Any]:
    """The search and every plan there is, for the model in few blocks; two devices per node."""
    from rannc_backend.planner.cluster.cluster_file import load_cluster
    from rannc_backend.planner.cost.pricing import AnalyticPricer
    from rannc_backend.planner.plan_blocks import PlanningQuestion
    from rannc_backend.planner.plan_model import prepare
    from rannc_backend.planner.plan_request import PlanRequest
    from rannc_backend.planner.search.search import search
    from rannc_backend.settings.sources import resolve_config
    from tests.unit.rannc_backend.planner.search.search_problems import brute_force

    config = resolve_config(
        {**MODELS[name].options, "max_partition_num": _BRUTE_BLOCKS, "max_pipeline": 8}, {}
    )
    cluster = load_cluster(CLUSTER, _BRUTE_DEVICES, 2)
    prepared = prepare(analysis, PlanningQuestion(config=config, cluster=cluster, batch_rows=_BRUTE_ROWS))
    pricer = AnalyticPricer(device=cluster.device, partitions=prepared, holds_gradients=True)
    request = PlanRequest.of(prepared.graph, config, cluster, pricer, _BRUTE_ROWS, prepared.schedules, None)
    problem = request.problem(request.costs())
    found = search(problem).solution
    return {
        "model": name,
        "blocks": len(prepared.graph.blocks),
        "devices": _BRUTE_DEVICES,
        "found_seconds": None if found is None else found.step_seconds,
        "brute_force_seconds": brute_force(problem),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| model | parameters | devices | chosen: replicas per stage | micro-batches | step | equal split | "
        "ratio | gap |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "brute_force_seconds" in row:
            continue
        first = f"| {row['model']} | {row['billion_parameters']:.2f} B | {row['devices']} |"
        if "infeasible" in row:
            lines.append(f"{first} does not fit | | | | | |")
            continue
        equal = row["equal_split_seconds"]
        ratio = "none fits" if equal is None else f"{equal / row['step_seconds']:.3f}"
        lines.append(
            f"{first} {_replicas(row['stage_replicas'])} | {row['micro_batches']}, {row['schedule']} | "
            f"{row['step_seconds']:.3f} s | {'' if equal is None else f'{equal:.3f} s'} | {ratio} | "
            f"{row['proven_gap']:.2%} |"
        )
    lines += ilp_table([row for row in rows if "ilp_seconds" in row])
    brute = [row for row in rows if "brute_force_seconds" in row]
    if brute:
        lines += ["", "| model | blocks | devices | search | brute force |", "|---|---|---|---|---|"]
    for row in brute:
        found = f"{row['found_seconds']:.6f} s" if row["found_seconds"] is not None else "nothing fits"
        lines.append(
            f"| {row['model']} | {row['blocks']} | {row['devices']} | {found} | "
            f"{row['brute_force_seconds']:.6f} s |"
        )
    return "\n".join(lines)


def ilp_table(rows: list[dict[str, Any]]) -> list[str]:
    """Both solvers side by side; seconds are of all searches of a plan."""
    if not rows:
        return []
    lines = [
        "",
        "| model | devices | dp: step | gap | seconds | ilp: step | gap | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {row['model']} | {row['devices']} | {row['step_seconds']:.6f} s | {row['proven_gap']:.2%} | "
        f"{row['search_seconds']:.1f} | {row['ilp_step_seconds']:.6f} s | {row['ilp_proven_gap']:.2%} | "
        f"{row['ilp_seconds']:.1f} |"
        for row in rows
    ]


def _replicas(counts: list[int]) -> str:
    """[2, 2, 2, 1] as "3 x 2, 1"."""
    words, index = [], 0
    while index < len(counts):
        end = index
        while end < len(counts) and counts[end] == counts[index]:
            end += 1
        words.append(f"{end - index} x {counts[index]}" if end - index > 1 else str(counts[index]))
        index = end
    return ", ".join(words)


def main() -> None:
    """Run each model apart and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--devices", default="8,32,256")
    parser.add_argument("--brute", action="store_true")
    parser.add_argument("--ilp", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        for row in rows_of(
            options.models[0],
            [int(count) for count in options.devices.split(",")],
            options.brute,
            options.ilp,
        ):
            print(json.dumps(row), flush=True)
        return
    rows = []
    for name in options.models or MODELS:
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.planner_table",
            "--inside",
            "--devices",
            options.devices,
            name,
        ]
        command += [f"--{flag}" for flag in ("brute", "ilp") if getattr(options, flag)]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
        rows += [json.loads(line) for line in done.stdout.splitlines()]
        print(
            f"{name}: {'done' if done.returncode == 0 else f'ended with {done.returncode}'}",
            file=sys.stderr,
            flush=True,
        )
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
