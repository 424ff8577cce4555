"""The kernels themselves, without a GPU: in Triton's interpreter against their references, and compiled ahead
of time for GPUs.

Both on the environment's own Triton, which belongs to its torch (3.7 to torch 2.13, 3.8 to torch 2.14), and
on the oldest that the package admits, in a folder beside it that scripts/make_environment.sh fills:
`<environment>/share/triton-3.6.0`, or where TRITON_OLDEST says.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rannc_backend.kernels.triton_support import HAS_TRITON

ROOT = Path(__file__).resolve().parents[3]
CASES = Path(__file__).parent / "kernel_cases.py"
RESOURCES = ROOT / "scripts" / "kernel_resources.py"
OLDEST, OWN = "3.6", "own"
# One element of the narrow side is half as wide; the other side has 128 bits.
NARROW_LOADS = ("unpack, bf16 to fp32", "from wire, bf16 to fp32")
# An unaligned gradient that is added to its bucket: four elements per thread, then four sums.
IN_FLIGHT = 4
NARROW_STORES = ("bucket, fp32 to fp16", "to wire, fp32 to bf16")


def environment(version: str, tmp_path: Path) -> dict[str, str]:
    """Variables for a process that imports Triton ``version``, with a compile cache of its own."""
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    if version == OLDEST:
        folder = Path(os.environ.get("TRITON_OLDEST", Path(sys.prefix) / "share" / "triton-3.6.0"))
        assert (folder / "triton").is_dir(), (
            f"no Triton {version} in {folder}: `make environment` puts it there"
        )
        variables["PYTHONPATH"] = str(folder)
    else:
        assert HAS_TRITON, "no Triton: `make environment`, or pip install 'rannc-backend[test]'"
    return variables


def run_json(script: Path, version: str, tmp_path: Path, *arguments: str) -> dict:
    """What ``script`` prints, run with Triton ``version``."""
    result = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment(version, tmp_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    answer = json.loads(result.stdout)
    expected = f"{OLDEST}." if version == OLDEST else importlib.metadata.version("triton")
    assert answer["triton"].startswith(expected), f"asked for Triton {expected}, got {answer['triton']}"
    return answer


@pytest.mark.parametrize(
    ("version", "arguments"),
    [
        (OWN, ("--every", "2")),
        (OLDEST, ("--every", "8")),
        pytest.param(OWN, ("--thorough",), marks=pytest.mark.full),
        pytest.param(OLDEST, ("--thorough",), marks=pytest.mark.full),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value).strip("-") or "all",
)
def test_kernels_give_what_their_references_give(
    version: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    found = run_json(CASES, version, tmp_path, *arguments)["problems"]
    assert not found, "\n".join(found[:40])


@pytest.mark.parametrize("version", [OWN, OLDEST])
def test_the_scaling_kernel_gives_what_its_reference_gives(version: str, tmp_path: Path) -> None:
    found = run_json(CASES.with_name("scale_cases.py"), version, tmp_path)["problems"]
    assert not found, "\n".join(found[:20])


@pytest.mark.full
@pytest.mark.parametrize("fault", ["tail", "sum", "rounding"])
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    assert run_json(CASES, OWN, tmp_path, "--every", "5", "--plant", fault)["problems"]


MAIN_VARIANTS = ("pack, fp32", "bucket, fp32", "scale")


@pytest.mark.parametrize(
    ("version", "arguments"),
    [
        (OWN, ("--targets", "sm_90", "--disassemble", "sm_90")),
        pytest.param(
            OWN,
            ("--targets", "sm_80", "sm_100", "gfx942", "--variants", *MAIN_VARIANTS),
            marks=pytest.mark.full,
        ),
        pytest.param(
            OLDEST, ("--targets", "sm_90", "gfx942", "--variants", *MAIN_VARIANTS[:2]), marks=pytest.mark.full
        ),
        pytest.param(OWN, ("--disassemble", "sm_80", "sm_90", "sm_100"), marks=pytest.mark.full),
        pytest.param(OLDEST, ("--disassemble", "sm_80", "sm_90", "sm_100"), marks=pytest.mark.full),
    ],
    ids=["newest-sm_90", "newest-others", "oldest", "newest-full", "oldest-full"],
)
def test_compiled_kernels_are_lean(version: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    resources = run_json(RESOURCES, version, tmp_path, "--json", *arguments)["resources"]
    wrong = [
        f"{each['variant']} on {each['target']}: {fault}" for each in resources for fault in faults(each)
    ]
    assert resources and not wrong, "\n".join(wrong)
    if "--variants" not in arguments:
        assert {"pack", "bucket, bf16 to fp32", "pack, bf16 to fp8"} <= {
            each["variant"] for each in resources
        }
    if version == OWN and "--variants" not in arguments:
        documented = documented_cells()
        for each in resources:
            cell = f"{each['registers']}" + f" + {each['shared_bytes']} B" * (each["shared_bytes"] > 0)
            assert documented[each["variant"], each["target"]] == cell, (
                "scripts/kernel_resources.py prints the table of docs/kernels.md"
            )


def documented_cells() -> dict[tuple[str, str], str]:
    """(variant, target) to the cell of the table in docs/kernels.md."""
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    table = re.search(r"\| kernel \|.*\n(?:\|.*\n)+", page).group(0).splitlines()
    header, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table if not line.startswith("|---")
    ]
    return {
        (name, target): cell for name, *cells in rows for target, cell in zip(header[1:], cells, strict=True)
    }


def faults(resources: dict) -> list[str]:
    """What docs/kernels.md promises and this kernel does not keep."""
    name, found = resources["variant"], []
    if resources["spilled_bytes"] or resources["stack_bytes"]:
        found.append(f"{resources['spilled_bytes']} bytes spilled, {resources['stack_bytes']} bytes of stack")
    if resources["registers"] > 64:
        found.append(f"{resources['registers']} registers")
    on_amd = resources["target"].startswith("gfx")
    # AMD's emulation of e4m3 moves bytes in smaller pieces; its hardware has another float8.
    if not (on_amd and "fp8" in name):
        if resources["wide_loads"] == 0 and name not in NARROW_LOADS:
            found.append("no 128-bit load")
        if resources["wide_stores"] == 0 and name not in NARROW_STORES:
            found.append("no 128-bit store")
    if "fp8" not in name and (resources["shared_bytes"] or resources["exchanges"]):
        found.append(
            f"{resources['shared_bytes']} bytes of shared memory, {resources['exchanges']} instructions that "
            "use it"
        )
    if (
        "bucket" in name
        and resources["narrow_in_flight"] is not None
        and resources["narrow_in_flight"] < IN_FLIGHT
    ):
        found.append(f"{resources['narrow_in_flight']} loads of unaligned elements in flight")
    if resources["shared_bytes"] > 1024:
        found.append(f"{resources['shared_bytes']} bytes of shared memory")
    return found


def test_loads_in_flight_are_counted_where_the_second_most_are() -> None:
    from scripts import kernel_resources

    code = """
    .L_x_1:
        /*0010*/  @P0 LDG.E R1, desc[UR4][R8.64] ;
        /*0020*/  @P1 LDG.E.U16 R2, desc[UR4][R8.64+0x400] ;
        /*0030*/  LDG.E.128 R12, desc[UR4][R8.64] ;
        /*0040*/  IADD3 R20, R21, R22 ;
        /*0050*/  LDG.E R3, desc[UR4][R8.64+0x800] ;
        /*0060*/  FADD R5, R2, R6 ;
        /*0070*/  LDG.E R4, desc[UR4][R8.64] ;
        /*0080*/  LDG.E R7, desc[UR4][R8.64] ;
        /*0090*/  @!P2 BRA `(.L_x_1) ;
        /*00a0*/  LDG.E R4, desc[UR4][R8.64] ;
        /*00b0*/  FADD R5, R4, R6 ;
    """
    assert kernel_resources.narrow_loads_in_flight(code) == 2


LEAN = dict(variant="bucket, fp32", target="sm_90", registers=40, spilled_bytes=0, stack_bytes=0, shared_bytes=0, wide_loads=4,
            wide_stores=4, exchanges=0, narrow_in_flight=4)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"registers": 65},
        {"spilled_bytes": 4},
        {"stack_bytes": 8},
        {"wide_loads": 0},
        {"wide_stores": 0},
        {"exchanges": 2},
        {"narrow_in_flight": 1},
    ],
)
def test_a_fat_kernel_would_be_found(change: dict) -> None:
    assert not faults(LEAN)
    assert faults({**LEAN, **change})
