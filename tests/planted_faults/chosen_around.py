"""Faults that somebody thought of, in what is around the step: page, first call, options, commands,
checkpoints, schedules.
"""

from __future__ import annotations

from tests.planted_faults.areas import noticed, passes, unit
from tests.planted_faults.fault import Fault

_LOAD = "checkpoint/loading.py"

CHOSEN_AROUND: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
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
            "settings/same_options.py",
            'bool(extra.get("own"))',
            "True",
            unit("settings/options"),
        ),
        (
            "options-before-environment",
            "settings/sources.py",
            "in given.items():",
            "in {k: v for k, v in given.items() if k not in values}.items():",
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
            "passes/batch/differentiability.py",
            "torch.Tensor) and (value.is_floating_point() or value.is_complex())",
            "torch.Tensor) and value.is_floating_point()",
            unit("capture/odd_models"),
        ),
        # rows that meet
        (
            "whole-batch-without-the-mark",
            "passes/batch/split_reductions.py",
            "        # Whether or not anything is found: layouts were given that slices do not have.\n",
            "        if node is None:\n            return None\n",
            passes("batch/whole_batch"),
        ),
        (
            "whole-batch-in-micro-batches",
            "deployment.py",
            "        if whole is None:\n            return analysis.micro",
            "        if True:\n            return analysis.micro",
            ("tests/distributed/test_whole_batch.py::test_whole_batch[models-1,1]",),
        ),
        (
            "sums-of-rows-that-met-before-the-step",
            "passes/batch/batch_axis.py",
            "            self.before_step.discard(node)\n        if isinstance(layout, (PartialSum",
            "            pass\n        if isinstance(layout, (PartialSum",
            passes("batch/whole_batch"),
        ),
        (
            "whole-batch-on-replicas",
            "planner/plan_request.py",
            "        if graph.whole_batch:\n",
            "        if False:\n",
            ("tests/distributed/test_whole_batch.py::test_whole_batch[models-1,1]",),
        ),
        (
            "path-of-another-batch",
            "runtime/step/graph_settings.py",
            "    if (broken := first_broken(settings.size_tests, table.global_rows)) is not None:",
            "    if (broken := None) is not None:",
            ("tests/distributed/test_nonstrict.py::test_nonstrict[changes-1,1]",),
        ),
        (
            "paths-by-values-taken-for-checks",
            "capture/nonstrict/reads.py",
            "        if isinstance(answer, bool) and _only_raises(ways, reads, number):\n",
            "        if isinstance(answer, bool):\n",
            unit("capture/nonstrict/reads"),
        ),
        (
            "values-of-this-ranks-rows",
            "nonstrict_call.py",
            "        if config.gather_inputs:\n            return answers\n        return [next",
            "        if world.rank >= 0:\n            return [payload]\n        return [next",
            ("tests/distributed/test_nonstrict.py::test_nonstrict[changes-1,1]",),
        ),
        (
            "own-refusals-taken-for-raises",
            "capture/nonstrict/reads.py",
            "    if isinstance(error, RanncError):\n        return False\n",
            "",
            unit("capture/nonstrict/reads"),
        ),
        (
            "values-not-read-again",
            "capture/nonstrict/captures.py",
            "        if answer != decision.answer:\n",
            "        if False:\n",
            unit("capture/nonstrict/read_values"),
        ),
        # declarations of custom operators
        (
            "declarations-believed",
            "passes/batch/row_wise.py",
            "    probe_rows(call)\n",
            "",
            passes("batch/row_wise"),
        ),
        (
            "derivatives-believed",
            "passes/batch/row_wise.py",
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
            "errors-of-other-ranks-in-one-piece",
            "errors/base.py",
            "restore(class_named(class_name) or RanncError, text, parts_in(text))",
            'restore(class_named(class_name) or RanncError, text, {**parts_in(""), "problem": text})',
            unit("errors/errors"),
        ),
        (
            "a-file-of-options-passed-over-in-silence",
            "settings/sources.py",
            "        unread=unread_file(environ),\n",
            "",
            unit("settings/sources"),
        ),
        (
            "an-interrupt-with-all-of-torch",
            "runtime/job/last_words.py",
            "        if isinstance(error, KeyboardInterrupt):\n",
            "        if False:\n",
            unit("runtime/job/last_words"),
        ),
        (
            "seconds-of-another-model-as-they-are",
            "log/first_call.py",
            "scale = self._spent[0] / self._of_another[0]",
            "scale = 1.0",
            unit("log/first_call"),
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
        # checkpoints
        (
            "loss-gradient-not-restored",
            _LOAD,
            "counter.loss_gradient = self._manifest.runtime.loss_gradient",
            "pass",
            noticed("resumed"),
        ),
        (
            "step-counter-not-restored",
            _LOAD,
            "counter.number = self._manifest.runtime.num_steps_begun",
            "pass",
            noticed("resumed"),
        ),
        (
            "step-counter-of-rank-0-alone",
            _LOAD,
            "counter.number = self._manifest.runtime.num_steps_begun",
            "counter.number = self._manifest.runtime.num_steps_begun * (self.world.rank == 0)",
            noticed("resumed"),
        ),
        (
            "generators-of-rank-0",
            _LOAD,
            "parts[self.world.rank if self.world.rank < len(parts) else 0].random",
            "parts[0].random",
            noticed("resumed"),
        ),
        ("generators-not-restored", _LOAD, "if random_state:", "if False:", noticed("resumed")),
        (
            "moments-in-the-parameters-dtype",
            "checkpoint/optimizer_state.py",
            "optimizer.state[parameter][key] = value",
            "pass",
            unit("checkpoint/state"),
        ),
        (
            "plain-states-forgotten",
            "checkpoint/reader.py",
            "values.update(part.optimizers[number].values)",
            "pass",
            unit("checkpoint/state"),
        ),
        (
            "checksum-not-compared",
            "checkpoint/reader.py",
            "if crc32_of(tensor) != record.crc32:",
            "if False:",
            unit("checkpoint/reader"),
        ),
        (
            "oldest-is-latest",
            "checkpoint/directory.py",
            "return max(found, key",
            "return min(found, key",
            unit("checkpoint/reader", "checkpoint/crash"),
        ),
        # schedules
        (
            "allowed-one-backward-early",
            "schedule/lowering.py",
            "lane.allows[slots[-1]]",
            "lane.allows[slots[0]]",
            unit("schedule/lowering", "schedule/verify"),
        ),
        (
            "one-more-in-flight",
            "schedule/one_f_one_b.py",
            "min(num_stages - stage - 1, num_micro_batches)",
            "min(num_stages - stage, num_micro_batches)",
            unit("schedule/lowering", "schedule/simulator"),
        ),
        (
            "bound-in-flight-too-high",
            "schedule/one_f_one_b.py",
            "return min(num_stages_to_end, num_micro_batches)",
            "return min(num_stages_to_end + 1, num_micro_batches)",
            unit("schedule/lowering", "schedule/plan_simulation"),
        ),
        (
            "all-reduce-under-all-of-backward",
            "schedule/simulator.py",
            "last_end + costs.allreduce / costs.num_buckets",
            "last_end",
            unit("schedule/simulator"),
        ),
        # event trace
        (
            "arrow-from-the-rank-that-receives",
            "runtime/trace/event_trace.py",
            "if begins else (piece.peer, self._rank)",
            "if begins else (self._rank, piece.peer)",
            unit("runtime/trace/event_trace_arrows"),
        ),
        (
            "arrows-of-a-second-run",
            "runtime/trace/event_trace.py",
            "self._seen[key] += 1",
            "pass",
            unit("runtime/trace/event_trace_arrows"),
        ),
        # devices
        (
            "late-connections-not-said",
            "runtime/comm/device_connections.py",
            "if not context_exists:",
            "if True:",
            unit("runtime/comm/device_connections"),
        ),
        (
            "numbers-that-change-are-not-named",
            "backend.py",
            "if before.get(name, value) != value]",
            "if False]",
            ("tests/distributed/test_gate.py::test_the_gate[numbers_that_change]",),
        ),
        # optimizers
        (
            "optimizers-of-own-classes-are-not-found",
            "runtime/gradients/optimizer_probe.py",
            "found |= _subclasses(each)",
            "pass",
            unit("runtime/gradients/optimizer_probe"),
        ),
    )
)
