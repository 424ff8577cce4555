"""Faults that somebody thought of, in buckets of gradients, in what divides memory over replicas, and in which
outputs come back.
"""

from __future__ import annotations

from tests.planted_faults.areas import point, unit
from tests.planted_faults.fault import Fault

_WATCH = "runtime/gradients/optimizer_watch.py"
_DELAYED = "runtime/gradients/delayed_reduction.py"
_LINK = "runtime/comm/host_link.py"
_ON_HOST = unit("runtime/gradients/buckets_on_host")


def _zero(*cases: str) -> tuple[str, ...]:
    return tuple(f"tests/distributed/test_zero.py::test_zero[{case}]" for case in cases)


def _offload(*cases: str) -> tuple[str, ...]:
    return tuple(f"tests/distributed/test_offload.py::test_offload[{case}]" for case in cases)


CHOSEN_MEMORY: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        # segments that are computed again
        (
            "segments-that-nobody-computes-again",
            "passes/stage/recompute.py",
            "CheckpointPolicy.MUST_SAVE if leaves else CheckpointPolicy.MUST_RECOMPUTE",
            "CheckpointPolicy.MUST_SAVE",
            unit("stages/joint_graph"),
        ),
        (
            "what-leaves-a-segment-is-computed-again",
            "passes/stage/recompute.py",
            "CheckpointPolicy.MUST_SAVE if leaves else CheckpointPolicy.MUST_RECOMPUTE",
            "CheckpointPolicy.MUST_RECOMPUTE",
            unit("planner/blocks/told_recompute"),
        ),
        (
            "calls-of-a-module-are-one",
            "planner/blocks/told_recompute.py",
            "                return path, call",
            '                return path, ""',
            unit("planner/blocks/told_recompute"),
        ),
        (
            "modules-within-modules-count",
            "planner/blocks/told_recompute.py",
            "        for path, call in _stack(node):",
            "        for path, call in reversed(_stack(node)):",
            unit("planner/blocks/told_recompute"),
        ),
        (
            "a-name-that-nothing-has-is-silent",
            "planner/blocks/told_recompute.py",
            "        if name != ROOT and not any(",
            "        if not name and not any(",
            unit("planner/blocks/told_recompute"),
        ),
        (
            "blocks-of-a-module-need-nothing-of-each-other",
            "planner/cost/segments.py",
            "held[places] - held[np.maximum(begins, np.array(firsts)[places])]",
            "0 * held[places]",
            unit("planner/blocks/told_recompute"),
        ),
        (
            "a-mark-is-ignored",
            "passes/stage/recompute.py",
            "leaves = node.meta.get(KEPT) or any(",
            "leaves = any(",
            unit("planner/blocks/told_recompute"),
        ),
        (
            "marks-stay-in-the-joint-graph",
            "stages/joint_graph.py",
            "        lift_marks(joint.graph)",
            "        pass",
            unit("planner/blocks/told_recompute"),
        ),
        (
            "gradients-are-not-compared",
            "stages/checked_stage.py",
            "        if difference <= _TOLERANCE * precision:",
            "        if difference is not None:",
            unit("runtime/comm/transport_watch"),
        ),
        (
            "the-twin-recomputes-too",
            "stages/checked_stage.py",
            "            compile_with(1.0),",
            "            compile_with(budget),",
            (
                "tests/distributed/test_told_recompute.py::"
                "test_gradients_that_differ_with_recompute_end_the_job_on_all_ranks[whole]",
            ),
        ),
        (
            "later-stages-recompute-too",
            "planner/search/problem.py",
            "np.where(numbers > self.recompute_last_stage, budgets == 1.0, own)",
            "np.where(numbers > self.recompute_last_stage, own, own)",
            unit("planner/search/recompute_last_stage"),
        ),
        (
            "modules-of-a-plan-are-forgotten",
            "planner/projection.py",
            "    if plan.told_recompute:",
            "    if not plan:",
            unit("planner/plan_fits_graph"),
        ),
        (
            "marks-of-segments-stay",
            "stages/joint_graph.py",
            'node.meta.pop("recompute", None)',
            "pass",
            unit("stages/joint_graph"),
        ),
        (
            "random-numbers-of-attention-are-kept",
            "stages/joint_graph.py",
            '"has_recomputable_rng_ops": lambda graph_module: False',
            '"nothing": lambda graph_module: False',
            unit("stages/joint_graph"),
        ),
        (
            "stages-of-other-segments-are-equal",
            "stages/compiled_stage.py",
            "segments = segments_of(stage.graph_module) if activation_budget == SEGMENTS_BUDGET else ()",
            "segments = ()",
            unit("stages/joint_graph"),
        ),
        (
            "a-segment-that-is-computed-again-takes-no-memory",
            "planner/cost/segments.py",
            "workspace_bytes=price.workspace_bytes + again[number]",
            "workspace_bytes=price.workspace_bytes",
            unit("planner/cost/segments"),
        ),
        (
            "segments-of-a-plan-are-not-told",
            "planner/plan_parts.py",
            "segment=segments[block.index]",
            "segment=0",
            unit("planner/cost/segments"),
        ),
        # outputs beside a loss
        (
            "outputs-take-all-that-is-left",
            "planner/cost/output_bytes.py",
            "num_bytes - OUTPUT_SHARE * left",
            "num_bytes - left",
            unit("planner/cost/output_bytes"),
        ),
        (
            "delivered-outputs-without-memory",
            "planner/planner.py",
            'else (with_outputs(stages, needed), "")',
            'else (stages, "")',
            unit("planner/cost/output_bytes"),
        ),
        (
            "own-rows-of-outputs-are-free",
            "planner/cost/output_bytes.py",
            "if self.num_devices == 1 and num_micro_batches == 1:",
            "if True:",
            unit("planner/cost/output_bytes"),
        ),
        (
            "outputs-left-out-without-gradient-too",
            "stages/cut_stages.py",
            "return self.training_edges if training else self.edges",
            "return self.training_edges",
            point("outputs_by_room"),
        ),
        (
            "outputs-moved-whatever-the-plan-says",
            "planner/plan_fits_graph.py",
            "return OutputsLeftOut(told or plan.outputs_left_out)",
            "return OutputsLeftOut()",
            point("outputs_by_room"),
        ),
        (
            "program-with-outputs-that-are-left-out",
            "deployment.py",
            "specs = edge_specs(cut.edges_in(training=use.is_trained))",
            "specs = edge_specs(cut.edges)",
            point("outputs_by_room"),
        ),
        # buckets and reductions
        (
            "absent-gradient-not-zeroed",
            "runtime/gradients/buckets.py",
            "self.view(name).zero_()",
            "self.view(name)",
            unit("runtime/gradients/buckets"),
        ),
        (
            "buffer-in-use-taken",
            "runtime/gradients/buckets.py",
            "num_storage_users(buffer.memory) == 1",
            "num_storage_users(buffer.memory) >= 1",
            unit("runtime/gradients/buckets"),
        ),
        (
            "gradient-overwritten",
            "runtime/gradients/buckets.py",
            "parameter.grad.add_(view)\n            return",
            "parameter.grad.copy_(view)\n            return",
            unit("runtime/gradients/buckets"),
        ),
        (
            "sums-rounded-by-each-micro-batch",
            "kernels/gradient_writes.py",
            "return torch.float32 if wide and dtype in NARROW_DTYPES else dtype",
            "return dtype",
            ("tests/distributed/test_accumulation.py::test_accumulation[rounds_once-1,1]",),
        ),
        (
            "sums-over-replicas-rounded-first",
            _DELAYED,
            "        wide_sums=wide_sums,\n        device=device,\n",
            "        device=device,\n",
            unit("runtime/gradients/buckets"),
        ),
        (
            "rounded-gradients-take-no-memory",
            "ir/block_graph.py",
            "(self.num_bytes if is_rounded else 0)",
            "0",
            unit("planner/search/interval_costs"),
        ),
        (
            "hooks-left-out",
            "runtime/gradients/buckets.py",
            "view = view if changed is None else changed",
            "pass",
            unit("runtime/gradients/buckets"),
        ),
        (
            "shared-sum-within-the-backward",
            "runtime/gradients/buckets.py",
            "(self.ended or not bucket.is_shared)",
            "True",
            unit("runtime/gradients/buckets"),
        ),
        # who updates what
        (
            "updaters-keep-new-values",
            _WATCH,
            "            send_new_values(table, [name for name in names if name is not None])\n",
            "            continue\n",
            _zero("optimizers-sgd-2-level1"),
        ),
        (
            "hooks-after-a-step-see-old-values",
            _WATCH,
            "        be_first_after_step(optimizer, self._sending[optimizer])\n",
            "",
            _zero("between-2-level2"),
        ),
        (
            "sums-go-to-the-first-owner",
            "runtime/gradients/buckets.py",
            "self.memory[index].flat, bucket.ranks, bucket.updaters",
            "self.memory[index].flat, bucket.ranks, bucket.updaters and bucket.ranks[:1]",
            _zero("optimizers-sgd-2-level1"),
        ),
        (
            "settings-of-parts-are-dropped",
            "runtime/gradients/apply_groups.py",
            """        group.update({name: value for name, value in seen.items() if name != "params"})
""",
            "        pass\n",
            unit("runtime/gradients/apply_groups"),
        ),
        (
            "steps-in-parts-of-several-ranks-alone",
            "session_registry.py",
            "if config.num_apply_group > 1 and not self.steps_in_parts:",
            "if config.num_apply_group > 1 and not self.steps_in_parts and world.size > 1:",
            _zero("in_parts-1-level0-num_apply_group"),
        ),
        (
            "norm-of-gradients-that-first-owners-have",
            "runtime/parameters.py",
            "return self.world.rank == self.updaters(name)[0]",
            "return self.world.rank == self.owners[name][0]",
            _zero("optimizers-sgd-2-level1"),
        ),
        (
            "state-is-written-by-any-owner",
            "checkpoint/model_state.py",
            "tensor, owners = self.tensors[name], self.updaters[name]",
            "tensor, owners = self.tensors[name], self.owners[name][-1:]",
            ("tests/distributed/test_zero.py::test_checkpoints_on_another_layout[saved]",),
        ),
        (
            "gradients-stay-at-level-two",
            "runtime/gradients/bucket_layout.py",
            "is_kept=is_updated_here or division.keeps_all",
            "is_kept=is_updated_here or True",
            unit("runtime/gradients/buckets"),
        ),
        (
            "reduced-gradients-without-their-other-owners",
            _DELAYED,
            "        _complete(table)\n",
            "        pass\n",
            _zero("delayed-2,2-level1"),
        ),
        (
            "penalties-make-state-elsewhere",
            _WATCH,
            "        self._leave_to_others(optimizer, known)\n",
            "",
            _zero("penalty-2,2-level2"),
        ),
        (
            "updates-by-hand-are-not-noticed",
            "runtime/gradients/new_values.py",
            "    raise StaleParameterError(sorted(set().union(*changed)))\n",
            "    return\n",
            _zero("by_hand-2-level1"),
        ),
        (
            "coupling-optimizers-are-divided",
            "runtime/gradients/choose_updates.py",
            "    if found:\n",
            "    if False:\n",
            _zero("coupled-2-level1"),
        ),
        (
            "steps-of-hooks-stay-with-updaters",
            _DELAYED,
            "[n for n, p in self.parameters.items() if accumulation_hooks(p)]",
            "[n for n, p in self.parameters.items() if not accumulation_hooks(p)]",
            _zero("hooks-2,2-level1"),
        ),
        (
            "state-is-counted-whole-on-every-replica",
            "planner/search/interval_costs.py",
            "rounded(self._device_factor * updated)\n",
            "rounded(self._device_factor * self.sums.trainable[:, :max_length, None])\n",
            unit("planner/search/interval_costs"),
        ),
        (
            "the-largest-parameter-is-divided",
            "planner/cost/update_shares.py",
            "np.maximum(padded[0], total / divisors",
            "np.maximum(0.0, total / divisors",
            unit("planner/cost/update_shares"),
        ),
        # parameters on the host
        (
            "a-copy-that-is-stale",
            _LINK,
            "copies, under_way = self.link.fetch(missing)",
            "copies, under_way = globals().setdefault((stage, id(self)), self.link.fetch(missing))",
            (*unit("runtime/comm/host_link"), *_offload("changes-1,1")),
        ),
        (
            "copies-that-stay-after-their-last-forward",
            _LINK,
            "            del self._copies[stage]\n",
            "            pass\n",
            (*unit("runtime/comm/host_link"), *_offload("pools-1")),
        ),
        (
            "a-copy-that-is-freed-while-it-is-under-way",
            _LINK,
            "self._stream.record_event(), [*sources, *targets])",
            "self._stream.record_event(), [])",
            unit("runtime/comm/host_link"),
        ),
        (
            "copies-begin-before-their-memory-is-free",
            _LINK,
            "self._stream.wait_event(self.layer.compute().record_event())",
            "pass",
            unit("runtime/comm/host_link"),
        ),
        (
            "parameters-change-while-they-are-copied",
            _LINK,
            "        for under_way in self._all:\n            under_way.wait_on_host()\n",
            "",
            unit("runtime/comm/host_link"),
        ),
        (
            "a-gradient-that-stays-behind",
            "runtime/gradients/buckets.py",
            "self._under_way.append(link.bring(memory.flat, self.memory[index].flat))",
            "pass",
            _ON_HOST,
        ),
        (
            "gradients-are-handed-out-before-they-are-there",
            "runtime/gradients/buckets.py",
            "            pending.wait_on_host()\n",
            "",
            _ON_HOST,
        ),
        (
            "a-bucket-leaves-before-it-is-summed",
            "runtime/gradients/buckets.py",
            "                elif self.host_link is not None:\n",
            "                if self.host_link is not None:\n",
            _ON_HOST,
        ),
        (
            "offloaded-state-is-counted-on-the-device",
            "planner/search/interval_costs.py",
            "return 0.0 if self.offload else self.optimizer_factor",
            "return self.optimizer_factor",
            unit("planner/offloaded_plans"),
        ),
        (
            "copies-take-no-time",
            "planner/search/problem.py",
            "new_values.max(axis=1) + copying.max(axis=1)",
            "new_values.max(axis=1)",
            unit("planner/offloaded_plans"),
        ),
        (
            "sums-in-shared-memory-for-the-first-alone",
            "runtime/comm/shared_memory.py",
            "(not takers or place in takers)",
            "(not takers or place == 0)",
            unit("runtime/comm/shared_memory"),
        ),
        (
            "offload-that-is-left-to-the-planner-stays-out",
            "planner/planner.py",
            'if means.config.offload != "auto" or request.offload:',
            "if True:",
            unit("planner/offloaded_plans"),
        ),
    )
)
