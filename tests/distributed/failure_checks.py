"""Checks of wrong input, run in worker groups: each must raise its class of errors.py on every rank.

In: a context. Out: findings. Failures that end the job are scripts of their own (failing_job.py).
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from tests.distributed.harness.context import Context


def misbehave(context: Context) -> dict[str, Any]:
    """For the tests of the harness: end or hang in the way that the case names."""
    how = context.case.parameters["how"]
    if how == "exception":
        raise RuntimeError("planted exception")
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
    return {}
