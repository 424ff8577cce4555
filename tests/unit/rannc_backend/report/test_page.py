"""The page of a plan: whole, well formed, self-contained, and no text of a plan can get out of its place."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.ir.plan import Plan
from rannc_backend.report.drawing import LABEL_WIDTH, MAX_ROWS, WIDTH, timeline_drawings
from rannc_backend.report.page import SHOWN_STAGES, plan_page
from rannc_backend.report.words import percent_text, seconds_text, size_text
from rannc_backend.schedule.plan_simulation import simulate_plan
from tests.unit.rannc_backend.ir.sample_plans import replaced, sample_plan

ROOT = Path(__file__).resolve().parents[4]
VOID = {"meta", "br", "hr", "img", "input", "link", "line", "rect"}
EVIL = "</title></style></text></svg><script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}&amp;\x00\u202e"


class Page(HTMLParser):
    """Tags in their order; fails on one that is closed without being open, and keeps what stays open."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.tips: list[str] = []
        self._is_tip = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"<{tag}> has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        self._is_tip = ("class", "tip") in attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()
        self._is_tip = False

    def handle_data(self, data: str) -> None:
        """Tooltips apart: they are shown for a pointer or a key only."""
        (self.tips if self._is_tip else self.texts).append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def checked(text: str) -> Page:
    page = Page(text)
    assert page.open == []
    tags = {tag for tag, _ in page.tags}
    assert not tags & {
        "script",
        "img",
        "iframe",
        "object",
        "link",
        "base",
        "form",
        "audio",
        "video",
        "image",
        "use",
    }
    for tag, attributes in page.tags:
        assert not any(
            name.startswith("on") or name in ("src", "href", "srcset", "action") for name in attributes
        ), tag
        style = attributes.get("style") or ""
        assert re.fullmatch(r"(--h:[\d.]+|(width|left):[\d.]+%)?", style), style
    return page


def drawings(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_the_page_holds_every_figure() -> None:
    plan = sample_plan(recompute=[0.5, 1, 1, 1], idle_ranks=1)
    text = plan_page(plan)
    page = checked(text)
    assert (
        text.startswith("<!doctype html>") and not re.search(r"url\((?!#p-)", text) and "@import" not in text
    )
    for stage in plan.stages:
        cost = stage.predicted
        assert (
            f"forward {seconds_text(cost.forward_seconds)} backward {seconds_text(cost.backward_seconds)}"
            in page.text
        )
        assert size_text(cost.peak_bytes) in page.text
        assert f"idle {percent_text(cost.idle_share)}" in page.text
    for part in (
        "4 stages on 9 ranks (1 of them idle)",
        seconds_text(plan.predicted_step_seconds),
        "1.25 x",
        plan.binding,
        "2 stages on 4 ranks each, 16 micro-batches, 1f1b, 50 % to 100 % kept",
        plan.alternatives[0].reason,
        "twice the memory -7.0 %",
        "half the memory no plan fits",
        "peak bfloat16 312 TFLOP/s",
        "link between nodes 25 GB/s, 10 us latency",
        "model.embed_tokens, model.layers.0-2",
    ):
        assert part in page.text, part


def test_the_timeline_is_drawn_with_every_stage_and_number() -> None:
    plan = sample_plan()
    (svg,) = drawings(plan_page(plan))
    names = {"s": "http://www.w3.org/2000/svg"}
    labels = [item.text for item in svg.findall(".//s:text[@class='label']", names)]
    assert labels == [f"stage {index}" for index in range(4)]
    groups = svg.findall(".//s:g", names)
    for group in groups:
        for kind in ("forward", "backward"):
            numbers = [
                int(item.text or "") for item in group.findall(f"s:text[@class='number on-{kind}']", names)
            ]
            assert sorted(numbers) == [*range(8)]
            (path,) = group.findall(f"s:path[@class='{kind}']", names)
            assert path.get("d", "").count("M") == 8
    width = float(svg.get("viewBox", "").split()[2])
    assert all(0 <= float(item.get("x", "0")) <= width for item in svg.iter() if item.get("x"))


def test_bars_are_in_proportion_and_the_limit_is_marked() -> None:
    plan = sample_plan()
    most = max(stage.predicted.peak_bytes for stage in plan.stages)
    text = plan_page(replaced(plan, memory_limit_bytes=2 * most))
    bars = re.findall(r'<div class="bar" role="img" aria-label="stage \d: weights.*?</div>', text, re.DOTALL)
    assert len(bars) == 4
    for stage, shown in zip(plan.stages, bars, strict=True):
        total = sum(float(width) for width in re.findall(r"width:([\d.]+)%", shown))
        assert total == pytest.approx(50 * stage.predicted.peak_bytes / most, abs=0.1)
        assert 'class="limit" style="left:100.0%"' in shown
    far = plan_page(replaced(plan, memory_limit_bytes=1000 * most))
    assert "far beyond the right edge" in far and '<b class="limit"' not in far
    over = plan_page(replaced(plan, memory_limit_bytes=most // 2))
    assert re.search(r'class="limit" style="left:(49.99|50.0)%"', over)


def test_no_text_of_a_plan_gets_out_of_its_place() -> None:
    plan = sample_plan(modules=[(EVIL,), (f"a.{EVIL}",), ("b",), ("c",)], replicas=(1, 1), model_name=EVIL)
    rates = (replaced(plan.cluster.peak_flops[0], dtype=EVIL),)
    plan = replaced(
        plan,
        binding=EVIL,
        costs_from=EVIL,
        fingerprint=EVIL,
        cluster=replaced(plan.cluster, name=EVIL, device_name=EVIL, peak_flops=rates),
        alternatives=(replaced(plan.alternatives[0], reason=EVIL),),
        what_if=(replaced(plan.what_if[0], change=EVIL),),
    )
    text = plan_page(Plan.from_json(plan.to_json()))
    page = checked(text)
    assert "<script" not in text and "\x00" not in text and "\u202e" not in text
    assert page.text.count("<script>alert(1)</script>") >= 8  # shown as text
    assert "{{7*7}}" in page.text and "49" not in re.findall(r"alert\(2\)>(.{2})", page.text)


@settings(max_examples=15, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    layers=st.integers(1, 5),
    stages=st.integers(1, 3),
)
def test_any_names_make_a_well_formed_page(text: str, layers: int, stages: int) -> None:
    names = [(f"m.{layer}.{text}",) for layer in range(layers + stages)]
    plan = sample_plan(modules=names, replicas=(1,) * stages, model_name=text, num_micro_batches=2)
    page = plan_page(plan)
    checked(page)
    assert len(drawings(page)) >= 1


def test_a_plan_for_a_thousand_ranks_stays_tame() -> None:
    plan = sample_plan(num_layers=96, replicas=(16,) * 64, num_micro_batches=64, batch_rows=2048)
    text = plan_page(plan)
    page = checked(text)
    assert len(text) < 1_000_000
    for svg in drawings(text):
        assert sum(item.get("class") == "label" for item in svg.iter()) == MAX_ROWS
    assert f"{64 - MAX_ROWS} more stages" in page.text and f"{64 - SHOWN_STAGES} more stages" in page.text
    assert text.count('<span class="chip">') == 2 * 64


def test_what_binds_is_the_headline() -> None:
    gains = "links: twice the link speed would shorten the step by 12 %, one more device by 2.0 %; slowest: transfers of stage 1 (a; b)"
    text = re.sub(r"\s+", " ", plan_page(replaced(sample_plan(), binding=gains)))
    assert (
        '<p class="headline">links</p> <p>twice the link speed would shorten the step by 12 %, one more '
        "device by 2.0 %</p>" in text
    )
    assert "Slowest: transfers of stage 1 (a; b)." in text
    assert 'class="headline"' not in plan_page(
        replaced(sample_plan(), binding="compute of stage 0: of an older version")
    )


def test_numbers_without_room_are_shown_in_parts_of_the_step() -> None:
    simulation = simulate_plan(sample_plan(num_micro_batches=128, batch_rows=1024))
    whole, first, last = timeline_drawings(simulation)
    assert not whole.rows[0].numbers
    assert [number.text for number in first.rows[0].numbers[:5]] == ["0", "1", "2", "3", "0"]
    assert [number.text for number in last.rows[0].numbers[-2:]] == ["126", "127"]
    forwards = [number.text for row in last.rows for number in row.numbers]
    assert forwards.count("120") == 2 * len(last.rows)


def test_long_rows_are_drawn_by_columns_with_the_same_share_of_idle_time() -> None:
    plan = sample_plan(
        replicas=(1, 1), num_micro_batches=500, batch_rows=512, message_bytes_per_row=0.0, allreduce=0.0
    )
    simulation = simulate_plan(plan, "fill_drain")
    whole = timeline_drawings(simulation)[0]
    for row, stage in zip(whole.rows, simulation.stages, strict=True):
        widths = [float(width) for width in re.findall(r"h([\d.]+)v", row.forward + row.backward)]
        assert len(widths) < 20
        assert sum(widths) / (WIDTH - LABEL_WIDTH - 8) == pytest.approx(1 - stage.idle_share, abs=0.02)


def test_a_plan_that_costs_nothing_has_a_page() -> None:
    plan = sample_plan(replicas=(2,), num_micro_batches=1, forward=0.0, backward=0.0, allreduce=0.0)
    plan = replaced(plan, predicted_step_seconds=0.0, memory_limit_bytes=0, alternatives=(), what_if=())
    page = checked(plan_page(plan))
    assert "There is nothing to draw." in page.text and "no limit" in page.text
    assert "Alternatives" not in page.text and "What if" not in page.text


def test_the_tree_shows_where_the_model_is_cut() -> None:
    plan = sample_plan(replicas=(2, 2), bounds=[0, 14, 27])
    text = re.sub(r"\s+", " ", plan_page(plan))
    opened = re.findall(r'<details open><summary>\s*<span class="name">([^<]*)</span>', text)
    assert opened == ["model", "layers", "6"]
    assert '<span class="name">0-5</span><span class="note">6 alike</span>' in text


def test_templates_are_in_the_wheel(tmp_path: Path) -> None:
    """Built as `pip install .` does, and found where a package without its source tree lies."""
    code = "import setuptools.build_meta as backend, sys; print(backend.build_wheel(sys.argv[1]))"
    source = tmp_path / "source"
    for building in ("rannc_backend", "passes", "kernels"):
        shutil.copytree(ROOT / building, source / building, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    built = subprocess.run(
        [sys.executable, "-c", code, str(wheels)], cwd=source, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    plan = tmp_path / "plan.json"
    plan.write_text(sample_plan().to_json(), encoding="utf-8")
    show = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import rannc_backend; "
        "print(rannc_backend.__file__)\nfrom rannc_backend.cli.main import main; main(sys.argv[1:])"
    )
    arguments = [str(tmp_path / "site"), "show", str(plan), "--html", str(tmp_path / "plan.html")]
    shown = subprocess.run(
        [sys.executable, "-c", show, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert shown.stdout.startswith(str(tmp_path / "site"))
    checked((tmp_path / "plan.html").read_text(encoding="utf-8"))
