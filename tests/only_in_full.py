"""Tests that run in `make test-full` alone though their file says nothing of it: each repeats, at a price of seconds, what others show.

`make test` has ten minutes on two cores. What is here was measured there, and costs more than it adds: the same point on a larger model,
over more ranks, or through another door. What a test adds beside all others decides, not its seconds alone.
"""

from __future__ import annotations

ONLY_IN_FULL: frozenset[str] = frozenset()
"""As "tests/distributed/test_contract.py::test_point[modes]"."""
