"""Random search problems and the brute force that the stage search is held against."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from rannc_backend.planner.cluster.cluster import Cluster, Device, Link
from rannc_backend.planner.search.moves import honours
from rannc_backend.planner.search.problem import MicroBatchTables, Pricer, SearchProblem, plans_step_seconds

DEVICE = Device(
    name="test",
    memory_bytes=1,
    flops_per_second=(("float32", 1.0),),
    memory_bytes_per_second=1.0,
    launch_seconds=0.0,
)


def make_cluster(
    num_devices: int,
    devices_per_node: int,
    near: tuple[float, float],
    far: tuple[float, float],
    core_share: float = 1.0,
) -> Cluster:
    """Links as (latency in seconds, bytes per second)."""
    return Cluster(
        name="test",
        num_devices=num_devices,
        devices_per_node=devices_per_node,
        device=replace(DEVICE, core_share=core_share),
        intra_node=Link(latency_seconds=near[0], bytes_per_second=near[1]),
        inter_node=Link(latency_seconds=far[0], bytes_per_second=far[1]),
    )


@dataclass(frozen=True)
class Numbers:
    """Tables of one problem by number of micro-batches; a class and not a closure, so that failures can be
    printed.
    """

    by_number: dict[int, MicroBatchTables]

    def __call__(self, number: int, max_length: int = 0) -> MicroBatchTables:
        return self.by_number[number]


def random_problem(
    seed: int,
    num_blocks: int,
    num_devices: int,
    *,
    devices_per_node: int,
    micro_batches: tuple[int, ...],
    schedules: tuple[str, ...],
    style: str,
    memory_bytes: float,
    message_scale: float,
    reduction_scale: float,
    core_share: float = 1.0,
    copy_scale: float = 0.0,
    **wishes: object,
) -> SearchProblem:
    """Whole numbers in "anything" and "equal", so that ties are frequent; "layers" looks like a model."""
    generator = np.random.default_rng(seed)
    budgets = (1.0, 0.5, 0.0)[: int(generator.integers(1, 4))]
    replicas = np.arange(1, num_devices + 1)
    if generator.random() < 0.2 and num_devices > 2:
        replicas = np.delete(replicas, 1)
    shape = (num_blocks, num_blocks, len(replicas))
    ends = np.arange(num_blocks)[:, None] + np.arange(1, num_blocks + 1)[None, :]
    inside = np.broadcast_to((ends <= num_blocks)[:, :, None], shape)
    weights = generator.integers(1, 6, num_blocks).astype(float)
    if style == "equal":
        weights[:] = 2.0
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    spans = np.maximum(sums[np.minimum(ends, num_blocks)] - sums[:-1, None], 0.0)

    def table(high: int, *, shared: bool = True) -> np.ndarray:
        if style == "anything":
            return generator.integers(0, high + 1, shape).astype(float)
        return spans[:, :, None] * (high / 6) / (replicas if shared else 1)

    tables = {}
    for number in micro_batches:
        forward = table(8) * 6 / (number if style != "anything" else 6)
        backward = 2 * forward if style != "anything" else table(12)
        steps = [backward * (1 + 0.4 * index) for index in range(len(budgets))]
        cost = 0.05 if style == "layers" else 0.0  # of every stage, however small
        forward = np.where(inside, forward + cost, np.inf)
        if style == "anything":
            forward[generator.random(shape) < 0.05] = np.inf
        fixed, flight = np.broadcast_to(table(6, shared=False), shape), table(6) / number * 2
        message = generator.integers(0, 5, shape) * message_scale / number
        tables[number] = MicroBatchTables(
            replicas=replicas,
            rows=-(-12 // number // replicas)
            if style == "anything"
            else np.maximum(-(-12 // (number * replicas)), 1),
            forward=forward,
            weight=np.where(inside, np.minimum(backward, steps[0]) / 2, 0.0),
            kept_bytes=np.broadcast_to(table(2, shared=True), shape) / number,
            backward=np.stack([np.where(inside, step + cost, np.inf) for step in steps]),
            fixed_bytes=np.stack([fixed] * len(budgets)),
            flight_bytes=np.stack([flight * budget for budget in budgets]),
            message_bytes=message,
            gradient_bytes=message * (generator.random() < 0.7),
        )
    near, far = ((0.0, 1.0), (0.0, 0.5)) if generator.random() < 0.5 else ((0.1, 2.0), (0.3, 0.4))
    return SearchProblem(
        num_blocks=num_blocks,
        cluster=make_cluster(num_devices, devices_per_node, near, far, core_share),
        schedules=schedules,
        micro_batches=micro_batches,
        budgets=budgets,
        tables=Numbers(tables),
        own_gradient_bytes=spans * reduction_scale,
        shared_gradient_bytes=generator.integers(0, 2, spans.shape) * reduction_scale,
        bucket_bytes=float(generator.integers(1, 6)),
        memory_bytes=memory_bytes,
        offload_seconds=spans * copy_scale if copy_scale else None,
        **wishes,
    )


@st.composite
def problems(draw: st.DrawFn, max_blocks: int = 10, max_devices: int = 6) -> SearchProblem:
    """Problems of all kinds; most are small."""
    is_large = draw(st.integers(0, 9)) == 0
    num_blocks = draw(st.integers(1, max_blocks if is_large else min(6, max_blocks)))
    num_devices = draw(st.integers(1, max_devices if is_large else min(4, max_devices)))
    wishes: dict[str, object] = {}
    wish = draw(
        st.sampled_from(["", "", "", "", "num_stages", "replicas", "stage_replicas", "starts", "stage_of"])
    )
    if wish == "num_stages":
        wishes["num_stages"] = draw(st.integers(1, min(4, num_blocks)))
    elif wish == "replicas":
        wishes["replicas"] = draw(st.integers(1, 3))
    elif wish == "stage_replicas":
        wishes["stage_replicas"] = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    elif wish == "starts":
        wishes["starts"] = tuple(sorted(draw(st.sets(st.integers(0, num_blocks - 1), max_size=2))))
    elif wish == "stage_of":
        wishes["stage_of"] = ((draw(st.integers(0, num_blocks - 1)), draw(st.integers(0, 2))),)
    return random_problem(
        draw(st.integers(0, 2**32)),
        num_blocks,
        num_devices,
        devices_per_node=draw(st.sampled_from([1, 2, 3, 4, 6])),
        micro_batches=tuple(
            sorted(draw(st.sets(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=2)))
        ),
        schedules=draw(
            st.sampled_from(
                [
                    ("1f1b",),
                    ("fill_drain",),
                    ("zb_h1",),
                    ("1f1b", "fill_drain"),
                    ("1f1b", "fill_drain", "zb_h1"),
                ]
            )
        ),
        style=draw(st.sampled_from(["anything", "layers", "equal"])),
        memory_bytes=draw(st.sampled_from([4.0, 8.0, 15.0, 1e9])),
        message_scale=draw(st.sampled_from([0.0, 0.1, 1.0])),
        reduction_scale=draw(st.sampled_from([0.0, 0.2, 2.0])),
        core_share=draw(st.sampled_from([1.0, 1.0, 0.5])),
        copy_scale=draw(st.sampled_from([0.0, 0.0, 1.0])),
        **wishes,
    )


@functools.lru_cache(maxsize=4096)
def all_shapes(num_blocks: int, counts: tuple[int, ...], num_devices: int, per_node: int, num_stages: int):
    """Bounds, options and places of all stage-major plans with so many stages."""
    options_and_places = []
    for options in itertools.product(range(len(counts)), repeat=num_stages):
        if sum(counts[option] for option in options) > num_devices:
            continue
        ways = [((), 0)]
        for option in options:
            later = []
            for places, free in ways:
                for place in {free, -(-free // per_node) * per_node}:
                    if place + counts[option] <= num_devices:
                        later.append(((*places, place), place + counts[option]))
            ways = later
        options_and_places += [(options, places) for places, _ in ways]
    cuts = [(0, *inner, num_blocks) for inner in itertools.combinations(range(1, num_blocks), num_stages - 1)]
    rows = [(cut, *pair) for cut in cuts for pair in options_and_places]
    return tuple(
        np.array([row[part] for row in rows], dtype=np.int64).reshape(len(rows), -1) for part in range(3)
    )


def brute_force(problem: SearchProblem) -> float:
    """The least step over every plan there is."""
    best = float("inf")
    per_node = problem.cluster.devices_per_node
    for schedule in problem.schedules:
        for number in problem.micro_batches:
            pricer = Pricer(problem, number, schedule)
            counts = tuple(pricer.tables.replicas.tolist())
            for num_stages in range(1, min(problem.num_blocks, problem.num_devices) + 1):
                shapes = all_shapes(problem.num_blocks, counts, problem.num_devices, per_node, num_stages)
                best = min(best, _best_of(pricer, *shapes, "stage_major"))
                if (
                    num_stages > 1
                    and problem.num_devices > per_node > 1
                    and 0 in (per_node % num_stages, num_stages % per_node)
                ):
                    cuts = np.unique(shapes[0], axis=0)
                    for option, count in enumerate(counts):
                        if count > 1 and count * num_stages <= problem.num_devices:
                            options = np.full((len(cuts), num_stages), option)
                            places = np.broadcast_to(np.arange(num_stages), options.shape)
                            best = min(best, _best_of(pricer, cuts, options, places, "replica_major"))
    return best


def _best_of(
    pricer: Pricer, cuts: np.ndarray, options: np.ndarray, places: np.ndarray, placement: str
) -> float:
    if not len(cuts):
        return float("inf")
    replicas = pricer.tables.replicas[options]
    problem = pricer.problem
    if problem.num_stages or problem.replicas or problem.stage_replicas or problem.starts or problem.stage_of:
        wished = [
            honours(problem, cut.tolist(), tuple(row.tolist()))
            for cut, row in zip(cuts, replicas, strict=True)
        ]
        cuts, options, places = cuts[wished], options[wished], places[wished]
    if not len(cuts):
        return float("inf")
    return float(plans_step_seconds(pricer, cuts, options, places, placement).min())


def step_of_each_shape(problem: SearchProblem) -> dict[tuple[object, ...], float]:
    """The least step over schedules and places of each plan that fits, by micro-batches, cuts and replicas."""
    found: dict[tuple[object, ...], float] = {}
    per_node = problem.cluster.devices_per_node
    for schedule in problem.schedules:
        for number in problem.micro_batches:
            pricer = Pricer(problem, number, schedule)
            counts = tuple(pricer.tables.replicas.tolist())
            for num_stages in range(1, min(problem.num_blocks, problem.num_devices) + 1):
                shapes = all_shapes(problem.num_blocks, counts, problem.num_devices, per_node, num_stages)
                for cut, options, places in zip(*shapes, strict=True):
                    replicas = tuple(pricer.tables.replicas[options].tolist())
                    key = (number, tuple(cut.tolist()), replicas)
                    plan = (cut[None], options[None])
                    ways = [_best_of(pricer, *plan, places[None], "stage_major")]
                    turned = num_stages > 1 and problem.num_devices > per_node > 1
                    if (
                        turned
                        and len(set(replicas)) == 1 < replicas[0]
                        and 0 in (per_node % num_stages, num_stages % per_node)
                    ):
                        ways.append(_best_of(pricer, *plan, np.arange(num_stages)[None], "replica_major"))
                    if min(ways) < float("inf"):
                        found[key] = min(*ways, found.get(key, float("inf")))
    return found
