"""Cluster descriptions: those shipped say what their sources say, any cluster survives its file, no file does
any harm.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.errors import ClusterFileError, RanncError
from rannc_backend.planner.cluster import cluster_file
from rannc_backend.planner.cluster.cluster import OPERATOR_CLASSES, Cluster, Device, Link
from rannc_backend.planner.cluster.cluster_file import (
    cluster_toml,
    load_cluster,
    parse_cluster,
    read_cluster,
    shipped_clusters,
)

ROOT = Path(__file__).parents[5]
FILES = ROOT / "rannc_backend" / "planner" / "cluster" / "clusters"
GOOD = cluster_toml(load_cluster("a100-80gb", 8))

# Read off the datasheets once more, in their units: TFLOPS (bfloat16, float16, float32, float64), GB, GB/s,
# GB/s per direction of NVLink, Gb/s of InfiniBand per GPU. Hopper's tensor rates are printed with sparsity,
# which doubles them.
DATASHEETS = {
    "v100-32gb": ((15.7, 125, 15.7, 7.8), 32, 900, 300 / 2, 4 * 100 / 8),
    "a100-40gb": ((312, 312, 19.5, 19.5), 40, 1555, 600 / 2, 200),
    "a100-80gb": ((312, 312, 19.5, 19.5), 80, 2039, 600 / 2, 200),
    "h100-80gb": ((1979 / 2, 1979 / 2, 67, 67), 80, 3350, 900 / 2, 400),
    "h200-141gb": ((1979 / 2, 1979 / 2, 67, 67), 141, 4800, 900 / 2, 400),
}
RATES = st.floats(min_value=1e6, max_value=1e14).map(lambda value: float(f"{value:.6g}"))
SHARES = st.floats(min_value=0.01, max_value=8.0).map(lambda value: float(f"{value:.6g}"))
SECONDS = st.floats(min_value=0.0, max_value=1.0).map(lambda value: float(f"{value:.6g}"))
NAMES = st.text(min_size=1, max_size=20)


def shipped_values(name: str) -> dict[str, Any]:
    return cluster_file.tomllib.loads((FILES / f"{name}.toml").read_text(encoding="utf-8"))


def numbers(table: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and "value" not in value:
            yield from numbers(value, f"{path}{key}.")
        elif isinstance(value, dict | int | float):
            yield f"{path}{key}", value


def test_the_promised_descriptions_are_shipped() -> None:
    assert (
        shipped_clusters()
        == tuple(sorted([*DATASHEETS, "generic-cpu"]))
        == tuple(sorted(path.stem for path in FILES.iterdir()))
    )


@pytest.mark.parametrize("name", shipped_clusters())
def test_every_shipped_number_says_where_it_is_from(name: str) -> None:
    found = dict(numbers(shipped_values(name)))
    assert found.pop("format") == 1
    assert len(found) == 22, "a number for every key that a description can have, but the number of nodes"
    for key, number in found.items():
        source = number["source"]
        cited = re.match(r"NVIDIA .* datasheet.*, table '.*'.*, row '.*': .*\d", source)
        assert cited or re.match("assumption: .{10,}", source), f"{key}: {source!r}"
        # What a chip or a wire can do at best is on a datasheet; what of it is reached is not.
        if (
            name in DATASHEETS
            and re.search("peak_flops|memory_bytes|bytes_per_second|devices", key)
            and "bfloat16" not in key
            and "host_bytes_per_second" not in key  # what copies reach
        ):
            assert cited, f"{key} is only assumed"


@pytest.mark.parametrize("name", DATASHEETS)
def test_shipped_numbers_are_those_of_the_datasheets(name: str) -> None:
    tflops, memory_gb, memory_gb_per_second, nvlink_gb_per_second, infiniband_gbit = DATASHEETS[name]
    values = shipped_values(name)
    device, links = values["device"], values["links"]
    assert [
        device["peak_flops"][dtype]["value"] / 1e12 for dtype in ("bfloat16", "float16", "float32", "float64")
    ] == pytest.approx(tflops)
    assert device["memory_bytes"]["value"] == memory_gb * 10**9
    assert device["memory_bytes_per_second"]["value"] == memory_gb_per_second * 1e9
    assert links["intra_node"]["bytes_per_second"]["value"] == nvlink_gb_per_second * 1e9
    assert links["inter_node"]["bytes_per_second"]["value"] == infiniband_gbit * 1e9 / 8
    assert values["devices_per_node"]["value"] == 8


@pytest.mark.parametrize("name", DATASHEETS)
def test_what_is_reached_is_less_than_the_peak(name: str) -> None:
    cluster = load_cluster(name, 16)
    assert cluster.name == name and cluster.num_devices == 16 and cluster.devices_per_node == 8
    assert [kind for kind, _ in cluster.device.efficiencies] == sorted(OPERATOR_CLASSES)
    assert all(0.2 < share < 1 for _, share in cluster.device.efficiencies)
    assert cluster.intra_node.latency_seconds < cluster.inter_node.latency_seconds
    assert cluster.intra_node.bytes_per_second > 5 * cluster.inter_node.bytes_per_second
    peaks = {
        key: values["bytes_per_second"]["value"] for key, values in shipped_values(name)["links"].items()
    }
    for link, peak in ((cluster.intra_node, peaks["intra_node"]), (cluster.inter_node, peaks["inter_node"])):
        assert link.bytes_per_second < peak and link.bytes_per_second * link.allreduce_share < peak


def test_the_package_has_the_descriptions_in_it(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("rannc_backend", "passes", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-c",
        "import setuptools; setuptools.setup()",
        "--quiet",
        "build_py",
        "--build-lib",
        "built",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    built = tmp_path / "built" / "rannc_backend" / "planner" / "cluster" / "clusters"
    assert {path.name for path in built.iterdir()} == {path.name for path in FILES.iterdir()}


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    link = st.builds(Link, latency_seconds=SECONDS, bytes_per_second=RATES, allreduce_share=SHARES)
    dtypes = draw(
        st.sets(st.sampled_from(["bfloat16", "float16", "float32", "float64", "float8_e4m3fn"]), min_size=1)
    )
    return Cluster(
        name=draw(NAMES),
        num_devices=draw(st.integers(1, 4096)),
        devices_per_node=draw(st.integers(1, 64)),
        device=Device(
            name=draw(NAMES),
            memory_bytes=draw(st.integers(2**20, 2**50)),
            flops_per_second=tuple((dtype, draw(RATES)) for dtype in sorted(dtypes)),
            memory_bytes_per_second=draw(RATES),
            launch_seconds=draw(SECONDS),
            efficiencies=tuple((kind, draw(SHARES)) for kind in sorted(OPERATOR_CLASSES)),
        ),
        intra_node=draw(link),
        inter_node=draw(link),
    )


@given(clusters(), st.text(max_size=20), st.text(max_size=20))
def test_a_cluster_comes_back_from_its_file(cluster: Cluster, description: str, source: str) -> None:
    text = cluster_toml(cluster, description=description, sources={"device": source, "inter_node": source})
    assert parse_cluster(text, file="f", num_devices=cluster.num_devices) == cluster


@pytest.mark.parametrize(
    ("old", "new", "key", "expected"),
    [
        ("launch_seconds = 5e-06", "launch_seconds = nan", "device.launch_seconds", "a number from 0 to 1"),
        ("launch_seconds = 5e-06", "launch_seconds = -1", "device.launch_seconds", "a number from 0 to 1"),
        ("launch_seconds = 5e-06", "launch_seconds = inf", "device.launch_seconds", "a number from 0 to 1"),
        ("launch_seconds = 5e-06", "launch_seconds = true", "device.launch_seconds", "a number from 0 to 1"),
        ("launch_seconds = 5e-06", 'launch_seconds = "1"', "device.launch_seconds", "a number from 0 to 1"),
        (
            "launch_seconds = 5e-06",
            "launch_seconds = { value = 2 }",
            "device.launch_seconds",
            "a number from 0 to 1",
        ),
        (
            "launch_seconds = 5e-06",
            "launch_seconds = { value = 1, sauce = '' }",
            "device.launch_seconds",
            "a number from 0 to 1",
        ),
        ("launch_seconds = 5e-06", "", "device.launch_seconds", "add it"),
        ("matmul = 0.7", "matmul = 0", "device.efficiency.matmul", "a number from 0.001 to 16"),
        (
            "matmul = 0.7",
            "softmax = 1",
            "device.efficiency.softmax",
            "matmul, attention, convolution, elementwise",
        ),
        (
            "bfloat16 = ",
            f"bfloat16 = 1{'0' * 400} #",
            "device.peak_flops.bfloat16",
            "a number from 1e+06 to 1e+20",
        ),
        ("bfloat16 = ", "BF16 = ", "device.peak_flops.BF16", "dtype"),
        ("memory_bytes = 80", "memory_bytes = 0.5 #", "device.memory_bytes", "a whole number from"),
        ("devices_per_node = 8", "devices_per_node = 0", "devices_per_node", "a whole number from 1"),
        ("devices_per_node = 8", "devices_per_node = 8\nracks = 2", "racks", "nodes, devices_per_node"),
        ("devices_per_node = 8", "devices_per_node = 8\nnodes = 1", "nodes", "fewer devices"),
        ("[device]\n", "[devise]\n", "device.name", "add it"),
        ('name = "a100-80gb"', 'name = ""', "name", "at least 1 character"),
        ("format = 1", "format = 2", "format", "give 1"),
        (
            "[links.intra_node]",
            "[links.intra_node]\ncolour = 1",
            "links.intra_node.colour",
            "latency_seconds",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_range(old: str, new: str, key: str, expected: str) -> None:
    assert old in GOOD
    with pytest.raises(ClusterFileError) as caught:
        parse_cluster(GOOD.replace(old, new, 1), file="my.toml", num_devices=9)
    assert caught.value.file == "my.toml" and caught.value.key == key
    assert (
        expected in str(caught.value)
        and f"my.toml: {key} " in str(caught.value)
        and len(str(caught.value)) < 500
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "format = 1",
        "a = " + "[" * 5000,
        "a" + ".a" * 5000 + " = 1",
        f"format = {'9' * 5000}",
        "[device]\n[device]",
        "format = 1\n" * 2,
    ],
)
def test_text_that_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(ClusterFileError, match="my.toml"):
        parse_cluster(text, file="my.toml", num_devices=1)


VALUES = st.recursive(
    st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=5), st.just(10**400)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["value", "source", "x"]), inner, max_size=3),
    ),
    max_leaves=6,
)


def toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return repr(value.encode("unicode_escape").decode()).replace("\\", "") if value else "''"
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + " }"
    return str(value)


@given(st.data())
def test_a_value_of_any_kind_is_taken_or_refused_in_words(data: st.DataObject) -> None:
    lines = GOOD.splitlines()
    index = data.draw(st.sampled_from([number for number, line in enumerate(lines) if " = " in line]))
    lines[index] = f"{lines[index].split(' = ')[0]} = {toml_value(data.draw(VALUES))}"
    try:
        cluster = parse_cluster("\n".join(lines), file="my.toml", num_devices=4)
    except RanncError as error:
        assert isinstance(error, ClusterFileError) and "What to change" in str(error)
    else:
        assert cluster.device.rate("float32") > 0 and cluster.device.memory_rate() < float("inf")


@given(st.data())
def test_a_damaged_file_is_taken_or_refused_in_words(data: st.DataObject) -> None:
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(GOOD)), st.integers(0, len(GOOD)))))
    damaged = GOOD[:start] + data.draw(st.text(max_size=10)) + GOOD[min(end, start + 30) :]
    try:
        parse_cluster(damaged, file="my.toml", num_devices=4)
    except RanncError as error:
        assert isinstance(error, ClusterFileError)


def test_a_file_is_found_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(GOOD.replace('"a100-80gb"', '"ours"'), encoding="utf-8")
    assert load_cluster(str(path), 24, 4) == read_cluster(path, 24).__class__(
        name="ours",
        num_devices=24,
        devices_per_node=4,
        device=load_cluster("a100-80gb", 1).device,
        intra_node=load_cluster("a100-80gb", 1).intra_node,
        inter_node=load_cluster("a100-80gb", 1).inter_node,
    )


def test_names_that_nobody_has(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match="did you mean 'a100-80gb'"):
        load_cluster("a100-80", 8)
    with pytest.raises(ClusterFileError, match="measured by the ranks"):
        load_cluster("local", 8)
    for path in (str(tmp_path), str(tmp_path / "none.toml"), "\0", "../clusters/a100-80gb", ""):
        with pytest.raises(ClusterFileError, match="Shipped are"):
            load_cluster(path, 8)


def test_files_that_are_no_text_or_too_long(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterFileError, match="UTF-8"):
        load_cluster(str(path), 8)
    with open(path, "wb") as file:
        os.truncate(file.fileno(), 2**30)
    with pytest.raises(ClusterFileError, match="more than 1048576 bytes"):
        load_cluster(str(path), 8)
