"""The harness itself, without the backend: it passes what is right, and blames the right case for what is
wrong.

One rank and the backend "eager": whole batch at once, so every model must equal its reference.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.choice import mostly
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case
from tests.distributed.harness.context import BACKEND_VARIABLE
from tests.distributed.harness.launch import Process, run_cases
from tests.distributed.harness.template import Templates
from tests.distributed.harness.worker import FAULT_VARIABLE
from tests.models import ENTRIES, HUGGING_FACE_NAMES

EAGER = {BACKEND_VARIABLE: "eager"}
LOOPING = "misbehave"


def plain(model: str, **members: object) -> Case:
    return Case(name=model, model=model, replicas="1", environment=EAGER, num_steps=2, **members)


@pytest.mark.full
def test_every_model_equals_its_reference(tmp_path: Path, templates: Templates) -> None:
    names = [name for name in (*ENTRIES, *HUGGING_FACE_NAMES) if name != "dropout"]
    outcomes = run_cases([plain(name) for name in names], tmp_path, templates)
    failed = {name: outcome.failures for name, outcome in outcomes.items() if outcome.failures}
    assert not failed and set(outcomes) == set(names)


@pytest.mark.parametrize("model", mostly(["mlp_loss", "tied_embedding", "lora"], ["tied_embedding"]))
def test_a_gradient_scale_of_one_in_a_thousand_is_seen(
    model: str, tmp_path: Path, templates: Templates
) -> None:
    wrong = Case(name=model, model=model, replicas="1", environment=EAGER | {FAULT_VARIABLE: "scaled_leaf"})
    failures = run_cases([wrong], tmp_path, templates)[model].failures
    assert any("gradient" in text and "relative error" in text for text in failures), failures


def test_crash_and_hang_are_blamed_on_their_case(tmp_path: Path, templates: Templates) -> None:
    cases = [plain("mlp")]
    for how in ("exception", "exit", "kill", "hang"):
        parameters = {"how": how}
        cases.append(
            Case(name=how, check=LOOPING, parameters=parameters, environment=EAGER, limit_seconds=4.0)
        )
        cases.append(Case(name=f"after {how}", environment=EAGER, replicas="1", num_steps=1))
    outcomes = run_cases(cases, tmp_path, templates)
    failed = {name for name, outcome in outcomes.items() if outcome.failures}
    assert failed == {"exception", "exit", "kill", "hang"}
    assert "planted exception" in "".join(outcomes["exception"].failures)
    assert "time.sleep" in "".join(outcomes["hang"].failures) or "misbehave" in "".join(
        outcomes["hang"].failures
    )


_SCRIPT = """
import json, os, signal, sys
print(json.dumps([__name__, sys.argv, os.getcwd(), os.environ["MARK"], hash("order of sets"), "torch" in sys.modules]))
sys.stdout.flush()
sys.exit(int(sys.argv[1])) if int(sys.argv[1]) < 100 else os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_rank_is_as_if_it_had_been_started(tmp_path: Path, templates: Templates) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    said = {}
    for rank, ending in ((0, "0"), (1, "7"), (2, "100")):
        command = ["env", "-C", str(tmp_path), *templates.command([str(script), ending])]
        with Process(
            command, tmp_path / f"{rank}.log", {"RANK": str(rank), "MARK": f"mark of {rank}"}
        ) as process:
            code = process.wait(60)
        assert code == (int(ending) if rank < 2 else -signal.SIGKILL), process.tail()
        *known, said[rank], has_torch = json.loads(process.tail())
        assert known == ["__main__", [str(script), ending], str(tmp_path), f"mark of {rank}"] and has_torch
    assert said[0] == said[2] != said[1], "ranks that are next to each other order their sets alike"


def test_a_rank_whose_launcher_is_killed_ends(tmp_path: Path, templates: Templates) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)\n")
    with Process(templates.command([str(script)]), tmp_path / "log", {}) as process:
        wait_until(lambda: process.tail().strip())
        process.handle.kill()
        wait_until(lambda: not Path("/proc", process.tail().strip()).exists())


# Both ends may be heard of in any order, and in one go.
_BOTH_END = """
import os, selectors, socket, sys, time
from tests.distributed.harness.template import _Server
server = _Server(socket.socket())
here, there = socket.socketpair()
process = os.fork() or os._exit(3)
server._connections[process] = here
server._selector.register(here, selectors.EVENT_READ, process)
there.close()
time.sleep(0.2)
for first in sys.argv[1:]:
    server._reap() if first == "child" else server._end(process)
print(len(server._connections), len(server._selector.get_map()))
"""


@pytest.mark.parametrize("order", [("child", "launcher"), ("launcher", "child")])
def test_templates_outlive_ranks_that_end_together_with_their_launchers(order: tuple[str, str]) -> None:
    command = [sys.executable, "-c", _BOTH_END, *order]
    root = Path(__file__).parents[2]
    said = subprocess.run(
        command, cwd=root, stdin=subprocess.PIPE, capture_output=True, text=True, timeout=60, check=False
    )
    assert said.stdout == "0 3\n", said.stderr


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


PLANTED = tuple(
    Case(
        name=f"planted-{fault}",
        model=model,
        world=2,
        replicas=replicas,
        num_micro_batches=3,
        rows=(6, 6),
        environment={FAULT_VARIABLE: fault},
    )
    for fault, model, replicas in (
        ("scaled_gradients", "mlp_loss", "1,1"),
        ("dropped_gradient", "mlp_loss", "1,1"),
        ("dropped_sum", "mlp_loss", "1,1"),
        ("swapped_values", "mlp", "1,1"),
        ("swapped_gradients", "mlp_loss", "1,1"),
    )
)
WHAT_SEES_IT = {"dropped_sum": "loss loss", "swapped_values": "rows output"}


_ALWAYS = [
    case for case in PLANTED if case.name.endswith(("scaled_gradients", "dropped_gradient", "swapped_values"))
]


@pytest.mark.parametrize("case", mostly(PLANTED, _ALWAYS), ids=lambda case: case.name)
def test_a_planted_fault_in_the_runtime_fails_the_comparison(case: Case, outcome_of: OutcomeOf) -> None:
    failures = outcome_of(case).failures
    kind = WHAT_SEES_IT.get(case.name.removeprefix("planted-"), "gradient layers")
    seen = [text for text in failures if "relative error" in text]
    assert any(kind in text or "gradient body.layers" in text for text in seen), failures
