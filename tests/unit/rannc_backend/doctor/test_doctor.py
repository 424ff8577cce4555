"""The checks of `rannc doctor` on faked hosts: what is good, what is not, and that every bad finding has a
cure.
"""

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

from rannc_backend.cli import doctor as cli_doctor
from rannc_backend.cli.main import main
from rannc_backend.doctor import findings, host, mpi, platforms, ranks
from rannc_backend.doctor.answers import (
    ANSWER_MARK,
    JobResult,
    abort_finding,
    cure_of,
    measured_findings,
    printed_answer,
    training_finding,
)
from rannc_backend.doctor.findings import Finding
from rannc_backend.doctor.host import Devices
from rannc_backend.doctor.ranks import launch_command, rank_environment, rank_findings, run_job
from rannc_backend.errors import OptionValueError
from rannc_backend.runtime.comm.device_connections import VARIABLE

GB = 2**30
MPICH = "MPICH Version: 5.0.2"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"
GPU = Devices(names=("H100", "H100"), memory_bytes=(80 * GB, 80 * GB), cuda="12.9", nccl="2.27.3")


@pytest.mark.parametrize(
    ("finding", "status", "words"),
    [
        (platforms.check_python((3, 11, 7)), "ok", "3.11.7"),
        (platforms.check_python((3, 9, 1)), "problem", "3.10 to 3.13"),
        (platforms.check_python((3, 14, 0)), "problem", "3.10 to 3.13"),
        (platforms.check_torch("2.13.0+cpu"), "ok", "2.13.0+cpu"),
        (platforms.check_torch("2.10.0"), "problem", "too old"),
        (platforms.check_python((3, 11, 7), "PyPy"), "problem", "use CPython"),
        (platforms.check_platform("Linux", "x86_64"), "ok", "Linux on x86-64"),
        (platforms.check_platform("Linux", "arm64"), "ok", "Linux on aarch64"),
        (platforms.check_platform("Darwin", "arm64"), "problem", "Darwin on aarch64 is not supported"),
        (platforms.check_platform("Linux", "ppc64le"), "problem", platforms.SUPPORTED_PLATFORMS),
        (platforms.check_platform("", ""), "problem", "an unknown processor"),
        (platforms.check_torch("2.20.0"), "warning", "newer"),
        (platforms.check_torch("2.20.0"), "warning", "pip install 'torch>=2.11,<2.16'"),
        (platforms.check_torch(None), "problem", "not installed"),
        (platforms.check_torch("2.13.0", None, "ImportError: libcudart.so.12"), "problem", "libcudart.so.12"),
        (
            platforms.check_torch(None, None, "No module named 'torch'"),
            "problem",
            "pip install 'torch>=2.11,<2.16'",
        ),
        (platforms.check_torch("2.13.0", "2.13.0+cpu"), "ok", "2.13.0+cpu"),
        (platforms.check_torch("2.13.0", "2.12.1"), "warning", "2.12.1 is imported, and 2.13.0 is installed"),
        (platforms.check_torch("2.13.0", "2.9.1"), "problem", "2.9.1 is too old"),
        (host.check_devices(GPU, driver_files=["/dev/nvidia0"]), "ok", "2: H100 (80 GB); CUDA 12.9"),
        (host.check_devices(Devices(), driver_files=[]), "ok", "CPU"),
        (host.check_devices(Devices(), driver_files=["/dev/nvidia0"]), "problem", "built for CPUs"),
        (
            host.check_devices(Devices(cuda="12.9"), driver_files=["/dev/nvidia0"]),
            "problem",
            "sees no device",
        ),
        (host.check_triton(None, num_devices=0), "ok", "not needed"),
        (host.check_triton(None, num_devices=1), "problem", "Inductor"),
        (host.check_nccl(GPU), "ok", "2.27.3"),
        (host.check_nccl(Devices(names=("a", "b"), memory_bytes=(1, 1))), "problem", "none"),
        (mpi.check_mpi(None, "", None, ""), "warning", "torchrun"),
        (mpi.check_mpi("/bin/mpirun", "Hydra 5.0.2", None, ""), "problem", "no mpi4py"),
        (mpi.check_mpi("/bin/mpirun", "Hydra 5.0.2", "4.1", MPICH), "ok", "MPICH"),
        (mpi.check_mpi("/bin/mpirun", "Open MPI 5.0.11", "4.1", OPEN_MPI), "ok", "Open MPI 5.0.11"),
        (mpi.check_mpi("/bin/mpirun", "Open MPI 5.0.11", "4.1", MPICH), "problem", "put the mpirun of MPICH"),
        (
            mpi.check_mpi("/bin/mpirun", "Hydra 5.0.2", "4.1", "ImportError: libmpi.so.12: cannot open"),
            "problem",
            "libmpi.so.12",
        ),
        (
            mpi.check_mpi("/bin/mpirun", "Open MPI 4.1.6", "4.1", OPEN_MPI),
            "warning",
            "put the mpirun of Open MPI 5 first",
        ),
        (mpi.check_mpi("/bin/mpirun", "PRRTE 3.0.11", "4.1", OPEN_MPI), "ok", "PRRTE"),
        (
            mpi.check_launchers([("/a/mpirun", "Hydra 5.0.2"), ("/a/mpiexec", "Hydra 5.0.2")]),
            "ok",
            "2 in PATH",
        ),
        (
            mpi.check_launchers([("/a/mpirun", "Hydra 5"), ("/b/mpirun", "Open MPI 5")]),
            "warning",
            "/b/mpirun (Open MPI 5)",
        ),
        (host.check_launch({}), "ok", "not started"),
        (host.check_launch({"PMI_RANK": "1", "PMI_SIZE": "2"}), "ok", "rank 1 of 2"),
        (host.check_launch({"WORLD_SIZE": "2"}), "problem", "MASTER_ADDR"),
        (host.check_configuration({"RANNC_PIPELINE_NUM": "4"}), "ok", "1 set: pipeline_num"),
        (host.check_configuration({"RANNC_P2P_COMM": "1"}), "warning", "p2p_comm"),
        (
            host.check_configuration({"RANNC_PIPELIN_NUM": "4"}),
            "problem",
            "did you mean 'RANNC_PIPELINE_NUM'",
        ),
        (host.check_logging({}), "ok", "no logging.toml"),
        (host.check_logging({"RANNC_CONF_DIR": "/missing/directory"}), "problem", "not a directory"),
        (host.check_host_name("localhost"), "ok", "127.0.0.1"),
        (host.check_host_name("no such host"), "warning", "/etc/hosts"),
        (host.check_temporary("/tmp", 2 * GB), "ok", "2.0 GB free"),
        (host.check_temporary("/tmp", 1000), "warning", "TMPDIR"),
        (host.check_temporary("/missing"), "problem", "cannot be written"),
        (host.check_shared_memory("/dev/shm", num_devices=2, sizes=(8 * GB, 7 * GB)), "ok", "7.00 GB free"),
        (host.check_shared_memory("/dev/shm", num_devices=2, sizes=(2**26, 2**26)), "problem", "--shm-size"),
        (host.check_shared_memory("/dev/shm", num_devices=0, sizes=(2**26, 2**26)), "warning", "--shm-size"),
        (host.check_shared_memory("/missing", num_devices=0), "problem", "there is no"),
        (host.check_memory(None, 8 * GB), "ok", "8.0 GB on the host"),
        (host.check_memory(2 * GB, 8 * GB), "ok", "2.0 GB allowed"),
        (host.check_cores(8, None, "1"), "ok", "8 of"),
        (host.check_cores(8, 2.5, None), "ok", "2.5 of"),
        (host.check_cores(8, 2.5, "4"), "warning", "unset OMP_NUM_THREADS"),
        (host.check_open_files(resource.RLIM_INFINITY), "ok", "no limit"),
        (host.check_open_files(256), "warning", "ulimit -n 1024"),
        (host.check_locked_memory(2**16, has_infiniband=False), "ok", "at most 0 MB"),
        (host.check_locked_memory(2**16, has_infiniband=True), "problem", "ulimit -l unlimited"),
        (host.check_locked_memory(resource.RLIM_INFINITY, has_infiniband=True), "ok", "no limit"),
        (host.check_connections({}, num_devices=0), "ok", "no GPU"),
        (host.check_connections({}, num_devices=2), "warning", "too late in scripts that use the GPU before"),
        (host.check_connections({VARIABLE: "32"}, num_devices=2), "ok", "=32"),
        (
            host.check_connections({VARIABLE: "1"}, num_devices=2),
            "warning",
            "is 1: streams beyond that number share",
        ),
        (
            host.check_connections({VARIABLE: "many"}, num_devices=2),
            "warning",
            "is 'many', which is no number",
        ),
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
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.9",
            "Intel(R) MPI Library for Linux* OS, Version 2021.9",
        ),
    ],
)
def test_versions_of_mpirun(said: str, text: str) -> None:
    assert mpi.mpirun_version(said) == text
    assert mpi.mpi_family(text) is not None


def test_what_commands_say() -> None:
    assert findings.said_by([sys.executable, "-c", "print('a   b\\n\\nc')"]) == "a b\nc"
    assert findings.said_by([sys.executable, "-c", "raise SystemExit('first\\nlast')"]) == "last"
    assert findings.said_by([sys.executable, "-c", "pass"]) == "exit code 0 and no word"
    assert "No such file" in findings.said_by(["/missing/program"])
    assert "timed out" in findings.said_by(["sleep", "20"], limit_seconds=0.2)


def result(code: int | None = 0, answer: object = None, output: str = "", end: float = 100.0) -> JobResult:
    return JobResult(code=code, seconds=3.0, end_time=end, output=output, answer=answer)  # type: ignore[arg-type]


def measured(**members: object) -> dict[str, object]:
    seconds = {"small": 1e-4, "large": 2e-3, "large_bytes": 4 * 2**20}
    whole = {
        "num_ranks": 2,
        "launcher": "mpi",
        "device": "cpu",
        "message": seconds,
        "allreduce": seconds,
        "sum_is_right": True,
    }
    return {
        **whole,
        "connections": {"num_ranks": 2, "addresses": ["127.0.0.1 (lo)"] * 2, "failed": []},
        **members,
    }


def trained(**members: object) -> dict[str, object]:
    losses = {"losses": [1.4, 1.3], "plain_losses": [1.4, 1.3], "difference": 1e-7}
    return {"num_ranks": 2, "device": "cpu", "first_seconds": 3.0, "step_seconds": 0.01, **losses, **members}


def test_two_ranks() -> None:
    good = list(measured_findings(result(answer=measured())))
    assert [(finding.name, finding.status) for finding in good] == [
        ("two ranks", "ok"),
        ("connections", "ok"),
        ("message", "ok"),
        ("all-reduce", "ok"),
    ]
    assert good[2].text == "latency 100 us, 2.10 GB/s for 4 MB"
    slow = {"small": 1e-4, "large": 2.0, "large_bytes": 4 * 2**20}
    statuses = [finding.status for finding in measured_findings(result(answer=measured(message=slow)))]
    assert statuses == ["ok", "ok", "warning", "ok"]
    statuses = [finding.status for finding in measured_findings(result(answer=measured(sum_is_right=False)))]
    assert statuses == ["ok", "ok", "ok", "problem"]
    alone = list(measured_findings(result(answer=measured(num_ranks=1))))
    assert [finding.status for finding in alone] == ["problem"] and "believes to be alone" in alone[0].text
    (failed,) = measured_findings(result(code=1, output="a\n[rannc] getaddrinfo failed\n"))
    assert failed.status == "problem" and "getaddrinfo failed" in failed.text and "/etc/hosts" in failed.cure
    (late,) = measured_findings(result(code=None))
    assert late.text == "a job of ranks did not end in time" and late.cure
    launcher = "RuntimeError: mine\nE1124 02:08 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed\nFailures:\n[1]:\n"
    assert result(code=1, output=launcher).tail == "RuntimeError: mine"


def test_connections_that_fail_are_named() -> None:
    attempt = {
        "rank": 0,
        "host": "a",
        "from": "10.0.0.1",
        "peer": 1,
        "peer_host": "b",
        "at": "10.0.0.2:4711",
        "why": "no answer",
    }
    answer = {"connections": {"num_ranks": 2, "addresses": ["x", "y"], "failed": [attempt] * 6}}
    (found,) = measured_findings(result(answer=answer))
    assert found.status == "problem" and "GLOO_SOCKET_IFNAME" in found.cure
    assert found.text.startswith(
        "rank 0 on a (10.0.0.1) cannot reach rank 1 on b at 10.0.0.2:4711: no answer;"
    )
    assert found.text.endswith("and 2 more")


@pytest.mark.parametrize("difference", [1e-3, float("nan"), float("inf")])
def test_a_training_step_that_is_not_that_of_one_process(difference: float) -> None:
    assert training_finding(result(answer=trained())).status == "ok"
    found = training_finding(result(answer=trained(difference=difference, plain_losses=[1.4, 1.2])))
    assert found.status == "problem" and "1.2000 in one process" in found.text and "--report" in found.cure
    assert training_finding(result(code=1, output="no\n", answer=trained())).status == "problem"
    assert training_finding(result(code=None)).text == "a job of ranks did not end in time"


def test_an_answer_from_a_host_without_the_folder() -> None:
    assert printed_answer(f'[1,0]<stdout>: x\n{ANSWER_MARK}{{"time": 3}}\nrest') == {"time": 3}
    for nothing in ("", "x", f"{ANSWER_MARK}[1]", f"{ANSWER_MARK}{{"):
        assert printed_answer(nothing) is None


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
        answers = {
            "measure": result(answer=measured()),
            "abort": result(code=9, answer={"time": 99.0}),
            "train": result(answer=trained()),
        }
        return answers[task] if works else result(code=9, output="why")

    assert [finding.status for finding in rank_findings(lambda task: run(task, works=True))] == ["ok"] * 6
    (failed,) = rank_findings(lambda task: run(task, works=False))
    assert failed.status == "problem" and failed.details == "why"
    assert asked == ["measure", "abort", "train", "measure"]


def test_cures_and_commands() -> None:
    assert "OMPI_ALLOW_RUN_AS_ROOT=1" in cure_of("mpirun has detected an attempt to run as root")
    assert "oversubscribe" in cure_of("There are not enough slots available in the system")
    assert "by hand" in cure_of("something new")
    assert launch_command("/bin/mpirun")[:3] == ["/bin/mpirun", "-np", "2"]
    assert "torch.distributed.run" in launch_command(None)
    assert launch_command("/bin/mpirun", "sh -c 'x y'")[:3] == ["sh", "-c", "x y"]
    for bad in ("no_such_program -n 2", "'", "  "):
        with pytest.raises(OptionValueError, match="--launch"):
            launch_command(None, bad)
    outer = {"RANNC_LOAD_DEPLOYMENT": "1"}
    outer |= {
        "PMI_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "RANK": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "PATH": "/bin",
    }
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
    writes = run_job(
        "abort",
        ["sh", "-c", 'echo \'{"time": 1}\' > "$2"; exit 9', "sh"],
        dict(os.environ),
        limit_seconds=20.0,
    )
    assert (writes.code, writes.answer) == (9, {"time": 1})


FOUND = [
    Finding(name="Python", status="ok", text="3.11 [markup]"),
    Finding(name="cores", status="warning", text="many", cure="set OMP_NUM_THREADS [x]."),
]


@pytest.mark.parametrize(
    ("more", "code"), [([], 0), ([Finding(name="MPI", status="problem", text="none", cure="install it.")], 1)]
)
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
    assert found["findings"][1] == {
        "name": "cores",
        "status": "warning",
        "text": "many",
        "cure": "set OMP_NUM_THREADS [x].",
        "details": "",
    }


def test_the_table_is_for_narrow_terminals_too() -> None:
    console = Console(width=60, record=True, file=open(os.devnull, "w", encoding="utf-8"))
    cli_doctor.print_findings(FOUND, console)
    assert "set OMP_NUM_THREADS [x]." in console.export_text()


def test_the_number_of_an_ended_job_is_kept_until_its_group_is_ended() -> None:
    """Else another process could have it by then, and be ended in its place."""
    process = subprocess.Popen(["sh", "-c", "exit 5"], start_new_session=True)
    assert ranks.has_ended(process, 10.0)
    assert process.returncode is None and Path(f"/proc/{process.pid}").exists()
    assert ranks._end_group(process) == 5 and not Path(f"/proc/{process.pid}").exists()
    running = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert not ranks.has_ended(running, 0.1)
    assert ranks._end_group(running) == -signal.SIGKILL
