"""Control over a wire: here one in memory, with a thread per rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rannc_backend.errors import CommunicationError, LaunchError
from rannc_backend.runtime.comm import control_mpi
from rannc_backend.runtime.comm.control import (
    SLOT_BYTES,
    SingleControl,
    WireControl,
    missing_ranks_error,
    poll,
)
from rannc_backend.runtime.launch import Launch
from rannc_backend.runtime.world import RankState


class Table:
    """What the threads of one job share: the buffers of every collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rounds: dict[int, dict[int, bytearray]] = {}
        self.lock = threading.Lock()


class MemoryWire:
    """One rank's end of a Table."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank, self.round = table, rank, 0

    def _join(self, send: bytearray, finish: Callable[[dict[int, bytearray]], None]) -> Any:
        number, self.round = self.round, self.round + 1
        with self.table.lock:
            self.table.rounds.setdefault(number, {})[self.rank] = bytearray(send)

        class Pending:
            def test(inner) -> bool:  # noqa: N805
                parts = self.table.rounds[number]
                if len(parts) < self.table.size:
                    return False
                finish(parts)
                return True

        return Pending()

    def start_allgather(self, send: bytearray, receive: bytearray) -> Any:
        def finish(parts: dict[int, bytearray]) -> None:
            receive[:] = b"".join(parts[rank] for rank in range(self.table.size))

        return self._join(send, finish)

    def start_broadcast(self, buffer: bytearray, root: int) -> Any:
        def finish(parts: dict[int, bytearray]) -> None:
            buffer[:] = parts[root]

        return self._join(buffer, finish)

    def close(self) -> None:
        return


def on_ranks(size: int, work: Callable[[WireControl], Any]) -> list[Any]:
    """Run `work` on each rank of a job of threads; returns results or exceptions by rank."""
    table, results = Table(size), [None] * size

    def run(rank: int) -> None:
        control = WireControl(MemoryWire(table, rank), rank=rank, size=size, limit_seconds=0.5)
        try:
            results[rank] = work(control)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return results


@pytest.mark.parametrize("num_characters", [0, 1, 493, 494, 495, SLOT_BYTES, 10_000])
def test_values_around_the_size_of_a_slot(num_characters: int) -> None:
    def work(control: WireControl) -> Any:
        own = "x" * num_characters + str(control.rank)
        return [
            control.allgather(own),
            control.broadcast(own, root=1),
            control.allgather([]),
            control.barrier(),
        ]

    values = ["x" * num_characters + str(rank) for rank in range(3)]
    assert on_ranks(3, work) == [[values, values[1], [[], [], []], None]] * 3


def test_only_one_value_is_long() -> None:
    values = ["short", "long" * 500]
    assert on_ranks(2, lambda control: control.allgather(values[control.rank])) == [values] * 2


def test_no_pickle() -> None:
    results = on_ranks(2, lambda control: control.allgather(object()))
    assert all(isinstance(result, TypeError) for result in results)


def test_different_operations_are_noticed_by_all() -> None:
    def work(control: WireControl) -> Any:
        return control.barrier(what="compile") if control.rank == 2 else control.allgather(1, what="sizes")

    results = on_ranks(3, work)
    assert all(isinstance(result, CommunicationError) for result in results)
    assert [result.peer for result in results] == [2, 2, 0]
    assert "this rank is at operation 1 (allgather of sizes), but rank(s) 2 called another one" in str(
        results[0]
    )


def test_a_limit_is_kept() -> None:
    def work(control: WireControl) -> Any:
        begin = time.monotonic()
        if control.rank == 1:
            return None
        with pytest.raises(CommunicationError, match=r"sizes: not all ranks have arrived \(limit 0.2 s\)"):
            control.allgather(1, what="sizes", limit_seconds=0.2)
        return time.monotonic() - begin

    seconds = on_ranks(2, work)[0]
    assert isinstance(seconds, float) and 0.2 <= seconds < 2.0, seconds


def state(rank: int, num_calls: int, silent_seconds: float = 0.1) -> RankState:
    phase = f"phase {rank}"
    return RankState(
        rank=rank, host="h", phase=phase, num_calls=num_calls, silent_seconds=silent_seconds, left=False
    )


def test_who_is_behind_is_named_and_who_is_ahead_is_not() -> None:
    error = missing_ranks_error(
        "sizes", rank=0, states=[state(0, 7), state(1, 7), state(2, 6), state(3, 8)], limit_seconds=9
    )
    assert error.peer == 2
    cause, place, cure = str(error).splitlines()
    assert (
        cause == "sizes: rank 2 has not arrived (it is in: phase 2) (limit 9 s)"
        and place == "  at rank 0, with rank 2"
        and cure
    )


def test_a_frozen_rank_is_named_first() -> None:
    error = missing_ranks_error(
        "sizes", rank=1, states=[state(0, 5), state(1, 7), state(2, 6, 40.0)], limit_seconds=9
    )
    assert error.peer == 2
    assert "rank 2 gives no sign of life for 40 s (last in: phase 2); rank 0 has not arrived" in str(error)


def test_poll_gives_others_the_core() -> None:
    answers = iter([False] * 40 + [True])
    cpu, wall = time.process_time(), time.monotonic()
    assert poll(lambda: next(answers), 30)
    assert not poll(lambda: False, 0.3)
    assert time.process_time() - cpu < 0.5 * (time.monotonic() - wall), "waiting takes a core"


def test_single() -> None:
    control = SingleControl()
    assert control.allgather((1, "a")) == [[1, "a"]]
    with pytest.raises(TypeError):
        control.broadcast(object())


def test_mpi_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mpi4py.MPI", None)
    with pytest.raises(LaunchError, match=r"one of 2 MPI ranks \(PMI_SIZE\)[\s\S]*pip install") as caught:
        control_mpi.load_mpi(Launch(launcher="mpi", rank=0, size=2, source="PMI_SIZE"))
    assert "mpi4py" in caught.value.cure


def test_mpi_that_is_another_than_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    class World:
        def Get_size(self) -> int:  # noqa: N802
            return 1

    class Mpi:
        COMM_WORLD = World()

        @staticmethod
        def Is_initialized() -> bool:  # noqa: N802
            return True

        @staticmethod
        def Get_library_version() -> str:  # noqa: N802
            return "MPICH Version: 5.0\nmore"

    monkeypatch.setitem(__import__("sys").modules, "mpi4py.MPI", Mpi)
    with pytest.raises(
        LaunchError, match=r"started 2 ranks .* but mpi4py sees 1: it uses another MPI \(MPICH Version: 5.0\)"
    ):
        control_mpi.load_mpi(Launch(launcher="mpi", rank=0, size=2, source="OMPI_COMM_WORLD_SIZE"))
