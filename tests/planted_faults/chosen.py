"""Faults that somebody thought of: (name, file, what is there, what is put there, tests that must notice).

What is there is short, so that it goes on to fit when lines around it change; it must be in the file once.
"""

from __future__ import annotations

from tests.planted_faults.areas import buffers, equal, noticed, point, trained, unit
from tests.planted_faults.chosen_around import CHOSEN_AROUND
from tests.planted_faults.chosen_autodist import CHOSEN_AUTODIST
from tests.planted_faults.chosen_capture import CHOSEN_CAPTURE
from tests.planted_faults.chosen_changing import CHOSEN_CHANGING
from tests.planted_faults.chosen_compilers import CHOSEN_COMPILERS
from tests.planted_faults.chosen_dims import CHOSEN_DIMS
from tests.planted_faults.chosen_ecosystem import CHOSEN_ECOSYSTEM
from tests.planted_faults.chosen_epl import CHOSEN_EPL
from tests.planted_faults.chosen_gathered import CHOSEN_GATHERED
from tests.planted_faults.chosen_lanes import CHOSEN_LANES
from tests.planted_faults.chosen_lightning import CHOSEN_LIGHTNING
from tests.planted_faults.chosen_loops import CHOSEN_LOOPS
from tests.planted_faults.chosen_memory import CHOSEN_MEMORY
from tests.planted_faults.chosen_numbers import CHOSEN_NUMBERS
from tests.planted_faults.chosen_planning import CHOSEN_PLANNING
from tests.planted_faults.chosen_scaling import CHOSEN_SCALING
from tests.planted_faults.chosen_steps import CHOSEN_STEPS
from tests.planted_faults.chosen_trainers import CHOSEN_TRAINERS
from tests.planted_faults.chosen_wires import CHOSEN_WIRES
from tests.planted_faults.fault import Fault

_EXECUTOR = "runtime/step/executor.py"
_GRAPH = "runtime/step/graph_runtime.py"

CHOSEN: tuple[Fault, ...] = (
    CHOSEN_AROUND
    + CHOSEN_COMPILERS
    + CHOSEN_DIMS
    + CHOSEN_GATHERED
    + CHOSEN_LANES
    + CHOSEN_LIGHTNING
    + CHOSEN_NUMBERS
    + CHOSEN_LOOPS
    + CHOSEN_MEMORY
    + CHOSEN_CAPTURE
    + CHOSEN_AUTODIST
    + CHOSEN_EPL
    + CHOSEN_ECOSYSTEM
    + CHOSEN_WIRES
    + CHOSEN_PLANNING
    + CHOSEN_SCALING
    + CHOSEN_STEPS
    + CHOSEN_CHANGING
    + CHOSEN_TRAINERS
    + tuple(
        Fault(*row)
        for row in (
            # executor and the step
            (
                "partial-sums-in-float32",
                _EXECUTOR,
                "exact = tensor.double() if",
                "exact = tensor if",
                noticed("partial_sums"),
            ),
            (
                "integer-sums-overwritten",
                _EXECUTOR,
                "state.partials[slot.name] + exact if",
                "exact if",
                noticed("partial_sums"),
            ),
            (
                "buffer-argument-not-copied",
                _EXECUTOR,
                "tensor.clone() if name in self.updated_buffers",
                "tensor if name in self.updated_buffers",
                buffers("normalized-training_first", "counting-replicas"),
            ),
            (
                "first-row-of-the-batch",
                _EXECUTOR,
                "return torch.full((), start, dtype",
                "return torch.full((), 0, dtype",
                noticed("random_rows"),
            ),
            (
                "infer-as-training",
                _EXECUTOR,
                "if state.training:\n            outputs",
                "if True:\n            outputs",
                (*point("modes"), *equal("no_batch_dimension")),
            ),
            (
                "input-gradients-not-summed",
                _EXECUTOR,
                "target[key] + tensor if key in target else tensor",
                "tensor",
                point("input_gradients_replicas"),
            ),
            (
                "rerun-advances-buffers",
                "runtime/step/step_state.py",
                "apply_buffer_updates=False,",
                "apply_buffer_updates=True,",
                noticed("rerun"),
            ),
            (
                "rerun-reads-new-buffers",
                "runtime/step/step_state.py",
                "buffers_read=self.buffers_read,",
                "",
                noticed("rerun_reads_buffers"),
            ),
            (
                "loss-gradient-not-remembered",
                _GRAPH,
                "self._remember_loss_gradient(gradient)",
                "pass",
                noticed("seeds"),
            ),
            (
                "seed-scale-not-applied",
                _GRAPH,
                "self.buckets.publish(state.pending, scale, keep=keep, without=without.parameters)",
                "self.buckets.publish(state.pending, 1.0, keep=keep, without=without.parameters)",
                point("incoming_gradient"),
            ),
            (
                "row-gradients-not-averaged",
                "runtime/step/graph_settings.py",
                "return 1.0 / num_ranks if",
                "return 1.0 if",
                (*trained("basic-r2-s1-1-m2"), *equal("loss_outside_uneven")),
            ),
            (
                "row-gradient-overwritten",
                "runtime/step/user_outputs.py",
                "found[value.name] + part if value.name in found else part",
                "part",
                noticed("one_value_twice"),
            ),
            (
                "replicated-inputs-not-compared",
                _GRAPH,
                "check_replicated(self.inputs, [answer[2] for answer in answers])",
                "pass",
                noticed("replicated_inputs"),
            ),
            (
                "seed-of-each-rank",
                _GRAPH,
                "torch.full((), answers[0][1], dtype",
                "torch.full((), seed, dtype",
                noticed("random_rows"),
            ),
            (
                "replicated-output-of-rank-0",
                "deployment.py",
                "root=self.stage_ranks[maker[name]][0],",
                "root=0,",
                noticed("replicated_outputs"),
            ),
            (
                "statistics-of-the-last-replica",
                "deployment.py",
                "self.stage_ranks[stage][0] for name, stage in cut.buffer_makers",
                "self.stage_ranks[stage][-1] for name, stage in cut.buffer_makers",
                buffers("counting-replicas", "statistics", "statistics-last_stage")
                + equal("batch_norm_replicas"),
            ),
            (
                "statistics-stay-with-their-replica",
                _GRAPH,
                "self.shared_buffers.share()",
                "pass",
                buffers("statistics", "counting-training_first"),
            ),
            (
                "statistics-not-taken-over",
                "runtime/shared_buffers.py",
                "tensor.copy_(part.view(tensor.shape))",
                "part.view(tensor.shape)",
                buffers("statistics", "counting-training_first"),
            ),
            # rows and messages
            (
                "larger-parts-last",
                "runtime/rows.py",
                "(part < extra)",
                "(part >= num_parts - extra)",
                unit("runtime/rows"),
            ),
            (
                "rank-0-batch-is-global",
                "runtime/rows.py",
                "sum(self.local_rows) if self.gather_inputs else self.local_rows[0]",
                "sum(self.local_rows)",
                (*unit("runtime/rows"), *point("rank_0_feeds")),
            ),
            (
                "message-from-the-first-row",
                "runtime/step/messages.py",
                "return [each[first:last] for each in rows]",
                "return [each[: last - first] for each in rows]",
                unit("runtime/step/exchange"),
            ),
            (
                "pieces-as-they-come",
                "runtime/step/messages.py",
                "sorted(arrived, key=lambda entry: entry[0].start)",
                "list(arrived)",
                unit("runtime/step/exchange"),
            ),
            (
                "overlapping-rows-overwritten",
                "runtime/step/messages.py",
                "piece.stop - start] += rows[index]",
                "piece.stop - start] = rows[index]",
                unit("runtime/step/exchange"),
            ),
            (
                "buffer-free-before-it-is-sent",
                "runtime/step/send_buffers.py",
                "key[:2] == (channel, micro_batch)",
                "key[0] == channel",
                unit("runtime/step/send_buffers"),
            ),
            (
                "marks-left-on-memory",
                "kernels/plain_memory.py",
                "return tensor.resolve_conj().resolve_neg() if has_marks(tensor) else tensor",
                "return tensor",
                ("tests/unit/kernels/test_plain_memory.py",),
            ),
            (
                "message-of-a-marked-value",
                "kernels/plain_memory.py",
                "and not any(map(_IS_CONJ, tensors))\n        and not any(map(_IS_NEG, tensors))",
                "",
                ("tests/unit/kernels/test_plain_memory.py",),
            ),
            (
                "views-of-another-layout",
                "kernels/kept_views.py",
                "message, *views = [each.data for each in kept]",
                "message, *views = [each.data for each in next(iter(self._by_layout.values()))]",
                ("tests/unit/kernels/test_kept_views.py",),
            ),
            (
                "layout-of-another-number-of-rows",
                "runtime/step/executor.py",
                "key = (channel, piece.stop - piece.start, ",
                "key = (channel, 0, ",
                unit("runtime/step/send_buffers"),
            ),
            (
                "counter-hidden-from-a-trace",
                "runtime/absent_tensors.py",
                "tensor.data = torch.full((), _filler(tensor), dtype=tensor.dtype, device=tensor.device)",
                "pass",
                unit("runtime/absent_tensors"),
            ),
            (
                "counter-written-after-a-trace",
                "runtime/absent_tensors.py",
                'refuse_memory_access(tensor, absence.error("").problem)',
                "pass",
                unit("runtime/absent_tensors"),
            ),
            # devices that run behind the host
            (
                "messages-queued-as-posted",
                "runtime/comm/nccl.py",
                "self._queue_order, self._next_queued = queued, 0",
                "pass",
                unit("runtime/step/hangs"),
            ),
            (
                "failed-work-is-done",
                "runtime/torch_internals.py",
                "if failure is not None:",
                "if False:",
                unit("runtime/comm/nccl"),
            ),
            (
                "nccl-results-not-asked-for",
                "runtime/torch_internals.py",
                "code = int(result.value()) if result.done() else 0",
                "code = 0",
                unit("runtime/torch_internals"),
            ),
            (
                "a-collective-without-a-work",
                "runtime/comm/nccl.py",
                "dist.all_reduce(_real(tensor), group=group, async_op=True)",
                "dist.all_reduce(tensor, group=group)",
                unit("runtime/comm/nccl"),
            ),
            (
                "links-of-a-channel-whatever-the-peer",
                "runtime/comm/nccl.py",
                "self._ways.setdefault((route.channel, peer), _Way.of(route.channel, ranks))",
                "self._ways.setdefault((route.channel, peer), next("
                "(way for key, way in self._ways.items() if key[0] == route.channel), _Way.of(route.channel, ranks)))",
                unit("runtime/comm/nccl"),
            ),
            (
                "a-link-that-does-not-wait-for-its-collective",
                "runtime/comm/nccl.py",
                "posted.wait()  # the link's stream; the host does not",
                "pass",
                unit("runtime/comm/nccl"),
            ),
            (
                "a-watch-that-dies-in-silence",
                "runtime/comm/device_watch.py",
                "except Exception as error:  # a watch that has died would let a later message hang",
                "except RuntimeError as error:",
                unit("runtime/comm/device_watch"),
            ),
            (
                "an-error-hidden-by-that-of-guards",
                "backend.py",
                "capture.run_without_check_of_guards()",
                "pass",
                unit("backend"),
            ),
            (
                "moved-parameters-forgotten-with-a-graph",
                "session.py",
                "self.has_moved |= moved.changed",
                "self.has_moved |= False",
                unit("backend"),
            ),
            (
                "links-not-checked",
                "runtime/agreement.py",
                "world.transport.check()",
                "pass",
                unit("runtime/agreement"),
            ),
            (
                "rehearsal-updates-buffers",
                "runtime/step/rehearsal.py",
                "apply_buffer_updates=False,",
                "",
                unit("runtime/step/rehearsal"),
            ),
            (
                "rehearsal-reduces",
                "runtime/step/rehearsal.py",
                "played.pending.start_reduce = _reduce_nothing",
                "pass",
                unit("runtime/step/rehearsal"),
            ),
            (
                "rehearsal-draws-numbers",
                "runtime/step/rehearsal.py",
                "with same_random_numbers(self.world.device):",
                "if True:",
                unit("runtime/step/rehearsal"),
            ),
            (
                "new-sizes-not-rehearsed",
                "runtime/step/rehearsal.py",
                "return not (sizes <= self._sizes and",
                "return not (bool(self._sizes) and",
                unit("runtime/step/hangs"),
            ),
            (
                "queued-before-the-post",
                "schedule/message_order.py",
                "run.place[sender], run.place[receiver]",
                "0, 0",
                unit("schedule/message_order"),
            ),
            (
                "pieces-in-no-order",
                "runtime/step/queue_order.py",
                "in sorted(set(found)):",
                "in found:",
                unit("schedule/message_order"),
            ),
            (
                "communicators-of-one-device",
                "planner/cost/transfer.py",
                "number * (cluster.num_devices > 1)",
                "number",
                unit("planner/search/interval_costs"),
            ),
            (
                "reduced-before-all-is-there",
                "runtime/gradients/buckets.py",
                "blocked.add(bucket.ranks)",
                "pass",
                unit("runtime/gradients/buckets"),
            ),
            (
                "delayed-gradient-counted-twice",
                "runtime/gradients/delayed_reduction.py",
                "            _count_once(table)\n",
                "            pass\n",
                ("tests/distributed/test_rannc_module.py::test_behaviours[delayed-replicas]",),
            ),
            (
                "sums-over-ranks-in-float32",
                "runtime/step/scalars.py",
                "return total.reshape(-1).double()",
                "return total.reshape(-1).float()",
                unit("runtime/step/scalars"),
            ),
            (
                "imaginary-part-of-a-sum-dropped",
                "runtime/step/scalars.py",
                "torch.complex(*doubles.view(-1, 2).unbind(1)) if",
                "doubles.view(-1, 2)[:, 0] if",
                unit("runtime/step/scalars"),
            ),
            (
                "shared-sum-leaves-out-a-rank",
                "runtime/comm/shared_memory_allreduce.py",
                "bucket, *others[group.own :]]",
                "bucket]",
                unit("runtime/comm/shared_memory_allreduce"),
            ),
            (
                "gradient-tables-by-bucket-alone",
                "kernels/gradient_views.py",
                "addresses = (*map(_ADDRESS, views), *map(_ADDRESS, gradients))",
                "addresses = (*map(_ADDRESS, views),)",
                ("tests/unit/kernels/test_gradient_views.py",),
            ),
            (
                "gradient-tables-made-anew",
                "kernels/gradient_writes.py",
                "tables = _TABLES.get() or GradientTables()",
                "tables = GradientTables()",
                ("tests/unit/kernels/test_gradient_views.py",),
            ),
        )
    )
)
