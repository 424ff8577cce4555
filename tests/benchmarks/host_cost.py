"""Host time of this package's own code per message and per bucket, in the steady state of a training step.

    python tests/benchmarks/host_cost.py

In: nothing. Out: a table in microseconds, and a JSON line. Streams, process groups and kernels are empty
functions, so what is measured is what the host does between them: looking up rows, buffers, links and tables,
and noting what is under way. The lower quartile of many steps, since other processes of a machine only add;
the floor beside them is an empty call. What a launch of Triton and a call of NCCL cost on top is measured
where there is a CUDA device, and said to be "not yet measured" where there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rannc_backend.ir.action import Action, ActionKind, Channel  # noqa: E402
from rannc_backend.ir.exchange import Edge, Value  # noqa: E402
from rannc_backend.kernels import boundary_pack, gradient_views  # noqa: E402
from rannc_backend.kernels.gradient_views import GradientTables  # noqa: E402
from rannc_backend.kernels.record_table import CopyReport  # noqa: E402
from rannc_backend.runtime.comm.device_watch import DeviceWatch  # noqa: E402
from rannc_backend.runtime.comm.gloo import OwnedGroups  # noqa: E402
from rannc_backend.runtime.comm.nccl import NcclTransport  # noqa: E402
from rannc_backend.runtime.gradients.bucket_layout import plan_buckets  # noqa: E402
from rannc_backend.runtime.gradients.buckets import GradientBuckets, StageGradients  # noqa: E402
from rannc_backend.runtime.rows import RowTable  # noqa: E402
from rannc_backend.runtime.step.executor import Executor  # noqa: E402
from rannc_backend.runtime.step.send_buffers import SendBuffers  # noqa: E402
from rannc_backend.runtime.step.step_state import StepState  # noqa: E402
from rannc_backend.runtime.world import Route  # noqa: E402
from rannc_backend.stages.gradient_sink import open_targets  # noqa: E402
from tests.played_steps import shapes_of  # noqa: E402

TARGET_MICROSECONDS = 25.0
NUM_MICRO_BATCHES = 8
_K = ActionKind


class EmptyEvent:
    """Has always passed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return

    def get_future_result(self) -> Any:
        raise RuntimeError("only NCCL's work has one")


class EmptyStream:
    """Queues nothing."""

    def record_event(self) -> EmptyEvent:
        return EVENT

    def wait_event(self, event: Any) -> None:
        return


EVENT, STREAM, NO_CONTEXT = EmptyEvent(), EmptyStream(), contextlib.nullcontext()


class EmptyLayer:
    """Streams that do nothing; memory of the host."""

    def compute(self) -> EmptyStream:
        return STREAM

    def new_stream(self) -> EmptyStream:
        return STREAM

    def on(self, stream: Any) -> Any:
        return NO_CONTEXT

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


class EmptyCalls:
    """torch.distributed, of which every call returns at once."""

    def new_group(self, ranks: tuple[int, ...], limit_seconds: float) -> object:
        return object()

    def exchange(self, sends: Any, receives: Any, group: Any) -> EmptyEvent:
        return EVENT

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> EmptyEvent:
        return EVENT

    def reduce(self, tensor: torch.Tensor, root: int, group: Any) -> EmptyEvent:
        return EVENT

    def broadcast(self, tensor: torch.Tensor, root: int, group: Any) -> EmptyEvent:
        return EVENT


class EmptyKernel:
    """A Triton kernel whose launch returns at once."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return _nothing


def _nothing(*arguments: Any, **named: Any) -> None:
    return


class EmptyStage:
    """A stage that computes nothing: it has its outputs, and its gradients, from the beginning."""

    inputs: tuple[Any, ...] = ()
    grad_parameters = stored_outputs = stored_gradients = ()
    gradient_copies = CopyReport()

    def __init__(self, inputs: Sequence[Value], outputs: Sequence[Value], num_rows: int) -> None:
        self.inputs = tuple(SimpleNamespace(name=value.name, kind="boundary") for value in inputs)
        self.outputs = tuple(SimpleNamespace(name=value.name, kind="boundary") for value in outputs)
        self.grad_outputs = tuple(range(len(outputs)))
        self.grad_inputs = tuple(range(len(inputs)))
        self._results = [_tensor_of(value, num_rows) for value in outputs]
        self._gradients = [_tensor_of(value, num_rows) for value in inputs]

    def forward(self, args: Any, destinations: Any) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        return self._results, ()

    def backward(self, saved: Any, grads: Any, sink: Any, destinations: Any) -> list[torch.Tensor]:
        return self._gradients


def _tensor_of(value: Value, num_rows: int) -> torch.Tensor:
    return torch.zeros([num_rows if size == -1 else size for size in value.shape], dtype=value.dtype)


@contextlib.contextmanager
def empty_kernels() -> Iterator[None]:
    """Within it, launchers do all that they do on a GPU, and the kernels are empty."""
    pack, bucket, dtype_of = (
        boundary_pack.reference_pack,
        gradient_views._gradient_kernel,
        gradient_views.triton_dtype,
    )
    pack_kernel = boundary_pack._pack_kernel

    def launch(message: Any, tensors: Any, layout: Any, moved: Any) -> None:
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        boundary_pack.launch_pack(message, addresses, layout, moved, _TABLES.tables)

    boundary_pack.reference_pack, boundary_pack._pack_kernel = launch, EmptyKernel()
    gradient_views._gradient_kernel, gradient_views.triton_dtype = EmptyKernel(), str
    try:
        yield
    finally:
        boundary_pack.reference_pack, boundary_pack._pack_kernel = pack, pack_kernel
        gradient_views._gradient_kernel, gradient_views.triton_dtype = bucket, dtype_of


_TABLES = SendBuffers(torch.device("cpu"))


def new_transport() -> NcclTransport:
    """Of rank 1 of 3, with connections to both neighbours and a group that reduces."""
    reporter: Any = SimpleNamespace(
        current_phase=lambda: "", begin_wait=_nothing, end_wait=_nothing, report_error=_nothing
    )
    watch = DeviceWatch(reporter, rank=1, limit_seconds=1e9, start_thread=False)
    groups = OwnedGroups(owns_default_group=False)
    transport = NcclTransport(
        rank=1, size=3, limit_seconds=1e9, layer=EmptyLayer(), calls=EmptyCalls(), watch=watch, groups=groups
    )
    routes = [
        Route(str(Channel(s, d, way)), (s,), (d,))
        for s, d, way in ((0, 1, "F"), (1, 2, "F"), (2, 1, "B"), (1, 0, "B"))
    ]
    transport.prepare(routes=routes, groups=[(0, 1, 2)])
    transport.look = watch.look  # type: ignore[attr-defined]
    return transport


def message_costs(num_values: int, num_steps: int) -> dict[str, float]:
    """Seconds of host time per message sent and received, both directions, of the stage in the middle of
    three.
    """
    values = [
        tuple(
            Value(name=f"{side}{i}", dtype=torch.float32, shape=(-1, 4, 4), dim=0) for i in range(num_values)
        )
        for side in "xy"
    ]
    num_rows = 4
    transport = new_transport()
    world: Any = SimpleNamespace(
        rank=1, device=torch.device("cpu"), transport=transport, monitor=SimpleNamespace(phase=_nothing)
    )
    executor = Executor(
        world=world,
        stages={1: EmptyStage(*values, num_rows)},  # type: ignore[dict-item]
        edges={
            (0, 1): Edge(src=0, dst=1, forward=values[0], gradient=values[0]),
            (1, 2): Edge(src=1, dst=2, forward=values[1], gradient=values[1]),
        },
        tensors={},
        buffers={},
        parameter_names={},
        updated_buffers=frozenset(),
        limit_seconds=1e9,
        send_buffers=_TABLES,
    )
    rows = RowTable(
        local_rows=(num_rows * NUM_MICRO_BATCHES, 0, 0),
        num_micro_batches=NUM_MICRO_BATCHES,
        stage_ranks=((0,), (1,), (2,)),
    )
    forward = (
        (_K.RECEIVE_FORWARD, 0),
        (_K.WAIT_FORWARD, 0),
        (_K.FORWARD, -1),
        (_K.SEND_FORWARD, 2),
        (_K.DONE_FORWARD, 2),
    )
    backward = (
        (_K.RECEIVE_GRADIENT, 2),
        (_K.WAIT_GRADIENT, 2),
        (_K.BACKWARD, -1),
        (_K.SEND_GRADIENT, 0),
        (_K.DONE_GRADIENT, 0),
    )
    program = [
        Action(1, kind, m, peer) if peer >= 0 else Action(1, kind, m)
        for m in range(NUM_MICRO_BATCHES)
        for kind, peer in (*forward, *backward)
    ]
    spent: dict[ActionKind, list[float]] = defaultdict(list)
    clock = time.perf_counter
    shapes = shapes_of(executor.edges)
    for step in range(num_steps + 20):
        state = StepState(number=step, rows=rows, shapes=shapes, inputs={}, scalars={}, training=True)
        state.pending = SimpleNamespace()  # type: ignore[assignment]
        state.copies = None  # counted in the first step only
        transport.begin_step()
        executor.send_buffers.begin()
        with torch.no_grad():
            for action in program:
                begin = clock()
                executor._handlers[action.kind](action, state)
                if step >= 20:
                    spent[action.kind].append(clock() - begin)
        transport.look()  # what is done is dropped, as the watch's own thread does
    cost = {kind: _quartile(times) for kind, times in spent.items()}
    return {
        "sent": cost[_K.SEND_FORWARD] + cost[_K.DONE_FORWARD],
        "received": cost[_K.RECEIVE_FORWARD] + cost[_K.WAIT_FORWARD],
        "gradient sent": cost[_K.SEND_GRADIENT] + cost[_K.DONE_GRADIENT],
        "gradient received": cost[_K.RECEIVE_GRADIENT] + cost[_K.WAIT_GRADIENT],
    }


def bucket_cost(num_tensors: int, num_steps: int) -> dict[str, float]:
    """Seconds of host time per bucket and step: memory and views, two micro-batches, the start and end of its
    sum, and ``p.grad``.
    """
    parameters = {f"p{i}": torch.nn.Parameter(torch.zeros(8, 8)) for i in range(num_tensors)}
    ranks = (0, 1, 2)
    transport = new_transport()
    layout = plan_buckets(list(parameters.items()), dict.fromkeys(parameters, ranks), ranks, float("inf"))
    buckets = GradientBuckets(
        layout=layout, parameters=parameters, stage_ranks=ranks, start_reduce=transport.allreduce
    )
    names = dict(enumerate(parameters))
    positions = list(names)
    times = []
    for step in range(num_steps + 20):
        for parameter in parameters.values():
            parameter.grad = None
        begin = time.perf_counter()
        pending = buckets.pending()
        for micro_batch in range(2):
            if micro_batch == 1:
                pending.begin_last_micro_batch()
            sink = StageGradients(pending, names)
            open_targets(sink, positions)
            sink.all_made(positions)
        pending.finish()
        buckets.publish(pending, 1.0, keep=False)
        del pending, sink
        if step >= 20:
            times.append(time.perf_counter() - begin)
        transport.look()  # type: ignore[attr-defined]
    return {"in all": _quartile(times), "per tensor": _quartile(times) / num_tensors}


def gradient_call_cost(num_tensors: int, num_steps: int) -> dict[str, float]:
    """Seconds of one call that copies gradients to their bucket: with tables kept, with new addresses, and
    with tables built anew.
    """
    bucket = torch.zeros(num_tensors * 128)
    views = list(bucket.split(128))
    gradients = [torch.ones(128) for _ in views]
    kept = GradientTables()

    def moved() -> None:
        kept.kept.forget()
        kept.write(views, gradients, accumulate=False)

    ways = {
        "same addresses": lambda: kept.write(views, gradients, accumulate=False),
        "new addresses": moved,
        "built anew": lambda: GradientTables().write(views, gradients, accumulate=False),
    }
    return {name: _cost(way, num_steps) for name, way in ways.items()}


def _cost(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for number in range(repeats + 20):
        begin = time.perf_counter()
        function()
        if number >= 20:
            times.append(time.perf_counter() - begin)
    return _quartile(times)


def _quartile(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


def floor(num_steps: int) -> float:
    """Seconds of an empty call, timed as everything else here is."""
    return _cost(_nothing, num_steps)


def on_a_device() -> dict[str, float | str]:
    """Seconds of a launch of Triton and of an all-reduce of NCCL on the host; words where there is no CUDA
    device.
    """
    if not torch.cuda.is_available():
        return {
            "launch of a Triton kernel": "not yet measured",
            "all-reduce of NCCL, one rank": "not yet measured",
        }
    import torch.distributed as dist

    bucket = torch.zeros(8 * 128, device="cuda")
    gradients, kept = [torch.ones(128, device="cuda") for _ in range(8)], GradientTables()
    views = list(bucket.split(128))
    with_launch = _cost(lambda: kept.write(views, gradients, accumulate=False), 300)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        reduction = _cost(lambda: dist.all_reduce(bucket), 300)
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()
    return {
        "call with 8 gradients and a launch of Triton": with_launch,
        "all-reduce of NCCL, one rank": reduction,
    }


def measure(num_steps: int) -> dict[str, Any]:
    """All figures in microseconds."""
    with empty_kernels():
        found: dict[str, Mapping[str, float | str]] = {
            "message of 1 value": message_costs(1, num_steps // 4),
            "message of 3 values": message_costs(3, num_steps // 4),
        }
        for num_tensors in (1, 4, 16):
            found[f"bucket of {num_tensors}"] = bucket_cost(num_tensors, num_steps)
        for num_tensors in (1, 8, 50, 200):
            found[f"call with {num_tensors} gradients"] = gradient_call_cost(num_tensors, num_steps)
    found["empty call"] = {"floor": floor(num_steps)}
    found["on a device"] = on_a_device()
    return {
        name: {
            what: round(value * 1e6, 2) if isinstance(value, float) else value
            for what, value in costs.items()
        }
        for name, costs in found.items()
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="timed steps")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="for make bench-gpu: the host is timed in any case"
    )
    flags = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(8 if flags.tiny else flags.steps)
    for name, costs in figures.items():
        print(f"{name:24} " + ", ".join(f"{what} {value}" for what, value in costs.items()), file=sys.stderr)
    place = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    print(
        json.dumps(
            {
                "benchmark": "host_cost",
                "microseconds": figures,
                "target_microseconds": TARGET_MICROSECONDS,
                **place,
            }
        )
    )


if __name__ == "__main__":
    main()
