"""A save that ends at any point leaves a checkpoint that loads: the one before, or the new one, never a
mixture.

The disk here is worse than a killed process: what was not synced may be lost or cut, and renames that were
not synced undone.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rannc_backend.checkpoint.directory import Disk, publish
from rannc_backend.checkpoint.manifest import MANIFEST_FILE
from rannc_backend.checkpoint.reader import CheckpointReader
from tests.unit.rannc_backend.checkpoint.checkpoint_jobs import save, tensors

NUM_POINTS = 200
SHAPES = {f"layer{number}.weight": (4, number + 1) for number in range(6)}


class PowerLossError(BaseException):
    """Not an Exception: nothing may catch it and tidy up."""


class FailingDisk(Disk):
    """Ends at operation ``last`` (None: never), within it or after it, and loses some of what was not
    synced.
    """

    def __init__(self, last: int | None = None, seed: int = 0) -> None:
        self.num_operations = 0
        self._last, self._random = last, random.Random(seed)
        self._unsynced: dict[Path, None] = {}
        self._renames: list[tuple[Path, Path]] = []

    def make_directory(self, path: Path) -> None:
        self._begin(lambda: None)
        super().make_directory(path)

    def write(self, path: Path, content: bytes) -> None:
        self._unsynced[path] = None
        self._begin(lambda: path.write_bytes(content[: self._random.randrange(len(content) + 1)]))
        super().write(path, content)

    def write_tensors(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self._unsynced[path] = None
        self._begin(lambda: path.write_bytes(b"\0" * self._random.randrange(100)))
        super().write_tensors(path, tensors)

    def sync(self, path: Path) -> None:
        self._begin(lambda: None)
        # No fsync: that costs milliseconds, and what it promises is kept by the bookkeeping here.
        self._unsynced.pop(path, None)
        self._renames = [rename for rename in self._renames if rename[1].parent != path]

    def rename(self, source: Path, destination: Path) -> None:
        self._begin(lambda: None)
        super().rename(source, destination)
        self._renames.append((source, destination))
        self._unsynced = {_moved(path, source, destination): None for path in self._unsynced}

    def remove(self, path: Path) -> None:
        self._begin(lambda: self._remove_some(path))
        super().remove(path)

    def _remove_some(self, path: Path) -> None:
        for entry in list(path.iterdir()) if path.is_dir() else []:
            if self._random.random() < 0.5:
                entry.unlink()

    def _begin(self, half: object) -> None:
        self.num_operations += 1
        if self._last is not None and self.num_operations > self._last:
            if self._random.random() < 0.5:
                half()  # type: ignore[operator]
            self._lose()
            raise PowerLossError

    def _lose(self) -> None:
        for source, destination in reversed(self._renames):
            if self._random.random() < 0.5 and destination.exists() and not source.exists():
                os.rename(destination, source)
                self._unsynced = {_moved(path, destination, source): None for path in self._unsynced}
        for path in self._unsynced:
            if path.exists() and self._random.random() < 0.7:
                content = path.read_bytes()
                path.write_bytes(content[: self._random.randrange(len(content) + 1)])


def _moved(path: Path, source: Path, destination: Path) -> Path:
    return destination / path.relative_to(source) if path.is_relative_to(source) else path


def save_step(path: Path, step: int, disk: Disk) -> None:
    first, second = tensors(step, **SHAPES), tensors(step + 1000, head=(3, 3), bias=(3,))
    save(path, [first, second], step=step, disk=disk, keep=2, file_bytes=100)


def loaded_step(path: Path) -> int:
    """The step of the latest checkpoint, all of whose tensors must be those of that step."""
    reader = CheckpointReader(path)
    expected = {**tensors(reader.step, **SHAPES), **tensors(reader.step + 1000, head=(3, 3), bias=(3,))}
    state = reader.state_dict()
    assert set(state) == set(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    return reader.step


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the checkpoints of steps 1 and 2."""
    path = tmp_path_factory.mktemp("before")
    for step in (1, 2):
        save_step(path, step, FailingDisk())
    return path


def num_operations_of_a_save(before: Path, path: Path) -> int:
    shutil.copytree(before, path)
    disk = FailingDisk()
    save_step(path, 3, disk)
    return disk.num_operations


def test_killed_at_200_random_points_of_saving(before: Path, tmp_path: Path) -> None:
    num_operations = num_operations_of_a_save(before, tmp_path / "count")
    assert num_operations >= 30
    chosen = random.Random(5)
    loaded = []
    for seed in range(NUM_POINTS):
        path = tmp_path / str(seed)
        shutil.copytree(before, path)
        with pytest.raises(PowerLossError):
            save_step(path, 3, FailingDisk(chosen.randrange(num_operations), seed))
        loaded.append(loaded_step(path))
        if seed % 10 == 0:
            # And the job goes on from there.
            save_step(path, 4, FailingDisk())
            assert loaded_step(path) == 4
    assert set(loaded) == {2, 3}, "the points do not lie on both sides of the rename"


def test_the_test_sees_files_that_are_not_synced(
    before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: without syncs some point leaves a checkpoint that does not load."""
    monkeypatch.setattr(FailingDisk, "sync", lambda self, path: self._begin(lambda: None))
    assert _torn(before, tmp_path) > 0


def test_the_test_sees_a_save_that_writes_in_place(
    before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: a checkpoint that gets its name before its manifest is renamed into place, and then its
    content.
    """

    def early(temporary: Path, name: str, disk: Disk) -> Path:
        os.rename(temporary, temporary.with_name(name))
        place = temporary.with_name(name) / MANIFEST_FILE
        content = place.read_bytes()
        place.unlink()
        disk.write(place, content)
        return publish(temporary.with_name(name), name, disk)

    monkeypatch.setattr("rannc_backend.checkpoint.directory.publish", early)
    assert _torn(before, tmp_path) > 0


def _torn(before: Path, path: Path) -> int:
    num_operations = num_operations_of_a_save(before, path / "count")
    torn = 0
    for seed in range(24):
        place = path / str(seed)
        shutil.copytree(before, place)
        with pytest.raises(PowerLossError):
            save_step(place, 3, FailingDisk(num_operations - 1 - seed % 8, seed))
        try:
            loaded_step(place)
        except Exception:  # noqa: BLE001 - whatever a torn checkpoint leads to
            torn += 1
    return torn


def _save_in_a_loop(path: Path, step: int, said: int) -> None:
    """The child's side: says each step when it is saved."""
    try:
        while True:
            save_step(path, step, Disk())
            os.write(said, b"%d\n" % step)
            step += 1
    finally:
        os._exit(1)


def test_killed_for_real(tmp_path: Path) -> None:
    """A process that saves in a loop is killed after a random time: what it said to have saved is there, or
    what came after.
    """
    chosen = random.Random(7)
    step = 1
    for _ in range(8):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _save_in_a_loop(tmp_path, step, write)
        os.close(write)
        with os.fdopen(read) as lines:
            said = int(lines.readline())
            time.sleep(chosen.random() * 0.05)
            os.kill(child, signal.SIGKILL)
            last = max([said, *(int(line) for line in lines.read().split())])
        os.waitpid(child, 0)
        step = loaded_step(tmp_path)
        assert step in (last, last + 1)
        step += 1
