"""What a rank has done so far: calls of compiled models, backwards, optimizer steps. Ranks compare it
whenever they agree on something.

In: events of this rank. Out: a digest that travels in messages that are sent anyway, and, where digests
differ, what differs.

Steps of optimizers are counted by parameter, since a rank may have an optimizer of its own for each parameter
that it owns (hooks that step within the backward). The rule: all owners of a parameter have updated it
equally often, and no other rank more often than they have (owners: those that update it). A rank that leaves out an optimizer's step is
found by it, as its optimizer holds parameters of other ranks too, whose owners have counted one step more
than it has, or its own parameters, for which others have counted more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Keys = tuple[str, ...]


@dataclass(slots=True)
class OptimizerCounts:
    """Of all optimizers over the same parameters. ``settings``: learning rate and the like at the last step,
    as text.
    """

    keys: Keys
    num_updates: int = 0
    num_clears: int = 0  # calls of zero_grad
    settings: str = ""

    @property
    def models(self) -> set[int]:
        """Numbers of the models that have these parameters."""
        return {model_of(key) for key in self.keys}


@dataclass(frozen=True)
class OutsideValues:
    """Of the parameters ``names`` of an optimizer that are outside of compiled models: for each a number of its values and
    by how much that may differ, before the optimizer's first step and lately.
    """

    optimizer: str
    names: tuple[str, ...]
    before: tuple[float, ...]
    now: tuple[float, ...]

    @functools.cached_property
    def checksum(self) -> int:
        """Of both. Ranks compare it whenever they agree on something."""
        return zlib.crc32(repr((self.before, self.now)).encode())


def key_of(model: int, name: str) -> str:
    """The key of a parameter: the number of its model, which is the same on all ranks, and its name."""
    return f"{model}:{name}"


def model_of(key: str) -> int:
    """The number of the model of a key."""
    return int(key.partition(":")[0])


def name_of(key: str) -> str:
    """The parameter's name of a key."""
    return key.partition(":")[2]


@dataclass(slots=True)
class StepCounts:
    """See the module docstring.

    Attributes:
        optimizers: by a hash of the keys of their parameters, which are the same on all ranks.
        plain_gradients: by key of a parameter, two numbers (a tensor) of the gradient that it has from
        outside of compiled models.
        owners_of, updaters_of: the ranks that own the parameter of a key, and those of them that update it.
        gone: numbers of models that this rank has dropped.
        last_failure: the last call that failed on this rank, in words.
        is_exchanging: this rank is in the midst of messages that others wait for.
        outside_values: what optimizers update outside of compiled models, by a key that is the same on all ranks.
        ranks_own: keys of those that ranks have each for itself.
    """

    num_calls: int = 0
    num_backwards: int = 0
    optimizers: dict[int, OptimizerCounts] = field(default_factory=dict)
    plain_gradients: dict[str, Any] = field(default_factory=dict)
    owners_of: Callable[[str], tuple[int, ...]] = field(default=lambda key: ())
    updaters_of: Callable[[str], tuple[int, ...]] = field(default=lambda key: ())
    gone: set[int] = field(default_factory=set)
    last_failure: str = ""
    is_exchanging: bool = False
    outside_values: Callable[[], dict[str, OutsideValues]] = field(default=dict)
    ranks_own: set[str] = field(default_factory=set)

    def note_failure(self, what: str, error: Exception) -> None:
        """``what`` failed on this rank."""
        reason = str(error).strip().partition("\n")[0]
        self.last_failure = f"{what} failed: {type(error).__name__}: {reason}"

    def of_parameters(self, keys: Keys) -> OptimizerCounts:
        """The counts of optimizers over these parameters."""
        return self.optimizers.setdefault(zlib.crc32(repr(keys).encode()), OptimizerCounts(keys))

    def forget(self, model: int) -> None:
        """Drop what was counted of a model's parameters: it is gone here, and may be alive on other ranks for
        a while.
        """
        self.gone.add(model)
        self.optimizers = {
            code: counts for code, counts in self.optimizers.items() if not counts.models & self.gone
        }

    def digest(self) -> list[int]:
        """A few numbers; equal where the counts are."""
        counted = sorted(
            (code, c.num_updates, c.num_clears, c.settings) for code, c in self.optimizers.items()
        )
        outside = sorted((key, values.checksum) for key, values in self._compared_outside().items())
        return [
            self.num_calls,
            self.num_backwards,
            zlib.crc32(repr(counted).encode()),
            zlib.crc32(repr(outside).encode()),
            len(self.plain_gradients),
        ]

    def details(self) -> dict[str, Any]:
        """All counts, JSON-able."""
        by_parameter: dict[str, list[int]] = {}
        for counts in self.optimizers.values():
            for key in counts.keys:
                before = by_parameter.get(key, [0, 0])
                by_parameter[key] = [before[0] + counts.num_updates, before[1] + counts.num_clears]
        return {
            "calls": self.num_calls,
            "backwards": self.num_backwards,
            "updates": sum(counts.num_updates for counts in self.optimizers.values()),
            "parameters": by_parameter,
            "settings": [
                [code, counts.settings, sorted(counts.models)] for code, counts in self.optimizers.items()
            ],
            "gone": sorted(self.gone),
            "failure": self.last_failure,
            "outside": {key: dataclasses.asdict(values) for key, values in self._compared_outside().items()},
            "plain_gradients": {key: numbers.tolist() for key, numbers in self.plain_gradients.items()},
        }

    def differences(self, details_by_rank: Sequence[Mapping[str, Any]]) -> tuple[list[str], bool]:
        """What each rank has done, in words, where that does not go together; [] where it does. And whether it is the
        settings of an optimizer.
        """
        gone = set().union(*(details["gone"] for details in details_by_rank))
        if self._steps_differ(details_by_rank, gone):
            return [_words(details) for details in details_by_rank], False
        settings = [
            {code: text for code, text, models in details["settings"] if not gone & {*models}}
            for details in details_by_rank
        ]
        for code in set.intersection(*(set(each) for each in settings)):
            found = [each[code] for each in settings]
            if len(set(found)) > 1:
                return _different_parts(found), True
        return [], False

    def plain_difference(self, details_by_rank: Sequence[Mapping[str, Any]]) -> str:
        """The key of a parameter whose owners have different gradients from outside of compiled models; ""
        where there is none.
        """
        gradients = [details["plain_gradients"] for details in details_by_rank]
        for key in sorted(set().union(*gradients)):
            found = [each.get(key) for rank, each in enumerate(gradients) if rank in self.owners_of(key)]
            if any(numbers is None or not _close(numbers, found[0]) for numbers in found):
                return key
        return ""

    def _compared_outside(self) -> dict[str, OutsideValues]:
        return {key: values for key, values in self.outside_values().items() if key not in self.ranks_own}

    def outside_difference(
        self, details_by_rank: Sequence[Mapping[str, Any]], tell: Callable[[str], None]
    ) -> tuple[str, list[str]] | None:
        """An optimizer, and those parameters outside of compiled models that were the same on all ranks before its first
        step and no longer are. What differed before is a rank's own, and is not looked at again.
        """
        found_by_rank = [details["outside"] for details in details_by_rank]
        for key in sorted(set().union(*found_by_rank)):
            found = [each.get(key) for each in found_by_rank]
            if None in found or apart([each["before"] for each in found]):
                self.ranks_own.add(key)
                if None not in found:
                    tell(_own_from_the_start(found[0]))
            elif places := apart([each["now"] for each in found]):
                self.ranks_own.add(key)  # it is an error once
                return found[0]["optimizer"], [found[0]["names"][place] for place in places]
        return None

    def _steps_differ(self, details_by_rank: Sequence[Mapping[str, Any]], gone: set[int]) -> bool:
        if len({(details["calls"], details["backwards"]) for details in details_by_rank}) > 1:
            return True
        counts_by_rank = [details["parameters"] for details in details_by_rank]
        for key in set().union(*counts_by_rank):
            if model_of(key) in gone:
                continue
            owners = set(self.updaters_of(key))
            for index in range(2):
                counts = [counts_of_rank.get(key, [0, 0])[index] for counts_of_rank in counts_by_rank]
                own = {count for rank, count in enumerate(counts) if rank in owners}
                others = [count for rank, count in enumerate(counts) if rank not in owners]
                if len(own) > 1 or (own and others and max(others) > max(own)):
                    return True
        return False


def _own_from_the_start(found: Mapping[str, Any]) -> str:
    names = "; ".join(found["names"][:3]) + ("; ..." if len(found["names"]) > 3 else "")
    return (
        f"{found['optimizer']} updates parameters outside of compiled models that differ between ranks from its first step on "
        f"({names}): each rank trains its own. For one that all ranks train, make it with the same seed on all ranks and call "
        "rannc_backend.synchronize(module)"
    )


def apart(found_by_rank: Sequence[Sequence[float]]) -> list[int]:
    """Places of values, of pairs of a value and how far it may be from others, that differ."""
    first = found_by_rank[0]
    return [
        place // 2
        for place in range(0, len(first), 2)
        if any(
            abs(other[place] - first[place]) > max(other[place + 1], first[place + 1])
            for other in found_by_rank[1:]
        )
    ]


def _different_parts(texts: Sequence[str]) -> list[str]:
    """Of settings as text, `Class(name=value, ...; ...), learning rates [...]`, the class and what is not the same in all."""
    parts = []
    for text in texts:
        settings, _, rates = text.rpartition("), ")
        name, _, given = settings.partition("(")
        parts.append([name, *given.replace("; ", ", ").split(", "), rates])
    if len({len(each) for each in parts}) > 1:
        return list(texts)
    differ = [place for place, found in enumerate(zip(*parts, strict=True)) if len(set(found)) > 1]
    return [", ".join(dict.fromkeys([each[0], *(each[place] for place in differ)])) for each in parts]


def _close(numbers: Sequence[float], others: Sequence[float]) -> bool:
    return all(
        math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6 * abs(others[-1]))
        for a, b in zip(numbers, others, strict=True)
    )


def _words(details: Mapping[str, Any]) -> str:
    text = f"{details['calls']} calls, {details['backwards']} backwards, {details['updates']} optimizer steps"
    clears = max((counts[1] for counts in details["parameters"].values()), default=0)
    text += f", {clears} zero_grad" if clears else ""
    return f"{text}; {details['failure']}" if details["failure"] else text
