"""Mends Inductor's cache on disk where a job was ended while it compiled, and refuses one into which others
can write.

In: what went wrong when a compiled library was loaded. Out: whether a broken library was removed, so that
compiling again makes it anew. A compiler that is killed leaves a library that is there but cut off. Inductor
takes it for compiled in all later runs, and each of them would fail. Here jobs are ended on purpose as soon
as a rank fails or somebody presses Ctrl-C, so this must not last.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
from pathlib import Path

from rannc_backend.errors import ConfigurationFileError

logger = logging.getLogger(__name__)

_ELF_64 = b"\x7fELF\x02"
_HEADER_BYTES = 64
_SECTIONS = struct.Struct(
    "<40xQ10xHH"
)  # of an ELF header: offset of the section headers; size and number of these


def require_own(folder: Path) -> None:
    """Make a folder that others can guess, of which this process runs what is in it, or see that it is this
    user's.

    Raises:
        ConfigurationFileError: somebody else has made it, or anybody can write into it.
    """
    cure = "set TORCHINDUCTOR_CACHE_DIR to a directory of your own."
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, found = folder.lstat(), folder.stat()
    except OSError as error:
        raise ConfigurationFileError(
            str(folder), problem=f"cannot be Inductor's cache: {error.strerror}", cure=cure
        ) from None
    owners = {link.st_uid, found.st_uid} - {os.geteuid()}
    if owners:
        problem = (
            f"is Inductor's cache, whose code is run, and belongs to another user (number {min(owners)})"
        )
        raise ConfigurationFileError(str(folder), problem=problem, cure=cure)
    if stat.S_IMODE(found.st_mode) & stat.S_IWOTH:
        problem = f"is Inductor's cache, whose code is run, and anybody can write into it (mode {stat.S_IMODE(found.st_mode):o})"
        raise ConfigurationFileError(str(folder), problem=problem, cure=cure)


def remove_broken_library(error: BaseException) -> bool:
    """Whether it is worth compiling again: `error` came from a library that is cut off (now removed), or that
    another rank has removed.
    """
    cause: BaseException | None = getattr(error, "inner_exception", error)
    if not isinstance(cause, ImportError) or not cause.path:
        return False
    path = Path(cause.path)
    if path.suffix != ".so":
        return False
    try:
        if not is_cut_off(path):
            return False
        logger.warning(
            "Inductor's cache has a library that an ended job left half written; compiling it again: %s", path
        )
        path.unlink()
    except FileNotFoundError:
        pass  # removed by another rank
    except OSError:
        return False
    return True


def is_cut_off(path: Path) -> bool:
    """Whether the file ends before an ELF library's section headers, which linkers write last, or has not
    even a header.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    size = path.stat().st_size
    if len(header) < _HEADER_BYTES:
        return True
    if not header.startswith(_ELF_64):
        return header.count(0) == _HEADER_BYTES
    offset, entry_bytes, num_entries = _SECTIONS.unpack_from(header)
    return size < offset + entry_bytes * num_entries
