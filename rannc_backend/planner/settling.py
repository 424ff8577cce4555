"""Which plan to take of what a search found.

In: a search problem, the plan that was found in it, the best equal split. Out: the plan, priced with latency.
"""

from __future__ import annotations

from dataclasses import replace

from rannc_backend.planner.plan_parts import longest_compute, priced
from rannc_backend.planner.search.equal_split import even_shares
from rannc_backend.planner.search.problem import Pricer, SearchProblem, Solution
from rannc_backend.planner.search.search import TOLERANCE

_UNEVEN = 1.5  # times as much computing in the slowest stage as even shares would give it
_AS_FAST = 1e-3  # relative difference of steps that are called equal where the number of stages is given


def settle(problem: SearchProblem, found: Solution, equal: Solution | None) -> Solution:
    """The plan to take: what was found, priced with latency; of equally fast ones that with the preferred
    schedule.

    Where the search left latency out, another schedule or number of micro-batches may be faster with it, and
    so may an equal split. Where the number of stages is given, even shares of the computing are taken in
    place of a plan that is far from them: with few micro-batches stages only cost messages, and nobody who
    asks for stages wants one of them to do all the work.
    """
    without_latency = problem.num_stages is not None or problem.stage_replicas is not None
    numbers = problem.micro_batches if without_latency else (found.num_micro_batches,)
    best: Solution | None = None
    for schedule in problem.schedules:
        for number in numbers:
            other = priced(problem, replace(found, num_micro_batches=number), schedule=schedule)
            if other is not None and (
                best is None or other.step_seconds < best.step_seconds * (1 - TOLERANCE)
            ):
                best = other
    assert best is not None, "latency does not change what fits"
    if equal is not None and equal.step_seconds < best.step_seconds * (1 - TOLERANCE):
        best = equal
    if not without_latency or best.num_stages == 1:
        return best
    even = even_shares(Pricer(problem, best.num_micro_batches, best.schedule), best)
    if even is None:
        return best
    # With one micro-batch every cut takes equally long: then the even one, which also shares out the memory.
    as_fast = even.step_seconds <= best.step_seconds * (1 + _AS_FAST)
    unevenness = longest_compute(problem, best) / max(longest_compute(problem, even), 1e-30)
    if unevenness <= (1 if as_fast else _UNEVEN):
        return best
    return even if equal is None or even.step_seconds <= equal.step_seconds else equal
