"""Faults that somebody thought of, in what a model becomes: captures, lengths, values without gradient."""

from __future__ import annotations

from tests.planted_faults.areas import passes, unit
from tests.planted_faults.fault import Fault


def _lengths(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/distributed/test_lengths.py::test_lengths[{name}]" for name in names)


CHOSEN_CAPTURE: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        # capture without Dynamo
        (
            "gradients-go-on-where-the-model-stops-them",
            "capture/nonstrict/watch.py",
            "tree_map_only(torch.Tensor, lambda value: constant_of(value, operands), result)",
            "tree_map_only(torch.Tensor, lambda value: value, result)",
            unit("capture/nonstrict/captures"),
        ),
        (
            "second-derivatives-are-cut",
            "capture/nonstrict/trace.py",
            "        keep_second_derivatives(trace.graph_module.graph)\n",
            "",
            unit("capture/nonstrict/captures"),
        ),
        (
            "tensors-from-outside-are-constants",
            "capture/nonstrict/trace.py",
            "        run.check(trace)\n",
            "",
            unit("capture/nonstrict/captures"),
        ),
        (
            "backward-of-its-own-is-lost",
            "capture/nonstrict/watch.py",
            "if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):",
            "if False:",
            unit("capture/nonstrict/captures"),
        ),
        (
            "batch-size-is-tested-once",
            "capture/nonstrict/trace.py",
            "        self.size_tests = watch.size_tests()\n",
            "",
            unit("capture/nonstrict/captures"),
        ),
        (
            "captures-hold-for-ever",
            "capture/nonstrict/captures.py",
            "return self.guards.broken()",
            'return ""',
            unit("capture/nonstrict/captures"),
        ),
        (
            "captured-again-for-hooks-of-its-own",
            "backend.py",
            "return found[-1].renewed(module), _bind",
            "return found[-1], _bind",
            ("tests/distributed/test_nonstrict.py::test_nonstrict[models-1,1]",),
        ),
        (
            "frozen-parameters-are-trained",
            "capture/nonstrict/captures.py",
            "(tensor.requires_grad, tensor.dtype, tensor.shape)",
            "(tensor.dtype, tensor.shape)",
            unit("capture/nonstrict/captures"),
        ),
        (
            "what-the-forward-changes-stays",
            "capture/nonstrict/captures.py",
            "            _undo([*undone, *guards.changes()])\n",
            "",
            unit("capture/nonstrict/captures"),
        ),
        (
            "failed-step-goes-the-second-way",
            "compiled_call.py",
            "if call.arrived or call.captured or second",
            "if call.captured or second",
            ("tests/distributed/test_gate.py::test_the_gate[fails-in_the_trace]",),
        ),
        (
            "constants-keep-the-shape-of-a-sum",
            "passes/canonicalize.py",
            "            elif node.target in _LIKE:\n                _fill_like(graph, node)\n",
            "",
            passes("golden"),
        ),
        # values without a gradient, and sizes that depend on data
        (
            "constants-that-swallow-what-is-written",
            "capture/aten_trace.py",
            "    node.meta[_CONSTANT] = True\n    return tensor\n",
            "    return tensor.detach()\n",
            unit("capture/nonstrict/captures"),
        ),
        (
            "constants-with-gradients",
            "capture/aten_trace.py",
            "    _detach_constants(graph_module.graph)\n    graph",
            "    graph",
            unit("capture/nonstrict/captures"),
        ),
        (
            "sizes-of-data-without-bounds",
            "capture/analysis.py",
            "    bound_data_sizes(split.rowwise)\n",
            "",
            passes("data_sizes"),
        ),
        # functions with a backward of their own
        # rows in an order that an index gives
        *(
            (name, f"passes/batch/{place}.py", before, after, passes("batch/orders"))
            for name, place, before, after in (
                ("segments-of-other-keys", "orders", "        and order.origin.keys is end.keys\n", ""),
                ("segments-of-a-falling-order", "orders", "        and order.origin.rising\n", ""),
                ("negative-keys-counted", "counted_keys", " and _is_never_negative(node)", ""),
                ("any-bins-count-keys", "counted_keys", ' or not _one_bin_each(call["bins"], low, high)', ""),
                (
                    "orders-combined",
                    "orders",
                    "    if len({(type(layout)",
                    "    if False and len({(type(layout)",
                ),
                (
                    "sorted-beside-unsorted",
                    "orders",
                    " or (isinstance(layout, Rows) and not layout.uniform)",
                    "",
                ),
                (
                    "ends-of-segments-believed",
                    "orders",
                    '    if call.name != "aten._grouped_mm" and',
                    "    if False and",
                ),
                ("inverse-of-another-order", "orders", "order.origin is layout.origin and ", ""),
            )
        ),
        (
            "random-numbers-by-place",
            "passes/batch/randomness.py",
            "return found if order is None else found.index_select(rows.dim, order)",
            "return found",
            passes("batch/orders"),
        ),
        (
            "kept-inside-not-counted",
            "passes/stage/liveness.py",
            "peaks.add(_add(live, sizes.inside(node), 1))",
            "peaks.add(live)",
            unit("capture/nonstrict/kept_modules"),
        ),
        (
            "errors-of-quick-runs-believed",
            "capture/nonstrict/reads.py",
            "        if error is None or is_raised_by_user(error):\n            break\n",
            "        break\n",
            unit("capture/nonstrict/reads"),
        ),
        (
            "backward-of-rows-believed",
            "passes/batch/batch_axis.py",
            "right = layout == own if isinstance(own, (Rows, Ordered)) else isinstance(layout, PartialSum)",
            "right = True",
            passes("kept_functions"),
        ),
        (
            "unused-parameters-get-zeros",
            "capture/graph.py",
            '        if item.kind in ("parameter", "buffer") and not node.users:',
            "        if False:",
            unit("capture/nonstrict/captures"),
        ),
        # recurrent layers
        (
            "recurrent-states-without-gradient",
            "passes/recurrent.py",
            "return None, found[0], found[1:last], found[last:],",
            "return None, found[0], [None] * ctx.num_states, found[last:],",
            passes("recurrent"),
        ),
        (
            "rows-of-recurrent-layers-by-tokens",
            "passes/batch/batch_axis_rules.py",
            'dim = 0 if call["batch_first"] else 1',
            'dim = 1 if call["batch_first"] else 0',
            passes("recurrent"),
        ),
        (
            "tokens-of-packed-sequences-are-anybodys",
            "capture/nonstrict/packed.py",
            "if func in _HARMLESS or (",
            "if True or (",
            unit("capture/nonstrict/packed"),
        ),
        (
            "mean-of-ctc-over-tokens-of-all",
            "passes/ctc.py",
            "return (losses / target_lengths.clamp(min=1).to(losses.dtype)).mean()",
            "return losses.sum() / target_lengths.clamp(min=1).to(losses.dtype).sum()",
            passes("ctc"),
        ),
        # lengths
        (
            "messages-of-the-captured-length",
            "deployment.py",
            "all_outputs=delivers, lengths=lengths",
            "all_outputs=delivers",
            _lengths("models-1,1"),
        ),
        (
            "layout-of-another-length",
            "runtime/step/executor.py",
            "piece.start, state.shapes.lengths)",
            "piece.start, ())",
            _lengths("models-1,1"),
        ),
        (
            "other-paths-of-other-lengths",
            "capture/nonstrict/captures.py",
            "return lengths is not None and lengths_hold(recorded.captured, lengths)",
            "return lengths is not None",
            _lengths("nonstrict-1,1"),
        ),
        (
            "numbers-of-dropout-by-the-hint",
            "passes/batch/randomness.py",
            "args = (self._number(count), device, ",
            "args = (7, device, ",
            unit("capture/lengths"),
        ),
        (
            "padding-in-front",
            "padded_call.py",
            "for edge in (0, size)]",
            "for edge in (size, 0)]",
            unit("padded_call"),
        ),
        (
            "length-of-one-is-like-others",
            "ir/length.py",
            "all(size >= SMALLEST for size in lengths)",
            "all(size >= 0 for size in lengths)",
            unit("ir/length"),
        ),
        (
            "kernels-read-any-layout",
            "passes/stage/any_layout.py",
            'name.startswith("_") and operator not in _READ_BY_STRIDES',
            'name.startswith("_") and operator in _READ_BY_STRIDES',
            passes("stage/any_layout"),
        ),
        (
            "any-size-may-be-the-batch",
            "capture/batch_inputs.py",
            "return all(holds_from_two(equality.xreplace(values)) for equality in equalities)",
            "return True",
            unit("capture/inputs"),
        ),
        (
            "kept-module-without-gradients-under-a-mode",
            "capture/nonstrict/kept_modules.py",
            "with recording_gradients():",
            "with torch.enable_grad():",
            unit("capture/nonstrict/kept_modules"),
        ),
        (
            "kept-module-may-give-other-results",
            "capture/nonstrict/kept_modules.py",
            "self._check(value, first)",
            "assert value.shape == first.shape",
            unit("capture/nonstrict/kept_modules"),
        ),
        (
            "kept-module-of-another-model",
            "capture/nonstrict/kept_modules.py",
            "if isinstance(code, _Whole) and code.module() is whole.module():",
            "if isinstance(code, _Whole) and code.names == whole.names:",
            unit("capture/nonstrict/kept_modules"),
        ),
        (
            "chosen-elements-are-counted-as-all",
            "passes/batch/loss_decompositions.py",
            "lambda mask: mask.sum()",
            "lambda mask: (mask | ~mask).sum()",
            passes("batch/choices"),
        ),
        (
            "chosen-elements-go-to-another-mask",
            "passes/batch/orders.py",
            " or not is_same_value(source.origin.keys, mask):",
            ":",
            passes("batch/choices"),
        ),
        (
            "elements-are-chosen-of-other-rows",
            "passes/batch/batch_axis_indexing.py",
            "    return call.merge(rows, Rows(mask.dim, mask.outer, mask.inner))",
            "    return rows",
            passes("batch/choices"),
        ),
        (
            "what-is-chosen-is-sent-or-refused",
            "session.py",
            "                self.follows_choices = False\n",
            "                raise\n",
            ("tests/distributed/test_whole_batch.py::test_whole_batch[data_sizes-1,1]",),
        ),
        (
            "lengths-are-given-up-with-choices",
            "capture/analysis.py",
            "if _is_split_by(captured, trained, choices=choices):",
            "if _is_split_by(captured, trained, choices=True):",
            passes("data_sizes"),
        ),
        (
            "nodes-stay-in-an-order-of-their-own",
            "capture/node_order.py",
            "_from_outputs(source.graph)",
            "source.graph.nodes",
            unit("capture/node_order"),
        ),
        (
            "equal-values-of-two-outputs-are-one",
            "passes/stage/equal_values.py",
            " or storages(node).keys() & kept_apart",
            "",
            passes("stage/equal_values"),
        ),
        (
            "an-index-outside-of-its-row-is-no-error",
            "passes/stage/single_scatters.py",
            "and any(_reads(user, dim, sizes[dim], index) for user in index.users)",
            "and bool(index.users)",
            passes("stage/single_scatters"),
        ),
        (
            "several-values-of-a-row-are-one",
            "passes/stage/single_scatters.py",
            "index_sizes == value_sizes == one_per_row",
            "index_sizes == value_sizes",
            passes("stage/single_scatters"),
        ),
        (
            "changes-are-seen-through-older-views",
            "stages/joint_graph.py",
            "if any(order[user] < order[node] for user in others) or len(",
            "if len(",
            unit("stages/joint_graph"),
        ),
        (
            "windows-begin-one-element-late",
            "passes/canonicalize.py",
            "(torch.arange(size, device=operand.device) * step)",
            "(torch.arange(size, device=operand.device).clamp(max=1) * step)",
            unit("capture/odd_models"),
        ),
        (
            "path-by-a-count-of-all-elements",
            "capture/nonstrict/read_values.py",
            "return TracedValue.of(total // math.prod(others))",
            "return TracedValue.of(total // math.prod(others) + 1)",
            unit("capture/nonstrict/captures"),
        ),
        (
            "kept-module-has-gradients-of-its-capture",
            "capture/nonstrict/kept_modules.py",
            "remaining = iter(operator(values, sizes))",
            "remaining = (each.detach() for each in operator(values, sizes))",
            unit("capture/nonstrict/kept_modules"),
        ),
    )
)
