"""Ranks of a host that need the same compiled graph: one compiles it, the others wait and find it in the
compiler's cache on disk.

In: the compiler's cache directory and a digest of the graph. Out: a context in which no other process of this
host compiles that graph. Replicas of a stage, and stages of equal layers, have equal graphs; compiled by all
ranks at once, each takes its part of the host's cores for the same work. The lock is the kernel's (flock): it
ends with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from torch import fx

from rannc_backend.settings.user_files import LOCKABLE_FILE

logger = logging.getLogger(__name__)

WAIT_SECONDS = 600.0
"""For a process that compiles the same; after that this one compiles too."""
_PERIOD_SECONDS = 0.02
_LOCKS = "rannc_locks"


def digest_of(graph_module: fx.GraphModule, what: str) -> str:
    """Equal for graphs of equal code over equal inputs, in all processes; `what` tells apart what is made of
    them.
    """
    fakes = [str(node.meta.get("val")) for node in graph_module.graph.find_nodes(op="placeholder")]
    text = "\n".join([what, graph_module.graph.python_code("self").src, *fakes])
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def compiled_once(cache: Path, digest: str, *, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Hold the lock of one graph. Where the cache's file system has no locks, or the holder is too slow,
    nothing is held.
    """
    descriptor = _open(cache / _LOCKS, digest)
    if descriptor is None:
        yield
        return
    try:
        if not _lock(descriptor, wait_seconds):
            logger.debug("not waiting any longer for another process that compiles graph %s", digest[:16])
        yield
    finally:
        # Who waits for this file has it open, and whoever comes later finds the result in the cache.
        with contextlib.suppress(OSError):
            os.unlink(cache / _LOCKS / digest)
        os.close(descriptor)


def _open(folder: Path, digest: str) -> int | None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(folder / digest, LOCKABLE_FILE, 0o600)
    except OSError as error:
        logger.debug("no lock in %s: %s", folder, error.strerror)
        return None


def _lock(descriptor: int, wait_seconds: float) -> bool:
    until = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) or time.monotonic() > until:
                return False
            time.sleep(_PERIOD_SECONDS)
        else:
            return True
