"""Descriptions of clusters as TOML: read, checked, written, and those that come with the package.

In: a name or a path, and how many devices a plan is for. Out: a `Cluster`, or an error that names file, key
and range.
Terms: a *number* in a file is plain (`8`) or cited (`{ value = 8, source = "datasheet, table, row" }`); an
*efficiency* is the share of a peak that is reached. A file is data from anywhere: nothing in it is trusted,
and nothing in it runs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from rannc_backend.errors import ClusterFileError
from rannc_backend.errors.base import did_you_mean, error_about, nearest
from rannc_backend.ir.plan import SIGNIFICANT_DIGITS, DeviceKind
from rannc_backend.planner.cluster.cluster import HOST_BYTES_PER_SECOND, SHARES, Cluster, Device, Link
from rannc_backend.settings.user_files import UserFile, kind_of, read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMAT = 1
MAX_FILE_BYTES = 1024 * 1024
MAX_DEVICES = 1_000_000
# Known only on the machine at hand, so a name but not a file.
LOCAL = "local"


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


def _number(low: float, high: float) -> BeforeValidator:
    # No more digits than a plan keeps, so that a cluster is the same one when it comes back from a plan.
    return BeforeValidator(lambda value: _rounded(_checked(value, (int, float), "a number", low, high)))


def _rounded(value: float) -> float:
    return float(f"{float(value):.{SIGNIFICANT_DIGITS}g}")


def _count(low: int, high: int) -> BeforeValidator:
    return BeforeValidator(lambda value: _checked(value, (int,), "a whole number", low, high))


def _checked(value: Any, types: tuple[type, ...], words: str, low: float, high: float) -> Any:
    """The number in a plain or cited number. One message for all that can be wrong with it: what it should
    be.
    """
    if (
        isinstance(value, dict)
        and "value" in value
        and set(value) <= {"value", "source"}
        and isinstance(value.get("source", ""), str)
    ):
        value = value["value"]
    number: Any = value
    # bool is an int to Python; NaN is in no range.
    if isinstance(value, bool) or not isinstance(value, types) or not low <= number <= high:
        raise PydanticCustomError("number", f"{words} from {low:g} to {high:g}")
    return value


# Above 1 where a rate is that of memory and a class works out of the caches.
_Share = Annotated[float, _number(*SHARES)]
_Words = Annotated[str, Field(min_length=1, max_length=256)]
_DtypeName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]


class _EfficiencyTable(_Table):
    matmul: _Share = 1.0
    attention: _Share = 1.0
    convolution: _Share = 1.0
    elementwise: _Share = 1.0


class _LinkTable(_Table):
    latency_seconds: Annotated[float, _number(0.0, 10.0)]
    bytes_per_second: Annotated[float, _number(1e3, 1e15)]
    message_efficiency: _Share = 1.0
    allreduce_efficiency: _Share = 1.0

    def link(self) -> Link:
        return Link(
            latency_seconds=self.latency_seconds,
            bytes_per_second=_rounded(self.bytes_per_second * self.message_efficiency),
            allreduce_share=_rounded(self.allreduce_efficiency / self.message_efficiency),
        )


class _LinksTable(_Table):
    intra_node: _LinkTable
    inter_node: _LinkTable


def _some_rates(rates: dict[str, float]) -> dict[str, float]:
    if not 1 <= len(rates) <= 32:
        raise PydanticCustomError("rates", "rates of 1 to 32 dtypes")
    return rates


class _DeviceTable(_Table):
    name: _Words
    kind: DeviceKind = "cuda"
    core_share: Annotated[float, _number(1e-3, 1.0)] = 1.0
    communicator_bytes: Annotated[int, _count(0, 2**40)] = 0
    host_bytes_per_second: Annotated[float, _number(1e6, 1e15)] = HOST_BYTES_PER_SECOND
    memory_bytes: Annotated[int, _count(2**20, 2**50)]
    memory_bytes_per_second: Annotated[float, _number(1e6, 1e15)]
    launch_seconds: Annotated[float, _number(0.0, 1.0)]
    peak_flops: Annotated[dict[_DtypeName, Annotated[float, _number(1e6, 1e20)]], AfterValidator(_some_rates)]
    efficiency: _EfficiencyTable = _EfficiencyTable()


class _ClusterTable(_Table):
    format: Literal[1]
    name: _Words
    description: Annotated[str, Field(max_length=1024)] = ""
    nodes: Annotated[int, _count(0, MAX_DEVICES)] = 0  # 0: as many as a plan needs
    devices_per_node: Annotated[int, _count(1, MAX_DEVICES)]
    device: _DeviceTable
    links: _LinksTable


def shipped_clusters() -> tuple[str, ...]:
    """Names of the descriptions that come with the package."""
    return tuple(
        sorted(
            entry.name.removesuffix(".toml") for entry in _shipped().iterdir() if entry.name.endswith(".toml")
        )
    )


def load_cluster(name_or_path: str, num_devices: int, devices_per_node: int | None = None) -> Cluster:
    """The shipped cluster of that name, or the one a TOML file describes, with `num_devices` devices.

    Args:
        devices_per_node: in place of the description's own.

    Raises:
        ClusterFileError: there is no such description, it is wrong, or it has fewer devices than that.
    """
    if name_or_path in shipped_clusters():
        text, file = _shipped().joinpath(f"{name_or_path}.toml").read_text(encoding="utf-8"), name_or_path
    elif name_or_path == LOCAL:
        raise ClusterFileError(
            LOCAL,
            problem="is measured by the ranks of a job and stands in no file",
            cure=f"name one with --cluster (RANNC_CLUSTER): {', '.join(shipped_clusters())}, or the path of a TOML file.",
        )
    else:
        text, file = _read(name_or_path), name_or_path
    return parse_cluster(text, file=file, num_devices=num_devices, devices_per_node=devices_per_node)


def parse_cluster(text: str, *, file: str, num_devices: int, devices_per_node: int | None = None) -> Cluster:
    """A cluster from TOML text. `file`: what an error calls it.

    Raises:
        ClusterFileError: see `load_cluster`.
    """
    table = _table(text, file)
    cluster = Cluster(
        name=table.name,
        num_devices=num_devices,
        devices_per_node=devices_per_node or table.devices_per_node,
        device=Device(
            name=table.device.name,
            memory_bytes=table.device.memory_bytes,
            flops_per_second=tuple(sorted(table.device.peak_flops.items())),
            memory_bytes_per_second=table.device.memory_bytes_per_second,
            launch_seconds=table.device.launch_seconds,
            efficiencies=tuple(sorted(table.device.efficiency.model_dump().items())),
            kind=table.device.kind,
            core_share=table.device.core_share,
            communicator_bytes=table.device.communicator_bytes,
            host_bytes_per_second=table.device.host_bytes_per_second,
        ),
        intra_node=table.links.intra_node.link(),
        inter_node=table.links.inter_node.link(),
    )
    if table.nodes and num_devices > table.nodes * cluster.devices_per_node:
        raise ClusterFileError(
            file,
            key="nodes",
            problem=f"{table.nodes} node(s) of {cluster.devices_per_node} device(s) are fewer than the "
            f"{num_devices} devices asked for",
            cure="plan for fewer devices, or leave nodes out of the description for as many as are needed.",
        )
    return cluster


def cluster_toml(cluster: Cluster, *, description: str = "", sources: Mapping[str, str] | None = None) -> str:
    """A cluster as TOML that `parse_cluster` reads back as the same one.

    Args:
        sources: where the numbers of "device", "intra_node" and "inter_node" are from; none: not said.
    """
    device = cluster.device
    number = _writer((sources or {}).get("device", ""))
    assumed = "as a shipped description, not measured" if sources else ""
    lines = [
        f"format = {FORMAT}",
        f"name = {_quoted(cluster.name)}",
        f"description = {_quoted(description)}",
        f"devices_per_node = {cluster.devices_per_node}",
        "",
        "[device]",
        f"name = {_quoted(device.name)}",
        f"kind = {_quoted(device.kind)}",
        f"memory_bytes = {number(device.memory_bytes)}",
        f"memory_bytes_per_second = {number(device.memory_bytes_per_second)}",
        f"launch_seconds = {number(device.launch_seconds)}",
        f"core_share = {number(device.core_share)}",
        f"communicator_bytes = {_writer(assumed)(device.communicator_bytes)}",
        f"host_bytes_per_second = {_writer(assumed)(device.host_bytes_per_second)}",
        "",
        "[device.peak_flops]",
        *(f"{dtype} = {number(rate)}" for dtype, rate in device.flops_per_second),
        "",
        "[device.efficiency]",
        *(f"{name} = {number(share)}" for name, share in device.efficiencies),
    ]
    for name, link in (("intra_node", cluster.intra_node), ("inter_node", cluster.inter_node)):
        number = _writer((sources or {}).get(name, ""))
        lines += [
            "",
            f"[links.{name}]",
            f"latency_seconds = {number(link.latency_seconds)}",
            f"bytes_per_second = {number(link.bytes_per_second)}",
            f"allreduce_efficiency = {number(link.allreduce_share)}",
        ]
    return "\n".join(lines) + "\n"


def _writer(source: str) -> Callable[[float], str]:
    return lambda value: f"{{ value = {value!r}, source = {_quoted(source)} }}" if source else repr(value)


def _quoted(text: str) -> str:
    # JSON's strings are TOML's, but for surrogate pairs and for one control character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _shipped() -> Any:
    return resources.files("rannc_backend.planner.cluster").joinpath("clusters")


def _read(path: str) -> str:
    looks_like_name = os.sep not in path and not path.endswith(".toml")
    hint = did_you_mean(nearest(path, shipped_clusters())) if looks_like_name else ""
    cure = f"{hint}Shipped are {', '.join(shipped_clusters())}; {LOCAL} is measured; or give the path of a TOML file."
    file = UserFile(
        path=path,
        what="cluster",
        named_by="option cluster",
        error=partial(error_about, ClusterFileError, path),
        cure=cure,
    )
    if not kind_of(file):
        problem = "is neither a shipped cluster nor a file that can be read (No such file or directory)"
        raise ClusterFileError(path, problem=problem, cure=cure)
    return read_text(file, MAX_FILE_BYTES)


def _table(text: str, file: str) -> _ClusterTable:
    try:
        values = tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # TOMLDecodeError is a ValueError, and so are too many digits
        raise ClusterFileError(
            file, problem=f"is not TOML: {error}", cure="see docs/planning.md for an example."
        ) from None
    try:
        return _ClusterTable.model_validate(values)
    except (ValidationError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise ClusterFileError(
                file, problem="is nested too deeply", cure="see docs/planning.md for an example."
            ) from None
        raise _file_error(file, values, error.errors(include_url=False)) from None


def _file_error(file: str, values: Mapping[str, Any], errors: Sequence[Any]) -> ClusterFileError:
    # The order of pydantic's errors is that of the fields; the first is as good as any, and one is enough to
    # act on.
    first = errors[0]
    key = ".".join(str(part) for part in first["loc"] if part != "[key]")
    if first["type"] == "extra_forbidden":
        keys = _keys_at(first["loc"][:-1])
        near = did_you_mean(nearest(str(first["loc"][-1]), keys))
        known = (
            f"the keys here are {', '.join(keys)}"
            if keys
            else "a number is plain or { value = ..., source = ... }"
        )
        cure = f"{near}Leave it out otherwise; {known}." if near else f"leave it out; {known}."
        return ClusterFileError(file, key=key, problem="is not a key of a description", cure=cure)
    if first["type"] == "missing":
        return ClusterFileError(
            file, key=key, problem="is missing", cure="add it; docs/planning.md lists the keys."
        )
    value = repr(first["input"])
    shown = value if len(value) <= 60 else f"{value[:57]}..."
    return ClusterFileError(
        file, key=key, problem=f"has the bad value {shown}", cure=f"give {_expected(first)}."
    )


def _expected(error: Any) -> str:
    if error["type"] == "string_pattern_mismatch":
        return "the name of a dtype, as bfloat16"
    text: str = error["msg"].removeprefix("Input should be ").removeprefix("Input should ")
    return f"{text[:1].lower()}{text[1:]}"


def _keys_at(location: Sequence[Any]) -> list[str]:
    model: Any = _ClusterTable
    for part in location:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        model = field.annotation if field is not None else None
    return list(getattr(model, "model_fields", ()))


def read_cluster(path: Path, num_devices: int) -> Cluster:
    """The cluster that a file describes, as `cluster_toml` wrote it."""
    return parse_cluster(_read(str(path)), file=str(path), num_devices=num_devices)
