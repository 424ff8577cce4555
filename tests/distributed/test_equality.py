"""Training over stages, replicas and micro-batches equals training in one process.

float64: relative error of the loss and of every gradient at most 1e-12 in the first step (1e-6 where the
model computes in float32 itself), float32: 1e-5; after five AdamW steps parameters and buffers agree too. A
good part of the matrix runs by default, all of it with `-m full`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case, Outcome
from tests.models import CONTRACT, HUGGING_FACE_NAMES, RANNC_SPARE, RANNC_SUITE, entry

# Its masks depend on the seed in the backend's own way: compared between plans in test_contract.py.
NOT_BY_REFERENCE = {"dropout"}
SMALL_MODELS = tuple(e.name for e in RANNC_SUITE + RANNC_SPARE + CONTRACT if e.name not in NOT_BY_REFERENCE)
PLANS_OF_WORLD = {
    1: ("1",),
    2: ("2", "1,1"),
    4: ("4", "2,2", "1,3", "1,1,2", "1,1,1,1"),
    8: ("2,2,2,2", "4,4", "1,2,4,1", "8"),
}
# Four and eight replicas do what two and three do: not every model shows it again.
MANY_REPLICAS = {"4", "8", "4,4"}
WITH_MANY_REPLICAS = {"mlp_loss", "basic", "gpt2"}
MICRO_BATCHES = (1, 2, 4, 3)
# Models that test_contract.py trains by default, most of them over four ranks.
IN_CONTRACT = {
    "auxiliary_loss", "batch_norm", "dict_output", "lora", "long_skip", "long_skip_loss", "mlp", "mlp_loss", "no_batch_input",
    "padded", "root_loss", "several_outputs", "tied_embedding",
}  # fmt: skip
# Fewer replicas behind more, and more between fewer.
UNEVEN_PLANS = ("3,1", "1,2,1")


def case_of(model: str, world: int, replicas: str, num_micro_batches: int, **members: Any) -> Case:
    """A case named after its place in the matrix."""
    plan = replicas.replace(",", "-") or "auto"
    suffix = "-float32" if members.get("dtype") == "float32" else ""
    suffix += "-inductor" if members.get("stage_compiler") == "inductor" else ""
    return Case(
        name=f"{model}-r{world}-s{plan}-m{num_micro_batches}{suffix}",
        model=model,
        world=world,
        replicas=replicas,
        num_micro_batches=num_micro_batches,
        **members,
    )


def fits(model: str, replicas: str) -> bool:
    """Whether the plan makes sense: enough layers for the stages, and statistics with a stated rule."""
    chosen = entry(model)
    counts = replicas.split(",")
    if chosen.batch_statistics and len(set(counts)) > 1:
        return False
    return (
        len(counts) == 1
        or chosen.deep
        or (len(counts) == 2 and chosen.trains and model not in ("embedding", "function"))
    )


def rows_of(model: str, world: int) -> tuple[int, ...]:
    """Uneven rows; for batch statistics so many that each of a replica's slices has two, of which there are
    four per rank.
    """
    return tuple((12, 11, 13, 12)[rank % 4] for rank in range(world)) if entry(model).batch_statistics else ()


def full_matrix() -> list[Case]:
    """Every model x plan x number of micro-batches."""
    cases = []
    for model, world in itertools.product((*SMALL_MODELS, *HUGGING_FACE_NAMES), PLANS_OF_WORLD):
        for replicas, num in itertools.product(PLANS_OF_WORLD[world], MICRO_BATCHES):
            if fits(model, replicas) and (replicas not in MANY_REPLICAS or model in WITH_MANY_REPLICAS):
                limit = 120.0 if model in HUGGING_FACE_NAMES else 60.0
                rows = rows_of(model, world)
                cases.append(case_of(model, world, replicas, num, rows=rows, limit_seconds=limit))
    for model, replicas in itertools.product((*SMALL_MODELS, *HUGGING_FACE_NAMES), UNEVEN_PLANS):
        if fits(model, replicas):
            cases.append(case_of(model, 4, replicas, 2, limit_seconds=120.0))
    return [*cases, *recompute_cases(), case_of("padded", 4, "1,2,1", 3, dtype="float32")]


def chosen_matrix() -> list[Case]:
    """The part that runs by default: the MLP in most ways, every other model over two ranks, some over one or
    four.

    A case over four ranks costs three of those over two: here are those that show what two ranks cannot. What
    test_contract.py trains is left to the full tests.
    """
    cases = [
        case_of(model, world, replicas, num)
        for world, model in ((1, "mlp"), (2, "mlp_loss"), (4, "mlp_loss"))
        for replicas in PLANS_OF_WORLD[world]
        for num in ((2, 3) if replicas == "1,1" else (1, 4) if world == 1 else (4,))
        # Over the others go other models.
        if replicas not in ("4", "2,2", "1,3")
    ]
    for index, model in enumerate(SMALL_MODELS):
        if model in IN_CONTRACT:
            continue
        narrow = "1,1" if fits(model, "1,1") else "2"
        cases.append(case_of(model, 2, narrow, (3, 2)[index % 2], rows=rows_of(model, 2)))
        # Models too small for more than two stages show nothing more over four ranks.
        if entry(model).deep:
            wide = [plan for plan in ("2,2", "1,1,1,1", *UNEVEN_PLANS[::-1]) if fits(model, plan)]
            cases.append(
                case_of(model, 4, wide[index % len(wide)], (2, 3, 4)[index % 3], rows=rows_of(model, 4))
            )
    for model in HUGGING_FACE_NAMES:
        if model not in ("gpt2_cache", "mixtral"):
            cases.append(case_of(model, 2, "1,1", 3, rows=rows_of(model, 2), limit_seconds=120))
    cases.append(case_of("mlp_loss", 2, "1,1", 2, dtype="float32"))
    cases.append(case_of("mlp_loss", 2, "1,1", 3, stage_compiler="inductor", limit_seconds=150, rows=(4, 2)))
    cases += [case for case in recompute_cases() if not case.name.startswith(("gpt2", "bert"))]
    return list({case.name: case for case in cases}.values())


def recompute_cases() -> list[Case]:
    """Stages that compute everything again (0), or a part, in backward; blocks that are measured before."""
    cases = []
    for model, replicas, budget, compiler in (
        ("mlp_loss", "1,1", 0, "eager"),
        ("mlp_loss", "1,1", 0.5, "eager"),
        ("mlp_loss", "1,1", 0, "inductor"),
        ("padded", "2", 0, "eager"),
        ("gpt2", "1,1", 0, "eager"),
        ("gpt2", "1,1", 0.5, "eager"),
        ("bert", "1,1", 0.25, "eager"),
    ):
        plain = case_of(model, 2, replicas, 2, stage_compiler=compiler, limit_seconds=150, num_steps=2)
        name = f"{plain.name.removesuffix('-inductor')}-recompute{budget}-{compiler}"
        cases.append(replace(plain, name=name, options={"recompute": budget}))
    for by_sum in (True, False):
        plain = case_of("mlp_loss", 2, "", 2, limit_seconds=150, num_steps=2)
        options = {"costs": "measured", "profile_by_acc": by_sum, "profiling_iter": 2}
        cases.append(
            replace(plain, name=f"{plain.name}-measured{'' if by_sum else '-stages'}", options=options)
        )
    return cases


def check_ownership(case: Case, outcome: Outcome) -> None:
    """Every gradient is on some rank; ranks of one stage own the same; stages share tied parameters only."""
    chosen = entry(case.model)
    owned = [frozenset(result["owned"]) for result in outcome.results]
    expected = set(outcome.results[0]["expected"])
    assert set().union(*owned) == expected, f"no rank owns {sorted(expected - set().union(*owned))}"
    for one, other in itertools.combinations(set(owned), 2):
        assert one & other <= chosen.shared, f"two stages own {sorted((one & other) - chosen.shared)}"
    if chosen.deep and case.num_stages:
        counts = sorted(owned.count(names) for names in set(owned))
        assert counts == case.lane_replicas, f"ranks own {owned}"


def parameters(cases: Iterable[Case], *marks: pytest.MarkDecorator) -> list[Any]:
    """pytest parameters with the case's name as the id."""
    return [pytest.param(case, id=case.name, marks=marks) for case in cases]


@pytest.mark.parametrize("case", parameters(chosen_matrix()))
def test_equals_one_process(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    check_ownership(case, outcome)


_CHOSEN = {case.name for case in chosen_matrix()}


@pytest.mark.full
@pytest.mark.parametrize("case", parameters(case for case in full_matrix() if case.name not in _CHOSEN))
def test_equals_one_process_full(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    check_ownership(case, outcome)
