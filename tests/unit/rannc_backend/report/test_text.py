"""Plans as text: `rannc show`, `diff` and `simulate` say what a reader needs, in 80 columns, whatever the
names are.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from rannc_backend.cli.main import main
from rannc_backend.ir.plan import OutputPlan, Plan
from rannc_backend.report import words
from rannc_backend.report.comparison import compare, difference_report
from rannc_backend.report.modules import children_in_runs, module_tree, path_tree, stage_modules
from rannc_backend.report.page import plan_page
from rannc_backend.report.summary import plan_summary
from rannc_backend.report.tables import bar, memory_text, outputs_text, plan_report
from rannc_backend.report.timeline_text import timeline
from rannc_backend.schedule.plan_simulation import simulate_plan
from rannc_backend.settings.choices import SEGMENTS_BUDGET
from tests.unit.rannc_backend.ir.sample_plans import GB, replaced, sample_plan

EVIL = "\x1b[31mred[bold]\r\n<b>&\u202e\x00.0"


def text_of(renderables: list[RenderableType], width: int = 80) -> str:
    console = Console(width=width, file=None, record=True, highlight=False, quiet=False, color_system=None)
    with console.capture() as capture:
        for item in renderables:
            console.print(item)
    return capture.get()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def written(tmp_path: Path, plan: Plan, name: str = "plan.json") -> str:
    path = tmp_path / name
    path.write_text(plan.to_json(), encoding="utf-8")
    return str(path)


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def uneven_plan() -> Plan:
    return sample_plan(
        forward=[0.0092, 0.0101, 0.0098, 0.0124], backward=[0.019, 0.021, 0.0199, 0.0251], bounds=[0, 7, 14, 20, 27],
        recompute=[0.5, 1, 1, 0], idle_ranks=1,
    )  # fmt: skip


def test_the_report_says_what_was_decided_and_why() -> None:
    plan = uneven_plan()
    text = text_of(list(plan_report(plan)), 100)
    step = words.seconds_text(plan.predicted_step_seconds)
    for part in (
        "Llama: 4 stages on 9 ranks (1 of them idle), 8 micro-batches of 256 rows in all, schedule 1f1b",
        f"step {step} predicted; proven the best for analytic costs",
        "this plan is 1.25 x as fast",
        "bound by computing of stage 0: 96 % of the step",
        "a100-80gb: 9 x NVIDIA A100 80GB on 2 nodes",
        "0 0-1 2 0-6 model.embed_tokens, model.layers.0-2",
        "2 4-5 2 14-19 model.layers.6 (part), 7-8, 9 (part)",
        "0 9.2 ms 19 ms 0 15 ms 50 %",
        "3 12.4 ms 25.1 ms 547 us 15 ms none",
        "2 stages on 4 ranks each, 16",
        "+14 %",
        "no room",
        "96.4 GB",
        "twice the memory",
        "-7.0 % 2 stages on 4 ranks each",
    ):
        assert part in squeezed(text), part
    peak = plan.stages[1].predicted.peak_bytes
    assert f"{words.size_text(peak)} {words.percent_text(peak / (72 * GB))}" in squeezed(text)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_reports_fit_their_width_and_hide_no_figure(width: int) -> None:
    for plan in (
        uneven_plan(),
        sample_plan(num_layers=96, replicas=(64,) * 16, num_micro_batches=128, batch_rows=8192),
    ):
        text = text_of(list(plan_report(plan)), width)
        assert max(len(line) for line in text.splitlines()) <= width
        assert "…" not in text
        for stage in plan.stages:
            assert sum(line.startswith(f"{stage.index:>5} ") for line in text.splitlines()) == 3


def test_a_plan_without_memory_says_so() -> None:
    plan = sample_plan()
    tight = replaced(plan, memory_limit_bytes=GB)
    assert re.search(r"GB \d{3} %", squeezed(text_of(list(plan_report(tight)))))
    unlimited = replaced(plan, memory_limit_bytes=0)
    assert "of 0 per device" in squeezed(text_of(list(plan_report(unlimited))))


def test_texts_of_a_plan_cannot_act_on_a_terminal() -> None:
    plan = sample_plan(modules=[(EVIL,), (f"{EVIL}.x",), ("a[/bold]b",), ("d",)], replicas=(1, 1))
    plan = replaced(
        plan,
        model_name=EVIL,
        binding=EVIL,
        costs_from=EVIL,
        cluster=replaced(plan.cluster, name=EVIL, device_name=EVIL),
    )
    reason = replaced(plan.alternatives[0], reason=EVIL)
    plan = replaced(plan, alternatives=(reason,), what_if=(replaced(plan.what_if[0], change=EVIL),))
    other = replaced(plan, model_name=f"{EVIL}2", binding="b")
    for text in (
        text_of(list(plan_report(plan))),
        text_of(list(difference_report(compare(plan, other), EVIL, "b"))),
    ):
        assert not set(text) & set("\x1b\r\u202e\x00")
        assert "\\x1b[31mred[bold]\\r\\n<b>&" in squeezed(text).replace(" ", "")


def test_modules_are_named_by_the_largest_whole_part() -> None:
    places = [
        ("embed", 0),
        *((f"h.{layer}.{part}", int(layer > 5)) for layer in range(12) for part in ("attn", "mlp")),
    ]
    assert stage_modules(path_tree(places), 0) == ["embed", "h.0-5"]
    assert stage_modules(path_tree(places), 1) == ["h.6-11"]
    cut = [(path, stage if path != "h.5.mlp" else 1) for path, stage in places]
    assert stage_modules(path_tree(cut), 0) == ["embed", "h.0-4", "5 (part)"]
    assert stage_modules(path_tree(cut), 1) == ["h.5 (part)", "6-11"]
    assert stage_modules(path_tree([("a.b", 0), ("c", 0)]), 0) == ["the whole model"]
    assert stage_modules(path_tree([("a.b", 0), ("a", 1)]), 1) == ["a (part)"]
    assert stage_modules(path_tree([("", 1), ("a", 0)]), 1) == ["what no module computes"]
    assert stage_modules(path_tree([("a", 0)]), 5) == []
    nested = [
        (f"stages.{i}.layers.{j}.conv", int(i > 1 or (i == 1 and j > 3))) for i in range(3) for j in range(6)
    ]
    assert stage_modules(path_tree(nested), 1) == ["stages.1.layers.4-5", "stages.2"]


def test_neighbouring_layers_are_drawn_together_where_they_look_alike() -> None:
    places = [(f"h.{layer}.{part}", int(layer > 5)) for layer in range(12) for part in ("attn", "mlp")]
    (layers,) = children_in_runs(path_tree([*places, ("h.3.extra", 0)]))
    runs = children_in_runs(layers.node)
    assert [(run.name, run.num_modules, run.stages) for run in runs] == [
        ("0-2", 3, (0,)), ("3", 1, (0,)), ("4-5", 2, (0,)), ("6-11", 6, (1,)),
    ]  # fmt: skip
    (gaps,) = children_in_runs(path_tree([(f"h.{layer}", 0) for layer in (0, 1, 3, 4)]))
    assert [run.name for run in children_in_runs(gaps.node)] == ["0-1", "3-4"]


@settings(max_examples=100, deadline=None)
@given(
    places=st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.integers(0, 3)),
        max_size=12,
    )
)
def test_any_paths_make_a_tree_and_printable_names(places: list[tuple[str, int]]) -> None:
    root = path_tree(places)
    for stage in range(4):
        names = stage_modules(root, stage)
        assert bool(names) == any(place == stage for _, place in places)
        assert all(name.isprintable() for name in names)
    assert sum(run.num_modules for run in children_in_runs(root)) == len(root.children)


def test_a_deep_path_is_cut() -> None:
    root, depth = path_tree([(".".join("a" * 400), 0)]), 0
    while root.children:
        (root,) = root.children.values()
        depth += 1
    assert depth == 24


def test_equal_plans_do_not_differ_and_differences_are_the_same_from_both_sides() -> None:
    a, b = sample_plan(), sample_plan(replicas=(4, 2, 2), num_micro_batches=16)
    assert compare(a, a).is_empty and compare(a, Plan.from_json(a.to_json())).is_empty
    assert text_of(list(difference_report(compare(a, a), "x", "y"))).strip() == "the plans are equal"
    there, back = compare(a, b), compare(b, a)
    assert [(c.what, c.a, c.b) for c in there.settings] == [(c.what, c.b, c.a) for c in back.settings]
    assert [(c.what, c.a, c.b) for c in there.stages] == [(c.what, c.b, c.a) for c in back.stages]
    assert {(m.stage_a, m.stage_b, m.num_nodes, m.modules) for m in there.moves} == {
        (m.stage_b, m.stage_a, m.num_nodes, m.modules) for m in back.moves
    }
    settings_of = {change.what: (change.a, change.b) for change in there.settings}
    assert settings_of["stages"] == ("4", "3") and settings_of["replicas"] == ("4 x 2", "4, 2 x 2")
    assert settings_of["micro-batches"] == ("8", "16")


def test_moves_name_the_modules() -> None:
    a = sample_plan(replicas=(2, 2), bounds=[0, 9, 27])
    b = sample_plan(replicas=(2, 2), bounds=[0, 14, 27])
    difference = compare(a, b)
    (move,) = difference.moves
    assert (move.stage_a, move.stage_b, move.num_nodes) == (1, 0, 10)
    assert move.modules == ("model.layers.4-5", "6 (part)")
    text = squeezed(text_of(list(difference_report(difference, "a.json", "b.json"))))
    assert "1 0 10 model.layers.4-5, 6 (part)" in text and "peak memory" in text


def test_a_difference_in_plain_values() -> None:
    plan = sample_plan()
    assert compare(plan, plan).summary() == {
        "equal": True,
        "same_graph": True,
        "settings": [],
        "cluster": [],
        "stages": [],
        "moves": [],
    }
    other = replaced(plan, predicted_step_seconds=2 * plan.predicted_step_seconds, schedule="fill_drain")
    summary = json.loads(json.dumps(compare(plan, other).summary()))
    assert {
        "what": "predicted step",
        "a": plan.predicted_step_seconds,
        "b": 2 * plan.predicted_step_seconds,
    } in summary["settings"]
    assert {"what": "schedule", "a": plan.schedule, "b": "fill_drain"} in summary["settings"]
    assert not summary["equal"]


def test_a_difference_is_never_hidden() -> None:
    plan = sample_plan()
    stage = plan.stages[1]
    cost = replaced(stage.predicted, idle_share=0.99)
    cheaper = replaced(plan.cluster, peak_flops=plan.cluster.peak_flops[:1], inter_node_bytes_per_second=5e10)
    for other, word in (
        (replaced(plan, alternatives=()), "alternatives"),
        (
            replaced(plan, stages=(plan.stages[0], replaced(stage, predicted=cost), *plan.stages[2:])),
            "stages",
        ),
        (replaced(plan, fingerprint="e" * 64), "different graphs"),
        (replaced(plan, cluster=cheaper), "inter node bandwidth 25 GB/s 50 GB/s 2 x"),
        (replaced(plan, cluster=cheaper), "peak flops float32 1.95e+13 -"),
    ):
        difference = compare(plan, other)
        assert not difference.is_empty
        assert word in squeezed(text_of(list(difference_report(difference, "a", "b"))))


def test_the_timeline_shows_forwards_backwards_and_idle_time() -> None:
    plan = sample_plan(replicas=(1, 1), num_micro_batches=2, message_bytes_per_row=0.0, allreduce=0.0)
    # 9 slots of 10 ms, 10 cells each.
    lines = [line.plain for line in timeline(simulate_plan(plan), 98)]
    assert lines[0] == "1f1b, 2 micro-batches"
    rows = {line.split(" ", 2)[1]: line.split(" ", 2)[2] for line in lines if line.startswith("stage ")}
    assert rows["0"] == "0" * 10 + "1" * 10 + "." * 20 + "a" * 20 + "." * 10 + "b" * 20
    assert rows["1"] == "." * 10 + "0" * 10 + "a" * 20 + "1" * 10 + "b" * 20 + "." * 20
    assert lines[-2].endswith("90 ms")
    many = timeline(simulate_plan(sample_plan(replicas=(1,) * 50, num_layers=60, num_micro_batches=64)), 80)
    assert max(len(line) for line in many) <= 80 and len(many) == 1 + 32 + 1 + 2
    assert any("18 more stages" in line.plain for line in many)
    assert set(many[1].plain.removeprefix("stage 0 ").strip()) <= set("FB.=")


def test_show_prints_text_json_or_writes_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = uneven_plan()
    path = written(tmp_path, plan)
    assert run("show", path) == 0
    assert "Llama: 4 stages on 9 ranks" in capsys.readouterr().out
    assert run("show", path, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["stages"][1]["modules"] == ["model.layers.3-5", "6 (part)"]
    assert data["predicted_step_seconds"] == plan.predicted_step_seconds
    assert data["stages"][3]["predicted"]["peak_bytes"] == plan.stages[3].predicted.peak_bytes
    page = tmp_path / "plan.html"
    assert run("show", path, "--html", str(page)) == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert run("show", path, "--html", str(tmp_path / "no" / "plan.html")) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_diff_and_simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a = written(tmp_path, uneven_plan(), "a.json")
    b = written(tmp_path, sample_plan(), "b.json")
    assert run("diff", a, a) == 0
    assert capsys.readouterr().out == "the plans are equal\n"
    assert run("diff", a, b) == 0
    assert "predicted step" in capsys.readouterr().out
    assert run("simulate", a, "--schedule", "fill_drain", "--micro-batches", "8,16") == 0
    out = squeezed(capsys.readouterr().out)
    plan = uneven_plan()
    assert f"1f1b 8 16 {words.seconds_text(plan.predicted_step_seconds)} " in out
    step = simulate_plan(plan, "fill_drain", 16).step_seconds
    assert (
        f"fill_drain 16 8 {words.seconds_text(step)} {words.change_text(plan.predicted_step_seconds, step)}"
        in out
    )
    assert out.count("fill_drain, ") == 2 and "guessed" not in out
    assert run("simulate", a, "--micro-batches", "128") == 0
    assert "costs with 128 micro-batches are guessed" in squeezed(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--micro-batches", "0"), "numbers from 1 to 128"),
        (("--micro-batches", "129"), "numbers from 1 to 128"),
        (("--micro-batches", "four"), "numbers from 1 to 128"),
        (("--micro-batches", "4,,8"), "numbers from 1 to 128"),
        (("--schedule", "magic"), "1f1b, fill_drain"),
    ],
)
def test_bad_settings_are_errors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple, message: str
) -> None:
    assert run("simulate", written(tmp_path, sample_plan()), *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == "" and "Traceback" not in captured.err


def test_files_that_are_no_plans_are_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    good = written(tmp_path, sample_plan())
    bad = tmp_path / "bad.json"
    bad.write_text('{"schema_version": 1}', encoding="utf-8")
    for arguments in (
        ("diff", good, str(bad)),
        ("simulate", str(bad)),
        ("show", str(bad), "--json"),
        ("diff", good, str(tmp_path)),
    ):
        assert run(*arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("rannc: ") and captured.out == ""


def test_numbers_in_words() -> None:
    assert [words.seconds_text(value) for value in (0, 2.5e-8, 9.996e-4, 0.0123, 0.9996, 59.94, 12345.6)] == [
        "0", "0.025 us", "1 ms", "12.3 ms", "1 s", "59.9 s", "12 346 s",
    ]  # fmt: skip
    sizes = [
        words.size_text(value) for value in (0, 100, 1024**2 - 1, 5 * 1024**2, 1023.9 * 1024**2, 2.5 * GB)
    ]
    assert sizes == ["0", "0.0977 KB", "1 MB", "5 MB", "1 GB", "2.5 GB"]
    assert [words.percent_text(value) for value in (0, 0.004, 0.0996, 0.5, 1)] == [
        "0 %",
        "0.4 %",
        "10 %",
        "50 %",
        "100 %",
    ]
    assert [words.change_text(2, after) for after in (2, 2.2, 1.8, 5, 2.0001)] == [
        "same",
        "+10 %",
        "-10 %",
        "2.5 x",
        "same",
    ]
    assert words.ranges_text([3, 1, 2, 9, 11, 12]) == "1-3, 9, 11-12"
    assert (
        words.stages_text((2, 3, 3)) == "3 stages on 2, 2 x 3 ranks"
        and words.stages_text((1,)) == "1 stage on 1 rank"
    )
    assert [words.rate_text(rate) for rate in (25e9, 3.35e12, 1e8)] == ["25 GB/s", "3.35 TB/s", "100 MB/s"]
    assert [bar(share, 4) for share in (0, 0.5, 1, 2)] == ["", "██", "████", "████"]
    assert words.kept_text((1.0,)) == "all" and words.kept_text((0.0, 0.5)) == "0 % to 50 %"
    assert words.kept_text((SEGMENTS_BUDGET,)) == "segments"
    assert words.kept_text((0.25, SEGMENTS_BUDGET, 1.0)) == "segments to 100 %"


def test_outputs_are_named_with_their_bytes_and_why_they_are_left_out() -> None:
    sizes = (3, 2048, 5, 700)
    outputs = tuple(
        OutputPlan(name=f"out_{size}", module="lm_head" * (size > 5), stage=3, num_bytes=size * 2**20)
        for size in sizes
    )
    plan = sample_plan().model_copy(update={"outputs": outputs})
    assert outputs_text(plan) == (
        "out_2048 of lm_head (2 GB, stage 3), out_700 of lm_head (700 MB, stage 3), out_5 (5 MB, stage 3) and 1 more: "
        "every rank gets its rows, 2.69 GB per step in all"
    )
    without = outputs_text(plan.model_copy(update={"outputs_left_out": "they need [bold]9 GB"}))
    assert (
        without.startswith("not delivered: out_2048 of lm_head (2 GB") and "they need [bold]9 GB" in without
    )
    assert "outputs=all" in without
    assert "Outputs: out_2048" in plan_page(plan) and "Outputs:" not in plan_page(sample_plan())
    assert plan_summary(plan)["outputs"][1] == {
        "name": "out_2048",
        "module": "lm_head",
        "stage": 3,
        "num_bytes": 2**31,
    }


def test_the_tree_of_a_plan_holds_every_stage() -> None:
    plan = uneven_plan()
    assert module_tree(plan).stages == {0, 1, 2, 3}


def test_memory_of_ranks_with_several_stages_is_that_of_all() -> None:
    plan = sample_plan(replicas=(2, 2))
    alone = [stage.predicted.peak_bytes for stage in plan.stages]
    shared = plan.model_copy(
        update={"stages": tuple(stage.model_copy(update={"ranks": (0, 1)}) for stage in plan.stages)}
    )
    assert memory_text(plan).startswith(f"at most {words.size_text(max(alone))}, on stage ")
    both = sum(alone) - min(
        stage.predicted.workspace_bytes for stage in plan.stages
    )  # one workspace serves both
    assert memory_text(shared).startswith(f"at most {words.size_text(both)}, on stages 0 and 1, of ")


def test_what_dividing_updates_frees_and_costs() -> None:
    plan = sample_plan(replicas=(2, 2))
    text = text_of([*plan_report(replaced(plan, zero_stage=1))])
    assert "nothing is divided" in text and "ZeRO " not in text_of([*plan_report(plan)])
    cost = plan.stages[0].predicted.model_copy(
        update={"elsewhere_bytes": 3 * 2**30, "new_values_seconds": 0.004}
    )
    stages = (plan.stages[0].model_copy(update={"predicted": cost}), *plan.stages[1:])
    text = text_of([*plan_report(replaced(plan, zero_stage=2, stages=stages))])
    assert "level 2 frees up to 3 GB on a rank, and new values take 4 ms of the step" in " ".join(
        text.split()
    )
