"""The watch over what is queued on a device: what is done, what has failed, what does not move."""

from __future__ import annotations

import pytest

from rannc_backend.errors import CommunicationError
from rannc_backend.runtime.comm.device_watch import DeviceWatch
from tests.fake_device import Reporter


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_message_that_does_not_move_is_reported_with_its_place() -> None:
    reporter, clock = Reporter(), FakeClock()
    watch = DeviceWatch(reporter, rank=1, limit_seconds=60, clock=clock, start_thread=False)
    done = {"a": False, "b": False}
    watch.add(lambda: done["a"], (0,), "receive of '0F1'")
    watch.add(lambda: done["b"], (2,), "send of '1F2'")
    watch.look()
    assert reporter.waits == [(0,)]
    clock.now = 50
    done["a"] = True
    watch.look()
    assert reporter.waits == [(0,), (2,)]
    clock.now = 109
    watch.look()
    assert not reporter.errors, "the limit counts from the last message that moved"
    clock.now = 111
    watch.look()
    (error,) = reporter.errors
    expected = (
        "send of '1F2', queued in: step 3, stage 1, micro-batch 2, did not complete in time (limit 60 s)"
    )
    assert str(error).splitlines()[:2] == [expected, "  at rank 1, with rank 2"]


def test_a_broken_connection_is_reported() -> None:
    def broken() -> bool:
        raise RuntimeError("NCCL error: remote process exited")

    reporter = Reporter()
    watch = DeviceWatch(reporter, rank=0, limit_seconds=60, start_thread=False)
    watch.add(broken, (1,), "receive of '1B0'")
    watch.look()
    assert "receive of '1B0'" in str(reporter.errors[0]) and "remote process exited" in str(
        reporter.errors[0]
    )


def test_the_watch_looks_by_itself_and_ends() -> None:
    reporter = Reporter()
    watch = DeviceWatch(reporter, rank=0, limit_seconds=0.1)
    watch.add(lambda: False, (1,), "receive of '1B0'")
    assert watch._thread is not None
    watch._thread.join(10)
    assert not watch._thread.is_alive() and len(reporter.errors) == 1
    watch.close()


def test_a_watch_that_cannot_ask_ends_the_job() -> None:
    """It would let later messages hang without a word."""
    reporter = Reporter()
    watch = DeviceWatch(reporter, rank=0, limit_seconds=60)
    nothing: object = None
    watch.add(lambda: nothing.is_completed(), (1,), "all-reduce")  # type: ignore[attr-defined]
    assert watch._thread is not None
    watch._thread.join(10)
    assert not watch._thread.is_alive()
    (error,) = reporter.errors
    assert "cannot be watched: AttributeError" in str(error)
    with pytest.raises(CommunicationError, match="cannot be watched"):
        watch.raise_failure()
    watch.close()
