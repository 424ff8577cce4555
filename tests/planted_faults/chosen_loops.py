"""Faults that somebody thought of, in what loops do around the model."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault


def loops(case: str) -> tuple[str, ...]:
    """A loop on several ranks beside one process."""
    return (f"tests/distributed/test_loops.py::test_a_loop_equals_one_process[{case}]",)


CHOSEN_LOOPS: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "module-hooks-after-the-first-call-are-left-out",
            "capture/first_trace.py",
            "begun.append(weakref.finalize(context, guard_module_hooks()))",
            "pass",
            unit("capture/module_hooks"),
        ),
        (
            "hooks-in-the-forward-are-dropped",
            "capture/nonstrict/watch.py",
            "if func in _HOOKING:",
            "if func in ():",
            unit("capture/nonstrict/captures"),
        ),
        (
            "copies-and-the-model-are-written-alike",
            "runtime/absent_tensors.py",
            "is_copy = isinstance(args[0], Absent) and absence_of(args[0]).is_copy",
            "is_copy = isinstance(args[0], Absent)",
            unit("runtime/absent_tensors"),
        ),
        (
            "changed-copies-go-unnoticed",
            "runtime/state_hooks.py",
            "if counter._version != version]",
            "if counter._version < version]",
            unit("runtime/state_hooks"),
        ),
        (
            "steps-after-changed-copies",
            "runtime/gradients/delayed_reduction.py",
            "self.table.given.check([self.table.given.changed()])",
            "pass",
            loops("averages_by_values-1,1"),
        ),
        (
            "a-joined-rank-gives-a-row-of-its-last-batch",
            "api/loops.py",
            "leaf[:0].clone()",
            "leaf[:1].clone()",
            loops("joined-1,1"),
        ),
        (
            "norms-by-name-of-one-rank",
            "api/loops.py",
            "world.transport.allreduce(values, table.everyone).wait()",
            "pass",
            loops("norms_by_name-1,1"),
        ),
    )
)
