"""Which models are in the zoo, and in which order: a rule, a seed, and the list that they gave (`list.json`).

The rule. transformers: every pair of a task and a model type in its tables of automatic classes
(`text_models.TASKS`), of which the seed draws `NUM_DRAWN`. timm: of every module the registered model with the
fewest parameters, up to `MAX_PARAMETERS`. torchvision: the same for classifiers, segmenters and video models.
diffusers: the classes that `diffusion_models.MODELS` configures. Plain PyTorch: the models of
`plain_models.MODELS`, written after PyTorch's tutorials and examples. The seed then mixes them, so that any
part of the list is a sample of all.

An entry is never removed, and nothing is tried before it is in the list.
`python -m tests.benchmarks.zoo.entries` writes the list; entries that it has already stay where they are.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

SEED, NUM_DRAWN, MAX_PARAMETERS = 2026, 200, 60_000_000
LIST = Path(__file__).with_name("list.json")


@dataclass(frozen=True, slots=True)
class Entry:
    """A model: the library, its name there, and for transformers the task and the model type."""

    library: str
    name: str
    task: str = ""
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.library} {self.name}" + (f" ({self.kind})" if self.kind else "")


def listed() -> list[Entry]:
    """The zoo, in its order."""
    return [Entry(**item) for item in json.loads(LIST.read_text(encoding="utf-8"))]


def _drawn() -> list[Entry]:
    from tests.benchmarks.zoo import diffusion_models, image_models, plain_models, text_models

    chance = random.Random(SEED)
    heads = [Entry("transformers", *head) for head in text_models.heads()]
    chance.shuffle(heads)
    found = heads[:NUM_DRAWN]
    found += [Entry("timm", name) for name in image_models.smallest_of_timm(MAX_PARAMETERS)]
    found += [Entry("torchvision", name) for name in image_models.smallest_of_torchvision(MAX_PARAMETERS)]
    found += [Entry("diffusers", name) for name in diffusion_models.MODELS]
    found += [Entry("plain", name) for name in plain_models.MODELS]
    chance.shuffle(found)
    return found


def main() -> None:
    """Draw, and add what is new to the end of the list."""
    warnings.simplefilter("ignore")
    known = listed() if LIST.exists() else []
    entries = known + [entry for entry in _drawn() if entry not in known]
    lines = ",\n".join(json.dumps({k: v for k, v in asdict(entry).items() if v}) for entry in entries)
    LIST.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(entries)} entries, {len(entries) - len(known)} of them new")


if __name__ == "__main__":
    sys.exit(main())
