"""Every place where a user names a file, with everything that a path can lead to: an error of ours that names
all, at once, and no harm.
"""

from __future__ import annotations

import ast
import atexit
import errno
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from typer.testing import CliRunner

import rannc_backend
from rannc_backend.api.materialize import _given_source
from rannc_backend.checkpoint.reader import CheckpointReader
from rannc_backend.checkpoint.safetensors_directory import SafetensorsDirectory
from rannc_backend.cli.main import app
from rannc_backend.cli.model_factory import call_factory
from rannc_backend.errors import RanncError, UserInputError
from rannc_backend.ir.plan_file import read_plan_text, write_text
from rannc_backend.log.logger import is_logging_asked_for, setup_logging
from rannc_backend.planner.blocks_file import PlannableModel, is_blocks_file
from rannc_backend.planner.choose_pricer import Pricing
from rannc_backend.planner.cluster.cluster_file import load_cluster
from rannc_backend.planner.plan_on_ranks import _DEPLOYMENT
from rannc_backend.runtime.trace.trace_file import begin_trace, write_at_exit
from rannc_backend.settings import user_files
from rannc_backend.settings.sources import resolve, resolve_config
from rannc_backend.settings.user_files import UserFile
from rannc_backend.stages.graph_dump import dump_graphs
from tests.unit.rannc_backend.ir.sample_plans import sample_plan

LIMIT_SECONDS = 5.0
EMPTY = fx.symbolic_trace(torch.nn.Identity())


class Bad:
    """Makes what a path can lead to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = socket.socket(socket.AF_UNIX)
        (folder / "file").write_text("x")
        (folder / "directory").mkdir()
        os.mkfifo(folder / "pipe")
        here = os.getcwd()
        os.chdir(folder)  # the names of sockets are short
        self.server.bind("socket")
        os.chdir(here)
        os.symlink("loop", folder / "loop")
        os.symlink("/dev/zero", folder / "to_device")
        os.symlink("pipe", folder / "to_pipe")
        (folder / "binary").write_bytes(b"\xff\xfe\x00\x80")
        with open(folder / "huge", "wb") as file:
            file.truncate(2**42)  # no blocks: nothing on the disk

    def path(self, name: str) -> str:
        return PATHS.get(name, str(self.folder / name))


PATHS = {"zero": "/dev/zero", "null": "/dev/null", "terminal": "/dev/tty", "memory": "/proc/self/mem"}
IN_PLACE = ("directory", "pipe", "socket", "loop", "to_device", "to_pipe")
NAMES = ("x" * 300, "x/" * 3000 + "y", "a\0b", "\ud800", "file/below")
# What cannot be read: and what cannot be written.
UNREADABLE = (*IN_PLACE, *PATHS, *NAMES, "nowhere", "binary", "huge")
UNWRITABLE = (*IN_PLACE, "zero", "null", "terminal", *NAMES, "nowhere/below")


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bad]:
    made = Bad(tmp_path_factory.mktemp("bad"))
    yield made
    made.server.close()


def _profile(path: str, option: str = "profile_file") -> Any:
    options = {option: path} | ({"load_graph_profile": True} if option == "graph_profile_file" else {})
    config = resolve_config({"load_graph_profile": True, **options}, {})
    return Pricing._read_file(SimpleNamespace(config=config))  # type: ignore[arg-type]


def _world() -> Any:
    return SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))


def _plan_text() -> str:
    return sample_plan().to_json()


# What reads, and what its error must say beside the path.
READERS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "option deployment_file": (
        lambda path: read_plan_text(path, named_by=_DEPLOYMENT),
        "option deployment_file",
    ),
    "load_deployment": (rannc_backend.load_deployment, "plan"),
    "show_deployment": (rannc_backend.show_deployment, "plan"),
    "option cluster": (lambda path: load_cluster(path, 8), "cluster"),
    "option profile_file": (_profile, "profile_file"),
    "option graph_profile_file": (lambda path: _profile(path, "graph_profile_file"), "graph_profile_file"),
    "RANNC_CONF_DIR": (lambda path: resolve(None, {"RANNC_CONF_DIR": path}), "RANNC_CONF_DIR"),
    "RANNC_CONF_DIR of logging": (
        lambda path: is_logging_asked_for({"RANNC_CONF_DIR": path}),
        "RANNC_CONF_DIR",
    ),
    "blocks": (PlannableModel.read, "blocks"),
    "factory": (lambda path: call_factory(f"{path}:make"), "a Python file"),
    "latest_checkpoint": (rannc_backend.latest_checkpoint, "checkpoint"),
    "CheckpointReader": (CheckpointReader, "checkpoint"),
    "parameters": (lambda path: _given_source(path, []), "materialize_by_stage"),
    "safetensors": (lambda path: SafetensorsDirectory(path).names, "safetensors"),
}
WRITERS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "option deployment_file": (
        lambda path: write_text(path, "{}", what="plan", named_by=_DEPLOYMENT),
        "option deployment_file",
    ),
    "option event_trace_file": (lambda path: begin_trace(_world(), path, None), "option event_trace_file"),
    "save_checkpoint": (
        lambda path: rannc_backend.save_checkpoint(path, torch.nn.Linear(1, 1)),
        "checkpoint",
    ),
}
# Which are no fault there: names that are looked for elsewhere, directories, and files in place of text.
FINE = {
    ("RANNC_CONF_DIR", "directory"),
    ("RANNC_CONF_DIR of logging", "directory"),
    ("save_checkpoint", "directory"),
    ("save_checkpoint", "nowhere/below"),
}


def _short(name: str) -> str:
    return ascii(name)[1:13]


def _refused(action: Callable[[], object], words: str) -> str:
    begin = time.monotonic()
    with pytest.raises(RanncError) as caught:
        action()
    assert time.monotonic() - begin < LIMIT_SECONDS
    text = str(caught.value)
    assert words in text and "What to change: " in text, text
    assert len(text) < 3000, "the whole of a long path"
    return text


@pytest.mark.parametrize("what", UNREADABLE, ids=_short)
def test_what_cannot_be_read(bad: Bad, what: str) -> None:
    path = bad.path(what)
    for name, (read, words) in READERS.items():
        if (name, what) not in FINE:
            text = _refused(lambda read=read: read(path), words)
            assert repr(path)[1:40] in text or path[:40] in text, (name, text)
    assert not is_blocks_file(path)


@pytest.mark.parametrize("what", UNWRITABLE, ids=_short)
def test_what_cannot_be_written(bad: Bad, what: str) -> None:
    path = bad.path(what)
    before = {entry.name: entry.lstat().st_mode for entry in bad.folder.iterdir()}
    for name, (write, words) in WRITERS.items():
        if (name, what) not in FINE:
            _refused(lambda write=write: write(path), words)
    if what in NAMES or what.startswith("nowhere"):
        _refused(lambda: dump_graphs(path, "graph 0", EMPTY, []), "option dump_graph_prefix")
    assert {entry.name: entry.lstat().st_mode for entry in bad.folder.iterdir()} == before, (
        "something was made, changed or left"
    )
    assert all(stat.S_ISCHR(os.stat(device).st_mode) for device in ("/dev/null", "/dev/zero")), (
        "a device was replaced"
    )


@pytest.mark.parametrize("what", [*IN_PLACE, "binary", "huge"])
def test_in_place_of_files_that_we_name(bad: Bad, tmp_path: Path, what: str) -> None:
    """In the configuration directory, and as the file of a log."""
    environ = {"RANNC_CONF_DIR": str(tmp_path)}
    for name, read in (
        ("rannc_conf.toml", lambda: resolve(None, environ)),
        ("logging.toml", lambda: setup_logging(0, environ)),
    ):
        os.symlink(bad.path(what), tmp_path / name)
        assert name in _refused(read, "RANNC_CONF_DIR")
        (tmp_path / name).unlink()
    if what in IN_PLACE:
        log = f'[[sink]]\nname = "s"\ntype = "basic_file_sink_st"\nfilename = "{bad.path(what)}"\n'
        (tmp_path / "logging.toml").write_text(log)
        assert "logging.toml, line 1" in _refused(lambda: setup_logging(0, environ), "log file")


def test_the_command_line(bad: Bad, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(_plan_text())
    for what in ("pipe", "null", "directory", "nowhere/below", "x" * 300):
        calls = (
            ["show", bad.path(what)],
            ["show", str(plan), "--html", bad.path(what)],
            ["plan", bad.path(what), "--json", "/dev/null"],
        )
        for arguments in calls:
            result = CliRunner().invoke(app, arguments)
            assert isinstance(result.exception, (RanncError, SystemExit)), (arguments, result.exception)
            assert result.exit_code != 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EROFS, errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EPERM]
)
def test_whatever_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """No permission, a read-only file system and the like, also as root."""
    (tmp_path / "there").write_text(_plan_text())

    def fails(path: object, *_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(user_files.os, "open", fails)
    for name, (read, words) in READERS.items():
        if "RANNC_CONF_DIR" not in name and "heckpoint" not in name:
            assert os.strerror(number) in _refused(lambda read=read: read(str(tmp_path / "there")), words)
    write, words = WRITERS["option deployment_file"]
    for name in ("there", "new"):
        assert os.strerror(number) in _refused(lambda name=name: write(str(tmp_path / name)), words)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["there"]


def test_what_is_read_only_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("mine")
    path.chmod(0o444)
    monkeypatch.setattr(user_files.os, "access", lambda place, mode: Path(place) != path)  # root may write it
    assert "it is read-only" in _refused(lambda: WRITERS["option deployment_file"][0](str(path)), "plan")
    monkeypatch.setattr(user_files.os, "access", lambda place, mode: Path(place) == path)
    assert "cannot be written to" in _refused(lambda: WRITERS["option deployment_file"][0](str(path)), "plan")
    assert path.read_text() == "mine"


def test_a_pipe_that_comes_between_the_look_and_the_opening(
    bad: Bad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_files.os, "stat", lambda path: os.lstat(bad.folder / "file"))
    assert "it is a pipe" in _refused(lambda: read_plan_text(bad.path("pipe")), "plan")


def test_a_file_that_grows_is_not_read_for_ever() -> None:
    file = UserFile(path="/proc/self/maps", what="text")  # has no size
    assert len(user_files.read_bytes(file, 10**7)) > 100
    with pytest.raises(UserInputError, match="more than 100 bytes"):
        user_files.read_bytes(file, 100)


def test_what_is_written(tmp_path: Path) -> None:
    """Through links, with the mode that was there or the umask gives, whole or not at all."""
    real, link = tmp_path / "real", tmp_path / "link"
    (tmp_path / "else").mkdir()
    link.symlink_to(tmp_path / "else" / "target")
    user_files.write_text(UserFile(path=link, what="text"), iter(["a", "b\ud800"]))
    assert link.is_symlink() and (tmp_path / "else" / "target").read_text() == "ab\\ud800"
    real.write_text("old")
    real.chmod(0o640)
    user_files.write_text(UserFile(path=real, what="text"), "new")
    assert (real.read_text(), stat.S_IMODE(real.stat().st_mode)) == ("new", 0o640)
    before = os.umask(0o027)
    user_files.write_text(UserFile(path=tmp_path / ("n" * 255), what="text"), "x")
    os.umask(before)
    assert stat.S_IMODE((tmp_path / ("n" * 255)).stat().st_mode) == 0o640

    def pieces() -> Iterator[str]:
        yield "new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        user_files.write_text(UserFile(path=real, what="text"), pieces())
    assert real.read_text() == "new" and len(list(tmp_path.iterdir())) == 4


def test_a_trace_removes_its_own_parts_only(tmp_path: Path) -> None:
    """Names with the signs of patterns: `**` was a ValueError, and `[ab]` other files than one's own."""
    for name in ("**", "[ab].json", "t?.json", "."):
        keep = [tmp_path / other for other in ("a.rank00000.json", "tx.rank00000.json", "x.rank00001")]
        for path in keep:
            path.write_text("keep")
        own = (
            (tmp_path / name).with_name(f"{Path(name).stem}.rank00003{Path(name).suffix}")
            if name != "."
            else None
        )
        if own is None:
            _refused(lambda: begin_trace(_world(), ".", None), "option event_trace_file")
            continue
        own.write_text("old")
        trace = begin_trace(_world(), str(tmp_path / name), None)
        trace.close()
        atexit.unregister(write_at_exit)
        assert not own.exists() and all(path.exists() for path in keep), name


# What opens files by itself: those that the system or this package names.
OWN_FILES = {
    "settings/user_files.py",
    "planner/cluster/this_machine.py",  # /proc/cpuinfo
    "checkpoint/directory.py",  # in directories of its own, new files only
    "checkpoint/lock.py",
    "checkpoint/reader.py",  # safetensors, looked at before
    "checkpoint/safetensors_directory.py",  # safetensors, looked at before
    "checkpoint/saving.py",
    "integrations/dcp_reader.py",  # places within files, looked at before
    "integrations/hugging_face.py",  # in directories of its own, new files only
    "stages/cache.py",  # libraries of Inductor's cache
    "stages/compile_ahead.py",  # likewise
    "stages/once_per_host.py",  # locks in Inductor's cache
    "planner/cluster/cluster_file.py",  # shipped descriptions
    "doctor/findings.py",
    "doctor/host.py",
    "doctor/job.py",  # a folder of its own
    "doctor/ranks.py",
    "errors/catalogue.py",  # the package's own source
    "log/first_call.py",  # in its own directory
    "planner/plan_cache.py",  # in its own directory
    "planner/worker_processes.py",  # its own pipes
    "report/page.py",  # shipped templates
    "api/materialize.py",  # torch.load and safetensors, looked at before
}
OPENING = {
    "open",
    "fdopen",
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "mkdir",
    "makedirs",
    "touch",
    "glob",
    "rglob",
}
OPENING |= {"iterdir", "listdir", "scandir", "safe_open"}


def test_nothing_else_opens_files() -> None:
    package = Path(rannc_backend.__file__).parent
    functions = {name for name in OPENING if hasattr(user_files, name)}
    found = set()
    for path in package.rglob("*.py"):
        name = str(path.relative_to(package))
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                called = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                ours = called in functions and (
                    "import user_files" in text or f" {called}" in text.split("\n\n\n")[0]
                )
                if called in OPENING and not ours:
                    found.add(name)
    # The runtime reads /proc and opens sockets and memory; its helpers are scripts that know no other module.
    # `rannc verify` has a private folder of its own, in which all its processes write and read.
    assert {name for name in found if not name.startswith(("runtime/", "verify/"))} <= OWN_FILES, sorted(
        found
    )
    assert not found & {"runtime/trace/trace_file.py", "runtime/job/bootstrap.py"}
