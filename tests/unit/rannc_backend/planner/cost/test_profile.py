"""Files of measured prices: written and read alike, joined, and never trusted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.errors import ProfileError
from rannc_backend.planner.cost.profile import BlockProfile, Point, Profile, Setting, StageProfile

HERE = Setting(device_name="cpu", compiler="eager", versions="torch 2", num_sharing=2)
THERE = Setting(device_name="gpu", compiler="eager", versions="torch 2", num_sharing=2)


def point(rows: int, seconds: float | None = 0.5) -> Point:
    peak = None if seconds is None else 100 * rows
    return Point(rows=rows, forward_seconds=seconds, backward_seconds=seconds, peak_bytes=peak)


def block(structure: str = "a", *points: Point, setting: Setting = HERE, budget: float = 1.0) -> BlockProfile:
    return BlockProfile(structure=structure, budget=budget, setting=setting, points=points or (point(1),))


EXAMPLE = (
    Profile()
    .with_blocks([block("a", point(1), point(4, None)), block("b", setting=THERE)])
    .with_stages(
        [StageProfile(fingerprint="f", structures=("a", "a"), budget=1.0, setting=HERE, point=point(4))]
    )
)


def test_text_and_back() -> None:
    text = EXAMPLE.to_json()
    assert Profile.from_json(text) == EXAMPLE and Profile.from_json(text).to_json() == text


def test_only_the_same_setting_holds() -> None:
    assert set(EXAMPLE.of_setting(HERE)) == {("a", 1.0)}
    assert set(EXAMPLE.of_setting(THERE)) == {("b", 1.0)}


def test_points_are_joined_and_the_new_ones_win() -> None:
    joined = EXAMPLE.with_blocks([block("a", point(2), point(4, 0.25))]).of_setting(HERE)["a", 1.0]
    assert [(item.rows, item.forward_seconds) for item in joined.points] == [(1, 0.5), (2, 0.5), (4, 0.25)]


def test_a_stage_is_replaced_by_a_newer_measurement() -> None:
    newer = StageProfile(
        fingerprint="f", structures=("a", "a"), budget=1.0, setting=HERE, point=point(4, 0.125)
    )
    assert EXAMPLE.with_stages([newer]).stages == (newer,)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kind",), "rannc plan"),
        (("schema_version",), 2),
        (("blocks", 0, "points"), []),
        (("blocks", 0, "points", 0, "rows"), 0),
        (("blocks", 0, "points", 0, "rows"), 9),
        (("blocks", 0, "points", 0, "rows"), "1"),
        (("blocks", 0, "points", 0, "forward_seconds"), -1.0),
        (("blocks", 0, "points", 0, "forward_seconds"), None),
        (("blocks", 0, "points", 0, "peak_bytes"), 2**70),
        (("blocks", 0, "budget"), 1.5),
        (("blocks", 0, "setting", "compiler"), "other"),
        (("stages", 0, "structures"), []),
        (("more",), 1),
    ],
)
def test_what_cannot_be_is_refused_by_place(path: tuple[Any, ...], value: object) -> None:
    data = json.loads(EXAMPLE.to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ProfileError, match="my.json is no file of profiles") as caught:
        Profile.from_json(json.dumps(data), where="my.json")
    assert str(path[0]) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "NaN", '{"blocks": NaN}', "\x00", "[" * 5000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ProfileError):
        Profile.from_json(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(data: st.DataObject) -> None:
    tree = json.loads(EXAMPLE.to_json())
    place, key = {"root": tree}, "root"
    while isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(_JSON)
    whole = tree if key != "root" else place["root"]
    text = json.dumps(whole)
    start = data.draw(st.integers(0, len(text)))
    text = (
        text[:start]
        + data.draw(st.sampled_from(["", "x", '"', "}"]))
        + text[start + data.draw(st.integers(0, 3)) :]
    )
    try:
        read = Profile.from_json(text)
    except ProfileError:
        return
    assert Profile.from_json(read.to_json()) == read
