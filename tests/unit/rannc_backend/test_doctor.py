"""The checks of `rannc doctor` on faked hosts: what is good, what is not, and that every bad finding has a cure."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from rannc_backend import cli_doctor, doctor, doctor_ranks
from rannc_backend.cli import main
from rannc_backend.doctor import Devices, Finding
from rannc_backend.doctor_ranks import (
    JobResult,
    abort_finding,
    cure_of,
    launch_command,
    measured_findings,
    rank_environment,
    rank_findings,
    run_job,
)

GB = 2**30
MPICH = "MPICH Version: 5.0.2"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"
GPU = Devices(names=("H100", "H100"), memory_bytes=(80 * GB, 80 * GB), cuda="12.9", nccl="2.27.3")


@pytest.mark.parametrize(
    ("finding", "status", "words"),
    [
        (doctor.check_python((3, 11, 7)), "ok", "3.11.7"),
        (doctor.check_python((3, 9, 1)), "problem", "3.10 to 3.13"),
        (doctor.check_python((3, 14, 0)), "problem", "3.10 to 3.13"),
        (doctor.check_torch("2.13.0+cpu"), "ok", "2.13.0+cpu"),
        (doctor.check_torch("2.10.0"), "problem", "too old"),
        (doctor.check_torch("2.20.0"), "warning", "newer"),
        (doctor.check_torch(None), "problem", "not installed"),
        (doctor.check_devices(GPU, driver_files=["/dev/nvidia0"]), "ok", "2: H100 (80 GB); CUDA 12.9"),
        (doctor.check_devices(Devices(), driver_files=[]), "ok", "CPU"),
        (doctor.check_devices(Devices(), driver_files=["/dev/nvidia0"]), "problem", "built for CPUs"),
        (doctor.check_devices(Devices(cuda="12.9"), driver_files=["/dev/nvidia0"]), "problem", "sees no device"),
        (doctor.check_triton(None, num_devices=0), "ok", "not needed"),
        (doctor.check_triton(None, num_devices=1), "problem", "Inductor"),
        (doctor.check_nccl(GPU), "ok", "2.27.3"),
        (doctor.check_nccl(Devices(names=("a", "b"), memory_bytes=(1, 1))), "problem", "none"),
        (doctor.check_mpi(None, "", None, ""), "warning", "torchrun"),
        (doctor.check_mpi("/bin/mpirun", "Hydra 5.0.2", None, ""), "problem", "no mpi4py"),
        (doctor.check_mpi("/bin/mpirun", "Hydra 5.0.2", "4.1", MPICH), "ok", "MPICH"),
        (doctor.check_mpi("/bin/mpirun", "Open MPI 5.0.11", "4.1", OPEN_MPI), "ok", "Open MPI 5.0.11"),
        (doctor.check_mpi("/bin/mpirun", "Open MPI 5.0.11", "4.1", MPICH), "problem", "put the mpirun of MPICH"),
        (doctor.check_mpi("/bin/mpirun", "Hydra 5.0.2", "4.1", "ImportError: libmpi.so.12: cannot open"), "problem", "libmpi.so.12"),
        (doctor.check_launch({}), "ok", "not started"),
        (doctor.check_launch({"PMI_RANK": "1", "PMI_SIZE": "2"}), "ok", "rank 1 of 2"),
        (doctor.check_launch({"WORLD_SIZE": "2"}), "problem", "MASTER_ADDR"),
        (doctor.check_configuration({"RANNC_PIPELINE_NUM": "4"}), "ok", "1 set: pipeline_num"),
        (doctor.check_configuration({"RANNC_P2P_COMM": "1"}), "warning", "p2p_comm"),
        (doctor.check_configuration({"RANNC_PIPELIN_NUM": "4"}), "problem", "did you mean 'RANNC_PIPELINE_NUM'"),
        (doctor.check_logging({}), "ok", "no logging.toml"),
        (doctor.check_logging({"RANNC_CONF_DIR": "/missing/directory"}), "problem", "not a directory"),
        (doctor.check_host_name("localhost"), "ok", "127.0.0.1"),
        (doctor.check_host_name("no such host"), "warning", "/etc/hosts"),
        (doctor.check_temporary("/tmp", 2 * GB), "ok", "2.0 GB free"),
        (doctor.check_temporary("/tmp", 1000), "warning", "TMPDIR"),
        (doctor.check_temporary("/missing"), "problem", "cannot be written"),
        (doctor.check_shared_memory("/dev/shm", num_devices=2, sizes=(8 * GB, 7 * GB)), "ok", "7.00 GB free"),
        (doctor.check_shared_memory("/dev/shm", num_devices=2, sizes=(2**26, 2**26)), "problem", "--shm-size"),
        (doctor.check_shared_memory("/dev/shm", num_devices=0, sizes=(2**26, 2**26)), "warning", "--shm-size"),
        (doctor.check_shared_memory("/missing", num_devices=0), "problem", "there is no"),
        (doctor.check_memory(None, 8 * GB), "ok", "8.0 GB on the host"),
        (doctor.check_memory(2 * GB, 8 * GB), "ok", "2.0 GB allowed"),
        (doctor.check_cores(8, None, "1"), "ok", "8 of"),
        (doctor.check_cores(8, 2.5, None), "warning", "2.5 divided by"),
        (doctor.check_open_files(resource.RLIM_INFINITY), "ok", "no limit"),
        (doctor.check_open_files(256), "warning", "ulimit -n 1024"),
        (doctor.check_locked_memory(2**16, has_infiniband=False), "ok", "at most 0 MB"),
        (doctor.check_locked_memory(2**16, has_infiniband=True), "problem", "ulimit -l unlimited"),
        (doctor.check_locked_memory(resource.RLIM_INFINITY, has_infiniband=True), "ok", "no limit"),
    ],
)
def test_checks(finding: Finding, status: str, words: str) -> None:
    assert finding.status == status
    assert words in finding.text + finding.cure
    assert bool(finding.cure) == (status != "ok")


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("HYDRA build details:\nVersion: 5.0.2\nRelease Date: x", "Hydra 5.0.2"),
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs", "Open MPI 5.0.11"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", "Intel(R) MPI Library for Linux* OS, Version 2021.9"),
    ],
)
def test_versions_of_mpirun(said: str, text: str) -> None:
    assert doctor.mpirun_version(said) == text
    assert doctor.mpi_family(text) is not None


def test_what_commands_say() -> None:
    assert doctor.said_by([sys.executable, "-c", "print('a   b\\n\\nc')"]) == "a b\nc"
    assert doctor.said_by([sys.executable, "-c", "raise SystemExit('first\\nlast')"]) == "last"
    assert doctor.said_by([sys.executable, "-c", "pass"]) == "exit code 0 and no word"
    assert "No such file" in doctor.said_by(["/missing/program"])
    assert "timed out" in doctor.said_by(["sleep", "20"], limit_seconds=0.2)


def result(code: int | None = 0, answer: object = None, output: str = "", end: float = 100.0) -> JobResult:
    return JobResult(code=code, seconds=3.0, end_time=end, output=output, answer=answer)  # type: ignore[arg-type]


def measured(**members: object) -> dict[str, object]:
    seconds = {"small": 1e-4, "large": 2e-3, "large_bytes": 4 * 2**20}
    whole = {"num_ranks": 2, "launcher": "mpi", "device": "cpu", "message": seconds, "allreduce": seconds, "sum_is_right": True}
    return {**whole, **members}


def test_two_ranks() -> None:
    good = list(measured_findings(result(answer=measured())))
    assert [(finding.name, finding.status) for finding in good] == [("two ranks", "ok"), ("message", "ok"), ("all-reduce", "ok")]
    assert good[1].text == "latency 100 us, 2.10 GB/s for 4 MB"
    slow = {"small": 1e-4, "large": 2.0, "large_bytes": 4 * 2**20}
    statuses = [finding.status for finding in measured_findings(result(answer=measured(message=slow)))]
    assert statuses == ["ok", "warning", "ok"]
    statuses = [finding.status for finding in measured_findings(result(answer=measured(sum_is_right=False)))]
    assert statuses == ["ok", "ok", "problem"]
    alone = list(measured_findings(result(answer=measured(num_ranks=1))))
    assert [finding.status for finding in alone] == ["problem"] and "believes to be alone" in alone[0].text
    (failed,) = measured_findings(result(code=1, output="a\n[rannc] getaddrinfo failed\n"))
    assert failed.status == "problem" and "getaddrinfo failed" in failed.text and "/etc/hosts" in failed.cure
    (late,) = measured_findings(result(code=None))
    assert late.text == "a job of two ranks did not end in time" and late.cure


def test_a_rank_that_dies() -> None:
    assert abort_finding(result(code=9, answer={"time": 99.5})).status == "ok"
    assert "0.5 s after" in abort_finding(result(code=9, answer={"time": 99.5})).text
    for bad in (
        result(code=9, answer={"time": 50.0}),
        result(code=None, answer={"time": 99.5}),
        result(code=0, answer={"time": 99.5}),
        result(code=1),
    ):
        assert abort_finding(bad).status == "problem" and abort_finding(bad).cure


def test_the_abort_is_tried_only_where_ranks_start() -> None:
    asked: list[str] = []

    def run(task: str, *, works: bool) -> JobResult:
        asked.append(task)
        return result(answer=measured()) if task == "measure" and works else result(code=9, answer={"time": 99.0} if works else None)

    assert [finding.status for finding in rank_findings(lambda task: run(task, works=True))] == ["ok"] * 4
    assert [finding.status for finding in rank_findings(lambda task: run(task, works=False))] == ["problem"]
    assert asked == ["measure", "abort", "measure"]


def test_cures_and_commands() -> None:
    assert "OMPI_ALLOW_RUN_AS_ROOT=1" in cure_of("mpirun has detected an attempt to run as root")
    assert "oversubscribe" in cure_of("There are not enough slots available in the system")
    assert "by hand" in cure_of("something new")
    assert launch_command("/bin/mpirun")[:3] == ["/bin/mpirun", "-np", "2"]
    assert "torch.distributed.run" in launch_command(None)
    outer = {"PMI_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "PATH": "/bin"}
    inner = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "PATH": "/bin", "OMP_NUM_THREADS": "1"}
    assert rank_environment(outer, num_devices=2) == inner
    assert rank_environment(outer, num_devices=1) == {**inner, "CUDA_VISIBLE_DEVICES": ""}


def test_jobs_are_ended_with_all_their_processes(tmp_path: Path) -> None:
    mark = tmp_path / "child"
    script = f'sh -c "echo \\$\\$ > {mark}; exec sleep 60" & echo started; exec sleep 60'
    late = run_job("measure", ["sh", "-c", script], dict(os.environ), limit_seconds=1.0)
    assert late.code is None and late.answer is None and late.tail == "started" and late.seconds < 20
    child = int(mark.read_text())
    for _ in range(100):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            state = "Z"
        if state == "Z":
            break
        time.sleep(0.05)
    assert state == "Z", "a process of the job is left"
    writes = run_job("abort", ["sh", "-c", "echo '{\"time\": 1}' > \"$2\"; exit 9", "sh"], dict(os.environ), limit_seconds=20.0)
    assert (writes.code, writes.answer) == (9, {"time": 1})


FOUND = [
    Finding(name="Python", status="ok", text="3.11 [markup]"),
    Finding(name="cores", status="warning", text="many", cure="set OMP_NUM_THREADS [x]."),
]


@pytest.mark.parametrize(("more", "code"), [([], 0), ([Finding(name="MPI", status="problem", text="none", cure="install it.")], 1)])
def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[Finding], code: int
) -> None:
    def findings(environ: object) -> Iterator[Finding]:
        yield from [*FOUND, *more]

    monkeypatch.setattr(cli_doctor, "host_findings", findings)
    for arguments in (["doctor", "--no-ranks"], ["doctor", "--no-ranks", "--json"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert (caught.value.code or 0) == code
    out = capsys.readouterr().out
    table, _, text = out.partition("{\n")
    assert "3.11 [markup]" in table and "warning cores: set OMP_NUM_THREADS [x]." in table
    assert ("training can run here." in table) == (code == 0)
    assert ("1 problem to mend." in table) == (code == 1)
    found = json.loads("{" + text)
    assert found["counts"] == {"ok": 1, "warning": 1, "problem": len(more)}
    assert found["findings"][1] == {"name": "cores", "status": "warning", "text": "many", "cure": "set OMP_NUM_THREADS [x]."}


def test_the_table_is_for_narrow_terminals_too() -> None:
    console = Console(width=60, record=True, file=open(os.devnull, "w", encoding="utf-8"))
    cli_doctor.print_findings(FOUND, console)
    assert "set OMP_NUM_THREADS [x]." in console.export_text()


def test_the_number_of_an_ended_job_is_kept_until_its_group_is_ended() -> None:
    """Else another process could have it by then, and be ended in its place."""
    process = subprocess.Popen(["sh", "-c", "exit 5"], start_new_session=True)
    assert doctor_ranks.has_ended(process, 10.0)
    assert process.returncode is None and Path(f"/proc/{process.pid}").exists()
    assert doctor_ranks._end_group(process) == 5 and not Path(f"/proc/{process.pid}").exists()
    running = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert not doctor_ranks.has_ended(running, 0.1)
    assert doctor_ranks._end_group(running) == -signal.SIGKILL
