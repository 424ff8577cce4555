"""The schedules that there are, by how many stages a rank has.

In: nothing. Out: names for tests that are about one of the two.
"""

from __future__ import annotations

from rannc_backend.schedule.orders import schedule_named, schedule_names

ONE_STAGE = tuple(name for name in schedule_names() if schedule_named(name).stages_per_lane == 1)
SEVERAL_STAGES = tuple(name for name in schedule_names() if name not in ONE_STAGE)
# What is made for a plan is checked over the plan's own edges (tests/unit/rannc_backend/planner/test_own_orders.py).
FIXED = tuple(name for name in schedule_names() if not schedule_named(name).is_made_for_plans)


def num_stages_for(name: str, num_stages: int) -> int:
    """So many stages, or a few more, that a schedule can have.

    Returns:
        The least multiple of its stages per lane that is not below `num_stages`.
    """
    per_lane = schedule_named(name).stages_per_lane
    return -(-num_stages // per_lane) * per_lane
