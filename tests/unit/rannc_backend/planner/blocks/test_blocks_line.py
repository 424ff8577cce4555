"""Blocks of any graph: a legal line, balanced, little crosses, never worse than cutting the graph's own
order; user pins.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.errors import StagePinError, UnknownModuleError
from rannc_backend.planner.blocks.atom_graph import AtomGraph, contract, reorder
from rannc_backend.planner.blocks.coarsening import coarsen, line_order
from rannc_backend.planner.blocks.cut_blocks import BlockLine, choose_blocks
from rannc_backend.planner.blocks.line_cuts import crossing_bytes, cut_line
from rannc_backend.planner.blocks.pins import StagePins, find_pins
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.blocks.atom_graphs import (
    graph_of,
    layers,
    line_cuts,
    random_graphs,
    slowest_stage,
    towers,
)

GROUPS = st.lists(st.lists(st.integers(0, 23), min_size=2, max_size=3), max_size=2)


def choose(
    graph: AtomGraph, max_blocks: int, pins: StagePins | None = None, groups: list[list[int]] | None = None
) -> BlockLine:
    return choose_blocks(
        graph, groups or [], find_pins(pins or StagePins(), graph.modules), max_blocks=max_blocks
    )


def line_of(graph: AtomGraph, line: BlockLine) -> tuple[AtomGraph, list[int]]:
    """The graph in the order of the line, and the bounds of the blocks."""
    order = [atom for block in line.atoms for atom in block]
    return reorder(graph, order), [0, *itertools.accumulate(len(block) for block in line.atoms)]


def blocks_by_atom(line: BlockLine) -> dict[int, int]:
    return {atom: block for block, atoms in enumerate(line.atoms) for atom in atoms}


@settings(deadline=None, max_examples=300)
@given(random_graphs(), GROUPS, st.integers(1, 12))
def test_every_graph_gets_a_legal_line(graph: AtomGraph, groups: list[list[int]], max_blocks: int) -> None:
    groups = [[atom % graph.num_atoms for atom in group] for group in groups]
    line = choose(graph, max_blocks, groups=groups)
    block_of = blocks_by_atom(line)
    assert sorted(atom for atoms in line.atoms for atom in atoms) == list(range(graph.num_atoms))
    assert len(line.atoms) <= max_blocks and all(line.atoms)
    # All flows run forwards, so every run of blocks is a stage; nothing that must stay together is parted.
    assert all(
        block_of[value.producer] <= block_of[reader] for value in graph.values for reader in value.readers
    )
    assert all(len({block_of[atom] for atom in group}) == 1 for group in groups)


@settings(deadline=None, max_examples=100)
@given(random_graphs(), st.integers(1, 12), st.permutations(range(4)))
def test_names_and_numbers_of_kinds_do_not_matter(
    graph: AtomGraph, max_blocks: int, numbers: list[int]
) -> None:
    line = choose(graph, max_blocks)
    assert choose(graph, max_blocks) == line
    renamed = replace(
        graph,
        kinds=tuple(numbers[kind] for kind in graph.kinds),
        modules=tuple(path.replace("a", "z").replace("x", "q") for path in graph.modules),
    )
    assert choose(renamed, max_blocks) == line


@settings(deadline=None, max_examples=200)
@given(random_graphs(), GROUPS)
def test_contracting_keeps_the_graph_acyclic_and_joins_only_what_it_must(
    graph: AtomGraph, groups: list[list[int]]
) -> None:
    groups = [[atom % graph.num_atoms for atom in group] for group in groups]
    items = contract(graph, groups)
    item_of = {atom: item for item, members in enumerate(items.members) for atom in members}
    assert sorted(item_of) == list(range(graph.num_atoms))
    assert all(value.producer < reader for value in items.values for reader in value.readers)
    assert items.seconds.sum() == pytest.approx(graph.seconds.sum())
    reach = reachable(graph, groups)
    for first, second in itertools.combinations(range(graph.num_atoms), 2):
        assert (item_of[first] == item_of[second]) == (second in reach[first] and first in reach[second])


def reachable(graph: AtomGraph, groups: list[list[int]]) -> list[set[int]]:
    """Of each atom what can be reached from it where members of a group reach each other."""
    steps: list[set[int]] = [set() for _ in range(graph.num_atoms)]
    for value in graph.values:
        steps[value.producer].update(value.readers)
    for group in groups:
        for atom in group:
            steps[atom].update(group)
    found = []
    for start in range(graph.num_atoms):
        seen, pending = {start}, [start]
        while pending:
            new = steps[pending.pop()] - seen
            seen |= new
            pending += new
        found.append(seen)
    return found


@settings(deadline=None, max_examples=200)
@given(random_graphs(), st.integers(1, 8))
def test_clusters_are_convex_and_laid_out_in_topological_order(graph: AtomGraph, num_clusters: int) -> None:
    clusters = coarsen(graph, num_clusters=num_clusters)
    assert sorted(atom for members in clusters.members for atom in members) == list(range(graph.num_atoms))
    limit = graph.seconds.sum() / num_clusters
    for members, seconds in zip(clusters.members, clusters.seconds, strict=True):
        assert len(members) == 1 or seconds <= limit * 1.0001
    reorder(graph, line_order(graph, num_clusters=num_clusters))  # asserts that the order is topological


def test_two_towers_computed_in_turns_are_laid_out_one_after_the_other() -> None:
    graph = towers(40)
    assert crossing_bytes(graph)[1:-1].min() == 2.0 and np.median(crossing_bytes(graph)) == 20.0
    line, bounds = line_of(graph, choose(graph, 20))
    assert np.median(crossing_bytes(line)[bounds[1:-1]]) <= 11.0
    names = [graph.modules[atom] for atom in (block[0] for block in choose(graph, 20).atoms)]
    assert len(list(itertools.groupby(names))) <= 3, names


def test_layers_keep_their_own_order() -> None:
    for graph in (layers(12), layers(40, length=6)):
        line = choose(graph, 40)
        assert [atom for atoms in line.atoms for atom in atoms] == list(range(graph.num_atoms))


@settings(deadline=None, max_examples=200)
@given(random_graphs(), st.integers(1, 8))
def test_the_own_order_is_kept_unless_clearly_less_crosses_in_another(
    graph: AtomGraph, max_blocks: int
) -> None:
    other = reorder(graph, line_order(graph, num_clusters=2 * max_blocks))
    if crossing_bytes(other).sum() >= 0.95 * crossing_bytes(graph).sum():
        assert [atom for atoms in choose(graph, max_blocks).atoms for atom in atoms] == list(
            range(graph.num_atoms)
        )


@pytest.mark.parametrize("num_layers", [4, 12, 24, 96, 128])
@pytest.mark.parametrize("head_seconds", [1.0, 30.0])
def test_not_worse_than_cutting_the_line_as_it_is(num_layers: int, head_seconds: float) -> None:
    graph = layers(num_layers, head_seconds=head_seconds)
    in_module = np.array([False, *(a == b for a, b in itertools.pairwise(graph.modules))])
    before = line_cuts(graph.seconds, crossing_bytes(graph)[:-1], in_module, max_blocks=64)
    line, bounds = line_of(graph, choose(graph, 160))
    for num_stages in (2, 3, 4, 8, 16):
        assert slowest_stage(line, bounds, num_stages, 0.01) <= 1.001 * slowest_stage(
            graph, before, num_stages, 0.01
        )
    narrow_line, narrow = line_of(graph, choose(graph, 64))
    for num_stages in (2, 3, 4, 8):
        assert slowest_stage(narrow_line, narrow, num_stages, 0.01) <= 1.05 * slowest_stage(
            graph, before, num_stages, 0.01
        )


@pytest.mark.parametrize("inside_bytes", [10.0, 40.0])
@pytest.mark.parametrize(("num_layers", "max_blocks"), [(8, 24), (24, 60), (96, 160), (128, 160), (200, 60)])
def test_equal_layers_are_cut_alike(num_layers: int, max_blocks: int, inside_bytes: float) -> None:
    graph, length, head = layers(num_layers, inside_bytes=inside_bytes), 10, 3
    _, bounds = line_of(graph, choose(graph, max_blocks))
    inside = [bound for bound in bounds if head < bound < head + length * num_layers]
    in_layer: dict[int, list[int]] = {}
    for bound in inside:
        in_layer.setdefault((bound - head) // length, []).append((bound - head) % length)
    patterns = {tuple(cuts) for layer, cuts in in_layer.items() if 0 < layer < num_layers - 1}
    assert len(patterns) <= 2, patterns
    if max_blocks > num_layers:
        assert set(range(1, num_layers)) <= {
            (bound - head) // length for bound in inside if (bound - head) % length == 0
        }
    else:
        assert patterns == {(0,)}
        sizes = np.diff([bound for bound in inside if (bound - head) % length == 0])
        assert sizes.max() - sizes.min() <= length


def test_cuts_are_balanced_and_few_values_cross() -> None:
    edges = [(atom, [atom + 1], 1.0 if atom % 10 == 8 else 5.0) for atom in range(39)]
    graph = graph_of([1.0] * 40, edges)
    assert line_of(graph, choose(graph, 4))[1] == [0, 9, 19, 29, 40]
    assert 19 not in line_of(graph, choose(graph, 4, groups=[[18, 19]]))[1]


def test_long_graphs_are_cut_at_good_places() -> None:
    num_atoms = 20_000
    edges = [(atom, [atom + 1], 1.0 if atom % 100 == 99 else 4.0) for atom in range(num_atoms - 1)]
    graph = graph_of([1.0] * num_atoms, edges)
    bounds = line_of(graph, choose(graph, 64))[1]
    assert 32 <= len(bounds) - 1 <= 64 and all(bound % 100 == 0 for bound in bounds)
    assert np.diff(bounds).max() <= 2 * num_atoms / 64


def pinned(graph: AtomGraph, max_blocks: int = 12, **pins: str) -> BlockLine:
    return choose(graph, max_blocks, StagePins.from_config(Config(**pins)))


def atoms_in(graph: AtomGraph, name: str) -> list[int]:
    return [atom for atom, path in enumerate(graph.modules) if f"{path}.".startswith(f"{name}.")]


@pytest.mark.parametrize("max_blocks", [5, 12, 60, 200])
def test_pins_are_honoured(max_blocks: int) -> None:
    graph = layers(8)
    line = pinned(
        graph, max_blocks, stage_starts="layers.2,layers.5.1", keep_together="layers.3,layers.7.0",
        stage_pins="layers.1=0,layers.6=2,last=3",
    )  # fmt: skip
    block_of = blocks_by_atom(line)
    starts = [block_of[atoms_in(graph, name)[0]] for name in ("layers.2", "layers.5.1")]
    assert line.constraints.starts == tuple(starts)
    for name in ("layers.2", "layers.5.1"):
        first = atoms_in(graph, name)[0]
        assert line.atoms[block_of[first]][0] == first
    for name in ("layers.3", "layers.7.0"):
        assert len({block_of[atom] for atom in atoms_in(graph, name)}) == 1
    expected = {
        block_of[atom]: stage
        for name, stage in (("layers.1", 0), ("layers.6", 2), ("last", 3))
        for atom in atoms_in(graph, name)
    }
    assert dict(line.constraints.stage_of) == expected
    for name in ("layers.1", "layers.6", "last"):
        held = {
            atom for block in {block_of[atom] for atom in atoms_in(graph, name)} for atom in line.atoms[block]
        }
        assert held == set(atoms_in(graph, name))


@settings(deadline=None, max_examples=200)
@given(
    random_graphs(), st.integers(1, 8), st.lists(st.sampled_from(["a", "a.x", "b"]), max_size=2),
    st.lists(st.sampled_from(["a.y", "b.z"]), max_size=2),
    st.dictionaries(st.sampled_from(["a", "a.x", "b"]), st.integers(0, 2), max_size=2),
)  # fmt: skip
def test_pins_of_any_graph_are_kept_or_refused(
    graph: AtomGraph, max_blocks: int, starts: list[str], together: list[str], stages: dict[str, int]
) -> None:
    pins = StagePins(starts=tuple(starts), together=tuple(together), stages=tuple(stages.items()))
    try:
        line = choose(graph, max_blocks, pins)
    except UnknownModuleError as error:
        assert not atoms_in(graph, error.name) and (error.nearest is None or atoms_in(graph, error.nearest))
        return
    except StagePinError as error:
        assert any(repr(name) in str(error) for name in [*starts, *stages])
        return
    block_of = blocks_by_atom(line)
    assert all(
        block_of[value.producer] <= block_of[reader] for value in graph.values for reader in value.readers
    )
    for name in together:
        assert len({block_of[atom] for atom in atoms_in(graph, name)}) == 1
    for name in starts:
        assert min(block_of[atom] for atom in atoms_in(graph, name)) in {0, *line.constraints.starts}
    stage_of = dict(line.constraints.stage_of)
    for name, stage in stages.items():
        assert {stage_of[block_of[atom]] for atom in atoms_in(graph, name)} == {stage}
    assert stages_exist(line)


def stages_exist(line: BlockLine) -> bool:
    """Whether some cut of the blocks into stages is as the constraints say."""
    stage_of = dict(line.constraints.stage_of)
    possible = {0} if stage_of.get(0, 0) == 0 else set()
    for block in range(1, len(line.atoms)):
        stay = set() if block in line.constraints.starts else possible
        possible = {
            stage for stage in stay | {stage + 1 for stage in possible} if stage_of.get(block, stage) == stage
        }
    return bool(possible)


@pytest.mark.parametrize(
    ("pins", "names"),
    [
        ({"stage_pins": "layers.1=2,layers.4=1"}, ("layers.4", "layers.1")),
        ({"stage_pins": "layers=1,layers.4=2"}, ("layers.4", "layers")),
        ({"stage_starts": "layers.2.1", "keep_together": "layers.2"}, ("layers.2.1", "layers.2")),
        ({"stage_starts": "layers.2.1", "stage_pins": "layers.2=1"}, ("layers.2.1", "layers.2")),
        (
            {"stage_starts": "layers.2,layers.3", "stage_pins": "layers.1=0,layers.4=1"},
            ("layers.2", "layers.3", "layers.1", "layers.4"),
        ),
        ({"stage_pins": "first=1"}, ("first",)),
        ({"stage_pins": "layers.0=0,layers.1=7", "max_partition_num": 5}, ("layers.0", "layers.1")),
    ],
)
def test_contradictory_pins_are_refused_with_their_names(pins: dict, names: tuple[str, ...]) -> None:
    max_blocks = pins.pop("max_partition_num", 12)
    with pytest.raises(StagePinError) as caught:
        pinned(layers(6), max_blocks, **pins)
    for name in names:
        assert repr(name) in str(caught.value)


def test_a_start_within_what_must_stay_together_is_refused() -> None:
    graph = layers(4)
    inside = atoms_in(graph, "layers.2")[0]
    with pytest.raises(StagePinError, match="'layers.2' cannot start a stage"):
        choose(graph, 12, StagePins(starts=("layers.2",)), groups=[[inside - 1, inside]])


@pytest.mark.parametrize("option", ["stage_starts", "keep_together", "stage_pins"])
def test_an_unknown_module_is_told_with_the_nearest(option: str) -> None:
    with pytest.raises(UnknownModuleError) as caught:
        pinned(layers(4), **{option: "layer.2" + ("=0" if option == "stage_pins" else "")})
    assert (
        caught.value.nearest == "layers.2"
        and option in str(caught.value)
        and "'layers.2'" in str(caught.value)
    )


def test_a_tower_pinned_to_a_later_stage_comes_later_in_the_line() -> None:
    graph = towers(20)
    line = pinned(graph, 10, stage_pins="right=0,left=1")
    names = [graph.modules[atoms[0]] for atoms in line.atoms]
    assert names.index("left") > max(place for place, name in enumerate(names) if name == "right")
    assert stages_exist(line)


def test_the_price_of_a_line_is_its_imbalance_and_its_cuts() -> None:
    """The cut before the first atom is none: one block costs the square of its share alone."""
    graph = graph_of(
        [1.0, 3.0, 2.0, 2.0],
        [(0, [1], 10.0), (1, [2], 40.0), (2, [3], 10.0)],
        modules=["a.x", "a.x", "b", "b"],
    )
    assert cut_line(graph, (), max_blocks=1, good_bytes=10.0) == ([0, 4], 1.0)
    bounds, price = cut_line(graph, (), max_blocks=2, good_bytes=10.0)
    # Blocks of 6 and 2 seconds, their mean being 4, cut within a module; in the middle four times as much
    # crosses as crosses a good cut.
    assert bounds == [0, 3, 4] and price == pytest.approx(1.5**2 + 0.5**2 + 0.5 * 1.0 + 0.1 * 1.0)
    bounds, price = cut_line(graph, (2,), max_blocks=2, good_bytes=10.0)
    assert bounds == [0, 2, 4] and price == pytest.approx(1.0 + 1.0 + 0.5 * 4.0)
    bounds, price = cut_line(graph, (1,), max_blocks=2, good_bytes=10.0)
    assert bounds == [0, 1, 4] and price == pytest.approx(0.25**2 + 1.75**2 + 0.5 * 1.0 + 0.1 * 1.0)
    every, price = cut_line(graph, (), max_blocks=4, good_bytes=10.0)
    assert every == [0, 1, 2, 3, 4]
    assert price == pytest.approx(0.5**2 + 1.5**2 + 1 + 1 + 0.5 * (1 + 4 + 1) + 0.1 * 2)
