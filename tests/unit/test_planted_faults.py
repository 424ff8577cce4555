"""The tool that plants faults: what it draws, where it puts it, and that it can say no."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.only_in_full import ONLY_IN_FULL
from tests.planted_faults import runner, tenths
from tests.planted_faults.__main__ import counts_line, with_equivalents
from tests.planted_faults.areas import AREAS, SEED, drawn
from tests.planted_faults.baseline import Baseline, failed_tests
from tests.planted_faults.chosen import CHOSEN
from tests.planted_faults.drawing import draw, sites
from tests.planted_faults.equivalents import REASONS
from tests.planted_faults.fault import Fault, StaleFault
from tests.planted_faults.runner import (
    Diagnosis,
    State,
    judge,
    key_of,
    nearest_first,
    run_faults,
    stages_of,
)
from tests.planted_faults.tenths import NUM_PARTS, tenth_of
from tests.planted_faults.tree import NONE_CHOSEN, NOT_FOUND, ROOT, Run, Tree, repository_file
from tests.sampled import SAMPLED

SOURCE = '''"""A module."""

LIMIT = 3


class Box:
    size: int = 1

    def fill(self, amount: int, *, strict: bool = True) -> int:
        """Not looked at: 1 + 1."""
        assert amount + 1 > 0, f"amount {amount + 1}"
        if amount < LIMIT and not self.full:
            self.add(amount, 2)
            logger.info("added %d", amount + 1)
        elif amount == 7:
            raise ValueError(amount + 1)
        größe = [x * 2.5 for x in zip(self.all, self.old, strict=True)]
        return sum(größe) - amount if self.on else 0
'''


def _texts(kind: str) -> set[tuple[str, str]]:
    return {(SOURCE[site.start : site.stop], site.replacement) for site in sites(SOURCE) if site.kind == kind}


def test_every_kind_is_found_where_it_may_be() -> None:
    assert _texts("operator") == {
        ("amount < LIMIT", "(amount <= LIMIT)"),
        ("amount < LIMIT and not self.full", "(amount < LIMIT or not self.full)"),
        ("amount == 7", "(amount != 7)"),
        ("x * 2.5", "(x + 2.5)"),
        ("sum(größe) - amount", "(sum(größe) + amount)"),
    }
    assert _texts("constant") == {("2", "3"), ("7", "8"), ("2.5", "5.0"), ("0", "1")}
    assert _texts("call_dropped") == {("self.add(amount, 2)", "pass")}
    assert ("self.on", "(not (self.on))") in _texts("negated") and (
        "amount == 7",
        "(not (amount == 7))",
    ) in _texts("negated")
    assert {site.function for site in sites(SOURCE)} == {"Box.fill"}


def test_arguments_of_one_kind_are_swapped() -> None:
    source = "def f(a, b):\n    return g(a, b) + g(a, 1) + isinstance(a, b) + g(*a, b) + g(a, a)\n"
    assert [(source[s.start : s.stop], s.replacement) for s in sites(source) if s.kind == "arguments"] == [
        ("g(a, b)", "g(b, a)")
    ]


def test_drawn_faults_are_the_same_each_time_apply_once_and_are_python() -> None:
    first, again = drawn(), drawn()
    assert first == again and len({fault.name for fault in first}) == len(first)
    for fault in first:
        source = repository_file(fault.path).read_text(encoding="utf-8")
        changed = fault.applied(source)
        ast.parse(changed)
        assert changed != source and len(changed) == len(source) - len(fault.find) + len(fault.replacement)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), fault.change
    others = {fault.change for fault in drawn(SEED + 1)}
    assert len(others & {fault.change for fault in first}) < len(first) // 2, "another seed draws the same"


def test_a_change_elsewhere_leaves_the_others_as_they_were() -> None:
    before = draw("a.py", SOURCE, 1, 5, ())
    longer = SOURCE.replace('"""A module."""', '"""A module, told at length."""\n\nMORE = 5 + 5\n')
    longer += "\n    def other(self) -> int:\n        return 1\n"
    after = draw("a.py", longer, 1, 100, ())
    assert len(before) == 5 and {fault.change for fault in before} <= {fault.change for fault in after}
    assert {fault.name for fault in before} <= {fault.name for fault in after}


def test_half_are_drawn_and_every_area_has_some() -> None:
    found = drawn()
    assert len(CHOSEN) + len(found) >= 60 and min(len(CHOSEN), len(found)) >= 0.4 * (len(CHOSEN) + len(found))
    for area in AREAS:
        for path, count in area.files.items():
            assert sum(fault.path == path for fault in found) == count, (
                f"{path} has no room for {count} faults"
            )
    words = " ".join(area.name for area in AREAS)
    for needed in (
        "executor",
        "messages",
        "rows",
        "buckets",
        "clipping",
        "scaler",
        "checkpoints",
        "reductions",
        "randomness",
    ):
        assert needed in words
    assert all(word in words for word in ("schedules", "planner", "configuration"))


@pytest.mark.parametrize("fault", CHOSEN, ids=lambda fault: fault.name)
def test_no_chosen_fault_is_stale(fault: Fault) -> None:
    """Where this fails, the code that the fault is about has changed: give the fault what is there now."""
    fault.applied(repository_file(fault.path).read_text(encoding="utf-8"))


def test_names_are_unique_and_tests_are_there() -> None:
    faults = [*CHOSEN, *drawn()]
    assert len({fault.name for fault in faults}) == len(faults)
    for test in {test for fault in faults for test in fault.tests}:
        path, _, function = test.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {function.partition('[')[0]}" in text, test
    assert all(len(reason) > 20 for reason in REASONS.values())


def test_every_test_that_a_list_names_is_collected() -> None:
    """Beside faults, and among those that run in full only."""
    tests = sorted({test for fault in [*CHOSEN, *drawn()] for test in fault.tests} | ONLY_IN_FULL | SAMPLED)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "",
        *tests,
    ]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr[-2000:]


@pytest.mark.parametrize(
    ("find", "replacement", "words"),
    [
        ("not there", "x", "0 times"),
        ("amount", "x", "times"),
        ("LIMIT = 3", "LIMIT = 3", "changes nothing"),
        ("LIMIT = 3", "LIMIT = (", "no Python"),
    ],
)
def test_a_fault_that_does_not_fit_is_stale(find: str, replacement: str, words: str) -> None:
    with pytest.raises(StaleFault, match=words):
        Fault("a", "a.py", find, replacement, ()).applied(SOURCE)


class Playing(Tree):
    """A tree of one file, whose tests are a function of its text."""

    def __init__(self, folder: Path, source: str = "") -> None:
        self.folder, self.source, self.runs = folder, source, 0
        folder.mkdir(parents=True, exist_ok=True)
        self.text = source

    def plant(self, fault: Fault) -> None:
        self.text = fault.applied(self.source)

    def restore(self, path: str) -> None:
        self.text = self.source

    def pytest(self, arguments: object, limit_seconds: float) -> Run:
        self.runs += 1
        scope: dict[str, object] = {}
        exec(self.text, scope)  # noqa: S102
        return Run(0 if scope["double"](3) == 6 else 1, "FAILED tests/a.py::test_double - no", 0.0)  # type: ignore[operator]


DOUBLE = "def double(x):\n    return x * 2\n"
WRONG = Fault("wrong", "a.py", "x * 2", "x * 3", ("tests/a.py",))
SAME = Fault("same", "a.py", "x * 2", "x + x", ("tests/a.py", "tests/distributed/b.py"))
GONE = Fault("gone", "a.py", "x * 9", "x", ("tests/a.py",))


def test_what_tests_do_not_notice_is_told(tmp_path: Path) -> None:
    tree = Playing(tmp_path, DOUBLE)
    assert (
        judge(tree, fault=WRONG).kind == "caught"
        and "tests/a.py::test_double" in judge(tree, fault=WRONG).detail
    )
    runs = tree.runs
    diagnosis = judge(tree, fault=SAME)
    assert diagnosis.kind == "uncaught" and diagnosis.detail == "a.py: x * 2 -> x + x"
    assert tree.runs == runs + 2, "tests over ranks are run apart"
    assert judge(tree, fault=GONE).kind == "stale"
    assert tree.text == DOUBLE, "what was planted is taken out again"


def test_counts_and_equivalents(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = [
        Diagnosis("a", "caught", "", 1.0),
        Diagnosis("b", "caught", "", 1.0),
        Diagnosis("c", "uncaught", SAME.change, 1.0),
    ]
    assert (
        counts_line(verdicts, 9.0) == "planted faults: 3 of them, 2 caught, 1 uncaught (66.7% caught) in 9 s"
    )
    monkeypatch.setattr(
        "tests.planted_faults.__main__.REASONS",
        {SAME.change: "twice a number is that number added to itself"},
    )
    assert with_equivalents(verdicts[2], SAME).kind == "equivalent"
    assert (
        with_equivalents(verdicts[2], WRONG).kind == "uncaught"
        and with_equivalents(verdicts[0], SAME).kind == "caught"
    )


def test_a_run_that_was_ended_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.jsonl"
    source = DOUBLE
    monkeypatch.setattr(runner, "digest", lambda: source)
    monkeypatch.setattr(runner, "Tree", lambda folder: Playing(folder, DOUBLE))
    first = list(run_faults([WRONG, SAME], workers=1, state=State(path)))
    assert [diagnosis.kind for diagnosis in first] == ["caught", "uncaught"]
    path.write_text(path.read_text() + '{"key": "cut o')
    again = list(run_faults([WRONG, SAME, GONE], workers=2, state=State(path)))
    assert [diagnosis.kind for diagnosis in again] == ["caught", "uncaught", "stale"]
    assert all("(known)" in diagnosis.detail for diagnosis in again[:2])
    source = DOUBLE + "# changed"
    assert not any(
        "(known)" in diagnosis.detail for diagnosis in run_faults([WRONG], workers=1, state=State(path))
    )
    assert key_of(WRONG, "a") != key_of(WRONG, "b") and key_of(WRONG, "a") != key_of(SAME, "a")


def test_tests_that_fail_without_the_fault_catch_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "digest", lambda: "")
    monkeypatch.setattr(runner, "Tree", lambda folder: Playing(folder, DOUBLE.replace("2", "5")))
    wrong = Fault("wrong", "a.py", "x * 5", "x * 3", ("tests/a.py",))
    (diagnosis,) = run_faults([wrong], workers=1, state=State(None))
    assert diagnosis.kind == "error" and "without the fault" in diagnosis.detail


def test_a_fault_without_an_answer_when_the_budget_ends_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Playing):
        def pytest(self, arguments: object, limit_seconds: float) -> Run:
            return Run(None, "", limit_seconds)

    monkeypatch.setattr(runner, "digest", lambda: "")
    monkeypatch.setattr(runner, "Tree", lambda folder: Slow(folder, DOUBLE))
    path = tmp_path / "state.jsonl"
    assert not list(run_faults([WRONG], workers=1, state=State(path), baseline="none", budget_seconds=0.0))
    assert not path.exists(), "the next run tries it again"
    (diagnosis,) = run_faults([WRONG], workers=1, state=State(path), baseline="none")
    assert diagnosis.kind == "error" and "did not end within" in diagnosis.detail


def test_tests_that_passed_before_are_not_run_without_a_fault_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[object] = []

    class Recorded(Playing):
        def pytest(self, arguments: object, limit_seconds: float) -> Run:
            assert isinstance(arguments, list) and limit_seconds < 1e6, "a number of seconds to wait for"
            if "-x" in arguments:
                return super().pytest(arguments, limit_seconds)
            chosen.append(arguments)
            return Run(NONE_CHOSEN if "-m" in arguments else 0, "", 0.0)

    monkeypatch.setattr(runner, "digest", lambda: "")
    monkeypatch.setattr(runner, "Tree", lambda folder: Recorded(folder, DOUBLE))
    test = "tests/a.py::test_double"
    expected = {"all": [[test]], "rest": [["-m", "full or sampled", test]], "none": []}
    for baseline, runs in expected.items():
        chosen.clear()
        twice = Fault("again", "a.py", "x * 2", "x * 4", ("tests/a.py",))
        found = run_faults([WRONG, twice], workers=1, state=State(None), baseline=baseline)  # type: ignore[arg-type]
        assert [diagnosis.kind for diagnosis in found] == ["caught", "caught"] and chosen == runs


def test_names_of_tests_are_read_from_what_pytest_prints(tmp_path: Path) -> None:
    said = "1 failed\nFAILED ../copy/tests/a.py::test_x[a - b] - AssertionError: c - d\nFAILED tests/b.py::y"
    names = failed_tests(Run(1, said, 0.0))
    assert names[:2] == ["tests/a.py::test_x[a", "tests/a.py::test_x[a - b]"]
    assert failed_tests(Run(1, "Timeout", 0.0)) == []

    class Known(Playing):
        def pytest(self, arguments: object, limit_seconds: float) -> Run:
            assert isinstance(arguments, list)
            return Run(1 if arguments == ["tests/a.py::test_x[a - b]"] else NOT_FOUND, "no", 0.0)

    tree = Known(tmp_path)
    assert "does not pass without" in (Baseline("all").why_not(tree, Run(1, said, 0.0)) or "")


def test_tests_of_the_module_with_the_fault_come_first() -> None:
    fault = Fault(
        "a", "schedule/orders.py", "", "", ("t/test_a.py::orders", "t/test_several_orders.py", "t/b.py")
    )
    assert nearest_first(fault) == ["t/test_several_orders.py", "t/test_a.py::orders", "t/b.py"]


def test_stages_put_ranks_last() -> None:
    assert stages_of(["tests/distributed/a.py::x[1]", "tests/unit/b.py"]) == [
        ["tests/unit/b.py"],
        ["tests/distributed/a.py::x[1]"],
    ]
    assert stages_of(["tests/unit/b.py"]) == [["tests/unit/b.py"]]


def test_a_copy_is_what_is_imported_and_the_repository_stays(tmp_path: Path) -> None:
    fault = next(fault for fault in CHOSEN if fault.name == "larger-parts-last")
    before = repository_file(fault.path).read_bytes()
    tree = Tree(tmp_path / "copy")
    assert judge(tree, fault=fault).kind == "caught"
    assert repository_file(fault.path).read_bytes() == before
    nothing = Fault(
        "nothing", fault.path, "Samples in the global batch.", "All samples of the global batch.", fault.tests
    )
    assert judge(tree, fault=nothing).kind == "uncaught"


def test_ten_commits_in_a_row_have_all_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [Fault(str(number), "", "", "", ()) for number in range(87)]
    history = {f"commit{number}": number for number in range(1, 41)}

    def git(*arguments: str) -> str:
        if arguments[0] == "rev-list":
            return str(history.get(arguments[-1], ""))
        if "--is-shallow-repository" in arguments:
            return "false"
        commit, _, back = arguments[-1].partition("~")
        return f"hash of commit{history[commit] - int(back)}"

    monkeypatch.setattr(tenths, "_git", git)
    for begin in (10, 20, 30):
        parts = [tenth_of(faults, f"commit{number}") for number in range(begin, begin + 10)]
        assert sorted(fault.name for part in parts for fault in part) == sorted(
            fault.name for fault in faults
        )
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert tenth_of(faults, "commit10") != tenth_of(faults, "commit20"), "another ten, another order"
    # Without a history: the hash alone, the same each time, and all parts come.
    assert tenth_of(faults, "no commit") == tenth_of(faults, "no commit")
    seen = {fault.name for number in range(100) for fault in tenth_of(faults, f"text {number}")}
    assert len(seen) == len(faults) and NUM_PARTS == 10
