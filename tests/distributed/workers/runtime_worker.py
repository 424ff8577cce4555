"""One rank of a job that checks the runtime's parts against each other; ends with a line "ok <rank>" when all
held.

usage: runtime_worker.py CHECK...
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from rannc_backend.errors import CommunicationError, LaunchError
from rannc_backend.runtime.comm import shared_memory_allreduce as shared_sums
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.world import StartOptions, World

sys.path.append(str(Path(__file__).resolve().parents[3]))

from tests.distributed.harness.forked_rank import rank_of_environment  # noqa: E402

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Make a function callable by its name."""
    CHECKS[function.__name__] = function
    return function


def start() -> World:
    return bootstrap.start(StartOptions(start_limit_seconds=30, limit_seconds=20))


@check
def places() -> None:
    world = start()
    assert bootstrap.start() is world
    seen = world.control.allgather([world.rank, world.size, world.local_rank, str(world.device)])
    assert seen == [[rank, world.size, rank, "cpu"] for rank in range(world.size)], seen
    assert torch.distributed.get_rank() == world.rank and torch.distributed.get_world_size() == world.size
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "mpi"
    assert world.launcher == launcher, world.launcher
    assert len(set(world.hosts)) == 1 and len(world.hosts) == world.size


@check
def mpi_stays_out_of_torchrun() -> None:
    start()
    assert "mpi4py.MPI" not in sys.modules


@check
def user_group() -> None:
    """A torch.distributed of the user's is used as it is, and is still theirs afterwards."""
    torch.distributed.init_process_group("gloo")
    world = start()
    assert world.launcher == "user"
    assert world.control.allgather(world.rank) == list(range(world.size))
    theirs = torch.ones(3)
    torch.distributed.all_reduce(theirs)
    assert theirs.tolist() == [world.size] * 3
    world.transport.close()
    assert torch.distributed.is_initialized()


@check
def control() -> None:
    world = start()
    rank, size = world.rank, world.size
    own = {"rank": rank, "text": "ä", "none": None, "list": [1.5, True]}
    assert world.control.allgather(own) == [{**own, "rank": peer} for peer in range(size)]
    for num_characters in (0, 450, 494, 495, 496, 497, 5000, 300_000):
        text = "x" * num_characters
        assert world.control.allgather(text * rank) == [text * peer for peer in range(size)]
        for root in range(size):
            assert world.control.broadcast([root, text] if rank == root else None, root=root) == [root, text]
    if rank == 0:
        time.sleep(0.2)
    begin = time.monotonic()
    world.control.barrier()
    assert rank == 0 or time.monotonic() - begin > 0.1, "the barrier let a rank through early"


@check
def control_names_the_missing() -> None:
    world = start()
    world.monitor.phase(f"phase of rank {world.rank}")
    if world.rank == 1:
        time.sleep(3.5)
        world.control.barrier(what="sizes")
        return
    try:
        world.control.barrier(what="sizes", limit_seconds=0.5)
    except CommunicationError as error:
        assert error.peer == 1 and error.rank == world.rank, error
        assert "sizes: rank 1 has not arrived (it is in: phase of rank 1)" in str(error), error
    else:
        raise AssertionError("the barrier did not wait for rank 1")


@check
def control_finds_different_operations() -> None:
    world = start()
    try:
        world.control.allgather(1, what=f"values {int(world.rank == 1)}")
    except CommunicationError as error:
        assert "called another one" in str(error), error
        assert error.peer == (0 if world.rank == 1 else 1), error
    else:
        raise AssertionError("different operations were not noticed")


@check
def messages() -> None:
    """Every dtype, many messages under way, several channels between one pair, both directions at once."""
    world = start()
    rank, size = world.rank, world.size
    right, left = (rank + 1) % size, (rank - 1) % size
    world.transport.prepare(channels=["1F2", "2B1"])
    world.transport.prepare(channels=["2B1", "late"])
    dtypes = [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
    ]
    dtypes += [torch.complex64, torch.float8_e4m3fn]
    for dtype in dtypes:
        expected = (torch.arange(24).reshape(2, 3, 4) + left).to(dtype)
        own = (torch.arange(24).reshape(2, 3, 4) + rank).to(dtype)
        got = torch.zeros(2, 3, 4, dtype=dtype)
        receive = world.transport.irecv(got, left, "late")
        world.transport.isend(own, right, "late").wait()
        receive.wait()
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), dtype
    sizes = [1, 100_000, 7, 3000, 0, 2, 1_000_000, 5]
    receives = [
        (channel, index, torch.empty(count), count)
        for index, count in enumerate(sizes)
        for channel in ("1F2", "2B1")
    ]
    posted = [
        (world.transport.irecv(buffer, left if channel == "1F2" else right, channel), channel, index, buffer)
        for channel, index, buffer, _ in receives
    ]
    sends = []
    # The second channel is sent first: channels do not wait for each other.
    for channel in ("2B1", "1F2"):
        for index, count in enumerate(sizes):
            value = 1000.0 * rank + index + (0.5 if channel == "2B1" else 0.0)
            sends.append(
                world.transport.isend(
                    torch.full((count,), value), right if channel == "1F2" else left, channel
                )
            )
    gc.collect()
    for work, channel, index, buffer in reversed(posted):
        work.wait(10)
        peer = left if channel == "1F2" else right
        value = 1000.0 * peer + index + (0.5 if channel == "2B1" else 0.0)
        assert torch.equal(buffer, torch.full_like(buffer, value)), (channel, index)
    for work in sends:
        work.wait(10)
        work.wait(10)


@check
def groups() -> None:
    world = start()
    rank, size = world.rank, world.size
    everyone = tuple(range(size))
    lists = [everyone, everyone[:2], everyone[-2:], (rank,)]
    world.transport.prepare(groups=[group for group in lists if len(group) > 1])
    for ranks in lists:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            tensor = torch.full((1001,), rank + 1, dtype=dtype)
            if rank in ranks:
                world.transport.allreduce(tensor, ranks).wait()
                assert torch.equal(tensor, torch.full_like(tensor, sum(r + 1 for r in ranks))), (ranks, dtype)
                tensor = torch.full((77,), rank, dtype=dtype)
                world.transport.broadcast(tensor, ranks[-1], ranks).wait()
                assert torch.equal(tensor, torch.full_like(tensor, ranks[-1])), (ranks, dtype)


@check
def buckets() -> None:
    """Sums in memory that the ranks of this host share: several groups and dtypes, many under way, before and
    after new connections.
    """
    world = start()
    rank, size = world.rank, world.size
    groups = [ranks for ranks in (tuple(range(size)), (0, 1), tuple(range(size - 2, size))) if len(ranks) > 1]
    sums = world.transport.share(sorted(set(groups)))
    assert sums is not None, "ranks of one host do not share memory"
    fewest = mock.patch.object(shared_sums, "_FEWEST_BYTES", 2**10)
    with fewest, mock.patch.object(shared_sums, "add_up", wraps=shared_sums.add_up) as add_up:
        for step in range(3):
            for ranks in (group for group in groups if rank in group):
                kinds = [
                    (100_003, torch.float32),
                    (2**18, torch.bfloat16),
                    (65_536, torch.float64),
                    (5, torch.float32),
                ]
                made = [sums.new_bucket(numel, dtype, ranks) for numel, dtype in kinds]
                for bucket in made:
                    bucket.copy_(torch.arange(bucket.numel()) % 7 + rank)
                for work in [sums.reduce(bucket, ranks) for bucket in made]:
                    work.wait(10)
                for bucket in made:
                    expected = len(ranks) * (torch.arange(bucket.numel()) % 7) + sum(ranks)
                    assert torch.equal(bucket, expected.to(bucket.dtype)), (ranks, bucket.dtype)
            if step == 1:
                world.control.barrier()
                world.transport.recreate()
        assert add_up.call_count == 3 * 3 * sum(rank in group for group in groups), add_up.call_count


@check
def wait_names_the_peer() -> None:
    world = start()
    world.transport.prepare(channels=["1F2"])
    if world.rank == 0:
        work = world.transport.irecv(torch.empty(4), 1, "1F2")
        begin = time.monotonic()
        try:
            work.wait(0.5)
        except CommunicationError as error:
            assert (error.rank, error.peer) == (0, 1), error
            assert "receive of '1F2' did not complete in time (limit 0.5 s)" in str(error), error
            assert 0.4 < time.monotonic() - begin < 3, "the wait did not keep its limit"
        else:
            raise AssertionError("a message that nobody sent arrived")
    time.sleep(1.0)


@check
def wait_for_a_message() -> None:
    """Wait in C++ for a message that nobody sends."""
    world = start()
    world.transport.prepare(channels=["1F2"])
    world.monitor.phase(f"step 0, stage {world.rank}, waiting")
    world.control.barrier()
    print("waiting", flush=True)
    world.transport.irecv(torch.empty(4), 1 - world.rank, "1F2").wait()


@check
def keeps_everything() -> None:
    """End with tensors and Works still referred to, from where the interpreter lets go of them last."""
    world = start()
    everyone = tuple(range(world.size))
    world.transport.prepare(groups=[everyone])
    kept = []
    for _ in range(3):
        tensor = torch.ones(10_000)
        work = world.transport.allreduce(tensor, everyone)
        work.wait()
        kept.append((tensor, work))
    sys.kept = kept  # type: ignore[attr-defined]


@check
def forked_children() -> None:
    """Children of a DataLoader neither speak for their parent nor keep its connections open."""
    world = start()
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, num_workers=2, persistent_workers=True)
    assert sum(int(batch.sum()) for batch in loader) == 28
    del loader
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert os.waitpid(pid, 0)[1] == signal.SIGTERM
    world.control.barrier()


@check
def forked_child_outlives() -> None:
    """A rank that is killed while a forked child of it lives on is noticed at once."""
    world = start()
    if world.rank == 1:
        if os.fork() == 0:
            time.sleep(3)
            sys.stderr.write("child ends\n")
            os._exit(0)
        sys.stderr.write(f"FAULT_AT {time.time()}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    world.control.barrier()


@check
def leaving_at_different_times() -> None:
    """Ranks that are done leave; the others go on with their own work, and the job ends well."""
    world = start()
    world.control.barrier()
    time.sleep(0.5 * world.rank)


@check
def leaving_before_the_start() -> None:
    """Ranks that never call a compiled model end when they like."""
    bootstrap.watch_others()
    time.sleep(2 * (rank_of_environment() != 1))


@check
def starting_without_another() -> None:
    """One ends in order, and the other comes to its first call."""
    bootstrap.watch_others()
    if rank_of_environment() == 1:
        time.sleep(1)
        sys.stderr.write(f"FAULT_AT {time.time()}\n")
        return
    time.sleep(3)
    start()


@check
def too_few_devices() -> None:
    try:
        bootstrap.start(StartOptions(start_limit_seconds=30, device="cuda"))
    except LaunchError as error:
        assert "but 0 CUDA device(s)" in str(error), error
    else:
        raise AssertionError("ranks without a device were started")


@check
def thread_fails() -> None:
    """A rank trains in a thread, which fails; its main thread comes to the end of the script."""
    world = start()

    def train() -> None:
        for step in range(3):
            if world.rank == 1 and step == 1:
                raise ValueError("in a thread")
            world.control.barrier()

    thread = threading.Thread(target=train, name="trainer")
    thread.start()
    thread.join()


@check
def reported() -> None:
    """A failure that is reported rather than raised ends the job too."""
    world = start()
    world.monitor.phase("step 7, stage 1, micro-batch 2, backward")
    if world.rank == 1:
        sys.stderr.write(f"FAULT_AT {time.time()}\n")
        world.monitor.fail(ValueError("reported, not raised"))
    world.control.barrier()


@check
def equal_graphs() -> None:
    """Two replicas under Inductor with an empty cache: each graph is compiled once, and the other rank finds
    it.
    """
    from torch import nn

    world = start()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = world.control.broadcast(
        tempfile.mkdtemp() if world.rank == 0 else None
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    expected = model(x).square().mean()
    compiled = torch.compile(
        model, backend="rannc", options={"stage_compiler": "inductor", "stage_replicas": "2"}
    )
    loss = compiled(x[world.rank * 4 : world.rank * 4 + 4]).square().mean()
    loss.backward()
    found = torch._dynamo.utils.counters["inductor"]
    counts = world.control.allgather([found["fxgraph_cache_miss"], found["fxgraph_cache_hit"], float(loss)])
    assert sum(each[0] for each in counts) == 2 and sum(each[1] for each in counts) == 2, counts
    assert abs(sum(each[2] for each in counts) / 2 - float(expected)) < 1e-12, counts


def main() -> None:
    for name in sys.argv[1:]:
        CHECKS[name]()
    print(f"ok {rank_of_environment()}", flush=True)


if __name__ == "__main__":
    main()
