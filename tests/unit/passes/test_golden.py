"""Every pass on small graphs: what goes in and what comes out, as text beside this test.

The cases are in golden.py. After a wanted change write the texts anew and read the difference:
`python -m tests.unit.passes.golden --write`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import rannc_backend.passes as passes
from rannc_backend.passes.order import PIPELINE
from rannc_backend.passes.pipeline import GraphPass, Pass, facts_of, run_pass, with_facts
from tests.unit.passes.golden import CASES, FOLDER, paths_of


def all_passes() -> dict[str, type[Pass]]:
    """Every pass of the package by its name."""
    for module in pkgutil.walk_packages(passes.__path__, "rannc_backend.passes."):
        importlib.import_module(module.name)
    for name in ("joint_graph", "inductor"):
        importlib.import_module(f"rannc_backend.stages.{name}")

    def below(parent: type) -> Iterator[type]:
        for child in parent.__subclasses__():
            yield child
            yield from below(child)

    own = [item for item in below(Pass) if item is not GraphPass and item.__module__.startswith("rannc_")]
    # A slotted dataclass is a second class beside the one that was written.
    return {item.name: item for item in own}


@pytest.mark.parametrize("name", CASES)
def test_a_small_graph(name: str) -> None:
    before, after = (path.read_text(encoding="utf-8") for path in paths_of(name))
    given, made = CASES[name]().texts()
    assert given == before, "the input has changed"
    assert made == after


def test_every_pass_has_a_case_and_every_text_is_of_one() -> None:
    assert {name.split("/")[0] for name in CASES} == set(all_passes())
    texts = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.txt")}
    assert texts == {path.relative_to(FOLDER).as_posix() for name in CASES for path in paths_of(name)}


def test_the_order_has_every_pass_and_each_finds_its_facts() -> None:
    known = all_passes()
    names = [name for level in PIPELINE for name in level.passes]
    assert sorted(names) == sorted(known)
    facts: frozenset[str] = frozenset()
    for level in PIPELINE:
        facts |= level.given
        for name in level.passes:
            # Ended facts count: levels have branches, such as what the planner looks at.
            assert known[name].requires <= facts, f"{name} before what it requires"
            facts |= known[name].provides


def test_no_pass_requires_what_nobody_gives() -> None:
    given = frozenset().union(*(level.given for level in PIPELINE))
    provided = given.union(*(item.provides for item in all_passes().values()))
    for item in all_passes().values():
        assert item.requires and item.requires <= provided and item.ends <= provided, item.name


SWAPPED = [
    ("erase_assertions", "fold_constants"),
    ("complex_scatters", "decompose_reductions"),
    ("named_squeezes", "decompose_reductions"),
    ("decompose_reductions", "batch_axis"),
    ("batch_axis", "randomness"),
    ("randomness", "split_reductions"),
    ("split_reductions", "split_stages"),
    ("split_stages", "lift_constants"),
    ("lift_constants", "any_layout"),
    ("any_layout", "secure_outputs"),
    ("secure_outputs", "trace_joint"),
    ("trace_joint", "split_joint"),
    ("simplify_joint", "split_joint"),
    ("equal_values", "split_joint"),
    ("equal_values", "single_scatters"),
    ("split_joint", "secure_gradients"),
    ("secure_gradients", "gradient_buckets"),
    ("gradient_buckets", "send_slices"),
    ("deliver_early", "send_slices"),
]


@pytest.mark.parametrize(("first", "second"), SWAPPED, ids=lambda name: name)
def test_two_passes_in_the_wrong_order_are_noticed(first: str, second: str) -> None:
    """A graph that is ready for the first: the second is refused before it, or the first after the second."""
    known = all_passes()
    ready = known[first].requires
    if known[second].requires <= ready:
        ready = (ready - known[second].ends) | known[second].provides
        refused, lacks = first, known[first].requires - ready
    else:
        refused, lacks = second, known[second].requires - ready
    case = CASES[next(name for name in CASES if name.startswith(f"{refused}/"))]()
    with_facts(case.graph_module, ready)
    with pytest.raises(AssertionError, match=f"pass {refused} requires .*{min(lacks)}"):
        run_pass(case.graph_pass, case.graph_module)
    assert facts_of(case.graph_module) == ready
