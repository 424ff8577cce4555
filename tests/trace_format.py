"""Says what is wrong with a file of the Trace Event Format, as far as this package writes it: JSON objects with X, b, e and M events.

In: the parsed file. Out: the findings, as texts. Terms as in the format: ``ts`` and ``dur`` are microseconds, ``pid`` and ``tid`` name
a track. Source: "Trace Event Format", the document that chrome://tracing and Perfetto's JSON import follow.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

# Times are rounded to nanoseconds.
_ROUNDING = 0.003
_NAMES = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def findings(trace: Any) -> list[str]:
    """What is wrong; empty when all is well."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no object with traceEvents"]
    found = [] if trace.get("displayTimeUnit") in ("ms", "ns") else ["displayTimeUnit is neither ms nor ns"]
    ends: dict[tuple[int, int], float] = defaultdict(lambda: float("-inf"))
    flights: dict[tuple[int, str, str], float] = {}
    for number, event in enumerate(trace["traceEvents"]):
        if problem := _of_event(event) or _of_time(event, ends, flights):
            found.append(f"event {number} ({event}): {problem}")
    found += [f"flight {key} never ends" for key in flights]
    return found


def _of_event(event: Any) -> str:
    if not isinstance(event, dict) or not {"name", "ph", "pid", "tid"} <= set(event):
        return "name, ph, pid or tid is missing"
    if not isinstance(event["name"], str) or any(type(event[key]) is not int for key in ("pid", "tid")):
        return "name is no text, or pid or tid no integer"
    if event["ph"] == "M":
        return "" if event["name"] in _NAMES and len(event.get("args", {})) == 1 else "unknown metadata"
    if event["ph"] not in ("X", "b", "e"):
        return "unknown phase"
    if not isinstance(event.get("ts"), int | float) or not isinstance(event.get("cat"), str):
        return "no ts, or no cat"
    if event["ph"] == "X" and not (isinstance(event.get("dur"), int | float) and event["dur"] >= 0):
        return "no dur, or a negative one"
    return "" if event["ph"] == "X" or isinstance(event.get("id"), str) else "no id"


def _of_time(event: dict[str, Any], ends: dict[tuple[int, int], float], flights: dict[tuple[int, str, str], float]) -> str:
    if event["ph"] == "X":
        track = (event["pid"], event["tid"])
        before, ends[track] = ends[track], event["ts"] + event["dur"]
        return "" if event["ts"] >= before - _ROUNDING else f"begins before {before}, the end of the one before on its track"
    if event["ph"] == "b":
        flights[event["pid"], event["cat"], event["id"]] = event["ts"]
    elif event["ph"] == "e":
        begin = flights.pop((event["pid"], event["cat"], event["id"]), None)
        return "" if begin is not None and event["ts"] >= begin else "ends before it begins"
    return ""
