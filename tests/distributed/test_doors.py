"""What listens while a job runs, what strangers can do there, and jobs of several hosts."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.harness.launch import Process, launcher
from tests.distributed.runtime_jobs import WORKERS, assert_ok, run_job
from tests.distributed.workers.door_worker import losses_of_one_process
from tests.strangers import Strangers

WORKER = WORKERS / "door_worker.py"


def told(folder: Path, world: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def assert_losses(answers: list[dict[str, Any]]) -> None:
    """Those of one process, on every rank."""
    expected = losses_of_one_process(len(answers[0]["losses"]))
    for answer in answers:
        assert answer["losses"] == pytest.approx(expected, rel=1e-12, abs=0)


def addresses(answers: list[dict[str, Any]]) -> set[str]:
    """At which anything of a job listens: of the internet only."""
    entries = [entry for answer in answers for entry in answer["listening"]]
    assert entries, "nothing listens, so nothing was looked at"
    assert {family for family, _ in entries} <= {"AF_INET", "AF_INET6", "AF_UNIX"}
    return {address.split()[0] for family, address in entries if family != "AF_UNIX"}


def hub_of(process: psutil.Process) -> psutil.Process:
    (supervisor,) = [
        child
        for child in process.children(recursive=True)
        if any("supervisor" in part for part in child.cmdline())
    ]
    return supervisor


def test_a_job_of_one_host_is_not_disturbed_and_listens_on_the_loopback_only(tmp_path: Path) -> None:
    """One job for both: 5,000 strangers at the monitor's port while it trains, and then what listens."""
    command = [*launcher(2), sys.executable, str(WORKER), str(tmp_path), "1,1", "until-stopped"]
    with Process(command, tmp_path / "output.log", {}) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "steps0").exists() and time.monotonic() < until:
            assert process.wait(0.1) is None, process.tail()
        (port,) = [
            found.laddr.port
            for found in hub_of(psutil.Process(process.handle.pid)).net_connections()
            if found.status == "LISTEN"
        ]
        strangers, begin = Strangers(port, seed=2), time.time()
        while time.time() - begin < 2 or strangers.num_challenged < 1000:
            strangers.come(250)
        end = time.time()
        strangers.go()
        (tmp_path / "stop").touch()
        code = process.wait(60)
    output = process.output.read_text()
    assert code == 0 and "[rannc]" not in output, output[-3000:]
    steps = [float(line) for line in (tmp_path / "steps0").read_text().split()]
    during = [moment for moment in steps if begin <= moment <= end]
    assert len(during) > 10 and max(after - before for before, after in zip(during, during[1:])) < 1.0
    answers = told(tmp_path, 2)
    assert_losses(answers)
    assert len(answers[0]["processes"]) > 1, "the monitor was not looked at"
    assert addresses(answers) == {"127.0.0.1"}
    assert answers[0]["interfaces"] == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.full
def test_under_torchrun_only_its_own_store_listens_elsewhere(tmp_path: Path) -> None:
    job = run_job(tmp_path, 2, "door_worker", str(tmp_path), "1,1", launcher="torchrun")
    assert_ok(job, 2)
    assert addresses(told(tmp_path, 2)) == {"127.0.0.1"}
    assert_losses(told(tmp_path, 2))


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Two network stacks of this machine, with a cable between them, and one that leads nowhere."""

    def __init__(self) -> None:
        mark = secrets.token_hex(3)
        self.names = [f"rannc{mark}{letter}" for letter in "ab"]
        number = secrets.randbelow(200)
        self.addresses = [f"10.213.{number}.{last}" for last in (1, 2)]

    def begin(self) -> None:
        for name in self.names:
            run("ip", "netns", "add", name)
        ends = [f"v{name}" for name in self.names]
        run(
            "ip",
            "link",
            "add",
            ends[0],
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            self.names[1],
        )
        for name, end, address in zip(self.names, ends, self.addresses):
            run("ip", "-n", name, "link", "add", "other", "type", "veth", "peer", "name", "nowhere")
            run("ip", "-n", name, "addr", "add", "10.99.0.1/24", "dev", "other")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            for interface in ("lo", "other", "nowhere", end):
                run("ip", "-n", name, "link", "set", interface, "up")

    def end(self) -> None:
        for name in self.names:
            with contextlib.suppress(RuntimeError):
                run("ip", "netns", "del", name)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    try:
        made.begin()
    except (FileNotFoundError, RuntimeError) as error:
        made.end()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield made
    made.end()


@pytest.mark.parametrize("names", ["one_name", pytest.param("own_names", marks=pytest.mark.full)])
def test_two_hosts_train_as_one_process(tmp_path: Path, hosts: Hosts, names: str) -> None:
    """Three ranks, two on the first host; either with names and processes of their own, or with the same name
    as the other host.
    """
    hosts_of_ranks = (0, 0, 1)
    running = []
    with contextlib.ExitStack() as stack:
        for rank, host in enumerate(hosts_of_ranks):
            rank_environment = {
                "RANK": str(rank),
                "WORLD_SIZE": "3",
                "LOCAL_RANK": str(hosts_of_ranks[:rank].count(host)),
                "LOCAL_WORLD_SIZE": str(hosts_of_ranks.count(host)),
                "MASTER_ADDR": hosts.addresses[0],
                "MASTER_PORT": "29513",
            }
            command = [sys.executable, str(WORKER), str(tmp_path), "1,2"]
            if names == "own_names":
                change = f'hostname {hosts.names[host]}; exec "$@"'
                command = ["unshare", "--uts", "--", "sh", "-c", change, "sh", *command]
            command = ["ip", "netns", "exec", hosts.names[host], *command]
            running.append(
                stack.enter_context(Process(command, tmp_path / f"output{rank}.log", rank_environment))
            )
        codes = [process.wait(90) for process in running]
    assert codes == [0, 0, 0], "\n".join(process.tail() for process in running)
    answers = told(tmp_path, 3)
    assert_losses(answers)
    # Neither on the loopback, where the other host would not find it, nor on the cable that leads nowhere,
    # nor on all.
    assert addresses(answers[:2]) == {hosts.addresses[0]} and addresses(answers[2:]) == {hosts.addresses[1]}
    for answer, host in zip(answers, hosts_of_ranks):
        assert answer["interfaces"]["GLOO_SOCKET_IFNAME"] == f"v{hosts.names[host]}"
