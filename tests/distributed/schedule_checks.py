"""Training with a schedule that only the tests know equals training in one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

from tests.added_schedules import added_schedules
from tests.distributed.harness.context import Context
from tests.distributed.harness.equality import equality
from tests.reversed_gpipe import ReversedGPipe


def equality_with_reversed_gpipe(context: Context) -> dict[str, Any]:
    """The check "equality", with backwards from the last micro-batch to the first."""
    backwards = mock.patch.object(
        ReversedGPipe, "backwards", autospec=True, side_effect=ReversedGPipe.backwards
    )
    with added_schedules(reversed_gpipe=ReversedGPipe.__module__), backwards as asked:
        result = equality(context)
    context.findings.that(asked.called, "no program was made with the schedule")
    return result
