"""Faults that somebody thought of, in models that are whole for a while, and in generation through stages."""

from __future__ import annotations

from tests.planted_faults.areas import gathered, generated, unit
from tests.planted_faults.fault import Fault

_GATHERING = "api/gathering.py"
_GENERATION = "integrations/generation_steps.py"
_KEPT = "kernels/kept_rows.py"
_KEPT_TEST = "tests/unit/kernels/test_kept_rows.py"

CHOSEN_GATHERED: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "gathered-without-room",
            _GATHERING,
            "if 0 <= free < needed:",
            "if 0 <= free < 0:",
            unit("api/gathering"),
        ),
        (
            "room-of-each-rank-of-a-host",
            _GATHERING,
            "needed = sum(records[rank][0] for rank in ranks)",
            "needed = max(records[rank][0] for rank in ranks)",
            unit("api/gathering"),
        ),
        (
            "changes-of-one-rank-lost",
            _GATHERING,
            "return first, len(set(numbers.values())) == 1",
            "return first, True",
            gathered("changes-1,1"),
        ),
        (
            "changes-of-the-modifier-lost",
            _GATHERING,
            "        return modifier, True",
            "        return first, True",
            gathered("changes-1,1"),
        ),
        (
            "gathered-tensors-kept",
            _GATHERING,
            "                if not is_absent(tensor):\n                    home",
            "                if is_absent(tensor):\n                    home",
            gathered("works-1,1"),
        ),
        (
            "steps-read-other-memory",
            _GATHERING,
            "                tensor.data = kept",
            "                pass",
            gathered("refused-1,1"),
        ),
        (
            "calls-through-stages-inside",
            "compiled_call.py",
            "        if is_gathered():",
            "        if False:",
            gathered("works-1,1"),
        ),
        (
            "states-gathered-inside",
            "runtime/parameters.py",
            "            return  # each rank has what it asks for",
            "            pass",
            gathered("works-1,1"),
        ),
        (
            "one-row-without-lengths",
            "capture/first_trace.py",
            "if batches or wanted:",
            "if batches:",
            generated("gpt2"),
        ),
        (
            "padding-that-counts",
            _GENERATION,
            "        if begins and any(each != wanted for each in active):",
            "        if False:",
            generated("refused-gpt2"),
        ),
        (
            "prompts-padded-at-the-right",
            _GENERATION,
            "((size, 0) if self.is_decoder else (0, size))",
            "(0, size)",
            generated("gpt2"),
        ),
        (
            "ranks-that-are-done-leave",
            _GENERATION,
            "if all(done for done, _ in answers):",
            "if any(done for done, _ in answers):",
            generated("gpt2"),
        ),
        (
            "beams-keep-their-own-keys",
            _KEPT,
            "[before for _, before in numbers]",
            "[number for number, _ in numbers]",
            (_KEPT_TEST, *generated("gpt2")),
        ),
        (
            "keys-of-rows-that-moved-taken-away",
            _KEPT,
            "if not self._are_moved:",
            "if True:",
            (_KEPT_TEST,),
        ),
        (
            "kept-keys-forgotten",
            "runtime/step/graph_runtime.py",
            "with exchanging(self.world), with_real_rows(), ",
            "with exchanging(self.world), ",
            generated("gpt2"),
        ),
        (
            "rows-of-all-ranks-have-the-same-numbers",
            _GENERATION,
            " + sum(self.num_rows[: self.world.rank])",
            "",
            generated("gpt2"),
        ),
        (
            "beams-of-another-replica",
            _GENERATION,
            "anew = begins or (are_moved and self._has_replicas())",
            "anew = begins",
            generated("gpt2-replicas"),
        ),
        (
            "later-tokens-in-the-micro-batches-of-prompts",
            "capture/analysis.py",
            "return 1 if continues and most_replicas == 1 else planned",
            "return planned",
            generated("gpt2-in_place"),
        ),
        (
            "later-tokens-on-other-replicas",
            "capture/analysis.py",
            "return 1 if continues and most_replicas == 1 else planned",
            "return 1 if continues else planned",
            generated("gpt2-lanes"),
        ),
        (
            "kept-rows-where-they-are-read",
            "planner/projection.py",
            " if slot in homes",
            " if False",
            unit("planner/projection"),
        ),
    )
)
