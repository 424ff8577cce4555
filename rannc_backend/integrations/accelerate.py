"""Hugging Face Accelerate: the job that Accelerate sees is this backend's job, and `prepare` passes models through it.

In: an `accelerate.Accelerator` and what a script gives its `prepare`. Out: the same, where models are compiled by this
backend and not inside of DistributedDataParallel. Only Accelerate's public interface is used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.data_loader import SkipBatchSampler
from accelerate.utils import DistributedType
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from rannc_backend.capture.module_compile import is_compiled
from rannc_backend.capture.refusals import refuse_other_count
from rannc_backend.errors import UserInputError
from rannc_backend.integrations.tried_versions import mention_untried
from rannc_backend.log.logger import say_once
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.world import World
from rannc_backend.settings import hooks

logger = logging.getLogger(__name__)

# What Accelerate may do to a model by itself: nothing, or replicas, in whose place the backend makes its own.
_ALLOWED = frozenset({"NO", "MULTI_CPU", "MULTI_GPU"})

_INIT_OF_SKIPPING = SkipBatchSampler.__init__


def join_job() -> World:
    """Join the job, and let Accelerate see it. Collective; to be called before Accelerator or TrainingArguments are made.

    Under mpirun Accelerate sees one process in each rank by itself, and each would read all rows. It reads variables of
    the environment, which are set here where they are not (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR; ACCELERATE_USE_CPU where ranks compute on CPUs).

    Returns:
        This rank's place in the job.

    Raises:
        LaunchError: Accelerate has started already, and sees another number of processes.
    """
    world = bootstrap.start()
    if world.size > 1:
        host = world.hosts[world.rank]
        told = {
            "RANK": world.rank,
            "WORLD_SIZE": world.size,
            "LOCAL_RANK": world.local_rank,
            "LOCAL_WORLD_SIZE": world.hosts.count(host),
            "MASTER_ADDR": world.hosts[0],  # asked for, not used: the processes have met
        }
        for name, value in told.items():
            if name not in os.environ:
                hooks.replace_item("other libraries", os.environ, name, str(value))
        if world.device.type == "cpu":
            hooks.replace_item("other libraries", os.environ, "ACCELERATE_USE_CPU", "true")
        if SkipBatchSampler.__init__ is _INIT_OF_SKIPPING:
            hooks.replace("other libraries", SkipBatchSampler, "__init__", _init_of_skipping)
    refuse_other_count(world.size)
    mention_untried(accelerate)
    return world


def _init_of_skipping(skipping: Any, batch_sampler: Any, skip_batches: int = 0) -> None:
    """A loader that leaves out batches (`skip_first_batches`) asks this sampler how many rows a batch of all ranks has, and
    takes no answer for a last batch that nothing fills up: those rows would count twice.
    """
    _INIT_OF_SKIPPING(skipping, batch_sampler, skip_batches)
    if not getattr(batch_sampler, "drop_last", False):  # all batches are full then
        names = ("batch_size", "num_processes", "split_batches")
        vars(skipping).update({n: getattr(batch_sampler, n) for n in names if hasattr(batch_sampler, n)})


def prepare(accelerator: Accelerator, *objects: Any, options: Mapping[str, Any] | None = None) -> Any:
    """What ``accelerator.prepare`` gives, with models compiled for this backend. Collective.

    Args:
        objects: Models, optimizers, data loaders and schedulers, as of ``accelerator.prepare``.
        options: Of the backend, for the models: as of ``torch.compile``.

    Returns:
        One for each object, in their order; alone where there is one.

    Raises:
        UserInputError: the accelerator divides models by itself (DeepSpeed, FSDP, Megatron-LM).
    """
    if any(isinstance(each, LRScheduler) for each in objects):
        _mention_steps_of_schedulers(accelerator)
    prepared = [
        prepare_model(accelerator, each, options=options)
        if isinstance(each, nn.Module)
        else accelerator.prepare(each)
        for each in objects
    ]
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


def _mention_steps_of_schedulers(accelerator: Accelerator) -> None:
    """In one process a scheduler that Accelerate has prepared makes one step for each update."""
    if accelerator.num_processes > 1 and not accelerator.split_batches:
        say_once(
            logger,
            "Accelerate steps a prepared scheduler %d times for each update, once for each process; where its numbers of "
            "steps count updates, leave it out of prepare, and step it where accelerator.sync_gradients",
            accelerator.num_processes,
            level=logging.WARNING,
        )


def prepare_model(
    accelerator: Accelerator, model: nn.Module, *, options: Mapping[str, Any] | None = None
) -> nn.Module:
    """A model with the accelerator's mixed precision, compiled for this backend. Collective.

    Args:
        options: Of the backend: as of ``torch.compile``.

    Raises:
        UserInputError: the model is compiled already, or the accelerator divides models by itself.
        LaunchError: the accelerator sees another number of processes than the job has.
    """
    kind = DistributedType(accelerator.distributed_type).value
    if kind not in _ALLOWED:
        raise UserInputError(
            f"the accelerator is set up for {kind}, which divides a model by itself",
            cure="leave its plugin (and the settings of `accelerate config` for it) out: the backend divides the model.",
        )
    if is_compiled(model):
        raise UserInputError(
            "the model is compiled already, so Accelerate cannot set up its mixed precision",
            cure="give the plain model, and the backend's options as options={...}.",
        )
    join_job()
    # Evaluation mode is Accelerate's word for a model that it makes no replicas of; whether the model trains is up to it.
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    if is_compiled(prepared):
        return prepared
    compiled: Any = torch.compile(prepared, backend="rannc", options=dict(options or {}))
    return compiled
