"""EPL's configuration over ranks: every block of its page runs, every item changes what it says, and the numbers are
those of one process.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.choice import cases
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case
from tests.distributed.harness.launch import run_script

_SEGMENTS = 0.001


def _case(name: str, world: int = 2, check: str = "epl_trains", **parameters: Any) -> Case:
    return Case(name=f"epl-{name}", world=world, check=check, parameters=parameters, limit_seconds=120.0)


def _block(name: str, shows: dict[str, Any], **more: Any) -> Case:
    return _case(f"block-{name}", block=name, shows=shows, more=more)


def _items(name: str, config: dict[str, Any], shows: dict[str, Any], world: int = 2, **more: Any) -> Case:
    return _case(name, world, config=config, shows=shows, more=more)


_TWO = {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2}
EQUAL = (
    _block("micro_batches", {"micro_batches": 4}),
    _block("automatic_checkpoints", {"recompute": [_SEGMENTS, _SEGMENTS], "told": ""}, partition_num=2),
    _block("checkpoints", {"recompute": [_SEGMENTS, _SEGMENTS], "told": "marked"}, partition_num=2),
    _block("zero", {"zero": 2}, partition_num=1, replica_num=2),
    _block("offload", {"offload": "parameters"}, partition_num=2),
    _block("groups", {"options": {"num_apply_group": 30}}),
    _items("num_stages", _TWO, {"stages": 2, "micro_batches": 2}),
    _items("num_stages_of_4", {**_TWO, "auto.auto_parallel": True}, {"stages": 2, "micro_batches": 2}, 4),
    _items("forward", {**_TWO, "pipeline.strategy": "PreferForward"}, {"schedule": "fill_drain"}),
    _items("backward", {**_TWO, "pipeline.strategy": "PreferBackward"}, {"schedule": "1f1b"}),
    _items("optimizer", {**_TWO, "pipeline.strategy": "PreferBackwardOptimizer"}, {"schedule": "1f1b"}),
    _items("one_stage", {"pipeline.num_micro_batch": 3, "pipeline.num_stages": 1}, {"stages": 1, "micro_batches": 3}),
    _items("nothing_kept_back", {**_TWO, "gradient_checkpoint.type": ""}, {"recompute": [1.0, 1.0]}),
    _items(
        "end_taskgraph",
        {
            **_TWO,
            "gradient_checkpoint.type": "auto",
            "gradient_checkpoint.end_taskgraph": 0,
            "gradient_checkpoint.check_gradients": True,
        },
        {"recompute": [_SEGMENTS, 1.0], "options": {"check_gradients": True}},
    ),
    _items("zero_v0", {"zero.level": "v0"}, {"zero": 1}, partition_num=1, replica_num=2),
    _items("colocated", {**_TWO, "cluster.colocate_split_and_replicate": True}, {"stages": 2, "ranks": [[0, 1], [0, 1]]},
           replica_num=2),
    _items("not_automatic", {"auto.auto_parallel": False}, {"stages": 1, "micro_batches": 1}),
    _items("automatic", {"auto.auto_parallel": True}, {"options": {"partition_num": 0, "pipeline_num": 0}}),
)  # fmt: skip
OTHERS = (
    _case("amp", check="epl_amp", block="amp", scale=2.0**15),
    _case("amp_fixed", check="epl_amp", block="amp_fixed", scale=128.0),
    _case("io", check="epl_io"),
    _case("sparse_as_dense", check="epl_sparse", config={"communication.sparse_as_dense": True}),
    _case("sparse", check="epl_sparse", config={}),
    _case("io_of_4", 4, check="epl_io"),
)


@pytest.mark.parametrize(
    "case",
    cases(EQUAL, "epl", ("one_stage", "optimizer", "backward", "automatic", "zero_v0", "num_stages_of_4")),
)
def test_equals_one_process(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.parametrize("case", cases(OTHERS, "epl", ("io_of_4",)))
def test_what_else_it_does(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


@pytest.mark.parametrize(
    ("world", "flags"), [(2, ("--only", "amp")), pytest.param(4, (), marks=pytest.mark.full)]
)
def test_the_example(world: int, flags: tuple[str, ...], tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / "epl.py"
    code, output, _ = run_script(path, flags, world=world, directory=tmp_path, limit_seconds=300)
    assert code == 0, output[-6000:]
    # What another rank prints may stand right behind a number.
    losses = re.findall(r": loss (\d+\.\d{3}) -> (\d+\.\d{3})", output)
    assert len(losses) == (2 if flags else 10) and all(float(last) < float(first) for first, last in losses)
    read = re.findall(r"part-\d{5}", output)
    assert len(read) == len(set(read)) == 2 * world + 1
