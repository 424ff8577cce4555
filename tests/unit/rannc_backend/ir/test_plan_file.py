"""Plan files: what is written reads back, and whatever cannot be read or written is told by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

import rannc_backend
from rannc_backend.errors import PlanError, UserInputError
from rannc_backend.ir.plan_file import plan_in, read_plan, write_text
from tests.unit.rannc_backend.ir.sample_plans import sample_plan


def test_written_plans_read_back(tmp_path: Path) -> None:
    plan = sample_plan()
    path = tmp_path / "plan.json"
    path.write_text("older")
    write_text(path, plan.to_json(), what="plan")
    assert read_plan(path) == rannc_backend.load_deployment(str(path)) == plan
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"], "nothing else is left"


def test_what_cannot_be_read_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe")
    wrong = {
        "nowhere": "No such file",
        ".": "not a file",
        "pipe": "not a file",
        "binary": "UTF-8",
        "a\0b": "null byte",
    }
    for name, message in wrong.items():
        with pytest.raises(PlanError, match=message) as caught:
            read_plan(tmp_path / name)
        assert "path of a plan file" in str(caught.value)


@pytest.mark.parametrize("text", ["# Words", '{"stages": []}', "[]"])
def test_what_is_no_plan_is_told_with_its_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    assert caught.value.place == str(path) and str(path) in str(caught.value)
    with pytest.raises(PlanError, match=r"at .*plan\.json \(from option deployment_file\)"):
        plan_in(text, path, named_by="option deployment_file")


def test_what_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"cannot write the plan .*there is no directory .*nowhere"):
        write_text(tmp_path / "nowhere" / "plan.json", "text", what="plan")
    (tmp_path / "directory").mkdir()
    with pytest.raises(UserInputError, match="cannot write the run"):
        write_text(tmp_path / "directory", "text", what="run")
    assert [item.name for item in tmp_path.iterdir()] == ["directory"]


def test_a_model_without_a_plan_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="no deployment yet"):
        rannc_backend.save_deployment(nn.Linear(2, 2), tmp_path / "plan.json")
