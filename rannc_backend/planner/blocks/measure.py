"""Measures blocks and whole stages on this job's devices; all ranks share the work.

In: an analysed graph, its blocks, row counts. Out: `BlockProfile`s and `StageProfile`s
(planner/cost/profile.py).

Terms. A job is that of planner/cost/profile.py. Rank 0 leads: it
says what to measure, and whatever it asks is answered by all (`LeadingProfiler`, `answer_leader`). Jobs are
dealt out over the ranks; in each round every rank is busy, if need be with a job that another rank has too,
so that ranks on one host contend for memory as they will in the run. Not enough memory is a result: the point
has no seconds, and more rows are not tried.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.errors import BYTES_PER_GB
from rannc_backend.log.progress import Progress
from rannc_backend.passes.stage.split_stages import StageGraph, split_stages
from rannc_backend.planner.blocks.block_partitions import needs_grad_in_training
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cost.profile import Job, Point, Setting
from rannc_backend.planner.cost.small_models import stage_compiler
from rannc_backend.runtime.torch_internals import on_busy_device
from rannc_backend.runtime.trace.allocations import AllocationTracker
from rannc_backend.runtime.world import World
from rannc_backend.settings.options import Config
from rannc_backend.stages.compiled_stage import CompileCache, CompiledStage, compile_stage
from rannc_backend.stages.gradient_sink import ScratchGradients

logger = logging.getLogger(__name__)

R = TypeVar("R")

POINT_SECONDS = (
    2.0  # a number of rows is not repeated for longer, nor tried at all when the one before took so long
)
_MEMORY_SHARE = 0.8  # of a device's memory that a measurement may take
# For which a device is kept busy while the host queues a run.
_FIRST_HOST_SECONDS, _MAX_HOST_SECONDS = 2e-3, 50e-3
_MAX_CACHE_BYTES = 40 * 2**20  # a little more than the caches of most CPUs
_MEMORY_WORDS = ("out of memory", "not enough memory", "can't allocate memory")


@dataclass(slots=True, kw_only=True)
class Bench:
    """Measures on this rank. `most_bytes`: what a measurement may take; `num_repeats`: at most so many
    timings of a point; `wide_sums`: gradients of 16 bits go to sums in float32; `is_shared`: all ranks measure, not rank 0
    alone.
    """

    analysis: GraphAnalysis
    device: torch.device
    compiler: str
    num_repeats: int
    most_bytes: float = float("inf")
    wide_sums: bool = False
    is_shared: bool = True
    cache: CompileCache = field(default_factory=CompileCache)
    clock: Callable[[], float] = time.perf_counter
    core_clock: Callable[[], float] = time.process_time
    _others: torch.Tensor | None = field(init=False, default=None)
    _host_seconds: float = field(init=False, default=_FIRST_HOST_SECONDS)

    def sharers(self, world: World) -> int:
        """How many ranks measure, from rank 0 on."""
        return world.size if self.is_shared else 1

    def measure(self, blocks: Sequence[Sequence[str]], job: Job) -> list[Point]:
        """The points of one job; `blocks` are the node names of all blocks."""
        graph = interval_stage(self.analysis, blocks, job.begin, job.end)
        stage = self._compiled(graph, job.budget, job.rows[0])
        points: list[Point] = []
        took = 0.0
        for rows in job.rows:
            if (points and not points[-1].fits) or took > POINT_SECONDS:
                break
            began = self.clock()
            points.append(self._point(graph, stage, rows))
            took = self.clock() - began
        return points

    def _compiled(self, graph: StageGraph, budget: float, rows: int) -> CompiledStage:
        return compile_stage(
            graph,
            needs_grad=needs_grad_in_training(self.analysis),
            requires_grad_parameters=frozenset(self.analysis.trained_parameters),
            fake_mode=self.analysis.captured.fake_mode,
            rows_symbol=self.analysis.captured.rows_symbol,
            compiler=self.compiler,
            activation_budget=budget,
            training=True,
            cache=self.cache,
            rows_hint=rows,
            wide_sums=self.wide_sums,
        )

    def _point(self, graph: StageGraph, stage: CompiledStage, rows: int) -> Point:
        nothing = Point(rows=rows, forward_seconds=None, backward_seconds=None, peak_bytes=None)
        if needed_bytes(graph, stage, self.analysis, rows) > self.most_bytes:
            return nothing
        try:
            return self._timed(graph, stage, rows)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            logger.info("a block does not fit into memory with %d rows", rows)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return nothing

    def _timed(self, graph: StageGraph, stage: CompiledStage, rows: int) -> Point:
        args = example_inputs(graph, self.analysis, rows, self.device)
        # Written, never added to: adding them up is priced apart.
        gradients = stage.scratch_gradients(keep_adding=False)
        peak = self._peak_bytes(stage, args, gradients)  # the first run, which warms up too
        forwards: list[float] = []
        backwards: list[float] = []
        began = self.clock()
        while len(forwards) < self.num_repeats and (not forwards or self.clock() - began < POINT_SECONDS):
            self._use_caches()
            (outputs, saved), seconds = self._timed_run(functools.partial(stage.forward, args))
            forwards.append(seconds)
            grads = [torch.ones_like(outputs[position]) for position in stage.grad_outputs]
            del outputs
            self._use_caches()
            kept = list(saved)
            _, seconds = self._timed_run(functools.partial(stage.backward, kept, grads, gradients))
            backwards.append(seconds)
            del saved, kept, grads
        return Point(
            rows=rows,
            forward_seconds=max(statistics.median(forwards), 0.0),
            backward_seconds=max(statistics.median(backwards), 0.0),
            peak_bytes=peak,
        )

    def _peak_bytes(
        self, stage: CompiledStage, args: Sequence[torch.Tensor], gradients: ScratchGradients
    ) -> int:
        """Most bytes beside the inputs and the gradients of parameters during a forward and a backward."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        tracker = AllocationTracker(args)
        with contextlib.nullcontext() if on_gpu else tracker.following():
            outputs, saved = stage.forward(args)
            tracker.add([*outputs, *saved])
            grads = [torch.ones_like(outputs[position]) for position in stage.grad_outputs]
            del outputs
            kept = list(saved)
            del saved
            stage.backward(kept, grads, gradients)
        if not on_gpu:
            return tracker.peak_bytes
        torch.cuda.synchronize(self.device)
        return max(0, torch.cuda.max_memory_allocated(self.device) - before)

    def _use_caches(self) -> None:
        """In a step other blocks come between two runs of this one and use the caches for weights and
        gradients: as much is used here.
        """
        if self.device.type == "cuda":
            return
        if self._others is None:
            parameters = self.analysis.captured.root_module.parameters()
            others = 2 * sum(parameter.numel() * parameter.element_size() for parameter in parameters)
            self._others = torch.zeros(min(others, _MAX_CACHE_BYTES) // 4)
        self._others.add_(1.0)

    def _timed_run(self, run: Callable[[], R]) -> tuple[R, float]:
        """What ``run`` gives, and its seconds; on a CPU with one thread, those for which this rank had a core.

        Ranks that share cores run at full speed while others wait: the planner counts the cores
        (`Device.core_share`). On a device, its own seconds: in a step the host is ahead of it, and here it is so by as
        much as the slowest run so far needed and half of that.
        """
        if self.device.type == "cuda":
            busy = on_busy_device(run, self.device, self._host_seconds)
            self._host_seconds = min(max(self._host_seconds, 1.5 * busy.host_seconds), _MAX_HOST_SECONDS)
            return busy.result, busy.device_seconds
        now = self.core_clock if torch.get_num_threads() == 1 else self.clock
        start = now()
        result = run()
        return result, now() - start


def measures(config: Config, world: World | None) -> bool:
    """Whether blocks are measured: where that is asked for, or where the plan is for GPUs at hand. The same
    on all ranks.
    """
    if world is None or config.measures_nothing:
        return False
    return config.costs == "measured" or (world.device.type == "cuda" and config.cluster == "local")


def make_bench(analysis: GraphAnalysis, config: Config, cluster: Cluster, device: torch.device) -> Bench:
    """What measures on this rank."""
    limit = config.mem_limit_gb * BYTES_PER_GB or float(cluster.device.memory_bytes)
    return Bench(
        analysis=analysis,
        device=device,
        compiler=stage_compiler(config),
        num_repeats=config.profiling_iter,
        most_bytes=_MEMORY_SHARE * limit,
        wide_sums=config.wide_sums,
        is_shared=config.parallel_profile,
    )


@dataclass(slots=True, kw_only=True)
class LeadingProfiler:
    """Rank 0's side: asks all ranks to measure."""

    bench: Bench
    world: World
    limit_seconds: float
    progress: Progress

    @property
    def setting(self) -> Setting:
        """What measurements depend on here."""
        return setting_of(self.world, self.bench.device, self.bench.compiler, wide_sums=self.bench.wide_sums)

    def measure(self, blocks: Sequence[Sequence[str]], jobs: Sequence[Job]) -> list[list[Point]]:
        """Points of each job, none where measuring failed. Collective: the other ranks are in
        `answer_leader`.

        Args:
            blocks: the node names of all blocks, which the jobs count.
        """
        if not jobs:
            return []
        request = {"blocks": [list(names) for names in blocks], "jobs": [_job_words(job) for job in jobs]}
        self.world.control.broadcast(request, what="what to profile", limit_seconds=self.limit_seconds)
        with self.progress.task(
            "profiling", total=_num_rounds(len(jobs), self.bench.sharers(self.world))
        ) as task:
            return _share_work(
                self.bench, self.world, blocks, jobs, self.limit_seconds, lambda: task.advance(1)
            )

    def close(self) -> None:
        """Let the other ranks go on; afterwards nothing more can be measured."""
        self.world.control.broadcast(None, what="what to profile", limit_seconds=self.limit_seconds)


@contextlib.contextmanager
def leading(
    bench: Bench | None, world: World, *, limit_seconds: float, progress: Progress
) -> Iterator[LeadingProfiler | None]:
    """Rank 0's profiler, which lets the other ranks go on at the end, whatever happened; None without a
    bench.
    """
    if bench is None:
        yield None
        return
    profiler = LeadingProfiler(bench=bench, world=world, limit_seconds=limit_seconds, progress=progress)
    try:
        yield profiler
    finally:
        profiler.close()


def answer_leader(bench: Bench, world: World, *, limit_seconds: float) -> None:
    """The other ranks' side: measure what rank 0 asks for, until it closes. Collective."""
    while True:
        request = world.control.broadcast(None, what="what to profile", limit_seconds=limit_seconds)
        if request is None:
            return
        blocks = tuple(tuple(names) for names in request["blocks"])
        jobs = [_job_from(words) for words in request["jobs"]]
        _share_work(bench, world, blocks, jobs, limit_seconds, lambda: None)


def _share_work(
    bench: Bench,
    world: World,
    blocks: Sequence[Sequence[str]],
    jobs: Sequence[Job],
    limit_seconds: float,
    advance: Callable[[], None],
) -> list[list[Point]]:
    """Every rank measures its jobs round by round; all get all results, the median where several have
    measured one. Ranks that do not share in the work wait for those that do.
    """
    num_sharers = bench.sharers(world)
    own: list[tuple[int, list[dict[str, Any]]]] = []
    for turn in range(_num_rounds(len(jobs), num_sharers)):
        index = (turn * num_sharers + world.rank) % len(jobs)
        world.control.barrier(what="profiling", limit_seconds=limit_seconds)
        if world.rank >= num_sharers:
            continue
        points = _measured_or_none(bench, blocks, jobs[index])
        own.append((index, [point.model_dump() for point in points]))
        advance()
    gathered = world.control.allgather(own, what="profiles", limit_seconds=limit_seconds)
    by_job: list[list[list[Point]]] = [[] for _ in jobs]
    for found in gathered:
        for index, points in found:
            by_job[index].append([Point.model_validate(point) for point in points])
    return [combined(several) for several in by_job]


def _measured_or_none(bench: Bench, blocks: Sequence[Sequence[str]], job: Job) -> list[Point]:
    """A block that fails alone may work in its stage, and the other ranks wait: it is priced without a
    measurement.
    """
    try:
        return bench.measure(blocks, job)
    except Exception as error:  # whatever compilers raise
        logger.warning(
            "blocks %d to %d could not be measured: %s: %s",
            job.begin,
            job.end - 1,
            type(error).__name__,
            error,
        )
        return []


def combined(measurements: Sequence[Sequence[Point]]) -> list[Point]:
    """One list of points from several ranks': medians; where it did not fit on one rank, it does not fit."""
    by_rows: dict[int, list[Point]] = {}
    for points in measurements:
        for point in points:
            by_rows.setdefault(point.rows, []).append(point)
    result = []
    for rows, points in sorted(by_rows.items()):
        fitting = [point for point in points if point.fits]
        if len(fitting) < len(points):
            result.append(Point(rows=rows, forward_seconds=None, backward_seconds=None, peak_bytes=None))
            break
        result.append(
            Point(
                rows=rows,
                forward_seconds=statistics.median(point.forward_seconds or 0.0 for point in fitting),
                backward_seconds=statistics.median(point.backward_seconds or 0.0 for point in fitting),
                peak_bytes=max(point.peak_bytes or 0 for point in fitting),
            )
        )
    return result


def interval_stage(
    analysis: GraphAnalysis, blocks: Sequence[Sequence[str]], begin: int, end: int
) -> StageGraph:
    """Blocks [begin, end) as one stage; `blocks` are the node names of all blocks."""
    bounds = [place for place in (begin, end) if 0 < place < len(blocks)]
    stage_of = {
        name: sum(index >= bound for bound in bounds) for index, names in enumerate(blocks) for name in names
    }
    split = analysis.split
    stages = split_stages(
        split.rowwise,
        split.outputs,
        split.layouts,
        stage_of,
        len(bounds) + 1,
        input_kinds=analysis.input_kinds,
        rows_symbol=analysis.captured.rows_symbol,
    )
    return stages[1 if begin > 0 else 0]


def example_inputs(
    graph: StageGraph, analysis: GraphAnalysis, rows: int, device: torch.device
) -> list[torch.Tensor]:
    """Inputs of a stage: small random numbers, and zeros for integers, which are valid indices anywhere."""
    generator = torch.Generator(device=device).manual_seed(0)
    values = []
    for slot, node in zip(graph.inputs, graph.graph_module.graph.find_nodes(op="placeholder"), strict=True):
        fake = node.meta["val"]
        shape = [_at_rows(size, analysis, rows) for size in fake.shape]
        if fake.is_floating_point():
            value = torch.empty(shape, dtype=fake.dtype, device=device).normal_(std=0.02, generator=generator)
        elif fake.dtype == torch.bool:
            value = torch.ones(shape, dtype=fake.dtype, device=device)
        else:
            value = torch.zeros(shape, dtype=fake.dtype, device=device)
        if slot.kind == "global_rows":
            value.fill_(rows)
        values.append(value)
    return values


def needed_bytes(graph: StageGraph, stage: CompiledStage, analysis: GraphAnalysis, rows: int) -> float:
    """At least what a stage takes: inputs, gradients of parameters, saved values."""
    symbol = analysis.captured.rows_symbol
    total = float(stage.saved_bytes.subs(symbol, rows))
    for slot, node in zip(graph.inputs, graph.graph_module.graph.find_nodes(op="placeholder"), strict=True):
        fake = node.meta["val"]
        size = fake.element_size()
        for dimension in fake.shape:
            size *= _at_rows(dimension, analysis, rows)
        total += size * (2 if slot.kind == "parameter" else 1)
    return total


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(word in str(error).lower() for word in _MEMORY_WORDS)


def setting_of(world: World, device: torch.device, compiler: str, *, wide_sums: bool = False) -> Setting:
    """What measurements here depend on."""
    sharing = 1
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        sharing = world.hosts.count(world.hosts[world.rank])
    return Setting(
        device_name=name,
        compiler=compiler,  # type: ignore[arg-type]
        versions=f"torch {torch.__version__}{', sums in float32' if wide_sums else ''}",
        num_sharing=sharing,
    )


def _at_rows(size: Any, analysis: GraphAnalysis, rows: int) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.expr.subs(analysis.captured.rows_symbol, rows))


def _num_rounds(num_jobs: int, num_ranks: int) -> int:
    return -(-num_jobs // num_ranks)


def _job_words(job: Job) -> dict[str, Any]:
    return {"begin": job.begin, "end": job.end, "budget": job.budget, "rows": list(job.rows)}


def _job_from(words: Mapping[str, Any]) -> Job:
    return Job(begin=words["begin"], end=words["end"], budget=words["budget"], rows=tuple(words["rows"]))
