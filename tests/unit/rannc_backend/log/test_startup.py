"""The lines of the start: who is where, which options hold, each once; and the files of dump_graph."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import fx, nn

from rannc_backend.errors import UserInputError
from rannc_backend.log.startup import places_text, say_options, say_places
from rannc_backend.settings.options import Config
from rannc_backend.settings.sources import resolve
from rannc_backend.stages.graph_dump import dump_graphs


def test_places() -> None:
    assert places_text(["a"], ["cpu"], "single") == "1 rank (single): rank 0 on a: cpu"
    assert places_text(["a", "a", "b"], ["cuda:0", "cuda:1", "cuda:0"], "mpi") == (
        "3 ranks (mpi): ranks 0-1 on a: cuda:0, cuda:1; rank 2 on b: cuda:0"
    )
    many = places_text(
        [f"h{rank // 16}" for rank in range(1024)], [f"cuda:{rank % 16}" for rank in range(1024)], "mpi"
    )
    assert many.startswith("1024 ranks (mpi): ranks 0-15 on h0: cuda:0, ") and many.endswith(
        "; and 896 more ranks"
    )
    assert "cuda:7 and so on" in many and len(many) < 1500


def test_options_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rannc_conf.toml").write_text(
        "show_config_items = true\np2p_comm = true # 100%\n", encoding="utf-8"
    )
    logger = logging.getLogger("rannc_backend.log.startup")
    kept = list(logger.filters)
    logger.filters.clear()
    try:
        with caplog.at_level(logging.INFO, logger="rannc_backend"):
            for _ in range(2):
                say_options(resolve({"pipeline_num": 4}, {"RANNC_CONF_DIR": str(tmp_path)}))
                say_places(["a%b"], ["cpu"], "single")
    finally:
        logger.filters[:] = kept
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert messages[0] == f"options from {tmp_path / 'rannc_conf.toml'}"
    assert messages[1].startswith(f"p2p_comm (from {tmp_path / 'rannc_conf.toml'}, line 2) is accepted")
    lines = messages[2].splitlines()
    assert len(lines) == 1 + len(Config.model_fields) and "pipeline_num = 4 (options)" in lines
    assert messages[3] == "1 rank (single): rank 0 on a%b: cpu"


def test_graphs_are_dumped(tmp_path: Path) -> None:
    graph_module = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3), nn.Tanh()))
    slots: Any = (SimpleNamespace(kind="batch", name="x"),)
    stages: Any = [
        SimpleNamespace(index=index, graph_module=graph_module, inputs=slots, outputs=slots)
        for index in (0, 1)
    ]
    paths = dump_graphs(str(tmp_path / "dumped"), "graph 0", graph_module, stages)
    assert [Path(path).name for path in paths] == [
        "dumped.graph0.txt",
        "dumped.graph0.stage0.txt",
        "dumped.graph0.stage1.txt",
    ]
    text = Path(paths[2]).read_text(encoding="utf-8")
    assert (
        text.startswith("# graph 0, stage 1 of 2\n# in:  batch x\n# out: batch x\n") and "def forward" in text
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(Path(path).name for path in paths)
    with pytest.raises(UserInputError, match="cannot write the graph"):
        dump_graphs(str(tmp_path / "missing" / "x"), "graph 0", graph_module, stages)
