"""Who started this process, read from the environment alone.

In: environment variables. Out: a `Launch`. Terms: a *launcher* is mpirun/srun ("mpi"), torchrun ("torchrun")
or none ("single"). Each MPI numbers ranks on a host in its own way, so the local rank of an MPI launch is not
read from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rannc_backend.errors import LaunchError
from rannc_backend.errors.base import shown

# Rank and size variables by launcher: MPICH, Intel MPI and others with Hydra; Open MPI; Slurm's srun. A batch
# script has SLURM_PROCID too, without being a task of a step, so the number of tasks is read from the step.
_MPI_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_MAX_DIGITS = 9
# Left by a launcher to its processes, and to what these start.
_LEFT_BY_LAUNCHERS = re.compile(
    r"^(PMI_|PMIX_|HYDI_|MPI_LOCAL|OMPI_COMM_WORLD_|OMPI_UNIVERSE|SLURM_(PROCID|STEP_|LOCALID|NODEID)|TORCHELASTIC_|GROUP_|LOCAL_|ROLE_)"
    r"|^(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
)
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the environment says of this process.

    Attributes:
        launcher: "mpi", "torchrun" or "single".
        source: the variable that told the size; "" for "single".
    """

    launcher: str
    rank: int
    size: int
    source: str = ""


def find_launch(environ: Mapping[str, str]) -> Launch:
    """Read the launcher, rank and size.

    torchrun's own mark goes first, because torchrun under srun or mpirun leaves the outer rank in the
    environment of every process it starts. Without it MPI's variables go before WORLD_SIZE, which users
    export for themselves.

    Raises:
        LaunchError: WORLD_SIZE is there but not the variables that belong to it.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        for rank_name, size_name in _MPI_VARIABLES:
            size = _number(environ, size_name)
            if size > 1 and rank_name in environ:
                return Launch(launcher="mpi", rank=_number(environ, rank_name), size=size, source=size_name)
    if _number(environ, "WORLD_SIZE") > 1:
        missing = [name for name in _TORCHRUN_VARIABLES if name not in environ]
        if missing:
            raise LaunchError(
                f"WORLD_SIZE is {environ['WORLD_SIZE']} but {', '.join(missing)} is not set",
                cure="start with mpirun or torchrun, or unset WORLD_SIZE for a single process.",
            )
        rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        return Launch(launcher="torchrun", rank=rank, size=size, source="WORLD_SIZE")
    return Launch(launcher="single", rank=0, size=1)


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for ranks of a job of its own: without what another launcher has left in it."""
    return {name: value for name, value in environ.items() if not _LEFT_BY_LAUNCHERS.match(name)}


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "0").strip()
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise LaunchError(
            f"{name} is {shown(text)}, not a number of ranks",
            cure=f"unset {name}, or let the launcher set it.",
        )
    return int(text)
