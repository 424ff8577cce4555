"""A strategy for Lightning's Trainer: the modules of a LightningModule run under this backend.

In: ``Trainer(strategy=RanncStrategy())`` on every rank of mpirun, srun or torchrun. Out: the Trainer's loops, with each
child module that has parameters compiled in place, so that ``training_step`` and the others stay plain Python on each
rank. Everything here goes by way of what Lightning has for strategies of other people: the class `ParallelStrategy` and
its methods, and a `ClusterEnvironment`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn

from rannc_backend.api.synchronized_modules import synchronize
from rannc_backend.capture.module_compile import is_compiled
from rannc_backend.errors import UserInputError
from rannc_backend.integrations.lightning_ranks import (
    OnRanks,
    RanncEnvironment,
    Trained,
    join_job,
    reduced,
)
from rannc_backend.runtime.state_hooks import is_copy
from rannc_backend.session_registry import REGISTRY
from rannc_backend.settings.sources import Given


class RanncStrategy(OnRanks, ParallelStrategy):
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
        world = join_job()
        super().__init__(
            cluster_environment=RanncEnvironment(world), parallel_devices=[world.device], **others
        )
        self._options, self._wanted, self._world = options, modules, world
        self._copies: list[_EarlyCopy] = []
        self._trained = Trained(
            "call self.{name}(...) in training_step, or name the modules that it calls instead: "
            "RanncStrategy(modules=[...])."
        )

    @property
    def is_distributed(self) -> bool:
        """Whether the Trainer gives each rank its part of the data."""
        return self._world.size > 1

    def setup(self, trainer: Any) -> None:
        """Compile the modules, then what the Trainer does for every strategy."""
        module = self.lightning_module
        assert module is not None, "the Trainer has connected its module"
        # Before they are compiled: in precision and on the device that the Trainer wants.
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self._compile(module)
        if self._world.size > 1:
            self._copies = _early_copies(module, trainer.callbacks, self._names(module))
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Bring what has not moved to its stage to this rank's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's step; copies of the module follow its parameters."""
        found = super().training_step(*args, **kwargs)
        self._copies = [each for each in self._copies if not each.follow(trains=True)]
        return found

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's step, without the inference mode in which parameters could not come to their stages."""
        with torch.inference_mode(False), torch.no_grad():
            found = super().validation_step(*args, **kwargs)
        for each in self._copies:
            each.follow(trains=False)
        return found

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        with torch.inference_mode(False), torch.no_grad():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        with torch.inference_mode(False), torch.no_grad():
            return super().predict_step(*args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """What was trained must have been called."""
        super().post_backward(closure_loss)
        if self._world.size > 1:
            self._trained.check()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A value over all ranks: its mean, sum, largest or smallest; what is no tensor stays. Collective."""
        return reduced(tensor, group, reduce_op, self._world)

    def teardown(self) -> None:
        """What the Trainer does for every strategy, but that parameters stay where their stages are."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _compile(self, module: nn.Module) -> None:
        chosen = {name: module.get_submodule(name) for name in self._names(module)}
        for name, part in chosen.items():
            self._trained.add(name, part)
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


class _EarlyCopy:
    """A part of a callback's copy of the module, made before the part's parameters were on the ranks of their stages.

    Args:
        whole: the callback's copy.
        name: of the part in it, with dots.
        part: the module's own.
    """

    def __init__(self, whole: nn.Module, name: str, part: nn.Module) -> None:
        self._whole, self._name, self._part = whole, name, part

    def follow(self, *, trains: bool) -> bool:
        """Where the part is planned: put a copy of it in place of the early one, with the values of that. Collective.

        Args:
            trains: the part has been called in training, which changes its buffers: where these lie is known from then on.

        Returns:
            Whether all is where it stays.
        """
        session = REGISTRY.sessions.get(self._part)
        if session is None or session.table is None:
            return False
        early = self._whole.get_submodule(self._name)
        if trains or not is_copy(early):
            anew = copy.deepcopy(self._part)
            anew.load_state_dict(early.state_dict())
            self._whole.set_submodule(self._name, anew)
        return trains


def _early_copies(
    module: nn.Module, callbacks: Sequence[object], compiled: Sequence[str]
) -> list[_EarlyCopy]:
    """The compiled parts of copies that callbacks have of the module, unless they were made of planned parts.

    Raises:
        UserInputError: a copy of a module that is compiled as a whole, which could not follow.
    """
    own = {id(parameter) for parameter in module.parameters()}
    names = {name for name, _ in module.named_parameters()}
    found = []
    for callback in callbacks:
        for held in vars(callback).values():
            if not isinstance(held, nn.Module) or any(id(each) in own for each in held.parameters()):
                continue
            given = {name for name, _ in held.named_parameters()}
            prefix = next(
                (each for each in ("", "module.") if {each + name for name in names} <= given), None
            )
            if not names or prefix is None:
                continue
            if "" in compiled:
                raise UserInputError(
                    f"the callback {type(callback).__name__} has copied the module, which is compiled as a whole, before "
                    "its parameters were on the ranks of their stages",
                    cure='leave modules=[""] out, so that its children are compiled, or average in a callback of your own '
                    "(docs/lightning.md, Averages).",
                )
            found += [
                _EarlyCopy(held, prefix + name, module.get_submodule(name))
                for name in compiled
                if not is_copy(held.get_submodule(prefix + name))
            ]
    return found


class _Parameters(nn.Module):
    """Parameters outside of all compiled modules."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.values = nn.ParameterList(parameters)
