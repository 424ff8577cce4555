"""Which cluster a job plans for, the file that remembers a measured one, and what links are made of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.errors import ClusterFileError
from rannc_backend.planner.cluster import this_machine as calibration
from rannc_backend.planner.cluster.calibrate import DeviceRates, Stopwatch
from rannc_backend.planner.cluster.cluster import Cluster, Link
from rannc_backend.planner.cluster.cluster_file import load_cluster, read_cluster
from rannc_backend.planner.cluster.this_machine import (
    cache_directory,
    choose_cluster,
    device_memory_bytes,
    ranks_per_node,
)
from rannc_backend.planner.cost.transfer import allreduce_seconds, message_seconds
from rannc_backend.runtime.comm.control import SingleControl
from rannc_backend.runtime.comm.gloo import SingleTransport
from rannc_backend.runtime.job.monitor import SingleMonitor
from rannc_backend.runtime.trace.link_speed import TransferSeconds
from rannc_backend.runtime.world import World
from rannc_backend.settings.options import Config

RATES = DeviceRates(
    flops_per_second={"float32": 1.23456e11, "bfloat16": 2e11},
    memory_bytes_per_second=3e10,
    launch_seconds=7e-6,
    efficiencies={"matmul": 1.0, "attention": 0.75, "convolution": 1.25, "elementwise": 0.5},
)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[torch.device]:
    """The devices that were measured: no test here waits for it."""
    devices: list[torch.device] = []

    def measure(watch: Stopwatch, together: Callable[[], None]) -> DeviceRates:
        together()
        devices.append(watch.device)
        return RATES

    monkeypatch.setattr(calibration, "measure_device", measure)
    logging.getLogger("rannc_backend").propagate = True
    caplog.set_level(logging.INFO)
    return devices


def world(*hosts: str, rank: int = 0) -> World:
    hosts = hosts or ("here",)
    return World(
        rank=rank,
        size=len(hosts),
        local_rank=0,
        hosts=hosts,
        device=torch.device("cpu"),
        launcher="single",
        control=SingleControl(),
        transport=SingleTransport(),
        monitor=SingleMonitor(),
    )


def remembered(directory: Path) -> list[Path]:
    return sorted((directory / "clusters").iterdir())


def choose(directory: Path, **numbers: int) -> Cluster:
    return choose_cluster(Config(cache_dir=str(directory)), world(), **numbers)


def test_the_machine_at_hand_is_measured_once(tmp_path: Path, measured: list[torch.device]) -> None:
    first = choose(tmp_path)
    assert measured == [torch.device("cpu")]
    assert first.num_devices == first.devices_per_node == 1 and first.device.name == "cpu"
    assert first.device.flops_per_second == (("bfloat16", 2e11), ("float32", 1.235e11)), "four digits, sorted"
    assert first.device.rate("float32", "attention") == pytest.approx(0.75 * 1.235e11)
    assert first.device.memory_rate("elementwise") == 1.5e10 and first.device.launch_seconds == 7e-6
    generic = load_cluster("generic-cpu", 1)
    assert (first.intra_node, first.inter_node) == (generic.intra_node, generic.inter_node), (
        "one process measures no links"
    )
    assert choose(tmp_path) == first and len(measured) == 1
    (file,) = remembered(tmp_path)
    assert read_cluster(file, 1) == first
    assert file.read_text().count('source = "measured"') == 10
    assert file.read_text().count('source = "as generic-cpu, not measured"') == 6


def test_another_identity_is_measured_for_itself(
    tmp_path: Path, measured: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(tmp_path)
    changes: list[tuple[object, str, object]] = [
        (calibration, "_cpu_model", lambda: "another CPU"),
        (torch, "get_num_threads", lambda: 77),
        (torch, "__version__", "99.0"),
        (calibration, "_VERSION", calibration._VERSION + 1),
    ]
    for number, (owner, name, value) in enumerate(changes):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            choose(tmp_path)
            assert len(measured) == len(remembered(tmp_path)) == number + 2, name
            choose(tmp_path)
            assert len(measured) == number + 2, f"{name}: remembered under its own name"
    choose(tmp_path)
    assert len(measured) == len(changes) + 1


def test_ranks_and_nodes_belong_to_the_identity() -> None:
    rank_records = [calibration._Device(name="x", kind="cpu", memory_bytes=2**30, num_threads=1)]
    placed = [("a",), ("a", "a"), ("a", "a", "a", "a"), ("a", "a", "b", "b"), ("a", "b", "a", "b")]
    names = [
        calibration._identity(rank_records, world(*hosts), ranks_per_node(hosts), Config())
        for hosts in placed
    ]
    assert len(set(names)) == len(placed)
    assert calibration._identity(rank_records, world("c", "c"), 2, Config()) == names[1], (
        "but not what a host is called"
    )
    assert calibration._identity(rank_records, world("a", "a"), 2, Config(shared_memory=False)) != names[1]


@pytest.mark.parametrize(
    "damage", [b"", b"\xff", b"format = 1", b"[", b"format = 1\nname = 'x'\nlaunch_seconds = nan"]
)
def test_a_damaged_file_is_measured_again(
    damage: bytes, tmp_path: Path, measured: list[torch.device], caplog: pytest.LogCaptureFixture
) -> None:
    first = choose(tmp_path)
    (file,) = remembered(tmp_path)
    file.write_bytes(damage)
    assert choose(tmp_path) == first and len(measured) == 2
    assert "cannot be used and is measured again" in caplog.text
    assert read_cluster(file, 1) == first, "and replaced"


def test_what_cannot_be_remembered_is_used(
    tmp_path: Path, measured: list[torch.device], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert choose(tmp_path / "file").device.launch_seconds == 7e-6
    assert "is not remembered" in caplog.text and len(measured) == 1


def test_the_file_appears_at_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose(tmp_path)
    (file,) = remembered(tmp_path)
    good = file.read_bytes()
    file.write_bytes(b"damaged")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    choose(tmp_path)
    assert remembered(tmp_path) == [file] and file.read_bytes() == b"damaged", (
        "no half of a new one, and no temporary one"
    )
    assert "No space left" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(calibration, "measure_device", lambda watch, together: RATES)
    choose(tmp_path)
    assert file.read_bytes() == good, "same measurement, same bytes"


def test_where_files_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_directory(Config(cache_dir="/some/where")) == Path("/some/where")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_directory(Config()) == Path("/caches/rannc")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_directory(Config()) == Path("/home/somebody/.cache/rannc")


def test_a_described_cluster_has_the_ranks_of_the_job(measured: list[torch.device]) -> None:
    config = Config(cluster="a100-40gb")
    assert choose_cluster(config, world("a", "a", "b", "b")) == load_cluster("a100-40gb", 4)
    assert choose_cluster(config, world(), num_devices=96, devices_per_node=4) == load_cluster(
        "a100-40gb", 96, 4
    )
    with pytest.raises(ClusterFileError, match="did you mean 'a100-40gb'"):
        choose_cluster(Config(cluster="a100-40"), world())
    assert not measured


def test_a_dry_run_is_for_more_machines_of_this_kind(tmp_path: Path) -> None:
    here = choose(tmp_path)
    one_machine = choose(tmp_path, num_devices=32)
    assert (one_machine.num_devices, one_machine.devices_per_node) == (32, 32)
    assert one_machine.device.memory_bytes == here.device.memory_bytes // 32, "they share its memory"
    several = choose(tmp_path, num_devices=32, devices_per_node=2)
    assert (several.num_devices, several.devices_per_node) == (32, 2)
    assert several.device == replace(here.device, memory_bytes=here.device.memory_bytes // 2)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", 1),
        ("aaaa", 4),
        ("aabb", 2),
        ("aaaabb", 2),
        ("aaab", 1),
        ("abab", 1),
        ("aabbaa", 2),
        ("aaabbbccc", 3),
    ],
)
def test_ranks_per_node(hosts: str, expected: int) -> None:
    assert ranks_per_node(tuple(hosts)) == expected


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_no_node_spans_hosts(hosts: list[str]) -> None:
    size = ranks_per_node(hosts)
    assert len(hosts) % size == 0
    assert all(len(set(hosts[first : first + size])) == 1 for first in range(0, len(hosts), size))


@given(
    latency=st.floats(1e-6, 1e-4),
    bandwidth=st.floats(1e8, 1e12),
    share=st.floats(0.05, 5.0),
    num_ranks=st.integers(2, 64),
)
def test_a_link_is_found_from_what_it_does(
    latency: float, bandwidth: float, share: float, num_ranks: int
) -> None:
    link = Link(latency_seconds=latency, bytes_per_second=bandwidth, allreduce_share=share)
    size = 2**28
    times = {
        "near_message": TransferSeconds(
            small=latency, large=float(message_seconds(link, size)), large_bytes=size
        ),
        "near_allreduce": TransferSeconds(
            small=float(allreduce_seconds(link, 1, num_ranks)),
            large=float(allreduce_seconds(link, size, num_ranks)),
            large_bytes=size,
        ),
    }
    found = calibration._link("near", [times, {}, times], num_ranks, link)
    assert found.latency_seconds == pytest.approx(latency, rel=1e-3)
    assert found.bytes_per_second == pytest.approx(bandwidth, rel=0.01)
    assert found.allreduce_share == pytest.approx(share, rel=0.02)
    assert calibration._link("far", [times], num_ranks, link) is link, "nobody measured that one"


@given(small=st.floats(1e-6, 1.0), large=st.floats(1e-6, 1.0))
def test_a_disturbed_measurement_promises_no_more_than_twice_what_was_seen(
    small: float, large: float
) -> None:
    size = 2**22
    times = TransferSeconds(small=small, large=large, large_bytes=size)
    found = calibration._link(
        "near",
        [{"near_message": times, "near_allreduce": times}],
        2,
        load_cluster("generic-cpu", 2).intra_node,
    )
    assert size / large * 0.99 <= found.bytes_per_second <= 2.01 * size / large
    assert found.latency_seconds <= large
    if large <= small:
        assert found.allreduce_share == 1.0, "all-reduces that say nothing about bytes"


def test_ranks_agree_on_the_median_and_on_the_smallest_memory(caplog: pytest.LogCaptureFixture) -> None:
    rank_records = [
        calibration._Device(name=name, kind="cpu", memory_bytes=size, num_threads=2)
        for name, size in (("x", 3), ("x", 2), ("y", 4))
    ]
    rates = [replace(RATES, launch_seconds=seconds) for seconds in (1.0, 5.0, 2.0)]
    cluster = calibration._assembled(
        rank_records, rates, [{}, {}, {}], world("h", "h", "h"), 3, load_cluster("generic-cpu", 3)
    )
    assert cluster.device.launch_seconds == 2.0 and cluster.device.memory_bytes == 2
    assert cluster.num_devices == cluster.devices_per_node == 3 and "2 thread(s)" in cluster.name
    assert "different devices" in caplog.text


def test_ranks_share_the_cores_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert calibration._core_share(world("a")) == calibration._core_share(world("a", "a", "b")) == 1.0
    assert calibration._core_share(world(*"aaaa")) == 0.5
    assert calibration._core_share(world(*"aaaab", rank=4)) == 1.0


def test_ranks_share_the_memory_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 8}[name])
    assert [device_memory_bytes(world(*hosts)) for hosts in ("a", "aaaa", "ab")] == [8000, 2000, 8000]
    assert device_memory_bytes(world(*"abbb", rank=3)) == 8000 // 3
