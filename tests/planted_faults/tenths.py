"""Which tenth of the faults, or of other things, belongs to a commit, so that ten commits in a row have all of them.

In: things with names, a commit's hash. Out: a tenth of them. The history is cut into blocks of ten commits; the hash
of a block's first commit shuffles them, and each commit of the block takes another tenth. Where the
history is not there (no git, a shallow clone, a hash that is no commit) the hash alone says which.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
from collections.abc import Sequence
from typing import Protocol, TypeVar

from tests.planted_faults.tree import ROOT

NUM_PARTS = 10


class Named(Protocol):
    """Something that has a name of its own."""

    @property
    def name(self) -> str: ...


Item = TypeVar("Item", bound=Named)


def tenth_of(items: Sequence[Item], commit: str) -> list[Item]:
    """Those of this commit."""
    block, place = _place_in_history(commit)
    shuffled = sorted(items, key=lambda item: item.name)
    random.Random(block).shuffle(shuffled)
    return shuffled[place::NUM_PARTS]


def _place_in_history(commit: str) -> tuple[str, int]:
    """The first commit of its block, and its place there."""
    number = _git("rev-list", "--first-parent", "--count", commit)
    if number.isdigit() and _git("rev-parse", "--is-shallow-repository") == "false":
        place = int(number) % NUM_PARTS
        # The very first block has one commit less.
        first = _git("rev-parse", f"{commit}~{min(place, int(number) - 1)}")
        if first:
            return first, place
    return "", int(hashlib.sha256(commit.encode()).hexdigest(), 16) % NUM_PARTS


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
