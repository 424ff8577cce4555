"""Schedules that are in the list for as long as a test wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from rannc_backend.settings import choices


@contextmanager
def added_schedules(**modules: str) -> Iterator[None]:
    """Within this, the list of schedules has these entries too: a name and the module of its description."""
    with mock.patch.object(choices, "SCHEDULES", {**choices.SCHEDULES, **modules}):
        yield
