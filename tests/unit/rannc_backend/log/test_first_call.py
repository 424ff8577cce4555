"""What rank 0 says of a first call, and what it remembers of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import fx

from rannc_backend.log.first_call import FirstCall, memory_of
from rannc_backend.settings.options import Config


@dataclass
class _Scene:
    """A clock, a phase and the lines so far."""

    now: float = 100.0
    phase: str = ""
    lines: list[str] = field(default_factory=list)

    def call(self) -> FirstCall:
        return FirstCall(log=self.lines.append, clock=lambda: self.now, ticks=False)

    def until(self, call: FirstCall, seconds: float, phase: str | None = None) -> None:
        """Look every tenth of a second, up to so many seconds after the beginning."""
        while self.now < 100.0 + seconds - 1e-9:
            self.now = round(self.now + 0.1, 6)
            call.look()
        self.phase = self.phase if phase is None else phase


def _play(scene: _Scene, memory: Path) -> FirstCall:
    call = scene.call()
    call.begin()
    scene.until(call, 3, "capture")
    call.attach(lambda: scene.phase, memory)
    scene.until(call, 4, "planning")
    scene.until(call, 6, "compiling stage 0 of graph 0 (loss)")
    scene.until(call, 8, "compiled stage 0 of graph 0 (loss), waiting for the others")
    scene.until(call, 28, "step 0, forward")
    scene.until(call, 29)
    call.done()
    return call


def test_each_phase_is_told_once_and_long_ones_again(tmp_path: Path) -> None:
    scene = _Scene()
    _play(scene, tmp_path / "a" / "times.json")
    assert [re.sub(", roughly .*", "", line) for line in scene.lines] == [
        "first call, 1 of 4: capturing the model as one graph",
        "first call, 2 of 4: planning",
        "first call, 3 of 4: compiling stage 0 of graph 0 (loss)",
        "first call, 3 of 4: still compiling",
        "first call, 3 of 4: still compiling",
        "first call, 4 of 4: first step",
        "first call done in 29.0 s: capture 4.1, planning 2.0, compilation 22.0, first step 0.9",
    ]


def test_an_earlier_run_tells_the_time_left(tmp_path: Path) -> None:
    _play(_Scene(), tmp_path / "times.json")
    scene = _Scene()
    _play(scene, tmp_path / "times.json")
    assert scene.lines[1] == "first call, 2 of 4: planning, about 25 s left, as in an earlier run"
    assert scene.lines[2].endswith("(loss), about 23 s left, as in an earlier run")
    assert scene.lines[4].endswith("still compiling, about 3 s left, as in an earlier run")


def test_of_a_new_model_another_one_tells_roughly(tmp_path: Path) -> None:
    """Its capture took half of the 4.1 s of this one, so all else is expected to take half as long, too."""
    (tmp_path / "inductor-old.json").write_text("[2.05, 1, 20, 1]")
    (tmp_path / "eager-other.json").write_text("[2.05, 1, 90, 1]")
    scene = _Scene()
    _play(scene, tmp_path / "inductor-new.json")
    assert scene.lines[0].endswith("as one graph")
    assert scene.lines[1:4] == [
        "first call, 2 of 4: planning, roughly 44 s left, judging by another model",
        "first call, 3 of 4: compiling stage 0 of graph 0 (loss), roughly 42 s left, judging by another model",
        "first call, 3 of 4: still compiling, roughly 32 s left, judging by another model",
    ]
    again = _Scene()
    _play(again, tmp_path / "inductor-new.json")
    assert "as in an earlier run" in again.lines[1]


@pytest.mark.parametrize(
    ("file", "on_gpu", "left"),
    [
        ("inductor-new.json", False, "about 23 s"),
        ("eager-new.json", True, "about 6 s"),
        ("auto-new.json", False, "about 6 s"),
        ("auto-new.json", True, "about 23 s"),
    ],
)
def test_in_the_first_run_on_a_machine_the_example_tells_roughly(
    tmp_path: Path, file: str, on_gpu: bool, left: str
) -> None:
    scene = _Scene()
    call = scene.call()
    call.begin()
    scene.until(call, 3.9, "planning")
    call.attach(lambda: scene.phase, tmp_path / file, on_gpu=on_gpu)
    scene.until(call, 4.0)
    expected = f"first call, 2 of 4: planning, {left.replace('about', 'roughly')} left, judging by a small GPT-2 elsewhere"
    assert scene.lines[-1] == expected


def test_the_first_line_comes_after_a_second() -> None:
    scene = _Scene()
    call = scene.call()
    call.begin()
    scene.until(call, 0.9)
    assert scene.lines == []
    scene.until(call, 1.0)
    assert len(scene.lines) == 1


def test_a_quick_call_says_and_keeps_nothing(tmp_path: Path) -> None:
    scene = _Scene()
    call = scene.call()
    call.begin()
    call.attach(lambda: scene.phase, tmp_path / "times.json")
    scene.until(call, 0.8)
    call.done()
    scene.until(call, 5)
    assert scene.lines == [] and not list(tmp_path.iterdir())


def test_after_a_failure_nothing_more_is_said(tmp_path: Path) -> None:
    scene = _Scene()
    call = scene.call()
    call.begin()
    scene.until(call, 2)
    call.cancel()
    scene.until(call, 60)
    call.done()
    assert len(scene.lines) == 1


def test_a_later_call_is_not_watched(tmp_path: Path) -> None:
    scene = _Scene()
    call = _play(scene, tmp_path / "times.json")
    scene.lines.clear()
    call.begin()
    scene.until(call, 90)
    call.done()
    assert scene.lines == []


@pytest.mark.parametrize(
    "text",
    ["", "[", "[1, 2]", "[1, 2, 3, -4]", '[1, 2, 3, "x"]', "[1, 2, 3, 1e300]", "{}", "null", "[" * 5000],
)
def test_a_file_that_is_none_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "times.json").write_text(text)
    scene = _Scene()
    _play(scene, tmp_path / "times.json")
    assert "judging by a small GPT-2 elsewhere" in scene.lines[1]


def test_a_directory_that_cannot_be_made_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    scene = _Scene()
    _play(scene, tmp_path / "file" / "times.json")
    assert scene.lines[-1].startswith("first call done")


def test_the_file_depends_on_model_ranks_and_options(tmp_path: Path) -> None:
    def module(factor: float) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output(graph.call_method("mul", (graph.placeholder("x"), factor)))
        return fx.GraphModule({}, graph)

    files = [
        memory_of(tmp_path, module(2.0), 2, Config()),
        memory_of(tmp_path, module(3.0), 2, Config()),
        memory_of(tmp_path, module(2.0), 4, Config()),
        memory_of(tmp_path, module(2.0), 2, Config(stage_compiler="inductor")),
    ]
    assert len(set(files)) == 4 and memory_of(tmp_path, module(2.0), 2, Config()) == files[0]
