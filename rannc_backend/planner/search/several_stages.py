"""Plans in which a rank computes several stages.

In: a search problem, a plan of it in which each rank has one stage, schedules for several. Out: plans with as many times
more stages, on the same lanes or on others: stage after stage gets the share of the computing that its lane's replicas can
do, and of the budgets of recompute those that are fastest within the memory of the lane. They are priced by simulating
their programs. There is no proof that no better one exists.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rannc_backend.ir.action import FORWARD_VALUES, GRADIENTS, Channel
from rannc_backend.planner.cost.update_shares import SharedInLane
from rannc_backend.planner.search.moves import honours
from rannc_backend.planner.search.problem import (
    INFINITY,
    Floats,
    Ints,
    Pricer,
    SearchProblem,
    Solution,
    StageTerms,
)
from rannc_backend.schedule.description import Lanes, Schedule
from rannc_backend.schedule.edges import chain_edges
from rannc_backend.schedule.list_run import LaneCosts, lower_bound_seconds
from rannc_backend.schedule.lowering import lower_lanes, waiting_bytes
from rannc_backend.schedule.orders import held_by, order_on, schedule_named
from rannc_backend.schedule.simulator import StageSeconds, simulate

_MAX_TRIED = 12  # plans
_MAX_TRIED_TO_SAVE = 4  # besides, under schedules that save memory
_MAX_MICRO_BATCH_NUMBERS = 2  # of micro-batches
_MAX_CHANGES = 40  # of cuts, to make lanes even
_SAME = 1e-6  # relative difference of seconds
_MAX_COMBINATIONS = 700  # of budgets of a lane's stages that are all tried


def lane_plans(problem: SearchProblem, best: Solution) -> list[Solution]:
    """Plans with the schedules and numbers of stages on each rank that the problem names, the fastest first.

    They are made on the lanes and micro-batches of `best`, and, where numbers are free, on half and twice as many equal
    lanes with the smallest micro-batches. Of many, those are priced that would be fastest if ranks idled only while stages
    fill.
    """
    tried: list[tuple[float, int, Solution, Schedule]] = []
    for base in _bases(problem, best):
        work = _least_seconds(problem, base)
        for name, per_lane in itertools.product(problem.lane_schedules, problem.stages_per_lane):
            described = schedule_named(name).with_stages_per_lane(per_lane)
            if described is not None and (problem.only_lane_schedules or work < best.step_seconds):
                filling = work * (base.num_stages - 1) / (per_lane * base.num_micro_batches)
                tried.append((work + filling, len(tried), base, described))
    tried.sort(key=lambda each: each[:2])
    limit = INFINITY if problem.only_lane_schedules else best.step_seconds
    made: list[Solution] = []
    for saves, most in ((False, _MAX_TRIED), (True, _MAX_TRIED_TO_SAVE)):
        if saves and any(min(each.budgets) == 1 for each in made):
            break  # memory is no matter
        chosen = [each[2:] for each in tried if each[-1].saves_memory == saves]
        for base, schedule in chosen[:most]:
            made += _plans_of(problem, base, schedule, limit)
    return sorted(made, key=lambda each: each.step_seconds)


def _bases(problem: SearchProblem, best: Solution) -> Iterator[Solution]:
    """Lanes and micro-batches; the stages of all but the first are made up, one for each lane."""
    yield best
    if problem.stage_replicas is not None or best.placement != "stage_major":
        return
    counts = {best.num_stages // 2, best.num_stages, 2 * best.num_stages}
    for count in sorted(counts) if problem.num_stages is None else [problem.num_stages]:
        replicas = problem.replicas or problem.num_devices // max(count, 1)
        if not 1 < count <= problem.num_blocks or replicas < 1 or count * replicas > problem.num_devices:
            continue
        numbers = [m for m in problem.micro_batches if replicas in problem.tables(m, 1).replicas]
        for number in numbers[: -_MAX_MICRO_BATCH_NUMBERS - 1 : -1]:
            if (count, number) != (best.num_stages, best.num_micro_batches):
                yield replace(
                    best,
                    num_micro_batches=number,
                    bounds=(*range(count), problem.num_blocks),
                    replicas=(replicas,) * count,
                    places=tuple(range(0, count * replicas, replicas)),
                    budgets=(problem.budgets[0],) * count,
                )


def _least_seconds(problem: SearchProblem, base: Solution) -> float:
    """Below which no step of a plan on these lanes can fall: all of its computing with the fastest budgets, shared out."""
    tables = problem.tables(base.num_micro_batches, 1)
    options = np.searchsorted(tables.replicas, base.replicas)
    blocks = np.arange(problem.num_blocks)
    per_replica = tables.forward[blocks, 0] + tables.backward[:, blocks, 0].min(axis=0)  # [blocks, options]
    work = float((per_replica * tables.replicas).sum(axis=0)[options].min())
    return base.num_micro_batches * work / sum(base.replicas)


def several_stages(
    problem: SearchProblem, base: Solution, schedule: Schedule, limit_seconds: float = INFINITY
) -> Solution | None:
    """The plan with the lanes and micro-batches of `base`, each lane with as many stages as the schedule has; None where
    the blocks are too few, nothing fits, or no order of the stages takes less than the limit.
    """
    made = _plans_of(problem, base, schedule, limit_seconds)
    return min(made, key=lambda each: each.step_seconds, default=None)


def _plans_of(
    problem: SearchProblem, base: Solution, schedule: Schedule, limit_seconds: float
) -> list[Solution]:
    """As `several_stages`: with even shares, and with even lanes."""
    num_stages = schedule.stages_per_lane * base.num_stages
    if num_stages > problem.num_blocks or base.placement != "stage_major":
        return []
    lanes = schedule.lanes(num_stages)
    lane_of = {stage: number for number, lane in enumerate(lanes) for stage in lane}
    replicas = tuple(base.replicas[lane_of[stage]] for stage in range(num_stages))
    pricer = Pricer(problem, base.num_micro_batches, schedule.name, problem.num_blocks)
    pinned = replace(
        problem,
        num_stages=None,
        replicas=None,
        stage_replicas=None,
        starts=problem.lane_starts,
        stage_of=problem.lane_stage_of,
        legal_starts=problem.lane_legal_starts,
    )
    made = []
    for bounds in (each for each in _cuts(pricer, lanes, replicas) if honours(pinned, each, replicas)):
        solution = replace(
            base,
            schedule=schedule.name,
            bounds=bounds,
            replicas=replicas,
            places=tuple(base.places[lane_of[stage]] for stage in range(num_stages)),
            budgets=(problem.budgets[0],) * num_stages,
            own_order="",
        )
        if (budgets := _budgets(pricer, solution, schedule)) is None:
            continue
        solution = replace(solution, budgets=budgets)
        costs = [lane_costs(terms) for terms in stage_terms(problem, solution)]
        # Below this no order of these stages can fall.
        if lower_bound_seconds(costs, solution.num_micro_batches, solution.lanes) >= limit_seconds:
            continue
        seconds = step_seconds(problem, solution, schedule)
        if np.isfinite(seconds):
            made.append(replace(solution, step_seconds=seconds, base=base))
    return made


def lane_costs(terms: StageTerms) -> LaneCosts:
    """The seconds of one stage, as orders are made from them."""
    forward, backward, message, gradient, _, _, weight, _ = (float(each[0]) for each in terms.columns())
    inputs = backward - weight
    return LaneCosts(forward=forward, inputs=inputs, weights=weight, message=message, gradient=gradient)


def stage_terms(problem: SearchProblem, solution: Solution) -> list[StageTerms]:
    """By stage the seconds of a plan whose ranks may have several stages, arrays of one element."""
    pricer = Pricer(problem, solution.num_micro_batches, solution.schedule, solution.longest_stage)
    options = np.searchsorted(pricer.tables.replicas, solution.replicas)
    result = []
    for stage, place in enumerate(_places(pricer, solution)):
        has_sender = stage > 0 and solution.ranks(stage) != solution.ranks(stage - 1)
        terms = pricer.stage(
            solution.num_stages - stage,
            np.array([solution.bounds[stage]]),
            np.array([solution.bounds[stage + 1] - solution.bounds[stage]]),
            options[stage : stage + 1],
            np.array([solution.places[stage]]),
            before_options=options[stage - 1 : stage] if has_sender else None,
            before_places=np.array([solution.places[stage - 1]]) if has_sender else None,
            num_stages=solution.num_stages,
        )
        budget = problem.budgets.index(solution.budgets[stage])
        result.append(replace(terms, backward=pricer.tables.backward[(budget, *place)][None]))
    return result


def step_seconds(problem: SearchProblem, solution: Solution, schedule: Schedule) -> float:
    """Simulated seconds of a step of a plan whose ranks may have several stages, whatever that needs in memory."""
    number, num_stages = solution.num_micro_batches, solution.num_stages
    all_terms = stage_terms(problem, solution)
    columns = [[float(column[0]) for column in terms.columns()] for terms in all_terms]
    if not np.isfinite(columns).all():
        return float("inf")
    stages = [
        StageSeconds(
            forward=forward,
            backward=backward,
            weight=min(weight, backward),
            allreduce=allreduce,
            num_buckets=int(buckets),
        )
        for forward, backward, _, _, allreduce, buckets, weight, _ in columns
    ]
    messages = {}
    for stage in range(1, num_stages):
        messages[Channel(stage - 1, stage, FORWARD_VALUES)] = columns[stage][2]
        messages[Channel(stage, stage - 1, GRADIENTS)] = columns[stage][3]
    order = order_on(schedule, solution.lanes, number)
    step = simulate(lower_lanes(order, chain_edges(num_stages), "train", number), stages, messages)
    work = sum(
        replicas * (seconds.forward + seconds.backward)
        for replicas, seconds in zip(solution.replicas, stages, strict=True)
    )
    bounds = np.array(solution.bounds)
    copying = problem.copying(bounds[:-1], np.diff(bounds))
    longest = float(max(copying[list(lane)].sum() for lane in schedule.lanes(num_stages)))
    new_values = max(column[-1] for column in columns)
    return max(step.makespan_seconds, number * work / problem.num_cores) + new_values + longest


def _places(pricer: Pricer, solution: Solution) -> list[tuple[int, int, int]]:
    """By stage, where its costs are in the tables."""
    options = np.searchsorted(pricer.tables.replicas, solution.replicas).tolist()
    pairs = zip(solution.bounds, solution.bounds[1:], options, strict=False)
    return [(begin, end - begin - 1, option) for begin, end, option in pairs]


def _cuts(pricer: Pricer, lanes: Lanes, replicas: Sequence[int]) -> list[tuple[int, ...]]:
    """Those that are tried: even shares, and where stages may begin anywhere, even lanes made from them."""
    problem, tables = pricer.problem, pricer.tables
    option = int(np.searchsorted(tables.replicas, min(replicas)))
    blocks = np.arange(problem.num_blocks)
    work: Floats = tables.forward[blocks, 0, option] + tables.backward[0, blocks, 0, option]
    if not np.isfinite(work).all():
        return []
    sums = np.concatenate([[0.0], np.cumsum(work)])
    even = _even_bounds(pricer, lanes, replicas, sums)
    if even is None or problem.lane_starts or problem.lane_legal_starts:
        return [] if even is None else [even]
    moved = _with_even_lanes(np.array(even), lanes, np.array(replicas), sums, pricer.num_micro_batches)
    return list(dict.fromkeys((moved, even)))


def _even_bounds(
    pricer: Pricer, lanes: Lanes, replicas: Sequence[int], sums: Floats
) -> tuple[int, ...] | None:
    """Cuts that give each lane a share of the computing in proportion to its replicas, and each of its stages an equal part
    of that, as nearly as blocks allow, at least a block each; what a stage has too much or too little of, the later ones of
    its lane make good. Stages begin where they must. `sums` [blocks + 1]: seconds of all blocks before each.
    """
    problem = pricer.problem
    lane_of = {stage: lane for lane in lanes for stage in lane}
    whole = sums[-1] / sum(replicas[lane[0]] for lane in lanes)
    done = dict.fromkeys(lanes, 0.0)
    cuts: list[int] = []
    wanted = 0.0
    for stage in range(len(replicas) - 1):
        lane = lane_of[stage]
        num_left = len(lane) - lane.index(stage)
        wanted += max(0.0, whole * replicas[stage] - done[lane]) / num_left
        cuts.append(int(np.abs(sums - wanted).argmin()))
        done[lane] += float(sums[cuts[-1]] - sums[cuts[-2] if len(cuts) > 1 else 0])
    starts, nearest = sorted(set(problem.lane_starts) - {0}), -1
    for number, start in enumerate(starts, start=1):
        # Each moves a cut of its own, in sequence.
        free = range(nearest + 1, len(cuts) - len(starts) + number)
        if not free:
            return None
        nearest = min(free, key=lambda place: abs(cuts[place] - start))
        cuts[nearest] = start
    if problem.lane_legal_starts:
        return _at_legal_starts(cuts, problem)
    bounds = [0, *cuts, problem.num_blocks]
    for place in range(1, len(bounds) - 1):
        bounds[place] = max(bounds[place], bounds[place - 1] + 1)
    for place in range(len(bounds) - 2, 0, -1):
        bounds[place] = min(bounds[place], bounds[place + 1] - 1)
    return tuple(bounds)


def _with_even_lanes(
    bounds: Ints, lanes: Lanes, replicas: Ints, sums: Floats, num_micro_batches: int
) -> tuple[int, ...]:
    """The cuts, changed as long as that makes a step shorter: a block goes from one of the slowest lane's stages to another
    one, and all stages between the two begin a block earlier, or later. A step takes as long as the slowest lane computes,
    and lanes less one of the slowest stages, until all are filled. `sums` [blocks + 1]: seconds of all blocks before each,
    on one replica.
    """
    lane_of = np.empty(len(replicas), dtype=np.int64)
    for number, lane in enumerate(lanes):
        lane_of[list(lane)] = number

    def seconds_of(cuts: Ints) -> tuple[Floats, Ints]:
        """Of each [stages + 1] of some: about what a step takes, and its slowest lane."""
        work = np.diff(sums[cuts], axis=-1) / replicas
        lane_work = np.zeros((len(cuts), len(lanes)))
        for stage, number in enumerate(lane_of.tolist()):
            lane_work[:, number] += work[:, stage]
        filling = (len(lanes) - 1) * work.max(axis=1)
        return num_micro_batches * lane_work.max(axis=1) + filling, lane_work.argmax(axis=1)

    (longest,), (fullest,) = seconds_of(bounds[None])
    for _ in range(_MAX_CHANGES):
        tried = []
        for stage in lanes[fullest]:
            for other in range(len(replicas)):
                moved = bounds.copy()
                moved[stage + 1 : other + 1] -= 1
                moved[other + 1 : stage + 1] += 1
                tried.append(moved)
        candidates = np.array(tried)
        candidates = candidates[(np.diff(candidates, axis=1) >= 1).all(axis=1)]
        seconds, which = seconds_of(candidates)
        best = int(seconds.argmin())
        if seconds[best] >= longest * (1 - _SAME):
            break
        bounds, longest, fullest = candidates[best], seconds[best], which[best]
    return tuple(bounds.tolist())


def _at_legal_starts(cuts: Sequence[int], problem: SearchProblem) -> tuple[int, ...] | None:
    """The legal starts nearest to the cuts, one for each, in sequence; None where there are too few."""
    legal, found = sorted(set(problem.lane_legal_starts) - {0}), list[int]()
    for number, cut in enumerate(cuts, start=1):
        last = found[-1] if found else 0
        free = [start for start in legal[: len(legal) - len(cuts) + number] if start > last]
        if not free:
            return None
        found.append(min(free, key=lambda start: abs(start - cut)))
    return (0, *found, problem.num_blocks)


def fixed_parts(pricer: Pricer, solution: Solution) -> list[tuple[float, float]]:
    """By stage, what it needs whatever is in flight, without its workspace, and that: bytes."""
    problem, found = pricer.problem, []
    for stage, budget in enumerate(map(problem.budgets.index, solution.budgets)):
        fixed, workspaces = _fixed_parts_of(problem, pricer, solution, stage)
        found.append((float(fixed[budget]), float(workspaces[budget])))
    return found


def fits(problem: SearchProblem, solution: Solution, schedule: Schedule) -> bool:
    """Whether each lane has memory for the order of a schedule that is for these lanes."""
    pricer = Pricer(problem, solution.num_micro_batches, solution.schedule, solution.longest_stage)
    budgets = [problem.budgets.index(budget) for budget in solution.budgets]
    return all(
        memory.num_bytes([budgets[stage] for stage in lane]) <= problem.memory_bytes
        for lane, memory in _lane_memories(pricer, solution, schedule)
    )


def kept_by_budget(pricer: Pricer, solution: Solution, stage: int) -> list[float]:
    """By budget, what a stage keeps of a micro-batch between the two parts of its backward: a first stage all that is in
    flight, and the gradients that have come, as its first part computes nothing.
    """
    tables, places = pricer.tables, _places(pricer, solution)
    if stage > 0:
        return [float(tables.kept_bytes[places[stage]])] * len(pricer.problem.budgets)
    came = float(tables.gradient_bytes[places[1]]) if len(places) > 1 else 0.0
    flight: Floats = tables.flight_bytes[(slice(None), *places[0])]
    return [float(num_bytes) + came for num_bytes in flight]


def _waiting_bytes(pricer: Pricer, solution: Solution, schedule: Schedule) -> tuple[float, ...]:
    tables, places = pricer.tables, _places(pricer, solution)
    values, gradients = (
        [float(sizes[place]) for place in places] for sizes in (tables.message_bytes, tables.gradient_bytes)
    )
    return waiting_bytes(schedule, solution.num_micro_batches, values, gradients)


def _fixed_parts_of(
    problem: SearchProblem, pricer: Pricer, solution: Solution, stage: int
) -> tuple[Floats, Floats]:
    """The same of all budgets."""
    begin, length, option = place = _places(pricer, solution)[stage]
    fixed: Floats = pricer.tables.fixed_bytes[(slice(None), *place)]
    if problem.shared is not None:
        fixed = fixed - sum(counted_twice(problem.shared, solution, stage))
    if problem.workspace is None:
        return fixed, np.zeros(len(fixed))
    replicas = int(pricer.tables.replicas[option])
    workspace = problem.workspace(solution.num_micro_batches, begin, begin + length + 1, replicas)
    # What an optimizer's step needs takes the place of activations, and is counted beside them here.
    update = 0.0 if pricer.tables.update_bytes is None else pricer.tables.update_bytes[place]
    return fixed - workspace + update, workspace


def counted_twice(shared: SharedInLane, solution: Solution, stage: int) -> tuple[float, float]:
    """Bytes of optimizer state and of communicators that are in the account of a stage, and of another of its lane."""
    lane = next(lane for lane in solution.lanes if stage in lane)
    if len(lane) == 1:
        return 0.0, 0.0
    others = {solution.places[x] for own in lane for x in (own - 1, own + 1) if 0 <= x < solution.num_stages}
    stages = [(solution.bounds[each], solution.bounds[each + 1]) for each in lane]
    neighbours = others - {solution.places[stage]}
    state, communicators = shared.counted_twice(stages, solution.replicas[stage], len(neighbours))
    return float(state[lane.index(stage)]), float(communicators[lane.index(stage)])


def _budgets(pricer: Pricer, solution: Solution, schedule: Schedule) -> tuple[float, ...] | None:
    """Of each stage, with which its lane fits into memory and is fastest; None where a lane does not fit."""
    problem = pricer.problem
    chosen = [0.0] * solution.num_stages
    allowed = problem.allowed_budgets(np.arange(solution.num_stages))
    for lane, memory in _lane_memories(pricer, solution, schedule):
        seconds = np.where(allowed[:, list(lane)].T, memory.seconds, INFINITY)
        best = replace(memory, seconds=seconds).fastest(problem.memory_bytes)
        if best is None:
            return None
        for stage, budget in zip(lane, best, strict=True):
            chosen[stage] = problem.budgets[budget]
    return tuple(chosen)


def _lane_memories(
    pricer: Pricer, solution: Solution, schedule: Schedule
) -> Iterator[tuple[tuple[int, ...], LaneMemory]]:
    """By lane, its stages, and what they need under the order of a schedule that is for these lanes."""
    tables, places = pricer.tables, _places(pricer, solution)
    counts = held_by(schedule, solution.num_stages, solution.num_micro_batches)
    waiting = _waiting_bytes(pricer, solution, schedule)
    for lane, all_counts in zip(schedule.lanes(solution.num_stages), counts, strict=True):
        parts = [_fixed_parts_of(pricer.problem, pricer, solution, stage) for stage in lane]
        yield (
            lane,
            LaneMemory(
                counts=np.array(sorted(all_counts), dtype=float),
                seconds=np.array([tables.backward[(slice(None), *places[stage])] for stage in lane]),
                fixed=np.array(
                    [fixed + waiting[stage] for stage, (fixed, _) in zip(lane, parts, strict=True)]
                ),
                workspace=np.array([workspace for _, workspace in parts]),
                flight=np.array([tables.flight_bytes[(slice(None), *places[stage])] for stage in lane]),
                kept=np.array([kept_by_budget(pricer, solution, stage) for stage in lane]),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneMemory:
    """The stages of one lane: all but `counts` are [stages, budgets]. `counts` [states, stages, 2]: how many micro-batches
    are in flight and how many kept, as `held_by` has it.
    """

    counts: Floats
    seconds: Floats
    fixed: Floats
    workspace: Floats
    flight: Floats
    kept: Floats

    def fastest(self, memory_bytes: float) -> tuple[int, ...] | None:
        """By stage a budget, so that the lane fits and its backwards are shortest; None where nothing fits. Of many
        combinations, what `step_by_step` finds.
        """
        num_stages, num_budgets = self.seconds.shape
        if num_budgets**num_stages > _MAX_COMBINATIONS:
            return self.step_by_step(memory_bytes)
        fitting = [
            (self.num_seconds(each), each)
            for each in itertools.product(range(num_budgets), repeat=num_stages)
            if self.num_bytes(each) <= memory_bytes
        ]
        best = min(fitting, default=(INFINITY, ()))
        return best[1] if best[0] < INFINITY else None

    def step_by_step(self, memory_bytes: float) -> tuple[int, ...] | None:
        """As `fastest`, but changing one stage at a time, for most seconds, from those that need least when all micro-batches
        that a stage ever holds are in flight; there may be better ones.
        """
        num_stages, num_budgets = self.seconds.shape
        most = self.counts[:, :, 0].max(axis=0)[:, None]
        needed = np.where(
            np.isfinite(self.seconds), self.fixed + self.workspace + most * self.flight, INFINITY
        )
        chosen = tuple(needed.argmin(axis=1).tolist())
        if self.num_bytes(chosen) > memory_bytes or self.num_seconds(chosen) == INFINITY:
            return None
        while True:
            others = [
                (*chosen[:stage], budget, *chosen[stage + 1 :])
                for stage, budget in itertools.product(range(num_stages), range(num_budgets))
                if self.seconds[stage, budget] < self.seconds[stage, chosen[stage]]
            ]
            fitting = [
                (self.num_seconds(each), each) for each in others if self.num_bytes(each) <= memory_bytes
            ]
            if not fitting:
                return chosen
            chosen = min(fitting)[1]

    def num_seconds(self, budgets: Sequence[int]) -> float:
        return float(self.seconds[np.arange(len(budgets)), budgets].sum())

    def num_bytes(self, budgets: Sequence[int]) -> float:
        index = np.arange(len(budgets)), budgets
        held = (self.counts[:, :, 0] @ self.flight[index] + self.counts[:, :, 1] @ self.kept[index]).max()
        return float(self.fixed[index].sum() + self.workspace[index].max() + held)
