"""Checkpoints as a training script calls them: `save_checkpoint`, `load_checkpoint`, and what belongs to
them.

In: a model, compiled or not, with its optimizers, schedulers and scaler. Out: directories on a file system
that all ranks share, and their content back in the model, on any number of ranks. Collective but where a
function says otherwise. docs/checkpoints.md has the rules.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rannc_backend.checkpoint.background import BackgroundSave, guarded
from rannc_backend.checkpoint.directory import Disk, find_checkpoint
from rannc_backend.checkpoint.loading import Loading
from rannc_backend.checkpoint.lock import DirectoryLocks
from rannc_backend.checkpoint.manifest import PLAN_FILE
from rannc_backend.checkpoint.model_state import ModelTensors
from rannc_backend.checkpoint.reader import CheckpointReader, TensorReader
from rannc_backend.checkpoint.saving import (
    PART_LIMIT_SECONDS,
    SaveJob,
    Snapshot,
    begin_directory,
    require_seen,
)
from rannc_backend.checkpoint.snapshot import listed, take_snapshot
from rannc_backend.errors import (
    CheckpointFileError,
    CheckpointStateError,
    CheckpointWriteError,
    RanksDifferError,
    RanncError,
    UserInputError,
    rebuild_error,
)
from rannc_backend.errors.base import shown
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.step.graph_settings import StepCounter
from rannc_backend.runtime.torch_internals import root_of
from rannc_backend.runtime.world import World
from rannc_backend.session_registry import REGISTRY

logger = logging.getLogger(__name__)

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None

BACKGROUND = BackgroundSave()
"""The save beside training: a process has one at most, whatever the model."""

LOCKS = DirectoryLocks()
"""The directories that this process saves in: a lock is the process's, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """What `load_checkpoint` has loaded.

    Attributes:
        path: The checkpoint's own directory.
        step: The step after which it was saved.
        world_size: Number of ranks that saved it.
        extra: What `save_checkpoint` was given as ``extra``.
        plan_file: The plan it ran under, for ``options={"load_deployment": True, "deployment_file": ...}``;
            None if unplanned.
        missing, unexpected: Names that only the model, or only the checkpoint has; empty if ``strict``.
    """

    path: Path
    step: int
    world_size: int
    extra: Any
    plan_file: Path | None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    scheduler: Any = None,
    *,
    scaler: Any = None,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Path:
    """Saves the state of a training run as ``<path>/step-<step>``. Collective.

    All ranks must see the same file system; each writes what it owns. The checkpoint gets its name when all
    of it is on disk, so a crash at any point leaves earlier checkpoints intact.

    Args:
        path: Directory of this run's checkpoints; created if missing.
        model: Compiled or not, planned or not.
        optimizer: An optimizer, or several in a list; None saves none.
        scheduler: An object with ``state_dict`` and ``load_state_dict`` over plain values, or several in a
            list.
        scaler: A `torch.amp.GradScaler`.
        step: Number that names the checkpoint; None: the number of calls of the compiled model so far.
        extra: Plain values of your own (epoch, position in the data), which `load_checkpoint` returns.
        keep: Number of checkpoints to leave in ``path``, the latest ones; None: all.
        asynchronous: Copy the tensors to host memory and return while a thread writes. The next save and
            the end of the process wait for it. The next call raises its error, see `wait_for_checkpoint`.

    Returns:
        Where the checkpoint is, or will be.

    Raises:
        CheckpointWriteError: A rank could not write, now or in the preceding background save, or another job
            saves in ``path``.
        CheckpointStateError: Some state is neither a tensor nor a plain value.
        UserInputError: ``keep`` or ``step`` is out of range.
    """
    world = bootstrap.start()
    world.monitor.phase("saving a checkpoint")
    _check_numbers(keep, step)
    problem = BACKGROUND.finish()
    snapshot: Snapshot | None = None
    if problem is None:
        try:
            snapshot = _snapshot(world, model, optimizer, scheduler, scaler, step, extra)
        except RanncError as error:
            problem = error
    _share(
        world, "save_checkpoint", problem, [str(path), snapshot.step if snapshot else 0, keep, asynchronous]
    )
    assert snapshot is not None, "neither a snapshot nor a problem"
    temporary, name, serial = _begin(world, Path(path), snapshot.step)
    job = SaveJob(
        rank=world.rank,
        world_size=world.size,
        temporary=temporary,
        name=name,
        serial=serial,
        keep=keep,
        snapshot=snapshot,
        tensors=snapshot.copied() if asynchronous else snapshot.tensors,
    )
    if asynchronous:
        BACKGROUND.start(job, world.monitor)
    else:
        _save_now(world, job)
    world.monitor.phase("between steps")
    return job.path


def wait_for_checkpoint() -> None:
    """Waits until the background save of every rank is done. Collective.

    Raises:
        CheckpointWriteError: It failed, on this rank or another.
    """
    world = bootstrap.start()
    _share(world, "wait_for_checkpoint", BACKGROUND.finish(), limit_seconds=PART_LIMIT_SECONDS)


def latest_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The latest checkpoint in a directory. Not collective.

    Args:
        path: A directory of checkpoints, or a checkpoint, which is then returned.

    Returns:
        Directory of the checkpoint.

    Raises:
        CheckpointNotFoundError: There is no complete checkpoint.
    """
    return find_checkpoint(path)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    scheduler: Any = None,
    *,
    scaler: Any = None,
    strict: bool = True,
    random_state: bool = True,
) -> LoadedCheckpoint:
    """Loads what `save_checkpoint` saved, on any number of ranks and under any plan. Collective.

    Before the first call of the compiled model every rank loads the whole model; optimizer state is read when
    the plan says which parameters this rank owns. Nothing is changed unless names, shapes and dtypes fit on
    all ranks.

    Args:
        path: A checkpoint, or a directory of checkpoints, of which the latest is loaded.
        model, optimizer, scheduler, scaler: As they were given to `save_checkpoint`. None loads none.
        strict: If False, load the parameters and buffers that both model and checkpoint have.
        random_state: Restore the random generators too. Ranks that the saving job did not have take rank 0's.

    Returns:
        Step, extra values and the file of the plan, as a ``LoadedCheckpoint``.

    Raises:
        CheckpointNotFoundError: There is no complete checkpoint.
        CheckpointFileError, CheckpointVersionError: It is truncated, was changed, or is of a later release.
        CheckpointMismatchError: It does not fit the model or the optimizers.
    """
    world = bootstrap.start()
    world.monitor.phase("loading a checkpoint")
    _share(
        world,
        "load_checkpoint",
        BACKGROUND.finish(),
        [str(path), strict, random_state],
        limit_seconds=PART_LIMIT_SECONDS,
    )
    root = root_of(model)
    loading = _loading(world, model, optimizer, scheduler, scaler)
    place = _find(world, path)
    _together(
        world,
        "the checkpoint's description",
        lambda: loading.check(lambda _: CheckpointReader(place), root, strict=strict),
    )
    _together(world, "the checkpoint's tensors", loading.load_tensors)
    _together(world, "the checkpoint's further state", lambda: loading.load_rest(random_state=random_state))
    _finish_when_planned(root, loading)
    world.monitor.phase("between steps")
    reader = loading.reader
    assert isinstance(reader, CheckpointReader), "opened above"
    if world.rank == 0:
        logger.info(
            "loaded the checkpoint %s of step %d, saved by %d rank(s)",
            reader.path,
            reader.step,
            reader.world_size,
        )
    return LoadedCheckpoint(
        path=reader.path,
        step=reader.step,
        world_size=reader.world_size,
        extra=reader.extra,
        plan_file=reader.path / PLAN_FILE if PLAN_FILE in reader.manifest.files else None,
        missing=loading.missing,
        unexpected=loading.unexpected,
    )


def load_other(
    what: str,
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers,
    open_reader: Callable[[ModelTensors], TensorReader],
    *,
    strict: bool,
    same_dtypes: bool,
    before_tensors: Callable[[TensorReader], None] = lambda _: None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Load a checkpoint of another library, see `rannc_backend.integrations`. Collective.

    Args:
        what: The function that the user has called.
        open_reader, same_dtypes: As `Loading.check`.
        before_tensors: Called when everything fits, before anything is read.

    Returns:
        Names that only the model has, and those that only the checkpoint has.
    """
    world = bootstrap.start()
    world.monitor.phase("loading a checkpoint")
    _share(world, what, BACKGROUND.finish(), [str(path), strict], limit_seconds=PART_LIMIT_SECONDS)
    root = root_of(model)
    loading = _loading(world, model, optimizer, None, None)
    _together(
        world,
        "the checkpoint's description",
        lambda: loading.check(open_reader, root, strict=strict, same_dtypes=same_dtypes),
    )
    _together(world, "the model's buffers", lambda: before_tensors(loading.reader))
    _together(world, "the checkpoint's tensors", loading.load_tensors)
    _finish_when_planned(root, loading)
    world.monitor.phase("between steps")
    return loading.missing, loading.unexpected


def share_problem(
    world: World, what: str, problem: RanncError | None, given: Any = None, payload: Any = None
) -> list[Any]:
    """Raise this rank's problem, else the first rank's that has one; else every rank's ``payload``. What was
    ``given`` to ``what`` must be the same on all ranks. Collective.
    """
    _share(world, what, problem, given, limit_seconds=PART_LIMIT_SECONDS)
    return world.control.allgather(payload, what=what, limit_seconds=PART_LIMIT_SECONDS)


def _loading(world: World, model: nn.Module, optimizer: Optimizers, scheduler: Any, scaler: Any) -> Loading:
    session = REGISTRY.of(model)
    return Loading(
        world=world,
        table=None if session is None else session.table,
        deferred_values=REGISTRY.deferred_values,
        optimizers=listed(optimizer),
        schedulers=listed(scheduler),
        scaler=scaler,
    )


def _check_numbers(keep: int | None, step: int | None) -> None:
    for name, value, least in (("keep", keep, 1), ("step", step, 0)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63
        ):
            raise UserInputError(
                f"{name}={value!r} was given to save_checkpoint",
                cure=f"give an integer of at least {least}, or None.",
            )


def _snapshot(
    world: World,
    model: nn.Module,
    optimizer: Optimizers,
    scheduler: Any,
    scaler: Any,
    step: int | None,
    extra: Any,
) -> Snapshot:
    session, root = REGISTRY.of(model), root_of(model)
    if any(
        isinstance(follower, _AfterPlanning) and follower.loading
        for follower in REGISTRY.followers.get(root, ())
    ):
        raise CheckpointStateError(
            "a checkpoint was loaded, and the model has not been called since: the optimizers' state is read "
            "at that call",
            cure="call the compiled model once before save_checkpoint.",
        )
    counter = StepCounter() if session is None else session.counter
    return take_snapshot(
        world,
        root,
        None if session is None else session.table,
        counter,
        "" if session is None or session.plan is None else session.plan.to_json(),
        optimizers=listed(optimizer),
        schedulers=listed(scheduler),
        scaler=scaler,
        step=counter.number if step is None else step,
        extra=extra,
    )


@dataclass(slots=True, eq=False)
class _AfterPlanning:
    """Finishes a load when the model is planned; see `session.Follower`."""

    loading: Loading | None

    def parameters_moved(self, table: ParameterTable, before: Mapping[str, tuple[int, ...]] | None) -> None:
        loading, self.loading = self.loading, None
        session = REGISTRY.of(table.module())
        if loading is not None and session is not None:
            loading.finish(table, session.counter)


def _finish_when_planned(root: nn.Module, loading: Loading) -> None:
    followers = REGISTRY.followers.setdefault(root, [])
    # In place: the session has the same list.
    followers[:] = [follower for follower in followers if not isinstance(follower, _AfterPlanning)]
    session = REGISTRY.of(root)
    if session is not None and session.table is not None:
        loading.finish(session.table, session.counter)
    else:
        followers.append(_AfterPlanning(loading))


def _begin(world: World, path: Path, step: int) -> tuple[Path, str, int]:
    """Rank 0 makes the directory to write in, and every rank sees it."""
    begun: list[Any] = []
    problem, what = None, f"no checkpoint can be written in {shown(str(path))}"
    if world.rank == 0:

        def begin() -> None:
            LOCKS.hold(path)
            begun.extend(begin_directory(path, step, Disk()))

        problem = guarded(what, begin)
    words = world.control.broadcast([begun, *_words(problem)], what="the directory of a checkpoint")
    _raise_zeros(problem, words[1:])
    temporary, name, serial = words[0]
    place = path / temporary
    problem = guarded(what, lambda: require_seen(place))
    _share(world, "the directory of a checkpoint", problem)
    return place, name, serial


def _save_now(world: World, job: SaveJob) -> None:
    what = f"the checkpoint {str(job.path)!r} was not written"
    try:
        _share(world, "writing a checkpoint", guarded(what, job.write_part), limit_seconds=PART_LIMIT_SECONDS)
        problem = guarded(what, job.publish) if world.rank == 0 else None
        words = world.control.broadcast(
            _words(problem), what="the end of a checkpoint", limit_seconds=PART_LIMIT_SECONDS
        )
        _raise_zeros(problem, words)
    except CheckpointWriteError:
        if world.rank == 0:
            guarded("removing what was written", lambda: job.disk.remove(job.temporary))
        raise


def _find(world: World, path: str | os.PathLike[str]) -> Path:
    """The checkpoint that rank 0 finds; the others must not each choose their own."""
    found: list[str] = []
    problem = None
    if world.rank == 0:
        problem = guarded(
            "the checkpoint cannot be read",
            lambda: found.append(str(find_checkpoint(path))),
            CheckpointFileError,
        )
    words = world.control.broadcast([found, *_words(problem)], what="which checkpoint")
    _raise_zeros(problem, words[1:])
    return Path(words[0][0])


def _together(world: World, what: str, action: Callable[[], Any]) -> None:
    """Do it on every rank; if one cannot, all raise."""
    problem = guarded(f"{what} cannot be read", action, CheckpointFileError)
    _share(world, what, problem, limit_seconds=PART_LIMIT_SECONDS)


def _share(
    world: World,
    what: str,
    problem: RanncError | None,
    payload: Any = None,
    *,
    limit_seconds: float | None = None,
) -> None:
    """Raise this rank's problem, else the first rank's that has one. Collective."""
    answers = agree(world, what, [payload, *_words(problem)], limit_seconds=limit_seconds)
    if problem is not None:
        raise problem
    for rank, (_, error_class, text) in enumerate(answers):
        if error_class:
            raise rebuild_error(error_class, f"rank {rank}: {text}")
    payloads = [repr(answer[0]) for answer in answers]
    if len(set(payloads)) > 1:
        raise RanksDifferError(f"arguments of {what}", value_by_rank=payloads)


def _words(problem: RanncError | None) -> list[str]:
    return ["", ""] if problem is None else [type(problem).__name__, str(problem)]


def _raise_zeros(problem: RanncError | None, words: Sequence[str]) -> None:
    """Raise rank 0's problem: on rank 0 the error itself, elsewhere one of its class and words."""
    if problem is not None:
        raise problem
    if words[0]:
        raise rebuild_error(words[0], f"rank 0: {words[1]}")
