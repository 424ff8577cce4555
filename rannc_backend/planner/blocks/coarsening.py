"""A good line for a graph with branches: coarsen it, lay the clusters out so that little crosses, spread them
out again.

In: an `AtomGraph`. Out: a topological order of its atoms. The order in which the model computed them is good
for most models; where it takes turns between branches (two towers, layer by layer), the values of all of them
cross every cut. Clusters of a coarsened graph hide the swings within a layer, so that laying them out one by
one, each time the one after which the fewest bytes are alive, finishes one branch before it begins another.
Coarsening: multilevel; in each level pairs of clusters are merged along the edges that most bytes pass, if
one is the only reader of the other or reads nothing else. Such a merger cannot close a cycle, also with
others at the same time.
"""

from __future__ import annotations

import logging
from collections import defaultdict

import numpy as np

from rannc_backend.planner.blocks.atom_graph import AtomGraph, contract

logger = logging.getLogger(__name__)


def line_order(graph: AtomGraph, *, num_clusters: int) -> list[int]:
    """Atoms in an order in which few bytes cross, from at least `num_clusters` clusters where the graph has
    as many.
    """
    clusters = coarsen(graph, num_clusters=num_clusters)
    return [atom for cluster in _least_alive_first(clusters) for atom in clusters.members[cluster]]


def coarsen(graph: AtomGraph, *, num_clusters: int) -> AtomGraph:
    """Merge until no more than `num_clusters` are left, or none that may be merged; `members` are atoms of
    `graph`.

    No merger makes a cluster longer than a `num_clusters`-th of the whole.
    """
    limit = float(graph.seconds.sum()) / num_clusters
    current = AtomGraph(
        seconds=graph.seconds,
        values=graph.values,
        kinds=graph.kinds,
        modules=graph.modules,
        members=tuple((atom,) for atom in range(graph.num_atoms)),
    )
    level = 0
    logger.debug("coarsening: level 0, %d clusters; to stop at %d", current.num_atoms, num_clusters)
    while current.num_atoms > num_clusters:
        pairs = _pairs(current, limit, most=current.num_atoms - num_clusters)
        if not pairs:
            logger.debug("coarsening: nothing more may be merged")
            break
        current, level = contract(current, pairs), level + 1
        logger.debug(
            "coarsening: level %d, %d clusters, %d pairs merged", level, current.num_atoms, len(pairs)
        )
    return current


def _pairs(graph: AtomGraph, limit: float, *, most: int) -> list[tuple[int, int]]:
    """Disjoint pairs to merge, heaviest edges first."""
    weight: dict[tuple[int, int], float] = defaultdict(float)
    readers: list[set[int]] = [set() for _ in range(graph.num_atoms)]
    sources: list[set[int]] = [set() for _ in range(graph.num_atoms)]
    for value in graph.values:
        for reader in value.readers:
            weight[value.producer, reader] += value.num_bytes
            readers[value.producer].add(reader)
            sources[reader].add(value.producer)
    safe = [
        (-num_bytes, graph.seconds[producer] + graph.seconds[reader], producer, reader)
        for (producer, reader), num_bytes in weight.items()
        if len(readers[producer]) == 1 or len(sources[reader]) == 1
    ]
    matched: set[int] = set()
    pairs: list[tuple[int, int]] = []
    for _, seconds, producer, reader in sorted(safe):
        if len(pairs) == most:
            break
        if seconds <= limit and producer not in matched and reader not in matched:
            matched.update((producer, reader))
            pairs.append((producer, reader))
    return pairs


def _least_alive_first(graph: AtomGraph) -> list[int]:
    """A topological order by list scheduling: next comes what leaves the fewest bytes alive, then what
    follows the last one.
    """
    made: list[list[int]] = [[] for _ in range(graph.num_atoms)]
    read: list[list[int]] = [[] for _ in range(graph.num_atoms)]
    left = np.array([len(value.readers) for value in graph.values])
    waiting = [0] * graph.num_atoms
    for number, value in enumerate(graph.values):
        made[value.producer].append(number)
        for reader in value.readers:
            read[reader].append(number)
            waiting[reader] += 1
    ready = {atom for atom in range(graph.num_atoms) if not waiting[atom]}
    added = [sum(graph.values[number].num_bytes for number in numbers) for numbers in made]
    done_at = [-1] * graph.num_atoms
    order: list[int] = []

    def key(atom: int) -> tuple[float, int, int]:
        freed = sum(graph.values[number].num_bytes for number in read[atom] if left[number] == 1)
        latest = max((done_at[graph.values[number].producer] for number in read[atom]), default=-1)
        return added[atom] - freed, -latest, atom

    while ready:
        atom = min(ready, key=key)
        ready.remove(atom)
        done_at[atom] = len(order)
        order.append(atom)
        for number in read[atom]:
            left[number] -= 1
        for number in made[atom]:
            for reader in graph.values[number].readers:
                waiting[reader] -= 1
                if not waiting[reader]:
                    ready.add(reader)
    return order
