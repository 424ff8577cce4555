"""From an analysed graph and a plan to what this rank runs.

In: a `GraphAnalysis`, the stage of every node, the ranks of every stage. Out: a `GraphRuntime` with the edges
between endpoints, a factory that compiles this rank's stage, and one that makes its verified programs.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.capture.errors import own_errors_only
from rannc_backend.errors import UnsupportedModelError, user_location
from rannc_backend.ir.action import OUTPUT, GraphUse, OrderedMessage, Program
from rannc_backend.ir.graph_input import ParameterInput, ReplicatedInput, StateInput, UserInput
from rannc_backend.ir.plan import Plan
from rannc_backend.ir.plan_checks import lane_text
from rannc_backend.ir.updates import ranks_of_updates
from rannc_backend.log.step_timer import log_step_timer
from rannc_backend.passes.batch.batch_split import (
    ReplicatedOutput,
    UserReplicated,
    UserRows,
    UserScalar,
    UserUnavailable,
)
from rannc_backend.passes.graph_queries import output_values, placeholders
from rannc_backend.passes.kept_functions import noting_calls
from rannc_backend.passes.pipeline import dumping
from rannc_backend.planner.plan_fits_graph import choose_schedule
from rannc_backend.runtime.comm.checked import describe_values
from rannc_backend.runtime.comm.host_link import HostLink
from rannc_backend.runtime.gradients.bucket_layout import Division, plan_buckets
from rannc_backend.runtime.gradients.bucket_reductions import BucketReductions, DeferredReductions, SumFormat
from rannc_backend.runtime.gradients.buckets import BufferPool
from rannc_backend.runtime.gradients.delayed_reduction import DelayableBuckets
from rannc_backend.runtime.parameters import STATE_CHANNEL, ParameterTable
from rannc_backend.runtime.rows import RowTable
from rannc_backend.runtime.shared_buffers import SharedBuffers
from rannc_backend.runtime.step.executor import Executor
from rannc_backend.runtime.step.graph_runtime import GraphRuntime
from rannc_backend.runtime.step.graph_settings import RuntimeSettings, StepCounter
from rannc_backend.runtime.step.messages import boundary_wire
from rannc_backend.runtime.step.queue_order import routes_of
from rannc_backend.runtime.step.rehearsal import Rehearsal
from rannc_backend.runtime.step.scalars import ScalarGraphs, SumSpec
from rannc_backend.runtime.step.send_buffers import SendBuffers, stored_names
from rannc_backend.runtime.step.step_state import (
    ConstantOutput,
    DeliveredRows,
    NotDelivered,
    Replicated,
    RuntimeOutput,
    Scalar,
    StepShapes,
)
from rannc_backend.runtime.switches import Switches
from rannc_backend.runtime.torch_internals import trace_artifact
from rannc_backend.runtime.trace.copy_report import CopyLog
from rannc_backend.runtime.world import World
from rannc_backend.schedule.description import Schedule
from rannc_backend.schedule.lowering import lower_lanes
from rannc_backend.schedule.message_order import message_order
from rannc_backend.schedule.orders import order_on, schedule_named
from rannc_backend.schedule.plan_simulation import schedule_of
from rannc_backend.schedule.verify import verify
from rannc_backend.settings.options import Config
from rannc_backend.stages.checked_stage import watched
from rannc_backend.stages.compiled_stage import CompileCache, CompiledStage, compile_stage
from rannc_backend.stages.cut_stages import StageCut, backward_order, edge_specs, edges_of
from rannc_backend.stages.graph_dump import dump_graphs, pass_dump

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployer:
    """Everything that the graphs of one model share when they are deployed on this rank."""

    world: World
    config: Config
    plan: Plan
    table: ParameterTable
    tensors: Mapping[str, torch.Tensor]
    counter: StepCounter
    cache: CompileCache
    switches: Switches
    pool: BufferPool
    host_link: HostLink | None = None

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each stage."""
        return tuple(stage.ranks for stage in self.plan.stages)

    @property
    def own_stages(self) -> tuple[int, ...]:
        """The stages that this rank computes; none where the plan has no work for it."""
        return self.plan.stages_of_rank(self.world.rank)

    def deploy(self, analysis: GraphAnalysis, cut: StageCut, label: str) -> GraphRuntime:
        """The runtime of one graph. Collective: makes the channels that the graph needs."""
        groups = sorted(
            {
                tuple(range(self.world.size)),
                *self.stage_ranks,
                *self.table.owners.values(),
                *ranks_of_updates(self.table.updates.values()),
            }
        )
        routes = routes_of(cut.edges, self.stage_ranks, self.world.size)
        self.world.transport.prepare(channels=[STATE_CHANNEL], routes=routes, groups=groups)
        reductions = BucketReductions.of(
            self.world.transport,
            sorted({*self.stage_ranks, *self.table.owners.values()}),
            # What is freed after each step would have to be shared anew in the next one.
            shared_memory=self.config.shared_memory and self.plan.zero_stage < 2 and self.host_link is None,
            rank=self.world.rank,
            limit_seconds=self.config.step_timeout_seconds,
            sum_format=SumFormat.of(self.config),
            num_communicators=self.config.num_communicators,
            pool=self.pool,
        )
        if self.config.dump_graph and self.world.rank == 0:
            paths = dump_graphs(
                self.config.dump_graph_prefix, label, analysis.captured.graph_module, cut.graphs
            )
            logger.info("%s and its stages are written to %s", label, ", ".join(paths))
        for index in self.own_stages:
            trace_artifact(
                f"rannc_stage_{index}_of_{label}",
                "string",
                functools.partial(cut.graphs[index].graph_module.print_readable, print_output=False),
            )
        shapes_at = self._shapes_at(analysis, cut)
        shapes = shapes_at(tuple(length.hint for length in analysis.captured.lengths), True)
        outputs = shapes.outputs
        losses = [
            i for i, output in enumerate(outputs) if isinstance(output, Scalar) and output.differentiable
        ]
        # Of this graph, not of the plan: the planned graph may have been one without a loss.
        is_first = self.world.rank == 0
        name = choose_schedule(analysis.split, analysis.needs_grad, self.config, says_so=is_first)
        schedule = schedule_of(self.plan) if name == self.plan.schedule else schedule_named(name)
        return GraphRuntime(
            label=label,
            world=self.world,
            settings=self._settings(analysis, schedule),
            counter=self.counter,
            inputs=self._inputs(analysis),
            outputs=outputs,
            scalars=shapes.scalars,
            shapes_at=shapes_at,
            buckets=self._buckets(analysis, cut, reductions),
            shared_buffers=SharedBuffers(
                table=self.table,
                sources={name: self.stage_ranks[stage][0] for name, stage in cut.buffer_makers.items()},
                tensors=self.tensors,
                limit_seconds=self.config.step_timeout_seconds,
            ),
            make_executor=self._executor_factory(analysis, cut, schedule),
            make_program=self._program_factory(cut, schedule),
            loss_index=losses[0] if losses else None,
            copies=CopyLog(
                label=label, world=self.world, stage_ranks=self.stage_ranks, verbose=self.config.verbose
            ),
            rehearsal=Rehearsal.of(self.world, cut.edges),
            is_random=any(name == "rng_seed" for name in analysis.input_kinds),
            noting_calls=noting_calls,
            switches=self.switches,
        )

    def _shapes_at(
        self, analysis: GraphAnalysis, cut: StageCut
    ) -> Callable[[tuple[int, ...], bool], StepShapes]:
        @functools.lru_cache(maxsize=4096)
        def at(lengths: tuple[int, ...], training: bool) -> StepShapes:
            delivers = any(destination == OUTPUT for _, destination in cut.edges_in(training=training))
            return StepShapes(
                lengths=lengths,
                edges=edges_of(analysis, cut.graphs, all_outputs=delivers, lengths=lengths),
                outputs=self._outputs(analysis, cut, lengths, delivers=delivers),
                scalars=_scalar_graphs(analysis, lengths),
            )

        return at

    def _settings(self, analysis: GraphAnalysis, schedule: Schedule) -> RuntimeSettings:
        config = self.config
        return RuntimeSettings(
            stage_ranks=self.stage_ranks,
            num_micro_batches=self._num_micro_batches(analysis),
            eager_backward=schedule.eager_backward,
            narrow_range=analysis.has_narrow_range
            or "fp16" in (config.gradient_dtype, config.boundary_dtype),
            gather_inputs=config.gather_inputs,
            mean_gradients=config.mean_gradients,
            step_limit_seconds=config.step_timeout_seconds,
            compile_limit_seconds=config.compile_timeout_seconds,
            size_tests=analysis.captured.size_tests,
            lengths=analysis.captured.lengths,
            reach=analysis.reach,
            rows_per_slice=analysis.rows_per_slice,
        )

    def _num_micro_batches(self, analysis: GraphAnalysis) -> int:
        """Of a step with enough rows. Raises UnsupportedModelError where the whole batch has no place."""
        whole, most = analysis.split.whole_batch, max(map(len, self.stage_ranks))
        if whole is None:
            return analysis.micro_batches_of(self.config.pipeline_num or self.plan.num_micro_batches, most)
        if most > 1:
            raise UnsupportedModelError(
                f"operator {whole.operator} mixes the samples of a batch ({whole.reason}), which needs the "
                "whole batch on one replica, and the plan of an earlier call of this model has several",
                location=user_location(whole.stack_trace),
                cure="make the first call one that mixes samples too, or set replica_num to 1.",
            )
        return 1

    def _inputs(self, analysis: GraphAnalysis) -> tuple[UserInput, ...]:
        specs = tuple(spec for spec in analysis.captured.inputs if isinstance(spec, UserInput))
        for spec in specs:
            if isinstance(spec, ReplicatedInput) and spec.requires_grad:
                raise UnsupportedModelError(
                    f"input {spec.name} has no batch dimension and requires a gradient",
                    cure="make it a parameter of the model, or give it a batch dimension",
                )
        return specs

    def _outputs(
        self, analysis: GraphAnalysis, cut: StageCut, lengths: tuple[int, ...], *, delivers: bool
    ) -> tuple[RuntimeOutput, ...]:
        scalars = analysis.differentiable_scalars
        maker = {
            slot.name: graph.index
            for graph in cut.graphs
            for slot in graph.outputs
            if isinstance(slot, ReplicatedOutput)
        }
        results: list[RuntimeOutput] = []
        for output in analysis.split.user_outputs:
            match output:
                case UserRows() if delivers:
                    value = analysis.value(output.name, lengths)
                    differentiable = output.name in analysis.needs_grad
                    results.append(DeliveredRows(value=value, differentiable=differentiable))
                case UserRows():
                    results.append(NotDelivered(why=cut.left_out.why, is_left_out=True))
                case UserScalar():
                    results.append(Scalar(index=output.index, differentiable=output.index in scalars))
                case UserReplicated():
                    results.append(self._replicated_output(analysis, output.name, maker, lengths))
                case UserUnavailable():
                    results.append(NotDelivered(why=output.why, is_left_out=False))
                case _:
                    constant = output.value
                    if isinstance(constant, sympy.Expr):
                        constant = analysis.size_at(constant, lengths)
                    results.append(ConstantOutput(constant=constant))
        return tuple(results)

    def _replicated_output(
        self, analysis: GraphAnalysis, name: str, maker: Mapping[str, int], lengths: tuple[int, ...]
    ) -> Replicated:
        if name in analysis.needs_grad:
            raise UnsupportedModelError(
                f"output {name} does not depend on the batch but requires a gradient",
                cure="return it detached, or compute it outside the compiled model",
            )
        fake = analysis.node(name).meta["val"]
        return Replicated(
            name=name,
            root=self.stage_ranks[maker[name]][0],
            dtype=fake.dtype,
            shape=analysis.sizes_at(fake.shape, lengths),
        )

    def _buckets(
        self, analysis: GraphAnalysis, cut: StageCut, reductions: BucketReductions
    ) -> DelayableBuckets:
        capacity_bytes, start = self.config.bucket_mb * 2**20, reductions.start
        # Of several stages the last comes first, as in their backwards.
        orders = [backward_order(cut.graphs[index]) for index in reversed(self.own_stages)]
        own_order = list(dict.fromkeys(itertools.chain(*orders)))
        names = analysis.parameters_with_gradient
        owned = [fqn for fqn in names.values() if self.own_stages and self.table.owns(fqn)]
        rank_of = {names[name]: place for place, name in enumerate(own_order) if name in names}
        owned.sort(key=lambda fqn: (rank_of.get(fqn, len(rank_of)), fqn))
        ranks = self.stage_ranks[self.own_stages[0]] if self.own_stages else ()
        tables = {table.fqn for table in analysis.captured.sparse_tables}
        keeps_all = self.plan.zero_stage < 2
        division = Division(updates=self.table.updates, rank=self.world.rank, keeps_all=keeps_all)
        layout = plan_buckets(
            [(fqn, self.tensors[fqn]) for fqn in owned if fqn not in tables],
            self.table.owners,
            ranks,
            capacity_bytes,
            division,
            max_buckets=self.config.max_buckets,
            wide_sums=self.config.wide_sums,
            device=self.world.device,
        )
        return DelayableBuckets(
            layout=layout,
            parameters={fqn: self.tensors[fqn] for fqn in owned},
            stage_ranks=ranks,
            start_reduce=start if not self.config.sync_allreduce else DeferredReductions(start),
            new_buffer=reductions.new_buffer,
            table=self.table,
            switches=self.switches,
            capacity_bytes=capacity_bytes,
            max_buckets=self.config.max_buckets,
            wide_sums=self.config.wide_sums,
            pool=self.pool,
            host_link=self.host_link,
            table_owners={fqn: self.table.owners[fqn] for fqn in owned if fqn in tables},
            division=division,
        )

    def _executor_factory(
        self, analysis: GraphAnalysis, cut: StageCut, schedule: Schedule
    ) -> Callable[[GraphUse, RowTable, tuple[int, ...]], Executor]:
        graphs = [cut.graphs[index] for index in self.own_stages]
        names = {slot.name for graph in graphs for slot in graph.inputs}
        inputs = analysis.captured.inputs
        own = [spec for spec in inputs if isinstance(spec, StateInput) and spec.name in names]
        tensors = {spec.name: self.tensors[spec.fqn] for spec in own}
        made_here = {graph.index: graph.updated_buffers for graph in graphs}
        send_buffers = SendBuffers(self.world.device)
        wire = boundary_wire(self.config.boundary_dtype, self.world.device)

        def make(use: GraphUse, rows: RowTable, lengths: tuple[int, ...]) -> Executor:
            config = self.config
            dump = pass_dump(config.dump_graph_prefix, self.world.rank) if config.dump_graph else None
            stages = {}
            for index in self.own_stages:
                start, stop = rows.interval(index, self.world.rank, 0)
                with own_errors_only(), dumping(dump):
                    compiled = functools.partial(
                        self._compile,
                        analysis,
                        cut,
                        index,
                        use,
                        stop - start,
                        lengths,
                        schedule.splits_backward,
                    )
                    stages[index] = watched(
                        compiled,
                        self.plan.stages[index].recompute,
                        index,
                        config,
                        is_trained=use.is_trained,
                        rank=self.world.rank,
                        step=lambda: self.counter.number,
                        describe=describe_values,
                    )
            return Executor(
                world=self.world,
                stages=stages,
                send_buffers=send_buffers,
                edges=cut.edges_in(training=use.is_trained),
                tensors=tensors,
                buffers={fqn: self.tensors[fqn] for fqns in made_here.values() for fqn in fqns},
                made_buffers={
                    index: frozenset(spec.name for spec in own if spec.fqn in fqns)
                    for index, fqns in made_here.items()
                },
                parameter_names={spec.name: spec.fqn for spec in own if isinstance(spec, ParameterInput)},
                updated_buffers=frozenset(spec.name for spec in own if spec.fqn in cut.buffer_makers),
                limit_seconds=self.config.step_timeout_seconds,
                host_link=self.host_link,
                boundary_wire=wire,
            )

        return make

    def _compile(
        self,
        analysis: GraphAnalysis,
        cut: StageCut,
        index: int,
        use: GraphUse,
        num_rows: int,
        lengths: tuple[int, ...],
        splits_backward: bool,
        budget: float,
    ) -> CompiledStage:
        graph = cut.graphs[index]
        edges, names = cut.edges_in(training=use.is_trained), [slot.name for slot in graph.outputs]
        stored, stored_gradients = stored_names(
            edges, graph.index, names, boundary_wire(self.config.boundary_dtype, self.world.device)
        )
        needs_grad = analysis.needs_grad - (
            graph.outputs_for_the_user_alone if use is GraphUse.LOSS else frozenset()
        )
        compiler = self.plan.stage_compiler
        with log_step_timer(verbose=self.config.verbose).step("compile") as details:
            details += [f"stage {graph.index}", use, compiler]
            return compile_stage(
                graph,
                needs_grad=needs_grad,
                requires_grad_parameters=frozenset(analysis.trained_parameters),
                fake_mode=analysis.captured.fake_mode,
                rows_symbol=analysis.captured.rows_symbol,
                compiler=compiler,
                activation_budget=budget,
                training=use.is_trained,
                cache=self.cache,
                rows_hint=num_rows,
                length_hints=analysis.named_lengths(lengths),
                stored=stored,
                stored_gradients=stored_gradients,
                splits_backward=splits_backward,
                wide_sums=self.config.wide_sums,
                sparse=frozenset(table.name for table in analysis.captured.sparse_tables),
            )

    def _program_factory(
        self, cut: StageCut, schedule: Schedule
    ) -> Callable[[GraphUse, str, int], tuple[Program, tuple[OrderedMessage, ...]]]:
        @own_errors_only()
        def make(
            use: GraphUse, phase: Any, num_micro_batches: int
        ) -> tuple[Program, tuple[OrderedMessage, ...]]:
            num_stages, lanes = len(cut.graphs), self.plan.lanes
            specs = edge_specs(cut.edges_in(training=use.is_trained))
            order = order_on(schedule, lanes, num_micro_batches)
            programs = lower_lanes(order, specs, phase, num_micro_batches)
            # Without their backwards, or before them, all micro-batches are kept.
            bounds = schedule.in_flight_bounds(num_stages, num_micro_batches) if phase == "train" else None
            kept = schedule.kept_bounds(num_stages, num_micro_batches) if schedule.splits_backward else None
            verify(
                programs,
                specs,
                num_micro_batches,
                phase,
                max_in_flight=bounds,
                max_kept=kept,
                lanes=lanes,
            )
            # Ranks without a stage: only the roles that every rank has, owner of input rows and of output
            # rows.
            without_stage = tuple(action for action in programs[0] if action.stage < 0)
            ordered: tuple[OrderedMessage, ...] = ()
            if self.world.runs_behind and self.world.size > 1:
                some_idle = self.plan.num_working_ranks < self.world.size
                ordered = message_order({**programs, len(lanes): without_stage} if some_idle else programs)
            if not self.own_stages:
                return without_stage, ordered
            program = programs[lanes.index(self.own_stages)]
            trace_artifact(
                f"rannc_program_of_stage_{'_'.join(map(str, self.own_stages))}_{use}_{phase}",
                "string",
                lambda: "\n".join(map(str, program)),
            )
            if self.config.print_program:
                text = " ".join(map(str, program))
                logger.info("program of %s, %s: %s", lane_text(self.own_stages), phase, text)
            return program, ordered

        return make


def _scalar_graphs(analysis: GraphAnalysis, lengths: tuple[int, ...]) -> ScalarGraphs:
    split = analysis.split
    partial_names = split.partial_names
    fakes = {node.name: node.meta.get("val") for node in split.rowwise.graph.nodes}
    prologue_outputs = output_values(split.prologue.graph) if split.prologue is not None else ()
    return ScalarGraphs(
        prologue=split.prologue,
        prologue_inputs=_placeholders(split.prologue),
        prologue_sums=tuple(
            _sum_spec(analysis, lengths, name, node.meta["val"])
            for name, node in zip(split.prologue_sums, prologue_outputs, strict=True)
        ),
        epilogue=split.epilogue,
        epilogue_inputs=_placeholders(split.epilogue),
        partials=tuple(
            _sum_spec(analysis, lengths, name, fakes[name]) for name in dict.fromkeys(partial_names)
        ),
        linear=split.linear,
    )


def _placeholders(graph_module: torch.fx.GraphModule | None) -> tuple[str, ...]:
    return () if graph_module is None else tuple(node.name for node in placeholders(graph_module.graph))


def _sum_spec(analysis: GraphAnalysis, lengths: tuple[int, ...], name: str, fake: torch.Tensor) -> SumSpec:
    return SumSpec(name=name, dtype=fake.dtype, shape=analysis.sizes_at(fake.shape, lengths))
