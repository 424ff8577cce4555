"""Puts a checkpoint into this rank's part of a job: first compared as a whole, then read.

In: a checkpoint's directory, the model with who owns what, optimizers, schedulers, scaler. Out: all of them
as they were saved. No
collectives: each rank reads what it needs.

Terms. Before a model is planned, nobody knows which parameters will live here: parameters that have no value
yet are *deferred* from the checkpoint (`runtime/deferred.py`), and the optimizers' state is read by `finish`,
when the plan is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rannc_backend.checkpoint import model_state, optimizer_state
from rannc_backend.checkpoint import random_state as generators
from rannc_backend.checkpoint.manifest import Manifest
from rannc_backend.checkpoint.model_state import ModelTensors
from rannc_backend.checkpoint.plain_values import decode
from rannc_backend.checkpoint.reader import CheckpointReader, TensorReader
from rannc_backend.checkpoint.tensor_storage import read_tensors
from rannc_backend.errors import CheckpointMismatchError
from rannc_backend.runtime.deferred import DeferredValue, DeferredValues, give_no_memory
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.step.graph_settings import StepCounter
from rannc_backend.runtime.world import World


@dataclass(slots=True)
class CheckpointSource:
    """Values of parameters with deferred values, from a checkpoint; see `runtime.deferred.Source`."""

    reader: TensorReader
    seed: int = 0
    held: bool = False

    def value(self, name: str, seed: int) -> torch.Tensor:
        """The saved value of a parameter, on the CPU, in the memory of the file: it is copied at once."""
        return self.reader.mapped(name)


@dataclass(slots=True, kw_only=True)
class Loading:
    """One load on one rank; the methods are called in the order in which they stand. ``table`` None: not
    planned yet.
    """

    world: World
    table: ParameterTable | None
    deferred_values: DeferredValues
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Any]
    scaler: Any
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    _reader: TensorReader | None = None
    _model: ModelTensors | None = None
    _has_optimizers: bool = False

    @property
    def reader(self) -> TensorReader:
        """The checkpoint, once `check` has been called."""
        assert self._reader is not None, "not checked yet"
        return self._reader

    @property
    def _manifest(self) -> Manifest | None:
        return self.reader.manifest if isinstance(self.reader, CheckpointReader) else None

    @property
    def _tensors(self) -> ModelTensors:
        assert self._model is not None, "not checked yet"
        return self._model

    def check(
        self,
        open_reader: Callable[[ModelTensors], TensorReader],
        root: nn.Module,
        *,
        strict: bool,
        same_dtypes: bool = True,
    ) -> None:
        """Compare names, shapes, dtypes and groups; nothing is changed.

        Args:
            open_reader: opens the checkpoint for the tensors of the model.

        Raises:
            CheckpointMismatchError, CheckpointFileError, CheckpointVersionError: see `errors`.
        """
        self._model = ModelTensors.of(root, self.table, self.world.size)
        self._reader = open_reader(self._model)
        self.missing, self.unexpected = model_state.check_fit(
            self._tensors, self.reader, strict=strict, same_dtypes=same_dtypes
        )
        if self.optimizers:
            optimizer_state.check_fit(self.optimizers, self.reader, self._tensors.names_of())
        manifest = self._manifest
        num_saved = (
            0 if manifest is None or not isinstance(manifest.schedulers, list) else len(manifest.schedulers)
        )
        if self.schedulers and len(self.schedulers) != num_saved:
            raise CheckpointMismatchError(
                f"the checkpoint {str(self.reader.path)!r} has the state of {num_saved} scheduler(s); "
                f"{len(self.schedulers)} were given",
                cure="give the schedulers that save_checkpoint was given, or scheduler=None to load none.",
            )
        if self.scaler is not None and (manifest is None or manifest.scaler is None):
            raise CheckpointMismatchError(
                f"the checkpoint {str(self.reader.path)!r} has no state of a scaler",
                cure="load with scaler=None.",
            )

    def load_tensors(self) -> None:
        """Fill, or defer, the parameters, fill the buffers and, where it is known which are here, the
        optimizers' state.
        """
        saved = set(self.reader.names)
        source = CheckpointSource(self.reader)
        for name, tensor in self._tensors.tensors.items():
            if (
                isinstance(tensor, nn.Parameter)
                and name in saved
                and (tensor.is_meta or self.deferred_values.of(tensor) is not None)
            ):
                if tensor.is_meta:
                    give_no_memory(tensor, name, self.world.device)
                self.deferred_values.add(tensor, DeferredValue(source=source, name=name))
        targets = model_state.targets(self._tensors, self.reader, self.world.rank)
        read_tensors(
            {name: tensor for name, tensor in targets.items() if not self._is_deferred_value(name)},
            self.reader,
        )
        for number, optimizer in enumerate(self.optimizers):
            optimizer_state.restore_groups(optimizer, number, self.reader)
        if self.table is not None or self.world.size == 1:
            self._load_optimizers(self._tensors)

    def load_rest(self, *, random_state: bool) -> None:
        """Schedulers, scaler, and the random generators, of a checkpoint of this package."""
        assert isinstance(self.reader, CheckpointReader), "a checkpoint of another library"
        manifest = self.reader.manifest
        for number, scheduler in enumerate(self.schedulers):
            scheduler.load_state_dict(decode(manifest.schedulers[number], f"scheduler {number}"))  # type: ignore[index]
        if self.scaler is not None:
            self.scaler.load_state_dict(decode(manifest.scaler, "the scaler"))
        if random_state:
            parts = self.reader.index.parts
            generators.restore(
                parts[self.world.rank if self.world.rank < len(parts) else 0].random, self.world.device
            )

    def finish(self, table: ParameterTable, counter: StepCounter) -> None:
        """When the model is planned: what the backend counts, and the optimizers' state of this rank's
        parameters.
        """
        if self._manifest is not None:
            counter.number = self._manifest.runtime.num_steps_begun
            counter.loss_gradient = self._manifest.runtime.loss_gradient
        if not self._has_optimizers:
            self._load_optimizers(ModelTensors.of(table.module(), table, self.world.size))

    def _load_optimizers(self, model: ModelTensors) -> None:
        mine = {name for name, updaters in model.updaters.items() if self.world.rank in updaters}
        for number, optimizer in enumerate(self.optimizers):
            optimizer_state.restore_state(optimizer, number, self.reader, model.names_of(), mine)
        self._has_optimizers = True

    def _is_deferred_value(self, name: str) -> bool:
        return self.deferred_values.of(self._tensors.tensors[name]) is not None
