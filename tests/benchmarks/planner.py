"""How long planning takes and how much memory it needs, by part: `python -m tests.benchmarks.planner [--json
FILE] [CASE ...]`.

In: nothing but the models of examples/planning_models.py. Out: a table, and JSON where asked for. Each case
runs in a process of its own; its peak memory after each part is the process's so far. "again" plans from the
blocks that the case has saved, for other devices.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, the devices to plan for, and those to plan for again."""

    factory: str
    cluster: str
    num_devices: int
    other_num_devices: int
    batch_rows: int
    dtype: str | None = None


CASES = {
    "bert_4_9b": Case(
        factory="bert_4_9b", cluster="v100-32gb", num_devices=32, other_num_devices=64, batch_rows=256
    ),
    "bert_100b": Case(
        factory="bert_100b",
        cluster="a100-80gb",
        num_devices=1024,
        other_num_devices=768,
        batch_rows=4096,
        dtype="bf16",
    ),
    "gpt2": Case(factory="gpt2", cluster="a100-40gb", num_devices=32, other_num_devices=16, batch_rows=512),
    "t5": Case(factory="t5", cluster="a100-40gb", num_devices=32, other_num_devices=16, batch_rows=512),
    "resnet": Case(
        factory="resnet", cluster="a100-40gb", num_devices=32, other_num_devices=16, batch_rows=1024
    ),
}
STANDARD = ("bert_4_9b", "bert_100b")


class Recorder:
    """Wall and CPU seconds and peak memory of each step, as planning tells them."""

    def __init__(self) -> None:
        self.parts: list[dict[str, object]] = []
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def take(self, name: str, detail: str = "") -> None:
        """Book what has passed since the last time under a name."""
        wall, cpu = time.monotonic(), time.process_time()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        seconds = {"wall_seconds": wall - self._wall, "cpu_seconds": cpu - self._cpu}
        self.parts.append({"part": name, **seconds, "peak_gb": peak, "detail": detail})
        print(f"  {name}: {wall - self._wall:.1f} s, {detail}", file=sys.stderr, flush=True)
        self._wall, self._cpu = wall, cpu


def plan_first(case: Case, blocks: Path) -> dict[str, object]:
    """Capture, analyse, cut, price, search; save the blocks."""
    recorder = Recorder()
    from rannc_backend.cli.model_factory import call_factory
    from rannc_backend.cli.plan import parse_dtype
    from rannc_backend.log.step_timer import StepTimer
    from rannc_backend.planner import plan_model as planning
    from rannc_backend.planner.cluster.cluster_file import load_cluster
    from rannc_backend.settings.sources import resolve_config

    step_timer = StepTimer(log=lambda step: recorder.take(step.name, step.detail))
    config, cluster = resolve_config({}, {}), load_cluster(case.cluster, case.num_devices, 8)
    model, args, kwargs = call_factory(f"{ROOT / 'examples' / 'planning_models.py'}:{case.factory}")
    recorder.take("start", "imports and model")
    analysis = planning.analyze_model(
        model, args, kwargs, cluster=cluster, dtype=parse_dtype(case.dtype), step_timer=step_timer
    )
    question = planning.PlanningQuestion(
        config=config, cluster=cluster, batch_rows=case.batch_rows, step_timer=step_timer
    )
    prepared = planning.prepare(analysis, question)
    blocks.write_text(prepared.to_json())
    recorder.take("save", f"{blocks.stat().st_size / 2**20:.1f} MB of blocks")
    plan = planning.plan_prepared(prepared, question)
    return {"parts": recorder.parts, "plan": plan.summary(), "proven_gap": plan.proven_gap}


def plan_again(case: Case, blocks: Path) -> dict[str, object]:
    """Read the blocks and plan for the other number of devices."""
    recorder = Recorder()
    from rannc_backend.log.step_timer import StepTimer
    from rannc_backend.planner import plan_blocks as planning_search
    from rannc_backend.planner.blocks_file import PlannableModel
    from rannc_backend.planner.cluster.cluster_file import load_cluster
    from rannc_backend.settings.sources import resolve_config

    recorder.take("start", "imports")
    prepared = PlannableModel.read(str(blocks))
    recorder.take("read")
    question = planning_search.PlanningQuestion(
        config=resolve_config({}, {}),
        cluster=load_cluster(case.cluster, case.other_num_devices, 8),
        batch_rows=case.batch_rows,
        step_timer=StepTimer(log=lambda step: recorder.take(step.name, step.detail)),
    )
    plan = planning_search.plan_prepared(prepared, question)
    return {"parts": recorder.parts, "plan": plan.summary(), "proven_gap": plan.proven_gap}


def run_apart(name: str, what: str, blocks: Path) -> dict[str, object]:
    """One half of a case in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.planner", "--inside", what, str(blocks), name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, dict[str, object]]) -> str:
    """Results for people."""
    lines = [f"{'case':<18} {'part':<10} {'wall s':>8} {'cpu s':>8} {'peak GB':>8}  detail"]
    for name, result in results.items():
        parts = result["parts"]
        for part in parts:
            lines.append(
                f"{name:<18} {part['part']:<10} {part['wall_seconds']:>8.2f} {part['cpu_seconds']:>8.2f} "
                f"{part['peak_gb']:>8.2f}  {part['detail']}"
            )
        wall, cpu = (sum(part[key] for part in parts) for key in ("wall_seconds", "cpu_seconds"))
        peak = max(part["peak_gb"] for part in parts)
        lines.append(
            f"{name:<18} {'all':<10} {wall:>8.2f} {cpu:>8.2f} {peak:>8.2f}  gap {result['proven_gap']:.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=STANDARD, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", nargs=2, metavar=("WHAT", "BLOCKS"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        what, blocks = chosen.inside
        function = {"first": plan_first, "again": plan_again}[what]
        print(json.dumps(function(CASES[chosen.cases[0]], Path(blocks))))
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.cases:
            for what in ("first", "again"):
                print(f"{name} {what}", file=sys.stderr, flush=True)
                results[f"{name} {what}"] = run_apart(name, what, Path(folder) / f"{name}.json")
    print(table(results))
    for name, result in results.items():
        print(f"\n{name}: {result['plan']}")
    if chosen.json:
        cases = {name: asdict(CASES[name]) for name in chosen.cases}
        chosen.json.write_text(json.dumps({"cases": cases, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
