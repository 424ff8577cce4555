"""Options that all ranks must have alike.

In: the options of each rank. Out: an error for the first that differ, unless they are a rank's own affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rannc_backend.errors import RanksDifferError
from rannc_backend.settings.options import Config


def is_own(item: str) -> bool:
    """Whether an item may have another value on each rank: a path, or what is logged."""
    extra = Config.model_fields[item].json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("own"))


def check_same_options(options_by_rank: Sequence[Mapping[str, object]]) -> None:
    """Raise RanksDifferError for the first item whose value is not the same on all ranks.

    Items that are a rank's own affair (`is_own`) may differ; where rank 0 alone uses one, its value counts.

    Args:
        options_by_rank: `Config.model_dump()` of each rank, in rank order.
    """
    for item in Config.model_fields:
        if is_own(item):
            continue
        values = [repr(options[item]) for options in options_by_rank]
        if len(set(values)) > 1:
            raise RanksDifferError(f"values of the option {item!r}", value_by_rank=values)
