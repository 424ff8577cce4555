"""Checks of other libraries' files: Hugging Face's safetensors, DCP's directories, PEFT's adapters.

In: a context. Out: findings. Every function is collective: all ranks make the same calls in the same order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import rannc_backend
from tests.distributed.harness.context import Context

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attn_implementation": "eager",
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
SAVED = 2


def _model(seed: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**_SIZES)).double()
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": parameters[:3], "lr": 1e-2}, {"params": parameters[3:]}]
    return torch.optim.AdamW(groups, lr=1e-3)


def _train(context: Context, call: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    begin, end = context.interval if call.__class__.__name__ == "OptimizedModule" else (0, 12)
    for step in range(first, last):
        ids = torch.randint(3, 64, (12, 8), generator=torch.Generator().manual_seed(step))[begin:end]
        optimizer.zero_grad()
        nn.functional.cross_entropy(call(input_ids=ids).logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()


def _same(context: Context, kind: str, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    context.findings.that(
        actual.keys() == expected.keys(), f"{kind}: names {actual.keys() ^ expected.keys()}"
    )
    for name in actual.keys() & expected.keys():
        context.findings.that(torch.equal(actual[name], expected[name]), f"{kind}: {name} is another")


def _values_are_late(context: Context, model: nn.Module) -> None:
    held = [name for name, p in model.named_parameters() if p.untyped_storage().nbytes() > 8]
    context.findings.that(not held, f"memory was taken before the plan: {held[:2]}")


def hugging_face_files(context: Context) -> None:
    """Out by every rank, read by transformers; in by stage from "meta"; names, shards and ties as theirs."""
    from transformers import GPT2LMHeadModel

    torch._dynamo.reset()
    model = _model(0)
    compiled, optimizer = context.compile(model), _optimizer(model)
    _train(context, compiled, optimizer, 0, SAVED)
    ours, theirs = context.directory / "ours", context.directory / "theirs"
    for size in ("20kB", 30_000):  # the second over the first
        rannc_backend.save_pretrained(compiled, ours, max_shard_size=size)
    compiled.save_pretrained(theirs, max_shard_size="20kB")
    expected = model.state_dict()
    if context.rank == 0:
        for directory in (ours, theirs):
            _same(context, directory.name, GPT2LMHeadModel.from_pretrained(directory).state_dict(), expected)
        indexes = [
            json.loads((place / "model.safetensors.index.json").read_text()) for place in (ours, theirs)
        ]
        weights = [index["weight_map"] for index in indexes]
        context.findings.that(weights[0].keys() == weights[1].keys(), "other names than transformers'")
        files = {path.name for path in ours.glob("*.safetensors")}
        context.findings.that(files == set(weights[0].values()), f"{files ^ set(weights[0].values())} left")
        sizes = [path.stat().st_size for path in ours.glob("*.safetensors")]
        context.findings.that(max(sizes) < 40_000, f"files of {max(sizes)} bytes")
        context.findings.that(not list(ours.glob(".*")), "unfinished files are left")
    rannc_backend.barrier()
    torch._dynamo.reset()
    with torch.device("meta"):
        other = _model(1)
    rannc_backend.load_pretrained(other, ours)
    _values_are_late(context, other)
    compiled_other = context.compile(other)
    with torch.no_grad():
        compiled_other(input_ids=torch.zeros(6, 8, dtype=torch.long))
    _same(context, "loaded by stage", other.state_dict(), expected)
    _train(context, compiled_other, _optimizer(other), 5, 6)
    rannc_backend.load_pretrained(compiled_other, ours)
    _same(context, "loaded after the plan", other.state_dict(), expected)
    _failures(context, other, ours)


def _failures(context: Context, model: nn.Module, directory: Path) -> None:
    findings = context.findings
    before = model.state_dict()
    if context.rank == 0:
        torn = sorted(directory.glob("model-*.safetensors"))[-1]
        torn.write_bytes(torn.read_bytes()[:-1])
    rannc_backend.barrier()
    findings.raises("torn", ("CheckpointFileError",), lambda: rannc_backend.load_pretrained(model, directory))
    findings.raises(
        "no size",
        ("CheckpointStateError", "UserInputError"),
        lambda: rannc_backend.save_pretrained(model, directory, max_shard_size="much"),
    )
    findings.raises(
        "nowhere",
        ("CheckpointNotFoundError",),
        lambda: rannc_backend.load_pretrained(model, directory / "nowhere"),
    )
    _same(context, "after errors", model.state_dict(), before)


def adapter_files(context: Context) -> None:
    """PEFT's adapters: alone in the files, whichever way they are saved, and read by PEFT in one process."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file

    torch._dynamo.reset()
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(_model(0), config).double()
    compiled, optimizer = context.compile(model), _optimizer(model)
    _train(context, compiled, optimizer, 0, SAVED)
    ours, theirs = context.directory / "ours", context.directory / "theirs"
    rannc_backend.save_pretrained(compiled, ours)
    compiled.save_pretrained(str(theirs))
    expected = model.state_dict()
    if context.rank == 0:
        files = [load_file(place / "adapter_model.safetensors") for place in (ours, theirs)]
        _same(context, "files", files[0], files[1])
        context.findings.that(len(files[0]) == 4, f"{len(files[0])} tensors of adapters")
        loaded = PeftModel.from_pretrained(_model(0), str(ours), autocast_adapter_dtype=False).state_dict()
        for name, value in expected.items():
            context.findings.that(torch.equal(loaded[name].double(), value), f"{name} is another")


def dcp_saved(context: Context) -> None:
    """A run saves; torch's own `dcp.load` in one process goes on as the run does."""
    path = Path(context.case.parameters["path"])
    torch._dynamo.reset()
    model = _model(0)
    compiled, optimizer = context.compile(model), _optimizer(model)
    _train(context, compiled, optimizer, 0, SAVED)
    rannc_backend.save_distributed_checkpoint(path / "ours", compiled, optimizer)
    context.findings.raises(
        "there already",
        ("CheckpointWriteError",),
        lambda: rannc_backend.save_distributed_checkpoint(path / "ours", compiled, optimizer),
    )
    weights, moments = model.state_dict(), optimizer.state_dict()
    if context.rank == 0:
        alone = _model(1)
        other = _optimizer(alone)
        states = get_state_dict(alone, other)
        state = {"model": states[0], "optim": states[1]}
        dcp.load(state, checkpoint_id=path / "ours", no_dist=True)
        set_state_dict(alone, other, model_state_dict=state["model"], optim_state_dict=state["optim"])
        _same(context, "read by DCP", alone.state_dict(), weights)
        _same_moments(context, other.state_dict(), moments)
        states = get_state_dict(alone, other)
        saved = {"app": {"model": states[0], "optim": states[1]}, "epoch": 3}
        dcp.save(saved, checkpoint_id=path / "theirs", no_dist=True)
        torch.save((weights, moments), path / "expected.pt")
    rannc_backend.barrier()


def _same_moments(context: Context, actual: dict[str, Any], expected: dict[str, Any]) -> None:
    found = {index: dict(entry) for index, entry in actual["state"].items()}
    context.findings.that(found.keys() == expected["state"].keys(), "states of other parameters")
    for index, entry in expected["state"].items():
        _same(context, f"state {index}", found.get(index, {}), entry)
    rates = [[group["lr"] for group in state["param_groups"]] for state in (actual, expected)]
    context.findings.that(rates[0] == rates[1], f"learning rates {rates}")


def dcp_loaded(context: Context) -> None:
    """Directories of ours and of DCP, before the first call from "meta", and after it."""
    path = Path(context.case.parameters["path"])
    weights, moments = torch.load(path / "expected.pt")
    for directory, keys in (
        (path / "ours", {}),
        (path / "theirs", {"model_key": "app.model", "optimizer_key": "app.optim"}),
    ):
        torch._dynamo.reset()
        with torch.device("meta"):
            model = _model(1)
        _fill_buffers(model)
        compiled, optimizer = context.compile(model), _optimizer(model)
        rannc_backend.load_distributed_checkpoint(directory, compiled, optimizer, **keys)
        _values_are_late(context, model)
        with torch.no_grad():
            compiled(input_ids=torch.zeros(6, 8, dtype=torch.long))
        kind = f"{directory.name} before"
        for _ in range(2):
            state, own = model.state_dict(), optimizer.state_dict()
            if context.rank == 0:
                _same(context, kind, state, weights)
                _same_moments(context, own, moments)
            _train(context, compiled, optimizer, 7, 8)
            rannc_backend.load_distributed_checkpoint(directory, compiled, optimizer, **keys)
            kind = f"{directory.name} after"
    context.findings.raises(
        "another model",
        ("CheckpointMismatchError",),
        lambda: rannc_backend.load_distributed_checkpoint(path / "ours", nn.Linear(2, 2)),
    )


def _fill_buffers(model: nn.Module) -> None:
    assert not list(model.buffers()), "this model has none"
