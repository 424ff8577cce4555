"""What a check sees of its case on one rank.

In: a case, this rank's number. Out: `Context` with the entry, the rows of this rank, the compiled model and
the findings.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.harness.case import Case
from tests.distributed.harness.compare import Findings, floor_of, torch_dtype
from tests.distributed.harness.reference import Reference, ReferenceCache, intervals
from tests.model_entry import Batch, Entry

# Another backend by this name shows that the comparisons themselves hold (one rank, "eager").
BACKEND_VARIABLE = "DISTRIBUTED_TESTS_BACKEND"
# Beyond the first step, rounding passes through the optimizer; parameters move by 1e-3 per step.
LATER_STEPS_FACTOR = 1e3
# bfloat16 keeps eight bits: a few roundings of 2**-9 each.
TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2}


@dataclass(slots=True, kw_only=True)
class Context:
    """One case on one rank.

    Members:
        findings: where failures are noted.
        references: shared by all cases of this process.
        directory: where a check may leave files for the parent; the same on all ranks.
    """

    case: Case
    entry: Entry
    rank: int
    references: ReferenceCache
    directory: Path
    findings: Findings = field(default_factory=Findings)

    @property
    def interval(self) -> tuple[int, int]:
        """First and last-plus-one global row of this rank."""
        return intervals(self.case.local_rows)[self.rank]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and floating inputs."""
        return torch_dtype(self.case.dtype)

    @property
    def tolerance(self) -> float:
        """Bound of relative errors in the first step."""
        return self.entry.tolerance if self.case.dtype == "float64" else TOLERANCES[self.case.dtype]

    def reference(self) -> Reference:
        """What one process computes."""
        return self.references.get(self.case, self.entry)

    def batch(self, step: int = 0, seed: int | None = None) -> Batch:
        """The global batch of a step."""
        chosen = 1000 * self.case.seed + step + 1 if seed is None else seed
        return self.entry.batch(sum(self.case.local_rows), chosen, self.dtype)

    def local(self, batch: Batch) -> Batch:
        """This rank's own rows of a global batch, as tensors of their own."""
        return {name: value.clone() for name, value in self.entry.slice(batch, *self.interval).items()}

    def model(self) -> nn.Module:
        """The case's model, with the same weights on all ranks."""
        return self.entry.model(self.case.seed, self.dtype)

    def compile(self, model: nn.Module, **options: Any) -> Callable[..., Any]:
        """The model compiled by the backend under test, with the case's options."""
        return torch.compile(model, **self.compile_arguments(**options))

    def pair(
        self, make: Callable[[], nn.Module], **options: Any
    ) -> tuple[nn.Module, nn.Module, Any, list[torch.optim.Optimizer]]:
        """A model, its copy for one process, the model compiled, and an optimizer for each of the two."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        alone = copy.deepcopy(model)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)]
        return model, alone, torch.compile(model, **self.compile_arguments(**options)), list(optimizers)

    def compile_arguments(self, **options: Any) -> dict[str, Any]:
        """Keyword arguments of torch.compile."""
        backend = os.environ.get(BACKEND_VARIABLE, "rannc")
        if backend != "rannc":
            return {"backend": backend}
        found = self.case.compile_options() | options
        if options.get("load_deployment"):
            del found["schedule"]  # the file's
        return {"backend": "rannc", "options": found}

    def compare_gradients(
        self,
        model: nn.Module,
        expected: dict[str, Tensor],
        *,
        factor: float = 1.0,
        kind: str = "gradient",
        scale: float = 1.0,
    ) -> list[str]:
        """Compare every gradient that this rank has with the expected one times scale; give the names it
        has.
        """
        floor = floor_of({name: value * scale for name, value in expected.items()})
        owned = []
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            owned.append(name)
            if name not in expected:
                self.findings.that(False, f"{kind} {name}: there is one, and in one process there is none")
                continue
            self.findings.close(
                kind, name, parameter.grad, expected[name] * scale, self.tolerance * factor, floor
            )
        if self.case.world == 1:
            missing = sorted(set(expected) - set(owned))
            self.findings.that(not missing, f"{kind}: missing for {missing}")
        return owned

    def compare_rows(self, outputs: Any, expected: dict[str, Tensor], *, factor: float = 1.0) -> None:
        """Compare this rank's rows of all row outputs."""
        start, stop = self.interval
        actual = self.entry.rows_of(outputs)
        self.findings.that(
            set(actual) == set(expected), f"row outputs {sorted(actual)}, not {sorted(expected)}"
        )
        for name, value in expected.items():
            self.findings.close("rows", name, actual.get(name), value[start:stop], self.tolerance * factor)

    def compare_state(self, state: dict[str, Tensor], expected: dict[str, Tensor], *, factor: float) -> None:
        """Compare a full state_dict (rank 0's), names included."""
        self.findings.that(
            list(state) == list(expected), f"state_dict names {list(state)} are not {list(expected)}"
        )
        floor = floor_of({name: value for name, value in expected.items() if value.is_floating_point()})
        for name, value in expected.items():
            if name in state and value.is_floating_point():
                self.findings.close("state", name, state[name], value, self.tolerance * factor, floor)
            elif name in state:
                self.findings.that(
                    torch.equal(state[name], value), f"state {name}: {state[name]} is not {value}"
                )
