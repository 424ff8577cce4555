"""Faults that somebody thought of, in forwards that change tensors and attributes of their model, and values in place."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault

_TESTS = unit("capture/nonstrict/changing")

CHOSEN_CHANGING: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "new-data-is-lost",
            "capture/aten_trace.py",
            "if is_other or torch._functionalize_has_data_mutation(tensor.elem):",
            "if torch._functionalize_has_data_mutation(tensor.elem):",
            _TESTS,
        ),
        (
            "new-data-of-a-run-is-not-traced",
            "capture/written_out.py",
            "        if func == _SET_DATA:\n",
            "        if func is _SET_DATA:\n",
            _TESTS,
        ),
        (
            "writes-without-gradients-have-them",
            "capture/written_out.py",
            "return tensor.detach() if needs_gradient(tensor) else tensor\n",
            "return tensor\n",
            _TESTS,
        ),
        (
            "writes-behind-gradients-are-taken",
            "capture/written_out.py",
            "self._hiding.add(_memory(result))",
            "self._hiding.discard(_memory(result))",
            _TESTS,
        ),
        (
            "views-of-data-have-gradients",
            "capture/written_out.py",
            "if not needs_gradient(tensor) and _memory(tensor) in operands:",
            "if needs_gradient(tensor) and _memory(tensor) in operands:",
            _TESTS,
        ),
        (
            "shared-memory-is-a-copy",
            "capture/written_out.py",
            "if sum(_memory(item) == _memory(tensor) for item in inputs) > 1:",
            "if sum(_memory(item) == _memory(tensor) for item in inputs) > 2:",
            _TESTS,
        ),
        (
            "a-trained-parameter-is-a-buffer",
            "capture/nonstrict/swapping.py",
            "_reach(results, (before, now))",
            "_reach(results, ())",
            _TESTS,
        ),
        (
            "changed-parameters-lose-their-gradient",
            "capture/written_out.py",
            "return tensor.detach() + (before - before.detach())",
            "return tensor",
            _TESTS,
        ),
        (
            "views-of-changed-parameters-lose-their-gradient",
            "capture/written_out.py",
            "raise _hidden_write()  # a view from before",
            "return tensor",
            _TESTS,
        ),
        (
            "own-data-are-a-change",
            "capture/written_out.py",
            "        if _is_same_view(tensor, value):\n            return\n",
            "",
            _TESTS,
        ),
        (
            "kept-module-averages-of-equal-numbers",
            "passes/plain_numbers.py",
            "0.01 + 0.001 * (place % 64)",
            "0.01",
            _TESTS,
        ),
        (
            "kept-module-does-not-see-new-strides",
            "capture/nonstrict/kept_operators.py",
            "return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride()",
            "return (tensor._version,)",
            _TESTS,
        ),
        (
            "writes-of-references-are-not-atens",
            "passes/tracing.py",
            "node.target = _ATEN.get(node.target, node.target)",
            "node.target = node.target",
            unit("capture/written_out"),
        ),
        (
            "what-a-transform-wraps-has-no-gradient",
            "capture/written_out.py",
            "return innermost(tensor).requires_grad",
            "return tensor.requires_grad",
            unit("capture/written_out"),
        ),
        (
            "derivatives-read-weights-that-are-no-operands",
            "capture/aten_trace.py",
            "if operands or is_wrapped else value",
            "if operands else value",
            unit("capture/written_out"),
        ),
        (
            "transforms-are-counted-with-hooks",
            "capture/nonstrict/kept_operators.py",
            'if takes_hooks and "saved tensor hooks" in str(error):',
            "if False:",
            unit("capture/written_out"),
        ),
        (
            "modules-within-transforms-run-as-written",
            "capture/nonstrict/kept_operators.py",
            "if any(innermost(value) is not value for value in values):",
            "if False:",
            unit("capture/written_out"),
        ),
        (
            "functions-that-no-operator-holds-are-refused",
            "capture/nonstrict/watch.py",
            '    return needing_value(\n        f"the model uses {cls',
            '    return UnsupportedModelError(\n        f"the model uses {cls',
            unit("capture/nonstrict/kept_modules"),
        ),
        (
            "backwards-run-parts-with-other-tensors",
            "capture/nonstrict/kept_operators.py",
            "            with self._swapped(module, self._to_use(leaves)):\n",
            "            with contextlib.nullcontext():\n",
            unit("capture/nonstrict/kept_modules"),
        ),
        (
            "errors-that-are-their-own-cause-are-followed-for-ever",
            "capture/nonstrict/kept_modules.py",
            "while cause is not None and id(cause) not in seen:",
            "while cause is not None:",
            unit("capture/nonstrict/kept_modules"),
        ),
        (
            "kept-module-gets-operators-for-functions",
            "capture/nonstrict/watch.py",
            "if not watches or watches[-1].is_in_kept_module or watches[-1].is_in_function:",
            "if not watches or watches[-1].is_in_function:",
            _TESTS,
        ),
        (
            "batch-size-of-one-rank-for-code-that-works-with-no-other",
            "capture/nonstrict/trace.py",
            "BatchSize(rows.symbol, self._local_rows, self._all_rows)",
            "BatchSize(rows.symbol, self._local_rows, lambda: self._local_rows + 1)",
            _TESTS,
        ),
        (
            "attributes-that-are-read-are-outputs",
            "capture/nonstrict/reachable.py",
            "return frozenset(names - read)",
            "return frozenset(names)",
            unit("capture/nonstrict/written_attributes"),
        ),
        (
            "attributes-keep-what-they-had",
            "capture/nonstrict/trace.py",
            "            attribute.holder[attribute.key] = value\n",
            "            pass\n",
            unit("capture/nonstrict/written_attributes"),
        ),
        (
            "what-kept-modules-set-is-read-as-a-number",
            "capture/nonstrict/kept_modules.py",
            "self._hidden[path] = hide(self.attributes[path])",
            "self._hidden[path] = lambda: None",
            unit("capture/nonstrict/kept_modules"),
        ),
        (
            "what-kept-modules-set-ends-captures",
            "capture/nonstrict/captures.py",
            "        guards = guards.without(recorded.kept_attributes)\n",
            "",
            unit("capture/nonstrict/kept_modules"),
        ),
        (
            "overwritten-values-have-gradients",
            "capture/aten_trace.py",
            "**IN_PARTS, **written_out}",
            "**IN_PARTS}",
            unit("capture/written_out"),
        ),
        (
            "writes-by-strides-begin-at-the-first-place",
            "capture/written_out.py",
            "places = torch.full((), storage_offset or 0, device=tensor.device)",
            "places = torch.full((), 0, device=tensor.device)",
            unit("capture/written_out"),
        ),
    )
)
