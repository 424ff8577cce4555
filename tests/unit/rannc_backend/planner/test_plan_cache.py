"""Plans that are kept: found again by all that they depend on, checked like any file, bounded, and never a
reason to fail.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from rannc_backend.errors import PlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.planner import plan_cache
from rannc_backend.planner.plan_cache import (
    Key,
    cached_plan,
    keep_measured,
    keep_plan,
    key_of,
    source_digest,
)
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.ir.sample_plans import sample_plan

SAMPLE = sample_plan()


def key(config: Config | None = None, **changes: object) -> Key:
    facts = {
        "fingerprint": "f",
        "cluster": "c",
        "batch_rows": 8,
        "lengths": ((64,), (16,)),
        "hosts": ["a", "a"],
        "device_memory_bytes": 1,
    }
    return key_of(config or Config(), **(facts | changes))  # type: ignore[arg-type]


def anything(plan: Plan) -> None:
    return


def test_a_plan_is_the_same_when_it_is_found_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert cached_plan(tmp_path / "plans", key(), anything) is None
    keep_plan(tmp_path / "plans", key(), SAMPLE)
    found = cached_plan(tmp_path / "plans", key(), anything)
    assert found == SAMPLE and found.to_json() == SAMPLE.to_json()
    (line,) = caplog.messages
    assert line.startswith("plan of an earlier run") and "'plan_cache': False" in line


def test_what_was_measured_takes_the_place_of_its_plan_alone(tmp_path: Path) -> None:
    other = SAMPLE.model_copy(update={"plan_name": "other"})
    measured = SAMPLE.model_copy(update={"measured_step_seconds": 0.5})
    keep_plan(tmp_path, key(), SAMPLE)
    keep_plan(tmp_path, key(fingerprint="g"), other)
    keep_measured(tmp_path, SAMPLE, measured)
    assert cached_plan(tmp_path, key(), anything) == measured
    assert cached_plan(tmp_path, key(fingerprint="g"), anything) == other
    keep_measured(tmp_path / "none", SAMPLE, measured)  # nothing to do, and no reason to fail


def test_every_component_makes_another_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    measured = Config(profile_file=str(profile))
    names = [
        key(),
        key(fingerprint="g"),
        key(cluster="d"),
        key(batch_rows=9),
        key(lengths=((128,), (16,))),
        key(lengths=((64,), (32,))),
        key(hosts=["a", "b"]),
        key(hosts=["a"]),
        key(device_memory_bytes=2),
        key(Config(partition_num=2)),
        key(Config(mem_limit_gb=1.0)),
        key(measured),
    ]
    profile.write_text("{}")
    names.append(key(measured))
    found = [each.file_name for each in names]
    monkeypatch.setattr("torch.__version__", "0.0")
    found.append(key().file_name)
    monkeypatch.setattr(plan_cache, "source_digest", lambda: "other")
    found.append(key().file_name)
    assert len(set(found)) == len(found)
    assert key(hosts=["x", "x"]).file_name == key(hosts=["y", "y"]).file_name, (
        "hosts have other names every day"
    )
    assert key(Config(cache_dir="elsewhere")).options == key().options


def test_a_plan_of_other_options_is_not_found(tmp_path: Path) -> None:
    keep_plan(tmp_path, key(), SAMPLE)
    assert cached_plan(tmp_path, key(Config(max_pipeline=2)), anything) is None


@pytest.mark.parametrize("text", ["", "{", "import os", '{"schema_version": 1}', "bytes", "directory"])
def test_what_is_broken_is_made_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / key().file_name
    if text == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"\xff" if text == "bytes" else text.encode())
    assert cached_plan(tmp_path, key(), anything) is None
    keep_plan(tmp_path, key(), SAMPLE)
    assert (cached_plan(tmp_path, key(), anything) is None) == (text == "directory")


def test_a_plan_that_does_not_fit_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    keep_plan(tmp_path, key(), SAMPLE)

    def refuse(plan: Plan) -> None:
        raise PlanError("it is for another graph")

    assert cached_plan(tmp_path, key(), refuse) is None
    assert "another graph" in caplog.text and len(caplog.messages) == 1


def test_the_oldest_plans_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 3)
    keys = [replace(key(), batch_rows=number) for number in range(5)]
    for number, each in enumerate(keys[:3]):
        keep_plan(tmp_path, each, SAMPLE)
        os.utime(tmp_path / each.file_name, (number + 1, number + 1))
    assert cached_plan(tmp_path, keys[0], anything) is not None  # used last
    keep_plan(tmp_path, keys[3], SAMPLE)
    assert {path.name for path in tmp_path.iterdir()} == {keys[number].file_name for number in (0, 2, 3)}


def test_a_directory_that_cannot_be_written_to_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file")
    keep_plan(tmp_path / "plans", key(), SAMPLE)
    assert cached_plan(tmp_path / "plans", key(), anything) is None


def test_the_source_of_all_packages_counts() -> None:
    assert source_digest() == source_digest() and len(source_digest()) == 64
