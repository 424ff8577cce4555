"""What a checkpoint says of itself: two JSON files, checked when they are read, from which nothing is run.

In: bytes. Out: frozen records, or errors that say what is wrong with which file.

Terms. A *part* is what one rank wrote: its tensor files and what belongs to its process. `index.json` holds
the parts; `checkpoint.json`, the *manifest*, is written last and vouches for the other JSON files by size and
checksum. A tensor's *key* is the parameter's or buffer's name, or `optimizer/<number of the
optimizer>/<parameter's name>/<name of the state>`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from rannc_backend.errors import CheckpointFileError, CheckpointVersionError

SCHEMA_VERSION = 1
MANIFEST_FILE = "checkpoint.json"
INDEX_FILE = "index.json"
PLAN_FILE = "plan.json"
# Names of the tensors' files, as Hugging Face's loaders look for them.
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_INDEX_BYTES = 2**30
OPTIMIZER_PREFIX = "optimizer/"

_FILE_NAME = r"^(model|optimizer)-[0-9]{5}-[0-9]{5}\.safetensors$"

Count = Annotated[int, Field(ge=0, lt=2**63)]
Checksum = Annotated[int, Field(ge=0, lt=2**32)]
Text = Annotated[str, Field(max_length=10_000)]
Parsed = TypeVar("Parsed", bound="Record")


class Record(BaseModel):
    """Frozen, strict, and without room for what is not declared."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Shape = Annotated[tuple[Count, ...], BeforeValidator(_as_tuple), Field(max_length=64)]
Names = Annotated[tuple[Text, ...], BeforeValidator(_as_tuple)]


class FileRecord(Record):
    """A file of the checkpoint that was whole when it had so many bytes."""

    num_bytes: Count
    crc32: Checksum | None = None  # of tensor files each tensor has its own


class TensorRecord(Record):
    """Where a tensor is, and what it is. `dtype`: as "float32"."""

    file: Annotated[str, Field(pattern=_FILE_NAME)]
    dtype: Annotated[str, Field(max_length=40)]
    shape: Shape
    crc32: Checksum


class GroupRecord(Record):
    """A parameter group: names, and the options as `plain_values.encode` writes them."""

    parameters: Names
    options: Mapping[str, JsonValue]


class OptimizerRecord(Record):
    """One optimizer but for its tensors. `values`: by parameter and name of the state, what is no tensor."""

    class_name: Text
    groups: Annotated[tuple[GroupRecord, ...], BeforeValidator(_as_tuple)]
    values: Mapping[Text, Mapping[Text, JsonValue]] = Field(default_factory=dict)


class PartRecord(Record):
    """What one rank wrote. `random`: states of its generators, as `random_state.capture` gives them."""

    rank: Count
    files: Mapping[Annotated[str, Field(pattern=_FILE_NAME)], FileRecord]
    tensors: Mapping[Text, TensorRecord]
    optimizers: Annotated[tuple[OptimizerRecord, ...], BeforeValidator(_as_tuple)]
    random: Mapping[Text, JsonValue]

    @model_validator(mode="after")
    def _check_files(self) -> PartRecord:
        for key, tensor in self.tensors.items():
            if tensor.file not in self.files:
                raise ValueError(f"tensor {key!r} is in {tensor.file!r}, which is not one of the files")
        return self


class Index(Record):
    """All parts, by rank. `aliases`: further names of tied tensors, each with the name under which the tensor
    is kept.
    """

    parts: Annotated[tuple[PartRecord, ...], BeforeValidator(_as_tuple), Field(min_length=1)]
    aliases: Mapping[Text, Text]

    @model_validator(mode="after")
    def _check_parts(self) -> Index:
        if [part.rank for part in self.parts] != list(range(len(self.parts))):
            raise ValueError("the parts are not those of ranks 0, 1, 2, ...")
        keys = [key for part in self.parts for key in part.tensors]
        if len(set(keys)) != len(keys):
            raise ValueError("a tensor is there twice")
        names = [name for part in self.parts for name in part.files]
        if len(set(names)) != len(names):
            raise ValueError("a file is there twice")
        known = set(keys)
        if missing := [alias for alias, name in self.aliases.items() if name not in known or alias in known]:
            raise ValueError(f"{missing[0]!r} is no other name of a tensor that is there")
        return self


class RuntimeRecord(Record):
    """What the backend counts over steps: steps begun, and the gradient that the last backward started
    from.
    """

    num_steps_begun: Count
    loss_gradient: float


class Manifest(Record):
    """See the module docstring. `serial` grows with every checkpoint of a directory: the greatest is the
    latest.
    """

    kind: Literal["rannc checkpoint"] = "rannc checkpoint"
    schema_version: Literal[1] = 1
    serial: Count
    step: Count
    world_size: Annotated[int, Field(ge=1)]
    saved_at: Text
    versions: Mapping[Text, Text]
    model_name: Text
    files: Mapping[Literal["index.json", "plan.json"], FileRecord]
    runtime: RuntimeRecord
    schedulers: JsonValue
    scaler: JsonValue
    extra: JsonValue
    crc32: Checksum = 0  # of this record with 0 here

    @model_validator(mode="after")
    def _check_index(self) -> Manifest:
        if INDEX_FILE not in self.files:
            raise ValueError(f"{INDEX_FILE} is not among the files")
        return self

    def sealed(self) -> Manifest:
        """The same with its checksum."""
        return self.model_copy(update={"crc32": zlib.crc32(to_bytes(self.model_copy(update={"crc32": 0})))})

    @classmethod
    def read(cls, content: bytes) -> Manifest:
        """The manifest in the bytes of its file, checksum included."""
        manifest = parse(cls, content, MANIFEST_FILE)
        if manifest.sealed().crc32 != manifest.crc32:
            raise _invalid(MANIFEST_FILE, "its checksum is another one: it was changed or torn")
        return manifest


def to_bytes(record: Record) -> bytes:
    """A record as JSON; equal records give equal bytes."""
    return (
        json.dumps(
            record.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False
        ).encode()
        + b"\n"
    )


def parse(kind: type[Parsed], content: bytes, name: str) -> Parsed:
    """A record from the bytes of the file ``name``.

    Raises:
        CheckpointVersionError: it is of a later release.
        CheckpointFileError: it is not what `to_bytes` writes.
    """
    try:
        value = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise _invalid(name, "it is not JSON") from None
    if not isinstance(value, dict):
        raise _invalid(name, "it is no JSON object")
    version = value.get("schema_version", SCHEMA_VERSION)
    if value.get("kind") == "rannc checkpoint" and isinstance(version, int) and version > SCHEMA_VERSION:
        raise CheckpointVersionError(
            f"the checkpoint has schema version {version}; this release reads up to {SCHEMA_VERSION}",
            cure="update rannc_backend, or save the checkpoint again with this release.",
        )
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise _invalid(
            name, f"{place[:200] + ': ' if place else ''}{first['msg'].removeprefix('Value error, ')[:300]}"
        ) from None


def _refuse_constant(text: str) -> Any:
    raise ValueError(text)


def _invalid(name: str, problem: str) -> CheckpointFileError:
    return CheckpointFileError(
        f"{name} of the checkpoint is not valid: {problem}", cure="load another checkpoint."
    )
