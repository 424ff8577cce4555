"""Checks of checkpoints over ranks: saved under one division of the model, loaded under another, and what
goes wrong in between.

In: a context. Out: findings. Every function is collective: all ranks make the same calls in the same order.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rannc_backend
from rannc_backend.checkpoint.directory import Disk
from rannc_backend.checkpoint.manifest import OPTIMIZER_PREFIX
from rannc_backend.checkpoint.reader import CheckpointReader
from tests.distributed.harness.context import LATER_STEPS_FACTOR, Context

SAVED, LAST = 3, 5
_OTHER_SEED = 77


class Run:
    """A model with optimizer and scheduler in training."""

    def __init__(self, context: Context, model: nn.Module) -> None:
        self.context, self.model = context, model
        self.compiled = context.compile(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=context.entry.adam_epsilon)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def train(self, first: int, last: int) -> None:
        """Steps first to last - 1."""
        for step in range(first, last):
            batch = self.context.local(self.context.batch(step))
            self.optimizer.zero_grad()
            self.context.entry.loss_of(self.context.entry.call(self.compiled, batch), batch).backward()
            self.optimizer.step()
            self.scheduler.step()

    def save(self, path: Path, step: int, **arguments: Any) -> Path:
        return rannc_backend.save_checkpoint(
            path, self.compiled, self.optimizer, self.scheduler, step=step, **arguments
        )

    def load(self, path: Path) -> Any:
        return rannc_backend.load_checkpoint(path, self.compiled, self.optimizer, self.scheduler)


def checkpoint_saved(context: Context) -> None:
    """Train, save, train on and save again: what a later job is compared with."""
    path = Path(context.case.parameters["path"])
    torch.manual_seed(context.rank)
    run = Run(context, context.model())
    run.train(0, SAVED)
    saved = run.save(path, SAVED, extra={"position": (SAVED, context.case.name)})
    state = run.model.state_dict()
    reader = CheckpointReader(saved)
    context.findings.that(reader.plan() is not None, "no plan was saved")
    if context.rank == 0:
        context.findings.that(set(reader.names) == set(state), f"{reader.names} were saved of {list(state)}")
        for name, value in state.items():
            context.findings.that(
                torch.equal(reader.tensor(name), value),
                f"{name} was saved otherwise than state_dict gives it",
            )
    run.train(SAVED, LAST)
    run.save(path, LAST, asynchronous=True)
    rannc_backend.wait_for_checkpoint()


def checkpoint_loaded(context: Context) -> None:
    """Checkpoints of other jobs, loaded before and after the first call: the next steps are the same as
    there.
    """
    for directory, times in context.case.parameters["sources"].items():
        path = Path(directory)
        for when in times:
            torch._dynamo.reset()
            torch.manual_seed(1000 + context.rank)
            run = Run(context, context.entry.model(_OTHER_SEED, context.dtype))
            if when == "after":
                run.train(10, 11)
            loaded = run.load(path / f"step-{SAVED:08d}")
            kind = f"saved by {loaded.world_size} rank(s), loaded {when} the first call"
            context.findings.that(
                loaded.step == SAVED and loaded.extra["position"][0] == SAVED, f"{kind}: {loaded}"
            )
            run.train(SAVED, LAST)
            _compare(
                context,
                run,
                path / f"step-{LAST:08d}",
                kind,
                exact=directory == context.case.parameters["same"],
            )


def _compare(context: Context, run: Run, path: Path, kind: str, *, exact: bool) -> None:
    reader = CheckpointReader(path)
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    mine = {
        f"{OPTIMIZER_PREFIX}0/{names[id(p)]}/{key}": value
        for p, state in run.optimizer.state.items()
        for key, value in state.items()
    }
    pairs = [(key, value, reader.tensor(key)) for key, value in mine.items()]
    context.findings.that(bool(pairs), f"{kind}: the optimizer has no state here")
    state = run.model.state_dict()
    if context.rank == 0:
        pairs += [(name, value, reader.tensor(name)) for name, value in state.items()]
    for name, actual, expected in pairs:
        if exact:
            context.findings.that(
                torch.equal(actual, expected), f"{kind}: {name} is not the same bit for bit"
            )
        elif actual.is_floating_point():
            context.findings.close(
                "resumed",
                f"{kind}: {name}",
                actual,
                expected,
                context.tolerance * LATER_STEPS_FACTOR,
                floor=1e-6,
            )
    rate = run.optimizer.param_groups[0]["lr"]
    context.findings.that(abs(rate - 1e-3 * 0.9**LAST) < 1e-12, f"{kind}: the learning rate is {rate}")


def checkpoint_of_a_meta_model(context: Context) -> None:
    """A model without memory takes its values from a checkpoint, each rank those of its stages only."""
    path = context.directory / context.case.name
    run = Run(context, context.model())
    run.train(0, SAVED)
    run.save(path, SAVED)
    run.train(SAVED, LAST)
    expected = run.model.state_dict()
    torch._dynamo.reset()
    with torch.device("meta"):
        model = context.entry.build(context.dtype)
    other = Run(context, model)
    other.load(path)
    context.findings.that(
        all(p.untyped_storage().nbytes() <= 8 for p in model.parameters()), "memory was taken before the plan"
    )
    other.train(SAVED, LAST)
    state = other.model.state_dict()
    for name, value in expected.items():
        context.findings.that(torch.equal(state[name], value), f"{name} is not the same bit for bit")


class _FullDisk(Disk):
    def write_tensors(self, path: Path, tensors: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))


def checkpoint_failures(context: Context) -> None:
    """What fails on one rank is raised by all, and the checkpoint before it stays the latest."""
    findings, rank = context.findings, context.rank
    path = context.directory / context.case.name
    run = Run(context, context.model())
    run.train(0, 1)
    run.save(path, 1)

    def fails(kind: str, names: tuple[str, ...], words: str, action: Callable[[], Any]) -> None:
        error = findings.raises(kind, names, action)
        findings.that(error is None or words in str(error), f"{kind}: {words!r} is not in {error}")
        rannc_backend.barrier()
        findings.that(
            rannc_backend.latest_checkpoint(path).name == "step-00000001",
            f"{kind}: the latest is another one",
        )

    extra = {"f": print} if rank == 1 else {"f": 1}
    fails(
        "no plain value",
        ("CheckpointStateError",),
        "extra['f'] is a builtin",
        lambda: run.save(path, 2, extra=extra),
    )
    fails("other paths", ("RanksDifferError",), "save_checkpoint", lambda: run.save(path / str(rank), 2))
    fails("other steps", ("RanksDifferError",), "save_checkpoint", lambda: run.save(path, 2 + rank))
    fails("bad keep", ("UserInputError",), "keep=0", lambda: run.save(path, 2, keep=0))
    write = Disk.write_tensors
    if rank == 1:
        Disk.write_tensors = _FullDisk.write_tensors  # type: ignore[method-assign]
    try:
        fails("full disk", ("CheckpointWriteError",), "No space left", lambda: run.save(path, 2))
        run.save(path, 2, asynchronous=True)
        fails(
            "full disk in the background",
            ("CheckpointWriteError",),
            "No space left",
            rannc_backend.wait_for_checkpoint,
        )
    finally:
        Disk.write_tensors = write  # type: ignore[method-assign]
    rannc_backend.barrier()
    other = nn.Sequential(nn.Linear(2, 2)).to(context.dtype)
    fails(
        "another model",
        ("CheckpointMismatchError",),
        "has no",
        lambda: rannc_backend.load_checkpoint(path, other),
    )
    fails("nowhere", ("CheckpointNotFoundError",), "does not exist", lambda: run.load(path / "nowhere"))
    if rank == 0:
        torn = next(path.glob("step-00000001/model-*.safetensors"))
        torn.write_bytes(torn.read_bytes()[:-1])
    rannc_backend.barrier()
    fails("torn", ("CheckpointFileError",), "torn", lambda: run.load(path))
    _saved_values_are_those_of_the_call(context, run, path)


def _saved_values_are_those_of_the_call(context: Context, run: Run, path: Path) -> None:
    expected = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.save(path, 7, asynchronous=True, keep=1)
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.untyped_storage().nbytes() > parameter.element_size():
                parameter.zero_()
    saved: Path = run.save(path, 8, asynchronous=True, keep=2)
    context.findings.that(
        rannc_backend.latest_checkpoint(path).name == "step-00000007", "the save before was not waited for"
    )
    rannc_backend.wait_for_checkpoint()
    context.findings.that(rannc_backend.latest_checkpoint(path) == saved, f"the latest is not {saved}")
    if context.rank == 0:
        _equal(context, CheckpointReader(path / "step-00000007").state_dict(), expected)


def _equal(context: Context, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        context.findings.that(torch.equal(actual[name], value), f"{name} was changed by a later step")
