"""Median step time of this backend's schedules beside those of torch.distributed.pipelining, on CPUs; prints JSON lines.

    python tests/benchmarks/schedules.py --ranks 2 --compiler eager

In: sizes and the number of rounds, as for `pipeline_step.py`, whose model, weights and way of taking times these are. Each
rank is pinned to a core of its own. Out: one line per contender and one line per ratio (rival's seconds over ours: above
1 we are faster).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

import pipeline_step  # noqa: E402
from gpt_model import Sizes, next_token_loss, parts  # noqa: E402
from pipeline_step import Contender, compiled, new_model, optimizer_of, rannc, sizes_of  # noqa: E402

from rannc_backend.schedule.orders import schedule_named  # noqa: E402

OURS = ("1f1b", "zb_h1", "list_scheduled", "interleaved", "zb_v")


def pinned() -> None:
    """This rank on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})


def rival(name: str, sizes: Sizes, flags: argparse.Namespace, tokens: Tensor) -> Contender:
    """A schedule of torch.distributed.pipelining: parts of equally many blocks, one or two per rank."""
    from torch.distributed import pipelining

    rank, world = dist.get_rank(), dist.get_world_size()
    per_rank = 1 if name == "Schedule1F1B" else 2
    number = per_rank * world
    own = [rank] if per_rank == 1 else [rank, number - 1 - rank if "ZBV" in name else rank + world]
    whole = parts(new_model(sizes), number)
    modules = nn.ModuleList([whole[place] for place in own])
    optimizer = optimizer_of(modules)
    stages = [
        pipelining.PipelineStage(compiled(whole[place], flags.compiler), place, number, torch.device("cpu"))
        for place in own
    ]
    schedule = getattr(pipelining, name)(
        stages if per_rank == 2 else stages[0], n_microbatches=flags.micro_batches, loss_fn=next_token_loss
    )

    def step() -> float | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": tokens, "losses": losses} if number - 1 in own else {}
        schedule.step(*([tokens] if 0 in own else []), **given)
        optimizer.step()
        return torch.stack(losses).mean().item() if losses else None

    return Contender(name=name, step=step)


def contenders_of(flags: argparse.Namespace) -> list[Contender]:
    """Ours, cut as the planner cuts, and torch's."""
    pinned()
    sizes = sizes_of(flags)
    generator = torch.Generator().manual_seed(1)
    everything = torch.randint(sizes.vocabulary, (sizes.rows, sizes.length), generator=generator)
    own = everything.tensor_split(flags.ranks)[dist.get_rank()]

    def ours(name: str) -> Contender:
        stages = flags.ranks * schedule_named(name).stages_per_lane
        replicas = ",".join(["1"] * stages)
        return rannc(
            f"rannc_{name}",
            sizes,
            flags,
            own,
            schedule=name,
            stage_replicas=replicas,
            pipeline_num=flags.micro_batches,
        )

    makers: dict[str, Callable[[], Contender]] = {
        f"rannc_{name}": lambda name=name: ours(name) for name in OURS
    }
    for name in ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"):
        makers[name] = lambda name=name: rival(name, sizes, flags, everything)
    without = set(flags.without.split(","))
    return [make() for name, make in makers.items() if name not in without]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare over ranks."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = pipeline_step.parse(arguments)
    if flags.worker:
        pipeline_step.contenders_of = contenders_of
        pipeline_step.work(flags)
        return 0
    return pipeline_step.launch(flags, arguments, flags.ranks, __file__)


if __name__ == "__main__":
    raise SystemExit(main())
