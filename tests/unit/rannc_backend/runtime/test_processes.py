"""Signals go to the process that was meant, or to none."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rannc_backend.runtime import processes
from rannc_backend.runtime.processes import ProcessMark, mark_of, send_signal, wait_until_gone


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen(["sleep", "60"])
    yield made
    made.kill()
    made.wait()


@pytest.mark.parametrize("with_descriptors", [True, False])
def test_the_process_of_a_mark(
    child: subprocess.Popen[bytes], with_descriptors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_descriptors:
        monkeypatch.delattr(os, "pidfd_open")
    mark = mark_of(child.pid)
    assert mark.is_living and mark.start_ticks > 0
    others = [
        dataclasses.replace(mark, start_ticks=mark.start_ticks + 1),
        dataclasses.replace(mark, start_ticks=0),
        dataclasses.replace(mark, space=""),
        dataclasses.replace(mark, space=mark.space + "0"),
        dataclasses.replace(mark, pid=2**30),
        dataclasses.replace(mark, pid=2**70),
    ]
    assert not any(other.is_living or send_signal(other, signal.SIGKILL) for other in others)
    assert child.poll() is None
    assert send_signal(mark, signal.SIGTERM) and child.wait(5) == -signal.SIGTERM
    assert not mark.is_living and not send_signal(mark, signal.SIGKILL)


def test_a_process_of_another_user_is_nobodys(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = mark_of(child.pid)
    monkeypatch.setattr(processes.os, "geteuid", lambda: os.getuid() + 1)
    assert not mark.is_living and not send_signal(mark, signal.SIGKILL) and child.poll() is None


def test_another_numbering_is_another_space() -> None:
    """A process in a container: its numbers count there."""
    code = f"import sys; sys.path[:0] = {sys.path}; from rannc_backend.runtime.processes import space_of_numbers as s; print(s())"
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode and "Operation not permitted" in done.stderr:
        pytest.skip("namespaces are not allowed here")
    assert done.returncode == 0, done.stderr
    there, here = done.stdout.strip(), processes.space_of_numbers()
    assert there and there != here and there.split()[0] == here.split()[0]


def test_waiting_for_the_end_of_processes(child: subprocess.Popen[bytes]) -> None:
    mark, begin = mark_of(child.pid), time.monotonic()
    wait_until_gone([mark], 0.2)
    assert 0.2 <= time.monotonic() - begin < 2
    child.kill()
    child.wait()
    wait_until_gone([mark, ProcessMark(pid=1, start_ticks=0, space="")], 60)
    assert time.monotonic() - begin < 10
