"""Files that have moved, and what they were called when faults were first drawn in them.

The path is part of what decides where faults are drawn, so a file that only moves keeps its faults under its
first name.
"""

from __future__ import annotations

from collections.abc import Mapping

FIRST_NAMES: Mapping[str, str] = {
    "passes/batch/randomness.py": "passes/randomness.py",
    "passes/batch/split_reductions.py": "passes/split_reductions.py",
    "passes/stage/gradient_buckets.py": "passes/gradient_buckets.py",
    "passes/stage/shared_keys.py": "passes/shared_keys.py",
    "planner/blocks/coarsening.py": "partition/coarsening.py",
    "planner/blocks/line_cuts.py": "partition/line_cuts.py",
    "planner/blocks/pins.py": "partition/pins.py",
    "planner/cost/transfer.py": "cost/transfer.py",
    "planner/search/problem.py": "partition/search_problem.py",
    "planner/search/search.py": "partition/stage_search.py",
    "runtime/comm/shared_memory_allreduce.py": "runtime/shared_sums.py",
    "runtime/gradients/buckets.py": "runtime/buckets.py",
    "runtime/gradients/clipping.py": "runtime/clipping.py",
    "runtime/gradients/grad_scaler.py": "runtime/grad_scaler.py",
    "runtime/gradients/loss_gradients.py": "runtime/tangents.py",
    "runtime/step/executor.py": "runtime/executor.py",
    "runtime/step/graph_runtime.py": "runtime/graph_runtime.py",
    "runtime/step/messages.py": "runtime/messages.py",
    "runtime/step/queue_order.py": "runtime/queue_turns.py",
    "schedule/message_order.py": "schedule/turns.py",
    "runtime/step/rehearsal.py": "runtime/rehearsal.py",
    "runtime/step/scalars.py": "runtime/scalars.py",
    "runtime/step/send_buffers.py": "runtime/send_buffers.py",
    "runtime/step/user_outputs.py": "runtime/user_outputs.py",
    "settings/sources.py": "config_sources.py",
    "settings/toml_lines.py": "toml_lines.py",
}
