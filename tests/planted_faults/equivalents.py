"""Drawn faults that change nothing that anybody could see, each with the reason.

By what is changed, not by name: an entry holds as long as the code that it speaks of stays as it is, and means nothing after that.
"""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[str, str] = {}
"""`Fault.change` -> why no test can tell."""
