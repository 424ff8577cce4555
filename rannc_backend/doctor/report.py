"""The file of `rannc doctor --report FILE`: all that somebody needs who is to help, and nothing that looks
secret.

In: findings, the environment, this host. Out: JSON where the file's name ends with .json, else text in
sections; written whole or not at all. See `redaction` for what is left out.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from typing import Any

import rannc_backend
from rannc_backend.doctor.findings import Finding, output_of, read_text
from rannc_backend.doctor.redaction import is_secret_name, redacted_all, secret_values
from rannc_backend.errors import RanncError
from rannc_backend.log.logger import LOGGING_FILE
from rannc_backend.log.logging_toml import logging_file
from rannc_backend.settings.sources import configuration_directory, resolve
from rannc_backend.settings.toml_lines import read_toml
from rannc_backend.settings.user_files import UserFile, names_in, read_end, write_text

_VARIABLES = re.compile(
    r"^(RANNC|NCCL|CUDA|NVIDIA|OMPI|OPAL|PRTE|PMIX|PMI|HYDRA|HYDI|MPI|MPICH|I_MPI|UCX|FI|SLURM|PBS|LSB|TORCH|PYTORCH|TORCHINDUCTOR"
    r"|TORCHELASTIC|TRITON|GLOO|TP|OMP|MKL|KMP|GOMP|MASTER|LOCAL|HF_HUB_OFFLINE|TOKENIZERS)_"
    r"|^(RANK|WORLD_SIZE|LOCAL_RANK|PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|TMPDIR|CONDA_PREFIX|VIRTUAL_ENV)$"
)
_PACKAGES = re.compile(
    r"^(torch|triton|nvidia-|mpi|openmpi|impi|numpy|sympy|networkx|safetensors|pydantic|transformers|accelerate|psutil|typer|rich|rannc)",
    re.IGNORECASE,
)
_IDENTITIES = re.compile(
    r"^\s*(Serial Number|GPU UUID|Board ID|.*Part Number|Bus Id|Module Id|Chassis|Host ID)\b", re.IGNORECASE
)
_COMMANDS = (
    ("nvidia-smi", ()),
    ("nvidia-smi", ("-q", "-d", "MEMORY,UTILIZATION,ECC,PERFORMANCE,COMPUTE,PIDS")),
    ("nvidia-smi", ("topo", "-m")),
    ("mpirun", ("--version",)),
)
_COMMAND_SECONDS = 30.0
_MAX_LINES = 300
_LOG_BYTES, _MAX_LOGS, _LOG_LINES = 2**16, 8, 60


def write_report(path: str, findings: Sequence[Finding], environ: Mapping[str, str]) -> None:
    """Write the report. Raises UserInputError: the file cannot be written."""
    content = report_content(findings, environ)
    text = json.dumps(content, indent=2) + "\n" if path.endswith(".json") else report_text(content)
    write_text(report_file(path), text)


def report_file(path: str) -> UserFile:
    """The file that the user has named."""
    return UserFile(path=path, what="report", named_by="option --report", cure="name another file.")


def report_content(findings: Sequence[Finding], environ: Mapping[str, str]) -> dict[str, Any]:
    """What the report says, secrets left out."""
    content = {
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": _versions(),
        "checks": [asdict(finding) | {"details": _last(finding.details, _MAX_LINES)} for finding in findings],
        "options": _options(environ),
        "environment": {
            name: environ[name]
            for name in sorted(environ)
            if _VARIABLES.search(name) and not is_secret_name(name)
        },
        "commands": {
            " ".join((name, *arguments)): _said(name, arguments, environ) for name, arguments in _COMMANDS
        },
        "logs": _logs(environ),
    }
    found: dict[str, Any] = redacted_all(content, secret_values(environ))
    return found


def report_text(content: Mapping[str, Any]) -> str:
    """The same for people."""
    lines = [
        f"rannc doctor: report made {content['made']}",
        "What looks secret is left out. Read it before you send it to anybody.",
    ]
    lines += _section("versions", [f"{name}: {value}" for name, value in content["versions"].items()])
    checks = []
    for check in content["checks"]:
        checks.append(f"{check['status']:<8} {check['name']}: {check['text']}")
        checks += [f"         cure: {check['cure']}"] if check["cure"] else []
        checks += [f"         | {line}" for line in check["details"].splitlines()]
    lines += _section("checks", checks)
    lines += _section("options", content["options"])
    lines += _section("environment", [f"{name}={value}" for name, value in content["environment"].items()])
    for command, said in content["commands"].items():
        lines += _section(f"$ {command}", said.splitlines())
    for name, said in content["logs"].items():
        lines += _section(f"end of {name}", said.splitlines())
    return "\n".join(lines) + "\n"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"== {title} ==", *(lines or ["(nothing)"])]


def _versions() -> dict[str, str]:
    packages = {
        str(found.metadata["Name"]): found.version
        for found in distributions()
        if _PACKAGES.search(str(found.metadata["Name"]))
    }
    system = re.search(r'^PRETTY_NAME="?([^"\n]*)', read_text("/etc/os-release"), re.MULTILINE)
    return {
        "rannc-backend": f"{rannc_backend.__version__} ({os.path.dirname(rannc_backend.__file__)})",
        "Python": f"{sys.version.split()[0]} ({sys.executable})",
        "system": f"{platform.platform()}; {system[1] if system else 'unknown distribution'}",
        **dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def _options(environ: Mapping[str, str]) -> list[str]:
    try:
        resolution = resolve(None, environ)
    except RanncError as error:
        return str(error).splitlines()
    return [f"file: {resolution.file or 'none'}", *resolution.lines(), *resolution.notices]


def _said(name: str, arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    program = shutil.which(name, path=environ.get("PATH"))
    if program is None:
        return f"no {name} in PATH"
    code, out, error = output_of([program, *arguments], _COMMAND_SECONDS)
    lines = [
        line.rstrip()
        for line in f"{out}\n{error}".splitlines()
        if line.strip() and not _IDENTITIES.search(line)
    ]
    return "\n".join([*lines[:_MAX_LINES], *([f"exit code {code}"] if code != 0 else [])])


def _logs(environ: Mapping[str, str]) -> dict[str, str]:
    """The last lines of the files that logging.toml names."""
    try:
        directory = configuration_directory(environ)
        file = None if directory is None else read_toml(directory / LOGGING_FILE)
        paths = [] if file is None else [sink.path for sink in logging_file(file).sink if sink.path]
    except RanncError as error:
        return {"logging.toml": str(error)}
    found = {}
    for path in paths:
        for name in _written_as(path):
            try:
                end = read_end(UserFile(path=name, what="log", named_by="logging.toml"), _LOG_BYTES)
            except RanncError as error:
                found[name] = str(error)
            else:
                found[name] = _last(end.decode("utf-8", errors="replace"), _LOG_LINES)
    return dict(list(found.items())[:_MAX_LOGS])


def _written_as(path: str) -> list[str]:
    """The newest files of a sink: with a number, a date or a rank in the name, as sinks write them."""
    folder, stem = os.path.dirname(path) or ".", os.path.splitext(os.path.basename(path))[0]
    try:
        names = names_in(UserFile(path=folder, what="directory of logs", named_by="logging.toml"))
    except RanncError:
        return [path]
    found = [os.path.join(folder, name) for name in names if name.startswith(stem)]
    return sorted(found, key=_changed, reverse=True)[:2] or [path]


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _last(text: str, num_lines: int) -> str:
    return "\n".join(text.splitlines()[-num_lines:])
