"""Measured prices: sensible, asked for once, and no crash where memory does not suffice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rannc_backend.capture.analysis import GraphAnalysis
from rannc_backend.errors import ProfileError
from rannc_backend.ir.plan import Plan
from rannc_backend.log.progress import Progress
from rannc_backend.planner.blocks import measure as profiling
from rannc_backend.planner.blocks.block_partitions import partition_blocks
from rannc_backend.planner.blocks.measure import (
    Job,
    LeadingProfiler,
    combined,
    is_out_of_memory,
    make_bench,
    measures,
)
from rannc_backend.planner.choose_pricer import MAX_ROUNDS, Pricing, rows_to_measure
from rannc_backend.planner.cost.measured_pricing import MeasuredPricer
from rannc_backend.planner.cost.pricing import BlockPricer
from rannc_backend.planner.cost.profile import Point, Profile
from rannc_backend.runtime.comm.control import SingleControl
from rannc_backend.runtime.world import World
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.blocks.block_peaks import CLUSTER, CPU, analysed

CONFIG = Config(costs="measured", stage_compiler="eager", profiling_iter=2, max_pipeline=4)


def world() -> World:
    nothing: Any = None
    return World(
        rank=0,
        size=1,
        local_rank=0,
        hosts=("here",),
        device=CPU,
        launcher="single",
        control=SingleControl(),
        transport=nothing,
        monitor=nothing,
    )


def pricing_of(name: str, config: Config = CONFIG, *, profiled: bool = True) -> Pricing:
    analysis, graph = analysed(name)
    bench = make_bench(analysis, config, CLUSTER, CPU)
    profiler = LeadingProfiler(bench=bench, world=world(), limit_seconds=10.0, progress=Progress())
    return Pricing(
        graph=graph,
        partitions=partition_blocks(analysis, graph, compiler="eager", rows=8),
        config=config,
        cluster=CLUSTER,
        batch_rows=32,
        profiler=profiler if profiled else None,
    )


@pytest.mark.parametrize("name", ["chain", pytest.param("gpt2", marks=pytest.mark.full)])
def test_measured_prices_are_positive_and_rise_with_rows(name: str) -> None:
    pricing = pricing_of(name)
    pricer = pricing.pricer()
    assert isinstance(pricer, MeasuredPricer) and pricer.source.startswith("measured blocks on ")
    blocks = analysed(name)[1].blocks
    assert pricing.num_measured == len({block.structure for block in blocks}) < len(blocks)
    for block in blocks:
        for budget in pricer.budgets:
            prices = pricer.prices(block, [1, 2, 8, 32, 64], budget)
            for amounts in (
                prices.forward_seconds,
                prices.backward_seconds,
                prices.saved_bytes,
                prices.workspace_bytes,
            ):
                assert np.isfinite(amounts).all() and (amounts >= 0).all()
            assert (prices.forward_seconds > 0).all() and (np.diff(prices.forward_seconds[:4]) >= 0).all()


def test_a_second_run_measures_nothing(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"profile_file": str(tmp_path / "profile.json")})
    first, second = pricing_of("chain", config), pricing_of("chain", config)
    block = analysed("chain")[1].blocks[0]
    before = first.pricer().prices(block, [4, 8], 1.0)
    after = second.pricer().prices(block, [4, 8], 1.0)
    assert first.num_measured > 0 and second.num_measured == 0
    assert (before.forward_seconds == after.forward_seconds).all() and (
        before.backward_seconds == after.backward_seconds
    ).all()
    # Without ranks the file's prices are used as they are.
    alone = pricing_of("chain", config, profiled=False).pricer().prices(block, [4, 8], 1.0)
    assert (alone.forward_seconds == before.forward_seconds).all()


def test_profile_again_measures_what_the_file_has_and_overwrites_it(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    config = CONFIG.model_copy(update={"profile_file": str(path)})
    first = pricing_of("chain", config)
    first.pricer()
    known = Profile.from_json(path.read_text())
    # As if it had been slower, and measured at more rows.
    slow = [
        item.model_copy(
            update={
                "points": (
                    *(point.model_copy(update={"forward_seconds": 1e3}) for point in item.points),
                    item.points[-1].model_copy(update={"rows": 10**6}),
                )
            }
        )
        for item in known.blocks
    ]
    path.write_text(known.model_copy(update={"blocks": tuple(slow)}).to_json())
    again = pricing_of("chain", config.model_copy(update={"profile_again": True}))
    again.pricer()
    assert again.num_measured == first.num_measured > 0
    written = Profile.from_json(path.read_text())
    assert [item.structure for item in written.blocks] == [item.structure for item in known.blocks]
    points = [point for item in written.blocks for point in item.points]
    assert all(point.forward_seconds is not None and point.forward_seconds < 1e3 for point in points)
    assert max(point.rows for point in points) < 10**6


def test_profile_again_measures_stages_once(tmp_path: Path) -> None:
    config = CONFIG.model_copy(
        update={"profile_file": str(tmp_path / "profile.json"), "profile_by_acc": False}
    )
    planner = Planner(_plans("chain", (2, 2)))
    pricing_of("chain", config).plan(planner)
    again = pricing_of("chain", config.model_copy(update={"profile_again": True}))
    again.plan(Planner(_plans("chain", (2, 2))))
    once = pricing_of("chain", config)
    once.plan(Planner(_plans("chain", (2, 2))))
    assert once.num_measured == 0
    assert again.num_measured > len({block.structure for block in analysed("chain")[1].blocks})


def test_another_setting_is_measured_again(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"profile_file": str(tmp_path / "profile.json")})
    pricing_of("chain", config).pricer()
    text = Path(config.profile_file).read_text()
    Path(config.profile_file).write_text(text.replace('"num_sharing": 1', '"num_sharing": 2'))
    again = pricing_of("chain", config)
    again.pricer()
    assert again.num_measured > 0
    assert {
        item.setting.num_sharing for item in Profile.from_json(Path(config.profile_file).read_text()).blocks
    } == {1, 2}


def test_rannc_saves_and_loads_graph_profiles(tmp_path: Path) -> None:
    file = {"graph_profile_file": str(tmp_path / "graph.json")}
    first = pricing_of("chain", CONFIG.model_copy(update={"save_graph_profile": True, **file}))
    first.pricer()
    second = pricing_of("chain", CONFIG.model_copy(update={"load_graph_profile": True, **file}))
    second.pricer()
    assert first.num_measured > 0 and second.num_measured == 0
    saving_again = pricing_of("chain", CONFIG.model_copy(update={"save_graph_profile": True, **file}))
    saving_again.pricer()
    assert saving_again.num_measured == first.num_measured, "what is not loaded is not used"
    with pytest.raises(ProfileError, match="missing.json"):
        missing = {"load_graph_profile": True, "graph_profile_file": str(tmp_path / "missing.json")}
        pricing_of("chain", CONFIG.model_copy(update=missing)).pricer()


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{}x")
    with pytest.raises(ProfileError, match=r"profile.json"):
        pricing_of("chain", CONFIG.model_copy(update={"profile_file": str(path)})).pricer()
    with pytest.raises(ProfileError, match="cannot read"):
        pricing_of("chain", CONFIG.model_copy(update={"profile_file": str(tmp_path)})).pricer()


def test_measured_without_anything_to_measure_on_is_refused() -> None:
    with pytest.raises(ProfileError, match="ranks to measure on"):
        pricing_of("chain", profiled=False).pricer()


def _fail_from(rows: int, error: BaseException) -> Callable[..., list[torch.Tensor]]:
    real = profiling.example_inputs

    def inputs(graph: Any, analysis: GraphAnalysis, wanted: int, device: torch.device) -> list[torch.Tensor]:
        if wanted >= rows:
            raise error
        return real(graph, analysis, wanted, device)

    return inputs


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_out_of_memory_is_an_answer(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(profiling, "example_inputs", _fail_from(10, error))
    prices = pricing_of("chain").pricer().prices(analysed("chain")[1].blocks[0], [1, 9, 10, 64], 1.0)
    # 10 rows are the first that were tried and did not fit.
    assert np.isfinite(prices.forward_seconds).tolist() == [True, True, True, False]
    assert np.isfinite(prices.backward_seconds).tolist() == [True, True, True, False]


def test_what_cannot_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    real = profiling.example_inputs

    def inputs(graph: Any, analysis: GraphAnalysis, rows: int, device: torch.device) -> list[torch.Tensor]:
        tried.append(rows)
        return real(graph, analysis, rows, device)

    monkeypatch.setattr(profiling, "example_inputs", inputs)
    analysis, graph = analysed("chain")
    bench = make_bench(analysis, CONFIG, CLUSTER, CPU)
    bench.most_bytes = 10_000  # 32 x 32 weights of 4 bytes and their gradients, and little else
    points = bench.measure(
        [block.nodes for block in graph.blocks], Job(begin=0, end=1, budget=1.0, rows=(1, 32, 64))
    )
    assert [(point.rows, point.fits) for point in points] == [(1, True), (32, False)]
    assert tried == [1]


def test_a_block_that_cannot_be_measured_is_priced_by_the_description(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profiling, "example_inputs", _fail_from(1, RuntimeError("no such kernel")))
    logger = logging.getLogger("rannc_backend.planner.blocks.measure")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger="rannc_backend"):
        logger.addHandler(caplog.handler)
        pricer = pricing_of("chain").pricer()
        logger.removeHandler(caplog.handler)
    assert isinstance(pricer, MeasuredPricer) and "no such kernel" in caplog.text
    block = analysed("chain")[1].blocks[0]
    assert (
        pricer.prices(block, [4], 1.0).forward_seconds
        == pricer.fallback.prices(block, [4], 1.0).forward_seconds
    )


def test_out_of_memory_is_told_from_other_errors() -> None:
    assert is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate")) and is_out_of_memory(
        MemoryError()
    )
    assert not is_out_of_memory(RuntimeError("sizes do not match"))


def _point(rows: int, seconds: float | None) -> Point:
    return Point(
        rows=rows,
        forward_seconds=seconds,
        backward_seconds=seconds,
        peak_bytes=None if seconds is None else 8,
    )


def test_ranks_agree_by_the_median_and_fit_only_together() -> None:
    several = [
        [_point(1, 1.0), _point(2, 4.0), _point(4, 5.0)],
        [_point(1, 3.0), _point(2, 2.0), _point(4, None)],
        [_point(1, 2.0)],
    ]
    assert [(item.rows, item.forward_seconds) for item in combined(several)] == [
        (1, 2.0),
        (2, 3.0),
        (4, None),
    ]


@pytest.mark.parametrize(("batch_rows", "devices"), [(1, 1), (7, 3), (4096, 1024), (32, 2)])
def test_few_rows_are_measured_and_they_span_what_plans_can_have(batch_rows: int, devices: int) -> None:
    rows = rows_to_measure(batch_rows, CONFIG, devices)
    assert 1 <= len(rows) <= 4 and rows == tuple(sorted(set(rows)))
    assert rows[0] == max(1, batch_rows // (4 * devices)) and rows[-1] == batch_rows


def test_gpus_and_wishes_are_measured() -> None:
    here = world()
    on_gpu = replace(here, device=torch.device("cuda", 0))
    assert not measures(Config(), here) and measures(Config(), on_gpu) and measures(CONFIG, here)
    assert not measures(Config(costs="analytic"), on_gpu) and not measures(CONFIG, None)
    assert not measures(Config(cluster="a100-80gb"), on_gpu)


class Planner:
    """Stands for the search: plans with one cut after another, whatever the prices."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = list(plans)
        self.pricers: list[BlockPricer] = []

    def __call__(self, pricer: BlockPricer) -> Plan:
        self.pricers.append(pricer)
        return self.plans[min(len(self.pricers), len(self.plans)) - 1]


def _plans(name: str, cuts: Sequence[int]) -> list[Plan]:
    from rannc_backend.planner.planner import plan_blocks

    graph = analysed(name)[1]
    plans = []
    for count in cuts:
        config = Config(stage_compiler="eager", partition_num=count, replica_num=1, pipeline_num=2)
        cluster = replace(CLUSTER, num_devices=count)
        plans.append(
            plan_blocks(
                graph, config, cluster=cluster, batch_rows=32, schedules=("fill_drain",), fingerprint="f"
            )
        )
    return plans


@pytest.mark.parametrize(
    ("cuts", "num_searches"),
    [((2, 2), 2), ((2, 3, 2, 3), 1 + MAX_ROUNDS - 1), ((2, 3, 4, 5, 6), 1 + MAX_ROUNDS)],
)
def test_stages_are_measured_until_the_plan_stays_the_same(
    tmp_path: Path, cuts: tuple[int, ...], num_searches: int
) -> None:
    config = CONFIG.model_copy(update={"profile_by_acc": False, "profile_file": str(tmp_path / "p.json")})
    pricing, planner = pricing_of("chain", config), Planner(_plans("chain", cuts))
    plan = pricing.plan(planner)
    assert plan is planner.plans[num_searches - 1] and len(planner.pricers) == num_searches
    assert "stages" not in planner.pricers[0].source and "stages" in planner.pricers[1].source
    assert Profile.from_json((tmp_path / "p.json").read_text()).stages


def test_sums_of_blocks_are_enough_by_default() -> None:
    pricing, planner = pricing_of("chain"), Planner(_plans("chain", (2,)))
    pricing.plan(planner)
    assert len(planner.pricers) == 1


@pytest.mark.parametrize("is_shared", [True, False])
def test_jobs_are_dealt_out_so_that_every_rank_is_busy(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `parallel_profile`; else rank 0 has all of them."""
    done: list[int] = []
    analysis, graph = analysed("chain")
    bench = make_bench(analysis, CONFIG, CLUSTER, CPU)

    def measure(bench: Any, blocks: Any, job: Job) -> list[Point]:
        done.append(job.begin)
        return [_point(1, float(job.begin))]

    class Ranks(SingleControl):
        """Runs the shares of three ranks one after the other."""

        def allgather(
            self, value: Any, *, what: str = "values", limit_seconds: float | None = None
        ) -> list[Any]:
            shares.append(value)
            return shares

    monkeypatch.setattr(profiling, "_measured_or_none", measure)
    jobs = [Job(begin=index, end=index + 1, budget=1.0, rows=(1,)) for index in range(4)]
    bench.is_shared = is_shared
    shares: list[Any] = []
    results: list[list[Point]] = []
    for rank in range(3):
        ranks = replace(world(), rank=rank, size=3, control=Ranks())
        turns: list[None] = []
        if rank < 2:
            # The first two only put their share down; the last one sees all.
            with pytest.raises(IndexError):
                profiling._share_work(bench, ranks, [], jobs, 1.0, lambda turns=turns: turns.append(None))[5]
        else:
            results = profiling._share_work(
                bench, ranks, [], jobs, 1.0, lambda turns=turns: turns.append(None)
            )
        assert len(turns) == (2 if is_shared else 0 if rank else 4)
    assert done == ([0, 3, 1, 0, 2, 1] if is_shared else [0, 1, 2, 3])
    assert [points[0].forward_seconds for points in results] == [0.0, 1.0, 2.0, 3.0]
