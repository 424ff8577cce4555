"""Parameters on the host: copies that are there when a stage reads them, new in each run, and gone when nobody needs
them; nothing is read or freed while a copy is under way.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rannc_backend.ir.action import parse_programs
from rannc_backend.runtime.comm.host_link import HostLink, StageParameters
from rannc_backend.runtime.trace.allocations import AllocationTracker
from tests.fake_device import FakeDevice, FakeStream, OnDevice

CPU = torch.device("cpu")
NAMES = {0: ["a", "tied"], 1: ["tied", "b"]}
PROGRAM = parse_programs("lane 0: 0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1")[0]
SIZE = 4


def link(device: FakeDevice | None = None) -> HostLink:
    return HostLink(device=CPU, parameters=AllocationTracker(), gradients=AllocationTracker(), layer=device)


def parameters() -> dict[str, torch.Tensor]:
    tensors = {
        name: torch.nn.Parameter(torch.full((SIZE,), float(value))) for value, name in enumerate("abt")
    }
    return {"a": tensors["a"], "b": tensors["b"], "tied": tensors["t"]}


def run(copies: StageParameters, read: Callable[[int, str, torch.Tensor], None]) -> None:
    """The forwards of the program; ``read`` is told what each stage reads."""
    copies.begin(PROGRAM)
    for action in PROGRAM:
        if str(action).partition("F")[1]:
            copies.forward_begins(action.stage)
            for name in copies.names(action.stage):
                read(action.stage, name, copies.of(action.stage, name))
            copies.forward_done(action.stage)
    copies.end()


def test_copies_are_new_in_each_run_and_gone_after_the_last_forward_unless_something_holds_them() -> None:
    tensors, host = parameters(), link()
    copies = StageParameters(link=host, tensors=tensors, names=NAMES.__getitem__)
    saved: list[torch.Tensor] = []

    def read(stage: int, name: str, copy: torch.Tensor) -> None:
        assert torch.equal(copy, tensors[name].detach()) and not copy.requires_grad
        assert copy.untyped_storage().data_ptr() != tensors[name].untyped_storage().data_ptr()
        if name == "a":
            saved.append(copy)

    run(copies, read)
    assert host.parameters.peak_bytes == 3 * SIZE * 4, "what two stages share is copied once"
    assert host.parameters.live_bytes == SIZE * 4, "what backward needs"
    assert saved[0].data_ptr() == saved[1].data_ptr(), "one copy for all micro-batches"
    saved.clear()
    assert host.parameters.live_bytes == 0
    with torch.no_grad():
        tensors["a"].add_(1.0)
        tensors["b"].data = torch.full((SIZE,), 7.0)
    run(copies, read)
    assert torch.equal(saved[0], torch.full((SIZE,), 1.0))


@pytest.mark.parametrize("without", [0, 1])
def test_a_stage_may_have_no_parameters(without: int) -> None:
    tensors, host, seen = parameters(), link(), []
    names = NAMES | {without: []}
    copies = StageParameters(link=host, tensors=tensors, names=names.__getitem__)
    run(copies, lambda stage, name, copy: seen.append((stage, name)))
    assert sorted(set(seen)) == sorted((1 - without, name) for name in NAMES[1 - without])
    assert host.parameters.live_bytes == 0


def test_a_run_that_was_not_ended_leaves_nothing_behind() -> None:
    tensors, host = parameters(), link()
    copies = StageParameters(link=host, tensors=tensors, names=NAMES.__getitem__)
    copies.begin(PROGRAM)
    copies.forward_begins(0)
    with torch.no_grad():
        tensors["a"].fill_(9.0)
    run(copies, lambda stage, name, copy: torch.testing.assert_close(copy, tensors[name].detach()))
    assert host.parameters.live_bytes == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).reshape(3, 4).t(),
        lambda: torch.arange(24.0).reshape(4, 6)[1:, 1:4],
        lambda: torch.arange(3.0).expand(4, 3),
        lambda: torch.zeros(0, 4),
        lambda: torch.tensor(3.0),
        lambda: torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "padded", "expanded", "empty", "scalar", "channels_last"],
)
def test_copies_have_the_layouts_of_what_they_copy(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    (copy,), under_way = link().fetch([tensor])
    under_way.wait()
    assert torch.equal(copy, tensor) and copy.stride() == tensor.stride() and copy.shape == tensor.shape
    assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not tensor.numel()


def test_memory_is_kept_until_the_compute_stream_has_waited_and_no_longer() -> None:
    host = link(FakeDevice())
    copies, under_way = host.fetch([torch.ones(SIZE)])
    copies.clear()
    assert host.parameters.live_bytes == SIZE * 4
    under_way.wait()
    assert host.parameters.live_bytes == 0


def played(*, waits: bool = True, ends: bool = True) -> list[str]:
    """Races of two runs, with the parameters changed on the host in between, and a gradient brought to the host."""
    device = FakeDevice()
    host, tensors, own = link(device), parameters(), FakeStream("host", device)
    copies = StageParameters(link=host, tensors=tensors, names=NAMES.__getitem__)
    for _ in range(2):
        with OnDevice(device):
            if not waits:
                copies.begin(PROGRAM)
                copies.of(0, "a").add(1.0)
            else:
                run(copies, lambda stage, name, copy: copy.add(1.0))
        if not ends:
            device.host_seen = 0
        for tensor in tensors.values():
            device.operation("update", writes=[tensor], stream=own)
        device.host_seen |= own.seen  # the host has done it
    gradient = torch.ones(SIZE)
    with OnDevice(device):
        gradient.mul_(2.0)
        target = host.host_memory(SIZE, torch.float32)
        brought = host.bring(gradient, target)
        del gradient
        brought.wait()
    if ends:
        brought.wait_on_host()
    device.operation("read by the user", reads=[target], stream=own)
    device.host_seen |= own.seen
    return device.races


def test_nothing_is_read_changed_or_freed_while_a_copy_is_under_way() -> None:
    assert played() == []


def test_the_played_device_sees_what_is_not_waited_for() -> None:
    assert any("aten.add" in race for race in played(waits=False))
    races = played(ends=False)
    assert any(race.startswith("update on host") for race in races)
    assert any(race.startswith("read by the user") for race in races)
