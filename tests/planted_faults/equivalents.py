"""Drawn faults that change nothing that anybody could see, each with the reason.

By what is changed, not by name: an entry holds as long as the code that it speaks of stays as it is, and
means nothing after that.
"""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[str, str] = {
    "passes/batch/randomness.py:_Rewriter.rewrite: if function is not attention: pass: "
    "function is not attention -> (not (function is not attention))": (
        "without sizes as nodes an operator takes them from its value, as symbols of the same sizes: the "
        "same numbers from a graph that is 2 % longer; attention has its sizes from its arguments and does "
        "not look at these"
    ),
    "runtime/gradients/new_values.py:send_new_values: mine = sorted(((group, updater, str(tensors[name].dtype), name) "
    "for name in _divided_here(table, names) for updater, group in [table.updates[name].of(world.rank)] if "
    "len(group) > 1)): len(group) > 1 -> (len(group) >= 1)": (
        "a message to a group of one rank changes nothing, and that rank updates by itself"
    ),
    "planner/cost/segments.py:best_segments: limits = np.geomspace(max(least, 1.0), max(most, 1.0), "
    "_NUM_LIMITS) * (1 + 1e-09): 1e-9 -> 2e-09": "either is more than sums are rounded by",
    "passes/batch/counted_keys.py:_is_never_negative: return holds(1, 2): holds(1, 2) -> holds(2, 1)": (
        "both have to hold, in either sequence"
    ),
    "integrations/distributed_checkpoint.py:_write_part: writer.set_up_storage_writer(True): True -> False": (
        "the writer of files does not look at who coordinates"
    ),
    "runtime/step/graph_runtime.py:GraphRuntime.trial: self._run_eager(state, 1.0) if eager else self._run('all', "
    "'forward', state): 1.0 -> 2.0": "the gradients of a trial are dropped",
    "schedule/list_run.py:_Run.follow: if free[place] + left[place] > limit_seconds: pass: free[place] + left[place] > "
    "limit_seconds -> (free[place] + left[place] >= limit_seconds)": (
        "a run that takes exactly as long as the limit is no gain: the limit is the best so far, or 'near' it, a choice"
    ),
    "schedule/lowering.py:_Lane.program: for slot in range(self.end + 1): pass: 1 -> 2": (
        "nothing is put behind the slot after the last action"
    ),
}
"""`Fault.change` -> why no test can tell."""
