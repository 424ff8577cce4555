"""Which prices a plan is made with: analytic ones, measured ones, or what a file says.

In: an analysed graph, options, cluster, and the ranks if there are any. Out: a function that gives a `BlockPricer` for a block graph,
and a loop that plans again with whole stages measured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rannc_backend.analysis import GraphAnalysis
from rannc_backend.block_partitions import partition_blocks
from rannc_backend.config import Config
from rannc_backend.cost.cluster import Cluster
from rannc_backend.cost.measured_pricing import MeasuredPricer
from rannc_backend.cost.pricing import AnalyticPricer, BlockPricer
from rannc_backend.cost.profile import BlockProfile, Point, Profile, Setting, StageProfile
from rannc_backend.deployment_file import write_text
from rannc_backend.errors import ProfileError
from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.ir.plan import Plan
from rannc_backend.measured import RunReport
from rannc_backend.profiling import Bench, Job, LeadingProfiler, setting_of
from rannc_backend.progress import Progress
from rannc_backend.runtime.world import World

logger = logging.getLogger(__name__)

NUM_POINTS = 4
MAX_ROUNDS = 3
_MEMORY_SHARE = 0.8  # of a device's memory that a measurement may take


def stage_compiler(config: Config) -> str:
    """The compiler of stages that the options ask for."""
    return "inductor" if config.stage_compiler == "auto" else config.stage_compiler


def measures(config: Config, world: World | None) -> bool:
    """Whether blocks are measured: where it is asked for, or where devices are GPUs. The same on all ranks."""
    if world is None or config.costs == "analytic":
        return False
    return config.costs == "measured" or world.device.type == "cuda"


def make_bench(analysis: GraphAnalysis, config: Config, cluster: Cluster, device: torch.device) -> Bench:
    """What measures on this rank."""
    limit = config.mem_limit_gb * 2**30 or float(cluster.device.memory_bytes)
    return Bench(
        analysis=analysis,
        device=device,
        compiler=stage_compiler(config),
        num_repeats=config.profiling_iter,
        most_bytes=_MEMORY_SHARE * limit,
    )


@dataclass(slots=True, kw_only=True)
class Pricing:
    """Makes the pricer of one plan, on rank 0; the other ranks are in `profiling.answer_leader` if `measures` says so."""

    analysis: GraphAnalysis
    config: Config
    cluster: Cluster
    batch_rows: int
    progress: Progress
    world: World | None = None
    num_measured: int = field(init=False, default=0)  # jobs so far
    _pricer: BlockPricer | None = field(init=False, default=None)
    _graph: BlockGraph | None = field(init=False, default=None)
    _profile: Profile = field(init=False, default_factory=Profile)

    def plan(self, graph: BlockGraph, plan_once: Callable[[BlockPricer], Plan]) -> Plan:
        """Price the blocks and plan; with profile_by_acc off, plan again with the stages of the plan measured, until it stays the same.

        The other ranks are let go on then, whatever happens; nothing is measured afterwards.
        """
        try:
            plan = plan_once(self.pricer(graph))
            if not self._measures or self.config.profile_by_acc or not graph.blocks:
                return plan
            for _ in range(MAX_ROUNDS):
                if self.progress.cancelled() or not self._measure_stages(plan):
                    break
                before, plan = plan, plan_once(self.pricer(graph))
                if _cuts(plan) == _cuts(before):
                    break
            return plan
        finally:
            if self._measures:
                self._profiler(()).close()

    @property
    def _measures(self) -> bool:
        return measures(self.config, self.world)

    def pricer(self, graph: BlockGraph) -> BlockPricer:
        """The pricer of a block graph: measures what is not known yet, the first time."""
        if self._pricer is None or self._graph is not graph:
            self._graph = graph
            self._pricer = self._make(graph)
        return self._pricer

    def _make(self, graph: BlockGraph) -> BlockPricer:
        config = self.config
        compiler = stage_compiler(config)
        rows = max(2, self.batch_rows // self.cluster.num_devices)
        analytic = AnalyticPricer(
            device=self.cluster.device,
            partitions=partition_blocks(self.analysis, graph, compiler=compiler, rows=rows, budget=config.fixed_recompute)
            if graph.blocks
            else None,
            holds_gradients=compiler == "inductor",
        )
        if config.costs == "analytic" or not graph.blocks:
            return analytic
        runs = self._read_file()
        if self._measures:
            assert self.world is not None
            setting = setting_of(self.world, self.world.device, compiler)
            self._measure_blocks(graph, setting)
        else:
            setting = self._setting_of_file(compiler)
            if config.costs == "measured" and setting is None and not runs:
                raise ProfileError(
                    "costs 'measured' needs ranks to measure on, or a profile_file with measurements for this stage_compiler",
                    cure="plan with costs='analytic', or set profile_file to what a run has measured",
                )
        profiles = self._profile.of_setting(setting) if setting is not None else {}
        missing = {block.structure for block in graph.blocks} - {structure for structure, _ in profiles}
        if profiles and missing:
            logger.warning("%d distinct blocks are not in the profile and are priced by rules", len(missing))
        measured = MeasuredPricer(
            fallback=analytic, profiles=profiles, device_name=setting.device_name if setting else self.cluster.device.name
        )
        return measured.corrected(graph.blocks, (*self._profile.stages, *runs)) if (self._profile.stages or runs) else measured

    def _profiler(self, blocks: tuple[tuple[str, ...], ...]) -> LeadingProfiler:
        assert self.world is not None
        return LeadingProfiler(
            bench=make_bench(self.analysis, self.config, self.cluster, self.world.device),
            blocks=blocks,
            world=self.world,
            limit_seconds=self.config.compile_timeout_seconds,
            progress=self.progress,
        )

    def _measure(self, graph: BlockGraph, jobs: Sequence[Job]) -> list[list[Point]]:
        self.num_measured += len(jobs)
        return self._profiler(tuple(block.nodes for block in graph.blocks)).measure(jobs)

    def _measure_blocks(self, graph: BlockGraph, setting: Setting) -> None:
        """Measure the distinct blocks that are not in the profile at the rows that matter."""
        known = self._profile.of_setting(setting)
        wanted = rows_to_measure(self.batch_rows, self.config, self.cluster.num_devices)
        firsts = {block.structure: block for block in reversed(graph.blocks)}
        jobs, structures = [], []
        for structure, block in sorted(firsts.items(), key=lambda item: item[1].index):
            if not _covers(known.get((structure, 1.0)), wanted):
                jobs.append(Job(begin=block.index, end=block.index + 1, budget=1.0, rows=wanted))
                structures.append(structure)
        logger.info("%d distinct blocks: %d to be measured, the others are in the profile", len(firsts), len(jobs))
        found = [
            BlockProfile(structure=structure, budget=1.0, setting=setting, points=tuple(points))
            for structure, points in zip(structures, self._measure(graph, jobs), strict=True)
        ]
        if found:
            self._profile = self._profile.with_blocks(found)
            self._write_file()

    def _measure_stages(self, plan: Plan) -> bool:
        """Measure the plan's stages as a whole; whether one was new."""
        assert self._graph is not None and isinstance(self._pricer, MeasuredPricer)
        graph, world = self._graph, self.world
        assert world is not None
        setting = setting_of(world, world.device, stage_compiler(self.config))
        jobs, begin = [], 0
        known = {(item.structures, item.budget, item.point.rows) for item in self._profile.stages if item.setting == setting}
        for stage in plan.stages:
            end = begin + len(stage.blocks)
            rows = math.ceil(math.ceil(plan.batch_rows / plan.num_micro_batches) / len(stage.ranks))
            budget = stage.recompute if stage.recompute in self._pricer.budgets else 1.0
            structures = tuple(block.structure for block in graph.blocks[begin:end])
            if end > begin and (structures, budget, rows) not in known:
                known.add((structures, budget, rows))
                jobs.append(Job(begin=begin, end=end, budget=budget, rows=(rows,)))
            begin = end
        found = [
            StageProfile(
                fingerprint=plan.fingerprint,
                structures=tuple(block.structure for block in graph.blocks[job.begin : job.end]),
                budget=job.budget,
                setting=setting,
                point=points[0],
            )
            for job, points in zip(jobs, self._measure(graph, jobs), strict=True)
        ]
        if found:
            self._profile = self._profile.with_stages(found)
            self._write_file()
            self._pricer = self._pricer.corrected(graph.blocks, self._profile.stages)
        return bool(found)

    def _read_file(self) -> tuple[StageProfile, ...]:
        """Fill the profile from the file; give the stages of a run's report, if it is one."""
        path = self.config.profile_file
        if not path or not Path(path).exists():
            return ()
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"cannot read {path!r}: {error}", cure="give the path of a readable file") from None
        if '"rannc run"' in text[:1000]:
            return stages_of_run(RunReport.from_json(text), stage_compiler(self.config))
        self._profile = Profile.from_json(text, where=repr(path))
        return ()

    def _write_file(self) -> None:
        if self.config.profile_file:
            write_text(self.config.profile_file, self._profile.to_json(), what="profile")

    def _setting_of_file(self, compiler: str) -> Setting | None:
        """The setting to use without ranks: that of the cluster's device, else the only one."""
        found = list(dict.fromkeys(item.setting for item in self._profile.blocks if item.setting.compiler == compiler))
        named = [item for item in found if item.device_name == self.cluster.device.name]
        chosen = named or found
        return chosen[0] if len(chosen) == 1 or named else None


def stages_of_run(report: RunReport, compiler: str) -> tuple[StageProfile, ...]:
    """What a run has measured, as whole stages; a run with other batches than planned says nothing."""
    if not report.comparable:
        logger.warning("the measured run had other batches than its plan and is not used")
        return ()
    setting = Setting(device_name=report.device_name, compiler=compiler, versions="", num_sharing=1)  # type: ignore[arg-type]
    return tuple(
        StageProfile(
            fingerprint=report.fingerprint,
            structures=stage.structures,
            budget=stage.recompute,
            setting=setting,
            point=Point(
                rows=stage.rows,
                forward_seconds=stage.forward_seconds,
                backward_seconds=stage.backward_seconds,
                peak_bytes=stage.peak_bytes,
            ),
        )
        for stage in report.stages
        if stage.structures
    )


def rows_to_measure(batch_rows: int, config: Config, num_devices: int) -> tuple[int, ...]:
    """A few numbers of rows of a replica, from the fewest that a plan can have to the most, evenly by ratio."""
    fewest_micro_batches = config.pipeline_num or config.min_pipeline
    most_micro_batches = config.pipeline_num or config.max_pipeline
    most = max(1, batch_rows // fewest_micro_batches)
    fewest = min(most, max(1, batch_rows // (most_micro_batches * num_devices)))
    ratio = (most / fewest) ** (1 / (NUM_POINTS - 1))
    return tuple(sorted({round(fewest * ratio**place) for place in range(NUM_POINTS)}))


def _covers(profile: BlockProfile | None, wanted: Sequence[int]) -> bool:
    """Whether the measured points reach from the fewest to the most rows that are wanted."""
    if profile is None:
        return False
    rows = [point.rows for point in profile.points]
    # More rows than the most measured were too slow to try or did not fit; measuring again would stop there too.
    return rows[0] <= 2 * wanted[0] and (rows[-1] >= wanted[-1] / 2 or not profile.points[-1].fits or _was_slow(profile))


def _was_slow(profile: BlockProfile) -> bool:
    last = profile.points[-1]
    return (last.forward_seconds or 0.0) + (last.backward_seconds or 0.0) > 0.2


def _cuts(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return (
        tuple(len(stage.blocks) for stage in plan.stages),
        tuple(len(stage.ranks) for stage in plan.stages),
        (plan.num_micro_batches,),
    )
