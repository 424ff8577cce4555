"""Safetensors as transformers has them: names, ties, other forms in files, buffers without memory, damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertForMaskedLM,
    BertModel,
    LlamaForCausalLM,
    MixtralForCausalLM,
)

import rannc_backend
from rannc_backend.errors import (
    CheckpointFileError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UserInputError,
)
from rannc_backend.integrations import hugging_face

_SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}


def _build(kind: type[Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = kind.config_class(**_SIZES)
    return kind(config)


def _same(actual: nn.Module, expected: nn.Module) -> None:
    states = actual.state_dict(), expected.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@pytest.mark.parametrize("kind", [BertForMaskedLM, LlamaForCausalLM, MixtralForCausalLM])
def test_files_are_those_of_transformers(kind: type[Any], tmp_path: Path) -> None:
    model = _build(kind)
    rannc_backend.save_pretrained(model, tmp_path / "ours", max_shard_size="8kB")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="8kB")
    _same(kind.from_pretrained(tmp_path / "ours"), model)
    names = [
        set(json.loads((tmp_path / each / "model.safetensors.index.json").read_text())["weight_map"])
        for each in ("ours", "theirs")
    ]
    assert names[0] == names[1]
    configurations = [(tmp_path / each / "config.json").read_text() for each in ("ours", "theirs")]
    assert configurations[0] == configurations[1]


@pytest.mark.parametrize("kind", [BertForMaskedLM, LlamaForCausalLM])
def test_from_meta(kind: type[Any], tmp_path: Path) -> None:
    expected = _build(kind)
    expected.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = _build(kind)
    rannc_backend.load_pretrained(model, tmp_path)
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    ids = torch.randint(3, 40, (2, 8))
    compiled = torch.compile(model.eval(), backend="rannc")
    with torch.no_grad():
        assert torch.allclose(compiled(ids).logits, expected.eval()(ids).logits, atol=1e-6)
    _same(model, expected)


def test_values_are_rounded_to_the_models_dtype(tmp_path: Path) -> None:
    expected = _build(LlamaForCausalLM).double()
    rannc_backend.save_pretrained(expected, tmp_path)
    model = _build(LlamaForCausalLM, 1)
    rannc_backend.load_pretrained(model, tmp_path)
    _same(model, expected.float())


def test_with_and_without_a_head(tmp_path: Path) -> None:
    base, whole = _build(BertModel, 1), _build(BertForMaskedLM, 2)
    base.save_pretrained(tmp_path / "base")
    missing, unexpected = rannc_backend.load_pretrained(whole, tmp_path / "base", strict=False)
    assert all(name.startswith("cls.") for name in missing)
    assert all("pooler" in name for name in unexpected)
    assert torch.equal(
        whole.bert.encoder.layer[0].output.dense.weight, base.encoder.layer[0].output.dense.weight
    )
    with pytest.raises(CheckpointMismatchError, match=r"has no 'cls\."):
        rannc_backend.load_pretrained(whole, tmp_path / "base")


def test_another_form_in_files_is_refused(tmp_path: Path) -> None:
    model = _build(MixtralForCausalLM)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"experts.*another form(.|\n)*from_pretrained"):
        rannc_backend.load_pretrained(model, tmp_path)


def test_two_values_of_a_tie(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

    model, file = Tied(), tmp_path / "model.safetensors"
    save_file({"b.weight": torch.ones(3, 3)}, file)
    rannc_backend.load_pretrained(model, file)
    assert model.a.weight.eq(1).all()
    save_file({"a.weight": torch.ones(3, 3), "b.weight": torch.zeros(3, 3)}, file)
    with pytest.raises(CheckpointMismatchError, match="one tensor in the model"):
        rannc_backend.load_pretrained(model, file)


def test_adapters_are_saved_as_peft_saves_them(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    config = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    model = get_peft_model(_build(LlamaForCausalLM), config)
    rannc_backend.save_pretrained(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and len(ours) == 2
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_sizes_of_files_in_words() -> None:
    sizes = {"2kB": 2000, "2KiB": 2048, "5GB": 5 * 10**9, "1.5 MB": 1_500_000, 7: 7}
    assert {size: hugging_face._num_bytes(size) for size in sizes} == sizes


@pytest.mark.parametrize("initializes", [False, True])
def test_a_buffer_that_nobody_makes(initializes: bool, tmp_path: Path) -> None:
    """Nor where there is an ``_init_weights``, which leaves it as it was."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("table", torch.arange(3), persistent=False)
            if initializes:
                self._init_weights = lambda module: None

    rannc_backend.save_pretrained(Odd(), tmp_path)
    with torch.device("meta"):
        model = Odd()
    with pytest.raises(UserInputError, match="nothing says how it is made"):
        rannc_backend.load_pretrained(model, tmp_path)


def test_saved_again_in_fewer_and_in_one(tmp_path: Path) -> None:
    for seed, size in enumerate(("4kB", "8kB", "8kB", "5GB", "4kB")):
        model = _build(LlamaForCausalLM, seed)
        rannc_backend.save_pretrained(model, tmp_path, max_shard_size=size)
        _same(LlamaForCausalLM.from_pretrained(tmp_path), model)
        assert (tmp_path / "model.safetensors").exists() == (size == "5GB")
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def _index(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = path / "model.safetensors.index.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def _first(path: Path) -> Path:
    return sorted(path.glob("model-*"))[0]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: _first(path).write_bytes(_first(path).read_bytes()[:-1]),
    "empty": lambda path: _first(path).write_bytes(b""),
    "no header": lambda path: _first(path).write_bytes(b"\xff" * 100),
    "gone": lambda path: _first(path).unlink(),
    "a directory": lambda path: (_first(path).unlink(), (path / "model-00001-of-00002.safetensors").mkdir()),
    "no JSON": lambda path: (path / "model.safetensors.index.json").write_text("{"),
    "deep JSON": lambda path: (path / "model.safetensors.index.json").write_text("[" * 100_000),
    "no map": lambda path: _index(path, lambda content: content.pop("weight_map")),
    "numbers": lambda path: _index(path, lambda content: content.update(weight_map={"a": 1})),
    "outside": lambda path: _index(
        path, lambda content: content.update(weight_map={"a": "../a.safetensors"})
    ),
    "a pickle": lambda path: _index(path, lambda content: content.update(weight_map={"a": "a.bin"})),
    "a name more": lambda path: _index(
        path, lambda content: content["weight_map"].update(a=next(iter(content["weight_map"].values())))
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage(damage: Callable[[Path], object], tmp_path: Path) -> None:
    model = _build(LlamaForCausalLM)
    rannc_backend.save_pretrained(model, tmp_path, max_shard_size=model.num_parameters() * 3)
    damage(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointFileError, match="What to change"):
        rannc_backend.load_pretrained(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_index_leads_to_no_file_outside(tmp_path: Path) -> None:
    model = _build(LlamaForCausalLM)
    rannc_backend.save_pretrained(model, tmp_path / "a", max_shard_size=model.num_parameters() * 3)
    first = _first(tmp_path / "a")
    first.rename(tmp_path / first.name)

    def elsewhere(content: dict[str, Any]) -> None:
        files = content["weight_map"]
        files |= {name: f"../{file}" for name, file in files.items() if file == first.name}

    _index(tmp_path / "a", elsewhere)
    with pytest.raises(CheckpointFileError, match="no safetensors file in its directory"):
        rannc_backend.load_pretrained(model, tmp_path / "a")


def test_what_is_there_instead(tmp_path: Path) -> None:
    model = _build(LlamaForCausalLM)
    with pytest.raises(CheckpointNotFoundError, match="nothing of that name"):
        rannc_backend.load_pretrained(model, tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"pytorch_model\.bin(.|\n)*with safetensors"):
        rannc_backend.load_pretrained(model, tmp_path)
    rannc_backend.save_checkpoint(tmp_path / "run", model, step=1)
    with pytest.raises(CheckpointNotFoundError, match="load_checkpoint"):
        rannc_backend.load_pretrained(model, tmp_path / "run" / "step-00000001")


@pytest.mark.parametrize("size", ["much", "5 parsecs", 0, -1, True, 1.5, "", "0B"])
def test_sizes(size: Any, tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="max_shard_size"):
        rannc_backend.save_pretrained(nn.Linear(1, 1), tmp_path, max_shard_size=size)
