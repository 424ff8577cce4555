"""The save that runs beside training, and how failures of the file system become errors of this package.

In: a `SaveJob`. Out: a checkpoint some time later, or a problem that the next call raises. Where there is no
next call, the problem fails the job at its end.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rannc_backend.checkpoint.saving import SaveJob
from rannc_backend.errors import CheckpointWriteError, RanncError
from rannc_backend.runtime.job.interpreter_exit import run_other_exit_functions
from rannc_backend.runtime.job.monitor import SingleMonitor, end_process
from rannc_backend.runtime.world import Monitor
from rannc_backend.settings import hooks

logger = logging.getLogger(__name__)


def guarded(
    what: str, action: Callable[[], Any], kind: type[RanncError] = CheckpointWriteError
) -> RanncError | None:
    """Do it; the problem, of class ``kind``, where the file system or a library says no."""
    try:
        action()
    except RanncError as error:
        return error
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        cure = "give a directory that all ranks can reach, with room enough."
        problem = kind(f"{what}: {error.strerror or error}{place}", cure=cure)
        problem.__cause__ = error
        return problem
    except Exception as error:  # noqa: BLE001 - libraries have classes of their own for the same things
        problem = kind(f"{what}: {type(error).__name__}: {error}")
        problem.__cause__ = error
        return problem
    return None


@dataclass(slots=True)
class BackgroundSave:
    """The save that runs beside training in this process, if any: at most one.

    Its thread is no daemon: the interpreter waits for it at exit.
    """

    _thread: threading.Thread | None = None
    _problem: RanncError | None = None
    _monitor: Monitor | None = None
    _pid: int = 0

    def start(self, job: SaveJob, monitor: Monitor) -> None:
        """Write and publish ``job`` in a thread. ``monitor``: is told at the end of the process of a problem
        that nobody was told.
        """
        assert self._thread is None, "a save is under way"
        if self._monitor is None:
            self._monitor, self._pid = monitor, os.getpid()
            # After the hooks of the job, so that it runs before they say that this rank ends in order.
            hooks.at_exit("checkpoint end", self._at_exit)
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"save {job.name}")
        self._thread.start()

    def finish(self) -> RanncError | None:
        """Wait for the save that is under way; its problem, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        return problem

    def _at_exit(self) -> None:
        problem = self.finish() if os.getpid() == self._pid else None
        if problem is None or self._monitor is None:
            return
        self._monitor.report_error(problem)
        if isinstance(self._monitor, SingleMonitor):
            run_other_exit_functions(self._at_exit)
            end_process(1)

    def _run(self, job: SaveJob) -> None:
        what = f"the checkpoint {str(job.path)!r} was not written"
        problem = guarded(what, job.write_part)
        if problem is not None:
            job.give_up(str(problem))
        elif job.rank == 0:
            problem = guarded(what, job.publish)
        if problem is not None:
            # The next call raises it; there may be none.
            logger.error("rank %d: %s", job.rank, problem)
            self._problem = problem
