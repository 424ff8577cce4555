"""Checkpoints over ranks: any number saves, any number loads, and the next steps are those of the job that
went on.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case

# Jobs of several worlds meet in it, each a group of ranks of its own.
DIRECTORY = Path(tempfile.gettempdir()) / f"rannc-checkpoints-{os.getpid()}"
STAGES = {1: "1", 2: "1,1", 4: "1,2,1"}
# Rows of the global batch are the same whatever the number of ranks.
ROWS = {1: (12,), 2: (7, 5), 4: (3, 4, 3, 2)}


def _case(name: str, model: str, world: int, check: str, **members: Any) -> Case:
    return Case(
        name=f"checkpoint-{name}-{model}-{world}",
        model=model,
        world=world,
        replicas=STAGES[world],
        rows=ROWS[world],
        num_micro_batches=2,
        check=check,
        limit_seconds=300,
        **members,
    )


def _path(model: str, world: int) -> str:
    return str(DIRECTORY / f"{model}-{world}")


def _saving(model: str, world: int) -> Case:
    return _case("saved", model, world, "checkpoint_saved", parameters={"path": _path(model, world)})


def _loading(model: str, sources: dict[int, list[str]], world: int) -> Case:
    """``sources``: worlds that saved, with when to load what they saved."""
    return _case(
        f"loaded-from-{''.join(map(str, sources))}",
        model,
        world,
        "checkpoint_loaded",
        parameters={
            "sources": {_path(model, saver): times for saver, times in sources.items()},
            "same": _path(model, world),
        },
        needs=tuple(SAVING[model, saver].name for saver in sources),
    )


@pytest.fixture(
    scope="session", autouse=True
)  # cases of other tests come between those that save and those that load
def _clean() -> Iterator[None]:
    yield
    shutil.rmtree(DIRECTORY, ignore_errors=True)


TIMES = ["before", "after"]
MODELS = ("dropout", "tied_embedding")
SAVING = {(model, world): _saving(model, world) for model in MODELS for world in STAGES}


SOME_SAVING = [SAVING["dropout", 2], SAVING["tied_embedding", 1]]
SOME_LOADING = [_loading("dropout", {2: ["before"]}, 2), _loading("tied_embedding", {1: ["after"]}, 2)]


@pytest.mark.parametrize("cases", [[*SOME_SAVING, case] for case in SOME_LOADING], ids=MODELS)
def test_saved_and_loaded(cases: list[Case], outcome_of: OutcomeOf) -> None:
    for case in cases:
        outcome_of(case).raise_if_failed()


ALL_LOADING = [_loading(model, dict.fromkeys(STAGES, TIMES), world) for model in MODELS for world in STAGES]


@pytest.mark.full
@pytest.mark.parametrize(
    "cases", [[*SAVING.values(), case] for case in ALL_LOADING], ids=[case.name for case in ALL_LOADING]
)
def test_saved_on_any_loaded_on_any(cases: list[Case], outcome_of: OutcomeOf) -> None:
    for case in cases:
        outcome_of(case).raise_if_failed()


OTHER = [
    _case("failures", "mlp_loss", 2, "checkpoint_failures"),
    _case("meta", "mlp_loss", 2, "checkpoint_of_a_meta_model"),
]


@pytest.mark.parametrize("case", OTHER, ids=lambda case: case.name)
def test_checkpoint(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


def across(which: str, **options: Any) -> list[Case]:
    """A job that saves and one that loads, of which the ``which`` one has other options; see test_zero.py."""
    saver, loader = (4, 2) if which == "saved" else (2, 4)
    name = "-".join(options)
    path = f"{_path('dropout', saver)}-{name}-{which}"
    saving = _case(
        f"{name}-{which}",
        "dropout",
        saver,
        "checkpoint_saved",
        parameters={"path": path},
        options=options if which == "saved" else {},
    )
    loading = _case(
        f"{name}-{which}-loaded",
        "dropout",
        loader,
        "checkpoint_loaded",
        parameters={"sources": {path: TIMES}, "same": ""},
        options=options if which == "loaded" else {},
        needs=(saving.name,),
    )
    return [saving, loading]
