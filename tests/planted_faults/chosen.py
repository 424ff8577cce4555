"""Faults that somebody thought of: (name, file, what is there, what is put there, tests that must notice).

What is there is short, so that it goes on to fit when lines around it change; it must be in the file once.
"""

from __future__ import annotations

from tests.planted_faults.areas import CLIPPING, SCALER, buffers, equal, noticed, passes, point, trained, unit
from tests.planted_faults.fault import Fault

_LOAD = "checkpoint/loading.py"
_EXECUTOR = "runtime/executor.py"
_GRAPH = "runtime/graph_runtime.py"

CHOSEN: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        # executor and the step
        ("partial-sums-in-float32", _EXECUTOR, "exact = tensor.double() if", "exact = tensor if", noticed("partial_sums")),
        ("integer-sums-overwritten", _EXECUTOR, "state.partials[slot.name] + exact if", "exact if", noticed("partial_sums")),
        (
            "buffer-argument-not-copied", _EXECUTOR,
            "tensor.clone() if name in self.updated_buffers", "tensor if name in self.updated_buffers",
            buffers("normalized-training_first", "counting-replicas"),
        ),
        (
            "first-row-of-the-batch", _EXECUTOR,
            "return torch.full((), start, dtype", "return torch.full((), 0, dtype",
            noticed("random_rows"),
        ),
        (
            "infer-as-training", _EXECUTOR,
            "if state.training:\n            outputs", "if True:\n            outputs",
            (*point("modes"), *equal("no_batch_dimension")),
        ),
        (
            "input-gradients-not-summed", _EXECUTOR,
            "target[key] + tensor if key in target else tensor", "tensor",
            point("input_gradients_replicas"),
        ),
        ("rerun-advances-buffers", _GRAPH, "apply_buffer_updates=False,", "apply_buffer_updates=True,", noticed("rerun")),
        ("rerun-reads-new-buffers", _GRAPH, "buffers_read=state.buffers_read,", "", noticed("rerun_reads_buffers")),
        ("seed-not-remembered", _GRAPH, "self._remember_seed(gradient)", "pass", noticed("seeds")),
        (
            "seed-scale-not-applied", _GRAPH,
            "self.buckets.publish(state.pending, scale, keep=keep)", "self.buckets.publish(state.pending, 1.0, keep=keep)",
            point("incoming_gradient"),
        ),
        (
            "row-gradients-not-averaged", _GRAPH,
            "share = 1.0 / self.world.size if", "share = 1.0 if",
            (*trained("basic-r2-s1-1-m2"), *equal("loss_outside_uneven")),
        ),
        ("row-gradient-overwritten", _GRAPH, "tangent if held is None else held + tangent", "tangent", noticed("one_value_twice")),
        (
            "replicated-inputs-not-compared", _GRAPH,
            "self._check_replicated([answer[2] for answer in answers])", "pass",
            noticed("replicated_inputs"),
        ),
        ("seed-of-each-rank", _GRAPH, 'torch.full((), answers[0][1], dtype', 'torch.full((), seed, dtype', noticed("random_rows")),
        (
            "replicated-output-of-rank-0", "deployment.py",
            "root=self.stage_ranks[maker[name]][0],", "root=0,",
            noticed("replicated_outputs"),
        ),
        (
            "statistics-of-the-last-replica", "deployment.py",
            "self.stage_ranks[stage][0] for name, stage in cut.buffer_makers",
            "self.stage_ranks[stage][-1] for name, stage in cut.buffer_makers",
            buffers("counting-replicas", "statistics", "statistics-last_stage") + equal("batch_norm_replicas"),
        ),
        (
            "statistics-stay-with-their-replica", _GRAPH,
            "self.shared_buffers.share()", "pass",
            buffers("statistics", "counting-training_first"),
        ),
        (
            "statistics-not-taken-over", "runtime/shared_buffers.py",
            "tensor.copy_(part.view(tensor.shape))", "part.view(tensor.shape)",
            buffers("statistics", "counting-training_first"),
        ),
        # rows and messages
        ("larger-parts-last", "runtime/rows.py", "(part < extra)", "(part >= num_parts - extra)", unit("rows")),
        (
            "rank-0-batch-is-global", "runtime/rows.py",
            "sum(self.local_rows) if self.gather_inputs else self.local_rows[0]", "sum(self.local_rows)",
            (*unit("rows"), *point("rank_0_feeds")),
        ),
        (
            "message-from-the-first-row", "runtime/messages.py",
            "[piece.start - start : piece.stop - start]\n        for", "[0 : piece.stop - piece.start]\n        for",
            unit("exchange"),
        ),
        (
            "pieces-as-they-come", "runtime/messages.py",
            "sorted(arrived, key=lambda entry: entry[0].start)", "list(arrived)",
            unit("exchange"),
        ),
        (
            "overlapping-rows-overwritten", "runtime/messages.py",
            "piece.stop - start] += rows[index]", "piece.stop - start] = rows[index]",
            unit("exchange"),
        ),
        (
            "buffer-free-before-it-is-sent", "runtime/send_buffers.py",
            "key[:2] == (channel, micro_batch)", "key[0] == channel",
            unit("send_buffers"),
        ),
        (
            "marks-left-on-memory", "kernels/plain_memory.py",
            "return tensor.resolve_conj().resolve_neg() if has_marks(tensor) else tensor", "return tensor",
            ("tests/unit/kernels/test_plain_memory.py",),
        ),
        (
            "message-of-a-marked-value", "kernels/boundary_pack.py",
            "strided = [tensor for tensor in tensors if not has_plain_memory(tensor)]",
            "strided = [tensor for tensor in tensors if not tensor.is_contiguous()]",
            ("tests/unit/kernels/test_plain_memory.py",),
        ),
        # buckets and reductions
        ("absent-gradient-not-zeroed", "runtime/buckets.py", "self.view(name).zero_()", "self.view(name)", unit("buckets")),
        (
            "buffer-in-use-taken", "runtime/buckets.py",
            "num_storage_users(buffer.memory) == 1", "num_storage_users(buffer.memory) >= 1",
            unit("buckets"),
        ),
        ("gradient-overwritten", "runtime/buckets.py", "parameter.grad.add_(view)", "parameter.grad.copy_(view)", unit("buckets")),
        ("hooks-left-out", "runtime/buckets.py", "view = view if changed is None else changed", "pass", unit("buckets")),
        ("shared-sum-within-the-backward", "runtime/buckets.py", "(self.ended or not bucket.is_shared)", "True", unit("buckets")),
        # devices that run behind the host
        ("messages-queued-as-posted", "runtime/transport_nccl.py", "self._turns, self._next_turn = turns, 0", "pass", unit("hangs")),
        ("failed-work-is-done", "runtime/torch_internals.py", "if failure is not None:", "if False:", unit("transport_nccl")),
        ("links-not-checked", "runtime/agreement.py", "world.transport.check()", "pass", unit("agreement")),
        ("rehearsal-updates-buffers", "runtime/rehearsal.py", "apply_buffer_updates=False,", "", unit("rehearsal")),
        ("rehearsal-reduces", "runtime/rehearsal.py", "played.pending.start_reduce = _reduce_nothing", "pass", unit("rehearsal")),
        ("rehearsal-draws-numbers", "runtime/rehearsal.py", "with _same_random_numbers(self.world.device):", "if True:", unit("rehearsal")),
        (
            "new-sizes-not-rehearsed", "runtime/rehearsal.py",
            "return not (self._sizes_of(kind, rows) <= self._sizes and", "return not (bool(self._sizes) and",
            unit("hangs"),
        ),
        ("turn-before-the-post", "schedule/turns.py", "run.place[sender], run.place[receiver]", "0, 0", unit("turns")),
        ("pieces-in-no-order", "runtime/queue_turns.py", "in sorted(set(found)):", "in found:", unit("turns")),
        ("communicators-of-one-device", "partition/interval_costs.py", "number * (num_devices > 1)", "number", unit("interval_costs")),
        ("reduced-before-all-is-there", "runtime/buckets.py", "blocked.add(bucket.ranks)", "pass", unit("buckets")),
        (
            "delayed-gradient-counted-twice", "runtime/accumulation.py",
            "            _count_once(table)\n", "            pass\n",
            ("tests/distributed/test_rannc_module.py::test_behaviours[delayed-replicas]",),
        ),
        (
            "sums-over-ranks-in-float32", "runtime/scalars.py",
            "return total.reshape(-1).double()", "return total.reshape(-1).float()",
            unit("scalars"),
        ),
        (
            "imaginary-part-of-a-sum-dropped", "runtime/scalars.py",
            "torch.complex(*doubles.view(-1, 2).unbind(1)) if", "doubles.view(-1, 2)[:, 0] if",
            unit("scalars"),
        ),
        ("shared-sum-leaves-out-a-rank", "runtime/shared_sums.py", "bucket, *others[group.own :]]", "bucket]", unit("shared_sums")),
        (
            "gradient-tables-by-bucket-alone", "kernels/gradient_views.py",
            "addresses = (*map(_ADDRESS, views), *map(_ADDRESS, gradients))", "addresses = (*map(_ADDRESS, views),)",
            ("tests/unit/kernels/test_gradient_views.py",),
        ),
        (
            "gradient-tables-made-anew", "kernels/gradient_writes.py",
            "tables = _TABLES.get() or GradientTables()", "tables = GradientTables()",
            ("tests/unit/kernels/test_gradient_views.py",),
        ),
        # clipping and scaling
        ("norm-of-this-rank", "runtime/clipping.py", "own = _over_ranks(own, tables[0], norm_type)", "pass", CLIPPING),
        ("norm-counts-replicas", "runtime/clipping.py", "any(table.answers_for(p) for table in tables)", "True", CLIPPING),
        ("clipped-to-more", "runtime/clipping.py", ".clamp(max=1.0)", ".clamp(min=1.0)", CLIPPING),
        (
            "infinite-norm-summed", "runtime/clipping.py",
            "places.max() if math.isinf(norm_type)", "places.sum() if math.isinf(norm_type)",
            CLIPPING,
        ),
        ("scaler-hears-of-no-other", "runtime/grad_scaler.py", "if any(answer[1] for answer in answers)", "if local", SCALER),
        ("scales-not-compared", "runtime/grad_scaler.py", "if len(set(scales)) > 1", "if False", SCALER),
        (
            "loss-gradient-not-averaged", _GRAPH,
            "sum(answer[1][i] for answer in answers) / size", "sum(answer[1][i] for answer in answers)",
            point("incoming_gradient"),
        ),
        # checkpoints
        (
            "loss-gradient-not-restored", _LOAD,
            "counter.loss_gradient = self.reader.manifest.runtime.loss_gradient", "pass",
            noticed("resumed"),
        ),
        ("step-counter-not-restored", _LOAD, "counter.number = self.reader.manifest.runtime.num_steps_begun", "pass", noticed("resumed")),
        (
            "step-counter-of-rank-0-alone", _LOAD,
            "counter.number = self.reader.manifest.runtime.num_steps_begun",
            "counter.number = self.reader.manifest.runtime.num_steps_begun * (self.world.rank == 0)",
            noticed("resumed"),
        ),
        (
            "generators-of-rank-0", _LOAD,
            "parts[self.world.rank if self.world.rank < len(parts) else 0].random", "parts[0].random",
            noticed("resumed"),
        ),
        ("generators-not-restored", _LOAD, "if random_state:", "if False:", noticed("resumed")),
        (
            "moments-in-the-parameters-dtype", "checkpoint/optimizer_state.py",
            "optimizer.state[parameter][key] = value", "pass",
            unit("checkpoint_state"),
        ),
        (
            "plain-states-forgotten", "checkpoint/optimizer_state.py",
            "values.update(part.optimizers[number].values)", "pass",
            unit("checkpoint_state"),
        ),
        ("checksum-not-compared", "checkpoint/reader.py", "if crc32_of(tensor) != record.crc32:", "if False:", unit("checkpoint_reader")),
        (
            "oldest-is-latest", "checkpoint/directory.py",
            "return max(found, key", "return min(found, key",
            unit("checkpoint_reader", "checkpoint_crash"),
        ),
        # randomness
        ("attention-dropout-unscaled", "passes/randomness.py", "* (1.0 / (1.0 - drop)) @ value", "@ value", passes("randomness")),
        ("dropout-unscaled", "passes/randomness.py", "0.0 if drop == 1 else 1.0 / (1.0 - drop)", "1.0", passes("randomness")),
        ("draws-alike", "passes/randomness.py", "0x1B873593 * (draw + 1)", "0x1B873593 * 1", passes("randomness")),
        ("causal-mask-left-out", "passes/randomness.py", 'if arguments.get("is_causal"):', "if False:", passes("randomness")),
        ("attention-bias-left-out", "passes/randomness.py", "if bias is not None:", "if False:", passes("randomness")),
        ("attention-scale-ignored", "passes/randomness.py", "if scale is None else scale", "", passes("randomness")),
        # schedules
        (
            "armed-one-backward-early", "schedule/lowering.py",
            "lane.arms[slots[-1]]", "lane.arms[slots[0]]",
            unit("schedule_lowering", "schedule_verify"),
        ),
        (
            "one-more-in-flight", "schedule/orders.py",
            "min(num_stages - stage - 1, num_micro_batches)", "min(num_stages - stage, num_micro_batches)",
            unit("schedule_lowering", "schedule_simulator"),
        ),
        (
            "all-reduce-under-all-of-backward", "schedule/simulator.py",
            "last_end + costs.allreduce / costs.num_buckets", "last_end",
            unit("schedule_simulator"),
        ),
        # event trace
        (
            "arrow-from-the-rank-that-receives", "runtime/event_trace.py",
            "if begins else (piece.peer, self._rank)", "if begins else (self._rank, piece.peer)",
            unit("event_trace_arrows"),
        ),
        ("arrows-of-a-second-run", "runtime/event_trace.py", "self._seen[key] += 1", "pass", unit("event_trace_arrows")),
        # devices
        (
            "late-connections-not-said", "runtime/device_connections.py",
            "if not context_exists:", "if True:",
            unit("device_connections"),
        ),
        # planner
        ("ring-of-one-step-too-many", "cost/transfer.py", "2 * (num_ranks - 1)", "2 * num_ranks", unit("cost")),
        (
            "recompute-never-pays", "cost/memory.py",
            "return num_micro_batches if schedule ==", "return 1 if schedule ==",
            unit("cost", "planner"),
        ),
        (
            "what-binds-is-what-gains-least", "partition/what_binds.py",
            "key=lambda change: -gains[change]", "key=lambda change: gains[change]",
            unit("what_binds"),
        ),
        (
            "links-made-faster-one-way-only", "partition/what_binds.py",
            "intra_node=replace(cluster.intra_node, bytes_per_second=2 * cluster.intra_node.bytes_per_second),", "",
            unit("what_binds"),
        ),
        # page
        ("tooltip-of-the-shortest-term", "report/terms.py", "range(len(words), 0, -1)", "range(1, len(words) + 1)", unit("page_terms")),
        ("terms-not-reached-by-key", "report/page.py", '"meaning": meaning, ', '"meaning": str, ', unit("page_terms")),
        # first call
        (
            "stages-compiled-against-the-plan", "deployment.py",
            "compiler = self.plan.stage_compiler", 'compiler = "inductor"',
            unit("small_models"),
        ),
        ("small-models-on-gpus-too", "cost/small_models.py", 'kind == "cpu" and ', "", unit("small_models")),
        ("graphs-compiled-by-all-at-once", "compile_once.py", "fcntl.LOCK_EX |", "fcntl.LOCK_SH |", unit("compile_once")),
        (
            "cores-not-shared", "runtime/host_threads.py",
            "mask >> cpu & 1 for mask in masks", "mask >> cpu & 1 for mask in masks[:1]",
            unit("host_threads"),
        ),
        (
            "threads-of-the-user-changed", "runtime/host_threads.py",
            "any(name in environ for name in _CHOSEN_BY) or", "",
            unit("host_threads"),
        ),
        # configuration
        ("any-option-may-differ", "config.py", 'bool(extra.get("own"))', "True", unit("config")),
        (
            "options-before-environment", "config_sources.py",
            '(options or {}).items()', '{k: v for k, v in (options or {}).items() if k not in values}.items()',
            unit("config_sources"),
        ),
        (
            "unknown-variables-passed-over", "config_sources.py",
            "raise UnknownOptionError(variable, valid=names, source=\"environment\")", "continue",
            unit("config_sources"),
        ),
        (
            "complex-left-as-pairs", "checkpoint/reader.py",
            'pairs = record.dtype == "complex128" and', "pairs = False and",
            unit("checkpoint_reader"),
        ),
        (
            "complex-sums-have-no-gradient", "deployment.py",
            "or fake.is_floating_point() or fake.is_complex():", "or fake.is_floating_point():",
            unit("odd_models"),
        ),
        # declarations of custom operators
        ("declarations-believed", "passes/batch_axis.py", "probe_rows(call)\n", "pass\n", passes("row_wise")),
        (
            "derivatives-believed", "passes/probe_rows.py",
            "for differentiate in (False, True):", "for differentiate in (False,):",
            passes("row_wise"),
        ),
        # the doctor
        ("secret-values-stay", "doctor/redaction.py", "text = text.replace(value, LEFT_OUT)", "pass", unit("doctor_report")),
        (
            "wrong-step-passes", "doctor/answers.py",
            "if not answer[\"difference\"] <= _TOLERANCE:", "if answer[\"difference\"] > _TOLERANCE:",
            unit("doctor"),
        ),
        (
            "failed-connections-forgotten", "doctor/connections.py",
            "for each in gather(own)", "for each in gather(own)[:0]",
            unit("doctor_connections"),
        ),
        # errors and what is said of them
        ("cure-left-out", "errors/base.py", "self.cure = cure or self.default_cure", "self.cure = cure", unit("errors")),
        (
            "nearest-values-not-told", "config_sources.py",
            "expected=accepted_by(item), choices=choices_of(item))", "expected=accepted_by(item))",
            unit("errors"),
        ),
        (
            "same-failure-told-twice", "runtime/last_words.py",
            "if lower or _HAS_SAID + self._digest in names.values():", "if False:",
            unit("last_words"),
        ),
        (
            "verdict-of-any-rank", "runtime/monitor_hub.py",
            "root = min(same, key=lambda report: report.rank, default=first)", "root = first",
            unit("monitor_hub"),
        ),
        # verification
        (
            "one-nan-is-as-good-as-two", "verify/comparing.py",
            "mine.isnan() & theirs.isnan()", "mine.isnan() | theirs.isnan()",
            unit("verify"),
        ),
        (
            "row-tangents-not-averaged", "verify/rows.py",
            "return gradient / len(parts) if averages", "return gradient if averages",
            unit("verify"),
        ),
        ("dropout-left-on", "verify/models.py", "part.p = 0.0", "pass", unit("verify")),
        (
            "consequences-named", "verify/replay.py",
            "if found and next(iter(found.values())).shape == parameter.shape:", "if False:",
            ("tests/distributed/test_verify.py::test_a_wrong_gradient_of_one_rank_is_named[options0]",),
        ),
    )
)
