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
            "        others |= self._without_gradient(outputs)\n",
            "",
            loops("some_outputs-2"),
        ),
        (
            "inputs-behind-other-outputs-have-zeros",
            "runtime/step/graph_settings.py",
            "None if self.outputs_of.get(name, outputs).isdisjoint(outputs) else gradient",
            "gradient",
            loops("some_outputs-2"),
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
            "                reached[source] = reached.get(source, 0) | bits",
            "                pass\n    reached |= {name: reached.get(name, 1) for name in interpreter.found}",
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
