"""Median step time of this backend's schedules beside those of torch.distributed.pipelining, on CPUs; prints JSON lines.

    python tests/benchmarks/schedules.py --ranks 2 --compiler eager
    python tests/benchmarks/schedules.py --ranks 4 --played --micro-batches 8

In: sizes and the number of rounds, as for `pipeline_step.py`, whose model, weights and way of taking times these are. Each
rank is pinned to a core of its own. `--played`: layers sleep instead of computing (`played_compute.py`), so that ranks
which share cores have the bubbles that they would have on devices of their own. Out: one line per contender, one line per
ratio (rival's seconds over ours: above 1 we are faster), and the bubbles.

Bubbles. *Measured*: the share of a step in which a rank neither runs a forward nor a backward, the mean over the ranks; of
ours by the steps that `run_file` reports, in which every action is timed; of all played contenders by what their layers
sleep in the median step. *Simulated*: the same of the plan's programs with the measured seconds of its stages. *Predicted*: with the
planner's seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pipeline_step  # noqa: E402
from gpt_model import next_token_loss, parts  # noqa: E402
from pipeline_step import Contender, compiled, new_model, optimizer_of, rannc, sizes_of  # noqa: E402
from played_compute import LayerSeconds, PlayedModel, mean_loss, played_parts  # noqa: E402

from rannc_backend.ir.plan import Plan  # noqa: E402
from rannc_backend.report.run_report import RunReport  # noqa: E402
from rannc_backend.schedule.orders import schedule_named  # noqa: E402
from rannc_backend.schedule.plan_simulation import simulate_plan  # noqa: E402

OURS = ("1f1b", "zb_h1", "list_scheduled", "interleaved", "zb_v", "v_half")
RIVALS = ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble")
_FOLDER = "SCHEDULES_FOLDER"  # of plans and run files


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of `pipeline_step.py`, and those of played compute."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--played", action="store_true", help="layers sleep instead of computing")
    parser.add_argument(
        "--milliseconds",
        type=float,
        nargs=3,
        default=(10.0, 10.0, 10.0),
        metavar=("F", "I", "W"),
        help="of a played layer and micro-batch: forward, input gradient, weight gradient",
    )
    own, others = parser.parse_known_args(argv)
    flags = pipeline_step.parse(others)
    for name, value in vars(own).items():
        setattr(flags, name, value)
    return flags


def layer_seconds(flags: argparse.Namespace) -> LayerSeconds:
    """Of a played layer."""
    forward, inputs, weights = (value / 1e3 for value in flags.milliseconds)
    return LayerSeconds(forward=forward, inputs=inputs, weights=weights)


def pinned() -> None:
    """This rank on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})


def rival(name: str, flags: argparse.Namespace, batch: Tensor) -> Contender:
    """A schedule of torch.distributed.pipelining: parts of equally many blocks, one or two per rank."""
    from torch.distributed import pipelining

    rank, world = dist.get_rank(), dist.get_world_size()
    per_rank = 1 if name == "Schedule1F1B" else 2
    number = per_rank * world
    own = [rank] if per_rank == 1 else [rank, number - 1 - rank if "ZBV" in name else rank + world]
    whole: Sequence[nn.Module] = (
        played_parts(flags.layers, layer_seconds(flags), number)
        if flags.played
        else parts(new_model(sizes_of(flags)), number)
    )
    optimizer = optimizer_of(nn.ModuleList([whole[place] for place in own]))
    stages = [
        pipelining.PipelineStage(compiled(whole[place], flags.compiler), place, number, torch.device("cpu"))
        for place in own
    ]
    schedule = getattr(pipelining, name)(
        stages if per_rank == 2 else stages[0],
        n_microbatches=flags.micro_batches,
        loss_fn=mean_loss if flags.played else next_token_loss,
    )

    def step() -> float | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": batch, "losses": losses} if number - 1 in own else {}
        schedule.step(*([batch] if 0 in own else []), **given)
        optimizer.step()
        return torch.stack(losses).mean().item() if losses else None

    return Contender(name=name, step=step)


def ours(name: str, flags: argparse.Namespace, own_rows: Tensor) -> Contender:
    """This backend with a schedule, cut as the planner cuts; played layers as torch's, equally many per stage."""
    stages = flags.ranks * schedule_named(name).stages_per_lane
    options: dict[str, Any] = {
        "schedule": name,
        "stage_replicas": ",".join(["1"] * stages),
        "pipeline_num": flags.micro_batches,
        "save_deployment": True,
        "deployment_file": str(_folder() / f"{name}_plan.json"),
        "run_file": str(_folder() / f"{name}_run.json"),
    }
    if not flags.played:
        return rannc(f"rannc_{name}", sizes_of(flags), flags, own_rows, **options)
    starts = [f"layers.{stage * flags.layers // stages}" for stage in range(1, stages)]
    options |= {"costs": "analytic", "recompute": "1", "stage_starts": starts}

    def played(**more: Any) -> Contender:
        model = PlayedModel(flags.layers, layer_seconds(flags))
        return rannc(f"rannc_{name}", None, flags, own_rows, model=model, **options | more)

    # No price tells that operators sleep, and orders are made by the seconds of the plan: it gets those of the layers.
    played().step()
    path = Path(options["deployment_file"])
    if dist.get_rank() == 0:
        path.write_text(
            as_played(Plan.from_json(path.read_text(encoding="utf-8")), flags).to_json(), encoding="utf-8"
        )
    dist.barrier()
    return played(load_deployment=True, save_deployment=False)


def as_played(plan: Plan, flags: argparse.Namespace) -> Plan:
    """The plan with the seconds that its layers sleep, and none for messages. Nobody waits for an input gradient of the first
    stage: all of its backward is in the second part.
    """
    seconds, stages = layer_seconds(flags), []
    for stage in plan.stages:
        count = len({path for path in stage.modules if path.startswith("layers.")})
        update = {
            "forward_seconds": count * seconds.forward,
            "backward_seconds": count * (seconds.inputs + seconds.weights),
            "weight_seconds": count * (seconds.weights + (seconds.inputs if stage.index == 0 else 0.0)),
            "transfer_seconds": 0.0,
        }
        stages.append(stage.model_copy(update={"predicted": stage.predicted.model_copy(update=update)}))
    played = plan.model_copy(update={"stages": tuple(stages)})
    return played.model_copy(update={"predicted_step_seconds": simulate_plan(played).step_seconds})


def contenders_of(flags: argparse.Namespace) -> list[Contender]:
    """Ours, cut as the planner cuts, and torch's."""
    pinned()
    generator = torch.Generator().manual_seed(1)
    if flags.played:
        everything = torch.randn(flags.rows, 1, generator=generator)
    else:
        sizes = sizes_of(flags)
        everything = torch.randint(sizes.vocabulary, (sizes.rows, sizes.length), generator=generator)
    own = everything.tensor_split(flags.ranks)[dist.get_rank()]
    makers: dict[str, Callable[[], Contender]] = {
        f"rannc_{name}": lambda name=name: ours(name, flags, own) for name in OURS
    }
    makers |= {name: lambda name=name: rival(name, flags, everything) for name in RIVALS}
    without = set(flags.without.split(","))
    return [make() for name, make in makers.items() if name not in without]


def bubbles_of_run(name: str) -> dict[str, float] | None:
    """Measured, simulated and predicted bubbles of one of ours; None where no run was reported."""
    run_path, plan_path = _folder() / f"{name}_run.json", _folder() / f"{name}_plan.json"
    if not run_path.exists() or not plan_path.exists():
        return None
    run = RunReport.from_json(run_path.read_text(encoding="utf-8"))
    plan = Plan.from_json(plan_path.read_text(encoding="utf-8"))
    shares = []
    for lane in plan.lanes:
        busy = sum(run.stages[stage].forward_seconds + run.stages[stage].backward_seconds for stage in lane)
        shares.append(1 - run.num_micro_batches * busy / run.stages[lane[0]].step_seconds)
    return {
        "measured_bubble": round(sum(shares) / len(shares), 4),
        "simulated_bubble": round(simulate_plan(as_measured(plan, run)).idle_share, 4),
        "predicted_bubble": round(simulate_plan(plan).idle_share, 4),
    }


def as_measured(plan: Plan, run: RunReport) -> Plan:
    """The plan with the measured seconds of its stages; the parts of a backward in the predicted proportion."""
    stages = []
    for stage, measured in zip(plan.stages, run.stages, strict=True):
        cost = stage.predicted
        share = cost.weight_seconds / cost.backward_seconds if cost.backward_seconds else 0.0
        update = {
            "forward_seconds": measured.forward_seconds,
            "backward_seconds": measured.backward_seconds,
            "weight_seconds": share * measured.backward_seconds,
        }
        stages.append(stage.model_copy(update={"predicted": cost.model_copy(update=update)}))
    # Ranks that sleep, or have cores of their own, wait for no core.
    cluster = plan.cluster.model_copy(update={"core_share": 1.0})
    return plan.model_copy(update={"stages": tuple(stages), "cluster": cluster})


def report(
    flags: argparse.Namespace, taken: dict[str, list[pipeline_step.Taken]], losses: dict[str, float]
) -> list[dict[str, Any]]:
    """The lines of `pipeline_step.report_of`, and the bubbles."""
    lines = pipeline_step.report_of(flags, taken, losses)
    seconds = layer_seconds(flags)
    asleep = flags.micro_batches * flags.layers / flags.ranks
    asleep *= seconds.forward + seconds.inputs + seconds.weights
    for line in [line for line in lines if "contender" in line]:
        found: dict[str, Any] = {"bubble_of": line["contender"]}
        if flags.played:
            found["bubble_in_median_step"] = round(1 - asleep / line["median_seconds"], 4)
        found |= bubbles_of_run(line["contender"].removeprefix("rannc_")) or {}
        if len(found) > 1:
            lines.append(found)
    return lines


def _folder() -> Path:
    return Path(os.environ[_FOLDER])


def main(argv: Sequence[str] | None = None) -> int:
    """Compare over ranks."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = parse(arguments)
    if flags.worker:
        pipeline_step.work(flags, contenders_of, report)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_FOLDER] = folder
        return pipeline_step.launch(flags, arguments, flags.ranks, __file__)


if __name__ == "__main__":
    raise SystemExit(main())
