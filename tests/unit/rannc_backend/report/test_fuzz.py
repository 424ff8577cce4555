"""Edited plans: a text is refused with a `PlanError` or is shown, compared, simulated and drawn; nothing else
happens.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rannc_backend.errors import PlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.report.comparison import compare, difference_report
from rannc_backend.report.page import plan_page
from rannc_backend.report.summary import plan_summary
from rannc_backend.report.tables import plan_report
from rannc_backend.report.timeline_text import simulation_table, timeline
from rannc_backend.schedule.plan_simulation import simulate_plan
from tests.unit.rannc_backend.ir.sample_plans import sample_plan

PLAN = sample_plan(num_layers=2, replicas=(2, 1, 1), num_micro_batches=4, batch_rows=16)
TREE = json.loads(PLAN.to_json())
NUMBERS = st.sampled_from([0, 1, 2, 7, 10**6, 2**63 - 1, 0.0, 1e-300, 1e-30, 0.5, 1.0, 1e12, 1e30])
WORDS = st.sampled_from(
    ["", "a.0.b", "a..b", ".", "<p>", "\x1b[0m", "[red]", "9" * 30, "\u202e", "1f1b", "fill_drain"]
)
JUNK = st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.lists(st.integers(0, 3), max_size=2)


def places(tree: Any, path: tuple = ()) -> list[tuple]:
    """Paths of all values of a JSON tree."""
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


PLACES = places(TREE)


@st.composite
def edited(draw: st.DrawFn) -> str:
    tree = copy.deepcopy(TREE)
    for path in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=4)):
        place = tree
        try:
            for key in path[:-1]:
                place = place[key]
            value = place[path[-1]]
        except (KeyError, IndexError, TypeError):  # an edit before this one took the place away
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        likely = NUMBERS if is_number else WORDS if isinstance(value, str) else JUNK
        kind = draw(st.integers(0, 9))
        if kind == 0:
            del place[path[-1]]
        elif kind == 1 and isinstance(value, list):
            place[path[-1]] = [*value, *value[:1]]
        else:
            place[path[-1]] = draw(likely if kind < 8 else JUNK)
    for stage in tree["stages"] if isinstance(tree.get("stages"), list) else ():
        cost = stage.get("predicted") if isinstance(stage, dict) else None
        # Most edits of bytes alone would only ever meet the check of their sum.
        if isinstance(cost, dict) and draw(st.booleans()):
            parts = [cost.get(name) for name in cost if name.endswith("_bytes") and name != "peak_bytes"]
            if all(isinstance(part, int) for part in parts):
                cost["peak_bytes"] = sum(parts)
    return json.dumps(tree)


@settings(max_examples=300, deadline=None)
@given(text=edited())
def test_an_edited_plan_is_refused_or_can_be_looked_at(text: str) -> None:
    try:
        plan = Plan.from_json(text)
    except PlanError:
        return
    look_at(plan)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_extreme_numbers_can_be_looked_at(data: st.DataObject) -> None:
    tree = copy.deepcopy(TREE)
    for stage in tree["stages"]:
        for name in ("forward_seconds", "backward_seconds", "transfer_seconds", "allreduce_seconds"):
            stage["predicted"][name] = data.draw(NUMBERS)
        for entry in stage["at_rows"]:
            entry["forward_seconds"] = data.draw(NUMBERS)
            entry["activation_bytes"] = data.draw(st.sampled_from([0, 1, 2**63 - 1]))
        stage["received_bytes_per_row"] = data.draw(NUMBERS)
    tree["batch_rows"] = data.draw(st.sampled_from([1, 16, 17, 10**9, 2**63 - 1]))
    tree["num_micro_batches"] = data.draw(st.sampled_from([1, 3, 4, 10**9, 2**63 - 1]))
    tree["cluster"]["intra_node_bytes_per_second"] = data.draw(NUMBERS)
    tree["predicted_step_seconds"] = data.draw(NUMBERS)
    tree["memory_limit_bytes"] = data.draw(st.sampled_from([0, 1, 2**63 - 1]))
    look_at(Plan.from_json(json.dumps(tree)))


def look_at(plan: Plan) -> None:
    console = Console(width=80, quiet=True)
    for section in (*plan_report(plan), *difference_report(compare(plan, PLAN), "a", "b")):
        console.print(section)
    assert json.loads(json.dumps(plan_summary(plan)))["num_stages"] == plan.num_stages
    assert plan_page(plan).endswith("</html>")
    try:
        simulations = [simulate_plan(plan), simulate_plan(plan, "fill_drain", 3)]
    except PlanError as error:
        assert "too many to simulate" in str(error) and plan.num_micro_batches > 1000
        return
    console.print(simulation_table(plan, simulations))
    for simulation in simulations:
        assert all(0 <= stage.idle_share <= 1 for stage in simulation.stages)
        assert all(len(line.plain) <= 80 for line in timeline(simulation, 80))
