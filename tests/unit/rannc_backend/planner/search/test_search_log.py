"""What MLPartitioner and DPStaging tell at "debug": coarsening level by level, and the search by number of
stages.
"""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn

from rannc_backend.log.rannc_names import python_loggers
from rannc_backend.planner.blocks.cut_blocks import build_block_graph
from rannc_backend.planner.blocks.staged_nodes import find_staged_nodes
from rannc_backend.planner.search.moves import Effort
from rannc_backend.planner.search.search import StageSearch
from tests.unit.rannc_backend.planner.blocks.block_models import ROWS, model, staged_graph
from tests.unit.rannc_backend.planner.cluster.made_up_clusters import local_cpu
from tests.unit.rannc_backend.planner.planning_graphs import split_model
from tests.unit.rannc_backend.planner.search.search_problems import random_problem


def heard(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    blocks = python_loggers("MLPartitioner") or ()
    (whole,) = python_loggers("DPStaging") or ()
    ours = [record for record in caplog.records if record.name.startswith(whole)]
    return [record.getMessage() for record in ours if (record.name in blocks) == (name == "MLPartitioner")]


def test_blocks_tell_of_their_coarsening(caplog: pytest.LogCaptureFixture) -> None:
    split = model("tied")
    with caplog.at_level(logging.DEBUG, logger="rannc_backend.planner"):
        graphs = [
            build_block_graph(
                staged_graph("tied"), split.inputs, split.split.outputs, split.needs_grad, device=local_cpu(2).device, rows=ROWS,
                max_blocks=6, num_clusters=num_clusters, by_time=by_time,
            )
            for num_clusters, by_time in ((None, True), (3, True), (None, False))
        ]  # fmt: skip
    lines = heard(caplog, "MLPartitioner")
    starts = [line for line in lines if "level 0" in line]
    assert [re.findall(r"stop at (\d+)", line) for line in starts] == [["12"], ["3"], ["12"]]
    levels = [
        int(number)
        for line in lines
        for number in re.findall(r"level \d+, (\d+) clusters, \d+ pairs merged", line)
    ]
    assert levels and min(levels) >= 3
    assert [
        int(number) for line in lines for number in re.findall(r": (\d+) blocks, of at most 6", line)
    ] == [len(graph.blocks) for graph in graphs]


class Lopsided(nn.Module):
    """Computes in its first half, keeps in its second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(256, 256, bias=False) for _ in range(3)), *(nn.Tanh() for _ in range(9))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_blocks_alike_in_memory_are_others_than_alike_in_time() -> None:
    item = split_model(Lopsided(), {"x": torch.randn(ROWS, 256)})
    staged = find_staged_nodes(item.split.rowwise, item.split.layouts, item.inputs)

    def first_block(*, by_time: bool) -> list[str]:
        graph = build_block_graph(
            staged,
            item.inputs,
            item.split.outputs,
            item.needs_grad,
            device=local_cpu(2).device,
            rows=ROWS,
            max_blocks=2,
            by_time=by_time,
        )
        assert len(graph.blocks) == 2
        return [node.rstrip("_0123456789") for node in graph.blocks[0].nodes]

    assert first_block(by_time=True).count("tanh") == 0
    assert 1 <= first_block(by_time=False).count("tanh") <= 6


def test_the_search_tells_of_every_number_of_stages(caplog: pytest.LogCaptureFixture) -> None:
    problem = random_problem(
        3, 8, 4, devices_per_node=4, micro_batches=(2, 4, 8), schedules=("1f1b", "fill_drain"), style="layers",
        memory_bytes=float("inf"), message_scale=0.05, reduction_scale=0.1,
    )  # fmt: skip
    quiet = StageSearch(problem, Effort())
    expected = quiet.run()
    assert heard(caplog, "DPStaging") == []
    with caplog.at_level(logging.DEBUG, logger="rannc_backend.planner.search.search"):
        result = StageSearch(problem, Effort()).run()
    assert result == expected
    lines = heard(caplog, "DPStaging")
    cells = [line for line in lines if "micro-batches" in line]
    totals = [line for line in lines if "least bound" in line]
    assert cells and all(
        re.search(r"bound [\d.]+ ms, \d+ candidates; best step so far", line) for line in cells
    )
    assert [int(re.match(r"(\d+) stages", line)[1]) for line in totals] == sorted(
        {int(re.match(r"(\d+) stages", line)[1]) for line in totals}
    )
    found = [line for line in totals if line.startswith(f"{result.solution.num_stages} stages: ")]
    assert f"best step {result.solution.step_seconds * 1e3:.3f} ms" in found[0]
    assert sum(int(re.search(r"(\d+) candidates", line)[1]) for line in totals) <= result.num_candidates
