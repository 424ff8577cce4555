"""A directory of checkpoints belongs to one job at a time: another one would remove what this one is writing,
and rotate its checkpoints.

In: a directory. Out: a lock on it, or an error that says who has it. The lock is the system's, on the file
`.rannc-lock` in the directory, and ends with the process that holds it, however that ends: nobody has to
remove anything. The file tells who holds it, for people.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rannc_backend.errors import CheckpointWriteError
from rannc_backend.settings.user_files import LOCKABLE_FILE, UserFile, make_directory

logger = logging.getLogger(__name__)

LOCK_FILE = ".rannc-lock"
# A process that saves in ever new directories keeps those of so many.
_MAX_HELD = 8
_MAX_BYTES = 1000
_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)


@dataclass(slots=True)
class DirectoryLocks:
    """The directories that this process saves in. Not inherited by forked processes, whose own ends would not
    matter to it.
    """

    _held: OrderedDict[tuple[int, int], int] = field(default_factory=OrderedDict)
    _pid: int = 0

    def hold(self, path: Path) -> None:
        """Hold the directory, which is made if it is not there, until this process ends or has saved in
        several others since.

        Raises:
            CheckpointWriteError: another process holds it, or it cannot be made or written to.
        """
        directory = UserFile(
            path=path, what="directory of checkpoints", error=CheckpointWriteError, cure=_CURE
        )
        make_directory(directory)
        if self._pid != os.getpid():
            # Locks of this kind are the process's own: a parent's are not held here, and closing its files
            # would not give them back.
            self._held, self._pid = OrderedDict(), os.getpid()
        try:
            status = os.stat(path)
            key = (status.st_dev, status.st_ino)
            if key not in self._held:
                self._held[key] = _lock(path)
        except OSError as error:
            raise directory.failed("cannot write in the", error.strerror or str(error)) from None
        self._held.move_to_end(key)
        while len(self._held) > _MAX_HELD:
            os.close(self._held.popitem(last=False)[1])


_CURE = "give a directory that all ranks can reach, with room enough."


def _lock(path: Path) -> int:
    """Open and lock the directory's lock file; gives its descriptor, which holds the lock."""
    descriptor = os.open(path / LOCK_FILE, LOCKABLE_FILE, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            holder = _holder(os.pread(descriptor, _MAX_BYTES, 0))
            os.close(descriptor)
            raise CheckpointWriteError(
                f"another job saves checkpoints in {str(path)!r}: {holder}",
                cure="give each job a directory of its own, or wait until that one has ended; what it has "
                "saved can be loaded meanwhile.",
            ) from None
        logger.warning(
            "the file system of %s has no locks (%s): a second job that saves there would not be noticed",
            path,
            error.strerror,
        )
        return descriptor
    words = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with suppress(OSError):  # a full disk: the lock counts, not the words
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(words).encode(), 0)
    return descriptor


def _holder(content: bytes) -> str:
    """What the lock file says of who has the lock: anybody may have written it."""
    try:
        words = json.loads(content)
        return f"process {int(words['pid'])} on host {str(words['host'])[:100]!r} since {str(words['since'])[:30]!r}"
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return "it does not say which"
