"""Plans that a search has found, kept for later runs of the same job.

In: everything that a plan depends on (`Key`), and the directory of what is remembered. Out: a plan, or a file
of one. Rank 0 alone reads and writes. What is found is text that somebody may have changed: it is parsed and
checked against the graph as strictly as a plan that a user loads, and nothing in it is run. Whatever is wrong
with it, the plan is made anew.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rannc_backend
from rannc_backend.errors import RanncError
from rannc_backend.ir.plan import Plan
from rannc_backend.ir.plan_text import MAX_PLAN_CHARACTERS
from rannc_backend.settings.options import Config
from rannc_backend.settings.same_options import is_own
from rannc_backend.settings.user_files import (
    UserFile,
    find_text,
    make_directory,
    names_in,
    read_bytes,
    write_text,
)

logger = logging.getLogger(__name__)

MAX_PLANS = 64
_NAMED_BY = "option cache_dir, or $XDG_CACHE_HOME or ~/.cache"
_PACKAGES = ("rannc_backend", "rannc_backend.kernels", "rannc_backend.passes")
_MAX_PROFILE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a plan depends on.

    Attributes:
        fingerprint: of the graph.
        cluster: the whole description of the devices and links, measured or given.
        options: all but those that are a rank's own.
        batch_rows: of a step.
        lengths: that memory is planned for, and at which blocks are timed.
        hosts: of the ranks, by number: which ranks share one.
        device_memory_bytes: of this rank's device.
        profile: hash of the file of measured blocks that is looked at.
    """

    fingerprint: str
    cluster: str
    options: Mapping[str, Any]
    batch_rows: int
    lengths: Sequence[Sequence[int]]
    hosts: Sequence[int]
    device_memory_bytes: int
    profile: str

    @property
    def file_name(self) -> str:
        """Equal for equal keys of one version of this package and of torch."""
        facts = {
            "fingerprint": self.fingerprint,
            "cluster": self.cluster,
            "options": dict(self.options),
            "batch_rows": self.batch_rows,
            "lengths": list(map(list, self.lengths)),
            "hosts": list(self.hosts),
            "device_memory_bytes": self.device_memory_bytes,
            "profile": self.profile,
            "package": [rannc_backend.__version__, source_digest()],
            "torch": torch.__version__,
        }
        return f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]}.json"


def key_of(
    config: Config,
    *,
    fingerprint: str,
    cluster: str,
    batch_rows: int,
    lengths: Sequence[Sequence[int]],
    hosts: Sequence[str],
    device_memory_bytes: int,
) -> Key:
    """The key of a job's plan."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return Key(
        fingerprint=fingerprint,
        cluster=cluster,
        options={item: value for item, value in config.model_dump().items() if not is_own(item)},
        batch_rows=batch_rows,
        lengths=lengths,
        hosts=[numbers[host] for host in hosts],
        device_memory_bytes=device_memory_bytes,
        profile=_digest_of(config.profile_to_read),
    )


@functools.cache
def source_digest() -> str:
    """Of every file of this package: a plan of other code is another plan. Where they cannot be read, no plan
    is found again.
    """
    found = hashlib.sha256()
    try:
        for package in _PACKAGES:
            spec = importlib.util.find_spec(package)
            for folder in (spec and spec.submodule_search_locations) or ():
                for path in sorted(Path(folder).rglob("*.py")):
                    found.update(
                        f"{package} {path.relative_to(folder)}".encode() + b"\0" + path.read_bytes() + b"\0"
                    )
    except OSError:
        return secrets.token_hex(32)
    return found.hexdigest()


def _digest_of(profile: str) -> str:
    """Of the file of measured blocks; "" where there is none yet."""
    try:
        return hashlib.sha256(read_bytes(_file(profile), _MAX_PROFILE_BYTES)).hexdigest() if profile else ""
    except RanncError:
        return ""


def cached_plan(folder: Path, key: Key, check: Callable[[Plan], object]) -> Plan | None:
    """The plan of an earlier run, None where there is none that ``check`` lets pass; it raises errors of this
    package.
    """
    path = folder / key.file_name
    try:
        text = find_text(_file(path), 4 * MAX_PLAN_CHARACTERS)
        if not text:
            return None
        plan = Plan.from_json(text)
        check(plan)
    except RanncError as error:
        logger.info(
            "the plan of an earlier run in %s cannot be used, and is made anew: %s",
            path,
            str(error).splitlines()[0],
        )
        return None
    with suppress(OSError):
        os.utime(path)  # used last
    logger.info("plan of an earlier run, from %s; options={'plan_cache': False} makes it anew", path)
    return plan


def keep_plan(folder: Path, key: Key, plan: Plan) -> None:
    """Write a plan for later runs; of more than `MAX_PLANS` those go that were used longest ago."""
    try:
        make_directory(_file(folder))
        write_text(_file(folder / key.file_name), plan.to_json())
        names = [name for name in names_in(_file(folder)) if name.endswith(".json")]
    except RanncError as error:
        logger.info("the plan is not kept for later runs: %s", str(error).splitlines()[0])
        return
    if len(names) > MAX_PLANS:
        with suppress(OSError):
            for path in sorted((folder / name for name in names), key=lambda path: path.stat().st_mtime_ns)[
                :-MAX_PLANS
            ]:
                path.unlink()


def keep_measured(folder: Path, plan: Plan, measured: Plan) -> None:
    """Write a plan with what was measured in the place of the one that was kept before, where that still is, so that
    later runs of the same job need not measure.
    """
    text = plan.to_json()
    try:
        for name in names_in(_file(folder)):
            if name.endswith(".json") and find_text(_file(folder / name), 4 * MAX_PLAN_CHARACTERS) == text:
                write_text(_file(folder / name), measured.to_json())
    except RanncError as error:
        logger.info("what was measured is not kept for later runs: %s", str(error).splitlines()[0])


def _file(path: str | os.PathLike[str]) -> UserFile:
    return UserFile(path=path, what="plan of an earlier run", named_by=_NAMED_BY)
