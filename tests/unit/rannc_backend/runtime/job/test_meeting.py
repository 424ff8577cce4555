"""Where ranks meet, and that what listens there listens nowhere else."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from rannc_backend.errors import LaunchError
from rannc_backend.runtime.job import meeting as meetings
from rannc_backend.runtime.job.meeting import Address, find_meeting

LIMIT = datetime.timedelta(seconds=5)
FAST, MANAGEMENT = ["fast0", "10.0.1.{}", "255.255.255.0"], ["eth0", "10.0.9.{}", "255.255.255.0"]


def of_host(number: int, *interfaces: list[str]) -> list[Address]:
    return [[name, address.format(number), mask] for name, address, mask in interfaces]


def listening() -> set[str]:
    return {found.laddr.ip for found in psutil.Process().net_connections() if found.status == "LISTEN"}


def test_ranks_of_one_network_meet_on_the_loopback() -> None:
    meeting = find_meeting(
        rank=1, networks=["n", "n"], addresses=[of_host(1, FAST), of_host(1, FAST)], known=[[], []]
    )
    assert meeting == meetings.Meeting(address="127.0.0.1", interface="lo", is_one_host=True)


@pytest.mark.parametrize(
    ("own", "others", "known", "expected"),
    [
        # By the name that rank 0's host has elsewhere, which need not be the first address.
        ([MANAGEMENT, FAST], [[MANAGEMENT, FAST]], [["10.0.1.1"]], "10.0.1.1"),
        # Elsewhere the name is the loopback, as in /etc/hosts of many: then by the subnet.
        ([MANAGEMENT, FAST], [[FAST]], [["127.0.1.1"]], "10.0.1.1"),
        # One of the others knows another address by name than the rest: what all can see.
        ([MANAGEMENT, FAST], [[FAST, MANAGEMENT], [MANAGEMENT]], [["10.0.1.1"], []], "10.0.9.1"),
        (
            [["v6", "fd00::{}", "ffff:ffff:ffff:ffff::"]],
            [[["v6", "fd00::{}", "ffff:ffff:ffff:ffff::"]]],
            [[]],
            "fd00::1",
        ),
    ],
)
def test_ranks_of_several_hosts_meet_where_all_see_rank_0(
    own: list[list[str]], others: list[list[list[str]]], known: Sequence[Sequence[str]], expected: str
) -> None:
    networks = [f"n{number}" for number in range(len(others) + 1)]
    addresses = [
        of_host(1, *own),
        *(of_host(number + 2, *interfaces) for number, interfaces in enumerate(others)),
    ]
    meeting = find_meeting(rank=0, networks=networks, addresses=addresses, known=[[], *known])
    assert (meeting.address, meeting.is_one_host) == (expected, False)
    assert meeting.interface == next(name for name, address, _ in addresses[0] if address == expected)


def test_hosts_that_do_not_see_each_other_are_refused() -> None:
    with pytest.raises(
        LaunchError, match=r"rank 0's host has the addresses 10.0.1.1, and the other hosts know none .*"
    ) as caught:
        find_meeting(
            rank=1,
            networks=["a", "b"],
            addresses=[of_host(1, FAST), of_host(2, MANAGEMENT)],
            known=[[], ["10.0.7.7"]],
        )
    assert "GLOO_SOCKET_IFNAME" in str(caught.value)


def test_the_users_interface_goes_first_and_stays() -> None:
    addresses = of_host(1, MANAGEMENT, FAST)
    assert meetings.chosen_first(addresses, {"GLOO_SOCKET_IFNAME": "fast0"}) == of_host(1, FAST)
    assert meetings.chosen_first(addresses, {}) == addresses
    environ = {"NCCL_SOCKET_IFNAME": "ib0"}
    meetings.use_interface("fast0", environ)
    assert environ == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "fast0"}


def test_own_addresses_are_those_that_others_reach() -> None:
    for name, address, _ in meetings.own_addresses():
        assert name != "lo" and not address.startswith(("127.", "fe80", "0.")) and address != "::1"


@pytest.mark.parametrize(
    ("environ", "inside"),
    [
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, True),
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, False),
        ({"PMI_SIZE": "4"}, False),
        ({}, False),
    ],
)
def test_mpi_stays_on_the_loopback_where_all_ranks_are_here(environ: dict[str, str], inside: bool) -> None:
    before = dict(environ)
    meetings.keep_mpi_inside(environ)
    added = {name: environ[name] for name in environ.keys() - before.keys()}
    assert added == (
        {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo", "OMPI_MCA_btl_tcp_if_include": "lo"} if inside else {}
    )
    chosen = before | {"UCX_NET_DEVICES": "mlx5_0:1"}
    meetings.keep_mpi_inside(chosen)
    assert chosen["UCX_NET_DEVICES"] == "mlx5_0:1"


def test_a_store_listens_at_its_address_alone() -> None:
    before = listening()
    server = meetings.store_at("127.0.0.1", 0, is_master=True, size=2, limit=LIMIT)
    client = meetings.store_at("127.0.0.1", server.port, is_master=False, size=2, limit=LIMIT)
    client.set("a", "b")
    assert server.get("a") == b"b"
    assert listening() - before <= {"127.0.0.1"}
    del client, server


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("name", "more", "made"),
    [
        ("127.0.0.1", {}, True),
        ("localhost", {}, True),
        # A name for the loopback here may be another address elsewhere, unless there is no elsewhere.
        ("this-host", {}, False),
        ("this-host", {"LOCAL_WORLD_SIZE": "2"}, True),
        # Another host's: of a service, or translated.
        ("192.0.2.77", {}, False),
        ("no-such-name.invalid", {}, False),
        ("127.0.0.1", {"TORCHELASTIC_USE_AGENT_STORE": "True"}, False),
        ("127.0.0.1", {"MASTER_PORT": "x"}, False),
    ],
)
def test_rank_0s_own_store_listens_at_the_masters_address(
    monkeypatch: pytest.MonkeyPatch, name: str, more: dict[str, str], made: bool
) -> None:
    known = meetings.addresses_of_name
    monkeypatch.setattr(
        meetings, "addresses_of_name", lambda asked: ["127.0.0.1"] if asked == "this-host" else known(asked)
    )
    before, port = listening(), free_port()
    environ = {"MASTER_ADDR": name, "MASTER_PORT": str(port), "WORLD_SIZE": "2"} | more
    store = meetings.store_of_environment(environ, size=2, limit=LIMIT)
    assert (store is not None) == made
    if store is not None:
        assert store.port == port and listening() - before <= {"127.0.0.1"}


def test_a_store_that_the_user_has_made_is_left_to_torch() -> None:
    theirs = meetings.store_at("127.0.0.1", 0, is_master=True, size=2, limit=LIMIT)
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(theirs.port), "WORLD_SIZE": "2"}
    assert meetings.store_of_environment(environ, size=2, limit=LIMIT) is None


def test_a_store_in_a_folder_is_for_its_user_only(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir(mode=0o700)
    stores = [meetings.store_in(str(folder), size=2, limit=LIMIT) for _ in range(2)]
    stores[0].set("a", "b")
    assert stores[1].get("a") == b"b"
    status = folder.stat()
    assert meetings.identity_of(str(folder)) == [status.st_dev, status.st_ino]
    for mode in (0o750, 0o701, 0o777):
        folder.chmod(mode)
        assert meetings.identity_of(str(folder)) == []
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    assert meetings.identity_of(str(tmp_path / "link")) == [] == meetings.identity_of(str(tmp_path / "none"))


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    assert meetings.identity_of(str(tmp_path))
    monkeypatch.setattr(meetings.os, "geteuid", lambda: os.getuid() + 1)
    assert meetings.identity_of(str(tmp_path)) == []
