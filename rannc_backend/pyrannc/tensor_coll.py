"""Collectives on tensors over all ranks, and parameters that are spread over the host memories of all ranks:
RaNNC's helpers.

In: tensors, the same shape and dtype on every rank. Out: what comes of all ranks' tensors. All functions are
collective. Terms: a *stored* parameter keeps this rank's *segment*, an equal part of its elements in rank
order (the last segments may be shorter).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from rannc_backend.errors import UserInputError
from rannc_backend.kernels.plain_memory import plain_memory
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.job import bootstrap
from rannc_backend.session_registry import REGISTRY


def all_gather(tensor: torch.Tensor, buf: torch.Tensor | None = None) -> torch.Tensor:
    """The tensors of all ranks, stacked in rank order. Collective.

    Args:
        tensor: Of the same shape and dtype on every rank.
        buf: Where to write the result, of shape ``[ranks, *tensor.shape]``; None: a new tensor.

    Returns:
        ``buf`` or the new tensor, of shape ``[ranks, *tensor.shape]``, on the tensor's device.
    """
    world = bootstrap.start()
    agree(world, "all_gather", [list(tensor.shape), str(tensor.dtype)])
    everyone = tuple(range(world.size))
    world.transport.prepare(groups=[everyone])
    # Bytes, and zeros where others fill in: a sum is exact for any dtype.
    own = plain_memory(tensor.detach().to(world.device)).reshape(-1).view(torch.uint8)
    parts = torch.zeros(world.size, own.numel(), dtype=torch.uint8, device=world.device)
    parts[world.rank] = own
    world.transport.allreduce(parts.view(-1), everyone).wait()
    gathered = parts.view(-1).view(tensor.dtype).view(world.size, *tensor.shape).to(tensor.device)
    if buf is None:
        return gathered
    buf.copy_(gathered.reshape(buf.shape))
    return buf


def bcast(tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
    """The tensor of rank ``root``, on every rank; that of the others gives shape and dtype."""
    world = bootstrap.start()
    agree(world, "bcast", [root, list(tensor.shape), str(tensor.dtype)])
    everyone = tuple(range(world.size))
    world.transport.prepare(groups=[everyone])
    buffer = plain_memory(tensor.detach().to(world.device)).clone()
    world.transport.broadcast(buffer, root, everyone).wait()
    return buffer.to(tensor.device)


def _allreduce_sum(t: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' tensors, in rank order; in place, as RaNNC's."""
    return t.copy_(all_gather(t).sum(dim=0))


def _allreduce_min(t: torch.Tensor) -> torch.Tensor:
    """The smallest of all ranks' tensors, element by element; in place, as RaNNC's."""
    return t.copy_(all_gather(t).amin(dim=0))


@dataclass(slots=True)
class StoredParameter:
    """A parameter of which each rank keeps one segment, as ``p.data`` (one-dimensional)."""

    parameter: weakref.ref[torch.Tensor]
    shape: tuple[int, ...]
    numel: int
    segment: tuple[int, int]


def store_dist_param(p: torch.Tensor) -> int:
    """Keeps only 1/ranks of a parameter on each rank. Collective. For whole models: `DistributeModelParams`.

    Args:
        p: The parameter. ``p.data`` becomes one-dimensional: this rank's segment of the flat parameter, of
            ``ceil(numel / ranks)`` elements, fewer on the last ranks.

    Returns:
        The id by which the functions below name it.
    """
    world = bootstrap.start()
    if id(p) in REGISTRY.stored and REGISTRY.stored[id(p)].parameter() is p:
        return id(p)
    agree(world, "store_dist_param", list(p.shape))
    length = -(-p.numel() // world.size)
    segment = (min(world.rank * length, p.numel()), min((world.rank + 1) * length, p.numel()))
    REGISTRY.stored[id(p)] = StoredParameter(weakref.ref(p), tuple(p.shape), p.numel(), segment)
    p.data = p.detach().reshape(-1)[segment[0] : segment[1]].clone()
    p.distributed = True  # type: ignore[attr-defined]
    return id(p)


def load_dist_param(pid: int) -> torch.Tensor:
    """The whole value of a stored parameter. Collective.

    Args:
        pid: What `store_dist_param` returned.

    Returns:
        A new tensor of the parameter's original shape, on every rank.

    Raises:
        UserInputError: No parameter is stored under this id.
    """
    world = bootstrap.start()
    stored, p = _stored(pid)
    length = -(-stored.numel // world.size)
    padded = torch.zeros(length, dtype=p.dtype, device=p.device)
    padded[: p.numel()] = p.detach()
    return all_gather(padded).reshape(-1)[: stored.numel].reshape(stored.shape)


def set_dist_param(pid: int, src: torch.Tensor) -> None:
    """Copies a whole tensor into a stored parameter; each rank takes its segment. Not collective.

    Args:
        pid: What `store_dist_param` returned.
        src: The values, in the parameter's original shape, the same on all ranks.

    Raises:
        UserInputError: No parameter is stored under this id, or the shape differs.
    """
    stored, p = _stored(pid)
    if tuple(src.shape) != stored.shape:
        raise UserInputError(
            f"the tensor has shape {list(src.shape)}, the parameter {list(stored.shape)}",
            cure="give a whole tensor.",
        )
    with torch.no_grad():
        p.copy_(src.reshape(-1)[stored.segment[0] : stored.segment[1]])


def get_dist_param_range(pid: int) -> slice:
    """The elements of the flat parameter that this rank keeps. Not collective.

    Args:
        pid: What `store_dist_param` returned.

    Returns:
        A slice of the parameter's ``numel()`` elements.

    Raises:
        UserInputError: No parameter is stored under this id.
    """
    return slice(*_stored(pid)[0].segment)


def get_dist_param_segment(pid: int) -> torch.Tensor:
    """This rank's elements of a stored parameter, one-dimensional. Not collective.

    Args:
        pid: What `store_dist_param` returned.

    Raises:
        UserInputError: No parameter is stored under this id.
    """
    return _stored(pid)[1].detach()


def set_dist_param_dtype(pid: int, dtype: torch.dtype) -> None:
    """Converts this rank's segment of a stored parameter; all ranks must convert theirs.

    Args:
        pid: What `store_dist_param` returned.
        dtype: The new dtype.

    Raises:
        UserInputError: No parameter is stored under this id.
    """
    p = _stored(pid)[1]
    p.data = p.data.to(dtype)


def remove_dist_param(pid: int) -> None:
    """Makes a stored parameter whole again on every rank. Collective.

    Args:
        pid: What `store_dist_param` returned; no longer valid afterwards.

    Raises:
        UserInputError: No parameter is stored under this id.
    """
    whole = load_dist_param(pid)
    p = _stored(pid)[1]
    p.data = whole
    p.distributed = False  # type: ignore[attr-defined]
    del REGISTRY.stored[pid]


def _stored(pid: int) -> tuple[StoredParameter, torch.Tensor]:
    stored = REGISTRY.stored.get(pid)
    p = None if stored is None else stored.parameter()
    if stored is None or p is None:
        raise UserInputError(
            f"no parameter is stored under the id {pid}",
            cure="call store_dist_param(p), which gives the id of p.",
        )
    return stored, p
