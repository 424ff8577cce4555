"""Training to which things happen at random: ranks are killed, frozen, fail, are told to end; the job goes on
from its checkpoints.

Every step that any attempt has made, also those that were lost and made again, has the loss of one process
within 1e-12; every end comes within 5 s (a frozen rank is noticed by the limit of a step first), and says
which rank it was and why.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from rannc_backend import latest_checkpoint
from rannc_backend.checkpoint.reader import CheckpointReader
from tests.distributed.chaos import CAUSE, SAVE_EVERY, STEP_LIMIT_SECONDS, WORLD, Alone
from tests.distributed.harness.launch import launcher, run_script
from tests.distributed.harness.template import Templates

WORKER = Path(__file__).with_name("workers") / "chaos_worker.py"
ALLOWED_SECONDS = 5.0
LIMIT_SECONDS = 90.0
SEED = 19
# What happens -> what the job says of it; None: it ends in order.
CAUSES = {
    "kill": "ended without a word",
    "inside": CAUSE,
    "freeze": "no sign of life",
    "terminate": "received SIGTERM",
    "exception": CAUSE,
    "preempt": None,
}


class Story:
    """A training of `num_steps` steps in one directory, attempt by attempt."""

    def __init__(self, directory: Path, num_steps: int, templates: Templates) -> None:
        self.directory, self.num_steps, self.templates = directory, num_steps, templates
        alone = Alone()
        self.expected = [alone.step(number) for number in range(1, num_steps + 1)]
        self.state = alone.model.state_dict()
        self.worst = 0.0
        self._num_lines = [0] * WORLD

    @property
    def step(self) -> int:
        """The step to go on from."""
        checkpoints = self.directory / "checkpoints"
        return CheckpointReader(checkpoints).step if list(checkpoints.glob("step-*")) else 0

    def attempt(self, replicas: str, at: int, rank: int, how: str) -> None:
        """One job, to which `how` happens on `rank` in step `at`; "" lets it come to its end."""
        begin = self.step
        stamp = self.directory / "stamp"
        stamp.unlink(missing_ok=True)
        arguments = [
            str(self.directory),
            str(self.num_steps),
            replicas,
            *([str(at), str(rank), how] if how else []),
        ]
        command = [*launcher(WORLD), *self.templates.command([])]
        code, output, _ = run_script(
            WORKER,
            arguments,
            world=WORLD,
            directory=self.directory,
            limit_seconds=LIMIT_SECONDS,
            command=command,
        )
        ended = time.time()
        what = f"{how or 'nothing'} on rank {rank} in step {at}, from step {begin}:\n{output[-3000:]}"
        made = self._compare(begin, what)
        cause = CAUSES.get(how)
        if cause is None:
            assert code == 0, f"code {code}, {what}"
            assert made == (at if how else self.num_steps) == self.step, (
                f"{made} steps, saved {self.step}, {what}"
            )
            return
        assert code not in (0, None) and stamp.exists(), f"code {code}, {what}"
        late = ended - float(stamp.read_text()) - (STEP_LIMIT_SECONDS if how == "freeze" else 0.0)
        assert late <= ALLOWED_SECONDS, f"the job ended {late:.1f} s after it, {what}"
        block = "\n".join(line for line in output.splitlines() if line.startswith("[rannc]"))
        assert f"because of rank {rank} of {WORLD}" in block and cause in block, what
        assert made == at - 1, f"{made} steps, {what}"
        # The last one at most is lost, which a background save may not have finished.
        assert self.step >= max(begin, (at - 1) // SAVE_EVERY * SAVE_EVERY - SAVE_EVERY), (
            f"saved {self.step}, {what}"
        )

    def _compare(self, begin: int, what: str) -> int:
        """Every step of this attempt; gives the last one that all ranks have made."""
        last = []
        for rank in range(WORLD):
            path = self.directory / f"rank{rank}.txt"
            lines = path.read_text().splitlines() if path.exists() else []
            new, self._num_lines[rank] = lines[self._num_lines[rank] :], len(lines)
            assert [int(line.split()[0]) for line in new] == list(range(begin + 1, begin + 1 + len(new))), (
                f"{new}, {what}"
            )
            for line in new:
                number, loss = line.split()
                expected = self.expected[int(number) - 1][rank]
                error = abs(float(loss) - expected) / abs(expected)
                self.worst = max(self.worst, error)
                assert error <= 1e-12, (
                    f"step {number} on rank {rank}: {loss}, in one process {expected!r}; {what}"
                )
            last.append(begin + len(new))
        assert max(last) - min(last) <= 1, f"ranks came to steps {last}, {what}"
        return min(last)

    def compare_parameters(self) -> None:
        """Those of the last checkpoint."""
        saved = CheckpointReader(latest_checkpoint(self.directory / "checkpoints")).state_dict()
        for name, value in self.state.items():
            error = float((saved[name] - value).norm() / value.norm())
            assert error <= 1e-12, f"{name}: {error}"


def tell(tmp_path: Path, num_steps: int, kinds: list[str], rng: random.Random, templates: Templates) -> None:
    story = Story(tmp_path, num_steps, templates)
    share = num_steps // (len(kinds) + 1)
    for number, how in enumerate(kinds):
        # Each has its part of the way, so that all of them have room.
        at = rng.randint(story.step + 1, max(story.step + 1, (number + 1) * share))
        story.attempt(rng.choice(["1,1", "2"]), at, rng.randrange(WORLD), how)
    story.attempt("1,1", 0, -1, "")
    story.compare_parameters()
    print(
        f"{num_steps} steps, {len(kinds)} interruptions, largest relative error of a loss {story.worst:.1e}"
    )


def test_a_short_story(tmp_path: Path, templates: Templates) -> None:
    """One freeze, one failure, one order to end."""
    print(f"seed {SEED}")
    tell(tmp_path, 24, ["inside", "freeze", "preempt"], random.Random(SEED), templates)


@pytest.mark.full
@pytest.mark.parametrize("seed", [SEED])
def test_a_thousand_steps(tmp_path: Path, templates: Templates, seed: int) -> None:
    """Every kind seven times, in a random order, on random ranks, in random steps, under two plans."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    kinds = [*CAUSES] * 7
    rng.shuffle(kinds)
    tell(tmp_path, 1000, kinds, rng, templates)


def test_one_process_is_repeatable() -> None:
    """What all is compared with depends on nothing but its seeds."""
    one, two = Alone(), Alone()
    torch.rand(3)
    assert [one.step(number) for number in range(1, 4)] == [two.step(number) for number in range(1, 4)]
