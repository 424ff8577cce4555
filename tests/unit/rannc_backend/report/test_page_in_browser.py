"""The page of a plan in a real browser: no errors, tooltips by pointer and by key, nothing wider than the
window.

Without a browser these fail and name the command that installs one. `make test-full` has all but the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rannc_backend.ir.plan import Plan
from rannc_backend.report.page import plan_page
from scripts.browser import INSTALL, Browser, BrowserError
from tests.unit.rannc_backend.ir.sample_plans import replaced, sample_plan

TAB = "\ue004"
DESK, PHONE = 1280, 390
# Whatever sticks out of the window, but for what lies in a figure that is moved by itself.
STICKING_OUT = """
    const found = [], width = arguments[0];
    for (const item of document.body.querySelectorAll("*")) {
      const box = item.getBoundingClientRect();
      const hidden = getComputedStyle(item).visibility === "hidden" || !box.width;
      if (!hidden && !item.closest(".scroll svg") && (box.right > width + 0.5 || box.left < -0.5))
        found.push(item.outerHTML.slice(0, 120));
    }
    return [document.documentElement.scrollWidth - width, found];
"""
# Of each term in turn: what is wrong with its tooltip when it has the focus.
TOOLTIPS = """
    return (async () => {
    const wrong = [], shown = (tip) => getComputedStyle(tip).visibility === "visible";
    for (const term of document.querySelectorAll(".term")) {
      term.focus();
      await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      const tip = term.querySelector(".tip"), box = tip.getBoundingClientRect(), own = term.getBoundingClientRect();
      const others = [...document.querySelectorAll(".tip")].filter((other) => other !== tip && shown(other));
      const inside = box.left >= 0 && box.right <= innerWidth && box.top >= 0 && box.bottom <= innerHeight;
      const apart = box.bottom <= own.top + 1 || box.top >= own.bottom - 1;
      if (document.activeElement !== term || !shown(tip) || !inside || !box.height || others.length || (innerWidth > 640 && !apart))
        wrong.push([term.textContent, shown(tip), inside, apart, others.length]);
    }
    document.activeElement.blur();
    return [document.querySelectorAll(".term").length, wrong];
    })();
"""


def test_without_a_browser_the_command_that_installs_one_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("BROWSER", raising=False)
    monkeypatch.delenv("BROWSER_DRIVER", raising=False)
    with pytest.raises(BrowserError, match=INSTALL), Browser():
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def plans() -> dict[str, Plan]:
    plan = sample_plan(recompute=[0.5, 1, 1, 1], idle_ranks=1)
    most = max(stage.predicted.peak_bytes for stage in plan.stages)
    gains = "the number of devices: one more device would shorten the step by 9 %, twice the memory by nothing; slowest: compute of stage 0"
    names = [(f"model.{'a_very_long_name_of_a_module_' * 4}{layer}",) for layer in range(6)]
    return {
        "usual": replaced(plan, memory_limit_bytes=2 * most, binding=gains),
        "many": sample_plan(num_layers=96, replicas=(16,) * 64, num_micro_batches=64, batch_rows=2048),
        "long names": sample_plan(
            modules=names, replicas=(1, 1), model_name="AModelWhoseNameIsMuchTooLongForAPhone" * 3
        ),
    }


@pytest.fixture(params=["usual", "many", "long names"])
def page(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "plan.html"
    path.write_text(plan_page(plans()[request.param]), encoding="utf-8")
    return path


@pytest.mark.full
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [DESK, 800, PHONE, 320])
def test_nothing_sticks_out_of_the_window(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark, phone=width <= PHONE)
    assert browser.run(STICKING_OUT, width) == [0, []]
    assert browser.run("return innerWidth") == width, (
        "the window is wider, or the page was made smaller to fit"
    )
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 26)" if dark else "rgb(247, 247, 245)")
    assert browser.messages() == []


@pytest.mark.full
@pytest.mark.parametrize("width", [DESK, PHONE])
def test_every_tooltip_is_shown_in_the_window_for_its_term_alone(
    browser: Browser, page: Path, width: int
) -> None:
    browser.open(page, width=width, phone=width == PHONE)
    num_terms, wrong = browser.run(TOOLTIPS)
    assert num_terms > 40 and wrong == []


@pytest.mark.full
def test_terms_are_reached_by_key_and_by_pointer(browser: Browser, page: Path) -> None:
    browser.open(page, width=DESK)
    names = browser.run(
        "return [...document.querySelectorAll('.term')].map((term) => term.firstChild.textContent)"
    )
    reached = []
    for _ in range(6):
        browser.press(TAB)
        reached.append(browser.run("return document.activeElement.firstChild.textContent"))
    assert reached == names[:6]
    browser.run("document.activeElement.blur()")
    place = browser.run(
        "const box = document.querySelector('.term').getBoundingClientRect(); return [box.left + 3, box.top "
        "+ 3]"
    )
    shown = "return [...document.querySelectorAll('.tip')].filter((tip) => getComputedStyle(tip).visibility === 'visible').length"
    before = browser.run(shown)
    browser.point(*place)
    assert (before, browser.run(shown)) == (0, 1)
    browser.point(0, 0)
    assert browser.run(shown) == 0


@pytest.mark.full
def test_the_timeline_can_be_moved_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text(plan_page(plans()["usual"]), encoding="utf-8")
    browser.open(path, width=PHONE, phone=True)
    moved = browser.run(
        "const box = document.querySelector('.scroll'); box.scrollLeft = 200; return [box.scrollLeft, "
        "box.tabIndex]"
    )
    assert moved == [200, 0]


@pytest.mark.full
def test_the_check_sees_errors_and_what_sticks_out(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "wrong.html"
    path.write_text(
        "<!doctype html><div style='width: 2000px'>wide</div><script>undefined.x</script>", encoding="utf-8"
    )
    browser.open(path, width=DESK)
    excess, found = browser.run(STICKING_OUT, DESK)
    assert excess > 0 and "wide" in found[0]
    assert any("TypeError" in message for message in browser.messages())
