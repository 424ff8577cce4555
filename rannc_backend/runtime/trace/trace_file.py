"""The event trace as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open: one part per rank,
then all ranks in one.

In: `EventTrace`s. Out: JSON of the Trace Event Format: a process per rank, a thread per track, "X" events for
slices, "b" and "e" for flights, "s" and "f" for the two ends of an arrow; microseconds of rank 0's clock. A
part is such a file itself, so that what ranks wrote before a job failed can be opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rannc_backend.runtime.job.monitor import LinkMonitor
from rannc_backend.runtime.trace.event_trace import TRACKS, Arrow, EventTrace, Slice
from rannc_backend.runtime.world import World
from rannc_backend.settings import hooks
from rannc_backend.settings.user_files import UserFile, names_in, read_text, require_writable, write_text

logger = logging.getLogger(__name__)

_TRACKS_OF_A_RANK = 100
_END_LIMIT_SECONDS = 30.0
_POLL_SECONDS = 0.02
_MAX_PART_BYTES = 2**32
_ARROW = "message"  # the category of arrows, and of nothing else
_ROUNDING_MICROSECONDS = 0.001
_FIRST, _LAST = '"traceEvents":[\n', "\n]}\n"


def begin_trace(world: World, file: str, running: EventTrace | None) -> EventTrace:
    """Trace this process from now on, and write ``file`` when it ends; all models go into the trace that is
    ``running``.

    Raises:
        UserInputError: the file cannot be written.
    """
    if running is not None:
        if running.file != file and world.rank == 0:
            logger.warning(
                "a trace goes to %s already: event_trace_file=%r of this model has no effect",
                running.file,
                file,
            )
        return running
    require_writable(trace_file(file))
    require_writable(trace_file(part_path(file, world.rank)))
    if world.rank == 0:
        remove_parts(file)
    trace = EventTrace(world=world, file=file)
    # After the world's own handler, so called before it: the other ranks are still there.
    hooks.at_exit("trace file", write_at_exit, trace)
    return trace


def trace_file(path: str | Path) -> UserFile:
    """The trace or a part of it, as the option names it."""
    cure = "give event_trace_file a path in a directory that can be written to."
    return UserFile(path=path, what="event trace", named_by="option event_trace_file", cure=cure)


def part_path(file: str, rank: int) -> Path:
    """Where rank ``rank`` writes its own events."""
    path = Path(file)
    return path.with_name(f"{path.stem}.rank{rank:05d}{path.suffix}")


def write_part(trace: EventTrace) -> None:
    """Write this rank's events. Raises `UserInputError` saying why they cannot be written."""
    rank = trace.world.rank
    lines = [json.dumps(event, separators=(",", ":")) for event in _events(trace)]
    details = {
        "rank": rank,
        "clock_error_microseconds": round(trace.offsets.error_seconds * 1e6, 3),
        "events_forgotten": trace.num_forgotten,
        "most_events": trace.most_marks,
    }
    _write(part_path(trace.file, rank), lines, [details])


def merge(trace: EventTrace, ranks: Sequence[int]) -> None:
    """On rank 0: one file of the parts of ``ranks``, which are removed. Arrows with one end forgotten or not
    there are left out.
    """
    lines: list[str] = []
    details: list[dict[str, Any]] = []
    for rank in ranks:
        head, _, rest = read_text(trace_file(part_path(trace.file, rank)), _MAX_PART_BYTES).partition(_FIRST)
        details += json.loads(f"{head.rstrip().rstrip(',')}}}")["otherData"]["ranks"]
        lines += rest.removesuffix(_LAST).split(",\n")
    _write(Path(trace.file), _without_half_arrows(lines), details)
    for rank in ranks:
        part_path(trace.file, rank).unlink(missing_ok=True)


def _without_half_arrows(lines: Sequence[str]) -> list[str]:
    mark = f'"cat":"{_ARROW}"'
    identities = [json.loads(line)["id"] if mark in line else "" for line in lines]
    num_ends = Counter(identities)
    return [
        line
        for line, identity in zip(lines, identities, strict=True)
        if not identity or num_ends[identity] == 2
    ]


def remove_parts(file: str) -> None:
    """Remove parts that an earlier job has left."""
    path = Path(file)
    part = re.compile(rf"{re.escape(path.stem)}\.rank[0-9]{{5}}{re.escape(path.suffix)}")
    for name in names_in(trace_file(path.parent)):
        if part.fullmatch(name):
            with contextlib.suppress(OSError):
                path.with_name(name).unlink()


def write_at_exit(trace: EventTrace) -> None:
    """The end of the process: no collectives, since other ranks may be anywhere; rank 0 takes what the others
    have written in time.
    """
    trace.close()
    try:
        write_part(trace)
        if trace.world.rank == 0 and not (
            isinstance(trace.world.monitor, LinkMonitor) and trace.world.monitor.is_failing
        ):
            ranks = _await_parts(trace)
            merge(trace, ranks)
            missing = trace.world.size - len(ranks)
            logger.info(
                "event trace of %d rank(s) in %s%s",
                len(ranks),
                trace.file,
                f"; {missing} did not write theirs" if missing else "",
            )
    except (OSError, ValueError) as error:
        logger.warning("no event trace: %s", error)


def _await_parts(trace: EventTrace) -> list[int]:
    begin = time.monotonic()
    while True:
        there = [rank for rank in range(trace.world.size) if part_path(trace.file, rank).exists()]
        if len(there) == trace.world.size or time.monotonic() - begin > _END_LIMIT_SECONDS:
            return there
        time.sleep(_POLL_SECONDS)


def _events(trace: EventTrace) -> Iterator[dict[str, Any]]:
    rank = trace.world.rank
    heading = f"rank {rank}{': ' if trace.label else ''}{trace.label}"
    yield _named("process_name", rank, _track_id(rank, TRACKS[0]), name=heading)
    yield _named("process_sort_index", rank, _track_id(rank, TRACKS[0]), sort_index=rank)
    for number, track in enumerate(TRACKS):
        yield _named("thread_name", rank, _track_id(rank, track), name=track)
        yield _named("thread_sort_index", rank, _track_id(rank, track), sort_index=number)
    timed = [
        event for number, item in enumerate(trace.slices()) for event in _slice_events(trace, item, number)
    ]
    yield from sorted(timed, key=lambda event: event["ts"])


def _track_id(rank: int, track: str) -> int:
    """No other rank's, and no rank: a viewer takes 0 for the idle thread, and for the main thread that with
    the number of its process.
    """
    return _TRACKS_OF_A_RANK * (rank + 1) + TRACKS.index(track)


def _named(name: str, rank: int, track: int, /, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": track, "args": arguments}


def _slice_events(trace: EventTrace, item: Slice, number: int) -> list[dict[str, Any]]:
    begin, end = (
        round((seconds - trace.offsets.at(seconds).seconds) * 1e6, 3) for seconds in (item.begin, item.end)
    )
    event = {
        "name": item.name,
        "cat": item.track,
        "pid": trace.world.rank,
        "tid": _track_id(trace.world.rank, item.track),
        "ts": begin,
    }
    event["args"] = {"step": item.step} | ({"micro_batch": item.micro_batch} if item.micro_batch >= 0 else {})
    if not item.flight:
        arrows = [event | _arrow(arrow, begin, end) for arrow in item.arrows]
        return [event | {"ph": "X", "dur": round(max(0.0, end - begin), 3)}, *arrows]
    own = {"cat": f"{item.track} under way", "id": f"{trace.world.rank}-{number}"}
    return [event | own | {"ph": "b"}, event | own | {"ph": "e", "ts": max(begin, end)}]


def _arrow(arrow: Arrow, begin: float, end: float) -> dict[str, Any]:
    """Its end in a slice: a viewer ties it to the slice that is there at its time. Identities are
    hexadecimal, as Perfetto reads them.
    """
    identity = hashlib.blake2b(arrow.message.encode(), digest_size=8).hexdigest()
    own = {"name": _ARROW, "cat": _ARROW, "id": f"0x{identity}"}
    if arrow.begins:
        return own | {"ph": "s"}
    return own | {"ph": "f", "bp": "e", "ts": max(begin, round(end - _ROUNDING_MICROSECONDS, 3))}


def _write(path: Path, lines: Sequence[str], details: Sequence[dict[str, Any]]) -> None:
    head = json.dumps({"displayTimeUnit": "ns", "otherData": {"kind": "rannc event trace", "ranks": details}})
    write_text(trace_file(path), itertools.chain((f"{head[:-1]},\n{_FIRST}",), _separated(lines), (_LAST,)))


def _separated(lines: Sequence[str]) -> Iterator[str]:
    return (f",\n{line}" if number else line for number, line in enumerate(lines))
