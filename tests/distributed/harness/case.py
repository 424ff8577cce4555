"""What one distributed case is, and what came of it: data only, importable without torch.

In: nothing. Out: `Case` (also the pytest parameter) and `Outcome`. Terms: *world* is the number of ranks;
*replicas* is the text "1,2,1", replicas per stage, or "" when the planner decides; *check* is the name of the
worker's function for it; *owned* are the parameters whose gradient a rank has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of one model under one plan.

    Args:
        check: name in the worker's table of checks; "equality" compares training with one process.
        rows: rows of each rank's own batch, one number per rank.
        options: further options of torch.compile.
        environment: environment variables of the whole worker group; cases with equal ones share a group.
        parameters: further arguments of the check.
        limit_seconds: the group is ended when the case takes longer, where every rank has a core; see
        `limit_here`.
        stages_per_rank: the first ranks have the first stages, as many as there are lanes; then they have others.
        needs: names of cases that must have run before; such a case shares no group with others than those
        that need something too.
    """

    name: str
    model: str = "mlp"
    world: int = 1
    replicas: str = ""
    num_micro_batches: int = 1
    rows: tuple[int, ...] = ()
    dtype: str = "float64"
    num_steps: int = 5
    seed: int = 0
    check: str = "equality"
    stage_compiler: str = "eager"
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    limit_seconds: float = 60.0
    needs: tuple[str, ...] = ()
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        assert len(self.rows) in (0, self.world), (
            f"{self.name}: {len(self.rows)} numbers of rows, {self.world} ranks"
        )

    @property
    def local_rows(self) -> tuple[int, ...]:
        """Rows per rank; by default uneven: 4, 3, 5, 4, ..."""
        return self.rows or tuple((4, 3, 5, 4)[rank % 4] for rank in range(self.world))

    @property
    def num_stages(self) -> int:
        """Stages as asked for; 0 when the planner decides."""
        return len(self.replicas.split(",")) if self.replicas else 0

    @property
    def lane_replicas(self) -> list[int]:
        """How many ranks have the same stages, ascending."""
        replicas = [int(number) for number in self.replicas.split(",")]
        return sorted(replicas[: len(replicas) // self.stages_per_rank])

    @property
    def group(self) -> tuple[int, tuple[tuple[str, str], ...]]:
        """Cases with equal groups may run in the same processes."""
        return self.world, tuple(sorted(self.environment.items()))

    @property
    def limit_here(self) -> float:
        """`limit_seconds`, longer as more ranks share a core, and where kernels are compiled (46 s on a slow machine)."""
        compiling = 3.0 if self.stage_compiler == "inductor" else 1.0
        return self.limit_seconds * compiling * max(1.0, self.world / (os.cpu_count() or 1))

    def compile_options(self) -> dict[str, Any]:
        """The `options` of torch.compile."""
        chosen: dict[str, Any] = {
            "pipeline_num": self.num_micro_batches,
            "stage_compiler": self.stage_compiler,
            "max_partition_num": MAX_BLOCKS,
            # Left to itself the planner takes fill_drain for most of these small models, and no case would
            # have a backward in its forward.
            "schedule": "1f1b",
        }
        if self.replicas:
            chosen["stage_replicas"] = self.replicas
        return chosen | dict(self.options)

    def to_json(self) -> str:
        """One line that `from_json` reads back."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Case:
        """The case of such a line."""
        members = json.loads(text)
        return Case(**members | {"rows": tuple(members["rows"]), "needs": tuple(members["needs"])})


def on_plans(prefix: str, checks: Iterable[tuple[str, str]], *, limit_seconds: float) -> tuple[Case, ...]:
    """A case for each (check, replicas of the stages), with two micro-batches; its check is
    `<prefix>_<check>`.
    """
    return tuple(
        Case(
            name=f"{prefix}-{check}-{replicas}",
            check=f"{prefix.replace('-', '_')}_{check}",
            world=sum(map(int, replicas.split(","))),
            replicas=replicas,
            num_micro_batches=2,
            limit_seconds=limit_seconds,
        )
        for check, replicas in checks
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a case.

    Args:
        failures: texts of what was wrong, rank first; empty when the case passed.
        results: per rank, what the check returned (owned parameters, worst errors, ...).
    """

    failures: tuple[str, ...]
    results: tuple[Mapping[str, Any], ...]

    def raise_if_failed(self) -> None:
        """AssertionError with all failures."""
        assert not self.failures, "\n".join(self.failures)
