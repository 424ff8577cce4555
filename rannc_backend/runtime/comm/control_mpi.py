"""The control wire over MPI, and what else MPI tells at the start.

In: an initialised MPI (mpi4py is imported here when first needed, never before). Out: `MpiWire`, rank and
size. MPI makes no progress in the background: it moves only inside `Pending.test`, which the waiting side
calls.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from rannc_backend.errors import LaunchError
from rannc_backend.runtime.launch import Launch


class MpiPending:
    """A nonblocking MPI collective."""

    def __init__(self, request: Any, buffers: tuple[Any, ...]) -> None:
        self._request = request
        self._buffers = buffers  # MPI writes into them until the request is done

    def test(self) -> bool:
        return bool(self._request.Test())


class MpiWire:
    """Byte collectives over a communicator of our own, so that the user's messages cannot meet ours."""

    def __init__(self, mpi: ModuleType) -> None:
        self._mpi = mpi
        self._comm = mpi.COMM_WORLD.Dup()
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    def start_allgather(self, send: bytearray, receive: bytearray) -> MpiPending:
        byte = self._mpi.BYTE
        request = self._comm.Iallgather([send, len(send), byte], [receive, len(send), byte])
        return MpiPending(request, (send, receive))

    def start_broadcast(self, buffer: bytearray, root: int) -> MpiPending:
        return MpiPending(self._comm.Ibcast([buffer, len(buffer), self._mpi.BYTE], root), (buffer,))

    def local_rank(self) -> int:
        """Number of this rank on its host. Launchers' own variables can disagree with the order of ranks."""
        shared = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, key=self.rank)
        local_rank: int = shared.Get_rank()
        shared.Free()
        return local_rank

    def close(self) -> None:
        # Freeing is collective and could wait for a rank that has gone; MPI frees it at its own end.
        return


def load_mpi(launch: Launch) -> ModuleType:
    """Import and start MPI.

    Raises:
        LaunchError: mpi4py or its MPI library is missing, or belongs to another MPI than the launcher.
    """
    try:
        mpi: ModuleType = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"this process was started as one of {launch.size} MPI ranks ({launch.source}), but MPI cannot "
            f"be used from Python: {error}",
            cure='install it: pip install "rannc-backend[mpi]" brings mpi4py and an MPI; with an MPI of your '
            "own, "
            "pip install mpi4py. Or start with torchrun.",
        ) from error
    if not mpi.Is_initialized():
        mpi.Init_thread()
    if mpi.COMM_WORLD.Get_size() == launch.size:
        return mpi
    library = mpi.Get_library_version().splitlines()[0].strip(" \0")
    raise LaunchError(
        f"the launcher started {launch.size} ranks ({launch.source}), but mpi4py sees "
        f"{mpi.COMM_WORLD.Get_size()}: it uses another MPI ({library}) than the launcher",
        cure="use the mpirun that belongs to mpi4py's MPI, or install an mpi4py for the launcher's MPI "
        "(with srun: srun --mpi=list shows what it can start).",
    )
