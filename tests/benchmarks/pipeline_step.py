"""Median step time of this backend beside torch.distributed.pipelining, DDP and plain torch.compile; prints
JSON lines.

    python tests/benchmarks/pipeline_step.py --ranks 2

In: sizes and the number of rounds. Out: one line per contender and one line per ratio (rival's seconds over
ours: above 1 we are faster). All contenders train the same model on the same global batch in the same
processes, alternating round by round, with the same stage compiler; a step is zero_grad, forward, backward
and AdamW, and lasts from a barrier until the slowest rank has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpt_model import Gpt, Sizes, next_token_loss, parts  # noqa: E402

LIMIT_SECONDS = 1500
SHORTEST_STEP_SECONDS = 0.5
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to train: its step takes nothing and gives the loss of the global batch where it is known, else
    None.
    """

    name: str
    step: Callable[[], float | None]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16, help="rows of the global batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each contender")
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--without", default="", help="contenders to leave out, comma separated")
    parser.add_argument("--only-ranks", action="store_true", help="leave out the comparison in one process")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def sizes_of(flags: argparse.Namespace) -> Sizes:
    """The model's and the batch's sizes."""
    return Sizes(
        num_layers=flags.layers,
        width=flags.width,
        num_heads=flags.heads,
        vocabulary=flags.vocabulary,
        length=flags.length,
        rows=flags.rows,
    )


def new_model(sizes: Sizes) -> Gpt:
    """The same weights for every contender on every rank."""
    torch.manual_seed(0)
    return Gpt(sizes)


def compiled(module: nn.Module, compiler: str) -> nn.Module:
    """The rivals' compiler: plain torch.compile."""
    return torch.compile(module, backend=compiler) if compiler != "eager" else module


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.AdamW(module.parameters(), lr=1e-4)


def rannc(
    name: str,
    sizes: Sizes | None,
    flags: argparse.Namespace,
    tokens: Tensor,
    *,
    model: nn.Module | None = None,
    **options: Any,
) -> Contender:
    """This backend on this rank's rows. `model`: which gives its loss; None: that of these sizes."""
    if model is None:
        assert sizes is not None, "a model has sizes"
        model = new_model(sizes)
    optimizer = optimizer_of(model)
    call = torch.compile(
        model, backend="rannc", options={"stage_compiler": flags.compiler, "outputs": "loss", **options}
    )

    def step() -> float:
        optimizer.zero_grad()
        loss = call(tokens)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Contender(name=name, step=step)


def plain(sizes: Sizes, flags: argparse.Namespace, tokens: Tensor) -> Contender:
    """torch.compile in one process."""
    model = new_model(sizes)
    optimizer = optimizer_of(model)
    call = compiled(model, flags.compiler)

    def step() -> float:
        optimizer.zero_grad()
        loss = call(tokens)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Contender(name="torch_compile", step=step)


def data_parallel(sizes: Sizes, flags: argparse.Namespace, tokens: Tensor) -> Contender:
    """DDP, the whole model on every rank."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(new_model(sizes), gradient_as_bucket_view=True)
    optimizer = optimizer_of(wrapped)
    call = compiled(wrapped, flags.compiler)

    def step() -> float:
        optimizer.zero_grad()
        loss = call(tokens)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    return Contender(name="ddp", step=step)


def hand_split(sizes: Sizes, flags: argparse.Namespace, all_tokens: Tensor) -> Contender:
    """torch.distributed.pipelining, one part of equally many blocks per rank, 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world = dist.get_rank(), dist.get_world_size()
    part = parts(new_model(sizes), world)[rank]
    optimizer = optimizer_of(part)
    stage = PipelineStage(compiled(part, flags.compiler), rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=flags.micro_batches, loss_fn=next_token_loss)

    def step() -> float | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(all_tokens, target=all_tokens if world == 1 else None)
        elif rank == world - 1:
            schedule.step(target=all_tokens, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        return torch.stack(losses).mean().item() if losses else None

    return Contender(name="pipelining", step=step)


def contenders_of(flags: argparse.Namespace) -> list[Contender]:
    """Those for this number of ranks; the same order on all."""
    sizes = sizes_of(flags)
    generator = torch.Generator().manual_seed(1)
    everything = torch.randint(sizes.vocabulary, (sizes.rows, sizes.length), generator=generator)
    own = everything.tensor_split(flags.ranks)[dist.get_rank()] if flags.ranks > 1 else everything
    without = set(flags.without.split(","))
    makers: dict[str, Callable[[], Contender]] = {}
    if flags.ranks == 1:
        makers["rannc"] = lambda: rannc("rannc", sizes, flags, own, pipeline_num=1)
        makers["torch_compile"] = lambda: plain(sizes, flags, own)
    else:
        by_hand = {"stage_replicas": ",".join(["1"] * flags.ranks), "pipeline_num": flags.micro_batches}
        makers["rannc"] = lambda: rannc("rannc", sizes, flags, own)
        makers["rannc_pipeline"] = lambda: rannc("rannc_pipeline", sizes, flags, own, **by_hand)
        makers["pipelining"] = lambda: hand_split(sizes, flags, everything)
        makers["ddp"] = lambda: data_parallel(sizes, flags, own)
    return [make() for name, make in makers.items() if name not in without]


@dataclass(frozen=True, slots=True)
class Taken:
    """One step: seconds until the slowest rank has done it, and pages that were new to this rank's
    process.
    """

    seconds: float
    page_faults: int


Report = Callable[[argparse.Namespace, dict[str, list[Taken]], dict[str, float]], list[dict[str, Any]]]


def timed(step: Callable[[], float | None]) -> Taken:
    """Do one step."""
    parallel = dist.is_initialized()
    if parallel:
        dist.barrier()
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    begin = time.perf_counter()
    step()
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - pages
    if parallel:
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return Taken(seconds.item(), pages)


def known_loss(loss: float | None) -> float:
    """The loss of the rank that knows it."""
    value = torch.tensor(float("-inf") if loss is None else loss, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def work(
    flags: argparse.Namespace,
    contenders_of: Callable[[argparse.Namespace], list[Contender]] = contenders_of,
    report: Report | None = None,
) -> None:
    """One rank: warm up each contender, then time them by turns; rank 0 prints. `report`: None: see below."""
    torch.set_num_threads(1)
    if flags.ranks > 1:
        rank = next(int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ)
        dist.init_process_group("gloo", rank=rank, world_size=flags.ranks)
    contenders = contenders_of(flags)
    first_losses = {contender.name: known_loss(contender.step()) for contender in contenders}
    taken: dict[str, list[Taken]] = {contender.name: [] for contender in contenders}
    for number in range(flags.rounds + 1):
        # Another one begins in each round, so that none always follows the same neighbour.
        for contender in contenders[number % len(contenders) :] + contenders[: number % len(contenders)]:
            step = timed(contender.step)
            if number:
                taken[contender.name].append(step)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for line in (report or report_of)(flags, taken, first_losses):
            print(json.dumps(line), flush=True)
    sys.stdout.flush()
    if dist.is_initialized():
        dist.barrier()
    # gloo's threads may abort the interpreter's exit, which would look like a failed run.
    os._exit(0)


def report_of(
    flags: argparse.Namespace, taken: dict[str, list[Taken]], losses: dict[str, float]
) -> list[dict[str, Any]]:
    """The lines: medians, then ratios."""
    setting = {"ranks": flags.ranks, "compiler": flags.compiler}
    medians = {name: statistics.median(step.seconds for step in steps) for name, steps in taken.items()}
    lines: list[dict[str, Any]] = [
        {
            **setting,
            "contender": name,
            "median_seconds": round(median, 4),
            "fastest_seconds": round(min(step.seconds for step in taken[name]), 4),
            "page_faults": statistics.median(step.page_faults for step in taken[name]),
            "long_enough": median >= SHORTEST_STEP_SECONDS,
            "first_loss": losses[name],
        }
        for name, median in medians.items()
    ]
    rivals = [name for name in medians if not name.startswith("rannc")]
    for own in (name for name in medians if name.startswith("rannc")):
        for rival in rivals:
            ratio = round(medians[rival] / medians[own], 4)
            lines.append({**setting, "ratio": f"{rival} / {own}", "value": ratio})
    return lines


def launch(flags: argparse.Namespace, argv: Sequence[str], num_ranks: int, program: str = __file__) -> int:
    """Run the workers and let their lines through; the exit code."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    start = [str(mpirun), "-n", str(num_ranks)] if num_ranks > 1 else []
    command = [*start, sys.executable, program, *argv, "--ranks", str(num_ranks), "--worker"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    environment = dict(os.environ) | variables
    return subprocess.run(command, env=environment, timeout=LIMIT_SECONDS, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Compare over ranks, then in one process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = parse(arguments)
    if flags.worker:
        work(flags)
        return 0
    code = launch(flags, arguments, flags.ranks)
    if not flags.only_ranks and flags.ranks > 1:
        code = code or launch(flags, arguments, 1)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
