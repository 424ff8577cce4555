"""Two computations at once give what they give one after the other, whatever becomes of the forked one.

In processes of their own, without torch, as a process that has imported it does not fork.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import os, sys, time
from rannc_backend import side_by_side as module
from rannc_backend.side_by_side import side_by_side
os.sched_getaffinity = lambda _: {0, 1}
own = os.getpid()
"""


def run(script: str) -> str:
    """What the script prints."""
    done = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BOTH = "side_by_side(lambda: ('here', os.getpid() == own), lambda: ('beside', os.getpid() == own))"


def test_the_second_runs_in_another_process() -> None:
    assert run(f"print({BOTH})") == "(('here', True), ('beside', False))"


def test_large_results_come_whole() -> None:
    assert run("a, b = side_by_side(lambda: 1, lambda: bytes(5_000_000)); print(a, b == bytes(5_000_000))") == "1 True"


@pytest.mark.parametrize(
    "prepare",
    ["sys.modules['torch'] = sys", "os.sched_getaffinity = lambda _: {0}", "del os.sched_getaffinity"],
    ids=["torch", "one_core", "no_linux"],
)
def test_one_after_the_other_where_a_copy_is_not_safe(prepare: str) -> None:
    assert run(f"{prepare}\nprint({BOTH})") == "(('here', True), ('beside', True))"


@pytest.mark.parametrize(
    "fault",
    ["os.kill(os.getpid(), 9)", "time.sleep(30)", "(_ for _ in ()).throw(ValueError())", "os._exit(0)"],
    ids=["killed", "stuck", "raises", "leaves"],
)
def test_a_copy_that_fails_is_made_up_for(fault: str) -> None:
    script = f"""
module._MORE_SECONDS = 0.5
def beside():
    if os.getpid() != own:
        {fault}
    return "beside", os.getpid() == own
print(side_by_side(lambda: "here", beside))
"""
    assert run(script) == "('here', ('beside', True))"


def test_exceptions_are_those_of_the_functions_and_no_process_is_left() -> None:
    script = """
def fail(text):
    raise ValueError(text)
for here, beside in ((lambda: fail("a"), lambda: time.sleep(30)), (lambda: 1, lambda: fail("b"))):
    try:
        side_by_side(here, beside)
    except ValueError as error:
        print(error)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("alone")
"""
    assert run(script).split() == ["a", "b", "alone"]
