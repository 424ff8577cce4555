"""The documents: every page is on the entry page, links lead somewhere, what is generated is up to date,
scripts in them are real.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rannc_backend import errors
from rannc_backend.cli.main import main
from rannc_backend.errors import RanncError, catalogue

ROOT = Path(__file__).resolve().parents[4]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def test_every_page_has_its_line_on_the_entry_page() -> None:
    lines = [
        line
        for line in (DOCS / "index.md").read_text(encoding="utf-8").splitlines()
        if line.startswith(("- [", "| ["))
    ]
    named = [match[1] for line in lines if (match := re.search(r"\]\(([\w.]+\.md)\)", line))]
    assert sorted(named) == sorted(page.name for page in PAGES if page.name != "index.md")


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(
    "page", [ROOT / "CONTRIBUTING.md", DOCS / "architecture.md"], ids=lambda page: page.name
)
def test_paths_of_the_package_exist(page: Path) -> None:
    roots = [ROOT, ROOT / "rannc_backend"]
    paths = re.findall(r"`((?:\w+/)*\w+(?:/|\.py|\.toml|\.md))`", page.read_text(encoding="utf-8"))
    known = {path.name for path in (ROOT / "rannc_backend").rglob("*.py")}
    missing = [
        path for path in paths if path not in known and not any((root / path).exists() for root in roots)
    ]
    assert len(paths) > 20 and set(missing) <= {"logging.toml", "rannc_conf.toml"}


def python_files() -> list[str]:
    folders = ("rannc_backend", "passes", "kernels", "tests", "scripts", "examples")
    return [path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *PAGES], ids=lambda page: page.name)
def test_modules_and_tests_that_a_page_names_exist(page: Path) -> None:
    files = [f"/{path}" for path in python_files()]
    named = re.findall(r"`([\w/]+\.py)(?:::\w+)?[^`\n]*`", page.read_text(encoding="utf-8"))
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in files)]
    assert not missing, missing


@pytest.mark.parametrize("script", ["one", "ddp", "with_rannc"])
def test_the_walk_shows_the_scripts_that_are_there(script: str) -> None:
    text = (ROOT / "examples" / "from_ddp" / f"{script}.py").read_text(encoding="utf-8")
    assert f"```python\n{text.rstrip()}\n```" in (DOCS / "getting_started.md").read_text(encoding="utf-8")


def test_the_walk_has_the_same_losses_everywhere() -> None:
    text = (DOCS / "getting_started.md").read_text(encoding="utf-8")
    for step in (0, 9):
        losses = re.findall(rf"^step {step}: loss (\S+)$", text, re.MULTILINE)
        assert len(losses) == 5 and len(set(losses)) == 1, losses


def test_custom_operators_of_the_page_are_those_that_are_tried() -> None:
    worker = (ROOT / "tests" / "distributed" / "workers" / "custom_operator_worker.py").read_text(
        encoding="utf-8"
    )
    names = set(re.findall(r"docs::(\w+)", (DOCS / "custom_operators.md").read_text(encoding="utf-8")))
    assert names == {"squash", "unit_rows"} and all(f'"docs::{name}"' in worker for name in names)


def test_the_page_of_errors_is_what_the_code_says() -> None:
    assert (DOCS / "troubleshooting.md").read_text(encoding="utf-8") == catalogue.errors_markdown(), (
        "run `make docs`"
    )


def test_the_page_of_errors_has_every_class_with_a_text() -> None:
    page = catalogue.errors_markdown()
    classes = {
        cls
        for name in errors.__all__
        if isinstance(cls := getattr(errors, name), type) and issubclass(cls, RanncError)
    }
    without_texts = {"RanncError", "UserInputError", "ModelError"}
    for cls in classes:
        if cls.__name__ not in without_texts:
            section = page.split(f"### {cls.__name__}\n")[1].split("\n### ")[0]
            assert section.count("\n| ") >= 2, cls.__name__
    assert "ranks have different calls at the same time" in page


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["errors", "StagePinError"])
    assert capsys.readouterr().out.startswith("### StagePinError\n")
    with pytest.raises(SystemExit):
        main(["errors"])
    assert "  StagePinError\n" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["errors", "StagePinErorr"])
    assert caught.value.code == 2 and "did you mean 'StagePinError'" in capsys.readouterr().err


def test_the_page_of_errors_writes_out_texts_that_have_a_name() -> None:
    own = catalogue.section_of(errors.PlanError)
    imported = catalogue.section_of(errors.GenerationError)
    assert "| correct the plan, or let the planner write it again. |" in own
    assert "| leave it out, or generate inside `with rannc_backend.gathered(model):`. |" in imported


def test_the_page_of_errors_has_the_texts_of_functions_that_make_errors() -> None:
    page = catalogue.section_of(errors.UnsupportedModelError)
    own = "the forward drops the gradient of a value in place (x.detach_())"
    with_default = "a number that is known only when the model runs is used as one"
    assert f"| {own} | write x = x.detach(). |" in page
    assert f"| {with_default} | write it with torch.where, or decide it outside" in page
