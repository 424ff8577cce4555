"""What CUDA reads once, when it starts: how many hardware queues it gives this process, as each stream that waits for
another rank should have one of its own, and which devices it sees.

In: the environment, and whether CUDA has made its context, which reads it once. Out: the variable set where
that still helps, and a sentence where it does not. Terms: a *connection* is such a queue. CUDA makes 8 unless
CUDA_DEVICE_MAX_CONNECTIONS says otherwise, and streams beyond that number share one, in which whatever waits
holds up what was queued behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from rannc_backend.errors import OptionValueError
from rannc_backend.settings import hooks

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
WANTED = 32  # the most that CUDA makes
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
CURE = f"export {VARIABLE}={WANTED} before the ranks start (mpirun -x {VARIABLE}={WANTED}, or in the job's script)"


def set_connections(environ: MutableMapping[str, str], *, context_exists: bool) -> str:
    """Ask for as many as there can be, unless the user has set a number. Returns what is wrong, "" where
    nothing is.
    """
    problem = connections_problem(environ)
    if VARIABLE in environ:
        return problem
    # For child processes, where it comes too late for this one.
    hooks.replace_item("connections", environ, VARIABLE, str(WANTED))
    if not context_exists:
        return ""
    return f"the GPU was used before torch.compile(backend='rannc') could set {VARIABLE}: streams share 8 hardware queues; {CURE}"


def set_visible_devices(devices: str, environ: MutableMapping[str, str], *, context_exists: bool) -> None:
    """Let CUDA see these devices alone; "": as it is.

    Raises:
        OptionValueError: CUDA has started in this process, and sees other devices.
    """
    if not devices or environ.get(DEVICES_VARIABLE) == devices:
        return
    if context_exists:
        raise OptionValueError(
            "visible_devices",
            value=devices,
            source="options",
            expected=f"before the first use of a GPU, or export {DEVICES_VARIABLE}={devices} before the ranks start",
        )
    hooks.replace_item("connections", environ, DEVICES_VARIABLE, devices)


def connections_problem(environ: Mapping[str, str]) -> str:
    """What is wrong with the number that the user has set; "" where it is right, or left to us."""
    value = environ.get(VARIABLE, "").strip()
    if not value:
        return ""
    if not (value.isascii() and value.isdigit()):
        return f"{VARIABLE} is {value[:40]!r}, which is no number; {CURE}"
    if int(value[:9]) < WANTED:
        return f"{VARIABLE} is {value[:9]}: streams beyond that number share hardware queues, where one that waits holds up others; {CURE}"
    return ""
