"""Descriptions of checkpoints with anything in them: an error of ours or a success, never a traceback from
inside.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rannc_backend.checkpoint import optimizer_state, random_state
from rannc_backend.checkpoint.manifest import Manifest
from rannc_backend.checkpoint.model_state import ModelTensors, check_fit, targets
from rannc_backend.checkpoint.plain_values import decode, encode
from rannc_backend.checkpoint.reader import CheckpointReader
from rannc_backend.checkpoint.tensor_storage import SafetensorsReader, read_tensors
from rannc_backend.errors import CheckpointFileError, RanncError
from tests.unit.rannc_backend.checkpoint.checkpoint_jobs import save

CPU = torch.device("cpu")
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$tuple", "$tensor", "a", "file"]), inner, max_size=3)
    ),
    max_leaves=6,
)
PLACES = st.lists(st.integers(0, 30), min_size=1, max_size=8)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)
        self.tied = self.b


def job() -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, optimizer = job()
    tensors = ModelTensors.of(model, None, 1)
    record, states = optimizer_state.capture(
        optimizer, 0, tensors.names_of(), tensors.tensors, with_groups=True
    )
    shares = [{**tensors.tensors, **states}, {"more": torch.ones(3)}]
    path = tmp_path_factory.mktemp("fuzz")
    save(
        path,
        [{name: tensor.detach() for name, tensor in share.items()} for share in shares],
        optimizers=(record,),
        random=random_state.capture(CPU),
        aliases=tensors.aliases,
        schedulers=[encode({"last_epoch": 3, "milestones": (1, 2)}, "scheduler")],
        extra=encode({"epoch": 2, "best": float("inf")}, "extra"),
    )
    return path / "step-00000001"


def changed(value: Any, places: list[int], new: Any) -> Any:
    """A copy in which one part, found by walking down ``places``, is ``new`` (or gone, for None)."""
    if not places or not isinstance(value, dict | list) or not value:
        return new
    keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[places[0] % len(keys)]
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(places) == 1 and new is None:
        del copy[key]
    else:
        copy[key] = changed(value[key], places[1:], new)
    return copy


def read_all(path: Path) -> None:
    reader = CheckpointReader(path)
    assert decode(encode(reader.extra, "x"), "x") is not NotImplemented
    reader.plan()
    model, optimizer = job()
    tensors = ModelTensors.of(model, None, 1)
    check_fit(tensors, reader, strict=False)
    optimizer_state.check_fit([optimizer], reader, tensors.names_of())
    read_tensors(targets(tensors, reader, 0), reader)
    optimizer_state.restore_groups(optimizer, 0, reader)
    optimizer_state.restore_state(optimizer, 0, reader, tensors.names_of(), set(tensors.tensors))
    random_state.restore(reader.index.parts[0].random, CPU)
    for number, scheduler in enumerate(reader.manifest.schedulers):
        decode(scheduler, f"scheduler {number}")
    for name in reader.names:
        reader.tensor(name)
    SafetensorsReader(reader).read_metadata()


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    file=st.sampled_from(["checkpoint.json", "index.json", "plan.json"]),
    places=PLACES,
    new=JSON,
    sealed=st.booleans(),
)
def test_changed_descriptions(saved: Path, file: str, places: list[int], new: Any, sealed: bool) -> None:
    files = {name: (saved / name).read_bytes() for name in ("checkpoint.json", "index.json")}
    place = saved.parent / "step-00000002"
    place.mkdir(exist_ok=True)
    for tensors in saved.glob("*.safetensors"):
        if not (place / tensors.name).exists():
            (place / tensors.name).hardlink_to(tensors)
    manifest = json.loads(files["checkpoint.json"])
    if file == "index.json":
        files[file] = json.dumps(changed(json.loads(files[file]), places, new)).encode()
    elif file == "plan.json":
        files[file] = json.dumps(new).encode()
    manifest["files"] = {
        name: {"num_bytes": len(content), "crc32": zlib.crc32(content)}
        for name, content in files.items()
        if name != "checkpoint.json"
    }
    if file == "checkpoint.json":
        manifest = changed(manifest, places, new)
    if sealed:
        try:
            manifest["crc32"] = Manifest.model_validate(manifest).sealed().crc32
        except Exception:  # noqa: BLE001 - it does not get as far as its checksum
            pass
    files["checkpoint.json"] = json.dumps(manifest).encode()
    for name, content in files.items():
        (place / name).write_bytes(content)
    try:
        read_all(place)
    except RanncError as error:
        assert str(error)
    finally:
        torch.manual_seed(0)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    content=st.binary(max_size=60)
    | st.sampled_from([b"[" * 100_000, b'{"a":' * 20_000, b"1" * 10_000, b'"\\ud800"', b"NaN", b"{}"])
)
def test_bytes_of_any_kind(saved: Path, content: bytes) -> None:
    place = saved.parent / "step-00000003"
    place.mkdir(exist_ok=True)
    (place / "checkpoint.json").write_bytes(content)
    with pytest.raises(CheckpointFileError):
        CheckpointReader(place)


@settings(max_examples=200, deadline=None)
@given(value=JSON)
def test_plain_values_of_any_kind(value: Any) -> None:
    try:
        decode(value, "a value")
    except RanncError:
        pass
    assert decode(encode(value, "a value"), "a value") == value


def test_the_checkpoint_as_it_is_loads(saved: Path) -> None:
    read_all(saved)
