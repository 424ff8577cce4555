"""A strategy for Lightning Fabric: its loops on the ranks of this job, with models that the script compiles.

In: ``Fabric(strategy=RanncFabricStrategy())`` on every rank of mpirun, srun or torchrun, and models compiled with
``backend="rannc"``. Out: Fabric's rank, samplers, exchanged values, clipping and checkpoints are those of the job.
"""

from __future__ import annotations

import contextlib
from typing import Any

from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.optim import Optimizer

from rannc_backend.integrations.lightning_ranks import (
    OnRanks,
    RanncEnvironment,
    Trained,
    join_job,
    reduced,
)


class RanncFabricStrategy(OnRanks, ParallelStrategy):
    """Runs Fabric on all ranks of the job. Collective.

    Fabric keeps a model compiled that was compiled before ``fabric.setup``:
    ``torch.compile(model, backend="rannc", options=...)``. One that is not compiled computes on each rank by itself; to
    train it, give it to `rannc_backend.synchronize`.

    Args:
        others: arguments of `lightning.fabric.strategies.ParallelStrategy`: checkpoint_io, precision.

    Raises:
        UserInputError: a model was trained that is neither compiled nor synchronized.
    """

    def __init__(self, **others: Any) -> None:
        self._world = join_job()
        super().__init__(
            cluster_environment=RanncEnvironment(self._world), parallel_devices=[self._world.device], **others
        )
        self._trained = Trained(
            'compile it before fabric.setup: torch.compile(model, backend="rannc"), or call '
            "rannc_backend.synchronize(model)."
        )
        self._backward_sync_control = _SumsAnyway()

    def module_to_device(self, module: nn.Module) -> None:
        """Bring what has not moved to its stage to this rank's device."""
        module.to(self._world.device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """The module as it is; Fabric compiles it again as the script has."""
        self._trained.add(type(module).__name__, module)
        return module

    def optimizer_step(self, optimizer: Any, **others: Any) -> Any:
        """The step, if what was trained is compiled."""
        if self._world.size > 1:
            trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
            self._trained.check(trained)
        return super().optimizer_step(optimizer, **others)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A value over all ranks, as Fabric has it also in the tensor itself. Collective."""
        result = reduced(tensor, group, reduce_op, self._world)
        return tensor.detach().copy_(result) if isinstance(tensor, Tensor) else result

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on rank 0. Collective."""
        return optimizer.state_dict()


class _SumsAnyway(_BackwardSyncControl):
    """Gradients are summed over ranks when they are complete, whether or not more are added to them."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Nothing is left out: the sum of sums is the sum."""
        return contextlib.nullcontext()
