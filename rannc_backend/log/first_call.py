"""The first call takes seconds to minutes before its first step: rank 0 says from the first second what is
done, and how long it takes.

In: the phases that the monitor is told anyway. Out: a line when a phase begins or goes on for long, with the
time left as an earlier run of the same model tells it, or else roughly as another model's did (in the first run on a
machine, the README's example where it was measured), and a closing line with the seconds of each. A first call of
less than a second says nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rannc_backend.errors import RanncError
from rannc_backend.log.progress import duration_text
from rannc_backend.settings.options import Config
from rannc_backend.settings.user_files import UserFile, find_text, make_directory, write_text

logger = logging.getLogger(__name__)

PHASES = ("capture", "planning", "compilation", "first step")
_DOING = ("capturing the model as one graph", "planning", "compiling", "first step")
_BEGINNINGS = {
    "planning": 1,
    "measuring": 1,
    "giving": 1,
    "compil": 2,
    "step": 3,
}  # of what the monitor is told
# Seconds of each phase of the README's example on two ranks, with empty caches, by compiler.
_README = {"eager": (8.1, 7.1, 5.5, 0.1), "inductor": (8.8, 9.2, 42.1, 0.1)}
_FIRST_SECONDS = 1.0
_PERIOD_SECONDS = 10.0
_POLL_SECONDS = 0.1
_MAX_BYTES = 4096


@dataclass(slots=True, kw_only=True)
class FirstCall:
    """Watches one first call; a later one is not watched. Any thread may call the methods.

    Attributes:
        log: where lines go.
        clock: seconds.
        ticks: whether a thread looks at the phases; without it, `look` has to be called.
    """

    log: Callable[[str], None] = logger.info
    clock: Callable[[], float] = time.monotonic
    ticks: bool = True
    _phase_text: Callable[[], str] = lambda: ""
    _memory: Path | None = None
    _expected: tuple[float, ...] = ()
    _of_another: tuple[float, ...] = ()
    _who: str = ""  # that other one
    _began: float | None = None
    _last_line: float | None = None
    _said: int = -1
    _at: int = 0
    _since: float = 0.0
    _spent: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Dynamo begins to trace. Does nothing but the first time."""
        with self._lock:
            if self._began is not None:
                return
            self._began = self._since = self.clock()
        if self.ticks:
            threading.Thread(target=self._run, name="rannc-first-call", daemon=True).start()

    def attach(self, phase_text: Callable[[], str], memory: Path, *, on_gpu: bool = False) -> None:
        """The backend is reached: from now on phases are told by `phase_text`; `memory` is the file of what
        this call took before.
        """
        with self._lock:
            if self._began is None or self._over.is_set() or self._memory is not None:
                return
            self._phase_text, self._memory, self._expected = phase_text, memory, _remembered(memory)
            self._of_another, self._who = ((), "") if self._expected else _another(memory, on_gpu)

    @property
    def is_attached(self) -> bool:
        """Whether the backend was reached."""
        return self._memory is not None

    def cancel(self) -> None:
        """The call failed; nothing more is said."""
        self._over.set()

    def done(self) -> None:
        """The first step is made."""
        if self._began is None or self._over.is_set():
            return
        self.look()
        with self._lock:
            self._over.set()
            now = self.clock()
            self._spent[self._at] += now - self._since
            if self._said < 0:
                return
            parts = ", ".join(f"{name} {spent:.1f}" for name, spent in zip(PHASES, self._spent))
            self.log(f"first call done in {now - self._began:.1f} s: {parts}")
            if self._memory is not None:
                _remember(self._memory, self._spent)

    def look(self) -> None:
        """Say what is to be said now."""
        with self._lock:
            if self._began is None or self._over.is_set():
                return
            now, text = self.clock(), self._phase_text()
            at = next(
                (number for beginning, number in _BEGINNINGS.items() if text.startswith(beginning)), self._at
            )
            if at > self._at:
                self._spent[self._at] += now - self._since
                self._at, self._since = at, now
            is_long = self._last_line is not None and now - self._last_line >= _PERIOD_SECONDS
            if now - self._began < _FIRST_SECONDS or (self._at <= self._said and not is_long):
                return
            again = "still " if self._at <= self._said else ""
            self._said, self._last_line = self._at, now
            self.log(
                f"first call, {self._at + 1} of {len(PHASES)}: "
                f"{again}{_doing(self._at, text)}{self._left(now)}"
            )

    def _left(self, now: float) -> str:
        """ ", about 4 s left" where an earlier run tells; of another model, as long as its capture was to this one's."""
        expected, words = self._expected, "about {} left, as in an earlier run"
        if not expected and self._at and self._of_another and self._of_another[0] > 0:
            scale = self._spent[0] / self._of_another[0]
            expected = tuple(scale * seconds for seconds in self._of_another)
            words = f"roughly {{}} left, judging by {self._who}"
        if not expected:
            return ""
        left = sum(expected[self._at + 1 :]) + max(0.0, expected[self._at] - (now - self._since))
        return ", " + words.format(duration_text(max(1.0, left)))

    def _run(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            self.look()


def memory_of(folder: Path, model: str, num_ranks: int, config: Config) -> Path:
    """The file of what the first call of such a model took: equal models (by this text), numbers of ranks and
    options share it. Those that are compiled alike begin alike.
    """
    text = f"{num_ranks} {sorted(config.model_dump().items())} {model}"
    return (
        folder
        / "first_calls"
        / f"{config.stage_compiler}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    )


def _doing(at: int, text: str) -> str:
    return text if _DOING[at] == "compiling" and text.startswith("compiling") else _DOING[at]


def _remembered(path: Path) -> tuple[float, ...]:
    """Seconds of each phase; () where the file is not there or is none of ours."""
    try:
        values = json.loads(find_text(_file(path), _MAX_BYTES) or "[]")
        found = tuple(float(value) for value in values)
    except (RanncError, OSError, ValueError, TypeError, RecursionError, OverflowError):
        return ()
    return found if len(found) == len(PHASES) and all(0 <= value < 1e6 for value in found) else ()


def _another(path: Path, on_gpu: bool) -> tuple[tuple[float, ...], str]:
    """What the last first call took of those that were compiled as this one is, and whose it was: a model's of this
    machine, or else the README's.
    """
    compiler = path.stem.partition("-")[0]
    try:
        others = sorted(path.parent.glob(f"{compiler}-*.json"), key=lambda other: other.stat().st_mtime)
    except OSError:  # another job has taken one away
        others = []
    seconds = _remembered(others[-1]) if others else ()
    if seconds:
        return seconds, "another model"
    # "auto" compiles on GPUs, and not the small models that are tried on CPUs.
    return _README.get(compiler, _README["inductor" if on_gpu else "eager"]), "a small GPT-2 elsewhere"


def _remember(path: Path, spent: list[float]) -> None:
    with suppress(RanncError):
        make_directory(_file(path.parent))
        write_text(_file(path), json.dumps([round(value, 2) for value in spent]))


def _file(path: Path) -> UserFile:
    return UserFile(path=path, what="times of first calls", named_by="option cache_dir")
