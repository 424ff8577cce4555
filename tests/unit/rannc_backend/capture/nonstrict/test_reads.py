"""Tests of values are tried both ways: those that only raise pass, a path that is chosen is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rannc_backend.capture.nonstrict.reads import Reads, Unknown, checked_both_ways, is_raised_by_user
from rannc_backend.errors import UnsupportedModelError

Run = Callable[[Callable[[str], bool]], str]


def _tried(run: Run) -> tuple[str, tuple[str, ...]]:
    def with_reads(reads: Reads) -> str:
        reads.begin()
        return run(lambda name: reads.decide(f'  File "/home/me/model.py", line 1, in {name}\n'))

    result, unchecked, decisions = checked_both_ways(with_reads)
    assert not decisions
    return result, unchecked


def _two_checks(holds: Callable[[str], bool]) -> str:
    if holds("first"):
        raise ValueError("first")
    assert holds("second"), "second"
    return "done"


def _nested(holds: Callable[[str], bool]) -> str:
    if not holds("all"):
        if holds("some"):
            raise ValueError("some")
        raise ValueError("none")
    return "done"


def _raises_always(holds: Callable[[str], bool]) -> str:
    if holds("either"):
        raise ValueError("one")
    raise KeyError("other")


def _path(holds: Callable[[str], bool]) -> str:
    return "one" if holds("path") else "other"


def _path_before_a_check(holds: Callable[[str], bool]) -> str:
    found = "one" if holds("path") else "other"
    assert holds("check")
    return found


def _fails_by_itself(holds: Callable[[str], bool]) -> str:
    return "one" if holds("path") else [][1]


@pytest.mark.parametrize(("run", "places"), [(_two_checks, ("first", "second")), (_nested, ("all",))])
def test_checks_pass_and_are_named(run: Run, places: tuple[str, ...]) -> None:
    result, found = _tried(run)
    assert result == "done" and [place.rpartition(" ")[2] for place in found] == list(places)


@pytest.mark.parametrize(("run", "name"), [(_path, "path"), (_path_before_a_check, "path")])
def test_a_path_is_refused(run: Run, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="a path is chosen by a value") as caught:
        _tried(run)
    assert caught.value.location.endswith(f"in {name}")


def test_what_raises_either_way_is_the_users_error() -> None:
    with pytest.raises(ValueError, match="one"):
        _tried(_raises_always)


def test_an_error_that_nobody_raised_proves_nothing() -> None:
    with pytest.raises(IndexError):
        _tried(_fails_by_itself)
    with pytest.raises(IndexError) as caught:
        [][1]
    assert not is_raised_by_user(caught.value)
    with pytest.raises(UnsupportedModelError) as refused:
        int(Unknown(Reads(), lambda: ""))
    assert not is_raised_by_user(refused.value)
    with pytest.raises(UnsupportedModelError) as refused:
        raise UnsupportedModelError("a refusal", cure="none")
    assert not is_raised_by_user(refused.value)
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2) @ torch.ones(3)
    assert not is_raised_by_user(raised.value)


def test_a_number_may_be_compared_and_nothing_else() -> None:
    reads = Reads([True])
    number = Unknown(reads, lambda: "")
    assert (2 * number - 1 <= 5) and len(reads.places) == 1
    for use in (int, float, hash, lambda value: torch.ones(2) / value, lambda value: [1, 2][value]):
        with pytest.raises(UnsupportedModelError, match="used as one"):
            use(number)


def test_the_other_way_is_run_quickly() -> None:
    """And in full where the quick run ends by something else than the forward's own code."""
    ran: list[str] = []

    def way(name: str, run: Run) -> Callable[[Reads], str]:
        def with_reads(reads: Reads) -> str:
            reads.begin()
            ran.append(name)
            return run(lambda place: reads.decide(f'  File "/home/me/model.py", line 1, in {place}\n'))

        return with_reads

    result, unchecked, _ = checked_both_ways(way("full", _two_checks), None, way("quick", _two_checks))
    # The second test has to be turned before the forward ends well.
    assert result == "done" and len(unchecked) == 2
    assert ran == ["full", "full", "quick", "quick"]

    ran.clear()
    with pytest.raises(UnsupportedModelError, match="a path is chosen"):
        checked_both_ways(way("full", _path), None, way("quick", _path))
    assert ran == ["full", "quick"]
    ran.clear()

    def errs(holds: Callable[[str], bool]) -> str:
        if holds("first"):
            raise [][1]
        return "done"

    def checks(holds: Callable[[str], bool]) -> str:
        if holds("first"):
            raise ValueError("first")
        return "done"

    _, unchecked, _ = checked_both_ways(way("full", checks), None, way("quick", errs))
    assert len(unchecked) == 1 and ran == ["full", "quick", "full"]
