"""Every term on the page of a plan says what it means, to a pointer and to a keyboard, in the words of the
glossary.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rannc_backend.ir.plan import ClassEfficiency
from rannc_backend.ir.plan_formats import Formats
from rannc_backend.report.page import plan_page
from rannc_backend.report.terms import MEANINGS, meaning
from tests.unit.rannc_backend.ir.sample_plans import replaced, sample_plan

GLOSSARY = Path(__file__).resolve().parents[4] / "docs/glossary.md"


def body() -> ElementTree.Element:
    """The page of a plan with everything that a page may have."""
    plan = sample_plan(idle_ranks=1)
    efficiencies = (ClassEfficiency(operator_class="matmul", share=0.5),)
    most = max(stage.predicted.peak_bytes for stage in plan.stages)
    text = plan_page(
        replaced(
            plan,
            memory_limit_bytes=2 * most,
            cluster=replaced(plan.cluster, efficiencies=efficiencies),
            zero_stage=1,
            told_recompute="model.layers",
            offload="parameters",
            formats=Formats(boundary_dtype="bf16", saved_message_bytes=2**20, num_row_gradients=1),
            schedule="zb_h1",
        )
    )
    whole = re.search(r"<body>.*</body>", text, re.DOTALL)[0]
    return ElementTree.fromstring(
        whole.replace('xmlns="http://www.w3.org/2000/svg"', "").replace("<details open>", "<details>")
    )


def places(page: ElementTree.Element) -> list[ElementTree.Element]:
    """Where terms stand: headings, names of figures, entries of legends."""
    legends = [
        item
        for legend in page.iterfind(".//p[@class='legend']")
        for item in legend
        if item.get("class") != "hint"
    ]
    return [*page.iterfind(".//h2"), *page.iterfind(".//h3"), *page.iterfind(".//dt"), *legends]


def said(place: ElementTree.Element) -> tuple[str, str]:
    """The name at a place, and what its tooltip says."""
    button = place.find(".//button[@class='term']")
    if button is None:
        return (place.text or "").strip(), place.get("title", "")
    tip = button.find("span[@class='tip']")
    assert (
        tip is not None and tip.get("role") == "tooltip" and tip.get("id") == button.get("aria-describedby")
    )
    return (button.text or "").strip(), (tip.text or "").strip()


def test_every_term_has_a_tooltip() -> None:
    page = body()
    found = [said(place) for place in places(page)]
    assert len(found) > 60
    unexplained = {name for name, text in found if text not in MEANINGS.values()}
    assert not unexplained
    # A name has one meaning, and that of another term is not put to it.
    assert all(text == meaning(name) for name, text in found)
    tips = {said(item)[1] for item in [page, *page.iter()] if item.find("button[@class='term']") is not None}
    without = [term for term, text in MEANINGS.items() if text not in tips]
    assert not without, "no place on the page has these"


def test_whatever_has_a_tooltip_for_a_pointer_alone_has_one_for_a_keyboard_elsewhere() -> None:
    page = body()
    by_key = {said(place)[1] for place in places(page) if place.find(".//button[@class='term']") is not None}
    assert {place.get("title") for place in page.iterfind(".//dt[@title]")} <= by_key
    identities = [item.get("id") for item in page.iter() if item.get("id")]
    assert len(identities) == len(set(identities))


def test_the_glossary_says_the_same() -> None:
    section = (
        GLOSSARY.read_text(encoding="utf-8").partition("## On the page of a plan\n")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    assert rows == [("term", "meaning"), *MEANINGS.items()]


def test_a_name_is_explained_by_the_longest_term_in_it() -> None:
    assert meaning("peak float32") == MEANINGS["peak"] and meaning("Peak memory") == MEANINGS["peak memory"]
    assert meaning("all-reduce that nothing hides") == MEANINGS["all-reduce"]
    with pytest.raises(KeyError):
        meaning("something else")
