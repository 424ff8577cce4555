"""A strategy for Lightning's Trainer: the modules of a LightningModule run under this backend.

In: ``Trainer(strategy=RanncStrategy())`` on every rank of mpirun, srun or torchrun. Out: the Trainer's loops, with each
child module that has parameters compiled in place, so that ``training_step`` and the others stay plain Python on each
rank. Everything here goes by way of what Lightning has for strategies of other people: the class `ParallelStrategy` and
its methods, and a `ClusterEnvironment`.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import lightning
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from rannc_backend.api.synchronized_modules import synchronize
from rannc_backend.capture.module_compile import is_compiled
from rannc_backend.errors import UserInputError
from rannc_backend.integrations.tried_versions import mention_untried
from rannc_backend.runtime.agreement import agree, exchanging
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.world import World
from rannc_backend.session_registry import REGISTRY
from rannc_backend.settings import hooks
from rannc_backend.settings.sources import Given

Value = TypeVar("Value")


class RanncStrategy(ParallelStrategy):
    """Runs a LightningModule's children under this backend, on all ranks of the job. Collective.

    A child is compiled where it has parameters of its own; one that is compiled already stays as it is. What
    ``training_step`` computes around them stays on each rank: the gradient is the mean over ranks, as with Lightning's
    DDP. Parameters outside of all children are averaged over ranks by `rannc_backend.synchronize`.

    Args:
        options: options of this backend for the children, as for ``torch.compile(..., options=...)``.
        modules: names of the modules to compile, with dots ("net.encoder"); None: the children. ``""`` is the
            LightningModule itself, whose ``forward`` is compiled then: ``training_step`` calls ``self(x)``.
        others: arguments of `lightning.pytorch.strategies.ParallelStrategy`: checkpoint_io, precision_plugin.

    Raises:
        UserInputError: a name in ``modules`` is none of a module, or a module was trained without being called.
    """

    def __init__(self, options: Given = None, modules: Sequence[str] | None = None, **others: Any) -> None:
        world = bootstrap.start()
        super().__init__(
            cluster_environment=RanncEnvironment(world), parallel_devices=[world.device], **others
        )
        self._options, self._wanted, self._world = options, modules, world
        self._modules: dict[str, nn.Module] = {}
        self._is_checked = False
        hooks.replace("other libraries", rank_zero_only, "rank", world.rank)
        mention_untried(lightning)

    @property
    def root_device(self) -> torch.device:
        """Where this rank computes."""
        return self._world.device

    @property
    def is_distributed(self) -> bool:
        """Whether the Trainer gives each rank its part of the data."""
        return self._world.size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This rank's part of the data."""
        return {"num_replicas": self._world.size, "rank": self._world.rank}

    def setup(self, trainer: Any) -> None:
        """Compile the modules, then what the Trainer does for every strategy."""
        module = self.lightning_module
        assert module is not None, "the Trainer has connected its module"
        # Before they are compiled: in precision and on the device that the Trainer wants.
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self._modules = self._compile(module)
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Bring what has not moved to its stage to this rank's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's step, without the inference mode in which parameters could not come to their stages."""
        with torch.inference_mode(False), torch.no_grad():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        with torch.inference_mode(False), torch.no_grad():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        with torch.inference_mode(False), torch.no_grad():
            return super().predict_step(*args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """After the first backward: what was trained must have been called."""
        super().post_backward(closure_loss)
        if not self._is_checked and self._world.size > 1:
            self._is_checked = True
            _check_called(self._modules)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A value over all ranks: its mean, sum, largest or smallest; what is no tensor stays. Collective."""
        if not isinstance(tensor, Tensor) or self._world.size == 1:
            return tensor
        _whole_job(group, self._world)
        values = torch.stack(self._gathered(tensor, "reduce"))
        name = str(getattr(reduce_op, "name", reduce_op)).rpartition(".")[2].lower()
        if name in ("mean", "avg"):
            floating = values if values.is_floating_point() or values.is_complex() else values.double()
            return floating.mean(0).to(tensor.dtype)
        if name not in ("sum", "max", "min"):
            raise UserInputError(
                f"Lightning was to reduce a value by {reduce_op!r}", cure="use mean, sum, max or min."
            )
        return values.sum(0).to(tensor.dtype) if name == "sum" else getattr(values, f"a{name}")(0)

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
        return torch.stack(self._gathered(tensor, "all_gather"))

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective."""
        agree(self._world, f"Lightning's barrier {name or ''}")

    def broadcast(self, obj: Value, src: int = 0) -> Value:
        """One rank's object. Collective."""
        mine = base64.b64encode(pickle.dumps(obj)).decode() if self._world.rank == src else ""
        text = agree(self._world, "Lightning's broadcast", mine)[src]
        return obj if self._world.rank == src else pickle.loads(base64.b64decode(text))

    def teardown(self) -> None:
        """What the Trainer does for every strategy, but that parameters stay where their stages are."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _compile(self, module: nn.Module) -> dict[str, nn.Module]:
        chosen = {name: module.get_submodule(name) for name in self._names(module)}
        for part in chosen.values():
            if not is_compiled(part):
                part.compile(backend="rannc", options=self._options)
        inside = {id(parameter) for part in chosen.values() for parameter in part.parameters()}
        rest = [
            parameter
            for parameter in module.parameters()
            if id(parameter) not in inside
            and parameter.requires_grad
            and not REGISTRY.is_synchronized(parameter)
        ]
        if rest:
            synchronize(_Parameters(rest))
        return chosen

    def _names(self, module: nn.Module) -> list[str]:
        if self._wanted is None:
            return [
                name for name, child in module.named_children() if next(child.parameters(), None) is not None
            ]
        known = dict(module.named_modules())
        unknown = [name for name in self._wanted if name not in known]
        if unknown:
            raise UserInputError(
                f"RanncStrategy(modules=...) has {unknown[0]!r}, and {type(module).__name__} has no such module",
                cure=f"give names of its modules: {', '.join(repr(name) for name, _ in module.named_children())}",
            )
        return list(self._wanted)

    def _gathered(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Every rank's value."""
        world = self._world
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


class _Parameters(nn.Module):
    """Parameters outside of all compiled modules."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.values = nn.ParameterList(parameters)


def _check_called(modules: Mapping[str, nn.Module]) -> None:
    """A module whose code runs without a call of it trains on each rank by itself."""
    for name, module in modules.items():
        session = REGISTRY.of(module)
        is_planned = session is not None and session.table is not None
        if not is_planned and any(parameter.grad is not None for parameter in module.parameters()):
            raise UserInputError(
                f"the module {name!r} was trained without a call of it: each rank has gradients of its own rows",
                cure=f"call self.{name}(...) in training_step, or name the modules that it calls instead: "
                "RanncStrategy(modules=[...]).",
            )


def _whole_job(group: Any, world: World) -> None:
    size = getattr(group, "size", None)
    if callable(size) and size() != world.size:
        raise UserInputError(
            f"Lightning was to exchange values in the group {group!r}", cure="leave the group out: all ranks."
        )
