"""What was saved is read again bit for bit, by every name; what is torn, foreign or of a later release is
refused, and nothing is run.
"""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from rannc_backend.checkpoint.directory import checkpoints_in, find_checkpoint, read_manifest
from rannc_backend.checkpoint.manifest import FileRecord, Manifest, to_bytes
from rannc_backend.checkpoint.reader import CheckpointReader
from rannc_backend.checkpoint.tensor_storage import SafetensorsReader, read_tensors
from rannc_backend.errors import (
    CheckpointFileError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointStateError,
    CheckpointVersionError,
    RanncError,
)
from tests.unit.rannc_backend.checkpoint.checkpoint_jobs import save, tensors

KINDS = {
    "matrix": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).t(),
    "half": torch.randn(5).to(torch.bfloat16),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64),
    "complex128": torch.randn(3, 2, dtype=torch.complex128).t(),
    "conjugate": torch.randn(3, dtype=torch.complex128).conj(),
    "complex_number": torch.randn((), dtype=torch.complex128),
    "no_complex": torch.empty(0, dtype=torch.complex128),
    "flags": torch.tensor([True, False]),
    "count": torch.tensor(3),
    "nothing": torch.empty(0, 4),
    "special": torch.tensor([float("nan"), float("inf"), -0.0]),
}


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy())


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save(tmp_path, [KINDS])
    reader = CheckpointReader(tmp_path)
    assert reader.path == path and reader.step == 1 and reader.world_size == 1
    for name, tensor in KINDS.items():
        assert (reader.shape(name), reader.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert bits(reader.tensor(name)) == bits(tensor), name


def test_ranks_and_small_files_make_one_checkpoint(tmp_path: Path) -> None:
    shares = [tensors(0, a=(8, 8), b=(64,)), tensors(1, c=(100,)), {}]
    path = save(tmp_path, shares, file_bytes=200, aliases={"tied": "c"})
    reader = CheckpointReader(path)
    assert sorted(reader.names) == ["a", "b", "c", "tied"] and reader.world_size == 3
    assert len(list(path.glob("model-00000-*.safetensors"))) == 2
    state = reader.state_dict()
    assert torch.equal(state["a"], shares[0]["a"]) and torch.equal(state["c"], shares[1]["c"])
    assert state["tied"] is state["c"]
    weights = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in weights.items():
        assert torch.equal(load_file(path / file)[name], state[name])


def test_a_tensor_of_its_own_memory(tmp_path: Path) -> None:
    save(tmp_path, [tensors(a=(4,))])
    reader = CheckpointReader(tmp_path)
    reader.tensor("a").zero_()
    assert reader.tensor("a").abs().sum() > 0


def test_tensors_that_share_memory_are_written_each(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    save(tmp_path, [{"whole": whole, "part": whole[2:4], "again": whole}])
    reader = CheckpointReader(tmp_path)
    assert torch.equal(reader.tensor("part"), whole[2:4]) and torch.equal(reader.tensor("again"), whole)


def test_torch_reads_it_with_our_reader(tmp_path: Path) -> None:
    own = tensors(a=(6, 2), b=(3,))
    save(tmp_path, [own], aliases={"tied": "b"})
    state = {"a": torch.zeros(6, 2), "tied": torch.zeros(3)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=SafetensorsReader(tmp_path))
    assert torch.equal(state["a"], own["a"]) and torch.equal(state["tied"], own["b"])


def test_a_part_of_a_tensor_is_read_for_a_sharded_one(tmp_path: Path) -> None:
    own = tensors(a=(6, 4))
    save(tmp_path, [own])
    assert torch.equal(CheckpointReader(tmp_path).part("a", (slice(2, 5), slice(0, 2))), own["a"][2:5, :2])


def test_a_part_of_complex_numbers(tmp_path: Path) -> None:
    value = torch.randn(4, 3, dtype=torch.complex128)
    reader = CheckpointReader(save(tmp_path, [{"value": value}]))
    assert torch.equal(reader.part("value", (slice(1, 3), slice(0, 2))), value[1:3, 0:2])
    assert load_file(next(reader.path.glob("model-*.safetensors")))["value"].shape == (4, 3, 2)


def test_a_tensor_without_a_form_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointStateError, match="'weight' is a tensor of .*layout torch.sparse_coo"):
        save(tmp_path, [{"weight": torch.eye(2).to_sparse()}])


def test_targets_are_filled_in_place(tmp_path: Path) -> None:
    own = tensors(a=(6, 4), s=())
    save(tmp_path, [own])
    a, s = torch.zeros(4, 6).t(), torch.zeros(())
    read_tensors({"a": a, "s": s}, CheckpointReader(tmp_path))
    assert torch.equal(a, own["a"]) and torch.equal(s, own["s"])


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    save(tmp_path, [tensors(a=(1,))])
    with pytest.raises(CheckpointMismatchError, match="'b'.*\n.*strict=False"):
        CheckpointReader(tmp_path).tensor("b")


def test_the_latest_is_the_last_that_was_saved(tmp_path: Path) -> None:
    for step in (10, 20, 15):
        save(tmp_path, [tensors(step, a=(1,))], step=step)
    assert find_checkpoint(tmp_path).name == "step-00000015"
    assert CheckpointReader(tmp_path / "step-00000020").step == 20
    assert [found.manifest.step for found in checkpoints_in(tmp_path)] == [10, 20, 15]


def test_only_so_many_are_kept_and_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    for step in (10, 20, 30, 30):
        save(tmp_path, [tensors(step, a=(1,))], step=step, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000020", "step-00000030-2"]
    save(tmp_path, [tensors(a=(1,))], step=30, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000020", "step-00000030-3"]


def test_what_a_cut_save_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".step-00000003.tmp-00ff").mkdir()
    (tmp_path / ".step-00000003.tmp-00ff" / "model-00000-00000.safetensors").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-00000009").mkdir()
    save(tmp_path, [tensors(a=(1,))])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "notes.txt",
        "step-00000001",
        "step-00000009",
    ]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "no complete checkpoint"),
        (lambda path: path.joinpath("step-00000001").mkdir(), "no complete checkpoint"),
        (lambda path: path.joinpath(".step-00000001.tmp-ab").mkdir(), "no complete checkpoint"),
    ],
)
def test_a_directory_without_a_manifest(tmp_path: Path, make: Callable[[Path], None], words: str) -> None:
    make(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=words):
        CheckpointReader(tmp_path)


def test_a_path_that_is_not_there_or_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        CheckpointReader(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotFoundError, match="is a file"):
        CheckpointReader(tmp_path / "file")


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "tensor cut": lambda path: cut(path / "model-00000-00000.safetensors"),
    "tensor bit": lambda path: flip(path / "model-00000-00000.safetensors", -1),
    "header bit": lambda path: flip(path / "model-00000-00000.safetensors", 12),
    "tensor file gone": lambda path: (path / "model-00000-00000.safetensors").unlink(),
    "index cut": lambda path: cut(path / "index.json"),
    "index bit": lambda path: flip(path / "index.json", 40),
    "index gone": lambda path: (path / "index.json").unlink(),
    "manifest cut": lambda path: cut(path / "checkpoint.json"),
    "manifest empty": lambda path: (path / "checkpoint.json").write_bytes(b""),
    "other step": lambda path: edit(path / "checkpoint.json", '"step":1', '"step":2'),
    "another file of the same size": lambda path: save_file(
        {"a": torch.ones(7)}, path / "model-00000-00000.safetensors", {"format": "pt"}
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path, [tensors(a=(7,))])
    DAMAGE[kind](path)
    with pytest.raises(CheckpointFileError, match="torn|valid|cannot read"):
        CheckpointReader(tmp_path).tensor("a")


def test_a_damaged_latest_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    save(tmp_path, [tensors(a=(1,))], step=1)
    cut(save(tmp_path, [tensors(a=(1,))], step=2) / "checkpoint.json")
    with pytest.raises(CheckpointFileError):
        CheckpointReader(tmp_path)
    assert CheckpointReader(tmp_path / "step-00000001").step == 1


def test_a_later_release_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, [tensors(a=(1,))]) / "checkpoint.json"
    content = json.loads(path.read_text()) | {"schema_version": 2, "more": []}
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointVersionError, match="schema version 2.*up to 1\n.*update"):
        CheckpointReader(tmp_path)


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (os.environ["CHECKPOINT_BOMB"],)


@pytest.mark.parametrize(
    "name", ["model-00000-00000.safetensors", "index.json", "checkpoint.json", ".metadata", "plan.json"]
)
def test_a_pickle_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    marker = tmp_path / "exploded"
    monkeypatch.setenv("CHECKPOINT_BOMB", str(marker))
    path = save(tmp_path / "run", [tensors(a=(7,))])
    (path / name).write_bytes(pickle.dumps(Bomb()))
    try:
        reader = CheckpointReader(path)
        reader.tensor("a")
        reader.plan()
        read_tensors({"a": torch.zeros(7)}, reader)
    except RanncError:
        pass
    assert not marker.exists()
    pickle.loads((path / name).read_bytes())
    assert marker.exists(), "the bomb is none"


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/passwd", "model-00000-00000.safetensors\n", "checkpoint.json"]
)
def test_files_outside_are_not_read(tmp_path: Path, file: str) -> None:
    import zlib

    path = save(tmp_path / "run", [tensors(a=(7,))])
    save_file({"a": torch.ones(7)}, tmp_path / "outside.safetensors")
    index = (
        (path / "index.json")
        .read_text()
        .replace('"model-00000-00000.safetensors"', json.dumps(file))
        .encode()
    )
    (path / "index.json").write_bytes(index)
    manifest = read_manifest(path).model_dump()
    manifest["files"]["index.json"] = {"num_bytes": len(index), "crc32": zlib.crc32(index)}
    (path / "checkpoint.json").write_bytes(to_bytes(Manifest.model_validate(manifest).sealed()))
    with pytest.raises(CheckpointFileError, match="index.json"):
        CheckpointReader(path)


@pytest.mark.parametrize("count", [40, 10**15])
def test_a_tensor_that_is_larger_than_its_file_is_refused_before_memory_is_made(
    tmp_path: Path, count: int
) -> None:
    """The description is whole and vouched for, as one that somebody else has made may be."""
    path = save(tmp_path, [tensors(a=(7,))])
    assert (path / "model-00000-00000.safetensors").stat().st_size < 4 * 40
    manifest = CheckpointReader(path).manifest
    edit(path / "index.json", '"shape":[7]', f'"shape":[{count}]')
    content = (path / "index.json").read_bytes()
    files = dict(manifest.files) | {
        "index.json": FileRecord(num_bytes=len(content), crc32=zlib.crc32(content))
    }
    (path / "checkpoint.json").write_bytes(to_bytes(manifest.model_copy(update={"files": files}).sealed()))
    with pytest.raises(CheckpointFileError, match="larger than its file"):
        CheckpointReader(path)
