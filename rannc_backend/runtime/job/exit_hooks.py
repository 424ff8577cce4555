"""Sees every way in which Python code can end this process, and tells the monitor.

In: a `LinkMonitor`, the SystemExit that nobody catches, and what to do at a good end. Out: hooks around
sys.excepthook, threading.excepthook, os._exit, SIGINT, SIGTERM, fork and atexit. Hooks call what was there
before them. What no hook can see (SIGKILL, a crash in C) the supervisor sees by the broken connection.

Good end: the atexit handler says goodbye, waits for the others to do so, and only then takes the connections
down: a rank that closed its sockets while another still reads them would make the other one fail.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from rannc_backend.errors import CommunicationError, RankFailedError
from rannc_backend.runtime.job.interpreter_exit import InterpreterExit, exit_code
from rannc_backend.runtime.job.last_words import INTERRUPTED, trace_text, write_torchrun_error
from rannc_backend.runtime.job.monitor import REAL_EXIT, LinkMonitor, call_in_thread
from rannc_backend.settings import hooks

_BLOCKED_SECONDS = 1.0


class ExitHooks:
    """The hooks of one process.

    Args:
        on_good_end: takes the connections down, after all ranks have said goodbye.
        exits: tells with which SystemExit the interpreter ends.
    """

    def __init__(self, monitor: LinkMonitor, on_good_end: Callable[[], None], exits: InterpreterExit) -> None:
        self._monitor = monitor
        self._on_good_end = on_good_end
        self._exits = exits
        self._pid = os.getpid()
        self._last_interrupt = -_BLOCKED_SECONDS  # when the main thread last came to a KeyboardInterrupt
        self._thread_error = ""
        self._before_excepthook = sys.excepthook
        self._before_thread_hook = threading.excepthook
        self._undo: list[hooks.Undo] = []
        self._undo_signals: list[hooks.Undo] = []

    def install(self) -> None:
        """Put the hooks in place. Signals only from the main thread, and only where the user has no
        handler.
        """
        self._exits.watch()
        self._undo += [
            hooks.replace("exits", sys, "excepthook", self._excepthook),
            hooks.replace("exits", threading, "excepthook", self._thread_hook),
            hooks.replace("exits", os, "_exit", self._os_exit),
            hooks.at_exit("exits", self._at_exit),
        ]
        own = weakref.ref(self)
        hooks.after_fork("exits", lambda: _forget_in_child(own))
        if threading.current_thread() is threading.main_thread():
            self._install_signals()

    def _install_signals(self) -> None:
        undo = hooks.wake_on_signals("signals", self._monitor.signal_descriptor)
        if undo is None:
            return
        self._undo_signals.append(undo)
        self._monitor.watch_signals(self._on_signal)
        for number, ours, handler in (
            (signal.SIGINT, signal.default_int_handler, self._handle_interrupt),
            (signal.SIGTERM, signal.SIG_DFL, self._handle_terminate),
        ):
            if signal.getsignal(number) is ours:
                self._undo_signals.append(hooks.handle_signal("signals", number, handler))

    def remove(self) -> None:
        """Put back what was there, where it is still ours."""
        for undo in self._undo:
            undo()
        if threading.current_thread() is threading.main_thread():
            for undo in self._undo_signals:
                undo()

    def forget(self) -> None:
        """In a forked child: be an ordinary process again, and keep none of the parent's connections open."""
        self.remove()
        self._monitor.drop()

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        error = error.with_traceback(trace)
        # One message for the whole job: the monitor tells the cause, and then the traceback. A wait that
        # broke, and Ctrl-C, have none.
        is_told = not isinstance(error, (KeyboardInterrupt, CommunicationError, RankFailedError))
        if is_told:
            write_torchrun_error(error, os.environ)
        self._monitor.report_error(error, trace_text(self._before_excepthook, error) if is_told else "")
        # The process ends in here, so what the user wants run at exit runs here. The name is private but as
        # old as atexit.
        atexit.unregister(self._at_exit)
        atexit._run_exitfuncs()
        self._monitor.await_end()

    def _thread_hook(self, args: threading.ExceptHookArgs) -> None:
        # As in plain Python, a thread's error does not end the process. A rank that leaves too early because
        # of it says so.
        self._before_thread_hook(args)
        name = args.thread.name if args.thread is not None else "?"
        self._thread_error = f"thread {name}: {args.exc_type.__name__}: {args.exc_value}"

    def _os_exit(self, status: int) -> NoReturn:
        if os.getpid() == self._pid and not self._monitor.is_failing:
            if exit_code(status) == 0:
                self._monitor.close()
            else:
                self._monitor.report("exit", f"os._exit({status})", code=exit_code(status))
                self._monitor.await_end()
        REAL_EXIT(status)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        if not self._monitor.is_failing and self._exits.code:
            self._monitor.report("exit", self._exits.text, code=self._exits.code)
        if self._monitor.is_failing:
            self._monitor.await_end()
        self._monitor.close(self._thread_error)
        self.remove()
        self._on_good_end()

    def _handle_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._last_interrupt = time.monotonic()
        signal.default_int_handler(number, frame)

    def _handle_terminate(self, number: int, frame: FrameType | None) -> None:
        # _on_signal does it, in the monitor's thread: this one runs only once the main thread is back in
        # Python.
        return

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGTERM and signal.getsignal(number) == self._handle_terminate:
            self._monitor.report("signal", "received SIGTERM", code=128 + number)
        if number == signal.SIGINT and signal.getsignal(number) == self._handle_interrupt:
            call_in_thread(self._end_if_blocked)

    def _end_if_blocked(self) -> None:
        """End the job if the main thread has not come to its KeyboardInterrupt, because it waits in C++."""
        begin = time.monotonic()
        time.sleep(_BLOCKED_SECONDS)
        # Half of it for the handler that ran before this thread did.
        if self._last_interrupt < begin - _BLOCKED_SECONDS / 2:
            self._monitor.report("interrupt", INTERRUPTED, code=128 + signal.SIGINT)


def _forget_in_child(hooks_of_parent: weakref.ref[ExitHooks]) -> None:
    own = hooks_of_parent()
    if own is not None:
        own.forget()
