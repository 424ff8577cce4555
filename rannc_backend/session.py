"""One user model on this rank: planned once, then every graph that Dynamo makes of it runs under the same owners.

In: captured graphs of the model. Out: a `GraphRuntime` per distinct graph. Training, evaluation, no_grad and autocast give different
graphs; a rank whose local batch is 1 gives the same graph again. Parameters move once, when the first graph is planned.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

import torch
from rich.console import Console
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from rannc_backend.analysis import GraphAnalysis, analyze
from rannc_backend.calibration import choose_cluster, device_memory_bytes
from rannc_backend.capture import CapturedGraph
from rannc_backend.compile_stages import CompileCache
from rannc_backend.config import Config, check_same_options
from rannc_backend.config_sources import FileOnce
from rannc_backend.cost.cluster import Cluster
from rannc_backend.cost.small_models import why_eager
from rannc_backend.deployment import Deployer, StageCut, cut_stages
from rannc_backend.deployment_file import read_plan_text, write_text
from rannc_backend.errors import OptionValueError, RanksDifferError, RanncError, UserInputError, rebuild_error
from rannc_backend.ir.plan import Plan
from rannc_backend.log import setup_logging
from rannc_backend.measured import report_of
from rannc_backend.narrator import log_narrator
from rannc_backend.notices import Deployed, Notices
from rannc_backend.partition.plan_checks import check_options, check_plan, exact_schedules
from rannc_backend.partition.projection import project_plan
from rannc_backend.planning import num_elements, plan_analysis, settled_for
from rannc_backend.planning_search import PlanningQuestion
from rannc_backend.profiling import answer_leader, leading, make_bench, measures
from rannc_backend.progress import Progress, planning_progress
from rannc_backend.report.tables import plan_report
from rannc_backend.runtime import bootstrap
from rannc_backend.runtime.absent_tensors import is_absent
from rannc_backend.runtime.accumulation import DelayableBuckets
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.buckets import BufferPool
from rannc_backend.runtime.clipping import norms_over_ranks
from rannc_backend.runtime.event_trace import EventTrace
from rannc_backend.runtime.grad_scaler import unscale_over_ranks
from rannc_backend.runtime.graph_runtime import GraphRuntime, StepCounter
from rannc_backend.runtime.host_memory import give_back_memory
from rannc_backend.runtime.meter import StepMeter
from rannc_backend.runtime.optimizer_states import OptimizerStates
from rannc_backend.runtime.optimizer_watch import OptimizerWatch
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.promises import Promises
from rannc_backend.runtime.switches import Switches
from rannc_backend.runtime.torch_internals import trace_artifact, without_anomaly_detection
from rannc_backend.runtime.trace_file import begin_trace
from rannc_backend.runtime.transport_watch import watch_transport
from rannc_backend.runtime.world import World
from rannc_backend.startup import say_places
from rannc_backend.torch_version import mention_untried_torch

logger = logging.getLogger(__name__)

_PIPED_COLUMNS = 100
_DEPLOYMENT = "option deployment_file"


class Follower(Protocol):
    """Something that keeps values beside parameters, where the parameters are: an optimizer's state."""

    def parameters_moved(self, table: ParameterTable, before: Mapping[str, tuple[int, ...]] | None) -> None:
        """Parameters have gone to the owners that ``table`` says; ``before``: those until now, None at the first time. Collective."""
        ...


@dataclass(slots=True, kw_only=True)
class Session:
    """See the module docstring."""

    root: weakref.ref[nn.Module]
    config: Config
    world: World
    promises: Promises
    switches: Switches
    followers: list[Follower]
    states: OptimizerStates | None = None  # of all optimizers that are not among the followers
    number: int = 0  # of the model in this process, the same on all ranks
    cache: CompileCache = field(default_factory=CompileCache)
    counter: StepCounter = field(default_factory=StepCounter)
    pool: BufferPool = field(default_factory=BufferPool)
    plan: Plan | None = None
    deferred: bool = False  # the plan chose fill_drain where 1f1b was possible
    table: ParameterTable | None = None
    runtimes: dict[str, GraphRuntime] = field(default_factory=dict)
    captured: dict[str, CapturedGraph] = field(default_factory=dict)  # without their model
    buffer_stages: dict[str, frozenset[int]] = field(default_factory=dict)  # that read a buffer, or make its new value, in some graph
    changing_buffers: set[str] = field(default_factory=set)
    trace: EventTrace | None = None
    notices: Notices = field(default_factory=Notices)
    compiled: weakref.WeakSet[Callable[..., Any]] = field(default_factory=weakref.WeakSet)  # what Dynamo calls for this model

    @without_anomaly_detection
    def runtime_for(self, captured: CapturedGraph, local_rows: int) -> tuple[GraphRuntime, bool]:
        """The runtime of a graph, and whether parameters have been moved for it just now (the trace is then stale).

        Collective for a graph that is new.
        """
        key = captured.fingerprint
        if key in self.runtimes:
            return self.runtimes[key], False
        if self.table is not None:
            self.table.take_all_replaced()
        self.world.monitor.phase("planning")
        answers = agree(
            self.world,
            "the first call of a graph",
            {
                "fingerprint": key,
                "rows": local_rows,
                "options": self.config.model_dump(),
                "torch": torch.__version__,
                "device": str(self.world.device),
            },
            limit_seconds=self.config.compile_timeout_seconds,
        )
        _check_same(answers)
        say_places(self.world.hosts, [answer["device"] for answer in answers], self.world.launcher)
        rows = [answer["rows"] for answer in answers]
        with log_narrator(verbose=self.config.verbose).step("analysis") as details:
            analysis = analyze(captured)
            details.append(f"{len(analysis.split.rowwise.graph.nodes)} nodes in stages")
        moved, fresh = False, self.plan is None
        if self.plan is None and self.config.partitioning_dry_run_np:
            self._dry_run(analysis, rows)
        if self.plan is None:
            plan = self._make_plan(analysis, sum(rows) if self.config.gather_inputs else rows[0])
            stage_of = self._check_plan(plan, analysis)
            self.plan = plan
            self.deferred = plan.schedule == "fill_drain" and "1f1b" in exact_schedules(analysis.split, analysis.needs_grad)
        else:
            stage_of = project_plan(self.plan, analysis.split, captured.inputs)
        cut = cut_stages(analysis, stage_of, len(self.plan.stages), all_outputs=self.config.outputs == "all")
        buffers_moved = self._place_buffers(cut, captured)
        moved = self._take_ownership(self.plan, changed=fresh or buffers_moved)
        runtime = self._deployer().deploy(_without_model(analysis), cut, label=f"graph {len(self.runtimes)}")
        if not any(other.meter for other in self.runtimes.values()) and any(output.differentiable for output in runtime.outputs):
            runtime.meter = self._meter(runtime)
        if self.trace is not None:
            self.trace.follow(runtime.buckets, stage_index=self.plan.stage_of_rank(self.world.rank))
            runtime.trace = self.trace
        self.runtimes[key] = runtime
        self._report_outputs(analysis, rows)
        if self.world.rank == 0:
            self.notices.say(Deployed(analysis=analysis, stage_of=stage_of, plan=self.plan, config=self.config))
        return self.runtimes[key], moved

    def _dry_run(self, analysis: GraphAnalysis, rows: list[int]) -> NoReturn:
        """Plan for more or fewer ranks than there are, print and save that, and end the process as a success, on every rank."""
        num_devices = self.config.partitioning_dry_run_np
        # Every rank of that job is expected to bring as many rows as the ranks of this one.
        batch_rows = max(1, sum(rows) * num_devices // len(rows)) if self.config.gather_inputs else rows[0]
        plan = self._make_plan(analysis, batch_rows, num_devices)
        if self.world.rank == 0:
            console = Console(highlight=False) if sys.stdout.isatty() else Console(width=_PIPED_COLUMNS, highlight=False)
            for section in plan_report(plan):
                console.print(section)
            console.print(f"dry run: plan for {num_devices} ranks saved in {self.config.deployment_file}", soft_wrap=True, markup=False)
            sys.stdout.flush()
        # Neither Dynamo nor the user's `except Exception` takes this for a failure.
        raise SystemExit(0)

    def _make_plan(self, analysis: GraphAnalysis, batch_rows: int, num_devices: int | None = None) -> Plan:
        """Rank 0 plans, for ``num_devices`` (None: the ranks at hand); the others check what they get."""
        dry = num_devices is not None
        loaded = self.config.load_deployment and not dry
        cluster = None if loaded else choose_cluster(self.config, self.world, num_devices=num_devices)
        text, failure = "", None
        # All ranks: a launcher hands Ctrl-C on to each of them, and those that wait for the plan must stay.
        with planning_progress(self.world.rank) as progress:
            profiled = cluster is not None and not dry and measures(self.config, self.world)
            if profiled and self.world.rank != 0:
                assert cluster is not None
                bench = make_bench(analysis, settled_for(analysis, self.config, cluster), cluster, self.world.device)
                answer_leader(bench, self.world, limit_seconds=self.config.compile_timeout_seconds)
            if self.world.rank == 0:
                try:
                    text = (
                        self._loaded_text(analysis)
                        if cluster is None
                        else self._plan_here(analysis, batch_rows, cluster, progress, profiled=profiled).to_json()
                    )
                    if dry or (self.config.save_deployment and not loaded):
                        write_text(self.config.deployment_file, text, what="plan", named_by=_DEPLOYMENT)
                        logger.info("plan saved in %s", os.path.abspath(self.config.deployment_file))
                except RanncError as error:
                    failure = error
            words = [text, type(failure).__name__, str(failure)] if failure else [text, "", ""]
            text, error_class, error_text = self.world.control.broadcast(
                words, what="the plan", limit_seconds=self.config.compile_timeout_seconds
            )
        if failure is not None:
            raise failure
        if error_class:
            raise rebuild_error(error_class, error_text)
        plan = Plan.from_json(text)
        trace_artifact("rannc_plan", "json", lambda: text)
        if self.world.rank == 0 and not dry:
            logger.info("%s", plan.summary())
            if self.config.stage_compiler == "auto" and plan.stage_compiler == "eager":
                logger.info("%s", why_eager(num_elements(analysis)))
        return plan

    def _loaded_text(self, analysis: GraphAnalysis) -> str:
        text = read_plan_text(self.config.deployment_file, named_by=_DEPLOYMENT)
        check_options(Plan.from_json(text), self.config, exact_schedules(analysis.split, analysis.needs_grad))
        logger.info("plan loaded from %s", self.config.deployment_file)
        return text

    def _check_plan(self, plan: Plan, analysis: GraphAnalysis) -> dict[str, int]:
        """The stage of every node, on each rank for itself: a plan that was loaded is not trusted, and one that was made is the same."""
        return check_plan(
            plan,
            analysis.split,
            analysis.captured.inputs,
            config=self.config,
            fingerprint=analysis.captured.fingerprint,
            world_size=self.world.size,
            device_memory_bytes=device_memory_bytes(self.world),
            possible_schedules=exact_schedules(analysis.split, analysis.needs_grad),
        )

    def _plan_here(
        self, analysis: GraphAnalysis, batch_rows: int, cluster: Cluster, progress: Progress, *, profiled: bool
    ) -> Plan:
        config = settled_for(analysis, self.config, cluster)
        bench = make_bench(analysis, config, cluster, self.world.device) if profiled else None
        question = PlanningQuestion(
            config=config,
            cluster=cluster,
            # A first batch that is too small for the replicas asked for is an error of its step, not of the plan.
            batch_rows=max(batch_rows, *self.config.stage_replica_counts, self.config.replica_num),
            progress=progress,
            narrator=log_narrator(verbose=self.config.verbose),
        )
        with leading(bench, self.world, limit_seconds=self.config.compile_timeout_seconds, progress=progress) as profiler:
            return plan_analysis(analysis, question, profiler=profiler)

    def _place_buffers(self, cut: StageCut, captured: CapturedGraph) -> bool:
        """Note which stages need the buffers that the model changes; whether those of a buffer are others than they were.

        A buffer that some graph changes belongs to the stages that make its new value or read it; every other one to all ranks.
        """
        before = {name: self.buffer_stages[name] for name in self.changing_buffers}
        for name, stages in cut.buffer_readers(captured.inputs).items():
            self.buffer_stages[name] = self.buffer_stages.get(name, frozenset()) | stages
        for name, stage in cut.buffer_makers.items():
            self.buffer_stages[name] = self.buffer_stages.get(name, frozenset()) | {stage}
            self.changing_buffers.add(name)
        return before != {name: self.buffer_stages[name] for name in self.changing_buffers}

    def _take_ownership(self, plan: Plan, *, changed: bool) -> bool:
        """Bring parameters and buffers to the ranks that the plan, and the graphs so far, want them on; whether any moved."""
        if not changed:
            return False
        root = self.root()
        assert root is not None, "the model is gone"
        owners: dict[str, set[int]] = {}
        for stage in plan.stages:
            for name in stage.parameters:
                owners.setdefault(name, set()).update(stage.ranks)
        for name in self.changing_buffers:
            owners[name] = {rank for index in self.buffer_stages[name] for rank in plan.stages[index].ranks}
        ranks_of = {name: tuple(sorted(ranks)) for name, ranks in owners.items()}
        self.world.monitor.phase("giving parameters to their owners")
        if self.table is not None:
            before: Mapping[str, tuple[int, ...]] | None = self.table.owners
            moved = self.table.transfer(ranks_of)
        else:
            before = None
            if self.states is not None:
                self.states.check_before_move(ranks_of, {parameter: name for name, parameter in root.named_parameters()})
            self.table = ParameterTable.build(root, ranks_of, self.world, self.number)
            self.table.states_on_all_ranks = self.config.states_on_all_ranks
            moved = self.table.settle(self.promises, synchronize=self.config.sync_params_on_init)
        for follower in (*self.followers, *([self.states] if self.states is not None else [])):
            follower.parameters_moved(self.table, before)
        logger.debug("rank %d gave back %.1f MB of parameters", self.world.rank, moved.freed_bytes / 2**20)
        return moved.changed

    def reduce_gradients(self) -> None:
        """Sum gradients that are still each rank's own over their owners. Collective."""
        assert self.table is not None, "not planned yet"
        if self.table.gradients_are_local:
            buckets = next(iter(self.runtimes.values())).buckets
            assert isinstance(buckets, DelayableBuckets), "buckets that cannot be local"
            buckets.reduce()

    def undeploy(self) -> None:
        """Free what steps need (compiled stages, gradients, buffers), and take the parameters off the device; the next call plans anew."""
        self.runtimes.clear()
        self.cache = CompileCache()
        self.pool = BufferPool()
        self.plan = None
        self.buffer_stages.clear()
        self.changing_buffers.clear()
        if self.table is not None:
            self.table.to_host()
        give_back_memory()

    def _deployer(self) -> Deployer:
        root = self.root()
        assert root is not None and self.plan is not None and self.table is not None, "not planned yet"
        return Deployer(
            world=watch_transport(self.world, self.config),
            config=self.config.model_copy(update={"schedule": "fill_drain"}) if self.deferred else self.config,
            plan=self.plan,
            table=self.table,
            tensors=named_tensors(root),
            counter=self.counter,
            cache=self.cache,
            switches=self.switches,
            pool=self.pool,
        )

    def _meter(self, runtime: GraphRuntime) -> StepMeter | None:
        root = self.root()
        if not self.config.num_measured_steps or root is None or self.plan is None:
            return None
        return StepMeter(
            device=self.world.device,
            stage_index=self.plan.stage_of_rank(self.world.rank),
            num_steps=self.config.num_measured_steps,
            expected_rows=self.plan.batch_rows,
            model_tensors=tuple(named_tensors(root).values()),
            gradient_tensors=runtime.buckets.tensors,
            message_tensors=runtime.message_tensors,
            deliver=self._report_measured,
        )

    def _report_measured(self, records: list[dict[str, Any]]) -> None:
        assert self.plan is not None, "measured before planned"
        report = report_of(self.plan, records) if self.world.rank == 0 else None
        if report is None:
            return
        logger.info("%s", report.table())
        if self.config.run_file:
            try:
                write_text(self.config.run_file, report.to_json(), what="measured steps", named_by="option run_file")
            except UserInputError as error:
                logger.warning("%s", error)  # no reason to end a run that works

    def _report_outputs(self, analysis: GraphAnalysis, rows: list[int]) -> None:
        names = [output.name for output in analysis.split.user_outputs if output.kind == "rows"]
        scalars = any(output.kind == "scalar" for output in analysis.split.user_outputs)
        if self.world.rank == 0 and self.world.size > 1 and scalars and names and self.config.outputs == "all":
            size = sum(analysis.value(name).bytes_per_row for name in names) * sum(rows)
            logger.info(
                "%d outputs beside the loss come back as each rank's rows, which moves %.1f MB per step; "
                "options={'outputs': 'loss'} leaves them out",
                len(names),
                size / 2**20,
            )


def _without_model(analysis: GraphAnalysis) -> GraphAnalysis:
    """The analysis as a runtime keeps it: what a session holds must not keep its model alive."""
    return replace(analysis, captured=replace(analysis.captured, root_module=nn.Module()))


def named_tensors(root: nn.Module) -> Mapping[str, torch.Tensor]:
    """Parameters and buffers under their primary names."""
    return {**dict(root.named_parameters()), **dict(root.named_buffers())}


def _check_same(answers: list[dict[str, object]]) -> None:
    check_same_options([answer["options"] for answer in answers])  # type: ignore[misc]
    for what, item in (("versions of torch", "torch"), ("models or inputs (hash of the captured graph)", "fingerprint")):
        values = [str(answer[item])[:16] for answer in answers]
        if len(set(values)) > 1:
            raise RanksDifferError(what, value_by_rank=values)


@dataclass(slots=True)
class SessionRegistry:
    """The sessions of this process, by root module; they end with their modules."""

    sessions: weakref.WeakKeyDictionary[nn.Module, Session] = field(default_factory=weakref.WeakKeyDictionary)
    promises: Promises = field(default_factory=Promises)
    switches: Switches = field(default_factory=Switches)
    options_file: FileOnce = field(default_factory=FileOnce)
    followers: weakref.WeakKeyDictionary[nn.Module, list[Follower]] = field(default_factory=weakref.WeakKeyDictionary)
    recordings: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)  # of models that are built without memory
    stored: dict[int, Any] = field(default_factory=dict)  # parameters that are spread over the ranks, by id: see tensor_coll.py
    optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, Follower] = field(default_factory=weakref.WeakKeyDictionary)
    trace: EventTrace | None = None  # of all models that are traced
    states: OptimizerStates | None = None
    num_models: int = 0  # so far
    synchronized: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)  # see synchronized_modules.py
    ends: tuple[Callable[[], None], ...] = ()  # of what GradScalers and torch's clipping of gradients do over ranks until then

    def of(self, model: nn.Module) -> Session | None:
        """The session of a model, compiled or not; None before its first call."""
        while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        return self.sessions.get(model)

    def session_of(self, root: nn.Module, config: Config) -> Session:
        """The model's session, begun if there is none. Collective then.

        Raises:
            OptionValueError: the model is planned already, under other options.
        """
        session = self.sessions.get(root)
        if session is None:
            world = bootstrap.start(bootstrap.options_of(config))
            setup_logging(world.rank, os.environ)
            if world.rank == 0:
                mention_untried_torch(torch.__version__)
            if world.size > 1 and not self.ends:
                watch = OptimizerWatch(world, self.tables, self.is_synchronized, lambda: self.checks_optimizers)
                self.states = OptimizerStates(world, self.tables, lambda: self.gives_all_states, lambda each: each in self.optimizers)
                self.ends = (
                    unscale_over_ranks(world, self.tables),
                    norms_over_ranks(self.tables),
                    watch.install(),
                    self.states.install(),
                )
            session = Session(
                root=weakref.ref(root),
                config=config,
                world=world,
                promises=self.promises,
                switches=self.switches,
                followers=self.followers.setdefault(root, []),
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
            changed = [item for item in Config.model_fields if getattr(session.config, item) != getattr(config, item)]
            raise OptionValueError(
                changed[0],
                value=getattr(config, changed[0]),
                source="options",
                expected=f"{getattr(session.config, changed[0])!r}, as when this model was planned",
            )
        return session

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
        return [tensor for tensor in (*known, *self.promises.parameters()) if is_absent(tensor)]

    def has_spread(self, module: nn.Module) -> bool:
        """Whether a module has parameters of a model that is planned for several ranks."""
        tables = [table for table in self.tables() if table.world.size > 1]
        return bool(tables) and any(table.name_of(parameter) is not None for parameter in module.parameters() for table in tables)

    def is_synchronized(self, parameter: torch.Tensor) -> bool:
        """Whether the gradients of a parameter outside of compiled models are averaged over ranks."""
        return parameter in self.synchronized

    @property
    def checks_optimizers(self) -> bool:
        """Whether optimizers are tried before their first step; all models must have been compiled so."""
        return all(session.config.check_optimizers for session in self.sessions.values())

    @property
    def gives_all_states(self) -> bool:
        """Whether every rank gets whole states, not rank 0 alone; some model must have been compiled so."""
        return any(session.config.states_on_all_ranks for session in self.sessions.values())

    def tables(self) -> list[ParameterTable]:
        """Ownership of every planned model."""
        return [session.table for session in self.sessions.values() if session.table is not None]
