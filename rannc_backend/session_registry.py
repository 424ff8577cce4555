"""The sessions of this process, by model.

In: the parameters and buffers of a graph. Out: the session of the model that they belong to. torch.compile
gives a backend nothing that lives as long as the model, so sessions are kept here, as long as their model
lives.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from rannc_backend.capture.refusals import refuse_other_count
from rannc_backend.errors import OptionValueError, UserInputError
from rannc_backend.ir.plan import Plan
from rannc_backend.log.logger import setup_logging
from rannc_backend.log.startup import mention_untried_torch
from rannc_backend.runtime.absent_tensors import is_absent
from rannc_backend.runtime.deferred import DeferredValues
from rannc_backend.runtime.gradients.apply_groups import ApplyGroups
from rannc_backend.runtime.gradients.clipping import norms_over_ranks
from rannc_backend.runtime.gradients.grad_scaler import unscale_over_ranks
from rannc_backend.runtime.gradients.optimizer_state_dicts import OptimizerStates
from rannc_backend.runtime.gradients.optimizer_watch import OptimizerWatch
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.state_hooks import is_copy
from rannc_backend.runtime.step.autograd import watch_backwards
from rannc_backend.runtime.switches import Switches
from rannc_backend.runtime.torch_internals import root_of
from rannc_backend.runtime.trace.event_trace import EventTrace
from rannc_backend.runtime.trace.trace_file import begin_trace
from rannc_backend.session import Follower, Session
from rannc_backend.settings.options import Config
from rannc_backend.settings.sources import FileOnce, Given, GivesOptions, Layered


@dataclass(slots=True)
class SessionRegistry:
    """The sessions of this process, by root module; they end with their modules."""

    sessions: weakref.WeakKeyDictionary[nn.Module, Session] = field(default_factory=weakref.WeakKeyDictionary)
    deferred_values: DeferredValues = field(default_factory=DeferredValues)
    switches: Switches = field(default_factory=Switches)
    options_file: FileOnce = field(default_factory=FileOnce)
    followers: weakref.WeakKeyDictionary[nn.Module, list[Follower]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    recordings: WeakTensorKeyDictionary = field(
        default_factory=WeakTensorKeyDictionary
    )  # of models that are built without memory
    stored: dict[int, Any] = field(
        default_factory=dict
    )  # parameters that are spread over the ranks, by id: see tensor_coll.py
    optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, Follower] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    defaults: GivesOptions | None = None  # options of models that are compiled from now on
    trace: EventTrace | None = None  # of all models that are traced
    states: OptimizerStates | None = None
    watch: OptimizerWatch | None = None  # of all optimizers' steps
    num_models: int = 0  # so far
    steps_in_parts: bool = False  # some model has asked for it
    gathered: list[weakref.WeakSet[nn.Module]] = field(
        default_factory=list
    )  # modules whose calls run plainly now: see api/gathered.py
    synchronized: WeakTensorKeyDictionary = field(
        default_factory=WeakTensorKeyDictionary
    )  # see synchronized_modules.py
    num_synchronized: int = 0
    averaged: WeakTensorKeyDictionary = field(
        default_factory=WeakTensorKeyDictionary
    )  # parameters of modules in DistributedDataParallel
    ends: tuple[
        Callable[[], None], ...
    ] = ()  # of what optimizers, GradScalers and torch's clipping of gradients do over ranks until then

    def of(self, model: nn.Module) -> Session | None:
        """The session of a model, compiled or not; None before its first call."""
        return self.sessions.get(root_of(model))

    def session_of(self, root: nn.Module, config: Config) -> Session:
        """The model's session, begun if there is none. Collective then.

        Raises:
            OptionValueError: the model is planned already, under other options.
        """
        session = self.sessions.get(root)
        if session is None:
            world = bootstrap.start(bootstrap.options_of(config))
            setup_logging(world.rank, os.environ)
            refuse_other_count(world.size)
            if world.rank == 0:
                mention_untried_torch(torch.__version__)
            if not self.ends:
                self.ends = (watch_backwards(self.tables, self.is_synchronized),)
            if world.size > 1 and self.watch is None:
                self.watch = OptimizerWatch(
                    world, self.tables, self.is_synchronized, lambda: self.checks_optimizers
                )
                self.states = OptimizerStates(
                    world, self.tables, lambda: self.gives_all_states, lambda each: each in self.optimizers
                )
                self.ends += (
                    unscale_over_ranks(world, self.tables),
                    norms_over_ranks(self.tables),
                    self.watch.install(),
                    self.states.install(),
                )
            if config.num_apply_group > 1 and not self.steps_in_parts:
                self.ends += (ApplyGroups(self._parts_wanted, lambda: self.checks_optimizers).install(),)
                self.steps_in_parts = True
            followers = self.followers.setdefault(root, [])
            if self.watch is not None and self.watch not in followers:
                followers.append(self.watch)
            session = Session(
                root=weakref.ref(root),
                config=config,
                world=world,
                deferred_values=self.deferred_values,
                switches=self.switches,
                followers=followers,
                states=self.states,
                number=self.num_models,
            )
            self.num_models += 1
            weakref.finalize(root, world.counts.forget, session.number)
            if config.trace_events:
                self.trace = session.trace = begin_trace(world, config.event_trace_file, self.trace)
            self.sessions[root] = session
        elif session.plan is None and not session.runtimes:
            session.config = config
        elif session.config != config:
            changed = [
                item for item in Config.model_fields if getattr(session.config, item) != getattr(config, item)
            ]
            raise OptionValueError(
                changed[0],
                value=getattr(config, changed[0]),
                source="options",
                expected=f"{getattr(session.config, changed[0])!r}, as when this model was planned",
            )
        return session

    def over_defaults(self, options: Given) -> Given:
        """Options that torch.compile is given, over those of all models that are compiled from now on."""
        if self.defaults is None or options is self.defaults or isinstance(options, Layered):
            return options
        return Layered(self.defaults, options) if options else self.defaults

    def reset_switches(self) -> None:
        """Set the switches as they were at the start, for the models that exist, too."""
        start = Switches()
        for name in Switches.__dataclass_fields__:
            setattr(self.switches, name, getattr(start, name))

    def plan_of(self, model: nn.Module) -> Plan | None:
        """The plan of a model, compiled or not; None before its first call."""
        session = self.of(model)
        return None if session is None else session.plan

    def absent_tensors(self) -> list[torch.Tensor]:
        """All parameters and buffers of this process whose values are not on this rank."""
        modules = [module for table in self.tables() if (module := table.root()) is not None]
        known = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        return [tensor for tensor in (*known, *self.deferred_values.parameters()) if is_absent(tensor)]

    def has_spread(self, module: nn.Module) -> bool:
        """Whether a module has parameters of a model that is planned for several ranks."""
        tables = [table for table in self.tables() if table.world.size > 1]
        return bool(tables) and any(
            table.name_of(parameter) is not None for parameter in module.parameters() for table in tables
        )

    def is_gathered(self, module: nn.Module | None) -> bool:
        """Whether `gathered` is under way for a module."""
        return module is not None and any(module in modules for modules in self.gathered)

    def is_synchronized(self, parameter: torch.Tensor) -> bool:
        """Whether the gradients of a parameter outside of compiled models are averaged over ranks."""
        return parameter in self.synchronized or parameter in self.averaged

    def note_averaged(self, module: nn.Module) -> None:
        """DistributedDataParallel has taken a module."""
        for parameter in module.parameters():
            self.averaged[parameter] = True

    def is_averaged(self, parameter: torch.Tensor) -> bool:
        """Whether these become means, not sums."""
        group = self.synchronized.get(parameter)
        return parameter in self.averaged if group is None else group.is_mean

    def refuse_copy(self, model: object) -> None:
        """Raises UserInputError where a model is a copy of a planned one: its parameters are on the ranks of that one's
        stages, and a plan of its own would need them elsewhere.
        """
        if isinstance(model, nn.Module) and is_copy(model):
            raise UserInputError(
                f"{type(model).__name__} is a copy of a model that is spread over ranks, and was to be compiled",
                cure="copy the model before its first call; or build a model anew, compile and call it, and load the copy "
                "into it on all ranks: model.load_state_dict(copy.state_dict()).",
            )

    @property
    def checks_optimizers(self) -> bool:
        """Whether optimizers are tried before their first step; all models must have been compiled so."""
        return all(session.config.check_optimizers for session in self.sessions.values())

    @property
    def gives_all_states(self) -> bool:
        """Whether every rank gets whole states, not rank 0 alone; some model must have been compiled so."""
        return any(session.config.states_on_all_ranks for session in self.sessions.values())

    def _parts_wanted(self) -> list[tuple[ParameterTable, int]]:
        return [
            (session.table, session.config.num_apply_group)
            for session in self.sessions.values()
            if session.table is not None
        ]

    def tables(self) -> list[ParameterTable]:
        """Ownership of every planned model."""
        return [session.table for session in self.sessions.values() if session.table is not None]


REGISTRY = SessionRegistry()
"""The one piece of process-wide state: torch.compile hands a backend nothing that lives as long as the
model.
"""
