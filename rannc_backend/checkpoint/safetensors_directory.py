"""Reads safetensors files of other libraries tensor by tensor: one file, or several and an index beside them.

In: a file, an index (`model.safetensors.index.json`, as Hugging Face writes it), or a directory with either.
Out: tensors by name. Nothing in these files is code; the format's own checks find torn files, there are no
checksums. Not collective.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rannc_backend.checkpoint.manifest import (
    MANIFEST_FILE,
    MAX_INDEX_BYTES,
    WEIGHTS_INDEX_FILE,
    OptimizerRecord,
)
from rannc_backend.errors import CheckpointFileError, CheckpointMismatchError, CheckpointNotFoundError
from rannc_backend.errors.base import did_you_mean, nearest, shown
from rannc_backend.settings.user_files import UserFile, kind_of, names_in, read_text, require_file

WEIGHTS_FILE = "model.safetensors"
_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".index.json"
_GET_AGAIN = "get or save the file again: it is torn, or no safetensors file."
_MAX_OPEN_FILES = 8
_SHOWN = 8


class SafetensorsDirectory:
    """Tensors of safetensors files; a `TensorReader` without optimizers.

    Args:
        path: A file, an index, or a directory with `model.safetensors` or `model.safetensors.index.json`.
        named_by: What named the path, for errors.

    Attributes:
        aliases: Further names of tensors that are there under one; see `named`.

    Raises:
        CheckpointNotFoundError: There is no such file or directory, or nothing of this kind in it.
        CheckpointFileError: A file cannot be read, or the index is none.
    """

    def __init__(self, path: str | os.PathLike[str], named_by: str = "") -> None:
        self.path = Path(path)
        self.aliases: dict[str, str] = {}
        self.optimizers: Sequence[OptimizerRecord] = ()
        self._open: dict[str, Any] = {}
        self._described: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._key_of: dict[str, str] = {}
        self._folder, first = _found(self.path, named_by)
        if first.endswith(_INDEX_SUFFIX):
            self._file_of = _weight_map(self._folder / first)
            self._require_all()
        else:
            self._file_of = dict.fromkeys(self._keys_in(first), first)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, further names of tied ones included."""
        taken = set(self._key_of.values())
        return (*self._key_of, *(key for key in self._file_of if key not in taken), *self.aliases)

    @property
    def keys(self) -> tuple[str, ...]:
        """As `names`, without further names."""
        return tuple(self._file_of)

    def named(self, key_of: Mapping[str, str], tied: Iterable[Sequence[str]]) -> SafetensorsDirectory:
        """Let tensors be asked for by a model's names.

        Args:
            key_of: A model's name → the name in the files, where they differ.
            tied: Groups of the model's names that are one tensor. Where a group's first name is not in the
                files, another one stands for it.

        Raises:
            CheckpointMismatchError: The files have other values under two names of one tensor.
        """
        self._key_of = {
            name: key for name, key in key_of.items() if key in self._file_of and name not in self._file_of
        }
        known = set(self.names)
        for group in tied:
            there = [name for name in group if name in known]
            for name in there[1:]:
                if not torch.equal(self.mapped(there[0]), self.mapped(name)):
                    raise CheckpointMismatchError(
                        f"{there[0]!r} and {name!r} are one tensor in the model, and have different values in "
                        f"{str(self.path)!r}",
                        cure="build the model without that tie (tie_word_embeddings=False).",
                    )
            if there:
                self.aliases.update({name: there[0] for name in group if name not in known})
        return self

    def optimizer_values(self, number: int) -> Mapping[str, Mapping[str, Any]]:
        """Nothing: there are no optimizers."""
        return {}

    def file_of(self, key: str) -> str:
        """Name of the file that a tensor is in."""
        return self._file_of[self._key(key)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, by any of its names."""
        return self._description(name)[0]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, by any of its names."""
        return self._description(name)[1]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, in memory of its own on the CPU.

        Raises:
            CheckpointMismatchError: There is none of that name.
            CheckpointFileError: Its file cannot be read.
        """
        return self.mapped(name).clone()

    def mapped(self, name: str) -> torch.Tensor:
        """As `tensor`, but in the memory of the file: to copy from at once, not to keep."""
        key = self._key(name)
        tensor: torch.Tensor = self._read(self._file_of[key], lambda file: file.get_tensor(key))
        return tensor

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Elements ``slices`` of a tensor."""
        return self.mapped(name)[slices].clone()

    def _description(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        key = self._key(name)
        if key not in self._described:
            tensor = self.mapped(name)
            self._described[key] = tuple(tensor.shape), tensor.dtype
        return self._described[key]

    def _key(self, name: str) -> str:
        name = self.aliases.get(name, name)
        key = self._key_of.get(name, name)
        if key not in self._file_of:
            raise CheckpointMismatchError(
                f"{str(self.path)!r} has no tensor {name!r}",
                cure=f"{did_you_mean(nearest(name, self._file_of))}build the model that was saved, or load "
                "with strict=False.",
            )
        return key

    def _keys_in(self, name: str) -> list[str]:
        keys: list[str] = self._read(name, lambda file: list(file.keys()))
        return keys

    def _require_all(self) -> None:
        for name in dict.fromkeys(self._file_of.values()):
            there = set(self._keys_in(name))
            if missing := [key for key, file in self._file_of.items() if file == name and key not in there]:
                raise _torn(
                    self._folder / name, f"it has no tensor {missing[0]!r}, which the index says is in it"
                )

    def _read(self, name: str, read: Callable[[Any], Any]) -> Any:
        path = self._folder / name
        if name not in self._open:
            while len(self._open) >= _MAX_OPEN_FILES:
                del self._open[next(iter(self._open))]
            self._open[name] = _opened(path)
        return _or_torn(path, lambda: read(self._open[name]))


def _opened(path: Path) -> Any:
    # It may be a link that leads elsewhere, as those of the hub's cache are.
    require_file(UserFile(path=path, what="parameters", error=CheckpointFileError, cure=_GET_AGAIN))
    return _or_torn(path, lambda: safe_open(path, framework="pt"))


def _or_torn(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise _torn(path, str(error)) from None


def _torn(path: Path, problem: str) -> CheckpointFileError:
    return CheckpointFileError(
        f"cannot read the file {str(path)!r}: {problem}",
        cure=_GET_AGAIN,
    )


def _found(path: Path, named_by: str) -> tuple[Path, str]:
    """The folder, and the name of the file to begin with."""
    cure = "give a safetensors file, or a directory with one or with an index."
    named = UserFile(
        path=path, what="parameters", named_by=named_by, error=CheckpointNotFoundError, cure=cure
    )
    kind = kind_of(named)
    if kind == "a file":
        return path.parent, path.name
    if kind != "a directory":
        raise named.failed("cannot read the", f"it is {kind}" if kind else "there is nothing of that name")
    there = names_in(named)
    if MANIFEST_FILE in there:
        # Optimizers' files and checksums are beside: the better way to the same tensors.
        named = replace(named, cure="load it with rannc_backend.load_checkpoint.")
        raise named.failed("cannot read the", "it is a checkpoint of rannc_backend.save_checkpoint")
    for name in (WEIGHTS_FILE, WEIGHTS_INDEX_FILE):
        if name in there:
            return path, name
    listing = ", ".join(there[:_SHOWN]) or "nothing"
    pickled = [name for name in there if name.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        named = replace(
            named, cure="load these files in one process, and save the model again with safetensors."
        )
    raise named.failed(
        "cannot read the", f"there is neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE} in it, but {listing}"
    )


def _weight_map(path: Path) -> dict[str, str]:
    file = UserFile(
        path=path, what="index", error=CheckpointFileError, cure="get or save the directory again."
    )
    text = read_text(file, MAX_INDEX_BYTES)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise file.failed("cannot read the", "it is not JSON") from None
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise file.failed("cannot read the", "it has no weight_map from names to files")
    for name in dict.fromkeys(weight_map.values()):
        if name != os.path.basename(name) or not name.endswith(_SUFFIX):
            raise file.failed("cannot read the", f"{shown(name)} is no safetensors file in its directory")
    return weight_map
