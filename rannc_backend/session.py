"""One user model on this rank: planned once, then every graph that Dynamo makes of it runs under the same
owners.

In: captured graphs of the model. Out: a `GraphRuntime` per distinct graph. Training, evaluation, no_grad and
autocast give different graphs; a rank whose local batch is 1 gives the same graph again. Parameters move
once, when the first graph is planned.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from rannc_backend.capture.analysis import GraphAnalysis, analyze, in_order_of_arguments
from rannc_backend.capture.graph import CapturedGraph, fixed_shapes
from rannc_backend.capture.inputs import named_tensors
from rannc_backend.compiled_call import batch_dim_check
from rannc_backend.deployment import Deployer
from rannc_backend.errors import (
    InfeasiblePlanError,
    RanksDifferError,
    RanncError,
    UserInputError,
    rebuild_error,
)
from rannc_backend.ir.plan import Plan
from rannc_backend.ir.plan_file import write_text
from rannc_backend.ir.updates import Update
from rannc_backend.log.progress import planning_progress
from rannc_backend.log.startup import say_places
from rannc_backend.log.step_timer import log_step_timer
from rannc_backend.notices import Deployed, Notices, say_outputs
from rannc_backend.passes.pipeline import GraphDump, dumping
from rannc_backend.planner import plan_on_ranks
from rannc_backend.planner.blocks.measure import answer_leader, make_bench, measures
from rannc_backend.planner.blocks.told_recompute import with_pivots
from rannc_backend.planner.cluster.this_machine import choose_cluster, device_memory_bytes
from rannc_backend.planner.cost.small_models import why_eager
from rannc_backend.planner.plan_fits_graph import check_plan, cut_by_plan, exact_schedules
from rannc_backend.planner.plan_model import num_elements, settled_for
from rannc_backend.planner.plan_on_ranks import GraphToPlan
from rannc_backend.planner.projection import note_kept, project_plan
from rannc_backend.report.run_report import report_of
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.comm.checked import watch_transport
from rannc_backend.runtime.comm.host_link import HostLink
from rannc_backend.runtime.deferred import DeferredValues
from rannc_backend.runtime.gradients.buckets import BufferPool
from rannc_backend.runtime.gradients.choose_updates import choose_updates
from rannc_backend.runtime.gradients.delayed_reduction import DelayableBuckets
from rannc_backend.runtime.gradients.new_values import note_values
from rannc_backend.runtime.gradients.optimizer_state_dicts import OptimizerStates
from rannc_backend.runtime.host_resources import give_back_memory
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.step.graph_runtime import GraphRuntime
from rannc_backend.runtime.step.graph_settings import StepCounter
from rannc_backend.runtime.switches import Switches
from rannc_backend.runtime.torch_internals import trace_artifact, without_anomaly_detection
from rannc_backend.runtime.trace.allocations import counted_host_link
from rannc_backend.runtime.trace.event_trace import EventTrace
from rannc_backend.runtime.trace.meter import StepMeter
from rannc_backend.runtime.world import Ranks, World
from rannc_backend.settings.options import Config
from rannc_backend.stages.compiled_stage import CompileCache
from rannc_backend.stages.cut_stages import StageCut
from rannc_backend.stages.graph_dump import pass_dump

logger = logging.getLogger(__name__)


class Follower(Protocol):
    """Something that keeps values beside parameters, where the parameters are: an optimizer's state."""

    def parameters_moved(self, table: ParameterTable, before: Mapping[str, tuple[int, ...]] | None) -> None:
        """Parameters have gone to the owners that ``table`` says; ``before``: those until now, None at the
        first time. Collective.
        """
        ...


@dataclass(slots=True, kw_only=True)
class Session:
    """See the module docstring."""

    root: weakref.ref[nn.Module]
    config: Config
    world: World
    deferred_values: DeferredValues
    switches: Switches
    followers: list[Follower]
    states: OptimizerStates | None = None  # of all optimizers that are not among the followers
    number: int = 0  # of the model in this process, the same on all ranks
    cache: CompileCache = field(default_factory=CompileCache)
    counter: StepCounter = field(default_factory=StepCounter)
    pool: BufferPool = field(default_factory=BufferPool)
    host_link: HostLink | None = None  # where the plan keeps parameters on the host
    plan: Plan | None = None
    schedule: str | None = None  # that the plan chose where a preferred one was possible
    table: ParameterTable | None = None
    runtimes: dict[str, GraphRuntime] = field(default_factory=dict)
    captured: dict[str, CapturedGraph] = field(default_factory=dict)  # without their model
    # That read a buffer, or make its new value, in some graph.
    buffer_stages: dict[str, frozenset[int]] = field(default_factory=dict)
    changing_buffers: set[str] = field(default_factory=set)
    trace: EventTrace | None = None
    notices: Notices = field(default_factory=Notices)
    # What Dynamo calls for this model.
    compiled: weakref.WeakSet[Callable[..., Any]] = field(default_factory=weakref.WeakSet)
    # By shapes of inputs for which it was compiled: the plain numbers that it had.
    compiled_for: dict[tuple[str, ...], Mapping[str, float]] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)  # of the first steps, on this rank
    kept_homes: dict[int, int] = field(default_factory=dict)  # stages of what is kept from step to step
    has_moved: bool = False  # parameters, since `take_moved`
    given: Plan | None = None  # deployed in place of one that is made
    follows_choices: bool = True  # or what a mask chooses runs on the whole batch

    @without_anomaly_detection
    def runtime_for(
        self, captured: CapturedGraph, local_rows: int, lengths: tuple[int, ...] = ()
    ) -> GraphRuntime:
        """The runtime of a graph. ``local_rows`` and ``lengths`` are those of the call.

        Collective for a graph that is new.
        """
        key = captured.fingerprint
        if key in self.runtimes:
            return self.runtimes[key]
        if self.table is not None:
            self.table.take_all_replaced()
        self.world.monitor.phase("planning")
        answers = agree(
            self.world,
            "the first call of a graph",
            {
                "fingerprint": key,
                "rows": local_rows,
                "lengths": lengths,
                "planned": [each.planned(size) for each, size in zip(captured.lengths, lengths)],
                "shapes": fixed_shapes(captured),
                "fixed": dict(captured.fixed_inputs),
                "options": self.config.model_dump(),
                "torch": torch.__version__,
                "device": str(self.world.device),
            },
            limit_seconds=self.config.compile_timeout_seconds,
        )
        plan_on_ranks.check_same(answers)
        captured = self._in_one_order(captured, [answer["fingerprint"] for answer in answers])
        say_places(self.world.hosts, [answer["device"] for answer in answers], self.world.launcher)
        rows = [answer["rows"] for answer in answers]
        analysis = self._analysis(captured)
        fresh = self.plan is None
        # Timed at this step's lengths, the longest of all ranks, with memory for the longest that were announced.
        lengths_of = [[answer[name] for answer in answers] for name in ("lengths", "planned")]
        if self.plan is None:
            graph = GraphToPlan.of(analysis, *lengths_of)
            if self.config.partitioning_dry_run_np:
                self._dry_run(graph, rows)
            num_rows = sum(rows) if self.config.gather_inputs else rows[0]
            try:
                plan = self.given or self._make_plan(graph, num_rows)
            except InfeasiblePlanError:
                if not analysis.split.has_choices or self.config.whole_batch == "never":
                    raise
                # What a mask chooses is not sent, but a value of the whole batch before it was chosen may be.
                self.follows_choices = False
                analysis = self._analysis(captured)
                graph = GraphToPlan.of(analysis, *lengths_of)
                plan = self._make_plan(graph, num_rows)
            stage_of = self._check_plan(plan, graph.analysis)
            self.plan = plan
            possible = exact_schedules(analysis.split, analysis.needs_grad)
            asked = self.config.schedule if self.config.schedule in possible else possible[0]
            self.schedule = plan.schedule if plan.schedule != asked else None
        else:
            stage_of = project_plan(self.plan, analysis.split, captured.inputs, self.kept_homes)
        note_kept(self.kept_homes, analysis.split, stage_of)
        with dumping(self._dump):
            cut = cut_by_plan(self.plan, analysis, stage_of, lengths_of[1], self.config)
        buffers_moved = self._place_buffers(cut, captured)
        if fresh or buffers_moved:
            self._take_ownership(self.plan, fresh=fresh)
        runtime = self._deployer().deploy(_without_model(analysis), cut, label=f"graph {len(self.runtimes)}")
        if not any(other.meter for other in self.runtimes.values()) and any(
            output.differentiable for output in runtime.outputs
        ):
            runtime.meter = self._meter(runtime)
        if self.trace is not None:
            self.trace.follow(runtime.buckets, stages=self.plan.stages_of_rank(self.world.rank))
            runtime.trace = self.trace
        self.runtimes[key] = runtime
        if self.world.rank == 0 and (self.given is None or self.given.measured_step_seconds is not None):
            say_outputs(analysis, rows, cut.left_out)
            self.notices.say(
                Deployed(analysis=analysis, stage_of=stage_of, plan=self.plan, config=self.config)
            )
        return self.runtimes[key]

    def best_runtime(
        self, captured: CapturedGraph, values: Sequence[Any], rows: int, lengths: tuple[int, ...]
    ) -> GraphRuntime:
        """As `runtime_for`; where the plan is new and others may be faster, they are measured with this call's ``values``
        (by position), and the fastest is deployed. Collective.
        """
        runtime = self.runtime_for(captured, rows, lengths)
        plan = self.plan
        assert plan is not None, "planned by now"
        has_rivals = self.config.plan_trial_seconds and any(other.plan for other in plan.alternatives)
        trains = runtime.loss_index is not None and torch.is_grad_enabled()
        if not has_rivals or not trains or self.world.size == 1:
            return runtime
        positions = {spec.name: spec.position for spec in captured.inputs}

        def under(given: Plan) -> GraphRuntime:
            if given is not self.plan:
                self._forget_plan()
                self.given = given
            return self.runtime_for(captured, rows, lengths)

        def deployed(other: Plan) -> Callable[[], float]:
            runtime = under(other)
            # Nobody is told of trials.
            runtime.meter, runtime.trace, runtime.switches = None, None, Switches()
            tensors = [values[positions[spec.name]] for spec in runtime.inputs]
            return lambda: runtime.trial(tensors)

        return under(plan_on_ranks.measured_best(plan, self.world, self.config, deployed))

    def take_moved(self) -> bool:
        """Whether parameters have moved since this was last asked, also for a graph that was then not deployed: a
        trace of them is stale.
        """
        moved, self.has_moved = self.has_moved, False
        return moved

    def _in_one_order(self, captured: CapturedGraph, fingerprints: list[str]) -> CapturedGraph:
        """A graph as all ranks have it, also where each has captured its nodes in an order of its own, since the
        forward goes through a set of strings. Collective where they differ.
        """
        if len(set(fingerprints)) == 1:
            return captured
        ordered = in_order_of_arguments(captured)
        others = agree(
            self.world,
            "the nodes of a graph",
            ordered.fingerprint,
            limit_seconds=self.config.compile_timeout_seconds,
        )
        if len(set(others)) > 1:
            raise RanksDifferError(
                "models or inputs (hash of the captured graph)",
                value_by_rank=[each[:16] for each in fingerprints],
            )
        logger.debug("ranks have captured the same nodes in different orders: all take one")
        return ordered

    def _analysis(self, captured: CapturedGraph) -> GraphAnalysis:
        timer = log_step_timer(verbose=self.config.verbose)
        with timer.step("analysis") as details, dumping(self._dump):
            analysis = analyze(
                captured,
                whole_batch=self.config.whole_batch,
                batch_norm=self.config.batch_norm,
                choices=self.follows_choices,
                where_rows_meet=batch_dim_check(self.config, self.world.size, captured),
            )
            details.append(f"{len(analysis.split.rowwise.graph.nodes)} nodes in stages")
        return analysis

    @property
    def _dump(self) -> GraphDump | None:
        """Where passes write their graphs."""
        config = self.config
        return pass_dump(config.dump_graph_prefix, self.world.rank) if config.dump_graph else None

    def _dry_run(self, graph: GraphToPlan, rows: list[int]) -> NoReturn:
        """Plan for more or fewer ranks than there are, print and save that, and end the process as a success,
        on every rank.
        """
        num_devices = self.config.partitioning_dry_run_np
        # Every rank of that job is expected to bring as many rows as the ranks of this one.
        batch_rows = max(1, sum(rows) * num_devices // len(rows)) if self.config.gather_inputs else rows[0]
        plan = self._make_plan(graph, batch_rows, num_devices)
        if self.world.rank == 0:
            plan_on_ranks.print_plan(plan, self.config.deployment_file)
        # Neither Dynamo nor the user's `except Exception` takes this for a failure.
        raise SystemExit(0)

    def _make_plan(self, graph: GraphToPlan, batch_rows: int, num_devices: int | None = None) -> Plan:
        """Rank 0 plans, for ``num_devices`` (None: the ranks at hand); the others check what they get."""
        analysis = graph.analysis
        dry = num_devices is not None
        loaded = self.config.load_deployment and not dry
        cluster = None if loaded else choose_cluster(self.config, self.world, num_devices=num_devices)
        text, failure = "", None
        # All ranks: a launcher hands Ctrl-C on to each of them, and those that wait for the plan must stay.
        with planning_progress(self.world.rank) as progress:
            profiled = cluster is not None and not dry and measures(self.config, self.world)
            if profiled and self.world.rank != 0:
                assert cluster is not None
                bench = make_bench(
                    graph.timed, settled_for(analysis, self.config, cluster), cluster, self.world.device
                )
                answer_leader(bench, self.world, limit_seconds=self.config.compile_timeout_seconds)
            if self.world.rank == 0:
                try:
                    text = (
                        plan_on_ranks.loaded_text(self.config, analysis)
                        if cluster is None
                        else plan_on_ranks.plan_job(
                            graph,
                            self.config,
                            cluster,
                            self.world,
                            batch_rows=batch_rows,
                            progress=progress,
                            profiled=profiled,
                            check=None if dry else lambda plan: self._check_plan(plan, analysis),
                        ).to_json()
                    )
                    if dry or (self.config.save_deployment and not loaded):
                        plan_on_ranks.save_plan(text, self.config.deployment_file)
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

    def _check_plan(self, plan: Plan, analysis: GraphAnalysis) -> dict[str, int]:
        """The stage of every node, on each rank for itself: a plan that was loaded is not trusted."""
        return check_plan(
            plan,
            analysis.split,
            analysis.captured.inputs,
            config=with_pivots(self.config, analysis),
            fingerprint=analysis.captured.plan_fingerprint,
            world_size=self.world.size,
            device_memory_bytes=device_memory_bytes(self.world),
            possible_schedules=exact_schedules(analysis.split, analysis.needs_grad),
            in_rows={table.fqn for table in analysis.captured.sparse_tables},
        )

    def _place_buffers(self, cut: StageCut, captured: CapturedGraph) -> bool:
        """Note which stages need the buffers that the model changes; whether those of a buffer are others
        than they were.

        A buffer that some graph changes belongs to the stages that make its new value or read it; every other
        one to all ranks.
        """
        before = {name: self.buffer_stages[name] for name in self.changing_buffers}
        for name, stages in cut.buffer_readers(captured.inputs).items():
            self.buffer_stages[name] = self.buffer_stages.get(name, frozenset()) | stages
        for name, stage in cut.buffer_makers.items():
            self.buffer_stages[name] = self.buffer_stages.get(name, frozenset()) | {stage}
            self.changing_buffers.add(name)
        return before != {name: self.buffer_stages[name] for name in self.changing_buffers}

    def _take_ownership(self, plan: Plan, *, fresh: bool) -> None:
        """Bring parameters and buffers to the ranks on which the plan (``fresh`` or that of before) and graphs want them."""
        root = self.root()
        assert root is not None, "the model is gone"
        owners: dict[str, set[int]] = {}
        for stage in plan.stages:
            for name in stage.parameters:
                owners.setdefault(name, set()).update(stage.ranks)
        for name in self.changing_buffers:
            ranks = {rank for index in self.buffer_stages[name] for rank in plan.stages[index].ranks}
            owners[name] = owners.get(name, set()) | ranks  # of a trained parameter with those that read it
        ranks_of = {name: tuple(sorted(ranks)) for name, ranks in owners.items()}
        if fresh:
            self.host_link = None if plan.offload == "none" else counted_host_link(self.world.device)
        updates = self._updates(plan, root, ranks_of) if fresh or self.table is None else self.table.updates
        self.world.monitor.phase("giving parameters to their owners")
        if self.table is not None:
            before: Mapping[str, tuple[int, ...]] | None = self.table.all_updaters
            self.table.offloads = self.host_link is not None
            moved = self.table.transfer(ranks_of, updates)
        else:
            before = None
            if self.states is not None:
                holders = ranks_of | {name: update.updaters for name, update in updates.items()}
                self.states.check_before_move(
                    holders, {parameter: name for name, parameter in root.named_parameters()}
                )
            self.table = ParameterTable.build(root, ranks_of, self.world, self.number, updates)
            self.table.offloads, self.table.written = self.host_link is not None, self.changing_buffers
            self.table.states_on_all_ranks = self.config.states_on_all_ranks
            moved = self.table.settle(self.deferred_values, synchronize=self.config.sync_params_on_init)
        note_values(self.table, updates)
        for follower in (*self.followers, *([self.states] if self.states is not None else [])):
            follower.parameters_moved(self.table, before)
        logger.debug("rank %d gave back %.1f MB of parameters", self.world.rank, moved.freed_bytes / 2**20)
        self.has_moved |= moved.changed

    def _updates(self, plan: Plan, root: nn.Module, owners: Mapping[str, Ranks]) -> dict[str, Update]:
        """Who updates which parameter, where not all owners do. Collective."""
        if not plan.zero_stage or max(map(len, owners.values()), default=1) < 2:
            return {}
        trained = {name: p for name, p in root.named_parameters() if p.requires_grad and name in owners}
        return choose_updates(
            self.world, trained, owners, plan.zero_ngroups, tries_optimizers=self.config.check_optimizers
        )

    def reduce_gradients(self) -> None:
        """Sum gradients that are still each rank's own over their owners. Collective."""
        assert self.table is not None, "not planned yet"
        if self.table.gradients_are_local:
            buckets = next(iter(self.runtimes.values())).buckets
            assert isinstance(buckets, DelayableBuckets), "buckets that cannot be local"
            buckets.reduce()

    def undeploy(self) -> None:
        """Free what steps need (compiled stages, gradients, buffers), and take the parameters off the device;
        the next call plans anew.
        """
        self._forget_plan()
        self.cache = CompileCache()
        if self.table is not None:
            self.table.to_host()
        give_back_memory()

    def _forget_plan(self) -> None:
        self.runtimes.clear()
        self.pool = BufferPool()
        self.plan = self.given = None
        self.buffer_stages.clear()
        self.kept_homes.clear()
        self.changing_buffers.clear()

    def _deployer(self) -> Deployer:
        root = self.root()
        assert root is not None and self.plan is not None and self.table is not None, "not planned yet"
        return Deployer(
            world=watch_transport(self.world, self.config),
            config=self.config.model_copy(update={"schedule": self.schedule})
            if self.schedule is not None
            else self.config,
            plan=self.plan,
            table=self.table,
            tensors=named_tensors(root),
            counter=self.counter,
            cache=self.cache,
            switches=self.switches,
            pool=self.pool,
            host_link=self.host_link,
        )

    def _meter(self, runtime: GraphRuntime) -> StepMeter | None:
        root = self.root()
        if not self.config.num_measured_steps or root is None or self.plan is None:
            return None
        return StepMeter(
            device=self.world.device,
            stages=self.plan.stages_of_rank(self.world.rank),
            num_steps=self.config.num_measured_steps,
            expected_rows=self.plan.batch_rows,
            model_tensors=tuple(named_tensors(root).values()),
            offloads=self.host_link is not None,
            gradient_tensors=runtime.buckets.tensors,
            message_tensors=runtime.message_tensors,
            deliver=self._report_measured,
        )

    def _report_measured(self, records: list[dict[str, Any]]) -> None:
        assert self.plan is not None, "measured before planned"
        self.measured = records[self.world.rank]
        if self.world.rank != 0 or (report := report_of(self.plan, records)) is None:
            return
        logger.info("%s", report.table())
        if self.config.run_file:
            file, text = self.config.run_file, report.to_json()
            try:
                write_text(file, text, what="measured steps", named_by="option run_file")
            except UserInputError as error:
                logger.warning("%s", error)  # no reason to end a run that works


def _without_model(analysis: GraphAnalysis) -> GraphAnalysis:
    """The analysis as a runtime keeps it: what a session holds must not keep its model alive."""
    return replace(analysis, captured=replace(analysis.captured, root_module=nn.Module()))
