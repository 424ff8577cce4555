"""Which device a rank takes, what others tell of themselves, and how a missing rank of this host is found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from rannc_backend.errors import CommunicationError, LaunchError
from rannc_backend.runtime.comm.gloo import DistWork, SingleTransport
from rannc_backend.runtime.job import bootstrap, make_transport, start_watch
from rannc_backend.runtime.launch import Launch
from rannc_backend.runtime.world import StartOptions


@pytest.mark.parametrize(
    ("options", "rank_records", "expected"),
    [
        (StartOptions(), [["a", "", 0], ["a", "", 0]], ["cpu", "cpu"]),
        (StartOptions(), [["a", "", 2], ["a", "", 2], ["b", "", 2]], ["cuda:0", "cuda:1", "cuda:0"]),
        (StartOptions(), [["a", "0,1", 2], ["b", "", 1], ["a", "0,1", 2]], ["cuda:0", "cuda:0", "cuda:1"]),
        (StartOptions(), [["a", "3", 1], ["a", "5", 1]], ["cuda:0", "cuda:0"]),
        (StartOptions(device="cpu"), [["a", "", 1], ["a", "", 1]], ["cpu", "cpu"]),
        (StartOptions(share_devices="gloo"), [["a", "", 1], ["a", "", 1]], ["cuda:0", "cuda:0"]),
        (
            StartOptions(share_devices="nccl"),
            [["a", "", 2], ["a", "", 2], ["a", "", 2]],
            ["cuda:0", "cuda:1", "cuda:0"],
        ),
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch,
    options: StartOptions,
    rank_records: list[bootstrap.RankRecord],
    expected: list[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert [
        str(bootstrap._choose_device(options, rank_records, rank=rank)) for rank in range(len(rank_records))
    ] == expected


def test_more_ranks_than_devices() -> None:
    rank_records = [["a", "", 1], ["a", "", 1]]
    with pytest.raises(LaunchError, match=r"2 ranks on host a but 1 CUDA device"):
        bootstrap._choose_device(StartOptions(), rank_records, rank=1)


def test_some_ranks_without_a_device() -> None:
    rank_records = [["a", "", 1], ["b", "", 0]]
    with pytest.raises(LaunchError, match=r"rank\(s\) 1 see no CUDA device and the others do"):
        bootstrap._choose_device(StartOptions(), rank_records, rank=0)


def test_ranks_on_one_gpu_need_the_switch() -> None:
    assert bootstrap._with_sharing(StartOptions(), {}).share_devices == ""
    assert bootstrap._with_sharing(StartOptions(), {bootstrap.SHARE_VARIABLE: "nccl"}).share_devices == "nccl"
    with pytest.raises(LaunchError, match="TEST_RANNC_SHARE_GPU is 'mpi'"):
        bootstrap._with_sharing(StartOptions(), {bootstrap.SHARE_VARIABLE: "mpi"})


def test_ranks_on_one_gpu_pass_for_hosts() -> None:
    first: dict[str, str] = {}
    second = {"NCCL_MAX_CTAS": "4", "NCCL_NET": "IB"}
    make_transport.set_nccl_environment(first, rank=0, shared=True)
    make_transport.set_nccl_environment(second, rank=1, shared=True)
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"] and first["NCCL_SOCKET_IFNAME"] == "lo"
    assert second["NCCL_MAX_CTAS"] == "4" and second["NCCL_NET"] == "IB", "what the user has set stays"
    alone: dict[str, str] = {}
    make_transport.set_nccl_environment(alone, rank=0, shared=False)
    assert not [name for name in alone if name.startswith("NCCL")]


class Store:
    """Of a job in which only rank 0 has come."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_ranks_that_do_not_start_are_named() -> None:
    with pytest.raises(CommunicationError, match=r"rank\(s\) 1, 2 have not started .*limit 0.1 s") as caught:
        bootstrap._gather_json(
            Store(),
            Launch(launcher="torchrun", rank=0, size=3),
            "rank record",
            make_transport.own_rank_record(),
            0.1,
        )
    assert caught.value.peer == 1


RECORD = ["host", "", 0, "place", "network", [["eth0", "10.0.0.1", "255.255.255.0"]], "ff"]


@pytest.mark.parametrize(
    "written",
    [
        "[" * 10_000,
        "1",
        "\udcff",
        "[" + "1," * 100_000 + "1]",
        json.dumps(RECORD[:-1]),
        json.dumps([*RECORD[:2], True, *RECORD[3:]]),
        json.dumps([*RECORD[:-1], [["eth0", "10.0.0.1; rm -rf", "255.255.255.0"]]]),
        json.dumps([*RECORD[:-1], [["eth0", 1, 1]]]),
        json.dumps([*RECORD[:-1], [[]]]),
        json.dumps([*RECORD[:-1], {"a": 1}]),
    ],
)
def test_what_the_store_holds_is_checked(written: str) -> None:
    """Anybody who reaches a store may write into it."""
    store, launch = HashStore(), Launch(launcher="torchrun", rank=0, size=2)
    store.set("rannc/rank record/1", written.encode(errors="surrogateescape"))
    with pytest.raises(LaunchError, match="what a rank") as caught:
        for rank_record in bootstrap._gather_json(store, launch, "rank record", RECORD, 1.0):
            make_transport.checked_rank_record(rank_record)
    assert "store" in str(caught.value)
    store.set("rannc/rank record/1", json.dumps(RECORD))
    assert [
        make_transport.checked_rank_record(rank_record)
        for rank_record in bootstrap._gather_json(store, launch, "rank record", RECORD, 1.0)
    ] == [RECORD, RECORD]


def test_importing_the_runtime_starts_nothing() -> None:
    script = (
        "import sys, rannc_backend.runtime.job.bootstrap, torch.distributed as d\n"
        "assert 'mpi4py' not in sys.modules and not d.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


class FailingWork:
    """A Work of torch.distributed that fails."""

    def __init__(self, text: str) -> None:
        self.text = text

    def wait(self, limit: object = None) -> None:
        raise RuntimeError(self.text)


class Endpoint:
    """What DistWork needs of its transport."""

    rank = 3
    limit_seconds = 60.0

    def __init__(self) -> None:
        self.watch = self
        self.waits: list[tuple[int, ...]] = []

    def before_wait(self) -> None:
        self.waits.append(())

    def begin_wait(self, ranks: tuple[int, ...]) -> None:
        self.waits.append(ranks)

    def end_wait(self) -> None:
        self.waits.append(())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Timed out waiting 500ms for recv", "receive of 'c' did not complete in time (limit 0.5 s)"),
        ("Connection closed by peer\nmore", "receive of 'c' broke: Connection closed by peer"),
    ],
)
def test_a_wait_that_fails(text: str, expected: str) -> None:
    endpoint = Endpoint()
    work = DistWork(endpoint, FailingWork(text), torch.empty(1), peers=(1,), what="receive of 'c'")  # type: ignore[arg-type]
    with pytest.raises(CommunicationError) as caught:
        work.wait(0.5)
    cause, place, _ = str(caught.value).splitlines()
    assert (cause, place) == (expected, "  at rank 3, with rank 1") and endpoint.waits == [(), (1,)]


def test_no_messages_in_a_job_of_one() -> None:
    with pytest.raises(AssertionError, match="message 'c' to rank 1 in a job of one process"):
        SingleTransport().isend(torch.empty(1), 1, "c")


PARENT = """
import os, subprocess, sys
child = "import time; print('up', flush=True); time.sleep(30)"
ranks = [subprocess.Popen([sys.executable, "-c", child], env={**os.environ, "RANK": str(rank)}) for rank in range(3)]
for line in sys.stdin:
    ranks[int(line)].kill()
    ranks[int(line)].wait()
    print("gone", flush=True)
for rank in ranks:
    rank.kill()
"""


def test_the_watch_sees_ranks_come_and_go() -> None:
    if not Path("/proc/self/environ").exists():
        return
    environ = {name: value for name, value in os.environ.items() if name != "RANK"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=-1, stdout=-1, text=True, env=environ)
    assert parent.stdin is not None and parent.stdout is not None
    try:
        for _ in range(3):
            parent.stdout.readline()
        children = [
            int(name)
            for name in os.listdir("/proc")
            if name.isdecimal() and start_watch.parent_of(int(name)) == parent.pid
        ]
        assert {start_watch.launcher_of(child, "RANK") for child in children} == {parent.pid}
        assert start_watch.ranks_below(parent.pid, "RANK").keys() == {0, 1, 2}
        assert all(
            0 < start_watch.age_seconds(child) < 60
            for child in start_watch.ranks_below(parent.pid, "RANK").values()
        )
        parent.stdin.write("1\n")
        parent.stdin.flush()
        parent.stdout.readline()
        assert start_watch.ranks_below(parent.pid, "RANK").keys() == {0, 2}
    finally:
        parent.stdin.close()
        parent.wait(10)


@pytest.mark.parametrize("port", ["9" * 5000, "many", "-1", "70000", "\udc80", ""])
def test_a_port_that_is_none(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": "1",
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    launch = bootstrap.find_launch(os.environ)
    with pytest.raises(
        LaunchError, match="(?s)rank 1 cannot meet the others at .*MASTER_PORT are rank 0's"
    ) as caught:
        bootstrap._torchrun_world(bootstrap.StartOptions(start_limit_seconds=1), launch)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "PMI_SIZE": "4"}, ("PMI_RANK", 2, 4)),
        # One rank on each host; a rank started by hand, whose neighbours nobody tells; srun.
        ({"RANK": "1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}, ("RANK", 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("RANK", 0, 2)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}, ("SLURM_PROCID", 0, 8)),
        # torchrun within mpirun, and mpirun of one rank around torchrun.
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"},
            ("RANK", 0, 4),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "RANK": "1", "WORLD_SIZE": "4"}, ("RANK", 0, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        ({"SLURM_PROCID": "0"}, None),
        ({"RANK": "many", "WORLD_SIZE": "9" * 5000}, None),
        ({}, None),
    ],
)
def test_what_the_watch_reads_of_the_launcher(
    environ: dict[str, str], found: tuple[str, int, int] | None
) -> None:
    assert start_watch.find_variables(environ) == found


def test_a_stopped_rank_and_one_that_has_not_come_are_missing() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "RANK"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=-1, stdout=-1, text=True, env=environ)
    assert parent.stdin is not None and parent.stdout is not None
    try:
        for _ in range(3):
            parent.stdout.readline()
        ranks = start_watch.ranks_below(parent.pid, "RANK")
        os.kill(ranks[2], signal.SIGSTOP)
        until = time.monotonic() + 10
        while start_watch.status_of(ranks[2])[0] != b"T" and time.monotonic() < until:
            time.sleep(0.01)
        missing = start_watch.missing_ranks(parent.pid, "RANK")
        assert {rank: pid for rank, (pid, _) in missing.items()} == ranks
        text = start_watch.missing_text({rank: missing[rank] for rank in (1, 2)})
        assert text == "rank 1 has not called a compiled model, rank 2 is stopped"
        assert start_watch.missing_ranks(0, "RANK") == {}
    finally:
        parent.stdin.close()
        parent.wait(10)


def test_no_watch_without_a_launcher() -> None:
    for environ in ({"RANK": "0"}, {"RANK": "0", "LOCAL_WORLD_SIZE": "1"}):
        watch = start_watch.StartWatch()
        watch.begin(environ)
        assert watch._watch is None
        with watch:
            pass


def test_watches_are_known_by_their_arguments_and_their_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name in the host's list of sockets, which another user could take first: processes, which only this
    user can have.
    """
    script = "import time; print(flush=True); time.sleep(30)"
    launcher = f"4000000:{os.getpid()}"
    arguments = [
        ["helper.py", "start_watch", "10", "0", launcher],
        ["/a/helper.py", "start_watch", "11", "1", launcher],
        ["helper.py", "start_watch", "12", "2", "4000000:0"],
        ["helper.py", "supervisor", "13", "3", launcher],
        ["other.py", "start_watch", "14", "4", launcher],
        ["helper.py", "start_watch", launcher],
    ]
    # "-" reads the program from the standard input, and takes the place of an option here.
    processes = [
        subprocess.Popen([sys.executable, "-I", "-", *given], stdin=-1, stdout=-1, text=True)
        for given in arguments
    ]
    try:
        for process in processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(script)
            process.stdin.close()
            process.stdout.readline()
        assert start_watch.watches_of(launcher) == {0: processes[0].pid, 1: processes[1].pid}
        monkeypatch.setattr(start_watch, "is_ours", lambda pid: pid == processes[1].pid)
        assert start_watch.watches_of(launcher) == {1: processes[1].pid}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_there_are_no_names_of_sockets() -> None:
    """What has a name on the host can be taken, or found, by other users."""
    product = Path(start_watch.__file__).parents[1]
    found = [
        path.name
        for path in product.rglob("*.py")
        if "AF_UNIX" in path.read_text() or 'bind(f"\\0' in path.read_text()
    ]
    assert not found
