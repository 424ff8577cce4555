"""Faults that somebody thought of, in buckets of gradients and in what divides memory over replicas."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault

_WATCH = "runtime/gradients/optimizer_watch.py"
_DELAYED = "runtime/gradients/delayed_reduction.py"


def _zero(*cases: str) -> tuple[str, ...]:
    return tuple(f"tests/distributed/test_zero.py::test_zero[{case}]" for case in cases)


CHOSEN_MEMORY: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
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
            "self.optimizer_factor * updated\n",
            "self.optimizer_factor * self.trainable_bytes[:, :max_length, None]\n",
            unit("planner/search/interval_costs"),
        ),
        (
            "the-largest-parameter-is-divided",
            "planner/cost/update_shares.py",
            "np.maximum(padded[0], total / divisors",
            "np.maximum(0.0, total / divisors",
            unit("planner/cost/update_shares"),
        ),
        (
            "sums-in-shared-memory-for-the-first-alone",
            "runtime/comm/shared_memory.py",
            "(not takers or place in takers)",
            "(not takers or place == 0)",
            unit("runtime/comm/shared_memory"),
        ),
    )
)
