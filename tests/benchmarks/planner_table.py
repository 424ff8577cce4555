"""Chosen plans beside equal splits: `python -m tests.benchmarks.planner_table [--devices 8,32,256] [--brute] [--json FILE] [MODEL ...]`.

In: the models of examples/planning_models.py, planned in bfloat16 for a100-80gb with eight devices per node. Out: a Markdown table, and
JSON where asked for. Every model is captured once, in a process of its own. `--brute` looks at every plan of the model in few blocks
on few devices, and prints what the search finds there beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODELS = ("gpt2", "bert", "llama", "t5", "vit", "resnet", "heavy_head")
_ROWS_PER_DEVICE = 8
_BRUTE_BLOCKS, _BRUTE_DEVICES, _BRUTE_ROWS = 6, 6, 48


def rows_of(name: str, devices: list[int], brute: bool) -> Iterator[dict[str, Any]]:
    """One row of the table per number of devices."""
    from rannc_backend import planning
    from rannc_backend.cli_plan import parse_dtype
    from rannc_backend.config_sources import resolve_config
    from rannc_backend.cost.cluster_file import load_cluster
    from rannc_backend.planning_factory import call_factory

    config = resolve_config({}, {})
    model, args, kwargs = call_factory(f"{ROOT / 'examples' / 'planning_models.py'}:{name}")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    start = time.monotonic()
    cluster = load_cluster("a100-80gb", devices[0], 8)
    analysis = planning.analyze_model(model, args, kwargs, cluster=cluster, dtype=parse_dtype("bf16"))
    captured = time.monotonic() - start
    first = {"config": config, "num_devices": devices[0], "cluster": cluster, "batch_rows": _ROWS_PER_DEVICE * devices[0]}
    prepared = planning.prepare(analysis, **first)
    for count in devices:
        start = time.monotonic()
        cluster = load_cluster("a100-80gb", count, 8)
        question = {"config": config, "num_devices": count, "cluster": cluster, "batch_rows": _ROWS_PER_DEVICE * count}
        plan = planning.plan_prepared(prepared, **question)
        yield {
            "model": name,
            "billion_parameters": parameters / 1e9,
            "devices": count,
            "stage_replicas": list(plan.stage_replicas),
            "recompute": [stage.recompute for stage in plan.stages],
            "micro_batches": plan.num_micro_batches,
            "schedule": plan.schedule,
            "step_seconds": plan.predicted_step_seconds,
            "equal_split_seconds": plan.equal_split_seconds,
            "proven_gap": plan.proven_gap,
            "search_seconds": time.monotonic() - start,
            "capture_seconds": captured,
        }
    if brute:
        yield brute_force_row(name, analysis)


def brute_force_row(name: str, analysis: Any) -> dict[str, Any]:
    """The search and every plan there is, for the model in few blocks; four devices per node."""
    from rannc_backend import planning
    from rannc_backend.config_sources import resolve_config
    from rannc_backend.cost.cluster_file import load_cluster
    from rannc_backend.cost.pricing import AnalyticPricer
    from rannc_backend.partition.plan_request import PlanRequest
    from rannc_backend.partition.stage_search import search
    from tests.unit.rannc_backend.search_problems import brute_force

    config = resolve_config({"max_partition_num": _BRUTE_BLOCKS, "max_pipeline": 8}, {})
    cluster = load_cluster("a100-80gb", _BRUTE_DEVICES, 4)
    question = {"config": config, "num_devices": _BRUTE_DEVICES, "cluster": cluster, "batch_rows": _BRUTE_ROWS}
    prepared = planning.prepare(analysis, **question)
    pricer = AnalyticPricer(device=cluster.device)
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
        "| model | parameters | devices | chosen: replicas per stage | micro-batches | step | equal split | ratio | gap | search |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "brute_force_seconds" in row:
            continue
        equal = row["equal_split_seconds"]
        ratio = "no equal split fits" if equal is None else f"{equal / row['step_seconds']:.3f}"
        schedule = "" if len(row["stage_replicas"]) == 1 else f", {row['schedule']}"
        lines.append(
            f"| {row['model']} | {row['billion_parameters']:.2f} B | {row['devices']} | {_replicas(row['stage_replicas'])} | "
            f"{row['micro_batches']}{schedule} | {row['step_seconds']:.3f} s | {'' if equal is None else f'{equal:.3f} s'} | {ratio} | "
            f"{row['proven_gap']:.2%} | {row['search_seconds']:.1f} s |"
        )
    brute = [row for row in rows if "brute_force_seconds" in row]
    if brute:
        lines += ["", "| model | blocks | devices | search | brute force |", "|---|---|---|---|---|"]
    for row in brute:
        found = f"{row['found_seconds']:.6f} s" if row["found_seconds"] is not None else "nothing fits"
        lines.append(f"| {row['model']} | {row['blocks']} | {row['devices']} | {found} | {row['brute_force_seconds']:.6f} s |")
    return "\n".join(lines)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--devices", default="8,32,256")
    parser.add_argument("--brute", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        for row in rows_of(options.models[0], [int(count) for count in options.devices.split(",")], options.brute):
            print(json.dumps(row), flush=True)
        return
    rows = []
    for name in options.models or MODELS:
        command = [sys.executable, "-m", "tests.benchmarks.planner_table", "--inside", "--devices", options.devices, name]
        command += ["--brute"] if options.brute else []
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "2"}, check=False)
        rows += [json.loads(line) for line in done.stdout.splitlines()]
        print(f"{name}: {'done' if done.returncode == 0 else f'ended with {done.returncode}'}", file=sys.stderr, flush=True)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
