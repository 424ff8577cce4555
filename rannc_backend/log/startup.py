"""What rank 0 says once when a model starts: the options that are in force, and which rank is where.

In: resolved options, the world. Out: lines of the log. Terms: a *place* is where a rank runs: host and
device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby

from rannc_backend.log.logger import say_once
from rannc_backend.settings.sources import Resolution
from rannc_backend.settings.torch_version import NEWEST, OLDEST, numbers_of, version_text

logger = logging.getLogger(__name__)

_MAX_HOSTS = 8
_MAX_RANKS = 8


def say_options(resolution: Resolution) -> None:
    """Say which file was read, what became of retired items, and with show_config_items what every item is.
    Once per process.
    """
    if resolution.file is not None:
        say_once(logger, f"options from {resolution.file}")
    for notice in resolution.notices:
        say_once(logger, notice)
    if resolution.config.show_config_items:
        say_once(logger, "\n".join(["options:", *resolution.lines()]))


def say_places(hosts: Sequence[str], devices: Sequence[str], launcher: str) -> None:
    """Say which rank is on which host and device. `hosts`, `devices`: by rank."""
    say_once(logger, places_text(hosts, devices, launcher))


def places_text(hosts: Sequence[str], devices: Sequence[str], launcher: str) -> str:
    """ "4 ranks (mpi): ranks 0-1 on a: cuda:0, cuda:1; ranks 2-3 on b: cuda:0, cuda:1"."""
    ranks = range(len(hosts))
    runs = [list(group) for _, group in groupby(ranks, key=lambda rank: hosts[rank])]
    texts = [
        f"{_ranks_text(run)} on {hosts[run[0]]}: {_devices_text([devices[rank] for rank in run])}"
        for run in runs[:_MAX_HOSTS]
    ]
    if len(runs) > _MAX_HOSTS:
        texts.append(f"and {len(ranks) - runs[_MAX_HOSTS][0]} more ranks")
    number = "1 rank" if len(hosts) == 1 else f"{len(hosts)} ranks"
    return f"{number} ({launcher}): {'; '.join(texts)}"


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _devices_text(devices: Sequence[str]) -> str:
    if len(set(devices)) == 1:
        return devices[0] if len(devices) == 1 else f"{devices[0]} each"
    if len(devices) > _MAX_RANKS:
        return f"{', '.join(devices[:_MAX_RANKS])} and so on"
    return ", ".join(devices)


def mention_untried_torch(version: str) -> None:
    """Say once that ``version`` is newer than `NEWEST`."""
    found = numbers_of(version)
    if found is not None and found > NEWEST:
        say_once(
            logger,
            "torch %s is newer than this backend has been tried on (%s to %s); if it fails, use one of those",
            version,
            version_text(OLDEST),
            version_text(NEWEST),
            level=logging.WARNING,
        )
