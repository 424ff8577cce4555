"""Faults that somebody thought of, in what is around the step: planner, page, first call, options,
commands.
"""

from __future__ import annotations

from tests.planted_faults.areas import passes, unit
from tests.planted_faults.fault import Fault

CHOSEN_AROUND: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        # planner
        (
            "ring-of-one-step-too-many",
            "planner/cost/transfer.py",
            "2 * (num_ranks - 1)",
            "2 * num_ranks",
            unit("planner/cost/cost"),
        ),
        (
            "recompute-never-pays",
            "schedule/fill_drain.py",
            "return 0 * num_stages_to_end + num_micro_batches",
            "return 0 * num_stages_to_end + 1",
            unit("schedule/lowering", "planner/planner"),
        ),
        (
            "what-binds-is-what-gains-least",
            "planner/what_binds.py",
            "key=lambda change: -gains[change]",
            "key=lambda change: gains[change]",
            unit("planner/what_binds"),
        ),
        (
            "links-made-faster-one-way-only",
            "planner/what_binds.py",
            "intra_node=replace(cluster.intra_node, bytes_per_second=2 * "
            "cluster.intra_node.bytes_per_second),",
            "",
            unit("planner/what_binds"),
        ),
        (
            "plan-of-other-options",
            "planner/plan_cache.py",
            '"options": dict(self.options)',
            '"options": {}',
            unit("planner/plan_cache"),
        ),
        # capture without Dynamo
        (
            "gradients-go-on-where-the-model-stops-them",
            "capture/nonstrict/watch.py",
            "return pytree.tree_map_only(torch.Tensor, _detached, result) if operands else result",
            "return result",
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
            "        watch.check_branches()\n",
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
            "return found.renewed(module), _bind",
            "return found, _bind",
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
        # page
        (
            "tooltip-of-the-shortest-term",
            "report/terms.py",
            "range(len(words), 0, -1)",
            "range(1, len(words) + 1)",
            unit("report/page_terms"),
        ),
        (
            "terms-not-reached-by-key",
            "report/page.py",
            '"meaning": meaning, ',
            '"meaning": str, ',
            unit("report/page_terms"),
        ),
        # first call
        (
            "stages-compiled-against-the-plan",
            "deployment.py",
            "compiler = self.plan.stage_compiler",
            'compiler = "inductor"',
            unit("planner/cost/small_models"),
        ),
        (
            "small-models-on-gpus-too",
            "planner/cost/small_models.py",
            'kind == "cpu" and ',
            "",
            unit("planner/cost/small_models"),
        ),
        (
            "ranges-of-the-first-alone",
            "stages/quicker_compiler.py",
            "return known(self, other)",
            "return self",
            unit("stages/quicker_compiler"),
        ),
        (
            "first-instructions-always",
            "stages/quicker_compiler.py",
            "not best\n",
            "False\n",
            unit("stages/quicker_compiler"),
        ),
        (
            "instructions-tried-at-once",
            "stages/quicker_compiler.py",
            "with _trials:",
            "if True:",
            unit("stages/quicker_compiler"),
        ),
        (
            "instructions-not-tried-with-a-kernel",
            "stages/quicker_compiler.py",
            "CppPythonBindingsCodeCache.load_pybinding(*KERNEL_WITH_VECTORS)",
            "pass",
            unit("stages/quicker_compiler"),
        ),
        (
            "header-begun-by-no-rank",
            "backend.py",
            'if config.stage_compiler == "inductor" and world.has_least_to_do():',
            "if False:",
            unit("stages/compile_ahead"),
        ),
        (
            "kernels-not-begun",
            "stages/compile_ahead.py",
            "        begin_kernel(kernel_body)",
            "        pass",
            unit("stages/compile_ahead"),
        ),
        (
            "kernels-begun-with-other-settings",
            "stages/compile_ahead.py",
            "context.run(work)",
            "work()",
            unit("stages/compile_ahead"),
        ),
        (
            "graphs-compiled-by-all-at-once",
            "stages/once_per_host.py",
            "fcntl.LOCK_EX |",
            "fcntl.LOCK_SH |",
            unit("stages/once_per_host"),
        ),
        (
            "cores-not-shared",
            "runtime/host_resources.py",
            "mask >> cpu & 1 for mask in masks",
            "mask >> cpu & 1 for mask in masks[:1]",
            unit("runtime/host_threads"),
        ),
        (
            "threads-of-the-user-changed",
            "runtime/host_resources.py",
            "any(name in environ for name in _CHOSEN_BY) or",
            "",
            unit("runtime/host_threads"),
        ),
        # configuration
        (
            "any-option-may-differ",
            "settings/options.py",
            'bool(extra.get("own"))',
            "True",
            unit("settings/options"),
        ),
        (
            "options-before-environment",
            "settings/sources.py",
            "(options or {}).items()",
            "{k: v for k, v in (options or {}).items() if k not in values}.items()",
            unit("settings/sources"),
        ),
        (
            "unknown-variables-passed-over",
            "settings/sources.py",
            'raise UnknownOptionError(variable, valid=names, source="environment")',
            "continue",
            unit("settings/sources"),
        ),
        (
            "complex-left-as-pairs",
            "checkpoint/reader.py",
            'pairs = record.dtype == "complex128" and',
            "pairs = False and",
            unit("checkpoint/reader"),
        ),
        (
            "complex-sums-have-no-gradient",
            "deployment.py",
            "or fake.is_complex()",
            "or False",
            unit("capture/odd_models"),
        ),
        # declarations of custom operators
        (
            "declarations-believed",
            "passes/batch/batch_axis.py",
            "probe_rows(call)\n",
            "pass\n",
            passes("batch/row_wise"),
        ),
        (
            "derivatives-believed",
            "passes/batch/probe_rows.py",
            "for differentiate in (False, True):",
            "for differentiate in (False,):",
            passes("batch/row_wise"),
        ),
        # the doctor
        (
            "secret-values-stay",
            "doctor/redaction.py",
            "text = text.replace(value, LEFT_OUT)",
            "pass",
            unit("doctor/report"),
        ),
        (
            "wrong-step-passes",
            "doctor/answers.py",
            'if not answer["difference"] <= _TOLERANCE:',
            'if answer["difference"] > _TOLERANCE:',
            unit("doctor/doctor"),
        ),
        (
            "failed-connections-forgotten",
            "doctor/connections.py",
            "for each in gather(own)",
            "for each in gather(own)[:0]",
            unit("doctor/connections"),
        ),
        # errors and what is said of them
        (
            "cure-left-out",
            "errors/base.py",
            "self.cure = cure or self.default_cure",
            "self.cure = cure",
            unit("errors/errors"),
        ),
        (
            "nearest-values-not-told",
            "settings/sources.py",
            "expected=accepted_by(item), choices=choices_of(item)",
            "expected=accepted_by(item)",
            unit("errors/errors"),
        ),
        (
            "same-failure-told-twice",
            "runtime/job/last_words.py",
            "if lower or _HAS_SAID + self._digest in names.values():",
            "if False:",
            unit("runtime/job/last_words"),
        ),
        (
            "verdict-of-any-rank",
            "runtime/job/supervisor.py",
            "root = min(same, key=lambda report: report.rank, default=first)",
            "root = first",
            unit("runtime/job/supervisor"),
        ),
        # verification
        (
            "one-nan-is-as-good-as-two",
            "verify/comparing.py",
            "mine.isnan() & theirs.isnan()",
            "mine.isnan() | theirs.isnan()",
            unit("verify/verify"),
        ),
        (
            "row-tangents-not-averaged",
            "verify/rows.py",
            "return gradient / len(parts) if averages",
            "return gradient if averages",
            unit("verify/verify"),
        ),
        ("dropout-left-on", "verify/models.py", "part.p = 0.0", "pass", unit("verify/verify")),
        (
            "consequences-named",
            "verify/replay.py",
            "if found and next(iter(found.values())).shape == parameter.shape:",
            "if False:",
            ("tests/distributed/test_verify.py::test_a_wrong_gradient_of_one_rank_is_named[options0]",),
        ),
    )
)
