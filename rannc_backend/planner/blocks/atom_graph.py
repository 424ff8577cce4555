"""What the block level sees of a graph: items in a line, what each costs and is, and which values they hand
on.

In: numbers and small integers, no tensors. Out: `AtomGraph`s.
Terms: an *atom* is a staged node with its getitems; atoms are numbered in graph order, which is topological.
Atoms that must not be parted are contracted into one *item*, together with all that lies between them, so
that the graph of items has no cycle and every cut between items of a topological order is legal. An atom
graph is one of atoms, or of items after `contract`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomValue:
    """A value that an atom makes and other atoms read, once each; all `readers` come after `producer`."""

    producer: int
    readers: tuple[int, ...]
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AtomGraph:
    """`seconds`: [atoms], forward and backward. `kinds`: equal for atoms that do the same to values of the
    same shapes. `modules`: dotted path of the module that an atom belongs to, "" if none. `members`: the
    atoms of the original graph in each."""

    seconds: Floats
    values: tuple[AtomValue, ...]
    kinds: tuple[int, ...]
    modules: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]

    @property
    def num_atoms(self) -> int:
        return len(self.kinds)


def contract(graph: AtomGraph, groups: Iterable[Iterable[int]]) -> AtomGraph:
    """The graph with each group, and what lies on a path between two of its members, made one; in topological
    order.

    Groups that share a member, or that cannot be parted without a cycle, become one. Atoms that nothing binds
    keep their order.
    """
    item_of = _components(graph, _united(graph.num_atoms, groups))
    num_items = max(item_of) + 1 if item_of else 0
    if num_items == graph.num_atoms:
        return graph
    members: list[list[int]] = [[] for _ in range(num_items)]
    for atom, item in enumerate(item_of):
        members[item].append(atom)
    values = _contract_values(graph.values, item_of)
    order = topological_order(num_items, values, [atoms[0] for atoms in members])
    place = {item: index for index, item in enumerate(order)}
    kind_of: dict[tuple[int, ...], int] = {}
    kinds = []
    for item in order:
        # Kinds of contracted items must not meet those of single atoms.
        content = tuple(graph.kinds[atom] for atom in members[item])
        kinds.append(content[0] if len(content) == 1 else -1 - kind_of.setdefault(content, len(kind_of)))
    return AtomGraph(
        seconds=np.array([sum(graph.seconds[atom] for atom in members[item]) for item in order]),
        values=tuple(
            AtomValue(
                producer=place[v.producer],
                readers=tuple(sorted(place[r] for r in v.readers)),
                num_bytes=v.num_bytes,
            )
            for v in values
        ),
        kinds=tuple(kinds),
        modules=tuple(graph.modules[members[item][0]] for item in order),
        members=tuple(
            tuple(inner for atom in members[item] for inner in graph.members[atom]) for item in order
        ),
    )


def reorder(graph: AtomGraph, order: Sequence[int]) -> AtomGraph:
    """The same graph with atom `order[i]` as atom i; `order` is topological."""
    place = [0] * graph.num_atoms
    for index, atom in enumerate(order):
        place[atom] = index
    values = []
    for value in graph.values:
        readers = tuple(sorted(place[reader] for reader in value.readers))
        assert readers[0] > place[value.producer], "the order is not topological"
        values.append(AtomValue(producer=place[value.producer], readers=readers, num_bytes=value.num_bytes))
    return AtomGraph(
        seconds=graph.seconds[list(order)],
        values=tuple(values),
        kinds=tuple(graph.kinds[atom] for atom in order),
        modules=tuple(graph.modules[atom] for atom in order),
        members=tuple(graph.members[atom] for atom in order),
    )


def topological_order(num_atoms: int, values: Iterable[AtomValue], keys: Sequence[int]) -> list[int]:
    """The topological order that always takes the atom with the smallest key of those that may come next."""
    found: list[set[int]] = [set() for _ in range(num_atoms)]
    for value in values:
        found[value.producer].update(value.readers)
    waiting = [0] * num_atoms
    for readers in found:
        for reader in readers:
            waiting[reader] += 1
    ready = [(keys[atom], atom) for atom in range(num_atoms) if not waiting[atom]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, atom = heapq.heappop(ready)
        order.append(atom)
        for reader in found[atom]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (keys[reader], reader))
    assert len(order) == num_atoms, "the graph has a cycle"
    return order


def _contract_values(values: Iterable[AtomValue], item_of: Sequence[int]) -> list[AtomValue]:
    kept = []
    for value in values:
        producer = item_of[value.producer]
        readers = sorted({item_of[reader] for reader in value.readers} - {producer})
        if readers:
            kept.append(AtomValue(producer=producer, readers=tuple(readers), num_bytes=value.num_bytes))
    return kept


def _united(num_atoms: int, groups: Iterable[Iterable[int]]) -> list[int]:
    """Of each atom the smallest atom of its group."""
    parent = list(range(num_atoms))

    def root(atom: int) -> int:
        while parent[atom] != atom:
            parent[atom] = parent[parent[atom]]
            atom = parent[atom]
        return atom

    for group in groups:
        first, *others = [root(atom) for atom in group] or [0]
        for other in others:
            low, high = sorted((root(first), root(other)))
            parent[high] = low
    return [root(atom) for atom in range(num_atoms)]


def _components(graph: AtomGraph, group_of: Sequence[int]) -> list[int]:
    """Of each atom the number of its strongly connected component once groups are one; numbered by first
    atom.
    """
    edges: dict[int, set[int]] = {group: set() for group in group_of}
    for value in graph.values:
        source = group_of[value.producer]
        edges[source].update(group_of[reader] for reader in value.readers if group_of[reader] != source)
    component = _strongly_connected(edges)
    number: dict[int, int] = {}
    return [number.setdefault(component[group], len(number)) for group in group_of]


def _strongly_connected(edges: dict[int, set[int]]) -> dict[int, int]:
    """Tarjan's algorithm without recursion: of each vertex one vertex that stands for its component."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    component: dict[int, int] = {}
    stack: list[int] = []
    for start in edges:
        if start in index:
            continue
        index[start] = low[start] = len(index)
        stack.append(start)
        path = [(start, iter(sorted(edges[start])))]
        while path:
            vertex, targets = path[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    path.append((target, iter(sorted(edges[target]))))
                    break
                if target not in component:
                    low[vertex] = min(low[vertex], index[target])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[vertex])
                if low[vertex] == index[vertex]:
                    while vertex not in component:
                        component[stack.pop()] = vertex
    return component
