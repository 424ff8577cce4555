"""No step hangs where an action waits for its whole device; the real programs, executor, transport and
rehearsal on played devices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rannc_backend.runtime.step.rehearsal import Rehearsal
from tests.played_ranks import Fabric, Hang
from tests.played_steps import Setting, run_steps
from tests.schedule_lists import ONE_STAGE

NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


def _name(setting: Setting) -> str:
    return f"{'-'.join(map(str, setting.replicas))} x{setting.num_micro_batches} {setting.schedule}"


SOME = (
    Setting(replicas=(1, 1), num_micro_batches=1),
    Setting(replicas=(1, 1), num_micro_batches=4, outputs=True),
    Setting(replicas=(1, 1, 1), num_micro_batches=1, schedule="fill_drain"),
    Setting(replicas=(1,) * 4, num_micro_batches=5, skips=((0, 3), (1, 3))),
    Setting(replicas=(2, 1, 3), num_micro_batches=3, outputs=True, idle=1),
    Setting(replicas=(1,) * 8, num_micro_batches=8),
)


@pytest.mark.parametrize("setting", SOME, ids=_name)
@pytest.mark.parametrize("phases", [("train",), ("forward", "backward"), ("infer",)], ids=" ".join)
def test_every_action_may_wait_for_its_device(setting: Setting, phases: tuple[str, ...]) -> None:
    run_steps(setting, phases)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ONE_STAGE)
@pytest.mark.parametrize("num_stages", range(2, 9))
def test_all_numbers_of_stages_and_micro_batches(num_stages: int, schedule: Any) -> None:
    for number in NUMBERS:
        run_steps(Setting(replicas=(1,) * num_stages, num_micro_batches=number, schedule=schedule))


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
