"""Files of Hugging Face's libraries, out of and into a model whose parameters are spread over ranks.

In: a model, compiled or not, and a directory. Out: safetensors files with an index and the configuration, as
`from_pretrained` reads them; and back. No rank holds more than its own parameters. Functions are collective.
docs/ecosystem_checkpoints.md has the rules.

How transformers keeps a model (which of two tied names, names of earlier releases, weights that lie in files
otherwise than in memory) is asked of transformers itself, on tensors without memory: see `_FileForm`.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rannc_backend.api.checkpoints import load_other, share_problem
from rannc_backend.api.materialize import reset_values
from rannc_backend.api.record_model import recorded_source, seed_generator
from rannc_backend.checkpoint.background import guarded
from rannc_backend.checkpoint.directory import Disk
from rannc_backend.checkpoint.manifest import WEIGHTS_INDEX_FILE
from rannc_backend.checkpoint.model_state import ModelTensors, tensors_to_write
from rannc_backend.checkpoint.reader import TensorReader
from rannc_backend.checkpoint.safetensors_directory import WEIGHTS_FILE, SafetensorsDirectory
from rannc_backend.checkpoint.saving import require_seen
from rannc_backend.errors import (
    CheckpointMismatchError,
    CheckpointStateError,
    RanncError,
    UserInputError,
)
from rannc_backend.errors.base import shown
from rannc_backend.integrations.tried_versions import mention_untried
from rannc_backend.kernels.plain_memory import plain_memory
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.torch_internals import root_of
from rannc_backend.runtime.world import World
from rannc_backend.session_registry import REGISTRY

_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[KMGT]?)(?P<binary>i?)B", re.IGNORECASE)
_SHARD = re.compile(r"model-(?:[0-9a-f]{8}-)?[0-9]{5}-of-[0-9]{5}\.safetensors")
_META = torch.device("meta")


def save_pretrained(
    model: nn.Module, directory: str | os.PathLike[str], *, max_shard_size: int | str = "5GB"
) -> None:
    """Saves a model as `from_pretrained` of transformers reads it. Collective.

    Each rank writes the parameters that it owns, in files of its own; rank 0 writes the configuration and the
    index. A directory that has a model already has the old one or the new one at any moment. Of a model of
    PEFT the adapters are saved, by PEFT itself on rank 0, which gets their parameters and no others.

    Args:
        model: Compiled or not, planned or not; one of transformers or PEFT, or any module (without
            configuration then).
        directory: On a file system that all ranks see; created if missing.
        max_shard_size: Bytes of a file, or a text as "5GB" or "500MiB"; a larger tensor has a file of its own.

    Raises:
        UserInputError: ``max_shard_size`` is no size.
        CheckpointStateError: A parameter has no value yet, or weights that belong together in the files are
            on different ranks.
        CheckpointWriteError: A rank could not write.
    """
    world = bootstrap.start()
    world.monitor.phase("saving a model")
    root = root_of(model)
    if isinstance(getattr(root, "peft_config", None), Mapping):
        _save_adapters(world, root, Path(directory))
        world.monitor.phase("between steps")
        return
    shares: list[_Share] = []
    what = f"the model cannot be saved in {shown(str(directory))}"
    problem = guarded(
        what, lambda: shares.append(_Share.of(world, root, _num_bytes(max_shard_size))), CheckpointStateError
    )
    given = [os.fspath(directory), max_shard_size]
    rows = share_problem(world, "save_pretrained", problem, given, shares[0].rows() if shares else None)
    share = shares[0]
    share_problem(world, "save_pretrained, the parts of all ranks", guarded(what, lambda: share.check(rows)))
    _write(world, share, Path(directory), rows)
    world.monitor.phase("between steps")


def load_pretrained(
    model: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Loads safetensors files of Hugging Face into a model, each rank those of its stages. Collective.

    A model on "meta" (``with torch.device("meta"): AutoModelForCausalLM.from_config(config)``) gets its values
    at the first call of the compiled model, each rank those of its own stages only; buffers at once. One with
    memory is filled at once; once it is planned, each rank reads what it owns. Values are rounded to the
    model's dtype.

    Args:
        model: Compiled or not, planned or not.
        directory: A directory with `model.safetensors` or `model.safetensors.index.json`, or one of the two.
        strict: If False, load what both have.

    Returns:
        Names that only the model has, and those that only the files have; both empty if ``strict``.

    Raises:
        CheckpointNotFoundError: There is no such directory, or no safetensors files in it.
        CheckpointFileError: A file is missing, truncated or none of this format.
        CheckpointMismatchError: Names, shapes or kinds of dtypes differ; the text has the nearest names.
        UserInputError: A buffer on "meta" is not in the files, and nothing says how it is made.
    """
    root = root_of(model)

    def opened(tensors: ModelTensors) -> TensorReader:
        reader = SafetensorsDirectory(directory)
        groups: dict[str, list[str]] = {}
        for alias, name in tensors.aliases.items():
            groups.setdefault(name, [name]).append(alias)
        return reader.named(_FileForm.of(root, tensors).file_names(reader), groups.values())

    return load_other(
        "load_pretrained",
        directory,
        model,
        None,
        opened,
        strict=strict,
        same_dtypes=False,
        before_tensors=lambda reader: _make_buffers(root, reader),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileForm:
    """How a model's tensors are called in files, and which lie there in another form.

    Attributes:
        whole: all tensors of the model by the names in memory that files have, without memory.
        files: the same by the names in files, in the files' form.
        of_transformers: whether the model is one of transformers.
    """

    root: nn.Module
    whole: Mapping[str, torch.Tensor]
    files: Mapping[str, torch.Tensor]
    of_transformers: bool

    @classmethod
    def of(cls, root: nn.Module, tensors: ModelTensors) -> _FileForm:
        empty = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=_META)
            for name, tensor in tensors.tensors.items()
        }
        # A model of the library has imported it.
        library = sys.modules.get("transformers.modeling_utils")
        if library is None or not isinstance(root, library.PreTrainedModel):
            return cls(root=root, whole=empty, files=dict(empty), of_transformers=False)
        mention_untried(sys.modules["transformers"])

        names = {name: tensors.aliases.get(name, name) for name in (*empty, *tensors.aliases)}
        ignored = set(getattr(root, "_keys_to_ignore_on_save", None) or ())
        state = {name: empty[own] for name, own in names.items() if name not in ignored}
        kept = library.remove_tied_weights_from_state_dict(state, root)
        # A model's own names once more each: a tie that transformers does not know leaves several.
        once = {id(tensor): name for name, tensor in reversed(kept.items())}
        whole = {name: kept[name] for name in kept if once[id(kept[name])] == name}
        return cls(root=root, whole=whole, files=_as_in_files(root, whole), of_transformers=True)

    def name_of(self, aliases: Mapping[str, str]) -> dict[str, str]:
        """First name of a tensor → its name in ``whole``."""
        return {aliases.get(name, name): name for name in self.whole}

    def in_files(self, share: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Some of the tensors, by the names in ``whole``, in the files' form."""
        return _as_in_files(self.root, share) if self.of_transformers else dict(share)

    def file_names(self, reader: SafetensorsDirectory) -> dict[str, str]:
        """Names of the model → names in files, where they may differ.

        Raises:
            CheckpointMismatchError: A tensor lies in the files in another form than in memory.
        """
        there = set(reader.keys)
        same = {id(tensor): key for key, tensor in self.files.items()}
        found = {}
        prefix = getattr(self.root, "base_model_prefix", "") if self.of_transformers else ""
        is_base = bool(prefix) and not hasattr(self.root, prefix)
        for name, tensor in self.whole.items():
            key = same.get(id(tensor))
            if key is None and (name in self.files or name not in there):
                raise CheckpointMismatchError(
                    f"{name!r} of {type(self.root).__name__} lies in files of transformers in another form "
                    "than in memory",
                    cure="build the model with from_pretrained on every rank before torch.compile: its first "
                    "call leaves each rank its own stages.",
                )
            key = key or name
            if prefix and key not in there:
                # Files of the model without its head, or a model without the files' head.
                other = f"{prefix}.{key}" if is_base else key.removeprefix(f"{prefix}.")
                key = other if other in there else key
            if key != name:
                found[name] = key
        return found


def _as_in_files(root: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(root, dict(state)))  # type: ignore[arg-type]


@dataclass(slots=True, kw_only=True)
class _Share:
    """What one rank writes: tensors by the names in files, divided into files."""

    rank: int
    root: nn.Module
    form: _FileForm
    shards: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, world: World, root: nn.Module, most_bytes: int) -> _Share:
        session = REGISTRY.of(root)
        table = None if session is None else session.table
        tensors = ModelTensors.of(root, table, world.size)
        own = tensors_to_write(tensors, tensors.writers(planned=table is not None), world.rank)
        form = _FileForm.of(root, tensors)
        name_of = form.name_of(tensors.aliases)
        own = {name_of[name]: tensor for name, tensor in own.items() if name in name_of}
        share = cls(rank=world.rank, root=root, form=form)
        num_bytes = most_bytes + 1
        for key, tensor in form.in_files(own).items():
            if num_bytes + tensor.nbytes > most_bytes:
                share.shards.append({})
                num_bytes = 0
            share.shards[-1][key] = tensor
            num_bytes += tensor.nbytes
        return share

    def rows(self) -> list[list[Any]]:
        """For each file of this rank: names, shapes and bytes of its tensors."""
        return [[[key, list(t.shape), t.nbytes] for key, t in shard.items()] for shard in self.shards]

    def check(self, rows: Sequence[Sequence[Any]]) -> None:
        """Whether all ranks' files together are what one process would write.

        Raises:
            CheckpointStateError: They are not.
        """
        found = {key: shape for rank in rows for shard in rank for key, shape, _ in shard}
        expected = {key: list(tensor.shape) for key, tensor in self.form.files.items()}
        num_found = sum(len(shard) for rank in rows for shard in rank)
        if found != expected or num_found != len(expected):
            odd = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
            raise CheckpointStateError(
                f"weights of {type(self.root).__name__} that files have together, as "
                f"{odd[0] if odd else 'several'!r}, are on different ranks",
                cure="call model.save_pretrained(directory) on all ranks, which gathers the model on rank 0.",
            )


def _write(world: World, share: _Share, directory: Path, rows: Sequence[Sequence[Any]]) -> None:
    """Files under other names first; then rank 0 gives them their names, and the index its content."""
    disk, what = Disk(), f"the model cannot be saved in {shown(str(directory))}"
    plan: list[Any] = []
    problem = None
    if world.rank == 0:

        def begin() -> None:
            disk.make_directory(directory)
            token, count = secrets.token_hex(4), sum(map(len, rows))
            names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
            if any((directory / name).exists() for name in names):
                # Never over files that an index refers to.
                names = [name.replace("model-", f"model-{token}-") for name in names]
            plan.extend([token, [WEIGHTS_FILE] if count == 1 else names])

        problem = guarded(what, begin)
    share_problem(world, "save_pretrained, the directory", problem)
    token, names = world.control.broadcast(plan, what="names of files")
    first = sum(len(rank) for rank in rows[: world.rank])
    mine = [f".{token}-{name}" for name in names[first : first + len(share.shards)]]

    def write() -> None:
        require_seen(directory)
        for name, shard in zip(mine, share.shards, strict=True):
            host = {key: plain_memory(tensor.to("cpu")) for key, tensor in shard.items()}
            disk.write_tensors(directory / name, host)
            disk.sync(directory / name)

    try:
        share_problem(world, "save_pretrained, writing", guarded(what, write))
        problem = (
            guarded(what, lambda: _publish(disk, share, directory, token, names, rows))
            if world.rank == 0
            else None
        )
        share_problem(world, "save_pretrained, the end", problem)
    except RanncError:
        for name in mine:
            guarded("removing what was written", functools.partial(disk.remove, directory / name))
        raise


def _publish(
    disk: Disk,
    share: _Share,
    directory: Path,
    token: str,
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
) -> None:
    old = [
        entry.name
        for entry in directory.iterdir()
        if _SHARD.fullmatch(entry.name) and entry.name not in names
    ]
    _write_configuration(disk, share, directory, token)
    if len(names) > 1:
        for name in names:
            disk.rename(directory / f".{token}-{name}", directory / name)
        index = directory / f".{token}-{WEIGHTS_INDEX_FILE}"
        disk.write(index, _index(rows, names))
        disk.sync(index)
        disk.sync(directory)
        disk.rename(index, directory / WEIGHTS_INDEX_FILE)
        old.append(WEIGHTS_FILE)
    else:
        disk.rename(directory / f".{token}-{WEIGHTS_FILE}", directory / WEIGHTS_FILE)
        old.append(WEIGHTS_INDEX_FILE)
    disk.sync(directory)
    for name in old:
        disk.remove(directory / name)


def _index(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> bytes:
    shards = [shard for rank in rows for shard in rank]
    weights = {key: name for name, shard in zip(names, shards, strict=True) for key, _, _ in shard}
    sizes = {"total_size": sum(num_bytes for shard in shards for _, _, num_bytes in shard)}
    return json.dumps({"metadata": sizes, "weight_map": weights}, indent=2, sort_keys=True).encode() + b"\n"


def _write_configuration(disk: Disk, share: _Share, directory: Path, token: str) -> None:
    if not share.form.of_transformers:
        return
    root: Any = share.root
    folder = directory / f".{token}-configuration"
    disk.make_directory(folder)
    try:
        # As `PreTrainedModel.save_pretrained` does.
        config = copy.deepcopy(root.config)
        config.dtype = str(root.dtype).removeprefix("torch.")
        config.architectures = [type(root).__name__]
        config.save_pretrained(folder)
        if callable(getattr(root, "can_generate", None)) and root.can_generate():
            root.generation_config.save_pretrained(folder)
        for entry in sorted(folder.iterdir()):
            disk.sync(entry)
            disk.rename(entry, directory / entry.name)
    finally:
        disk.remove(folder)


def _save_adapters(world: World, root: Any, directory: Path) -> None:
    import peft

    mention_untried(peft)
    session = REGISTRY.of(root)
    table = None if session is None else session.table
    what = f"the adapters cannot be saved in {shown(str(directory))}"
    named: list[tuple[str, torch.Tensor]] = []

    def find() -> None:
        tensors = dict([*root.named_parameters(remove_duplicate=False), *root.named_buffers()])
        empty = {name: torch.empty(t.shape, dtype=t.dtype, device=_META) for name, t in tensors.items()}
        used = {
            id(tensor)
            for adapter in root.peft_config
            for tensor in peft.get_peft_model_state_dict(root, dict(empty), adapter_name=adapter).values()
        }
        named.extend((name, tensors[name]) for name, tensor in empty.items() if id(tensor) in used)

    share_problem(world, "save_pretrained", guarded(what, find, CheckpointStateError), [str(directory)])
    if table is None:
        state = {name: tensor.detach().cpu() for name, tensor in named}
    else:
        state = table.full_state(named, on_all_ranks=False)
    problem = (
        guarded(what, lambda: type(root).save_pretrained(root, os.fspath(directory), state_dict=state))
        if world.rank == 0
        else None
    )
    share_problem(world, "save_pretrained, the end", problem)


def _make_buffers(root: nn.Module, reader: TensorReader) -> None:
    """Buffers on "meta" get values on every rank: the files', else those that the model's own code makes."""
    saved, device = set(reader.names), bootstrap.start().device
    made: dict[int, torch.Tensor] = {}
    for name, buffer in root.named_buffers():
        if buffer.is_meta:
            recorded = recorded_source(buffer)
            if name in saved:
                value = reader.tensor(name).to(buffer.dtype)
            elif recorded is not None:
                value = recorded.value(recorded.key_of(buffer), recorded.seed)
            else:
                value = _initial_value(root, name)
            made[id(buffer)] = value.to(device)
    for module in root.modules():
        for local, own in module._buffers.items():
            if own is not None and id(own) in made:
                module._buffers[local] = made[id(own)]


def _initial_value(root: nn.Module, name: str) -> torch.Tensor:
    """A buffer as transformers' `_init_weights`, or `reset_parameters`, makes it.

    Raises:
        UserInputError: Neither gives it a value.
    """
    path, _, local = name.rpartition(".")
    module = root.get_submodule(path)
    parts = path.split(".") if path else []
    above = (root.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1))
    owner: Any = next((each for each in above if callable(getattr(each, "_init_weights", None))), None)
    if owner is None and callable(getattr(module, "reset_parameters", None)):
        return reset_values(module, path, 0)[local]
    values = [] if owner is None else [_after_init(owner, module, path, fill)[local] for fill in (0, 1)]
    # What was there before is seen where nothing was written.
    if not values or not torch.equal(values[0].nan_to_num(), values[1].nan_to_num()):
        raise UserInputError(
            f"buffer {name!r} is on 'meta' and not in the files, and nothing says how it is made",
            cure="build the model under `with rannc_backend.DistributeModelParams():`, which remembers how "
            "buffers are made.",
        )
    return values[0]


def _after_init(owner: Any, module: nn.Module, path: str, fill: int) -> dict[str, torch.Tensor]:
    alone: Any = copy.copy(module)
    alone.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=_META), False)
        for name, p in module._parameters.items()
    }
    alone.__dict__["_buffers"] = {
        name: None if b is None else torch.full(b.shape, fill, dtype=b.dtype, device="cpu")
        for name, b in module._buffers.items()
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        seed_generator(path)
        owner._init_weights(alone)
    buffers: dict[str, torch.Tensor] = alone._buffers
    return buffers


def _num_bytes(size: int | str) -> int:
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is not None:
        base = 1024 if match["binary"] else 1000
        num_bytes = int(float(match["number"]) * base ** " KMGT".index(match["unit"].upper() or " "))
    else:
        num_bytes = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if num_bytes < 1:
        raise UserInputError(
            f"max_shard_size={size!r} was given to save_pretrained",
            cure="give a number of bytes, or a text as '5GB' or '500MiB'.",
        )
    return num_bytes
