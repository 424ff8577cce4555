"""One rank of a job of `rannc verify`: `python -m rannc_backend.verify.job DIRECTORY ranks|reference`.

In: the settings in that directory. Out: the script is run as if it had been started itself; beside it, in the
directory, what was recorded or found, the failure of this rank if it has one, and what its threads did when
time was up.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import random
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from rannc_backend.capture.module_compile import trace_modules_of_torch
from rannc_backend.compiled_call import casting
from rannc_backend.errors import CommunicationError, RankFailedError, RanncError, user_location
from rannc_backend.runtime.launch import find_launch
from rannc_backend.settings.sources import resolve_config
from rannc_backend.verify.models import Models
from rannc_backend.verify.recording import EnoughError, OtherSettingsNeededError, Recorder
from rannc_backend.verify.records import Records
from rannc_backend.verify.replay import Reference
from rannc_backend.verify.settings import (
    MODES,
    Failed,
    Failure,
    Mode,
    OtherSettingsNeeded,
    VerifySettings,
    failure_file,
    settings_file,
    stacks_file,
    write_whole,
)

# Each rank has its own numbers, in both runs the same, where the script sets no seed.
_SEED = 20261124
# Before the job is ended from outside.
_STACKS_BEFORE_SECONDS = 1.0


def main(directory: str, mode: str) -> None:
    """Run the script on this rank, or as this rank's part of the reference."""
    chosen = next(each for each in MODES if each == mode)
    folder = Path(directory)
    settings = VerifySettings.model_validate_json(settings_file(folder).read_text(encoding="utf-8"))
    rank = find_launch(os.environ).rank
    with stacks_file(folder, chosen, rank).open("w", encoding="utf-8") as stacks:
        faulthandler.dump_traceback_later(
            max(0.1, settings.limit_seconds - _STACKS_BEFORE_SECONDS), file=stacks
        )
        run(settings, Records(folder), chosen, rank)
        faulthandler.cancel_dump_traceback_later()


def run(settings: VerifySettings, records: Records, mode: Mode, rank: int) -> None:
    """Run the script with its models recorded, or replayed."""
    # Its own hooks come first.
    from rannc_backend.backend import rannc

    side = (Recorder if mode == "ranks" else Reference)(settings, records, rank, Models(settings))
    side.install()

    def wrap(
        compiled: Callable[..., Any], _: nn.Module | None, told: Mapping[str, Any]
    ) -> Callable[..., Any]:
        around = casting(functools.cache(lambda: resolve_config(told.get("options"), os.environ)))
        call = side.wrap(compiled)

        @functools.wraps(call)
        def within(*args: Any, **kwargs: Any) -> Any:
            # The plain model casts where the option has the compiled one cast.
            with around():
                return call(*args, **kwargs)

        return within

    trace_modules_of_torch(lambda backend: backend is rannc, wrap)
    for set_seed in (random.seed, numpy.random.seed, torch.manual_seed):
        set_seed(_SEED + rank)
    sys.argv = [settings.script, *settings.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(settings.script))
    try:
        runpy.run_path(settings.script, run_name="__main__")
        if isinstance(side, Reference) and rank == 0:
            side.write_result("script")
    except EnoughError:
        raise
    except BaseException as error:
        _leave_failure(error, records.directory, mode, rank)
        raise


def _leave_failure(error: BaseException, folder: Path, mode: Mode, rank: int) -> None:
    if isinstance(error, SystemExit) and not error.code:
        return
    place = user_location("".join(traceback.format_list(_below_runner(error))))
    if isinstance(error, OtherSettingsNeededError):
        failure: Failure = OtherSettingsNeeded(needs=error.needs)
    elif isinstance(error, CommunicationError | RankFailedError):
        failure = Failed(what=str(error), by_other=True)
    elif isinstance(error, RanncError):
        failure = Failed(
            what=_described(error, error.problem), place=error.location or place, cure=error.cure
        )
    else:
        text = f"exit code {error.code}" if isinstance(error, SystemExit) else str(error)
        failure = Failed(what=_described(error, text), place=place)
    write_whole(failure_file(folder, mode, rank), failure.model_dump_json())


def _described(error: BaseException, text: str) -> str:
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _below_runner(error: BaseException) -> list[traceback.FrameSummary]:
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)
    ]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
