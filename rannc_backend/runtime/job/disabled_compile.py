"""Says so where torch.compile is switched off, so that models run without the backend: torch does not ask it
then, and it cannot refuse.

In: the environment, and the frame of torch.compile while it looks the backend up. Out: a RuntimeWarning on
rank 0, once for each cause. Where the backend is asked, calls that go around it are errors
(`compiled_call.py`).

What is private to torch here: that `torch.compile` has a variable `disable` (seen on torch 2.13.0; see
tests/unit/rannc_backend/runtime/job/test_disabled_compile.py).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence

from rannc_backend.errors import LaunchError
from rannc_backend.runtime.launch import Launch, find_launch
from rannc_backend.settings import hooks

_VARIABLES = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
_FARTHEST = (
    60  # frames between torch.compile and the import of the backend, most of them of the import system
)


def disabling_variables(environ: Mapping[str, str]) -> list[str]:
    """Names of the variables that switch torch.compile off: each is 1."""
    return [name for name in _VARIABLES if environ.get(name) == "1"]


def shown_variables(names: Sequence[str]) -> str:
    """In words, with their value."""
    return " and ".join(f"{name}=1" for name in names)


def warn_if_disabled(environ: Mapping[str, str], *, stacklevel: int = 1) -> None:
    """Warn on rank 0 where a variable switches torch.compile off."""
    found = disabling_variables(environ)
    if found and _launch(environ).rank == 0:
        text = (
            f"{shown_variables(found)}: torch.compile does nothing, and models run without the backend, each "
            f"rank by itself; unset {' '.join(found)}"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)


def warn_if_looked_up_in_vain(environ: Mapping[str, str]) -> None:
    """Warn on rank 0 where ``torch.compile(..., disable=True)`` is what looks the backend up now."""
    frame = sys._getframe(1)
    for _ in range(_FARTHEST):
        if frame.f_code.co_name == "compile" and frame.f_globals.get("__name__") == "torch":
            if frame.f_locals.get("disable") is True and _launch(environ).rank == 0:
                text = "torch.compile(..., disable=True): the model runs without the backend, each rank by itself; leave disable out"
                caller = frame.f_back or frame
                warnings.warn_explicit(text, RuntimeWarning, caller.f_code.co_filename, caller.f_lineno)
            return
        if frame.f_back is None:
            return
        frame = frame.f_back


def say_if_unused(environ: Mapping[str, str], is_used: Callable[[], bool]) -> None:
    """At a good end of rank 0 of several: say so where no call has come to the backend that the script looked
    up.
    """
    launch = _launch(environ)
    if launch.size == 1 or launch.rank != 0:
        return
    reason = (
        shown_variables(disabling_variables(environ))
        or "a model that was never called, or torch.compile(..., disable=True)"
    )

    def at_exit() -> None:
        # Logging has ended, or never begun. Python leaves the error of an end that is none in `last_type`.
        if not is_used() and not hasattr(sys, "last_type"):
            sys.stderr.write(
                f"[rannc] warning: no call of a model came to the backend in this job: {reason}\n"
            )

    hooks.at_exit("unused", at_exit)


def _launch(environ: Mapping[str, str]) -> Launch:
    try:
        return find_launch(environ)
    except LaunchError:
        return Launch(launcher="single", rank=0, size=1)
