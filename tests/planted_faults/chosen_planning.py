"""Faults that somebody thought of, in how plans are searched for and measured."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault

_ILP = unit("planner/search/ilp")
_MEASURE = unit("planner/blocks/measure")
_PROCESSES = unit("planner/worker_processes")

CHOSEN_PLANNING: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "solver-ilp-is-dp",
            "planner/planner.py",
            'if self.config.solver == "dp":',
            "if True:",
            _ILP,
        ),
        (
            "programmes-without-shared-cores",
            "planner/search/ilp.py",
            "number = self.cell.num_micro_batches / problem.num_cores",
            "number = 0.0",
            _ILP,
        ),
        (
            "all-is-proven",
            "planner/search/ilp.py",
            "lower = self.seconds if left_out >= self.seconds * (1 - _PROVEN_TO) else left_out",
            "lower = self.seconds",
            _ILP,
        ),
        (
            "one-process-searches-whatever-is-asked",
            "planner/worker_processes.py",
            "if self.num_processes > 1 and len(items) > 1:",
            "if False:",
            _PROCESSES,
        ),
        (
            "answers-in-the-sequence-of-their-coming",
            "planner/worker_processes.py",
            "return [self._results[number] for number in range(len(self.items))]",
            "return list(self._results.values())",
            _PROCESSES,
        ),
        (
            "missing-answers-stay-missing",
            "planner/worker_processes.py",
            "self._results[number] = self.function(self.shared, self.items[number])",
            "self._results[number] = None",
            _PROCESSES,
        ),
        (
            "interrupts-end-the-processes",
            "planner/worker_processes.py",
            'hooks.handle_signal("helper\'s signals", signal.SIGINT, signal.SIG_IGN)',
            "signal.getsignal(signal.SIGINT)",
            _PROCESSES,
        ),
        (
            "what-libraries-print-is-an-answer",
            "planner/worker_processes.py",
            "os.dup2(2, 1)",
            "os.fsync",
            _PROCESSES,
        ),
        (
            "processes-answer-for-other-numbers",
            "planner/search/moves.py",
            "groups.setdefault(item[-1], []).append(item)",
            "groups.setdefault(item[-1], []).insert(0, item)",
            unit("planner/search/moves"),
        ),
        (
            "all-ranks-measure-whatever-is-asked",
            "planner/blocks/measure.py",
            "return world.size if self.is_shared else 1",
            "return world.size",
            _MEASURE,
        ),
        (
            "what-is-known-is-not-measured-again",
            "planner/choose_pricer.py",
            "if self.config.profile_again or not _covers",
            "if not _covers",
            _MEASURE,
        ),
        (
            "old-points-stay-beside-new-ones",
            "planner/choose_pricer.py",
            "self._profile = self._profile.without(setting",
            "self._profile.without(setting",
            _MEASURE,
        ),
        (
            "stages-are-not-measured-again",
            "planner/choose_pricer.py",
            "(item in self._measured or not self.config.profile_again)",
            "True",
            _MEASURE,
        ),
        (
            "a-kept-plan-in-place-of-new-measurements",
            "planner/plan_on_ranks.py",
            "config.profile_to_write or config.profile_again:",
            "config.profile_to_write:",
            unit("planner/plan_on_ranks"),
        ),
        (
            "only-the-best-plan-bounds-the-search",
            "planner/search/search.py",
            "is_full = len(self.kept) == self.num_plans",
            "is_full = bool(self.kept)",
            unit("planner/search/search"),
        ),
        (
            "programmes-find-one-plan-of-a-cell",
            "planner/search/ilp.py",
            "if not np.isfinite(seconds) or self.num_plans > 1:",
            "if not np.isfinite(seconds):",
            _ILP,
        ),
        (
            "plans-that-were-kept-are-not-told",
            "planner/what_binds.py",
            "for kept in found.kept[1:]:",
            "for kept in found.kept[2:]:",
            _ILP,
        ),
    )
)
