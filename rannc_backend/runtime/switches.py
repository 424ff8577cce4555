"""What a script turns on and off between steps, for all models of the process: RaNNC's process-wide flags.

In: the calls of `delay_grad_allreduce`, `keep_graph` and `sync_params_on_init`. Out: values that each step reads. All ranks must set
them alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Switches:
    """See the module docstring.

    Attributes:
        delay_reductions: gradients stay each rank's own until a step without it, or until ``allreduce_grads``.
        keep_graph: every backward keeps what another one through the same forward needs.
        sync_params: overrides the option ``sync_params_on_init`` where that is not given; None leaves it.
    """

    delay_reductions: bool = False
    keep_graph: bool = False
    sync_params: bool | None = None
