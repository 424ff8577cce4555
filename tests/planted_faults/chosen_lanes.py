"""Faults that somebody thought of, in backwards of two parts, in ranks that compute several stages, and in who updates
parameters as the search has it.
"""

from __future__ import annotations

from tests.planted_faults.areas import equal, passes, unit
from tests.planted_faults.fault import Fault

_OTHER = ("interleaved-buffers",)


def several(*cases: str) -> tuple[str, ...]:
    """Tests of ranks that compute several stages."""
    file = "tests/distributed/test_several_stages.py"
    return tuple(
        f"{file}::test_{'what_else_a_model_does' if case in _OTHER else 'equals_one_process'}[{case}]"
        for case in cases
    )


CHOSEN_LANES: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        # devices behind the host
        (
            "a-lane-for-each-stage-of-a-rank",
            "runtime/step/queue_order.py",
            "lanes = list(dict.fromkeys(map(tuple, stage_ranks)))",
            "lanes = list(map(tuple, stage_ranks))",
            unit("runtime/step/hangs"),
        ),
        # backwards in two parts
        (
            "second-parts-that-are-dropped",
            "runtime/step/executor.py",
            "self.stages[index].backward_weights(kept, self._sink(index, state))",
            "pass",
            equal("zb_h1_mlp_loss"),
        ),
        (
            "a-w-before-its-i-is-no-matter",
            "schedule/verify.py",
            "actions[Action(stage, ActionKind.BACKWARD_WEIGHT, m)] = (backward,)",
            "actions[Action(stage, ActionKind.BACKWARD_WEIGHT, m)] = ()",
            unit("schedule/split_backwards"),
        ),
        (
            "both-parts-of-a-convolution-compute-all",
            "passes/stage/split_backward.py",
            "wants and index in own for index",
            "wants for index",
            passes("stage/split_backward"),
        ),
        (
            "patterns-of-one-unit-each-way",
            "schedule/several_stages.py",
            "_DOWN, _UP = 1, 2  #",
            "_DOWN, _UP = 1, 1  #",
            unit("schedule/several_stages"),
        ),
        (
            "memory-is-never-saved",
            "planner/search/several_stages.py",
            "for saves, most in ((False, _MAX_TRIED), (True, _MAX_TRIED_TO_SAVE)):",
            "for saves, most in ((False, _MAX_TRIED),):",
            unit("planner/search/several_stages"),
        ),
        (
            "what-second-parts-keep-takes-no-memory",
            "schedule/description.py",
            "return np.asarray((count - 1) * np.asarray(kept_bytes) + beside)",
            "return np.asarray(0 * (count - 1) * np.asarray(kept_bytes) + beside)",
            unit("planner/own_orders"),
        ),
        (
            "first-stages-keep-as-little-as-others",
            "planner/search/interval_costs.py",
            "        if begin == 0:\n            kept = ",
            "        if begin < 0:\n            kept = ",
            unit("planner/blocks/traced_stages"),
        ),
        (
            "list-schedules-without-a-limit",
            "schedule/list_run.py",
            "        if needed <= limit:\n            return True\n",
            "        return True\n",
            unit("schedule/split_backwards"),
        ),
        (
            "orders-for-plans-without-costs",
            "schedule/plan_simulation.py",
            "return replace(described, costs=costs, lanes_of_plan=plan.lanes)",
            "return described",
            unit("planner/own_orders"),
        ),
        # several stages on a rank
        (
            "stages-of-a-rank-read-new-buffers",
            "runtime/step/executor.py",
            "OLD_VALUE if is_parameter or self._made_elsewhere(stage, name) else micro_batch",
            "OLD_VALUE if is_parameter else micro_batch",
            several("interleaved-buffers"),
        ),
        (
            "a-sum-of-two-stages-is-complete-with-one",
            "runtime/gradients/buckets.py",
            "if others and others.get(name):",
            "if False:",
            unit("runtime/gradients/buckets"),
        ),
        (
            "the-last-backward-of-one-stage-is-that-of-all",
            "runtime/step/executor.py",
            "self._gradient_names(stage), stage in state.stages_in_last)",
            "self._gradient_names(stage), True)",
            unit("runtime/step/executor"),
        ),
        (
            "values-of-a-lane-without-their-stage",
            "runtime/step/executor.py",
            "state.inbox[action.stage, value.name, action.micro_batch] = tensor",
            "state.inbox.setdefault((action.stage, value.name, 0), tensor)",
            several("interleaved-mlp_loss-1,1,1,1"),
        ),
        (
            "orders-merged-stage-by-stage",
            "schedule/orders.py",
            "ends[action], action.kind is ActionKind.FORWARD, -action.stage",
            "action.stage, action.kind is ActionKind.FORWARD, -action.stage",
            unit("schedule/several_stages"),
        ),
        (
            "lanes-that-need-what-their-largest-stage-does",
            "ir/plan.py",
            "return sum(peaks) - sum(workspaces) + max(workspaces)",
            "return max(peaks)",
            unit("ir/plan"),
        ),
        (
            "every-stage-of-a-rank-with-a-workspace-of-its-own",
            "planner/search/several_stages.py",
            "self.workspace[index].max() + held",
            "self.workspace[index].sum() + held",
            unit("planner/search/several_stages"),
        ),
        (
            "messages-that-wait-for-their-receives",
            "schedule/lowering.py",
            "place - bisect_right(begins, time) + 1 for place",
            "0 * (place - bisect_right(begins, time)) + 1 for place",
            unit("schedule/several_stages"),
        ),
        (
            "messages-that-come-early-take-no-memory",
            "schedule/lowering.py",
            "return max(0, windows.get((source, stage), 0) - 1) * num_bytes",
            "return 0 * num_bytes",
            unit("schedule/several_stages"),
        ),
        (
            "as-many-stages-on-a-rank-as-schedules-are-named-for",
            "schedule/several_stages.py",
            "return replace(self, stages_per_lane=count) if count >= 2 else None",
            "return self if count >= 2 else None",
            unit("schedule/several_stages"),
        ),
        (
            "first-stages-that-make-gradients-of-inputs",
            "schedule/several_stages.py",
            "replace(unit, inputs=0.0, weights=unit.inputs + unit.weights)",
            "unit",
            unit("schedule/several_stages"),
        ),
        (
            "first-stages-half-of-whose-backward-is-awaited",
            "planner/search/interval_costs.py",
            "later[0] = backwards[:, 0].min(axis=0)",
            "later[0] = later[0]",
            unit("planner/search/interval_costs"),
        ),
        (
            "every-stage-of-a-rank-with-communicators-of-its-own",
            "planner/search/several_stages.py",
            "fixed = fixed - sum(counted_twice(problem.shared, solution, stage))",
            "fixed = fixed - counted_twice(problem.shared, solution, stage)[0]",
            unit("planner/search/several_stages"),
        ),
        (
            "lanes-whose-updates-are-divided-by-stage",
            "planner/cost/update_shares.py",
            "shares = own * (together / own.sum()) if own.any() else own",
            "shares = own",
            unit("planner/cost/update_shares"),
        ),
        (
            "lanes-that-are-even-but-for-the-filling",
            "planner/search/several_stages.py",
            "filling = (len(lanes) - 1) * work.max(axis=1)",
            "filling = 0 * (len(lanes) - 1) * work.max(axis=1)",
            unit("planner/search/several_stages"),
        ),
        (
            "runs-that-are-ended-too-early",
            "schedule/list_run.py",
            "left[place] -= free[place] - now",
            "left[place] -= 0.5 * (free[place] - now)",
            unit("schedule/several_stages"),
        ),
        # who updates parameters, in the search
        (
            "new-values-that-take-no-time",
            "planner/search/problem.py",
            "computed += new_values.max(axis=1) + copying.max(axis=1)",
            "computed += copying.max(axis=1)",
            unit("planner/planner"),
        ),
        (
            "one-owner-of-a-sum-pays-for-all",
            "planner/search/problem.py",
            "return seconds / 2 if problem.update_groups == 1 else seconds",
            "return seconds",
            unit("planner/planner"),
        ),
        (
            "updates-are-divided-wherever-they-may-be",
            "planner/planner.py",
            "if not request.may_divide_updates or _fits_anyhow(plain, costs):",
            "if request.may_divide_updates:\n        each = request.with_updates(divided=True)\n"
            "        return each, _found(_choose(each, each.costs(), progress, memory), each, costs)\n"
            "    if not request.may_divide_updates or _fits_anyhow(plain, costs):",
            unit("planner/what_binds"),
        ),
        (
            "stages-of-a-lane-that-share-nothing-out",
            "planner/search/several_stages.py",
            "wanted += max(0.0, whole * replicas[stage] - done[lane]) / num_left",
            "wanted += whole * replicas[stage] / (num_left + 1)",
            unit("planner/search/several_stages"),
        ),
    )
)
