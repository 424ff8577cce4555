"""Modules outside of compiled models, trained beside them: their gradients are averaged over ranks, as DDP
does.

In: a module, a head on a compiled backbone for one. Out: on all ranks rank 0's parameters and buffers, and
from then on, at the end of each backward that reaches one of its parameters, gradients that are the mean over
ranks. A gradient that is there already (accumulation) is a mean, and stays one: the mean of a sum of means is
their sum.
"""

from __future__ import annotations

import weakref
from typing import Literal

import torch
from torch import nn

from rannc_backend.errors import UserInputError
from rannc_backend.runtime.agreement import agree, exchanging, failing_together
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.torch_internals import GradientNote, at_end_of_backward
from rannc_backend.runtime.world import World
from rannc_backend.session_registry import REGISTRY
from rannc_backend.settings import hooks


def synchronize(module: nn.Module, *, reduce: Literal["mean", "sum"] = "mean") -> nn.Module:
    """Averages gradients of a module outside of any compiled model over all ranks. Collective.

    All ranks take rank 0's parameters and buffers now. At the end of every backward that reaches one of its
    parameters, its gradients are averaged (or summed) over ranks. All ranks must run the same backwards, and reach the
    same of the modules that are synchronized; of one module (an ``nn.ModuleList``) they may reach different parts.
    Buffers that the module changes, such as those of BatchNorm, differ between ranks afterwards, as with DDP's
    ``broadcast_buffers=False``.

    Args:
        module: A module with parameters on the device of this rank.
        reduce: "mean", as DDP and as a compiled model with its loss outside; "sum" beside
            ``gradients_reduce_method="sum"``. Where the module's results go into a compiled model, either gives the
            gradient of that model's loss.

    Returns:
        The module.

    Raises:
        UserInputError: A parameter belongs to a compiled model, or to a module that is synchronized already.
    """
    world = bootstrap.start()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for name, parameter in module.named_parameters():
        if any(table.name_of(parameter) is not None for table in REGISTRY.tables()):
            raise UserInputError(
                f"{name!r} belongs to a compiled model, which sums its gradients",
                cure="give the module outside of it.",
            )
        if REGISTRY.is_synchronized(parameter):
            raise UserInputError(
                f"{name!r} is synchronized already", cure="call synchronize once for each module."
            )
    if world.size == 1:
        return module
    everyone = tuple(range(world.size))
    agree(
        world, "synchronize", [[name, list(p.shape), str(p.dtype)] for name, p in module.named_parameters()]
    )
    world.transport.prepare(groups=[everyone])
    with exchanging(world), torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            value = tensor.detach().to(world.device).contiguous()
            world.transport.broadcast(value, 0, everyone).wait()
            tensor.copy_(value)
    REGISTRY.num_synchronized += 1
    references: list[weakref.ref[torch.Tensor]] = [weakref.ref(parameter) for parameter in parameters]
    group = _Synchronized(world, references, reduce, REGISTRY.num_synchronized)
    for parameter in parameters:
        hooks.register("synchronized parameters", parameter.register_hook, GradientNote(group.note))
        REGISTRY.synchronized[parameter] = group
    return module


class _Synchronized:
    """The parameters of one module, the ``number``-th that is synchronized."""

    def __init__(
        self, world: World, parameters: list[weakref.ref[torch.Tensor]], reduce: str, number: int
    ) -> None:
        self.number = number
        self._world = world
        self._parameters = parameters
        self.is_mean = reduce == "mean"
        self._share = 1.0 / world.size if self.is_mean else 1.0
        self._is_queued = False

    def note(self, gradient: torch.Tensor) -> None:
        """Autograd has made a gradient of one of the parameters."""
        if not self._is_queued:
            self._is_queued = True
            at_end_of_backward(self._reduce)

    def _reduce(self) -> None:
        self._is_queued = False
        world = self._world
        with failing_together(world, "synchronize"):
            parameters = [parameter for ref in self._parameters if (parameter := ref()) is not None]
            given = agree(
                world,
                f"gradients of synchronized module {self.number}",
                [
                    0 if parameter.grad is None else 2 if parameter.grad.is_sparse else 1
                    for parameter in parameters
                ],
            )
            if any(flag > 1 for flags in given for flag in flags):
                raise UserInputError(
                    "a parameter of a synchronized module has a sparse gradient",
                    cure="make its embedding without sparse=True, or put it into the compiled model.",
                )
            wanted = [p for p, flags in zip(parameters, zip(*given, strict=True), strict=True) if any(flags)]
            with exchanging(world):
                for dtype in dict.fromkeys(parameter.dtype for parameter in wanted):
                    self._reduce_all([parameter for parameter in wanted if parameter.dtype == dtype])

    def _reduce_all(self, parameters: list[torch.Tensor]) -> None:
        world = self._world
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([grad.reshape(-1) for grad in grads]).mul_(self._share)
        world.transport.allreduce(flat, tuple(range(world.size))).wait()
        for parameter, grad, part in zip(
            parameters, grads, flat.split([grad.numel() for grad in grads]), strict=True
        ):
            parameter.grad = grad.copy_(part.view_as(grad))
