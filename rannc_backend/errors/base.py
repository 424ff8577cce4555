"""What all errors have in common: the base classes, and the words for ranks, names and values in their
texts.
"""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages)[/\\]torch[/\\]|<frozen |<string>")
_PACKAGES = re.compile(r"[/\\](site-packages|dist-packages)[/\\]")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


class RanncError(RuntimeError):
    """Base of all errors of this package. Every text is the cause, then the place, then the cure.

    Args:
        problem: The cause: what is wrong, with the numbers and names that matter.
        cure: What the user can change, on a line of its own. "": the class's default.
        location: The place, on a line of its own: a line of the user's source that `user_location` found, or
        a
            rank.
        place: A place that the problem mentions already, such as a file or the source of an option.
    """

    default_cure: ClassVar[str] = "report this, with the file that `rannc doctor --report FILE` writes."
    """What helps where whoever raises the error knows nothing better."""

    def __init__(self, problem: str, *, cure: str = "", location: str = "", place: str = "") -> None:
        self.problem = problem
        self.cure = cure or self.default_cure
        self.location = location
        self.place = location or place
        super().__init__(_text(problem, self.cure, location))

    def __reduce__(self) -> tuple[Callable[..., RanncError], tuple[type[RanncError], str, dict[str, object]]]:
        # Subclasses take keyword arguments of their own, so the default way (cls(*args)) could not rebuild
        # them.
        return restore, (type(self), str(self), dict(self.__dict__))


_AT, _CURE = "\n  at ", "\n  What to change: "


def _text(problem: str, cure: str, location: str) -> str:
    return problem + (f"{_AT}{location}" if location else "") + (f"{_CURE}{cure}" if cure else "")


def parts_in(text: str) -> dict[str, object]:
    """The members of an error that has this text."""
    rest, _, cure = text.partition(_CURE)
    problem, at, location = rest.rpartition(_AT)
    if not at:
        problem, location = rest, ""
    return {"problem": problem, "cure": cure, "location": location, "place": location}


class UserInputError(RanncError, ValueError):
    """Something that the user passed in is wrong: an option, a model, a batch, a plan."""

    default_cure = "see what the documentation of the call says, and give it something else."


def restore(cls: type[RanncError], text: str, members: dict[str, object]) -> RanncError:
    """An error of a class with this text and these attributes; its own constructor is passed over."""
    error = cls.__new__(cls, text)
    error.args = (text,)
    error.__dict__.update(members)
    return error


def error_about(cls: type[RanncError], file: str, problem: str, *, cure: str = "") -> RanncError:
    """An error of a class that knows its file, with a whole sentence as its text."""
    plain = RanncError(problem, cure=cure)
    return restore(cls, str(plain), {**plain.__dict__, "file": file, "key": ""})


def extended(error: RanncError, more: str, *, cure: str = "") -> RanncError:
    """The same error, with more to say of the cause, and maybe another cure."""
    problem, cure = f"{error.problem}; {more}", cure or error.cure
    members = {**error.__dict__, "problem": problem, "cure": cure}
    return restore(type(error), _text(problem, cure, error.location), members)


def located(error: RanncError, location: str) -> RanncError:
    """The same error, with its cause, at a place in the user's source."""
    members = {**error.__dict__, "location": location, "place": location}
    other = restore(type(error), _text(error.problem, error.cure, location), members)
    if error.__cause__ is not None:
        other.__cause__ = error.__cause__
    return other.with_traceback(error.__traceback__)


def rebuild_error(class_name: str, text: str) -> RanncError:
    """The error of another rank, from its class name and text: same class, same words."""
    return restore(class_named(class_name) or RanncError, text, parts_in(text))


def class_named(name: str) -> type[RanncError] | None:
    """The class of this package with that name; None if there is none."""
    waiting: list[type[RanncError]] = [RanncError]
    while waiting:
        cls = waiting.pop()
        if cls.__name__ == name and cls.__module__.startswith(__package__ or ""):
            return cls
        waiting += cls.__subclasses__()
    return None


def is_of_user(filename: str) -> bool:
    """Whether a file of Python code is the user's or a model library's: neither torch's, Python's own nor this
    package's.
    """
    if _LIBRARY.search(filename) or filename.startswith(_OWN):
        return False
    return not filename.startswith(_STANDARD_LIBRARY) or _PACKAGES.search(filename) is not None


def user_location(stack_trace: str | None) -> str:
    """Innermost frame outside of torch and of Python's own library in a traceback text, as "model.py:12, in
    forward"; "" if there is none.

    Args:
        stack_trace: text as in fx `node.meta["stack_trace"]` or `traceback.format_list`.
    """
    frames = list(_FRAME.finditer(stack_trace or ""))
    own = [frame for frame in frames if is_of_user(frame["file"])]
    if not own:
        return ""
    frame = own[-1]
    function = f", in {frame['function']}" if frame["function"] else ""
    return f"{frame['file']}:{frame['line']}{function}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Some ranks in words: `rank 1`, `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


def shorten(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many there are beside."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def shown(value: object) -> str:
    """A value of the user's as a short text, whatever it is."""
    try:
        return clip(repr(value))
    except (ValueError, RecursionError):  # an integer of thousands of digits, or thousands of lists in lists
        return f"(a very long {type(value).__name__})"


def nearest(name: str, names: Iterable[str], *, cutoff: float = 0.5) -> list[str]:
    """The names that a misspelt one may have meant, the best first, at most three; cases do not count."""
    folded = {each.lower(): each for each in names}
    return [
        folded[each] for each in difflib.get_close_matches(name.lower(), list(folded), n=3, cutoff=cutoff)
    ]


def did_you_mean(near: Sequence[str]) -> str:
    """As "did you mean 'a' or 'b'? ", from what `nearest` gives; "" for none."""
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""


def clip(text: str, most: int = 120) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
