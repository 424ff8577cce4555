"""Says what is wrong with a file of the Trace Event Format, as far as this package writes it: JSON objects
with X, b, e, s, f and M events.

In: the parsed file. Out: the findings, as texts. Terms as in the format: ``ts`` and ``dur`` are microseconds,
``pid`` and ``tid`` name a track. Source: "Trace Event Format", the document that chrome://tracing and
Perfetto's JSON import follow.
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
    if event["ph"] not in ("X", "b", "e", "s", "f"):
        return "unknown phase"
    if not isinstance(event.get("ts"), int | float) or not isinstance(event.get("cat"), str):
        return "no ts, or no cat"
    if event["ph"] == "X" and not (isinstance(event.get("dur"), int | float) and event["dur"] >= 0):
        return "no dur, or a negative one"
    if event["ph"] == "f" and event.get("bp") != "e":
        return "an arrow that ends with the next slice"
    return "" if event["ph"] == "X" or isinstance(event.get("id"), str) else "no id"


def _of_time(
    event: dict[str, Any], ends: dict[tuple[int, int], float], flights: dict[tuple[int, str, str], float]
) -> str:
    if event["ph"] == "X":
        track = (event["pid"], event["tid"])
        before, ends[track] = ends[track], event["ts"] + event["dur"]
        return (
            ""
            if event["ts"] >= before - _ROUNDING
            else f"begins before {before}, the end of the one before on its track"
        )
    if event["ph"] == "b":
        flights[event["pid"], event["cat"], event["id"]] = event["ts"]
    elif event["ph"] == "e":
        begin = flights.pop((event["pid"], event["cat"], event["id"]), None)
        return "" if begin is not None and event["ts"] >= begin else "ends before it begins"
    return ""


def arrows(trace: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of each arrow of a whole file the slice that it leaves and the slice that it leads to, both as a viewer
    finds them.

    AssertionError where an arrow has not both ends once, or an end lies in no slice of its track.
    """
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    ends: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "sf":
            of_arrow = ends[event["id"]]
            assert event["ph"] not in of_arrow, f"two arrows are called {event['id']}"
            of_arrow[event["ph"]] = event
    found = []
    for identity, of_arrow in ends.items():
        assert of_arrow.keys() == {"s", "f"}, f"arrow {identity} has one end only: {of_arrow}"
        found.append(
            tuple(
                _slice_at(slices[of_arrow[end]["pid"], of_arrow[end]["tid"]], of_arrow[end]["ts"])
                for end in "sf"
            )
        )
    return found


def _slice_at(slices: list[dict[str, Any]], time: float) -> dict[str, Any]:
    """The last slice that has begun; of a track, whose slices do not overlap."""
    begun = [item for item in slices if item["ts"] <= time]
    assert begun and time <= begun[-1]["ts"] + begun[-1]["dur"], f"no slice at {time}"
    return begun[-1]
