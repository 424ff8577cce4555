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
            "gradients-of-inputs-bring-those-of-parameters",
            "runtime/step/autograd.py",
            "        step.publishes = ctx.publishes()\n",
            "",
            loops("by_name-1,1"),
        ),
        (
            "gradients-of-inputs-bring-those-that-are-kept",
            "runtime/step/graph_runtime.py",
            "        if step.publishes:\n            self.buckets.publish(state.pending, scale, ",
            "        if keep or step.publishes:\n            self.buckets.publish(state.pending, scale, ",
            loops("by_name-1,1"),
        ),
        (
            "a-checkpoint-hides-a-mean-over-ranks",
            "runtime/step/autograd.py",
            "        if function_of(node) is CheckpointFunction:\n            raise",
            "        if function_of(node) is CheckpointFunction and not name:\n            raise",
            loops("checkpointed-1,1"),
        ),
        (
            "rows-of-a-rank-are-a-view",
            "runtime/step/user_outputs.py",
            "return tensor.data if tensor._is_view() else tensor",
            "return tensor",
            loops("checkpointed-1,1"),
        ),
        (
            "norms-of-one-parameter-of-each-rank",
            "runtime/gradients/clipping.py",
            "        len(names) > 1\n        and all(",
            "        len(names) > 9\n        and all(",
            ("tests/distributed/test_memory.py::test_state_and_clipping[clipping]",),
        ),
        (
            "learned-prompts-go-different-ways",
            "runtime/gradients/optimizer_watch.py",
            "        self._compare_own_rows(optimizer, known)\n",
            "",
            loops("prompts-1,1"),
        ),
        (
            "values-of-heads-are-not-compared",
            "runtime/step_counts.py",
            'elif places := apart([each["now"] for each in found]):',
            "elif places := []:",
            loops("heads_apart-1,1"),
        ),
        (
            "what-ranks-have-of-their-own-must-be-alike",
            "runtime/step_counts.py",
            'if None in found or apart([each["before"] for each in found]):',
            "if None in found:",
            loops("heads_apart-1,1"),
        ),
        (
            "heads-beside-an-encoder-may-go-different-ways",
            "runtime/gradients/optimizer_watch.py",
            "is_certain=True) if known.keys else None",
            "is_certain=True) if not known else None",
            loops("heads_in_one_optimizer-2"),
        ),
        (
            "gradients-of-two-modules-are-mixed",
            "api/synchronized_modules.py",
            'f"gradients of synchronized module {self.number}"',
            '"gradients of a synchronized module"',
            loops("synchronized_apart-1,1"),
        ),
        (
            "heads-go-different-ways",
            "runtime/step/autograd.py",
            "        note(tensors)\n",
            "",
            loops("heads-2"),
        ),
        (
            "a-global-loss-is-taken-for-rows",
            "runtime/step/autograd.py",
            "            if runtime.settings.gather_inputs and isinstance(runtime.outputs[i], DeliveredRows)\n",
            "            if runtime.settings.gather_inputs\n",
            loops("scaled_losses-2"),
        ),
        (
            "gradients-that-users-average-are-refused",
            "runtime/gradients/optimizer_watch.py",
            "if any(each != gradients[0] for each in gradients) and (",
            "if (",
            loops("heads-2"),
        ),
        (
            "a-ranks-own-rows-are-taken-for-shared",
            "runtime/step/autograd.py",
            "is_certain = leaf.shape[:1] not in row_counts",
            "is_certain = True",
            loops("prompts-1,1"),
        ),
        (
            "a-global-loss-is-averaged-again",
            "runtime/step/autograd.py",
            "gradient * (share * source.factor)",
            "gradient",
            loops("chained-2"),
        ),
        (
            "a-global-loss-is-taken-for-the-ranks-own",
            "runtime/step/autograd.py",
            "            node.global_pass = this_pass\n",
            "            pass\n",
            loops("chained-2"),
        ),
        (
            "a-layer-that-is-averaged-is-not-noticed",
            "session_registry.py",
            "return parameter in self.averaged if group is None else group.is_mean",
            "return parameter in self.averaged",
            loops("chained-2"),
        ),
        (
            "a-layer-in-ddp-is-not-noticed",
            "session_registry.py",
            "            self.averaged[parameter] = True\n",
            "            pass\n",
            loops("chained-2"),
        ),
        (
            "slices-choose-other-graphs",
            "compiled_call.py",
            "yield (args, kwargs) if bootstrap.is_alone() else",
            "yield (args, kwargs) if True else",
            loops("chained-1,1"),
        ),
        (
            "module-hooks-after-the-first-call-are-left-out",
            "capture/first_trace.py",
            "begun.append(weakref.finalize(context, guard_module_hooks()))",
            "pass",
            unit("capture/module_hooks"),
        ),
        (
            "hooks-of-a-module-in-its-backward-are-dropped",
            "capture/nonstrict/watch.py",
            "or (func == _GRAD_FN and not args[0].is_leaf)",
            "",
            unit("capture/nonstrict/kept_modules"),
        ),
        (
            "hooks-of-the-model-have-graphs-of-their-own",
            "capture/module_compile.py",
            "if takes_hooks and (module._forward_hooks or module._forward_pre_hooks):",
            "if False:",
            unit("capture/module_compile"),
        ),
        (
            "hooks-in-the-forward-are-dropped",
            "capture/nonstrict/watch.py",
            "if func in _HOOKING or",
            "if func in () or",
            unit("capture/nonstrict/kept_modules"),
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
            "replicas-go-apart",
            "runtime/gradients/new_values.py",
            "for name in _shared_here(table)]) if compares else None",
            "for name in _shared_here(table)]) if False else None",
            loops("replicas_apart-2"),
        ),
        (
            "replicas-load-different-values",
            "runtime/state_hooks.py",
            "if len(numbers) > 1:",
            "if False:",
            loops("values_of_replicas-2"),
        ),
        (
            "steps-after-changed-copies",
            "runtime/gradients/delayed_reduction.py",
            "self.table.given.check([self.table.given.changed()])",
            "pass",
            loops("averages_by_values-1,1"),
        ),
        (
            "values-of-replicas-change-on-rank-0",
            "runtime/parameters.py",
            "            elif self.states_on_all_ranks or self.owners[name] != (0,):",
            "            elif self.states_on_all_ranks or self.owners[name][0] != 0:",
            loops("values_of_replicas-2"),
        ),
        (
            "optimizers-count-as-changes-of-given-values",
            "runtime/parameters.py",
            "state[key] = with_changes_of_its_own(state[key])",
            "pass",
            loops("values_of_replicas-2"),
        ),
        (
            "copies-are-compiled",
            "session_registry.py",
            "if isinstance(model, nn.Module) and is_copy(model):",
            "if False:",
            loops("copied-1,1"),
        ),
        (
            "a-joined-rank-gives-a-row-of-its-last-batch",
            "api/loops.py",
            "leaf.narrow(dims[index], 0, 0).clone()",
            "leaf.narrow(dims[index], 0, 1).clone()",
            loops("joined-1,1"),
        ),
        (
            "values-of-padded-places-are-delivered",
            "padded_call.py",
            "if any(output.dim() == 0 for output in outputs):",
            "if True:",
            unit("padded_call"),
        ),
        (
            "padding-of-the-longest-rank-goes-unnoticed",
            "padded_call.py",
            "if any(label in each and each[label][dim] != sizes[dim] for each in shapes)",
            "if own[label][dim] != sizes[dim]",
            unit("padded_call"),
        ),
        (
            "values-that-fail-are-told-as-a-call-that-fails",
            "runtime/agreement.py",
            "before, world.counts.is_exchanging = world.counts.is_exchanging, True",
            "before = world.counts.is_exchanging",
            ("tests/distributed/test_failures_runtime.py::test_values_that_one_rank_cannot_get_end_the_job",),
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
