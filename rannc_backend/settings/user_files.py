"""The one way to files that a user names: by an option, an environment variable, an argument or another file.

In: a `UserFile`. Out: its content, or a file that is there whole or not at all; else an error of this package
that names what named the file, its path and the cure. Whatever is there (a pipe, a device, a directory, a
loop of links, a name that is none), nothing waits, and no OSError, ValueError or UnicodeDecodeError comes
out. Only files are read and written: a device is neither waited for nor replaced.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

from rannc_backend.errors import RanncError, UserInputError
from rannc_backend.errors.base import shown

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_READING, _WRITING = "cannot read the", "cannot write the"
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
"""Flags of `os.open` for a file that must not be there yet."""
LOCKABLE_FILE = (
    os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | getattr(os, "O_NOFOLLOW", 0)
)
"""Flags for a file that several processes lock; never a link, and never waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFile:
    """A file or a directory that a user has named.

    Attributes:
        what: what it is for, as "plan".
        named_by: what named it, as "option deployment_file"; "" where the path itself was the argument.
        error: makes the error of a problem and a cure.
    """

    path: str | os.PathLike[str]
    what: str
    named_by: str = ""
    cure: str = "give the path of a file."
    error: Callable[..., RanncError] = UserInputError

    def failed(self, verb: str, reason: str) -> RanncError:
        """The error of having tried ``verb``, as "cannot read the"."""
        source = f" (from {self.named_by})" if self.named_by else ""
        return self.error(f"{verb} {self.what} {_shown(self.path)}{source}: {reason}", cure=self.cure)


def read_bytes(file: UserFile, most_bytes: int) -> bytes:
    """The content of a file that must be there and must not be longer. Raises what ``file.error`` makes."""
    with _opened(file) as opened:
        num_bytes = os.fstat(opened.fileno()).st_size
        content = opened.read(most_bytes + 1) if num_bytes <= most_bytes else b""
        if num_bytes > most_bytes or len(content) > most_bytes:
            raise file.failed(_READING, f"it has more than {most_bytes} bytes")
        return content


def require_file(file: UserFile) -> None:
    """Raise what ``file.error`` makes unless this is a file that can be opened. For libraries that open it
    themselves.
    """
    with _opened(file):
        pass


def read_beginning(file: UserFile, num_bytes: int) -> bytes:
    """The first bytes of a file that must be there. Raises what ``file.error`` makes."""
    with _opened(file) as opened:
        return opened.read(num_bytes)


def read_end(file: UserFile, num_bytes: int) -> bytes:
    """The last bytes of a file that must be there. Raises what ``file.error`` makes."""
    with _opened(file) as opened:
        opened.seek(max(0, os.fstat(opened.fileno()).st_size - num_bytes))
        return opened.read(num_bytes)


def read_text(file: UserFile, most_bytes: int) -> str:
    """As `read_bytes`, of a file that must be UTF-8 text."""
    try:
        return read_bytes(file, most_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise file.failed(_READING, f"it is not UTF-8 text ({error.reason} at byte {error.start})") from None


def find_text(file: UserFile, most_bytes: int) -> str | None:
    """As `read_text`; None where there is nothing of that name."""
    return read_text(file, most_bytes) if kind_of(file) else None


def kind_of(file: UserFile) -> str:
    """As "a file", "a directory", "a pipe" and so on; "" where there is nothing of that name. Links are
    followed.
    """
    with _told(file, "cannot look at the"):
        try:
            return _kind(os.stat(file.path))
        except FileNotFoundError:
            return ""


def require_writable(file: UserFile) -> str:
    """Raise what ``file.error`` makes where `write_text` could not write now; gives the path with links
    followed.
    """
    with _told(file, _WRITING):
        with suppress(FileNotFoundError):
            _require_file(file, _WRITING, os.stat(file.path))
            if not os.access(file.path, os.W_OK):
                raise file.failed(_WRITING, "it is read-only")
        target = os.path.realpath(file.path)
        folder = os.path.dirname(target)
        if not os.path.isdir(folder):
            raise file.failed(_WRITING, f"there is no directory {_shown(folder)}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise file.failed(_WRITING, f"the directory {_shown(folder)} cannot be written to")
        return target


def write_text(file: UserFile, text: str | Iterable[str]) -> None:
    """Write a whole file, or its pieces, and then give it its name; what is there keeps its mode. Raises what
    ``file.error`` makes.
    """
    target = require_writable(file)
    temporary = os.path.join(os.path.dirname(target), f".rannc-{secrets.token_hex(8)}.tmp")
    try:
        with _told(file, _WRITING):
            with os.fdopen(os.open(temporary, NEW_FILE, 0o666), "wb") as opened:
                for piece in (text,) if isinstance(text, str) else text:
                    opened.write(piece.encode("utf-8", errors="backslashreplace"))
                with suppress(FileNotFoundError):
                    os.fchmod(opened.fileno(), stat.S_IMODE(os.stat(target).st_mode))
            os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def make_directory(file: UserFile) -> None:
    """Make a directory, and those above it, if it is not there. Raises what ``file.error`` makes."""
    with _told(file, "cannot make the"):
        with suppress(FileNotFoundError):
            os.stat(
                file.path
            )  # the library's recursion over all directories above ends differently for a path that is too long
        try:
            os.makedirs(file.path, exist_ok=True)
        except FileExistsError:
            raise file.failed(
                "cannot make the", f"it is {_kind(os.stat(file.path))}, not a directory"
            ) from None


def names_in(file: UserFile) -> list[str]:
    """Names of what is in a directory, sorted. Raises what ``file.error`` makes."""
    with _told(file, _READING):
        return sorted(os.listdir(file.path))


@contextmanager
def _opened(file: UserFile) -> Iterator[BinaryIO]:
    with _told(file, _READING):
        # Looked at before it is opened: opening can do something to a device, and waits for the writer of a
        # pipe.
        _require_file(file, _READING, os.stat(file.path))
        with os.fdopen(os.open(file.path, _READ), "rb") as opened:
            _require_file(file, _READING, os.fstat(opened.fileno()))
            yield opened


@contextmanager
def _told(file: UserFile, verb: str) -> Iterator[None]:
    try:
        yield
    except RanncError:
        raise
    except OSError as error:
        raise file.failed(verb, error.strerror or str(error)) from None
    except ValueError as error:
        # A zero byte, or characters that no name of a file can hold.
        reason = (
            "its name has characters that no file name can hold"
            if isinstance(error, UnicodeError)
            else str(error)
        )
        raise file.failed(verb, reason) from None


def _require_file(file: UserFile, verb: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise file.failed(verb, f"it is {_kind(status)}, not a file")


def _kind(status: os.stat_result) -> str:
    return next((name for test, name in _KINDS if test(status.st_mode)), "a file")


def _shown(path: str | os.PathLike[str]) -> str:
    return shown(os.fspath(path))
