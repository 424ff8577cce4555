"""Faults that somebody thought of, in what is looked at when optimizers step, and in gradients that are kept as rows."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.chosen_loops import loops
from tests.planted_faults.fault import Fault

CHOSEN_STEPS: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "steps-that-plan-a-model-are-not-looked-at",
            "session_registry.py",
            "if self.watch is not None and self.watch not in followers:",
            "if False:",
            loops("in_closure-2"),
        ),
        (
            "parameters-behind-other-outputs-have-zeros",
            "runtime/gradients/buckets.py",
            "        others |= without\n",
            "",
            loops("some_outputs-2"),
        ),
        (
            "inputs-behind-other-outputs-have-zeros",
            "runtime/step/user_outputs.py",
            "        if spec.name in without:\n",
            "        if False:\n",
            loops("some_outputs-2"),
        ),
        (
            "parts-that-a-rank-does-not-use-have-no-gradient",
            "runtime/step/graph_settings.py",
            'for answer in agree(world, f"gradients of {label}", [own]):',
            'for answer in [[own] for _ in agree(world, f"gradients of {label}", [own])]:',
            loops("unused_parts-2"),
        ),
        (
            "parts-of-other-micro-batches-are-forgotten",
            "passes/kept_functions.py",
            "calls.reached.setdefault(name, set()).update(reached)",
            "calls.reached[name] = set(reached)",
            loops("unused_parts-1,2"),
        ),
        (
            "results-that-nobody-differentiates-have-zeros",
            "runtime/step/graph_runtime.py",
            "OperatorCalls(self.settings.reach.absent_results(outputs))",
            "OperatorCalls()",
            loops("unused_results-1,1"),
        ),
        (
            "arguments-that-are-not-used-bring-zeros",
            "ir/reach.py",
            "            if numbers is None or number in numbers:",
            "            if True:",
            loops("unused_parts-1,1"),
        ),
        (
            "sums-that-are-detached-need-gradients",
            "capture/analysis.py",
            '            places[sums.get(name, "")].update(*(of_scalars[output] for output in outputs))\n',
            "            pass\n        for name in inputs:\n            places[sums[name]].update(*of_scalars.values())\n",
            loops("some_outputs-2"),
        ),
        (
            "outputs-of-this-rank-alone-are-differentiated",
            "runtime/step/graph_runtime.py",
            "if any(answer[0][i] for answer in answers))",
            "if grads[i] is not None)",
            loops("some_outputs-2"),
        ),
        (
            "parameters-that-only-give-a-shape-have-gradients",
            "capture/analysis.py",
            "for name, fqn in self.trained_parameters.items() if name in self.needs_grad}",
            "for name, fqn in self.trained_parameters.items()}",
            ("tests/distributed/test_whole_batch.py::test_whole_batch[models-2]",),
        ),
        (
            "what-gives-its-shape-alone-needs-a-gradient",
            "passes/batch/differentiability.py",
            "            reached[source] = reached.get(source, 0) | bits\n",
            "            pass\n    reached |= {name: reached.get(name, 1) for name in interpreter.found}\n",
            ("tests/unit/passes/batch/test_differentiability.py",),
        ),
        (
            "gradients-by-name-are-none",
            "runtime/step/autograd.py",
            "if (is_twice or is_batched or name is not None) and _leads_to_step(",
            "if is_twice and _leads_to_step(",
            loops("by_name-1,1"),
        ),
        (
            "a-scaler-finds-infinities-in-the-default-dtype",
            "runtime/gradients/grad_scaler.py",
            "torch.zeros((), dtype=torch.float32, device=world.device)",
            "torch.zeros((), device=world.device)",
            loops("scaled-1,1"),
        ),
        (
            "delayed-rows-of-this-rank-alone",
            "runtime/gradients/delayed_reduction.py",
            "    rows.reduce(start_reduce)\n",
            "    rows.reduce(None)\n",
            ("tests/distributed/test_sparse.py::test_sparse_gradients[delayed-2]",),
        ),
        (
            "plans-count-one-look-up-of-a-table",
            "planner/blocks/formats.py",
            "sum(value_bytes(each) / each.element_size() for each in ids)",
            "max((value_bytes(each) / each.element_size() for each in ids), key=str)",
            unit("planner/blocks/formats"),
        ),
    )
)
