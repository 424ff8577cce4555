"""Whether `mpirun` and the library that the ranks load are of one MPI: if not, every rank believes to be
alone.

In: what `mpirun --version` and mpi4py say, and every launcher in PATH. Out: a `Finding`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rannc_backend.doctor.findings import Finding, package_version, said_by

_FAMILIES = (
    ("Open MPI", r"open ?mpi|open-mpi|openrte|prrte"),
    ("Intel MPI", r"intel"),
    ("MPICH", r"mpich|hydra"),
)
_LAUNCHERS = ("mpirun", "mpiexec")


def find_mpi(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The check of what `mpirun` and mpi4py are here, and of further launchers in PATH."""
    path = environ.get("PATH", "")
    mpirun = shutil.which("mpirun", path=path)
    yield check_mpi(
        mpirun,
        mpirun_version(said_by([mpirun, "--version"])) if mpirun else "",
        package_version("mpi4py"),
        mpi_library(),
    )
    if mpirun is not None:
        yield check_launchers(
            [(each, mpirun_version(said_by([each, "--version"]))) for each in launchers_in(path)]
        )


def check_mpi(mpirun: str | None, mpirun_version: str, mpi4py: str | None, library: str) -> Finding:
    """Whether the launcher and the library that ranks load are of one MPI. `library`: what mpi4py says it is,
    or why it fails.
    """
    if mpirun is None:
        text = "no mpirun in PATH; ranks can be started with torchrun"
        return Finding(
            name="MPI",
            status="warning",
            text=text,
            cure="install an MPI, as with `pip install rannc-backend[mpi]`.",
        )
    if mpi4py is None:
        text = f"{mpirun} ({mpirun_version}), but no mpi4py: its ranks cannot find each other"
        return Finding(
            name="MPI", status="problem", text=text, cure="install mpi4py, or start ranks with torchrun."
        )
    launched, loaded = mpi_family(mpirun_version), mpi_family(library)
    text = f"{mpirun} ({mpirun_version}), mpi4py {mpi4py} over {library}"
    if loaded is None:
        cure = "put the library of this MPI on LD_LIBRARY_PATH, or install one with `pip install rannc-backend[mpi]`."
        return Finding(
            name="MPI",
            status="problem",
            text=f"{mpirun} ({mpirun_version}); mpi4py {mpi4py} fails: {library}",
            cure=cure,
        )
    if launched is not None and launched != loaded:
        cure = f"put the mpirun of {loaded} first in PATH: with this one every rank believes to be alone."
        return Finding(name="MPI", status="problem", text=text, cure=cure)
    numbers = _major(mpirun_version), _major(library)
    if launched is not None and None not in numbers and numbers[0] != numbers[1]:
        cure = (
            f"put the mpirun of {loaded} {numbers[1]} first in PATH, or its library first on LD_LIBRARY_PATH."
        )
        return Finding(name="MPI", status="warning", text=f"{text}: of different releases", cure=cure)
    return Finding(name="MPI", status="ok", text=text)


def check_launchers(found: Sequence[tuple[str, str]]) -> Finding:
    """Whether one MPI answers to mpirun and mpiexec, wherever in PATH. `found`: path and version of each, the
    first in PATH first.
    """
    families = {mpi_family(version) or version for _, version in found}
    texts = [f"{path} ({version})" for path, version in found]
    if len(families) > 1:
        cure = f"keep those of one MPI in PATH: scripts that change PATH would start ranks with another one than {found[0][0]}."
        return Finding(
            name="MPI launchers",
            status="warning",
            text=f"of {len(families)} kinds: {', '.join(texts)}",
            cure=cure,
        )
    return Finding(name="MPI launchers", status="ok", text=f"{len(texts)} in PATH, of one kind")


def launchers_in(path: str) -> list[str]:
    """Every mpirun and mpiexec in PATH, each file once, whatever names it has."""
    found: dict[str, str] = {}
    for folder in path.split(os.pathsep):
        for name in _LAUNCHERS:
            program = shutil.which(name, path=folder) if folder else None
            if program is not None:
                found.setdefault(str(Path(program).resolve()), program)
    return list(found.values())


def mpi_family(text: str) -> str | None:
    """Whose MPI a version text is of; None if it says none."""
    return next((family for family, pattern in _FAMILIES if re.search(pattern, text, re.IGNORECASE)), None)


def mpi_library() -> str:
    """What library mpi4py loads, or why it fails. In a process of its own: a wrong library may end it."""
    return said_by(
        [sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"]
    ).splitlines()[0]


def mpirun_version(said: str) -> str:
    """ "Open MPI 5.0.11" or "Hydra 5.0.2", from what mpirun --version says; its first line if it is another
    one.
    """
    hydra = re.search(r"HYDRA build details:\s*Version:\s*(\S+)", said)
    open_mpi = re.search(r"\((Open MPI|OpenRTE|PRRTE)\) (\S+)", said)
    if hydra is not None:
        return f"Hydra {hydra[1]}"
    return f"{open_mpi[1]} {open_mpi[2]}" if open_mpi is not None else said.splitlines()[0]


def _major(version: str) -> int | None:
    """The first number of a release, as 5 of "Open MPI v5.0.11"."""
    found = re.search(r"(\d+)\.\d+", version)
    # PRRTE counts its own releases.
    return None if found is None or "PRRTE" in version else int(found[1])
