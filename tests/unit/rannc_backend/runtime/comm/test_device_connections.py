"""A number of hardware queues that was set too late, or too low, is said, once and with what to do."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from rannc_backend.errors import OptionValueError
from rannc_backend.runtime.comm.device_connections import (
    DEVICES_VARIABLE,
    VARIABLE,
    WANTED,
    connections_problem,
    set_connections,
    set_visible_devices,
)
from rannc_backend.runtime.job import bootstrap


def test_it_is_set_in_time_or_said() -> None:
    early: dict[str, str] = {}
    assert set_connections(early, context_exists=False) == "" and early == {VARIABLE: str(WANTED)}
    late: dict[str, str] = {}
    problem = set_connections(late, context_exists=True)
    assert "before torch.compile" in problem and f"export {VARIABLE}=32 before the ranks start" in problem
    assert late == {VARIABLE: str(WANTED)}, "for child processes"


@pytest.mark.parametrize("context_exists", [False, True])
def test_what_the_user_has_set_stays(context_exists: bool) -> None:
    cases = (
        ("32", ""),
        ("64", ""),
        ("", ""),
        ("1", "is 1: streams beyond"),
        ("x" * 10**5, "is no number"),
        ("٣", "is no number"),
    )
    for value, words in cases:
        environ = {VARIABLE: value}
        problem = set_connections(environ, context_exists=context_exists)
        assert environ == {VARIABLE: value} and problem == connections_problem(environ) and len(problem) < 400
        assert (words in problem) if words else problem == ""


def test_the_first_step_says_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        bootstrap._HOLDER, "world", replace(bootstrap.start(), device_problem="streams share queues")
    )
    torch._dynamo.reset()
    model = torch.compile(nn.Linear(3, 3), backend="rannc", options={"stage_compiler": "eager"})
    with caplog.at_level(logging.WARNING, logger="rannc_backend"):
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
    assert [record.getMessage() for record in caplog.records].count("streams share queues") == 1


def test_visible_devices_are_set_until_cuda_starts() -> None:
    environ = {DEVICES_VARIABLE: "0,1,2"}
    set_visible_devices("", environ, context_exists=True)
    set_visible_devices("0,1,2", environ, context_exists=True)
    set_visible_devices("1", environ, context_exists=False)
    assert environ == {DEVICES_VARIABLE: "1"}
    with pytest.raises(OptionValueError, match=f"export {DEVICES_VARIABLE}=2"):
        set_visible_devices("2", environ, context_exists=True)
    assert environ == {DEVICES_VARIABLE: "1"}
