"""What a rank with several stages keeps apart, and what it counts together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rannc_backend.ir.action import Action, ActionKind
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.step.executor import Executor
from rannc_backend.runtime.step.send_buffers import SendBuffers
from rannc_backend.runtime.step.step_state import StepState
from tests.played_steps import shapes_of


class Pending:
    """Notes how the last micro-batch begins."""

    def __init__(self) -> None:
        self.begun: list[dict[str, int]] = []
        self.num_finished = 0

    def begin_last_micro_batch(self, others_to_come: dict[str, int]) -> None:
        self.begun.append(others_to_come)

    def finish(self) -> None:
        self.num_finished += 1


def stage_of(*parameters: str) -> Any:
    return SimpleNamespace(
        inputs=tuple(SimpleNamespace(name=name, kind="parameter") for name in parameters),
        outputs=(),
        grad_outputs=(),
        grad_inputs=(),
        grad_parameters=tuple(range(len(parameters))),
        stored_outputs=(),
        stored_gradients=(),
    )


def executor_of(stages: dict[int, Any], **more: Any) -> Executor:
    world: Any = SimpleNamespace(
        rank=0,
        device=torch.device("cpu"),
        transport=SimpleNamespace(
            begin_step=lambda turns: None, reach=lambda place: None, after_compute=lambda: None
        ),
        monitor=SimpleNamespace(phase=lambda text: None),
    )
    given: dict[str, Any] = {"tensors": {}, "buffers": {}, "updated_buffers": frozenset(), **more}
    return Executor(
        world=world,
        stages=stages,
        edges={},
        parameter_names={"a": "model.a", "b": "model.b", "tied": "model.tied"},
        limit_seconds=1.0,
        send_buffers=SendBuffers(torch.device("cpu")),
        **given,
    )


def test_gradients_are_final_when_the_stages_that_make_them_have_begun_their_last_backward() -> None:
    executor = executor_of({0: stage_of("a", "tied"), 3: stage_of("tied", "b")})
    rows = RowTable(local_rows=(4,), num_micro_batches=2, stage_ranks=((0,),) * 4)
    state = StepState(number=1, rows=rows, shapes=shapes_of({}), inputs={}, scalars={}, training=True)
    pending: Any = Pending()
    state.pending = pending
    assert not executor._sink(0, state).is_last and not executor._sink(3, state).is_last
    allow = [Action(stage, ActionKind.ALLOW_REDUCTIONS) for stage in (3, 0)]
    executor.run((allow[0],), [""], state)
    assert pending.begun == [{"model.tied": 1}]
    assert executor._sink(3, state).is_last and not executor._sink(0, state).is_last
    executor.run((allow[1],), [""], state)
    assert len(pending.begun) == 1 and executor._sink(0, state).is_last
    assert executor._sink(0, state).names == {0: "model.a", 1: "model.tied"}
    assert executor._sink(3, state).names == {0: "model.tied", 1: "model.b"}
    waits = [Action(stage, ActionKind.WAIT_REDUCTIONS) for stage in (0, 3)]
    executor.run(tuple(waits), ["", ""], state)
    assert pending.num_finished == 2


def test_micro_batches_read_what_a_changed_parameter_was() -> None:
    """One that is not changed is read where it lies."""
    read: list[list[torch.Tensor]] = []

    def forward(args: list[torch.Tensor], destinations: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        read.append(list(args))
        return [args[0] * 2.0], []

    stage = stage_of("a", "b")
    stage.forward = forward
    stage.outputs = (SimpleNamespace(kind="buffer", name="new", fqn="model.a", once=True),)
    tensors = {"a": torch.nn.Parameter(torch.ones(2)), "b": torch.nn.Parameter(torch.ones(2))}
    executor = executor_of(
        {0: stage}, tensors=tensors, buffers={"model.a": tensors["a"]}, updated_buffers=frozenset({"a"})
    )
    rows = RowTable(local_rows=(4,), num_micro_batches=2, stage_ranks=((0,),))
    state = StepState(number=1, rows=rows, shapes=shapes_of({}), inputs={}, scalars={}, training=True)
    forwards = tuple(Action(0, ActionKind.FORWARD, micro_batch) for micro_batch in range(2))
    executor.run(forwards, ["", ""], state)
    assert tensors["a"].tolist() == [2.0, 2.0] and [args[0].tolist() for args in read] == [[1.0, 1.0]] * 2
    assert all(args[1] is tensors["b"] for args in read)


def test_a_rank_with_one_stage_has_nothing_of_others_to_come() -> None:
    executor = executor_of({1: stage_of("a", "tied")})
    assert executor._others_to_come() == {}
    assert executor._label == "stage 1"
    assert executor_of({})._label == "no stage"
    assert executor_of({0: stage_of("a"), 2: stage_of("b")})._label == "stages 0 and 2"
