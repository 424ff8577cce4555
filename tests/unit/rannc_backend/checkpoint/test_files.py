"""Files of a checkpoint: one mode, no way out by links, one job at a time; each against another process where
that matters.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rannc_backend
from rannc_backend.checkpoint import lock
from rannc_backend.checkpoint.directory import Disk, find_checkpoint
from rannc_backend.checkpoint.lock import LOCK_FILE, DirectoryLocks
from rannc_backend.checkpoint.manifest import INDEX_FILE, MANIFEST_FILE, PLAN_FILE
from rannc_backend.checkpoint.reader import CheckpointReader
from rannc_backend.errors import CheckpointFileError, CheckpointNotFoundError, CheckpointWriteError
from tests.unit.rannc_backend.checkpoint.checkpoint_jobs import save, tensors
from tests.unit.rannc_backend.ir.sample_plans import sample_plan

SHARES = [tensors(1, weight=(3, 2)), tensors(2, bias=(3,))]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_all_files_have_the_mode_of_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        place = save(tmp_path / "run", SHARES, plan_text=sample_plan().to_json())
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()}
    assert {
        MANIFEST_FILE,
        INDEX_FILE,
        PLAN_FILE,
        "model-00000-00000.safetensors",
        "model-00001-00000.safetensors",
    } <= modes.keys()
    assert set(modes.values()) == {0o666 & ~umask}, {name: oct(mode) for name, mode in modes.items()}
    assert stat.S_IMODE(place.stat().st_mode) == 0o777 & ~umask


@pytest.mark.parametrize("name", [MANIFEST_FILE, INDEX_FILE, PLAN_FILE, "model-00000-00000.safetensors"])
def test_links_do_not_lead_out_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    place = save(tmp_path / "run", SHARES, plan_text=sample_plan().to_json())
    outside = tmp_path / f"outside-{name}"
    (place / name).rename(outside)
    (place / name).symlink_to(outside)

    def read() -> None:
        reader = CheckpointReader(place)
        reader.plan()
        reader.state_dict()

    with pytest.raises(CheckpointFileError, match=f"{name}.*leads out of the checkpoint"):
        read()
    with pytest.raises(CheckpointFileError, match="leads out of the checkpoint|torn"):
        (place / name).unlink()
        (place / name).symlink_to("/proc/self/environ")
        read()
    # Within the checkpoint a link changes nothing, and neither does one to a whole checkpoint.
    (place / name).unlink()
    outside.rename(place / "inside")
    (place / name).symlink_to("inside")
    (tmp_path / "latest").symlink_to(place)
    assert find_checkpoint(tmp_path / "latest") == tmp_path / "latest"
    assert torch.equal(CheckpointReader(tmp_path / "latest").tensor("bias"), SHARES[1]["bias"])


def test_saving_follows_no_links(tmp_path: Path) -> None:
    """Neither one that lies where a file is to be written, nor a checkpoint that is one and has to go."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "new").symlink_to(precious)
    for write in (
        lambda: Disk().write(tmp_path / "new", b"x"),
        lambda: Disk().write_tensors(tmp_path / "new", SHARES[0]),
    ):
        with pytest.raises(FileExistsError):
            write()
    assert precious.read_text() == "mine"
    other = save(tmp_path / "other", SHARES, step=1)
    run = tmp_path / "run"
    run.mkdir()
    (run / other.name).symlink_to(other)
    save(run, SHARES, step=2, keep=1)
    assert not (run / other.name).is_symlink() and CheckpointReader(other).step == 1


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    os.symlink("loop", tmp_path / "loop")
    (tmp_path / "with_pipe").mkdir()
    os.mkfifo(tmp_path / "with_pipe" / MANIFEST_FILE)
    for name in ("pipe", "file", "loop", "nowhere", "x" * 5000, "a\0b", "\ud800", "file/below"):
        with pytest.raises(
            CheckpointNotFoundError, match="give the directory that was given to save_checkpoint"
        ):
            rannc_backend.latest_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointFileError, match="it is a pipe, not a file"):
        CheckpointReader(tmp_path / "with_pipe")
    for name in ("file", "pipe", "loop", "a\0b", "x" * 5000, "\ud800", "file/below"):
        with pytest.raises(CheckpointWriteError, match="What to change"):
            rannc_backend.save_checkpoint(tmp_path / name, torch.nn.Linear(1, 1))


def in_a_child(action: Callable[[], None]) -> tuple[int, int]:
    """Do it in another process, which then waits; gives its number, and the descriptor from which a byte says
    that it is done.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            os.write(write, b"y")
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    return child, read


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_second_job_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    (tmp_path / "run").mkdir()
    unfinished = tmp_path / "run" / ".step-00000007.tmp-0a0b0c0d"
    child, said = in_a_child(lambda: (DirectoryLocks().hold(tmp_path / "run"), unfinished.mkdir()))
    try:
        assert os.read(said, 1) == b"y"
        with pytest.raises(
            CheckpointWriteError, match=f"another job saves checkpoints in .*process {child} on host"
        ) as caught:
            rannc_backend.save_checkpoint(tmp_path / "run", model)
        assert "directory of its own" in str(caught.value)
        assert unfinished.is_dir(), "the first job's unfinished save was removed"
        # By another name it is the same directory; another one is free.
        (tmp_path / "link").symlink_to("run")
        with pytest.raises(CheckpointWriteError, match="another job"):
            rannc_backend.save_checkpoint(tmp_path / "link", model, asynchronous=True)
        rannc_backend.save_checkpoint(tmp_path / "free", model)
    finally:
        end(child)
        os.close(said)
    # Killed, it holds nothing, although its file is there.
    assert (tmp_path / "run" / LOCK_FILE).exists()
    for step in range(3):
        rannc_backend.save_checkpoint(tmp_path / "run", model, step=step)
    assert not unfinished.exists() and find_checkpoint(tmp_path / "run").name == "step-00000002"


def test_a_forked_process_does_not_hold_what_its_parent_held(tmp_path: Path) -> None:
    """A data loader's worker that outlives its job."""
    locks = DirectoryLocks()
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        locks.hold(tmp_path)
        worker = os.fork()
        if worker == 0:
            signal.pause()
        os.write(write, worker.to_bytes(4, "big"))
        os._exit(0)
    worker = int.from_bytes(os.read(read, 4), "big")
    os.waitpid(parent, 0)
    try:
        locks.hold(tmp_path)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_whatever_the_lock_file_says() -> None:
    huge = b'{"pid": ' + b"9" * 5000 + b"}"
    for content in (b"", b"{}", b"[" * 5000, huge, b"\xff\0", b'{"pid": 1e999, "host": 1, "since": 2}'):
        assert lock._holder(content) == "it does not say which"
    assert (
        lock._holder(b'{"pid": 7, "host": "a\\u001b[2J", "since": "now"}')
        == "process 7 on host 'a\\x1b[2J' since 'now'"
    )


def test_file_systems_without_locks_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", none)
    with caplog.at_level(logging.WARNING):
        DirectoryLocks().hold(tmp_path)
    assert "has no locks (No locks available)" in caplog.text


def test_few_locks_are_kept(tmp_path: Path) -> None:
    locks = DirectoryLocks()
    for number in range(20):
        locks.hold(tmp_path / str(number))
        locks.hold(tmp_path / str(number))
    assert len(locks._held) == 8
    for descriptor in locks._held.values():
        os.close(descriptor)
