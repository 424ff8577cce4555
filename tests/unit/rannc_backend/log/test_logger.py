"""Who is heard: rank 0 at "info", the others from "warning" on, and each `say_once` message once."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from rannc_backend.errors import OptionValueError
from rannc_backend.log.logger import ROOT_LOGGER, say_once, setup_logging
from tests.unit.rannc_backend.log.log_harness import fresh_logger


@pytest.mark.parametrize(
    ("rank", "environ", "heard"),
    [
        (0, {}, ["info", "warning"]),
        (1, {}, ["warning"]),
        (0, {"RANNC_LOG_LEVEL": "warning"}, ["warning"]),
        (1, {"RANNC_LOG_LEVEL": "DEBUG"}, ["debug", "info", "warning"]),
        (1, {"RANNC_LOG_LEVEL": "info"}, ["warning"]),
        (0, {"RANNC_LOG_LEVEL": "error"}, []),
    ],
)
def test_who_is_heard(
    capsys: pytest.CaptureFixture[str], rank: int, environ: dict[str, str], heard: list[str]
) -> None:
    with fresh_logger():
        setup_logging(rank, environ)
        child = logging.getLogger(f"{ROOT_LOGGER}.part")
        child.debug("a debug\nb")
        child.info("a info\nb")
        child.warning("a warning\nb")
        lines = capsys.readouterr().err.splitlines()
        assert [line.split()[-1] for line in lines[::2]] == heard
        assert all(line.startswith(f"[rannc rank {rank}] ") for line in lines)


def test_setup_again_changes_the_rank_and_adds_no_handler(capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_logger() as logger:
        setup_logging(0, {})
        setup_logging(3, {})
        logger.warning("careful")
        assert capsys.readouterr().err == "[rannc rank 3] warning: careful\n"


def test_the_users_handlers_and_level_win(capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_logger() as logger:
        logger.setLevel(logging.ERROR)
        setup_logging(0, {})
        assert logger.level == logging.ERROR
        logging.getLogger().handlers = [logging.NullHandler()]
        logger.error("seen by the user's handlers only")
        assert capsys.readouterr().err == ""


def test_a_bad_level_is_refused() -> None:
    with fresh_logger():
        with pytest.raises(OptionValueError, match="RANNC_LOG_LEVEL"):
            setup_logging(0, {"RANNC_LOG_LEVEL": "loud"})


def test_say_once(capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_logger():
        setup_logging(0, {})
        voice = logging.getLogger(f"{ROOT_LOGGER}.voice")
        for seconds in (1, 2):
            say_once(voice, "it costs %d s", seconds)
        say_once(voice, "another thing", level=logging.WARNING)
        voice.info("it costs %d s", 3)
        assert capsys.readouterr().err.splitlines() == [
            "[rannc rank 0] it costs 1 s",
            "[rannc rank 0] warning: another thing",
            "[rannc rank 0] it costs 3 s",
        ]


# torch._logging is private: that it finds a package by its name, and whose formatter its handlers have, was
# seen on torch 2.13.
def test_torch_logs_takes_the_place_of_our_handler() -> None:
    code = (
        "import logging, os, torch\n"
        "from rannc_backend.log.logger import setup_logging\n"
        "setup_logging(0, os.environ)\n"
        "setup_logging(1, os.environ)\n"
        "logging.getLogger('rannc_backend.planner.search.search').debug('a cell')\n"
        "logging.getLogger('rannc_backend.session').info('a plan')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_LOGS": "+rannc_backend"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if "a cell" in line or "a plan" in line]
    assert [line.rsplit("] ")[-1] for line in lines] == ["a cell", "a plan"]
    assert "[rannc rank" not in result.stderr
