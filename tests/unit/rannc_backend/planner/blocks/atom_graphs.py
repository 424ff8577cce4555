"""Graphs of atoms for tests of the block level: hypothesis strategies, chains of equal layers, branches.

In: sizes. Out: `AtomGraph`s. `line_cuts` is the line-cut programme that the block level replaced, kept to
compare with.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from rannc_backend.planner.blocks.atom_graph import AtomGraph, AtomValue


def graph_of(
    seconds: Sequence[float],
    edges: Sequence[tuple[int, Sequence[int], float]],
    kinds: Sequence[int] = (),
    modules: Sequence[str] = (),
) -> AtomGraph:
    """`edges`: (producer, readers, bytes)."""
    return AtomGraph(
        seconds=np.array(seconds, dtype=np.float64),
        values=tuple(
            AtomValue(producer=p, readers=tuple(sorted(set(r))), num_bytes=float(b)) for p, r, b in edges
        ),
        kinds=tuple(kinds) or tuple(range(len(seconds))),
        modules=tuple(modules) or ("",) * len(seconds),
        members=tuple((atom,) for atom in range(len(seconds))),
    )


@st.composite
def random_graphs(draw: st.DrawFn, max_atoms: int = 24) -> AtomGraph:
    """Any acyclic graph, with few kinds, so that some stretches repeat, and modules in a two-level tree."""
    num_atoms = draw(st.integers(1, max_atoms))
    edges = []
    for producer in range(num_atoms - 1):
        later = st.integers(
            producer + 1, min(producer + draw(st.sampled_from([1, 3, max_atoms])), num_atoms - 1)
        )
        readers = draw(st.lists(later, max_size=3))
        if readers:
            edges.append((producer, readers, draw(st.sampled_from([1, 4, 64]))))
    numbers = st.integers(0, 3)
    return graph_of(
        [float(draw(numbers)) for _ in range(num_atoms)],
        edges,
        kinds=[draw(numbers) for _ in range(num_atoms)],
        modules=[draw(st.sampled_from(["", "a", "a.x", "a.y", "b", "b.z"])) for _ in range(num_atoms)],
    )


def layers(
    num_layers: int, *, length: int = 10, head: int = 3, head_seconds: float = 2.0, inside_bytes: float = 40.0
) -> AtomGraph:
    """Equal layers between `head` other atoms at each end: 10 bytes cross between layers, more within them;
    each adds its input.
    """
    seconds, edges, kinds, modules = [1.0] * head, [], list(range(head)), ["first"] * head
    for layer in range(num_layers):
        seconds += [1.0 + (place == 4) * 5.0 for place in range(length)]
        kinds += [100 + place for place in range(length)]
        modules += [f"layers.{layer}.{place // 5}" for place in range(length)]
    seconds += [head_seconds] * head
    kinds += [50 + place for place in range(head)]
    modules += ["last"] * head
    for atom in range(len(seconds) - 1):
        layer, place = divmod(atom - head, length)
        inside = 0 <= layer < num_layers and place < length - 1
        readers = (
            [atom + 1, atom + length] if place == length - 1 and -1 <= layer < num_layers - 1 else [atom + 1]
        )
        edges.append((atom, readers, inside_bytes if inside else 10.0))
    return graph_of(seconds, edges, kinds, modules)


def towers(length: int) -> AtomGraph:
    """Two chains computed in turns, each over its own input, and one atom that reads both ends."""
    edges = [(atom, [atom + 2], 10.0) for atom in range(2 * length - 2)]
    edges += [(2 * length - 2, [2 * length], 1.0), (2 * length - 1, [2 * length], 1.0)]
    names = ["left" if atom % 2 == 0 else "right" for atom in range(2 * length)]
    return graph_of([1.0] * (2 * length + 1), edges, modules=[*names, "head"])


def line_cuts(
    seconds: np.ndarray, crossing: np.ndarray, in_module: np.ndarray, *, max_blocks: int
) -> list[int]:
    """The programme of before: bounds of `max_blocks` blocks of the line as it is; `crossing`, `in_module`:
    per cut before an atom.
    """
    num_atoms = len(seconds)
    cuts = np.arange(1, num_atoms)
    if len(cuts) < max_blocks:
        return list(range(num_atoms + 1))
    positive = crossing[cuts][crossing[cuts] > 0]
    good = float(np.quantile(positive, 0.1)) if len(positive) else 1.0
    penalty = 0.5 * np.minimum(crossing / good, 8.0) + 0.1 * in_module
    if len(cuts) > 400:
        cuts = np.array([int(window[np.argmin(penalty[window])]) for window in np.array_split(cuts, 400)])
    places = np.array([0, *cuts.tolist(), num_atoms])
    done = np.concatenate([[0.0], np.cumsum(seconds)])[places]
    weights = (done[None, :] - done[:, None]) / max(done[-1] / max_blocks, 1e-30)
    price = weights**2 + np.append(penalty[places[:-1]], 0.0)[None, :]
    price[np.tril_indices(len(places))] = np.inf
    best, choices = price[0].copy(), []
    for _ in range(max_blocks - 1):
        total = best[:, None] + price
        choices.append(np.argmin(total, axis=0))
        best = np.min(total, axis=0)
    bounds = [len(places) - 1]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return [0, *(int(places[bound]) for bound in reversed(bounds))]


def slowest_stage(graph: AtomGraph, bounds: Sequence[int], num_stages: int, seconds_per_byte: float) -> float:
    """Seconds of the slowest of at most `num_stages` stages of whole blocks, with the bytes that it receives,
    at best.
    """
    done = np.concatenate([[0.0], np.cumsum(graph.seconds)])[list(bounds)]
    change = np.zeros(graph.num_atoms + 1)
    for value in graph.values:
        change[value.producer + 1] += value.num_bytes
        change[value.readers[-1] + 1] -= value.num_bytes
    received = np.cumsum(change)[list(bounds)] * seconds_per_byte
    received[[0, -1]] = 0.0
    price = done[None, :] - done[:, None] + received[:, None]
    price[np.tril_indices(len(bounds))] = np.inf
    best, least = price[0].copy(), price[0][-1]
    for _ in range(num_stages - 1):
        best = np.min(np.maximum(best[:, None], price), axis=0)
        least = min(least, best[-1])
    return float(least)
