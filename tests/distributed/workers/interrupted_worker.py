"""dry_run_worker.py with Ctrl-C on every rank while rank 0 plans and the others wait. Used by
test_dry_run.py.

In: nothing. Out: as dry_run_worker.py, and "cancelled" from the rank that plans.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from rannc_backend.planner import plan_on_ranks
from rannc_backend.runtime.job import bootstrap
from tests.distributed.workers import dry_run_worker


def main() -> None:
    world = bootstrap.start()
    plan, broadcast = plan_on_ranks.plan_analysis, world.control.broadcast

    def plan_interrupted(analysis: Any, question: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        print("cancelled" if question.progress.cancelled() else "not cancelled", flush=True)
        return plan(analysis, question, **named)

    def wait_interrupted(*arguments: Any, **named: Any) -> Any:
        if named.get("what") == "the plan" and world.rank != 0:
            os.kill(os.getpid(), signal.SIGINT)
        return broadcast(*arguments, **named)

    plan_on_ranks.plan_analysis = plan_interrupted
    world.control.broadcast = wait_interrupted  # type: ignore[method-assign]
    dry_run_worker.main()


if __name__ == "__main__":
    main()
