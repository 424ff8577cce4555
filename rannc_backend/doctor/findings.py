"""What a check of `rannc doctor` finds, and how checks ask the system: versions of packages, what commands
print.

In: names of packages, commands with a limit of time. Out: `Finding`s and texts; nothing here raises where the
system has no answer.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check. `cure`: what to do about it; "" where there is nothing to do. `details`: for the report
    alone, as a job's output.
    """

    name: str
    status: Status
    text: str
    cure: str = ""
    details: str = ""


def package_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def said_by(
    command: Sequence[str], limit_seconds: float = 60.0, environ: Mapping[str, str] | None = None
) -> str:
    """What a command prints, or the last line of its error; never empty. Blanks are single."""
    code, out, error = output_of(command, limit_seconds, environ)
    text = out.split("\0")[0] if code == 0 else "".join(error.strip().splitlines()[-1:])
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return "\n".join(line for line in lines if line) or f"exit code {code} and no word"


def output_of(
    command: Sequence[str], limit_seconds: float = 60.0, environ: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Exit code, output and error output of a command; None and why, where it cannot be started or does not
    end.
    """
    try:
        # In a session of its own: whatever MPI starts there must not get this terminal's signals.
        result = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=limit_seconds,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            env=None if environ is None else dict(environ),
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return None, "", f"{type(error).__name__}: {error}"
    return result.returncode, result.stdout, result.stderr


def read_text(path: str) -> str:
    """A file's text; "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
