"""What one rank would write of a job at this moment.

In: the model with who owns what, the optimizers, schedulers and scaler. Out: a `Snapshot`. Nothing is
written, and no other rank asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rannc_backend.checkpoint import optimizer_state, random_state
from rannc_backend.checkpoint.manifest import RuntimeRecord
from rannc_backend.checkpoint.model_state import ModelTensors, tensors_to_write
from rannc_backend.checkpoint.plain_values import encode
from rannc_backend.checkpoint.saving import Snapshot
from rannc_backend.errors import CheckpointStateError
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.step.graph_settings import StepCounter
from rannc_backend.runtime.world import World


def take_snapshot(
    world: World,
    root: nn.Module,
    table: ParameterTable | None,
    counter: StepCounter,
    plan_text: str,
    *,
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    scaler: Any,
    step: int,
    extra: Any,
) -> Snapshot:
    """``table`` None: the model has not been planned yet, and rank 0 writes all of it.

    Raises:
        CheckpointStateError: something is neither a tensor nor a plain value, or has no value yet.
    """
    model = ModelTensors.of(root, table, world.size)
    writers = model.writers(planned=table is not None)
    tensors = tensors_to_write(model, writers, world.rank)
    names = model.names_of()
    records = []
    for number, optimizer in enumerate(optimizers):
        record, own = optimizer_state.capture(optimizer, number, names, tensors, with_groups=world.rank == 0)
        records.append(record)
        tensors.update(own)
    return Snapshot(
        step=step,
        tensors=tensors,
        optimizers=tuple(records),
        random=random_state.capture(world.device),
        aliases=model.aliases,
        model_name=type(root).__name__,
        plan_text=plan_text,
        runtime=RuntimeRecord(num_steps_begun=counter.number, loss_gradient=float(counter.loss_gradient)),
        schedulers=[
            _state_of(scheduler, f"scheduler {number}") for number, scheduler in enumerate(schedulers)
        ],
        scaler=None if scaler is None else _state_of(scaler, "the scaler"),
        extra=encode(extra, "extra"),
    )


def _state_of(thing: Any, place: str) -> Any:
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        raise CheckpointStateError(
            f"{place} is a {type(thing).__name__}, which has no state_dict and load_state_dict",
            cure="give one that has, or extra={...}.",
        )
    return encode(thing.state_dict(), f"{place} ({type(thing).__name__})")


def listed(things: Any) -> list[Any]:
    """None, one or several as a list."""
    if things is None:
        return []
    return list(things) if isinstance(things, list | tuple) else [things]
