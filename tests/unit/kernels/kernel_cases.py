"""The table of cases in which a kernel must give what its reference gives: on a GPU, or anywhere in Triton's
interpreter.

`python kernel_cases.py` runs all of them in the interpreter, in this process, and prints {"triton": version,
"problems": [...]} as JSON; a process of its own, since Triton decides when kernels are decorated. With
`--plant NAME` it first breaks a kernel's work in a way that must be found. `problems(device)` is for GPUs.

Every output is poisoned first: floats with NaN, bytes with 0xA5, and what lies between the slots must still
be there afterwards.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from rannc_backend.kernels import boundary_pack, bucket_wires, gradient_views, pack_reference, record_table
from rannc_backend.kernels.boundary_pack import Wire, plan_message
from rannc_backend.kernels.gradient_views import GradientTables
from rannc_backend.kernels.message_layout import choose_wires
from rannc_backend.kernels.record_table import LaunchConfig, RecordTables

SIZES = (1, 15, 127, 4096)
LARGE_SIZE = 1_000_003
SHIFTS = (0, 1, 3)
"""Elements by which a tensor begins behind a multiple of 128 bytes."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DTYPES = (*FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
POISON = 0xA5
# Large chunks make few programs, which is what costs time in the interpreter.
PREPARED: set[str] = set()
WIDE_PACK = LaunchConfig(block=65536, num_warps=512)
BUCKET = LaunchConfig(block=4096, num_warps=8)


def random_tensor(
    dtype: torch.dtype, numel: int, device: torch.device, *, shift: int = 0, special: bool = False
) -> torch.Tensor:
    """A contiguous tensor that begins ``shift`` elements into its memory; ``special`` floats hold what
    rounding may get wrong.
    """
    memory = torch.zeros(numel + shift + 128, dtype=dtype, device=device)
    first = -memory.data_ptr() % 128 // dtype.itemsize
    tensor = memory[first + shift : first + shift + numel]
    if dtype == torch.bool:
        tensor.copy_(torch.rand(numel) < 0.5)
    elif not dtype.is_floating_point:
        tensor.copy_(torch.randint(0, 120, (numel,)))
    else:
        values = torch.randn(numel, dtype=torch.float64) * 10.0 ** torch.randint(-3, 3, (numel,))
        if special:
            # Ties of bfloat16 and of e4m3, the smallest and the largest numbers, both zeros.
            extremes = [
                0.0,
                -0.0,
                1 + 2**-8,
                1 + 3 * 2**-8,
                1.0625,
                1.1875,
                3e38,
                -1e-36,
                65504.0,
                -17.0,
                2**-10,
                3 * 2**-10,
            ]
            chosen = torch.tensor(extremes, dtype=torch.float64)[torch.randint(0, len(extremes), (numel,))]
            values = torch.where(torch.rand(numel) < 0.3, chosen, values)
        tensor.copy_(values)
        if special and numel > 300:
            tensor[130], tensor[140], tensor[280] = float("nan"), -float("nan"), float("inf")
            tensor[-100:] = 0
    return tensor


def differences(name: str, got: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    """A line if ``got`` is not ``wanted``, bit for bit but for the bits of NaNs."""
    if got.dtype == wanted.dtype and torch.equal(got.isnan(), wanted.isnan()):
        same = (
            (got == wanted) & (torch.signbit(got) == torch.signbit(wanted))
            if got.is_floating_point()
            else got == wanted
        )
        wrong = torch.nonzero(~(same | wanted.isnan()))
    else:
        wrong = torch.nonzero(got.isnan() != wanted.isnan())
    if len(wrong) == 0:
        return []
    first = int(wrong[0])
    return [
        f"{name}: {len(wrong)} of {wanted.numel()} differ, the first at {first}: {got[first]} instead of "
        f"{wanted[first]}"
    ]


def compare_messages(
    name: str, got: torch.Tensor, wanted: torch.Tensor, layout: boundary_pack.MessageLayout
) -> list[str]:
    """Differences between two messages, tensor by tensor, and between what lies around the tensors."""
    found = []
    outside = torch.ones(layout.num_bytes, dtype=torch.bool)
    wire_dtypes = {**pack_reference.HALVES, Wire.FLOAT8: torch.float8_e4m3fn}
    for index, (shape, dtype, wire, offset) in enumerate(
        zip(layout.shapes, layout.dtypes, layout.wires, layout.offsets)
    ):
        as_dtype = wire_dtypes.get(wire, dtype)
        label = f"{name}, tensor {index} ({dtype} {shape[0]} as {wire.name})"
        spans = [(offset, shape[0], as_dtype)]
        if wire == Wire.FLOAT8:
            spans.append((layout.scales_offset + offset // 128 * 4, -(-shape[0] // 128), torch.float32))
        for start, numel, span_dtype in spans:
            size = numel * span_dtype.itemsize
            pair = [each[start : start + size].view(span_dtype).cpu() for each in (got, wanted)]
            if span_dtype == torch.float8_e4m3fn:
                pair = [each.to(torch.float32) for each in pair]
            found += differences(label, *pair)
            outside[start : start + size] = False
    if not bool((got.cpu()[outside] == POISON).all()):
        found.append(f"{name}: bytes between the tensors were written")
    return found


def check_message(
    name: str,
    tensors: list[torch.Tensor],
    wires: tuple[Wire, ...],
    device: torch.device,
    config: LaunchConfig | None = None,
) -> list[str]:
    """Pack with the kernel and the reference, unpack what changed its dtype with both."""
    layout = plan_message([tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors], wires)
    got = torch.full((layout.num_bytes,), POISON, dtype=torch.uint8, device=device)
    wanted = got.clone()
    moved = (True,) * len(tensors)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    boundary_pack.reference_pack(wanted, tensors, layout, moved)
    boundary_pack.launch_pack(got, addresses, layout, moved, RecordTables(), config)
    found = compare_messages(f"{name} pack", got, wanted, layout)
    changed = [index for index, wire in enumerate(layout.wires) if wire != Wire.SAME]
    if changed:
        # Targets of every alignment, in memory that was poisoned as a whole.
        memories = [
            torch.full((tensors[i].numel() + 131,), float("nan"), dtype=tensors[i].dtype, device=device)
            for i in changed
        ]
        numels = [tensors[index].numel() for index in changed]
        targets = [
            memory[1 + i % 3 : 1 + i % 3 + numel] for i, (memory, numel) in enumerate(zip(memories, numels))
        ]
        expected = [torch.zeros_like(target) for target in targets]
        places = (
            [layout.offsets[index] for index in changed],
            [layout.wires[index] for index in changed],
            layout.scales_offset,
        )
        boundary_pack.reference_unpack(wanted, expected, *places)
        boundary_pack.launch_unpack(wanted, targets, *places, RecordTables(), config)
        for index, memory, target, right in zip(changed, memories, targets, expected):
            found += differences(
                f"{name} unpack, tensor {index} ({right.dtype} {right.numel()})", target.cpu(), right.cpu()
            )
            if int((~memory.isnan()).sum()) != int((~target.isnan()).sum()):
                found.append(f"{name} unpack, tensor {index}: written outside of the tensor")
    return found


def message_checks(device: torch.device, *, thorough: bool) -> Iterator[Callable[[], list[str]]]:
    """Every dtype, size and alignment; 1 to 500 tensors; every wire format."""

    def check(
        name: str,
        make: Callable[[], list[torch.Tensor]],
        wire: Wire = Wire.SAME,
        config: LaunchConfig | None = None,
    ):
        def run() -> list[str]:
            tensors = make()
            wires = choose_wires([tensor.dtype for tensor in tensors], wire)
            return check_message(name, tensors, wires, device, config)

        return run

    for shift in SHIFTS:
        sizes = SIZES if thorough or shift == 0 else SIZES[:3]
        specs = list(itertools.product(DTYPES, sizes))
        yield check(
            f"all dtypes, shift {shift}",
            lambda specs=specs, shift=shift: [random_tensor(*s, device, shift=shift) for s in specs],
        )
    for count in (1, 2, 64, 500):
        yield check(
            f"{count} tensors, empty ones among them",
            lambda count=count: [
                random_tensor(DTYPES[i % 10], (7 * i + 1) % 41, device) for i in range(count)
            ],
        )
    yield check("only empty tensors", lambda: [torch.empty(0, device=device)] * 3)
    formats = {Wire.BFLOAT16: FLOATS[::3], Wire.FLOAT16: FLOATS[::3], Wire.FLOAT8: FLOATS}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < pack_reference.FLOAT8_CAPABILITY:
        del formats[Wire.FLOAT8]  # refused there
    for wire, dtypes in formats.items():
        for shift, special in ((0, False), (0, True), (3, True)):
            sizes = (0, 15, 128, 1031) if special and not thorough else (*SIZES, 0, 128, 1031, 2304)
            # Something that travels as it is between them.
            specs = [*itertools.product(dtypes, sizes), (torch.int64, 15), (torch.bool, 130)]
            yield check(
                f"{wire.name}, shift {shift}, special {special}",
                lambda specs=specs, shift=shift, special=special: [
                    random_tensor(*spec, device, shift=shift, special=special) for spec in specs
                ],
                wire,
            )
    large = [(torch.float32, 0, Wire.SAME), (torch.bool, 0, Wire.SAME), (torch.float16, 1, Wire.SAME)]
    large += [(torch.float32, shift, wire) for wire in formats for shift in (0, 1)]
    for dtype, shift, wire in large:
        yield check(
            f"large {dtype} as {wire.name}, shift {shift}",
            lambda dtype=dtype, shift=shift: [
                random_tensor(dtype, LARGE_SIZE, device, shift=shift, special=True)
            ],
            wire,
            WIDE_PACK,
        )


def view_checks(device: torch.device, *, thorough: bool) -> Iterator[Callable[[], list[str]]]:
    """Gradients to views of several buckets and dtypes: stored, added, again at the same addresses and at
    others.
    """

    def run(gradient_dtypes, numels, shift: int) -> list[str]:
        memory = {
            dtype: random_tensor(dtype, 60_000, device)
            for dtype in (FLOATS if thorough else (torch.float32, torch.bfloat16, torch.float64))
        }
        specs = list(itertools.product(memory, gradient_dtypes, numels))
        starts = itertools.accumulate([shift, *(numel + 3 for _, _, numel in specs[:-1])])
        views = [memory[dtype][start : start + numel] for (dtype, _, numel), start in zip(specs, starts)]
        expected = {dtype: values.clone() for dtype, values in memory.items()}
        mirrors = [
            expected[view.dtype][view.storage_offset() - memory[view.dtype].storage_offset() :][
                : view.numel()
            ]
            for view in views
        ]
        tables, found = GradientTables(), []
        one, other = (
            [random_tensor(dtype, numel, device, shift=i % 3) for i, (_, dtype, numel) in enumerate(specs)]
            for _ in range(2)
        )
        for gradients, accumulate in ((one, False), (one, True), (other, True), (one, True)):
            report = tables.write(views, gradients, accumulate=accumulate)
            if report is None or report.launches != len(memory):
                found.append(f"views: {report}")
            for mirror, gradient in zip(mirrors, gradients):
                gradient_views.reference(mirror, gradient, accumulate=accumulate)
        for dtype, values in memory.items():
            found += differences(f"views of {dtype}, shift {shift}", values.cpu(), expected[dtype].cpu())
        return found if tables.num_built == 3 else [*found, f"views: {tables.num_built} tables built"]

    for shift in (0, 1):
        sizes = (*SIZES[:3], 0, 2051) if thorough else (1, 130, 0)
        yield lambda shift=shift, sizes=sizes: run(FLOATS if thorough else FLOATS[:3], sizes, shift)


def bucket_checks(device: torch.device, *, thorough: bool) -> Iterator[Callable[[], list[str]]]:
    """Flat buckets to a narrower dtype and back, with scales that are powers of two and others."""

    def run(wide: torch.dtype, narrow: torch.dtype, size: int, scale: float, shift: int) -> list[str]:
        name = f"bucket of {size} {wide} as {narrow}, scale {scale}, shift {shift}"
        source = random_tensor(wide, size, device, shift=shift, special=True)
        made, found = random_tensor(narrow, size, device), []
        for given, target, factors in (
            (source, made, {"times": scale, "over": 1.0}),
            (made, random_tensor(wide, size, device, shift=shift), {"times": 1.0, "over": scale}),
        ):
            expected = target.clone()
            bucket_wires.reference_convert(given, expected, **factors)
            bucket_wires.launch_convert(given, target, **factors, config=BUCKET)
            found += differences(f"{name}, {factors}", target.cpu(), expected.cpu())
        return found

    sizes = (1, 15, 4096, 70_003) if thorough else (15, 5001)
    for wide, narrow, shift in itertools.product(FLOATS[::3], FLOATS[1:3], SHIFTS[:2]):
        for size, scale in itertools.product(sizes, (1.0, 128.0, 3.0)):
            yield lambda wide=wide, narrow=narrow, size=size, scale=scale, shift=shift: run(
                wide, narrow, size, scale, shift
            )


def problems(device: torch.device, *, thorough: bool, every: int = 1) -> list[str]:
    """What differs from the references, one line each. ``every``: only each so-manieth check. Equal numbers
    on every run.
    """
    parts = (message_checks, view_checks, bucket_checks)
    checks = [check for part in parts for check in part(device, thorough=thorough)]
    found = []
    for index, check in list(enumerate(checks))[::every]:
        torch.manual_seed(index)
        found += check()
    return found


def _lose_last_item(build: Callable[..., object]) -> Callable[..., object]:
    def build_wrongly(spans):
        return build([replace(span, count=max(0, span.count - 1)) for span in spans])

    return build_wrongly


def plant(name: str) -> None:
    """Break what the kernels are given: every tensor's last element is forgotten, or what is there is."""
    if name == "tail":
        boundary_pack.make_records = _lose_last_item(record_table.make_records)
        gradient_views.record_template = _lose_last_item(record_table.record_template)
    elif name == "sum":
        gradient_views.ACCUMULATE = 0
    elif name == "rounding":
        boundary_pack.SIMULATED = False
    else:
        raise ValueError(name)


def _call_helper(self, *args, **kwargs):
    """What the interpreter does, but triton.language is prepared once: again takes most of the time and
    changes nothing.
    """
    from triton.runtime import interpreter

    if not self.fn.__module__.startswith("rannc_backend.") and self.fn.__module__ not in PREPARED:
        PREPARED.add(self.fn.__module__)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


def main(arguments: argparse.Namespace) -> None:
    import triton
    from triton.runtime import interpreter

    if arguments.plant:
        plant(arguments.plant)
    interpreter.InterpretedFunction.__call__ = _call_helper
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, about infinities that are there on purpose
    found = problems(torch.device("cpu"), thorough=arguments.thorough, every=arguments.every)
    json.dump({"triton": triton.__version__, "problems": found}, sys.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run the cases in Triton's interpreter and print JSON.")
    parser.add_argument("--thorough", action="store_true", help="all sizes with all dtypes")
    parser.add_argument("--every", type=int, default=1, help="run each so-manieth case only")
    parser.add_argument("--plant", help="break something: tail, sum or rounding")
    main(parser.parse_args())
