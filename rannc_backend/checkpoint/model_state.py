"""What of a model goes into a checkpoint, which rank writes which tensor, and where a tensor that is loaded
belongs.

In: the root module and, once it is planned, the ranks that own each tensor. Out: tensors by name. No rank
talks to another here: every rank comes to the same division by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rannc_backend.checkpoint.manifest import OPTIMIZER_PREFIX
from rannc_backend.checkpoint.reader import TensorReader
from rannc_backend.errors import CheckpointMismatchError, CheckpointStateError
from rannc_backend.errors.base import did_you_mean, nearest
from rannc_backend.runtime.parameters import ParameterTable

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensors:
    """Parameters and persistent buffers of a root module.

    Attributes:
        tensors: by the first of its names.
        aliases: every further name → the first.
        owners: ranks that have the value, by first name; the first of them answers for it.
        updaters: those of them that have a parameter's optimizer state.
    """

    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    owners: Mapping[str, tuple[int, ...]]
    updaters: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, root: nn.Module, table: ParameterTable | None, world_size: int) -> ModelTensors:
        """``table`` None: not planned yet; every rank has all of it then, and rank 0's values are those that
        count.
        """
        known = {id(tensor): name for name, tensor in [*root.named_parameters(), *root.named_buffers()]}
        first: dict[int, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        for name, tensor in _kept(root):
            if id(tensor) in first:
                aliases[name] = first[id(tensor)]
            else:
                first[id(tensor)] = name
                tensors[name] = tensor
        everyone = tuple(range(world_size))
        owners, updaters = dict.fromkeys(tensors, everyone), dict.fromkeys(tensors, everyone)
        if table is not None:
            for name, tensor in tensors.items():
                owners[name] = table.owners[known[id(tensor)]]
                updaters[name] = table.updaters(known[id(tensor)])
        return cls(tensors=tensors, aliases=aliases, owners=owners, updaters=updaters)

    def names_of(self) -> dict[int, str]:
        """First name of each tensor, by its id."""
        return {id(tensor): name for name, tensor in self.tensors.items()}

    def writers(self, *, planned: bool) -> dict[str, int]:
        """The rank that writes each tensor, and its state: one that updates it, so that all write about as many
        bytes.
        """
        if not planned:
            return dict.fromkeys(self.tensors, 0)
        load: dict[int, int] = {}
        chosen = {}
        for name in sorted(self.tensors, key=lambda name: (-self.tensors[name].nbytes, name)):
            tensor, owners = self.tensors[name], self.updaters[name]
            # Replicas count running statistics each for themselves until the first one's are shared.
            rank = (
                min(owners, key=lambda rank: (load.get(rank, 0), rank))
                if isinstance(tensor, nn.Parameter)
                else owners[0]
            )
            load[rank] = load.get(rank, 0) + tensor.nbytes
            chosen[name] = rank
        return chosen


def _kept(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    kept: list[tuple[str, torch.Tensor]] = list(root.named_parameters(remove_duplicate=False))
    for prefix, module in root.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointStateError(
                f"module {prefix or type(module).__name__!r} has extra state (get_extra_state), which a "
                "checkpoint cannot hold",
                cure="give that state as extra={...} to save_checkpoint, and set it from what "
                "load_checkpoint returns.",
            )
        for local, tensor in module._buffers.items():
            if tensor is not None and local not in module._non_persistent_buffers_set:
                kept.append((f"{prefix}.{local}" if prefix else local, tensor))
    return kept


def tensors_to_write(model: ModelTensors, writers: Mapping[str, int], rank: int) -> dict[str, torch.Tensor]:
    """This rank's share.

    Raises:
        CheckpointStateError: a tensor that it would write has no values yet.
    """
    share = {name: tensor.detach() for name, tensor in model.tensors.items() if writers[name] == rank}
    empty = [name for name, tensor in share.items() if tensor.is_meta]
    if empty:
        raise CheckpointStateError(
            f"{_listing(empty)} on the meta device: there are no values to save",
            cure="call the compiled model once before save_checkpoint.",
        )
    if odd := [name for name in share if name.startswith(OPTIMIZER_PREFIX)]:
        raise CheckpointStateError(
            f"no tensor of a model may be called {odd[0]!r}",
            cure=f"no name may begin with {OPTIMIZER_PREFIX!r}.",
        )
    return share


def check_fit(
    model: ModelTensors, reader: TensorReader, *, strict: bool, same_dtypes: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compare names, shapes and, with ``same_dtypes``, dtypes before anything is changed; returns (missing,
    unexpected) names. Without, floating-point values are rounded to the model's dtype.

    Raises:
        CheckpointMismatchError: names differ and ``strict``, or a tensor of the same name has another shape
        or dtype.
    """
    saved = set(reader.names)
    mine = [*model.tensors, *model.aliases]
    missing = tuple(name for name in model.tensors if name not in saved)
    unexpected = tuple(sorted(saved.difference(mine)))
    if strict and (missing or unexpected):
        parts = [
            f"{what} {_listing(names)}"
            for what, names in (("has no", missing), ("has, but the model has not:", unexpected))
            if names
        ]
        near = nearest(missing[0], unexpected) if missing else nearest(unexpected[0], model.tensors)
        raise CheckpointMismatchError(
            f"the checkpoint {str(reader.path)!r} {' and '.join(parts)}",
            cure=f"{did_you_mean(near)}build the model that was saved, or load with strict=False to take "
            "what is in both.",
        )
    for name, tensor in model.tensors.items():
        if name not in saved:
            continue
        theirs = reader.dtype(name)
        fits = tensor.dtype == theirs or (
            not same_dtypes and tensor.is_floating_point() and theirs.is_floating_point
        )
        if tuple(tensor.shape) != reader.shape(name) or not fits:
            raise CheckpointMismatchError(
                f"{name!r} has shape {list(tensor.shape)} and dtype {tensor.dtype} in the model, but "
                f"{list(reader.shape(name))} and {reader.dtype(name)} in the checkpoint {str(reader.path)!r}",
                cure="build the model with the sizes and the dtype that were saved; convert it after "
                "loading.",
            )
    return missing, unexpected


def targets(model: ModelTensors, reader: TensorReader, rank: int) -> dict[str, torch.Tensor]:
    """The tensors to fill on this rank: those that it owns; not those without memory."""
    saved = set(reader.names)
    return {
        name: tensor.detach()
        for name, tensor in model.tensors.items()
        if name in saved and not tensor.is_meta and rank in model.owners[name]
    }


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
