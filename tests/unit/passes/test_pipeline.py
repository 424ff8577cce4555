"""The pass runner: order, contracts, reports, dumps, lint; and the errors that passes raise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import fx

from rannc_backend.passes.pipeline import (
    GraphDump,
    GraphPass,
    Pass,
    PassError,
    count_ops,
    dumping,
    facts_of,
    run_pass,
    run_passes,
    with_dump_of_now,
    with_facts,
)


def traced() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: torch.relu(x) + torch.relu(x))


@dataclass(frozen=True, slots=True)
class Swap(GraphPass):
    """Replaces relu by another function."""

    name: ClassVar[str] = "swap"
    provides: ClassVar[frozenset[str]] = frozenset({"swapped"})
    function: object = torch.sigmoid

    def run(self, graph_module):
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.relu):
            node.target = self.function
        return graph_module


@dataclass(frozen=True, slots=True)
class NeedsSwap(GraphPass):
    name: ClassVar[str] = "needs_swap"
    requires: ClassVar[frozenset[str]] = frozenset({"swapped"})

    def run(self, graph_module):
        return graph_module


@dataclass(frozen=True, slots=True)
class Breaks(GraphPass):
    name: ClassVar[str] = "breaks"

    def run(self, graph_module):
        relu = graph_module.graph.find_nodes(op="call_function", target=torch.relu)[-1]
        graph_module.graph.output_node().prepend(relu)  # after its users
        return graph_module


@dataclass(frozen=True)
class TwoGraphs:
    first: fx.GraphModule
    second: fx.GraphModule

    def named_graphs(self):
        return {"first": self.first, "second": self.second}


@dataclass(frozen=True, slots=True)
class Halves(Pass[TwoGraphs]):
    """Gives the graph and another one."""

    name: ClassVar[str] = "halves"
    requires: ClassVar[frozenset[str]] = frozenset({"swapped"})
    provides: ClassVar[frozenset[str]] = frozenset({"halved"})
    ends: ClassVar[frozenset[str]] = frozenset({"swapped"})

    def run(self, graph_module):
        return TwoGraphs(graph_module, fx.symbolic_trace(lambda x: x + 1))


def test_passes_run_in_order_and_the_graph_is_recompiled():
    graph, reports = run_passes(traced(), (Swap(), NeedsSwap()))
    x = torch.randn(3)
    assert torch.equal(graph(x), torch.sigmoid(x) * 2)
    assert [report.name for report in reports] == ["swap", "needs_swap"]
    first, second = (report.op_count_change for report in reports)
    assert sorted(first.values()) == [-2, 2] and second == {}
    assert "no change" in str(reports[1]) and "+2" in str(reports[0]) and reports[0].seconds > 0


def test_requirements_are_checked():
    with pytest.raises(AssertionError, match="needs_swap requires .*swapped"):
        run_passes(traced(), (NeedsSwap(), Swap()))
    run_passes(with_facts(traced(), {"swapped"}), (NeedsSwap(),))


def test_facts_travel_with_the_graph():
    graph, _ = run_passes(with_facts(traced(), {"given"}), (Swap(),))
    assert facts_of(graph) == {"given", "swapped"}
    halves = run_pass(Halves(), graph)
    assert [facts_of(half) for half in halves.named_graphs().values()] == [{"given", "halved"}] * 2
    with pytest.raises(AssertionError, match=r"halves requires \['swapped'\].*\['given', 'halved'\]"):
        run_pass(Halves(), halves.first)


def test_a_broken_graph_is_found_at_once():
    with pytest.raises(RuntimeError):
        run_passes(traced(), (Breaks(), Swap()))


def test_every_pass_is_dumped_before_and_after():
    texts = {}
    dump = GraphDump(write=texts.__setitem__)
    with dumping(dump):
        graph, _ = run_passes(traced(), (Swap(), NeedsSwap()))
        later = with_dump_of_now(lambda: run_pass(Swap(), traced()))
        with dumping(None):
            run_passes(traced(), (Swap(),))
    run_passes(traced(), (Swap(),))
    assert list(texts) == ["01_swap_before.txt", "01_swap.txt", "02_needs_swap.txt"]
    assert "= relu(x)" in texts["01_swap_before.txt"] and "= relu(x)" not in texts["01_swap.txt"]
    later()
    with dumping(dump):
        run_pass(Halves(), graph)
    assert list(texts)[3:] == [
        "03_swap_before.txt",
        "03_swap.txt",
        "04_halves_first.txt",
        "04_halves_second.txt",
    ]


def test_no_pass_no_change():
    graph = traced()
    same, reports = run_passes(graph, ())
    assert same is graph and reports == ()


def test_count_ops():
    assert sorted(count_ops(traced()).values()) == [1, 2]


def test_pass_error_tells_node_and_reason():
    node = next(iter(traced().graph.find_nodes(op="call_function", target=torch.relu)))
    error = PassError(node, "relu mixes rows")
    assert (
        error.node is node
        and error.reason == "relu mixes rows"
        and "relu mixes rows" in str(error)
        and node.name in str(error)
    )
    assert str(PassError(None, "nothing")) == "nothing"
