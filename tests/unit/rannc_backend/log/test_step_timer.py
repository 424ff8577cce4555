"""What is told of the steps of planning, to whom, and in which words."""

from __future__ import annotations

import contextlib
import logging

import pytest

from rannc_backend.log.step_timer import Step, StepTimer, log_step_timer


def test_a_step_is_shown_while_it_runs_and_told_when_it_is_done():
    events = []

    @contextlib.contextmanager
    def show(name):
        events.append(f"begin {name}")
        yield
        events.append(f"end {name}")

    with StepTimer(log=events.append, show=show).step("capture") as details:
        details += ["7 nodes", "symbolic batch"]
    assert events[:2] == ["begin capture", "end capture"]
    (step,) = events[2:]
    assert (step.name, step.detail) == ("capture", "7 nodes, symbolic batch") and 0 <= step.seconds < 60


def test_a_step_that_fails_is_not_told():
    told = []
    with pytest.raises(KeyError), StepTimer(log=told.append).step("capture"):
        raise KeyError("x")
    assert told == []


@pytest.mark.parametrize(("verbose", "level"), [(True, logging.INFO), (False, logging.DEBUG)])
def test_the_option_verbose_decides_at_which_level_the_log_is_told(caplog, verbose, level):
    caplog.set_level(logging.DEBUG, logger="rannc_backend.log.step_timer")
    with log_step_timer(verbose=verbose).step("analysis"):
        pass
    (record,) = [record for record in caplog.records if record.name == "rannc_backend.log.step_timer"]
    assert record.levelno == level and record.getMessage().startswith("analysis: 0.0 s")


def test_seconds_are_told_behind_the_detail():
    assert str(Step(name="search", detail="3 stages", seconds=1.25)) == "search: 3 stages, 1.2 s"
