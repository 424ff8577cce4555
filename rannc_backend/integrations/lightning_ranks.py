"""What Lightning's strategies ask of the job, for the Trainer and for Fabric: this rank's place, and values of all ranks.

In: this rank's place in the job. Out: a `ClusterEnvironment`, and the methods of a strategy that exchange values.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Container
from pathlib import Path, PurePath
from typing import Any, TypeVar

import lightning
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from rannc_backend.errors import UserInputError
from rannc_backend.integrations.tried_versions import mention_untried
from rannc_backend.runtime.agreement import agree, exchanging
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.world import World
from rannc_backend.session_registry import REGISTRY
from rannc_backend.settings import hooks

Value = TypeVar("Value")


def join_job() -> World:
    """Join the job, and let Lightning know which rank prints and writes. Collective."""
    world = bootstrap.start()
    hooks.replace("other libraries", rank_zero_only, "rank", world.rank)
    mention_untried(lightning)
    return world


class OnRanks:
    """The methods of a strategy that do not depend on what it trains."""

    _world: World

    @property
    def root_device(self) -> torch.device:
        """Where this rank computes."""
        return self._world.device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This rank's part of the data."""
        return {"num_replicas": self._world.size, "rank": self._world.rank}

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The values of all ranks, [ranks, *shape]; without gradients. Collective."""
        if self._world.size == 1:
            return tensor
        _whole_job(group, self._world)
        if sync_grads:
            raise UserInputError(
                "all_gather(sync_grads=True) was to send gradients between ranks",
                cure="compute what needs the rows of all ranks in a compiled module: its batch is that of all ranks.",
            )
        return torch.stack(_gathered(tensor, "all_gather", self._world))

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective."""
        agree(self._world, f"Lightning's barrier {name or ''}")

    def broadcast(self, obj: Value, src: int = 0) -> Value:
        """One rank's object: None, a number, a text, bytes, a path, a tensor, or lists, tuples and dictionaries of these.
        Nothing that runs code when it is read is sent. Collective.

        Raises:
            UserInputError: it is, or has, something else; on all ranks.
        """
        mine = _as_text(obj) if self._world.rank == src else None
        text = agree(self._world, "Lightning's broadcast", mine)[src]
        if isinstance(text, list) and text[0] == "refused":
            raise UserInputError(
                f"Lightning was to send a value with a {text[1]} to other ranks",
                cure="send numbers, texts, bytes, paths, tensors, and lists, tuples and dictionaries of these.",
            )
        return obj if self._world.rank == src else _from_text(text)


def reduced(tensor: Any, group: Any, reduce_op: Any, world: World) -> Any:
    """A value over all ranks: its mean, sum, largest or smallest; what is no tensor stays. Collective."""
    if not isinstance(tensor, Tensor) or world.size == 1:
        return tensor
    _whole_job(group, world)
    values = torch.stack(_gathered(tensor, "reduce", world))
    name = str(getattr(reduce_op, "name", reduce_op)).rpartition(".")[2].lower()
    if name in ("mean", "avg"):
        floating = values if values.is_floating_point() or values.is_complex() else values.double()
        return floating.mean(0).to(tensor.dtype)
    if name not in ("sum", "max", "min"):
        raise UserInputError(
            f"Lightning was to reduce a value by {reduce_op!r}", cure="use mean, sum, max or min."
        )
    return values.sum(0).to(tensor.dtype) if name == "sum" else getattr(values, f"a{name}")(0)


def _as_text(value: object) -> Any:
    """A value as JSON has it, each collection as a list that begins with its kind; ["refused", its class] where it is none
    of those that `OnRanks.broadcast` sends.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, PurePath):
        return ["path", str(value)]
    if isinstance(value, bytes):
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, Tensor):
        file = io.BytesIO()
        torch.save(value.detach().cpu(), file)
        return ["tensor", base64.b64encode(file.getvalue()).decode()]
    if type(value) is dict:
        parts = [_as_text(each) for pair in value.items() for each in pair]
    elif type(value) in (list, tuple):
        parts = [_as_text(each) for each in value]  # type: ignore[attr-defined]
    else:
        return ["refused", type(value).__name__]
    refused = [each for each in parts if isinstance(each, list) and each[0] == "refused"]
    return refused[0] if refused else [type(value).__name__, *parts]


def _from_text(value: Any) -> Any:
    """What `_as_text` has written."""
    if not isinstance(value, list):
        return value
    kind, *parts = value
    if kind == "path":
        return Path(parts[0])
    if kind == "bytes":
        return base64.b64decode(parts[0])
    if kind == "tensor":
        return torch.load(io.BytesIO(base64.b64decode(parts[0])), weights_only=True)
    found = [_from_text(each) for each in parts]
    if kind == "dict":
        return dict(zip(found[::2], found[1::2], strict=True))
    return tuple(found) if kind == "tuple" else found


class RanncEnvironment(ClusterEnvironment):
    """This rank's place in the job, for Lightning."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @property
    def creates_processes_externally(self) -> bool:
        """mpirun, srun or torchrun has started all ranks."""
        return True

    @property
    def main_address(self) -> str:
        """The host of rank 0."""
        return self._world.hosts[0]

    @property
    def main_port(self) -> int:
        """No port: ranks have found each other."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Lightning does not look for it: the strategy brings it."""
        return False

    def world_size(self) -> int:
        """Number of ranks."""
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """The job's size stays."""

    def global_rank(self) -> int:
        """This rank."""
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        """The rank stays."""

    def local_rank(self) -> int:
        """The number of this rank on its host."""
        return self._world.local_rank

    def node_rank(self) -> int:
        """The number of this rank's host."""
        hosts = list(dict.fromkeys(self._world.hosts))
        return hosts.index(self._world.hosts[self._world.rank])


class Trained:
    """Modules that are trained, until the backend has seen a call of each: without one, each rank has gradients of its own
    rows.

    Args:
        cure: what to do about one; it may name "{name}".
    """

    def __init__(self, cure: str) -> None:
        self._cure = cure
        self._unseen: list[tuple[str, nn.Module]] = []

    def add(self, name: str, module: nn.Module) -> None:
        """Expect a call of a module; ``name``: what the user calls it."""
        self._unseen.append((name, module))

    def check(self, stepped: Container[int] | None = None) -> None:
        """Raises UserInputError where a module has gradients and was not called.

        Args:
            stepped: ids of the parameters that count; None: all.
        """
        if not self._unseen:
            return
        planned = [root for root, session in REGISTRY.sessions.items() if session.table is not None]
        seen = {id(parameter) for root in planned for parameter in root.parameters()}
        unseen = []
        for name, module in self._unseen:
            parameters = [each for each in module.parameters() if each.requires_grad]
            if any(id(each) in seen for each in parameters):
                continue
            unseen.append((name, module))
            if any(
                each.grad is not None
                and (stepped is None or id(each) in stepped)
                and not REGISTRY.is_synchronized(each)
                for each in parameters
            ):
                raise UserInputError(
                    f"the module {name!r} was trained without a call of it: each rank has gradients of its own rows",
                    cure=self._cure.format(name=name),
                )
        self._unseen = unseen


def _gathered(tensor: Tensor, what: str, world: World) -> list[Tensor]:
    """Every rank's value."""
    agree_on = [list(tensor.shape), str(tensor.dtype)]
    given = agree(world, f"Lightning's {what}", agree_on)
    if any(each != agree_on for each in given):
        raise UserInputError(
            f"ranks have values of other shapes for Lightning's {what}: {given}",
            cure="gather values of one shape and dtype: pad them, or gather numbers.",
        )
    everyone = tuple(range(world.size))
    world.transport.prepare(groups=[everyone])
    values = []
    with exchanging(world):
        for rank in everyone:
            value = tensor.detach().to(world.device, copy=True).contiguous()
            world.transport.broadcast(value, rank, everyone).wait()
            values.append(value.to(tensor.device))
    return values


def _whole_job(group: Any, world: World) -> None:
    size = getattr(group, "size", None)
    if callable(size) and size() != world.size:
        raise UserInputError(
            f"Lightning was to exchange values in the group {group!r}", cure="leave the group out: all ranks."
        )
