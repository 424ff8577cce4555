"""The check of the NCCL path without a GPU: a whole training on a device that is played, judged for races and
host waits.

In: a context. Out: the findings of the equality check, and whatever the played device noticed. Messages go
over gloo through the transport that NCCL would have; see `tests/fake_device.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from rannc_backend.runtime.comm.device_watch import DeviceWatch
from rannc_backend.runtime.comm.gloo import OwnedGroups
from rannc_backend.runtime.comm.nccl import NcclTransport
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.step.graph_runtime import GraphRuntime
from rannc_backend.runtime.world import StartOptions, World
from rannc_backend.stages.compiled_stage import CompiledStage
from tests.distributed.harness.context import Context
from tests.distributed.harness.equality import equality
from tests.fake_device import FakeDevice, GlooLinks, OnDevice, without_modes

LIMIT_SECONDS = 60.0


def on_streams(context: Context) -> dict[str, Any]:
    """Train as in `equality`, with every operator on a stream. ``parameters``: host_reads, how many values
    each call may read.
    """
    world = bootstrap.start(StartOptions(limit_seconds=LIMIT_SECONDS))
    device = FakeDevice()
    played = _played(world, device)
    bootstrap._HOLDER.world = played
    met: list[str] = []
    try:
        with _operators_on(device, context.case.parameters.get("host_reads", 0)), _first_runs(device, met):
            result = equality(context)
    finally:
        bootstrap._HOLDER.world = world
    findings = context.findings
    findings.that(not device.races, f"{len(device.races)} races: {device.races[:5]}")
    findings.that(not met, f"first runs, which may wait for the device, met messages under way: {met[:5]}")
    findings.that(
        not device.host_waits, f"values were read on the host within a step: {device.host_waits[:5]}"
    )
    kinds = {text.split(" on ")[0].split(" ")[0] for text in device.log}
    findings.that(
        {"send", "receive", "all-reduce"} <= kinds, f"the played device has seen {sorted(kinds)[:20]} only"
    )
    created = world.control.allgather(played.transport.created)  # type: ignore[attr-defined]
    findings.that(
        all(names == created[0] for names in created), f"links are made in different orders: {created}"
    )
    return result


def _played(world: World, device: FakeDevice) -> World:
    """The world with the NCCL transport in it; a single process has none."""
    watch = DeviceWatch(world.monitor, rank=world.rank, limit_seconds=LIMIT_SECONDS, start_thread=False)  # type: ignore[arg-type]
    transport = NcclTransport(
        rank=world.rank,
        size=world.size,
        limit_seconds=LIMIT_SECONDS,
        layer=device,
        calls=GlooLinks(device),  # type: ignore[arg-type]
        watch=watch,
        groups=OwnedGroups(owns_default_group=False),
    )
    return replace(world, transport=transport, runs_behind=True)


@contextmanager
def _operators_on(device: FakeDevice, host_reads: int) -> Iterator[None]:
    """Within it, the runtime's operators go to the device; compiling does not."""

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with OnDevice(device, allowed_reads=host_reads):
                return original(*args, **kwargs)

        return run

    def hidden(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with without_modes():
                return original(*args, **kwargs)

        return run

    wrapped = {
        "begin": recorded,
        "forward": recorded,
        "backward": recorded,
        "infer": recorded,
        "executor": hidden,
    }
    originals = {name: getattr(GraphRuntime, name) for name in wrapped}
    for name, wrap in wrapped.items():
        setattr(GraphRuntime, name, wrap(originals[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(GraphRuntime, name, original)


@contextmanager
def _first_runs(device: FakeDevice, met: list[str]) -> Iterator[None]:
    """Within it, ``met`` notes first runs of a stage, for shapes that it has not had, while messages are
    under way.
    """
    seen: set[tuple[Any, ...]] = set()

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(stage: CompiledStage, values: Any, *args: Any, **kwargs: Any) -> Any:
            key = (
                id(stage),
                name,
                *(tuple(value.shape) for value in values if isinstance(value, torch.Tensor)),
            )
            if key not in seen and device.num_under_way():
                met.append(f"{name} of a stage, {device.num_under_way()} message(s)")
            seen.add(key)
            return original(stage, values, *args, **kwargs)

        return run

    originals = {name: getattr(CompiledStage, name) for name in ("forward", "backward", "infer")}
    for name, original in originals.items():
        setattr(CompiledStage, name, watched(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(CompiledStage, name, original)
