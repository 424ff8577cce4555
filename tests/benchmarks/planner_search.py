"""How long the stage search takes and how much memory, on block graphs made up after BERT models.

    python tests/benchmarks/planner_search.py [bert-5b] [bert-100b] [--plan]

Each model runs in a process of its own, so that peak memory is its own. Prints one JSON object per model:
seconds and peak memory by part, the plan found and what is proven of it. `--plan`: the whole planner
(alternatives and what-ifs too), not the search alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from dataclasses import dataclass, replace

import sympy

from rannc_backend.ir.block_graph import Block, BlockGraph, Flow, OperatorCost, ParameterUse
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cluster.cluster_file import load_cluster
from rannc_backend.planner.cost.pricing import AnalyticPricer
from rannc_backend.planner.plan_request import PlanRequest
from rannc_backend.planner.planner import plan_blocks
from rannc_backend.planner.search.search import StageSearch
from rannc_backend.settings.options import Config

ROWS = sympy.Symbol("rows", positive=True, integer=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A transformer encoder, a cluster and a batch. `bytes_per_value` of parameters and activations."""

    num_layers: int
    hidden: int
    sequence: int
    vocabulary: int
    batch_rows: int
    dtype: str
    bytes_per_value: int
    cluster: Cluster
    num_devices_again: int


CASES = {
    "bert-5b": Case(
        num_layers=96, hidden=2048, sequence=512, vocabulary=30522, batch_rows=256, dtype="float32", bytes_per_value=4,
        cluster=load_cluster("v100-32gb", 32, 8), num_devices_again=24,
    ),
    "bert-100b": Case(
        num_layers=128, hidden=8192, sequence=512, vocabulary=30522, batch_rows=4096, dtype="bfloat16", bytes_per_value=2,
        cluster=load_cluster("a100-80gb", 1024, 8), num_devices_again=768,
    ),
}  # fmt: skip


def block_graph(case: Case) -> BlockGraph:
    """Embedding, equal layers, head with loss."""
    hidden, size = case.hidden, case.bytes_per_value
    tokens = ROWS * case.sequence

    def block(index: int, kind: str, flops: sympy.Expr, values: sympy.Expr, num_parameters: int) -> Block:
        product = OperatorCost(
            name=f"mm{index}", dtype=case.dtype, operator_class="matmul", forward_flops=flops, backward_flops=2 * flops,
            forward_bytes=values * size, backward_bytes=2 * values * size, num_forward_launches=40, num_backward_launches=80,
        )  # fmt: skip
        return Block(
            index=index,
            structure=kind,
            nodes=(f"node{index}",),
            modules=(f"{kind}.{index}",),
            parameters=(f"p{index}",) if num_parameters else (),
            updated_buffers=(),
            operators=(product,),
            saved_bytes=values * size,
            workspace_bytes=(4 * tokens * hidden * size,),
        )

    layer_flops = 24 * tokens * hidden**2 + 4 * tokens * case.sequence * hidden
    blocks = [block(0, "embedding", sympy.Integer(0), 2 * tokens * hidden, case.vocabulary * hidden)]
    for index in range(case.num_layers):
        blocks.append(block(index + 1, "layer", layer_flops, 16 * tokens * hidden, 12 * hidden**2))
    head = len(blocks)
    blocks.append(
        block(
            head,
            "head",
            2 * tokens * hidden * case.vocabulary,
            2 * tokens * case.vocabulary,
            case.vocabulary * hidden,
        )
    )
    counts = [case.vocabulary * hidden, *[12 * hidden**2] * case.num_layers, case.vocabulary * hidden]
    return BlockGraph(
        blocks=tuple(blocks),
        flows=tuple(
            Flow(
                name=f"h{index}",
                producer=index,
                consumers=(index + 1,),
                num_bytes=tokens * hidden * size,
                needs_grad=True,
            )
            for index in range(head)
        ),
        parameters=tuple(
            ParameterUse(name=f"p{index}", num_bytes=count * size, trainable=True)
            for index, count in enumerate(counts)
        ),
    )


def peak_gb() -> float:
    """Most memory that this process had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def run(name: str, whole: bool) -> None:
    """One case, printed."""
    case = CASES[name]
    times: dict[str, float] = {}
    began = time.perf_counter()

    def lap(part: str) -> None:
        nonlocal began
        now = time.perf_counter()
        times[part] = round(now - began, 2)
        began = now

    graph = block_graph(case)
    pricer = AnalyticPricer(device=case.cluster.device)
    lap("graph")
    base = round(peak_gb(), 2)
    result: dict[str, object] = {
        "model": name,
        "blocks": len(graph.blocks),
        "devices": case.cluster.num_devices,
    }
    if whole:
        plan = plan_blocks(
            graph,
            Config(),
            cluster=case.cluster,
            batch_rows=case.batch_rows,
            schedules=("1f1b", "fill_drain"),
            fingerprint="f" * 64,
        )
        lap("plan")
        result |= {
            "step_seconds": plan.predicted_step_seconds,
            "equal_split_seconds": plan.equal_split_seconds,
        }
        result |= {
            "gap": plan.proven_gap,
            "binding": plan.binding,
            "alternatives": [item.reason for item in plan.alternatives],
        }
    else:
        for label, count in (("", case.cluster.num_devices), (" again", case.num_devices_again)):
            cluster = replace(case.cluster, num_devices=count)
            request = PlanRequest.of(
                graph, Config(), cluster, pricer, case.batch_rows, ("1f1b", "fill_drain"), None
            )
            problem = request.problem(request.costs())
            lap(f"costs{label}")
            search = StageSearch(problem)
            found = search.run()
            lap(f"search{label}")
            assert found.solution is not None, "nothing fits"
            plan = found.solution
            result |= {f"step_seconds{label}": plan.step_seconds, f"gap{label}": round(found.proven_gap, 5)}
            result |= {f"candidates{label}": found.num_candidates, f"schedule{label}": plan.schedule}
            result |= {f"stages{label}": plan.num_stages, f"micro_batches{label}": plan.num_micro_batches}
            result |= {
                f"replicas{label}": sorted(set(plan.replicas)),
                f"recompute{label}": sorted(set(plan.budgets)),
            }
    print(json.dumps(result | {"seconds": times, "base_gb": base, "peak_gb": round(peak_gb(), 2)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--plan", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.models:
        process = multiprocessing.get_context("spawn").Process(target=run, args=(name, arguments.plan))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
