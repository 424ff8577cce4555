"""With which SystemExit an interpreter ends: known at exit whenever nobody caught it, and only then. Each in
an interpreter of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rannc_backend.runtime.job import interpreter_exit
from rannc_backend.runtime.job.interpreter_exit import exit_code

SCRIPT = """
import atexit, importlib.util, sys
spec = importlib.util.spec_from_file_location("interpreter_exit", {file!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
exits = module.InterpreterExit()
exits.watch()
exits.watch()
atexit.register(lambda: print("code", exits.code, exits.text if exits.code else ""))

def caught(status=3):
    try:
        sys.exit(status)
    except SystemExit as error:
        assert error.code == status and (error.args == ((status,) if status is not None else ()))
        return error

def deep(number):
    try:
        raise SystemExit(3) if number == 0 else ValueError if number < 0 else deep(number - 1)
    finally:
        kept.append(number)

kept = []
{code}
"""
# (what the script does, exit code, what is known of it at exit)
WAYS = (
    ("", 0, "code 0 "),
    ("caught()", 0, "code 0 "),
    ("kept.append(caught())", 0, "code 0 "),
    ("caught('text'); caught(None)", 0, "code 0 "),
    ("sys.exit(3)", 3, "code 3 sys.exit(3)"),
    ("raise SystemExit(3)", 3, "code 3 sys.exit(3)"),
    ("raise SystemExit", 0, "code 0 "),
    ("caught(5); deep(4)", 3, "code 3 sys.exit(3)"),
    ("exit(7)", 7, "code 7 sys.exit(7)"),
    ("sys.exit(None)", 0, "code 0 "),
    ("sys.exit(True)", 1, "code 1 sys.exit(True)"),
    ("sys.exit('why')", 1, "code 1 sys.exit('why')"),
    ("sys.exit([1, 2])", 1, "code 1 sys.exit(list)"),
    ("sys.exit((3, 4))", 1, "code 1 sys.exit(tuple)"),
    ("sys.exit(SystemExit(6))", 6, "code 6 sys.exit(6)"),
    ("sys.exit(256)", 0, "code 0 "),
    ("sys.exit(-1)", 255, "code 255 sys.exit(-1)"),
    ("sys.exit(10**30)", 255, "code 255 "),
    ("import argparse; argparse.ArgumentParser().parse_args(['x'])", 2, "code 2 sys.exit(2)"),
    ("1 / 0", 1, "code 0 "),
    ("atexit.register(sys.exit, 5)", 0, "code 0 "),
    ("import threading; t = threading.Thread(target=sys.exit, args=(5,)); t.start(); t.join()", 0, "code 0 "),
)


@pytest.mark.parametrize(("code", "expected", "known"), WAYS, ids=[way[0] or "nothing" for way in WAYS])
def test_the_exit_that_nobody_caught(code: str, expected: int, known: str) -> None:
    script = SCRIPT.format(file=str(Path(interpreter_exit.__file__)), code=code)
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == expected, done.stderr
    assert known in done.stdout, (done.stdout, done.stderr)
    plain = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys, atexit\n{code}"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert "caught" in code or plain.returncode == expected, "the way of an interpreter without the watch"


def test_exit_codes() -> None:
    assert [exit_code(status) for status in (None, 0, 3, "x", "", [], 256, 259, -1, True)] == [
        0,
        0,
        3,
        1,
        1,
        1,
        0,
        3,
        255,
        1,
    ]


def test_other_exit_functions_run_once() -> None:
    script = SCRIPT.format(
        file=str(Path(interpreter_exit.__file__)),
        code="""
import os
atexit.register(print, "early")
def ours():
    print("ours")
    module.run_other_exit_functions(ours)
    sys.stdout.flush()
    os._exit(9)
atexit.register(ours)
atexit.register(print, "late")
""",
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split("\n")) == (9, ["late", "ours", "early", "code 0 ", ""]), done
