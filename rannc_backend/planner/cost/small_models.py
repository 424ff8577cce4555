"""What small models on CPUs are given where the options leave it open: a first call of seconds.

In: the options, a kind of device, the number of elements of the model's parameters. Out: options that say it.
A small model is tried out more often than it is trained for hours. Inductor takes seconds of compilation per
layer and rank and gives back a share of each step, and pricing a model by tracing each distinct block takes
as long as capturing it: below a size, stages run as torch's own operators, and blocks are priced by their
forward operators. The size is measured: tests/benchmarks/stage_compilers.py, docs/performance.md.
"""

from __future__ import annotations

from rannc_backend.ir.plan import DeviceKind, StageCompiler
from rannc_backend.settings.options import Config

SMALL_MODEL_ELEMENTS = 50_000_000
"""Of all parameters: where Inductor gives back in about 300 steps what it took. (11,400 steps at 0.8 million,
1,000 at 14 million; the number of steps falls a little slower than the size grows.)"""
SMALL_MEMORY_SHARE = 0.25
"""Of the memory limit: prices by rules know what stages save coarsely, and only plans far below the limit are
taken from them.
"""


def stage_compiler(config: Config) -> StageCompiler:
    """The compiler that the options name; Inductor where they name none."""
    return "inductor" if config.stage_compiler == "auto" else config.stage_compiler


def settled(config: Config, kind: DeviceKind, num_elements: int) -> Config:
    """The options with a compiler in place of "auto"; the same on all ranks, as it depends on nothing
    else.
    """
    if config.stage_compiler != "auto":
        return config
    chosen = "eager" if _is_small(kind, num_elements) else "inductor"
    return config.model_copy(update={"stage_compiler": chosen})


def quick(config: Config, kind: DeviceKind, num_elements: int) -> Config | None:
    """The options with the quick prices, where they are open and nothing asks for what only traced blocks
    tell; else None.
    """
    is_open = (
        config.costs == "auto"
        and config.recompute == "auto"
        and not config.recompute_modules
        and not config.checkpointing
        and config.stage_memory == "auto"
    )
    if not is_open or config.profile_to_read or not _is_small(kind, num_elements):
        return None
    return config.model_copy(update={"costs": "rules"})


def _is_small(kind: DeviceKind, num_elements: int) -> bool:
    return kind == "cpu" and num_elements < SMALL_MODEL_ELEMENTS


def why_eager(num_elements: int) -> str:
    """One line for who left the choice to the rule."""
    return (
        f"stages run operator by operator: with {num_elements:,} parameters on CPUs, compiled ones need many "
        "hundred steps to give back the time of their compilation; stage_compiler='inductor' compiles them "
        "all the same"
    )
