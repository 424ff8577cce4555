"""Directories of `torch.distributed.checkpoint`: what DCP wrote is read, and what nobody should read is
refused.
"""

from __future__ import annotations

import enum
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict

import rannc_backend
from rannc_backend.errors import CheckpointFileError, CheckpointMismatchError, CheckpointNotFoundError


def _run(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.randn(5, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return model, optimizer


def _same(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            _same(actual[key], value)
    else:
        assert actual == expected


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    model, optimizer = _run(0)
    state = get_state_dict(model, optimizer)
    dcp.save({"model": state[0], "optim": state[1]}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    return tmp_path / "theirs"


def test_read(theirs: Path) -> None:
    model, optimizer = _run(1)
    assert rannc_backend.load_distributed_checkpoint(theirs, model, optimizer) == ((), ())
    expected, moments = _run(0)
    _same(model.state_dict(), expected.state_dict())
    _same(optimizer.state_dict(), moments.state_dict())


class _EarlyPython(pickle.Pickler):
    """Writes elements of enumerations as the first releases of Python 3.11 do."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_read_what_another_python_has_written(theirs: Path) -> None:
    metadata = pickle.loads((theirs / ".metadata").read_bytes())
    with open(theirs / ".metadata", "wb") as file:
        _EarlyPython(file).dump(metadata)
    assert b"getattr" in (theirs / ".metadata").read_bytes()
    test_read(theirs)


def test_there_and_back(tmp_path: Path) -> None:
    model, optimizer = _run(0)
    rannc_backend.save_distributed_checkpoint(tmp_path / "a", model, optimizer)
    other, moments = _run(1)
    rannc_backend.load_distributed_checkpoint(tmp_path / "a", other, moments)
    _same(other.state_dict(), model.state_dict())
    _same(moments.state_dict(), optimizer.state_dict())


def test_several_optimizers(tmp_path: Path) -> None:
    model = _run(0)[0]

    def pair(rate: float) -> list[torch.optim.Optimizer]:
        halves = list(model[0].parameters()), list(model[2].parameters())  # type: ignore[index]
        return [torch.optim.SGD(halves[0], rate, momentum=0.9), torch.optim.Adam(halves[1], rate)]

    optimizers = pair(0.1)
    for optimizer in optimizers:
        optimizer.step()
    state = get_state_dict(model, optimizers)
    dcp.save({"model": state[0], "optim": state[1]}, checkpoint_id=tmp_path / "a", no_dist=True)
    expected = [optimizer.state_dict() for optimizer in optimizers]
    others = pair(0.2)
    rannc_backend.load_distributed_checkpoint(tmp_path / "a", model, others)
    _same([each.state_dict() for each in others][0], expected[0])
    _same([each.state_dict() for each in others][1], expected[1])


def test_a_model_that_was_saved_beside_its_optimizer(tmp_path: Path) -> None:
    """Names of the model begin with numbers, as those of parameter groups do."""
    model, optimizer = _run(0)
    states, moments = get_state_dict(model, optimizer)
    dcp.save({**states, "optim": moments}, checkpoint_id=tmp_path / "a", no_dist=True)
    other, others = _run(1)
    rannc_backend.load_distributed_checkpoint(tmp_path / "a", other, others, model_key="")
    _same(other.state_dict(), model.state_dict())
    _same(others.state_dict(), optimizer.state_dict())


def test_another_name_of_a_tied_weight(tmp_path: Path) -> None:
    model = nn.ModuleDict({"first": nn.Linear(3, 3, bias=False), "second": nn.Linear(3, 3, bias=False)})
    model["second"].weight = model["first"].weight
    saved = torch.arange(9.0).view(3, 3)
    dcp.save({"model": {"second.weight": saved}}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert rannc_backend.load_distributed_checkpoint(tmp_path / "a", model) == ((), ())
    assert torch.equal(model["first"].weight, saved) and model["first"].weight is model["second"].weight


def _in_parts(path: Path) -> tuple[str, Metadata]:
    """As FSDP's two ranks write a parameter: two parts of its rows, in two places."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    name = "model.0.weight"
    described = metadata.state_dict_metadata[name]
    whole = _run(0)[0].state_dict()["0.weight"]
    place = metadata.storage_data.pop(MetadataIndex(name, [0, 0]))
    described.chunks = []
    for index, rows in enumerate(((0, 4), (4, 6))):
        part, file = whole[slice(*rows)].clone(), path / f"__{index}_9.distcp"
        torch.save(part, file)
        offset = torch.Size([rows[0], 0])
        described.chunks.append(ChunkStorageMetadata(offsets=offset, sizes=part.size()))
        record = type(place)(relative_path=file.name, offset=0, length=file.stat().st_size)
        metadata.storage_data[MetadataIndex(name, offset)] = record
    return name, metadata


def test_parts_of_several_ranks(theirs: Path) -> None:
    _, metadata = _in_parts(theirs)
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    model = _run(1)[0]
    rannc_backend.load_distributed_checkpoint(theirs, model)
    _same(model.state_dict(), _run(0)[0].state_dict())


def test_a_part_is_missing(theirs: Path) -> None:
    name, metadata = _in_parts(theirs)
    del metadata.state_dict_metadata[name].chunks[1]
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    model = _run(1)[0]
    with pytest.raises(CheckpointFileError, match=r"16 elements|larger than its parts"):
        rannc_backend.load_distributed_checkpoint(theirs, model)


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch $RANNC_MARK",)


class _Asks:
    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (torch.Size, "numel")


def _changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "metadata runs code": lambda path: (path / ".metadata").write_bytes(pickle.dumps(_Runs())),
    "metadata asks for what it likes": lambda path: (path / ".metadata").write_bytes(pickle.dumps(_Asks())),
    "a tensor runs code": lambda path: _changed(
        path / "__0_0.distcp", lambda content: pickle.dumps(_Runs()).ljust(len(content), b"\0")
    ),
    "metadata cut off": lambda path: _changed(path / ".metadata", lambda content: content[:-9]),
    "metadata empty": lambda path: (path / ".metadata").write_bytes(b""),
    "metadata of a list": lambda path: (path / ".metadata").write_bytes(pickle.dumps([1])),
    "metadata without tables": lambda path: (path / ".metadata").write_bytes(pickle.dumps(Metadata({}))),
    "file cut off": lambda path: _changed(path / "__0_0.distcp", lambda content: content[:500]),
    "file gone": lambda path: (path / "__0_0.distcp").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage(
    damage: Callable[[Path], object], theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANNC_MARK", str(tmp_path / "mark"))
    damage(theirs)
    model, optimizer = _run(1)
    with pytest.raises(CheckpointFileError, match="What to change"):
        rannc_backend.load_distributed_checkpoint(theirs, model, optimizer)
    assert not (tmp_path / "mark").exists()


def test_a_place_outside(theirs: Path) -> None:
    metadata = pickle.loads((theirs / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../theirs/__0_0.distcp"
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointFileError, match="not in the directory"):
        rannc_backend.load_distributed_checkpoint(theirs, _run(1)[0])


def test_other_names_have_the_nearest(theirs: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"no tensors under 'net'.*\n.*model"):
        rannc_backend.load_distributed_checkpoint(theirs, _run(1)[0], model_key="net")
    other = nn.ModuleDict({"0": nn.Linear(4, 6), "1": nn.BatchNorm1d(6), "22": nn.Linear(6, 2)}).double()
    with pytest.raises(CheckpointMismatchError, match=r"has no '22\.weight'(.|\n)*did you mean '2\.weight'"):
        rannc_backend.load_distributed_checkpoint(theirs, other)
    model = _run(1)[0]
    groups = torch.optim.AdamW([{"params": [each]} for each in model.parameters()])
    with pytest.raises(CheckpointMismatchError, match=r"has 1 parameter group\(s\)"):
        rannc_backend.load_distributed_checkpoint(theirs, model, groups)


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointNotFoundError, match="checkpoint_id"):
            rannc_backend.load_distributed_checkpoint(path, _run(1)[0])
