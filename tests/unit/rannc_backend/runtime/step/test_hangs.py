"""No step hangs where an action waits for its whole device; the real programs, executor, transport and
rehearsal on played devices.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from rannc_backend.runtime.step.rehearsal import Rehearsal
from tests.played_ranks import Fabric, Hang
from tests.played_steps import Setting, run_steps
from tests.schedule_lists import ONE_STAGE, SEVERAL_STAGES

NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


def _name(setting: Setting) -> str:
    of_lanes = f" {setting.stages_per_lane} stages each" if setting.stages_per_lane > 1 else ""
    return f"{'-'.join(map(str, setting.replicas))} x{setting.num_micro_batches} {setting.schedule}{of_lanes}"


def _chain(schedule: str, num_lanes: int, number: int) -> Setting:
    per_lane = 2 if schedule in SEVERAL_STAGES else 1
    return Setting(
        replicas=(1,) * num_lanes, num_micro_batches=number, schedule=schedule, stages_per_lane=per_lane
    )


SOME = (
    Setting(replicas=(1, 1), num_micro_batches=1),
    Setting(replicas=(1, 1), num_micro_batches=4, outputs=True),
    Setting(replicas=(1, 1, 1), num_micro_batches=1, schedule="fill_drain"),
    Setting(replicas=(1,) * 4, num_micro_batches=5, skips=((0, 3), (1, 3))),
    Setting(replicas=(2, 1, 3), num_micro_batches=3, outputs=True, idle=1),
    Setting(replicas=(1,) * 8, num_micro_batches=8),
    _chain("zb_h1", 3, 4),
    _chain("list_scheduled", 3, 4),
    *(_chain(schedule, 3, 4) for schedule in SEVERAL_STAGES),
    # A schedule of one stage each on lanes of two, values that skip stages, replicas.
    replace(_chain("interleaved", 3, 3), schedule="1f1b", replicas=(2, 1, 3), skips=((0, 3), (1, 5)), idle=1),
)


@pytest.mark.parametrize("setting", SOME, ids=_name)
@pytest.mark.parametrize("phases", [("train",), ("forward", "backward"), ("infer",)], ids=" ".join)
def test_every_action_may_wait_for_its_device(setting: Setting, phases: tuple[str, ...]) -> None:
    run_steps(setting, phases)


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "num_lanes"),
    [
        *((schedule, num_stages) for schedule in ONE_STAGE for num_stages in range(2, 9)),
        *((schedule, num_lanes) for schedule in SEVERAL_STAGES for num_lanes in range(2, 5)),
    ],
)
def test_all_numbers_of_stages_and_micro_batches(schedule: Any, num_lanes: int) -> None:
    """Of several stages each, two to four lanes have four to eight stages. Without the rehearsal they hang, but for two
    micro-batches of one stage each, where the other end of all that is posted comes without a first run.
    """
    for number in NUMBERS:
        setting = _chain(schedule, num_lanes, number)
        run_steps(setting)
        as_it_was = replace(setting, in_order=False, synchronises="first runs", rehearses=False)
        hangs = pytest.raises(Hang, match="forward|backward")
        with hangs if number != 2 or setting.stages_per_lane > 1 else nullcontext():
            run_steps(replace(as_it_was, rows=setting.steps[:1]))


@pytest.mark.parametrize("setting", SOME, ids=_name)
def test_first_runs_are_over_before_messages(setting: Setting) -> None:
    """Messages queued as they are posted: a first run that meets them hangs; with a rehearsal none does, of
    new numbers of rows neither.
    """
    as_it_was = replace(setting, in_order=False, synchronises="first runs")
    run_steps(as_it_was)
    for rows in (setting.steps[:1], setting.steps[1:3]):
        with pytest.raises(Hang, match="forward|backward"):
            run_steps(replace(as_it_was, rehearses=False, rows=rows))
    with pytest.raises(Hang):
        run_steps(replace(as_it_was, synchronises="always"))


def test_a_hang_is_noticed_at_once() -> None:
    fabric = Fabric(2)

    def body(rank: int) -> None:
        if rank:
            fabric.barrier(rank)
        else:
            fabric.devices[0].message("receive", ("key",), 2, fabric.devices[0].main, target=torch.zeros(1))
            fabric.devices[0].synchronize("a test")

    with pytest.raises(Hang, match="rank 0 in a test, for receive; rank 1 in an agreement"):
        fabric.run(body)


def test_only_devices_behind_the_host_rehearse() -> None:
    world: Any = type("World", (), {"runs_behind": False, "size": 2})
    assert Rehearsal.of(world, {}) is None
