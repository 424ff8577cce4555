"""The option dump_graph over a whole compile: the graph before and after every pass, each in its file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from rannc_backend.errors import UserInputError
from rannc_backend.stages.graph_dump import pass_dump

# Of a stage that trains, with operators that run one by one: forward and backward are boxed.
PASSES = """erase_assertions erase_restriding fold_constants differentiable_fills complex_scatters named_squeezes
decompose_reductions batch_axis randomness split_reductions split_stages lift_constants any_layout secure_outputs trace_joint equal_values
split_joint secure_gradients gradient_buckets box box""".split()


def test_every_pass_of_a_compile_is_logged_and_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    options = {
        "stage_compiler": "eager",
        "dump_graph": True,
        "dump_graph_prefix": str(tmp_path / "dumped"),
        "plan_cache": False,
    }
    model = torch.compile(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), backend="rannc", options=options)
    with caplog.at_level(logging.DEBUG, logger="rannc_backend.passes.pipeline"):
        model(torch.randn(4, 3)).sum().backward()
    folder = tmp_path / "dumped.passes" / "rank0"
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    after = sorted(name for name in texts if not name.endswith("_before.txt"))
    begins = {f"{number:02d}_{name}" for number, name in enumerate(PASSES, 1)}
    assert {name for name in begins if not any(file.startswith(name) for file in after)} == set()
    assert {name[:2] for name in texts} == {name[:2] for name in begins}
    assert "tanh" in texts["01_erase_assertions_before.txt"]
    assert {"18_secure_gradients.txt", "17_split_joint_forward.txt"} <= texts.keys()
    assert "write_product_" in texts["19_gradient_buckets.txt"]
    assert "write_product_" not in texts["18_secure_gradients.txt"]
    logged = [record.getMessage().split(":")[0] for record in caplog.records]
    # The planner runs passes too, which are logged and not written.
    assert set(PASSES) <= set(logged)
    assert any("rannc.write_product_.default +1" in record.getMessage() for record in caplog.records)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken.passes").write_text("", encoding="utf-8")
    dump = pass_dump(str(tmp_path / "taken"), 0)
    with pytest.raises(UserInputError, match="dump_graph_prefix"):
        dump.write("01_x.txt", "")
