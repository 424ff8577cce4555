"""The private torch functions of the runtime behave as they did on the versions named in their module (torch
2.13).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from rannc_backend.runtime.torch_internals import (
    ClipGradNorm,
    NewTensors,
    OperatorWatch,
    UnscaleGrads,
    accumulation_hooks,
    backward_keeps_graph,
    be_first_after_step,
    function_of,
    gradient_hooks,
    graph_task,
    is_finished,
    num_storage_users,
    on_busy_device,
    replace_clip_grad_norm,
    replace_unscale_grads,
    storage_key,
    whole_fill_functions,
    without_anomaly_detection,
    without_autocast,
    written_arguments,
)


def test_storage_users_are_counted_without_the_question() -> None:
    base = torch.empty(4)
    assert num_storage_users(base) == 1
    view = base[:2]
    assert num_storage_users(base) == 2
    alias = view.detach()
    del view
    assert num_storage_users(base) == 2
    del alias
    assert num_storage_users(base) == 1


def test_a_run_is_timed_while_the_device_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is played: it does one thing after the other, and none before the host has queued it."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.place = len(done)
            done.append("event")

        def synchronize(self) -> None:
            done.append("waited")

        def elapsed_time(self, end: Event) -> float:
            return 1000.0 * (end.place - self.place)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(f"sleep {cycles}"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    busy = on_busy_device(lambda: done.append("run") or 7, torch.device("cuda"), 0.5)
    assert done == ["sleep 1000000000", "event", "run", "event", "waited"]
    assert busy.result == 7 and busy.device_seconds == 2.0 and 0 <= busy.host_seconds < 1


def test_backward_knows_whether_its_graph_is_kept() -> None:
    seen: list[bool] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            seen.append(backward_keeps_graph())
            return grad

    y = Probe.apply(torch.zeros((), requires_grad=True))
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]


def test_nodes_know_the_function_that_they_belong_to() -> None:
    """Seen on 2.11 to 2.15."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad

    y = Twice.apply(torch.zeros((), requires_grad=True))
    assert function_of(y.grad_fn) is Twice
    assert function_of((2 * y).grad_fn) is function_of(y) is None


def test_each_backward_has_its_number() -> None:
    """Seen on 2.11 to 2.15."""
    seen: list[int] = []
    x = torch.zeros((), requires_grad=True)
    y = x * 2
    for tensor in (x, y):
        tensor.register_hook(lambda _: seen.append(graph_task()))
    y.backward(retain_graph=True)
    y.backward()
    assert seen[0] == seen[1] and seen[2] == seen[3] and len(set(seen)) == 2 and graph_task() not in seen


def test_new_tensors_are_told_and_views_and_in_place_results_are_not() -> None:
    made: list[int] = []
    x = torch.ones(4)
    with torch.no_grad(), NewTensors(lambda tensor: made.append(storage_key(tensor))):
        y = x + 1
        y.view(2, 2).add_(1)
        torch.add(x, 1, out=y)
        parts = torch.split(y, 2)
        z = torch.empty(3)
    assert made == [storage_key(y), storage_key(z)]
    assert storage_key(parts[0]) == storage_key(y) != storage_key(x)


def test_without_autocast_no_operator_is_cast() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ops.aten.mm.default(x, x).dtype == torch.bfloat16
        assert without_autocast(torch.ops.aten.mm.default)(x, x).dtype == torch.float32
        assert torch.ops.aten.mm.default(x, x).dtype == torch.bfloat16


def test_every_scaler_unscales_through_the_method_that_is_replaced() -> None:
    seen: list[int] = []

    def make(original: UnscaleGrads) -> UnscaleGrads:
        def unscale(*arguments: object) -> dict[torch.device, torch.Tensor]:
            found = original(*arguments)
            seen.append(len(found))
            return {torch.device("cpu"): torch.ones(())}

        return unscale

    p = torch.nn.Parameter(torch.ones(2))
    put_back = replace_unscale_grads(make)
    try:
        assert issubclass(torch.cuda.amp.GradScaler, torch.amp.GradScaler)
        scaler = torch.amp.GradScaler("cpu")
        for unscale_first in (False, True):
            for optimizer in (torch.optim.SGD([p], lr=1.0), torch.optim.Adam([p], lr=1.0, fused=True)):
                scaler.scale(p.sum()).backward()
                if unscale_first:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scale = scaler.get_scale()
                scaler.update()
                assert scaler.get_scale() == scale / 2, "what the method finds decides"
    finally:
        put_back()
    assert seen == [1] * 4 and bool((p == 1).all()), "a step was made"


def test_clipping_is_replaced_under_every_name_that_a_script_has_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.nn.utils import clip_grad_norm_ as imported

    def check(names: list[ClipGradNorm]) -> None:
        seen: list[tuple[float, bool]] = []

        def make(original: ClipGradNorm) -> ClipGradNorm:
            def clip(parameters: object, max_norm: float, **others: object) -> torch.Tensor:
                seen.append((max_norm, torch.is_grad_enabled()))
                return original(parameters, max_norm, **others)

            return clip

        p = torch.nn.Parameter(torch.ones(4))
        put_back = replace_clip_grad_norm(make)
        try:
            for place, name in enumerate(names):
                p.grad = torch.ones(4)
                assert name()([p], 0.5 + place, norm_type=2.0) == 2 and torch.allclose(
                    p.grad.norm(), torch.tensor(min(2.0, 0.5 + place))
                )
        finally:
            put_back()
        names[0]()([p], 9.0)
        assert seen == [(0.5 + place, False) for place in range(len(names))]

    by_name = [lambda: torch.nn.utils.clip_grad_norm_, lambda: torch.nn.utils.clip_grad.clip_grad_norm_]
    check([*by_name, lambda: imported])
    # A torch that has no wrapper.
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        monkeypatch.setattr(module, "clip_grad_norm_", imported.__closure__[0].cell_contents)
    check(by_name)


def test_hooks_of_a_parameter_are_found_in_their_order() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    assert gradient_hooks(p) == [] and accumulation_hooks(p) == []
    first, second, third = (lambda gradient: gradient * 2), (lambda gradient: None), (lambda parameter: None)
    handle = p.register_hook(first)
    p.register_hook(second)
    p.register_post_accumulate_grad_hook(third)
    assert gradient_hooks(p) == [first, second] and accumulation_hooks(p) == [third]
    handle.remove()
    assert gradient_hooks(p) == [second]


def test_a_hook_can_be_the_first_after_a_step() -> None:
    parameter, called = torch.nn.Parameter(torch.ones(2)), []
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    everywhere = register_optimizer_step_post_hook(lambda *given: called.append("everywhere"))
    optimizer.register_step_post_hook(lambda *given: called.append("before"))

    def first(*given: Any) -> None:
        called.append("first")

    handle = optimizer.register_step_post_hook(first)
    for _ in range(2):  # it stays so, whatever comes
        be_first_after_step(optimizer, first)
        optimizer.register_step_post_hook(lambda *given: called.append("after"))
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert called == ["first", "before", "after", "after", "everywhere"]
    everywhere.remove()
    handle.remove()
    optimizer.step()
    assert called[5:] == ["before", "after", "after"]


def test_anomaly_detection_is_off_in_between_alone() -> None:
    with torch.autograd.set_detect_anomaly(True):
        assert not without_anomaly_detection(torch.is_anomaly_enabled)() and torch.is_anomaly_enabled()


def test_operators_and_what_they_write_are_seen() -> None:
    seen: list[tuple[str, int]] = []

    def run(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        seen.append((str(operator), len(written_arguments(operator, args, kwargs))))
        return operator(*args, **kwargs)

    with OperatorWatch(run):
        tensor = torch.zeros(2)
        tensor.add_(1)
        torch.add(tensor, tensor, out=torch.empty(2))
        tensor.view(2, 1)
    assert seen == [
        ("aten.zeros.default", 0),
        ("aten.add_.Tensor", 1),
        ("aten.empty.memory_format", 0),
        ("aten.add.out", 1),
        ("aten.view.default", 0),
    ]


def test_truncated_normals_go_through_the_function_that_is_replaced() -> None:
    noted: list[Any] = []

    def note(function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        noted.append((function, args))
        return tensor

    with whole_fill_functions(note):
        torch.nn.init.trunc_normal_(torch.empty(3), mean=1.0, std=2.0, a=-1.0, b=3.0)
    assert [args for _, args in noted] == [(1.0, 2.0, -1.0, 3.0)]
    filled = noted[0][0](torch.empty(300), 1.0, 2.0, -1.0, 3.0)
    assert -1.0 <= filled.min() and filled.max() <= 3.0


class PlayedWork:
    """Answers as NCCL's work does (a future result, on 2.11 no exception that Python could read) or gloo's."""

    def __init__(
        self, *, completed: bool, nccl_result: int | None = None, failed: bool = False, readable: bool = True
    ) -> None:
        self.completed, self.nccl_result, self.failed, self.readable = (
            completed,
            nccl_result,
            failed,
            readable,
        )

    def is_completed(self) -> bool:
        return self.completed

    def get_future_result(self) -> torch.futures.Future[int]:
        if self.nccl_result is None:
            raise RuntimeError("Work::getFutureResult not implemented.")
        future: torch.futures.Future[int] = torch.futures.Future()
        if self.nccl_result >= 0:
            future.set_result(self.nccl_result)
        return future

    def exception(self) -> RuntimeError | None:
        if not self.readable:
            raise TypeError("Unregistered type : std::__exception_ptr::exception_ptr")
        return RuntimeError("peer is gone\nand more") if self.failed or self.nccl_result else None

    def is_success(self) -> bool:
        assert self.nccl_result is None, "deprecated: raises with NCCL"
        return self.completed and not self.failed


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (PlayedWork(completed=False, nccl_result=-1), False),
        (PlayedWork(completed=True, nccl_result=-1), True),
        (PlayedWork(completed=True, nccl_result=0), True),
        (PlayedWork(completed=True, nccl_result=2), "peer is gone$"),
        (PlayedWork(completed=True, nccl_result=2, readable=False), "result is 2, communication error"),
        (PlayedWork(completed=False, nccl_result=1, readable=False), "time-out"),
        (PlayedWork(completed=False), False),
        (PlayedWork(completed=True), True),
        (PlayedWork(completed=True, failed=True), "peer is gone$"),
        (PlayedWork(completed=False, readable=False), False),
        (PlayedWork(completed=True, readable=False), True),
        (PlayedWork(completed=True, failed=True, readable=False), "is broken"),
    ],
)
def test_work_of_either_kind_says_whether_it_failed(work: PlayedWork, expected: bool | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(RuntimeError, match=expected):
            is_finished(work)
    else:
        assert is_finished(work) is expected


@pytest.mark.full
def test_work_that_has_failed_is_completed_and_not_finished(tmp_path: Path) -> None:
    """Seen on 2.13: a gloo operation whose peer has gone is completed, with an exception; one that has ended
    well has none.
    """
    code = """
import os, sys, time, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
from rannc_backend.runtime.torch_internals import is_finished
work = dist.all_reduce(torch.ones(4), async_op=True)
while not is_finished(work):
    time.sleep(0.01)
dist.barrier()
if rank == 1:
    os._exit(0)
work = dist.all_reduce(torch.ones(4), async_op=True)
while not work.is_completed():
    time.sleep(0.01)
try:
    is_finished(work)
except RuntimeError as error:
    print("failed:", error, flush=True)
os._exit(0)
"""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [sys.executable, "-c", code]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    output = ranks[0].communicate(timeout=60)[0]
    ranks[1].wait(60)
    assert output.startswith("failed:") and len(output.splitlines()) == 1
