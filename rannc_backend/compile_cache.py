"""Mends Inductor's cache on disk where a job was ended while it compiled.

In: what went wrong when a compiled library was loaded. Out: whether a broken library was removed, so that compiling again makes it anew.
A compiler that is killed leaves a library that is there but cut off. Inductor takes it for compiled in all later runs, and each of
them would fail. Here jobs are ended on purpose as soon as a rank fails or somebody presses Ctrl-C, so this must not last.
"""

from __future__ import annotations

import logging
import struct
from pathlib import Path

logger = logging.getLogger(__name__)

_ELF_64 = b"\x7fELF\x02"
_HEADER_BYTES = 64
_SECTIONS = struct.Struct("<40xQ10xHH")  # of an ELF header: offset of the section headers; size and number of these


def remove_broken_library(error: BaseException) -> bool:
    """Whether it is worth compiling again: `error` came from a library that is cut off (now removed), or that another rank has removed."""
    cause: BaseException | None = getattr(error, "inner_exception", error)
    if not isinstance(cause, ImportError) or not cause.path:
        return False
    path = Path(cause.path)
    if path.suffix != ".so":
        return False
    try:
        if not is_cut_off(path):
            return False
        logger.warning("Inductor's cache has a library that an ended job left half written; compiling it again: %s", path)
        path.unlink()
    except FileNotFoundError:
        pass  # removed by another rank
    except OSError:
        return False
    return True


def is_cut_off(path: Path) -> bool:
    """Whether the file ends before an ELF library's section headers, which linkers write last, or has not even a header."""
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    size = path.stat().st_size
    if len(header) < _HEADER_BYTES:
        return True
    if not header.startswith(_ELF_64):
        return header.count(0) == _HEADER_BYTES
    offset, entry_bytes, num_entries = _SECTIONS.unpack_from(header)
    return size < offset + entry_bytes * num_entries
