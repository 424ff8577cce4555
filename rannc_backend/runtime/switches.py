"""What a script turns on and off between steps, for all models of the process: RaNNC's process-wide flags.

In: the calls of `delay_grad_allreduce`, `keep_graph` and `sync_params_on_init`; `rannc verify`. Out: values
that each step reads. All ranks must set them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class StepObserver(Protocol):
    """Who is told of the steps of this rank: `rannc verify`."""

    def begun(self, runtime: Any, user_tensors: Sequence[torch.Tensor]) -> None:
        """A call of a `GraphRuntime` begins, with these tensors by its ``inputs``."""
        ...

    def published(self, runtime: Any) -> None:
        """A backward is done: its gradients are in ``p.grad``."""
        ...


@dataclass(slots=True)
class Switches:
    """See the module docstring.

    Attributes:
        delay_reductions: gradients stay each rank's own until a step without it, or until
        ``allreduce_grads``.
        keep_graph: every backward keeps what another one through the same forward needs.
        sync_params: overrides the option ``sync_params_on_init`` where that is not given; None leaves it.
        observer: is told of every step; None: nobody.
    """

    delay_reductions: bool = False
    keep_graph: bool = False
    sync_params: bool | None = None
    observer: StepObserver | None = None
