"""What the compilers make of the Triton kernels for GPUs that are not here: registers, memory, width of loads
and stores.

`python scripts/kernel_resources.py` prints the table of docs/kernels.md; `--json` a list of objects;
`--targets` and `--variants` choose. Needs Triton alone, whose package holds the compilers and disassemblers.
NVIDIA cubins are measured with cuobjdump and, with `--disassemble` (half a second each), nvdisasm; without,
the widths are read from PTX. AMD's are read from the assembly.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rannc_backend.kernels import boundary_pack, bucket_wires, gradient_views, scale_unless_one

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_POINTERS = {tl.float32: "fp32", tl.float16: "fp16", tl.bfloat16: "bf16", tl.float64: "fp64"}
NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Variant:
    """One specialization of a kernel, as a launcher starts it."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    float8: bool = False
    reduces: bool = False
    """Sums over a block, or shares a scale in a group: threads must meet in shared memory."""


@dataclass(frozen=True)
class Resources:
    """What one variant needs on one target. Bytes per thread, but `shared_bytes` per block."""

    variant: str
    target: str
    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int
    wide_loads: int
    wide_stores: int
    exchanges: int | None
    """Instructions that use shared memory or wait for other warps; None where nothing was disassembled."""
    narrow_in_flight: int | None = None
    """Loads of single elements under way at a time, which hides the latency of unaligned tensors; see
    `narrow_loads_in_flight`.
    """


def variants() -> Iterator[Variant]:
    """The specializations that matter, with the configuration for large work."""
    message_types = {"message": "*u8", "output": "*u8", "table": "*i64", "scales_offset": "i32"}

    def message(name: str, kernel: Any, kinds: int, **options: Any) -> Variant:
        config = boundary_pack.LARGE
        constants = dict(kinds=kinds, block=config.block, lanes=32 * config.num_warps, simulated=False)
        return Variant(name, kernel, message_types, constants, config.num_warps, **options)

    yield message("pack", boundary_pack._pack_kernel, 1 << 0)
    yield message("pack, fp32 to bf16", boundary_pack._pack_kernel, 1 << 0 | 1 << 1)
    yield message("pack, fp32 to fp16", boundary_pack._pack_kernel, 1 << 0 | 1 << 6)
    yield message("pack, fp32 to fp8", boundary_pack._pack_kernel, 1 << 3, float8=True, reduces=True)
    yield message("pack, bf16 to fp8", boundary_pack._pack_kernel, 1 << 5, float8=True, reduces=True)
    yield message("unpack, bf16 to fp32", boundary_pack._unpack_kernel, 1 << 1)
    yield message("unpack, fp8 to bf16", boundary_pack._unpack_kernel, 1 << 5, float8=True, reduces=True)
    for name, dtype, codes in (
        ("bucket, fp32", tl.float32, 1),
        ("bucket, bf16 to fp32", tl.float32, 4),
        ("bucket, fp32 to fp16", tl.float16, 1),
        ("bucket, bf16", tl.bfloat16, 4),
    ):
        yield bucket(name, dtype, codes)
    for name, source, target, factors in (
        ("to wire, fp32 to bf16", tl.float32, tl.bfloat16, (128.0, 1.0)),
        ("from wire, bf16 to fp32", tl.bfloat16, tl.float32, (1.0, 128.0)),
    ):
        types = {"source": f"*{_POINTERS[source]}", "target": f"*{_POINTERS[target]}", "count": "i32"}
        config = gradient_views.LARGE
        constants = dict(
            from_dtype=source, to_dtype=target, times=factors[0], over=factors[1], block=config.block,
            lanes=32 * config.num_warps, simulated=False,
        )  # fmt: skip
        yield Variant(name, bucket_wires._convert_kernel, types, constants, config.num_warps)
    for name, pointer in (("scale, fp32", "*fp32"), ("scale, bf16", "*bf16")):
        types = {"values": pointer, "scale": "*fp32", "num_values": "i64"}
        constants = dict(wide=False, block=scale_unless_one.BLOCK)
        yield Variant(name, scale_unless_one._scale_kernel, types, constants, scale_unless_one.NUM_WARPS)


def bucket(name: str, dtype: Any, codes: int) -> Variant:
    """A variant of the kernel for gradients; ``codes`` has a bit for each dtype among them."""
    config = gradient_views.LARGE
    block = config.block // 2 if codes & 8 or dtype == tl.float64 else config.block
    types = {"bucket": f"*{_POINTERS[dtype]}", "table": "*i64"}
    constants = dict(
        bucket_dtype=dtype, codes=codes, block=block, lanes=32 * config.num_warps, simulated=False
    )
    return Variant(name, gradient_views._gradient_kernel, types, constants, config.num_warps)


def compile_variant(variant: Variant, target: GPUTarget) -> Any:
    """The compiled kernel, with pointers aligned to 16 bytes as PyTorch's allocator makes them."""
    names = variant.kernel.arg_names
    types = {name: "constexpr" if name in variant.constants else variant.types[name] for name in names}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if types[name].startswith("*")
    }
    source = ASTSource(fn=variant.kernel, signature=types, constexprs=constants, attrs=aligned)
    return triton.compile(
        source, target=target, options={"num_warps": variant.num_warps, "enable_fp_fusion": False}
    )


def measure(variant: Variant, target: str, *, disassemble: bool) -> Resources:
    """Compile ``variant`` for ``target`` and read what it needs."""
    compiled = compile_variant(variant, TARGETS[target])
    if TARGETS[target].backend == "hip":
        return _measure_amd(variant, target, compiled.asm["amdgcn"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        code = _run("nvdisasm", "-c", "-ndf", file.name) if disassemble else None
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    loads, stores = r"LDG\.E\.128", r"STG\.E\.128"
    if code is None:
        loads, stores = (
            r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64",
            r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.b64",
        )
    text = compiled.asm["ptx"] if code is None else code
    return Resources(
        variant=variant.name,
        target=target,
        registers=numbers["REG"],
        spilled_bytes=numbers["LOCAL"],
        stack_bytes=numbers["STACK"],
        shared_bytes=numbers["SHARED"],
        wide_loads=len(re.findall(loads, text)),
        wide_stores=len(re.findall(stores, text)),
        exchanges=None if code is None else len(re.findall(r"\b(?:STS|LDS|LDSM|BAR)\b", code)),
        narrow_in_flight=None if code is None else narrow_loads_in_flight(code),
    )


def narrow_loads_in_flight(code: str) -> int:
    """Loads of at most 8 bytes per thread that a disassembled kernel starts before it uses what one of them
    gives.

    Of the two places where it starts the most, the one with fewer: elements are loaded in one, what they are
    added to in the other.
    """
    runs, under_way = [0, 0], set()
    for line in code.splitlines():
        instruction = re.sub(r"/\*.*?\*/", "", line).strip()
        load = re.search(r"\bLDG\.E(?!\.128)\S* (R\d+), (.*)", instruction)
        read = set(re.findall(r"\bR\d+\b", load[2] if load else instruction))
        if read & under_way or instruction.startswith(".L") or re.search(r"\b(?:BRA|EXIT)\b", instruction):
            runs.append(len(under_way))
            under_way = set()
        if load:
            under_way.add(load[1])
    return sorted(runs)[-2]


def _measure_amd(variant: Variant, target: str, assembly: str) -> Resources:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert found is not None, f"no {name} in the assembly"
        return int(found[1])

    return Resources(
        variant=variant.name,
        target=target,
        registers=number("vgpr_count"),
        spilled_bytes=4 * (number("vgpr_spill_count") + number("sgpr_spill_count")),
        stack_bytes=number("private_segment_fixed_size"),
        shared_bytes=number("group_segment_fixed_size"),
        wide_loads=len(re.findall(r"(?:global|buffer|flat)_load_dwordx4", assembly)),
        wide_stores=len(re.findall(r"(?:global|buffer|flat)_store_dwordx4", assembly)),
        exchanges=len(re.findall(r"\bds_(?:read|write)", assembly)),
    )


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run(
        [str(NVIDIA_TOOLS / tool), *arguments], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def supported(variant: Variant, target: str) -> bool:
    """float8 needs compute capability 8.9."""
    return not (variant.float8 and target == "sm_80")


def markdown(found: list[Resources], targets: list[str]) -> str:
    """A row per variant, a column per target: registers, and bytes of shared memory where there are any."""
    cells = {
        (each.variant, each.target): f"{each.registers}"
        + f" + {each.shared_bytes} B" * (each.shared_bytes > 0)
        for each in found
    }
    measured = {each.variant for each in found}
    names = [each.name for each in variants() if each.name in measured]
    lines = [f"| kernel | {' | '.join(targets)} |", "|" + "---|" * (len(targets) + 1)]
    lines += [
        f"| {name} | {' | '.join(cells.get((name, target), 'refused') for target in targets)} |"
        for name in names
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--variants", nargs="+", help="beginnings of names")
    parser.add_argument("--disassemble", nargs="*", default=[], help="targets whose code is disassembled")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    chosen = [
        each
        for each in variants()
        if not arguments.variants or each.name.startswith(tuple(arguments.variants))
    ]
    found = [
        measure(variant, target, disassemble=target in arguments.disassemble)
        for target in arguments.targets
        for variant in chosen
        if supported(variant, target)
    ]
    if arguments.json:
        json.dump({"triton": triton.__version__, "resources": [asdict(each) for each in found]}, sys.stdout)
    else:
        sys.stdout.write(markdown(found, arguments.targets))


if __name__ == "__main__":
    main()
