"""The check of gradients that ranks of one host sum in memory that they share.

In: a context. Out: findings. Collective. Terms as in contract_checks.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

from rannc_backend.runtime.comm import shared_memory_allreduce as sums
from tests.distributed.contract_checks import accumulate
from tests.distributed.harness.context import Context


def shared_sums(context: Context) -> None:
    """Gradients of ranks that share memory are summed there, and over gloo as soon as one rank has none or
    the option says so.

    Parameters: without (optional), the rank that gets no memory.
    """
    without = context.case.parameters.get("without")
    expected = without is None and "shared_memory" not in context.case.options
    with (
        mock.patch.object(sums, "_FEWEST_BYTES", 1),
        mock.patch.object(sums, "add_up", wraps=sums.add_up) as add_up,
    ):
        with (
            mock.patch("os.posix_fallocate", side_effect=OSError)
            if context.rank == without
            else nullcontext()
        ):
            accumulate(context)
    context.findings.that(bool(add_up.call_count) == expected, f"{add_up.call_count} sums in shared memory")
