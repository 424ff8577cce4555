"""What a verification is asked for, and what one of its jobs says in the end: values that travel as JSON
between processes.

In: the command line. Out: `VerifySettings` for the ranks; `Failure` and `Result` for the one who asked. No
torch here.

Terms: the *ranks* run the script with the backend and record; the *reference* is one process that runs the
same script with the plain model on the ranks' rows put one after the other. A *call* is one call of a
compiled model, a *step* one step of an optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Mode = Literal["ranks", "reference"]
Dtype = Literal["float64", "own"]
MODES: tuple[Mode, ...] = ("ranks", "reference")
# A script that calls the model and never steps an optimizer (evaluation, a loss scale that only shrinks) is
# stopped there.
MAX_CALLS_PER_STEP = 64


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class VerifySettings(_Frozen):
    """What the ranks of both jobs need to know.

    Attributes:
        layers: path of a ModuleList or Sequential in the model → how many of its modules are kept.
        dtype: "float64": the model and its floating inputs are converted; "own": they are left as they are.
        evaluation: the models are held in evaluation mode, as random numbers or batch statistics could not be
        compared.
    """

    script: str
    arguments: tuple[str, ...] = ()
    num_ranks: int = Field(ge=1)
    num_steps: int = Field(ge=1)
    layers: dict[str, int] = {}
    dtype: Dtype = "float64"
    evaluation: bool = False
    limit_seconds: float = Field(gt=0)


class Failed(_Frozen):
    """A rank could not go on.

    Attributes:
        what: class of the error, and its text.
        place: in the user's source, as "train.py:12, in main"; "" where there is none.
        by_other: because another rank could not.
    """

    what: str
    place: str = ""
    cure: str = ""
    by_other: bool = False


Needs = Literal["random numbers", "batch statistics"]


class OtherSettingsNeeded(_Frozen):
    """The models can be compared in evaluation mode only, because of what they need."""

    needs: Needs


Failure = Failed | OtherSettingsNeeded
FAILURE: TypeAdapter[Failure] = TypeAdapter(Failure)
"""Reads and writes a rank's `Failure`, as JSON."""


ValueKind = Literal["output", "gradient", "parameter", "buffer"]


class Difference(_Frozen):
    """A value of the ranks that is not the reference's.

    Attributes:
        step: the first is 1. ``call``: of all calls, the first is 1.
        largest: of the differences of two elements; ``scale``: what it is compared with, the largest element
        of the value or a fraction
            of the largest of its kind.
        index: of the element that differs most, with its value here and there.
    """

    step: int
    call: int
    kind: ValueKind
    name: str
    rank: int
    largest: float
    scale: float
    allowed: float
    index: tuple[int, ...] = ()
    here: float = 0.0
    there: float = 0.0
    problem: str = ""

    @property
    def relative(self) -> float:
        """The largest difference, relative to the scale."""
        return self.largest / self.scale if self.scale > 0 else float("inf") if self.largest else 0.0


class Largest(_Frozen):
    """The largest relative difference among values of one kind in one step, and where."""

    relative: float = 0.0
    name: str = ""


class StepResult(_Frozen):
    """One step. ``loss``: the first scalar output of its last call, on rank 0 and in the reference; None: the
    model returns none.
    """

    number: int
    num_calls: int = 0
    loss: tuple[float, float] | None = None
    largest: dict[str, Largest] = {}
    num_compared: dict[str, int] = {}


class Result(_Frozen):
    """What the reference has found.

    Attributes:
        differences: at most a few, in the order in which they came to be.
        narrowest: the dtype with the fewest digits in which the plain model computed; ``narrowest_at``:
        where.
        ended: why it stopped: "steps", "calls" or "script".
        notes: sentences about what was not compared, or not as the script has it.
    """

    steps: tuple[StepResult, ...]
    differences: tuple[Difference, ...]
    num_differences: int
    num_parameters: int
    tolerance: float
    narrowest: str
    narrowest_at: str = ""
    ended: str
    notes: tuple[str, ...] = ()


def settings_file(directory: Path) -> Path:
    """Where a job finds its settings."""
    return directory / "settings.json"


def result_file(directory: Path) -> Path:
    """Where the reference leaves what it has found."""
    return directory / "result.json"


def plan_file(directory: Path) -> Path:
    """Where rank 0 says in a line what plan it follows."""
    return directory / "plan.txt"


def progress_file(directory: Path, mode: Mode) -> Path:
    """A line per step that rank 0 has done."""
    return directory / f"progress-{mode}.txt"


def failure_file(directory: Path, mode: Mode, rank: int) -> Path:
    """Where a rank leaves its `Failure`."""
    return directory / f"failure-{mode}-{rank}.json"


def stacks_file(directory: Path, mode: Mode, rank: int) -> Path:
    """Where a rank leaves what its threads do when time is up."""
    return directory / f"stacks-{mode}-{rank}.txt"


def write_whole(path: Path, text: str) -> None:
    """Write a file of our own directory, which is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
