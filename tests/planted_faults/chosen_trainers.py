"""Faults that somebody thought of, in the adapters for Trainer and Accelerate."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault

_TRAINER = "integrations/trainer.py"
_ACCELERATE = "integrations/accelerate.py"
_EXAMPLE = ("tests/distributed/test_trainer.py::test_trainer_equals_one_process[plain]",)
_LOOP = ("tests/distributed/test_trainer.py::test_accelerate_equals_a_plain_loop[2]",)

CHOSEN_TRAINERS: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "losses-times-the-ranks",
            _TRAINER,
            'output["loss"] = loss / num_ranks',
            'output["loss"] = loss / 1',
            unit("integrations/trainer"),
        ),
        (
            "losses-times-the-ranks-over-ranks",
            _TRAINER,
            'hooks.register("other libraries", shares, _share_of_loss)',
            "",
            _EXAMPLE,
        ),
        (
            "smoothed-labels-not-shifted",
            _TRAINER,
            "shifts, num_ranks = shift_labels or self.is_causal,",
            "shifts, num_ranks = shift_labels,",
            unit("integrations/trainer"),
        ),
        (
            "smoothed-labels-of-a-rank-counted",
            _TRAINER,
            "return loss * num_ranks",
            "return loss",
            unit("integrations/trainer"),
        ),
        (
            "rows-that-fill-a-batch-up-count-in-a-run-that-goes-on",
            "integrations/accelerate.py",
            'names = ("batch_size", "num_processes", "split_batches")',
            "names = ()",
            unit("integrations/accelerate"),
        ),
        (
            "rows-that-fill-a-batch-up-count",
            _TRAINER,
            "num_own = min(max(state.remainder - world.rank * num_rows, 0), num_rows)",
            "num_own = num_rows",
            (*unit("integrations/trainer"), *_EXAMPLE),
        ),
        (
            "losses-of-a-rank-are-evaluated",
            _TRAINER,
            'loss = reduce(loss, reduction="mean")  # of',
            "pass  # of",
            ("tests/distributed/test_trainer.py::test_trainer_equals_one_process[smoothing]",),
        ),
        (
            "a-rank-asks-for-states-alone",
            _TRAINER,
            "with _states_of_this_rank(self.model):",
            "if True:",
            ("tests/distributed/test_trainer.py::test_trainer_equals_one_process[lora]",),
        ),
        (
            "losses-of-other-libraries-are-the-model's",
            _TRAINER,
            "if each is not RanncTrainerMixin)",
            "if True)",
            unit("integrations/trainer"),
        ),
        (
            "means-times-the-ranks",
            _TRAINER,
            "if torch.equal(loss.detach(), other):",
            "if False:",
            unit("integrations/trainer"),
        ),
        (
            "a-rank-saves-alone",
            _TRAINER,
            "state_dict = full_state_dict(model)",
            "pass",
            _EXAMPLE,
        ),
        (
            "evaluated-without-the-backend",
            _TRAINER,
            "        self.refuse_plain(model)\n        return super().compute_loss",
            "        return super().compute_loss",
            unit("integrations/trainer"),
        ),
        (
            "items-of-one-rank",
            _TRAINER,
            "not args.average_tokens_across_devices,",
            "False,",
            unit("integrations/trainer"),
        ),
        (
            "replicas-of-accelerate",
            _ACCELERATE,
            "accelerator.prepare_model(model, evaluation_mode=True)",
            "accelerator.prepare_model(model, evaluation_mode=False)",
            (*unit("integrations/accelerate"), *_LOOP),
        ),
        (
            "every-rank-reads-all-rows",
            "capture/refusals.py",
            "    if seen != num_ranks:",
            "    if False:",
            unit("capture/refusals"),
        ),
    )
)
