"""An optimizer's state by the names of the parameters, so that it fits any division of the model.

In: an optimizer over parameters of the model. Out: its parameter groups as plain values, and the state of
this rank's parameters as tensors by key (`manifest`); and back through the optimizer's own `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from rannc_backend.checkpoint.manifest import OPTIMIZER_PREFIX, GroupRecord, OptimizerRecord
from rannc_backend.checkpoint.plain_values import decode, encode
from rannc_backend.checkpoint.reader import TensorReader
from rannc_backend.checkpoint.tensor_storage import read_tensors
from rannc_backend.errors import CheckpointMismatchError, CheckpointStateError
from rannc_backend.runtime.gradients.optimizer_state_dicts import raw_optimizer_states

# Not of a group's options: names are kept in a form of our own.
_NAME_KEYS = ("params", "param_names")
_SAME_GROUPS = "make the same parameter groups as when it was saved."


def capture(
    optimizer: torch.optim.Optimizer,
    number: int,
    names: Mapping[int, str],
    mine: Collection[str],
    *,
    with_groups: bool,
) -> tuple[OptimizerRecord, dict[str, torch.Tensor]]:
    """The record and tensors that this rank writes.

    Args:
        number: of the optimizer among those that are saved.
        names: of the model's parameters, by id.
        mine: the parameters whose state this rank writes.
        with_groups: the record has the parameter groups; one rank's has.

    Raises:
        CheckpointStateError: a parameter is not the model's, or a state is neither a tensor nor a plain
        value.
    """
    place = f"optimizer {number} ({type(optimizer).__name__})"
    group_names = _group_names(optimizer, names, place)
    groups = tuple(
        GroupRecord(
            parameters=tuple(own),
            options={
                key: encode(value, f"{place}, option {key!r}")
                for key, value in group.items()
                if key not in _NAME_KEYS
            },
        )
        for own, group in zip(group_names, optimizer.param_groups, strict=True)
    )
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            # Not optimizer.state[...]: that would make an entry.
            state = optimizer.state.get(parameter, {}) if name in mine else {}
            for key, value in state.items():
                if not isinstance(key, str) or "/" in key:
                    raise CheckpointStateError(
                        f"{place} has a state called {key!r}",
                        cure="use an optimizer with plain names of states.",
                    )
                if isinstance(value, torch.Tensor):
                    tensors[f"{OPTIMIZER_PREFIX}{number}/{name}/{key}"] = value.detach()
                else:
                    values.setdefault(name, {})[key] = encode(value, f"{place}, state {key!r} of {name!r}")
    record = OptimizerRecord(
        class_name=type(optimizer).__name__, groups=groups if with_groups else (), values=values
    )
    return record, tensors


def check_fit(
    optimizers: Sequence[torch.optim.Optimizer], reader: TensorReader, names: Mapping[int, str]
) -> None:
    """Compare kind and groups with what was saved, before anything is changed.

    Raises:
        CheckpointMismatchError: another number or class of optimizers, or other parameters in a group.
    """
    records = reader.optimizers
    if len(records) != len(optimizers):
        raise CheckpointMismatchError(
            f"the checkpoint {str(reader.path)!r} has the state of {len(records)} optimizer(s), and "
            f"{len(optimizers)} were given",
            cure="give load_checkpoint the optimizers that save_checkpoint was given, or optimizer=None to "
            "load none.",
        )
    for number, (optimizer, record) in enumerate(zip(optimizers, records, strict=True)):
        place = f"optimizer {number} ({type(optimizer).__name__})"
        if record.class_name != type(optimizer).__name__:
            raise CheckpointMismatchError(
                f"{place} was saved as {record.class_name}",
                cure="build the optimizer that was saved, or load with optimizer=None.",
            )
        own = [set(group) for group in _group_names(optimizer, names, place)]
        saved = [{reader.aliases.get(name, name) for name in group.parameters} for group in record.groups]
        if len(own) != len(saved):
            raise CheckpointMismatchError(
                f"{place} has {len(own)} parameter group(s), {len(saved)} were saved", cure=_SAME_GROUPS
            )
        for index, (mine, theirs) in enumerate(zip(own, saved, strict=True)):
            if mine != theirs:
                odd = sorted(mine ^ theirs)[0]
                side = "only in the model's" if odd in mine else "only in the saved"
                raise CheckpointMismatchError(
                    f"{place}, group {index}: parameter {odd!r} is {side} group", cure=_SAME_GROUPS
                )


def restore_groups(optimizer: torch.optim.Optimizer, number: int, reader: TensorReader) -> None:
    """Set the options of the parameter groups (learning rates and so on), and forget all state."""
    record = reader.optimizers[number]
    place = f"optimizer {number}"
    with raw_optimizer_states():
        groups = optimizer.state_dict()["param_groups"]
    for group, saved in zip(groups, record.groups, strict=True):
        group.update(
            {
                key: decode(value, f"{place}, option {key!r}")
                for key, value in saved.options.items()
                if key not in _NAME_KEYS
            }
        )
    with raw_optimizer_states():
        optimizer.load_state_dict({"state": {}, "param_groups": groups})


def restore_state(
    optimizer: torch.optim.Optimizer,
    number: int,
    reader: TensorReader,
    names: Mapping[int, str],
    mine: Collection[str],
) -> None:
    """Read the state of the parameters ``mine``; the groups' options stay as they are."""
    keys: dict[str, list[str]] = {}
    prefix = f"{OPTIMIZER_PREFIX}{number}/"
    for key in reader.keys:
        if key.startswith(prefix):
            keys.setdefault(key[len(prefix) :].rpartition("/")[0], []).append(key)
    values = reader.optimizer_values(number)
    state: dict[int, dict[str, Any]] = {}
    found: dict[str, torch.Tensor] = {}
    with raw_optimizer_states():
        described = optimizer.state_dict()
    for group, packed in zip(optimizer.param_groups, described["param_groups"], strict=True):
        for parameter, index in zip(group["params"], packed["params"], strict=True):
            name = names[id(parameter)]
            if name not in mine:
                continue
            entry = {
                key: decode(value, f"state {key!r} of {name!r}")
                for key, value in values.get(name, {}).items()
            }
            for key in keys.get(name, ()):
                local = key.rpartition("/")[2]
                device = _device_of(local, parameter, group)
                found[key] = entry[local] = torch.empty(
                    reader.shape(key), dtype=reader.dtype(key), device=device
                )
            if entry:
                state[index] = entry
    read_tensors(found, reader)
    with raw_optimizer_states():
        optimizer.load_state_dict({"state": state, "param_groups": described["param_groups"]})
    _undo_casts(optimizer, described["param_groups"], state)


def _undo_casts(
    optimizer: torch.optim.Optimizer,
    packed_groups: Sequence[Mapping[str, Any]],
    state: Mapping[int, Mapping[str, Any]],
) -> None:
    # load_state_dict gives state the parameter's dtype, which would round what was kept in a wider one.
    for group, packed in zip(optimizer.param_groups, packed_groups, strict=True):
        for parameter, index in zip(group["params"], packed["params"], strict=True):
            for key, value in state.get(index, {}).items():
                loaded = optimizer.state[parameter].get(key)
                if (
                    isinstance(value, torch.Tensor)
                    and isinstance(loaded, torch.Tensor)
                    and loaded.dtype != value.dtype
                ):
                    optimizer.state[parameter][key] = value


def _device_of(key: str, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.device:
    # As torch.optim has it: the count of steps stays on the host unless the step itself runs on the device.
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.device("cpu") if on_host else parameter.device


def _group_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str], place: str) -> list[list[str]]:
    groups = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        if None in group:
            shape = list(optimizer.param_groups[index]["params"][group.index(None)].shape)
            raise CheckpointStateError(
                f"{place}, group {index}: a parameter of shape {shape} is not one of the model's",
                cure="make the optimizer from parameters of the model that is saved, after the model has its "
                "final dtype and device.",
            )
    return [[name for name in group if name is not None] for group in groups]
