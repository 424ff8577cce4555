"""Who started this process, from environments as the launchers leave them."""

from __future__ import annotations

import pytest

from rannc_backend.errors import LaunchError
from rannc_backend.runtime.launch import find_launch

MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "2"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
TORCHRUN = {**BY_HAND, "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("single", 0, 1)),
        (MPICH, ("mpi", 1, 4)),
        (OPEN_MPI, ("mpi", 2, 3)),
        (SRUN, ("mpi", 5, 8)),
        (BATCH_SCRIPT, ("single", 0, 1)),
        ({**MPICH, "PMI_SIZE": "1", "PMI_RANK": "0"}, ("single", 0, 1)),
        (TORCHRUN, ("torchrun", 1, 2)),
        (BY_HAND, ("torchrun", 1, 2)),
        ({**MPICH, **BY_HAND}, ("mpi", 1, 4)),
        ({**SRUN, **TORCHRUN}, ("torchrun", 1, 2)),
        ({**MPICH, "PMI_SIZE": "1", **BY_HAND}, ("torchrun", 1, 2)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, ("single", 0, 1)),
        ({"PMI_SIZE": "4"}, ("single", 0, 1)),
    ],
)
def test_find_launch(environ: dict[str, str], expected: tuple[str, int, int]) -> None:
    launch = find_launch(environ)
    assert (launch.launcher, launch.rank, launch.size) == expected


def test_what_is_missing_is_named() -> None:
    with pytest.raises(LaunchError, match="WORLD_SIZE is 2 but RANK, MASTER_PORT is not set"):
        find_launch({"WORLD_SIZE": "2", "MASTER_ADDR": "a"})


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(LaunchError, match="PMI_SIZE is 'many', not a number"):
        find_launch({"PMI_SIZE": "many", "PMI_RANK": "0"})
