"""Which prices a plan is made with: analytic ones, measured ones, or what a file says.

In: blocks and their partitions, options, cluster, and a profiler if there are ranks to measure on. Out: a
`BlockPricer`, and a loop that plans again with whole stages measured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rannc_backend.errors import ProfileError
from rannc_backend.ir.block_graph import BlockGraph
from rannc_backend.ir.plan import Plan
from rannc_backend.ir.plan_file import write_text
from rannc_backend.planner.cluster.cluster import Cluster
from rannc_backend.planner.cost.measured_pricing import MeasuredPricer
from rannc_backend.planner.cost.pricing import AnalyticPricer, BlockPricer, Partitions, replica_rows
from rannc_backend.planner.cost.profile import BlockProfile, Job, Point, Profile, Setting, StageProfile
from rannc_backend.planner.cost.small_models import stage_compiler
from rannc_backend.report.run_report import RunReport
from rannc_backend.settings.choices import SEGMENTS_BUDGET
from rannc_backend.settings.options import Config
from rannc_backend.settings.user_files import UserFile, kind_of, read_text

if TYPE_CHECKING:
    from rannc_backend.planner.blocks.measure import LeadingProfiler

logger = logging.getLogger(__name__)

_MAX_PROFILE_BYTES = 2**28

NUM_POINTS = 4
MAX_ROUNDS = 3


def analytic_pricer(partitions: Partitions, config: Config, cluster: Cluster) -> AnalyticPricer:
    """Prices as the cluster is described."""
    holds = stage_compiler(config) == "inductor"
    return AnalyticPricer(device=cluster.device, partitions=partitions, holds_gradients=holds)


@dataclass(slots=True, kw_only=True)
class Pricing:
    """Makes the pricer of one plan. `profiler`: measures on all ranks; None: nothing can be measured here."""

    graph: BlockGraph
    partitions: Partitions
    config: Config
    cluster: Cluster
    batch_rows: int
    profiler: LeadingProfiler | None = None
    num_measured: int = field(init=False, default=0)  # jobs so far
    _pricer: BlockPricer | None = field(init=False, default=None)
    _profile: Profile = field(init=False, default_factory=Profile)
    _measured: list[StageProfile] = field(init=False, default_factory=list)  # here, not in an earlier run

    def plan(
        self, plan_once: Callable[[BlockPricer], Plan], *, cancelled: Callable[[], bool] = lambda: False
    ) -> Plan:
        """Price the blocks and plan; with profile_by_acc off, plan again with the plan's stages measured,
        until it stays the same.
        """
        plan = plan_once(self.pricer())
        if self.profiler is None or self.config.profile_by_acc:
            return plan
        for _ in range(MAX_ROUNDS):
            if cancelled() or not self._measure_stages(plan):
                break
            before, plan = plan, plan_once(self.pricer())
            if _cuts(plan) == _cuts(before):
                break
        return plan

    def pricer(self) -> BlockPricer:
        """The pricer; the first time, what is not known yet is measured.

        Raises:
            ProfileError: the profile file is none, or costs are to be measured where there is nothing to
            measure on.
        """
        if self._pricer is None:
            self._pricer = self._make()
        return self._pricer

    def _make(self) -> BlockPricer:
        config, compiler = self.config, stage_compiler(self.config)
        analytic = analytic_pricer(self.partitions, config, self.cluster)
        if config.measures_nothing or not self.graph.blocks:
            return analytic
        runs = self._read_file()
        if self.profiler is not None:
            setting: Setting | None = self.profiler.setting
            self._measure_blocks(self.profiler.setting)
        else:
            setting = self._setting_of_file(compiler)
        if config.costs == "measured" and setting is None and not runs:
            raise ProfileError(
                "costs 'measured' needs ranks to measure on, or a profile_file measured with this "
                "stage_compiler",
                cure="plan with costs='analytic', or set profile_file to what a run has measured",
            )
        profiles = self._profile.of_setting(setting) if setting is not None else {}
        stages = (*(item for item in self._profile.stages if item.setting == setting), *runs)
        missing = {block.structure for block in self.graph.blocks} - {structure for structure, _ in profiles}
        if profiles and missing:
            logger.warning(
                "%d distinct blocks were not measured and are priced as the cluster is described",
                len(missing),
            )
        measured_on = setting or next((run.setting for run in runs), None)
        device_name = measured_on.device_name if measured_on is not None else self.cluster.device.name
        measured = MeasuredPricer(fallback=analytic, profiles=profiles, device_name=device_name)
        return measured.corrected(self.graph.blocks, stages) if stages else measured

    def _measure(self, jobs: Sequence[Job]) -> list[list[Point]]:
        assert self.profiler is not None, "nothing to measure with"
        self.num_measured += len(jobs)
        return self.profiler.measure([block.nodes for block in self.graph.blocks], jobs)

    def _measure_blocks(self, setting: Setting) -> None:
        """Measure the distinct blocks that are not in the profile at the rows that matter."""
        known = self._profile.of_setting(setting)
        wanted = rows_to_measure(self.batch_rows, self.config, self.cluster.num_devices)
        firsts = {block.structure: block for block in reversed(self.graph.blocks)}
        missing = {
            structure: Job(begin=block.index, end=block.index + 1, budget=1.0, rows=wanted)
            for structure, block in sorted(firsts.items(), key=lambda item: item[1].index)
            if self.config.profile_again or not _covers(known.get((structure, 1.0)), wanted)
        }
        logger.info("%d distinct blocks: %d are to be measured", len(firsts), len(missing))
        found = [
            BlockProfile(structure=structure, budget=1.0, setting=setting, points=tuple(points))
            for structure, points in zip(missing, self._measure(list(missing.values())), strict=True)
            if points
        ]
        if found:
            if self.config.profile_again:
                self._profile = self._profile.without(setting, {item.structure for item in found})
            self._profile = self._profile.with_blocks(found)
            self._write_file()

    def _measure_stages(self, plan: Plan) -> bool:
        """Measure the plan's stages as a whole; whether one was new."""
        assert self.profiler is not None and isinstance(self._pricer, MeasuredPricer), (
            "nothing to measure with"
        )
        setting, blocks = self.profiler.setting, self.graph.blocks
        jobs: dict[tuple[tuple[str, ...], float, int], Job] = {}
        known = {
            (item.structures, item.budget, item.point.rows)
            for item in self._profile.stages
            if item.setting == setting and (item in self._measured or not self.config.profile_again)
        }
        for stage in plan.stages:
            begin, end = (min(stage.blocks), max(stage.blocks) + 1) if stage.blocks else (0, 0)
            rows = replica_rows(plan.batch_rows, plan.num_micro_batches, len(stage.ranks))
            # What belongs to a segment is not known to who measures.
            known_there = stage.recompute in self._pricer.budgets and stage.recompute != SEGMENTS_BUDGET
            budget = stage.recompute if known_there else 1.0
            key = (tuple(block.structure for block in blocks[begin:end]), budget, rows)
            if stage.blocks and key not in known:
                jobs.setdefault(key, Job(begin=begin, end=end, budget=budget, rows=(rows,)))
        found = [
            StageProfile(
                fingerprint=plan.fingerprint,
                structures=structures,
                budget=budget,
                setting=setting,
                point=points[0],
            )
            for (structures, budget, _), points in zip(jobs, self._measure(list(jobs.values())), strict=True)
            if points
        ]
        if found:
            self._measured += found
            self._profile = self._profile.with_stages(found)
            self._write_file()
            self._pricer = self._pricer.corrected(
                blocks, [item for item in self._profile.stages if item.setting == setting]
            )
        return bool(found)

    def _read_file(self) -> tuple[StageProfile, ...]:
        """Fill the profile from the file; give the stages of a run's report, if it is one."""
        path = self.config.profile_to_read
        if not path:
            return ()
        option = "option profile_file" if self.config.profile_file else "option graph_profile_file"
        file = UserFile(
            path=path,
            what="profile",
            named_by=option,
            error=ProfileError,
            cure="give the path of a readable file.",
        )
        if not kind_of(file) and not self.config.load_graph_profile:
            return ()
        text = read_text(file, _MAX_PROFILE_BYTES)
        if '"rannc run"' in text[:1000]:
            return stages_of_run(RunReport.from_json(text), stage_compiler(self.config))
        self._profile = Profile.from_json(text, where=repr(path))
        return ()

    def _write_file(self) -> None:
        if self.config.profile_to_write:
            named_by = "option profile_file or graph_profile_file"
            write_text(
                self.config.profile_to_write, self._profile.to_json(), what="profile", named_by=named_by
            )

    def _setting_of_file(self, compiler: str) -> Setting | None:
        """The setting to use without ranks: that of the cluster's device, else the only one."""
        found = list(
            dict.fromkeys(item.setting for item in self._profile.blocks if item.setting.compiler == compiler)
        )
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
    """A few numbers of rows of a replica, from the fewest that a plan can have to the most, evenly by
    ratio.
    """
    fewest_micro_batches = config.pipeline_num or config.min_pipeline
    most_micro_batches = config.pipeline_num or config.max_pipeline or batch_rows
    most = max(1, batch_rows // fewest_micro_batches)
    fewest = min(most, max(1, batch_rows // (most_micro_batches * num_devices)))
    ratio = (most / fewest) ** (1 / (NUM_POINTS - 1))
    return tuple(sorted({round(fewest * ratio**place) for place in range(NUM_POINTS)}))


def _covers(profile: BlockProfile | None, wanted: Sequence[int]) -> bool:
    """Whether the measured points reach from the fewest to the most rows that are wanted."""
    if profile is None:
        return False
    rows = [point.rows for point in profile.points]
    # More rows than the most measured were too slow to try or did not fit; measuring again would stop there
    # too.
    return rows[0] <= 2 * wanted[0] and (
        rows[-1] >= wanted[-1] / 2 or not profile.points[-1].fits or _was_slow(profile)
    )


def _was_slow(profile: BlockProfile) -> bool:
    last = profile.points[-1]
    return (last.forward_seconds or 0.0) + (last.backward_seconds or 0.0) > 0.2


def _cuts(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return (
        tuple(len(stage.blocks) for stage in plan.stages),
        tuple(len(stage.ranks) for stage in plan.stages),
        (plan.num_micro_batches,),
    )
