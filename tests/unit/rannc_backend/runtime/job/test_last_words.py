"""What a rank says of the error that ends it, and which of a host's ranks says it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rannc_backend.errors import GraphBreakError, InternalError, OptionValueError, RanncError
from rannc_backend.runtime.job import last_words
from rannc_backend.runtime.job.monitor import clip_trace


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_parts() -> None:
    own = last_words.parts_of(raised(GraphBreakError("print", location="m.py:3, in forward")))
    assert (
        own.cause.startswith("GraphBreakError: ")
        and own.place == "m.py:3, in forward"
        and own.cure.startswith("take the statement")
    )
    option = last_words.parts_of(OptionValueError("x", value=1, source="RANNC_X", expected="2"))
    assert (option.place, option.cure) == ("RANNC_X", "give x 2.")
    user = last_words.parts_of(raised(ValueError("bad")))
    assert user.cause == "ValueError: bad" and "test_last_words.py" in user.place and user.cure == ""
    assert "RANNC_PIPELINE_NUM" in last_words.parts_of(raised(MemoryError())).cure


def test_every_own_error_has_its_three_parts_wherever_it_is_raised() -> None:
    from tests.unit.rannc_backend.errors.test_errors import EXAMPLES

    for error, _ in EXAMPLES:
        parts = last_words.parts_of(raised(error))
        assert parts.cause and parts.place and parts.cure, error


def test_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    short = last_words.trace_text(sys.__excepthook__, raised(GraphBreakError("print", location="m.py:3")))
    assert "Traceback" not in short and "test_last_words.py" in short and "raise error" in short
    for error in (ValueError("x"), InternalError("x")):
        assert "Traceback (most recent call last)" in last_words.trace_text(sys.__excepthook__, raised(error))
    monkeypatch.setattr(logging.getLogger("rannc_backend"), "level", logging.DEBUG)
    logging.getLogger("rannc_backend").manager._clear_cache()
    assert "Traceback" in last_words.trace_text(sys.__excepthook__, raised(GraphBreakError("print")))
    logging.getLogger("rannc_backend").manager._clear_cache()


def test_a_hook_of_the_user_is_called_and_what_it_writes_is_told() -> None:
    text = last_words.trace_text(
        lambda kind, error, trace: sys.stderr.write(f"mine: {error}\n"), raised(ValueError("x"))
    )
    assert text == "mine: x\n"


def test_the_end_of_a_long_traceback_goes_into_a_message() -> None:
    text = "".join(f"line {number} \u20ac\n" for number in range(20_000))
    clipped = clip_trace(text)
    assert text.endswith(clipped) and 20_000 < len(json.dumps(clipped)) < 30_000
    assert clip_trace("short\n") == "short\n" and clip_trace("x" * 10**6) == ""


def test_torchrun_gets_the_cause_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    last_words.write_torchrun_error(
        raised(OptionValueError("x", value=1, source="RANNC_X", expected="2")),
        {"TORCHELASTIC_ERROR_FILE": str(path)},
    )
    message = json.loads(path.read_text())["message"]
    assert (
        message["message"].startswith("OptionValueError: option 'x'")
        and message["extraInfo"]["timestamp"].isdigit()
    )
    last_words.write_torchrun_error(
        RanncError("x"), {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "missing" / "x")}
    )
    last_words.write_torchrun_error(RanncError("x"), {})


@pytest.mark.parametrize("is_debug", [False, True])
def test_an_interrupt_before_the_start_is_a_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_debug: bool
) -> None:
    monkeypatch.setattr(last_words, "Word", lambda text, environ: SimpleNamespace(is_ours=True))
    logger = logging.getLogger("rannc_backend")
    monkeypatch.setattr(logger, "level", logging.DEBUG if is_debug else logging.INFO)
    logger.manager._clear_cache()
    called: list[int] = []
    words = last_words.EarlyWords(lambda: False, lambda: called.append(1))
    words._before = sys.__excepthook__
    error = raised(KeyboardInterrupt())
    words._hook(KeyboardInterrupt, error, error.__traceback__)
    text = capsys.readouterr().err
    logger.manager._clear_cache()
    assert called and ("Traceback" in text) == is_debug
    assert is_debug or ("interrupted (Ctrl-C)" in text and "test_last_words.py" in text)


RANK = """
import os, sys, time
from rannc_backend.runtime.job import last_words
time.sleep(float(sys.argv[2]))
word = last_words.Word(sys.argv[1], os.environ)
print("says" if word.is_ours else "silent", flush=True)
if word.is_ours:
    word.stay()
"""


@pytest.mark.parametrize(
    ("texts", "seconds"),
    [
        (("same", "same", "same"), (0, 0, 0)),
        (("same", "other", "same"), (0, 0, 0.5)),
        (("same", "same"), (0.6, 0)),
    ],
)
def test_ranks_of_a_host_say_the_same_once(texts: tuple[str, ...], seconds: tuple[float, ...]) -> None:
    root = str(Path(__file__).resolve().parents[5])
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PMI_", "RANK", "OMPI_COMM"))
    }
    processes = []
    for rank, (text, wait) in enumerate(zip(texts, seconds, strict=True)):
        own = {
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(len(texts)),
            "MPI_LOCALNRANKS": str(len(texts)),
            "PYTHONPATH": root,
        }
        command = [sys.executable, "-c", RANK, text, str(wait)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**environ, **own}))
    begin = time.monotonic()
    said = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert sorted(text for text, word in zip(texts, said, strict=True) if word == "says") == sorted(
        set(texts)
    ), said
    assert time.monotonic() - begin < 30
