"""Messages on a CPU: layout, round trips, wire formats, what is not copied, what is refused."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.kernels import boundary_pack, pack_reference
from rannc_backend.kernels.boundary_pack import (
    Wire,
    pack,
    plan_message,
    unpack,
)
from rannc_backend.kernels.message_layout import choose_wires, share_on_wire
from rannc_backend.kernels.record_table import CopyReport, KernelError, RecordTables

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(math.prod(shape)).reshape(shape) - 3
    return values % 2 == 1 if dtype == torch.bool else (values * 0.37).to(dtype)


@settings(max_examples=40)
@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12))
def test_what_is_packed_comes_out(specs: list) -> None:
    tensors = [tensor_of(shape, dtype) for shape, dtype in specs]
    layout = plan_message([shape for shape, _ in specs], [dtype for _, dtype in specs])
    message = torch.full((layout.num_bytes + 64,), 0xA5, dtype=torch.uint8)
    packed = pack(tensors, layout, message=message)
    assert packed.message is message and bool((message[layout.num_bytes :] == 0xA5).all())
    unpacked = unpack(message, layout)
    for tensor, got, offset in zip(tensors, unpacked.tensors, layout.offsets, strict=True):
        assert got.dtype == tensor.dtype and torch.equal(got, tensor)
        assert offset % 128 == 0
        assert got.numel() == 0 or got.data_ptr() == message.data_ptr() + offset  # a view
        raw = bytes(message[offset : offset + tensor.nbytes].tolist())
        assert raw == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert unpacked.report == CopyReport(bytes_without_copy=sum(tensor.nbytes for tensor in tensors))


def test_offsets_and_views_are_those_of_the_message() -> None:
    tensors = [torch.randn(5, 7), torch.arange(33), torch.tensor(True)]
    shapes_, dtypes = [tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors]
    layout = plan_message(shapes_, dtypes)
    assert (layout.offsets, layout.num_bytes, layout.is_exact) == ((0, 256, 640), 768, True)
    for view, tensor in zip(layout.views(pack(tensors, layout).message), tensors, strict=True):
        assert torch.equal(view, tensor)


def test_one_contiguous_tensor_is_the_message() -> None:
    tensor = torch.randn(6, 4)
    layout = plan_message([tensor.shape], [tensor.dtype])
    packed = pack([tensor], layout)
    assert packed.message is tensor and packed.report == CopyReport(bytes_without_copy=96)
    (got,) = unpack(packed.message, layout).tensors
    assert got.data_ptr() == tensor.data_ptr() and torch.equal(got, tensor)
    strided = pack([tensor.t()], plan_message([(4, 6)], [tensor.dtype]))
    assert strided.message.is_contiguous() and torch.equal(strided.message, tensor.t())
    assert strided.report == CopyReport(bytes_copied=96, launches=1)


def test_tensors_made_in_their_place_are_not_copied() -> None:
    layout = plan_message([(3, 5), (7,)], [torch.float32, torch.float32])
    message = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    first, second = (layout.view(message, index) for index in range(2))
    first.fill_(2.0)
    report = pack([first, torch.ones(7)], layout, message=message).report
    assert report == CopyReport(bytes_copied=28, bytes_without_copy=60, launches=1)
    assert bool((first == 2).all()) and bool((second == 1).all())
    assert pack([first, second], layout, message=message).report == CopyReport(bytes_without_copy=88)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bfloat16_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    # Mantissas of bfloat16 have 7 bits: 1 + 2**-8 is a tie and goes to the even 1, 1 + 3 * 2**-8 to the even
    # 1 + 2**-6.
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -2.5, float("inf"), float("nan")], dtype=dtype)
    layout = plan_message([values.shape, (2,)], [dtype, torch.int64], [Wire.BFLOAT16, Wire.SAME])
    packed = pack([values, torch.tensor([5, 6])], layout)
    assert layout.num_bytes == 256 and packed.report == CopyReport(bytes_copied=26, launches=2)
    unpacked = unpack(packed.message, layout)
    assert unpacked.report == CopyReport(bytes_copied=10, bytes_without_copy=16, launches=1)
    wanted = torch.tensor([1.0, 1 + 2**-6, -2.5, float("inf"), float("nan")], dtype=dtype)
    torch.testing.assert_close(unpacked.tensors[0], wanted, rtol=0, atol=0, equal_nan=True)
    assert unpacked.tensors[1].tolist() == [5, 6]


@given(
    st.sampled_from([(Wire.BFLOAT16, torch.bfloat16, 2.0**-8), (Wire.FLOAT16, torch.float16, 2.0**-11)]),
    st.sampled_from([torch.float32, torch.float64]),
    st.lists(st.floats(-6e4, 6e4, allow_nan=False), min_size=1, max_size=40),
)
def test_a_cast_is_off_by_one_rounding(
    wire: tuple[Wire, torch.dtype, float], dtype: torch.dtype, numbers: list[float]
) -> None:
    kind, narrow, roundoff = wire
    values, beside = torch.tensor(numbers, dtype=dtype), torch.arange(3)
    layout = plan_message([(3,), values.shape], [torch.int64, dtype], [Wire.SAME, kind])
    assert layout.wire_bytes == (24, 2 * len(numbers)) and not layout.is_exact
    kept, got = unpack(pack([beside, values], layout).message, layout).tensors
    assert torch.equal(kept, beside) and got.dtype == dtype
    smallest = torch.finfo(narrow).smallest_normal
    # From the smallest normal number on; half a step of those below it.
    bound = roundoff * (1 + 1e-6) * values.double().abs().clamp(min=smallest)
    assert bool(((got.double() - values.double()).abs() <= bound).all())


def test_beyond_float16_is_infinite() -> None:
    values = torch.tensor([7e4, -1e30, float("nan"), 2.0])
    layout = plan_message([(4,)], [torch.float32], [Wire.FLOAT16])
    (got,) = unpack(pack([values], layout).message, layout).tensors
    assert got.isinf().tolist() == [True, True, False, False] and bool(got[2].isnan()) and got[3] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 127, 128, 129, 1000])
def test_float8_keeps_three_bits_of_each_value(dtype: torch.dtype, numel: int) -> None:
    torch.manual_seed(0)
    values = (torch.randn(numel, dtype=torch.float64) * 2.0 ** torch.randint(-6, 6, (numel,))).to(dtype)
    layout = plan_message([(3,), values.shape], [torch.int32, dtype], [Wire.SAME, Wire.FLOAT8])
    assert layout.offsets[1] == 0 and layout.scales_offset % 128 == 0
    (_, got) = unpack(pack([torch.arange(3, dtype=torch.int32), values], layout).message, layout).tensors
    assert got.dtype == dtype and got.data_ptr() % 64 == 0
    for start in range(0, numel, 128):
        group, back = values[start : start + 128].double(), got[start : start + 128].double()
        largest = group.abs().max()
        # Half a step: 2**-4 of a value, and of the smallest normal one (2**-6 / 448 of the largest) below;
        # then the rounding of the dtype.
        eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        bound = (group.abs() / 16).clamp(min=float(largest) * 2**-10 / 448) + group.abs() * eps
        assert bool(((back - group).abs() <= bound).all())
        assert back.abs().max() == pytest.approx(float(largest), rel=2 * eps)


def test_float8_shows_what_is_not_finite() -> None:
    values = torch.ones(384)
    values[5], values[200] = float("nan"), float("inf")
    layout = plan_message([values.shape], [values.dtype], [Wire.FLOAT8])
    (got,) = unpack(pack([values], layout).message, layout).tensors
    assert bool(got[5].isnan()) and int(got[:128].isnan().sum()) == 1
    assert bool(got[128:256].isnan().all()) and bool((got[256:] == 1).all())
    tiny = unpack(
        pack([values * 1e-35], plan_message([(384,)], [values.dtype], [Wire.FLOAT8])).message, layout
    ).tensors[0]
    assert bool((tiny[256:].abs() < 1e-30).all())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        KernelError,
        match="tensor 1 of a message is torch.int64, which cannot travel as FLOAT8: that is for "
        "torch.float32",
    ):
        plan_message([(2,), (2,)], [torch.float32, torch.int64], [Wire.FLOAT8, Wire.FLOAT8])
    with pytest.raises(KernelError, match="cannot travel as BFLOAT16"):
        plan_message([(2,)], [torch.bfloat16], [Wire.BFLOAT16])
    layout = plan_message([(2,), (3,)], [torch.float32] * 2)
    with pytest.raises(KernelError, match="do not fit a message"):
        pack([torch.ones(2), torch.ones(4)], layout)
    with pytest.raises(KernelError, match="do not fit a message"):
        pack([torch.ones(2), torch.ones(3).half()], layout)
    with pytest.raises(KernelError, match="256 bytes"):
        pack([torch.ones(2), torch.ones(3)], layout, message=torch.zeros(200, dtype=torch.uint8))
    with pytest.raises(KernelError, match="aligned to 16"):
        pack([torch.ones(2), torch.ones(3)], layout, message=torch.zeros(500, dtype=torch.uint8)[3:])
    with pytest.raises(KernelError, match="must be contiguous uint8"):
        unpack(torch.zeros(64), layout)


def test_float8_is_refused_on_gpus_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        KernelError, match="NVIDIA A100 has compute capability 8.0 and float8 messages need 8.9"
    ):
        pack_reference.check_float8((Wire.FLOAT8,), torch.device("cuda"))
    pack_reference.check_float8((Wire.BFLOAT16,), torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    pack_reference.check_float8((Wire.FLOAT8,), torch.device("cuda"))


def test_formats_are_chosen_by_dtype_and_direction() -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
    assert choose_wires(dtypes, Wire.SAME) == (Wire.SAME,) * 5
    assert choose_wires(dtypes, Wire.BFLOAT16) == (
        Wire.BFLOAT16,
        Wire.BFLOAT16,
        Wire.SAME,
        Wire.SAME,
        Wire.SAME,
    )
    assert choose_wires(dtypes, Wire.FLOAT8) == (*[Wire.FLOAT8] * 3, Wire.SAME, Wire.SAME)
    assert choose_wires(dtypes, Wire.FLOAT16) == (*[Wire.FLOAT16] * 2, *[Wire.SAME] * 3)
    shares = [share_on_wire(torch.float32, wire) for wire in (Wire.SAME, Wire.FLOAT16, Wire.FLOAT8)]
    assert shares == [1.0, 0.5, (1 + 4 / 128) / 4]
    assert choose_wires(dtypes, Wire.FLOAT8, backward=True) == choose_wires(dtypes, Wire.BFLOAT16)


def test_without_triton_the_references_work() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from rannc_backend.kernels import boundary_pack, gradient_writes, triton_support\n"
        "assert not triton_support.HAS_TRITON\n"
        "tensors = [torch.arange(3.0), torch.arange(4)]\n"
        "layout = boundary_pack.plan_message([(3,), (4,)], [torch.float32, torch.int64])\n"
        "views = layout.views(boundary_pack.pack(tensors, layout).message)\n"
        "assert all(map(torch.equal, views, tensors))\n"
        "bucket = torch.zeros(8)\n"
        "gradient_writes.write_gradients([bucket[:2], bucket[4:]], [torch.ones(2), torch.ones(4)], 2)\n"
        "assert bucket.tolist() == [1, 1, 0, 0, 1, 1, 1, 1]\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0 and "riton" not in result.stderr, result.stderr


def test_tables_are_found_again_by_addresses_and_bounded() -> None:
    tables = RecordTables(capacity=2)
    device, built = torch.device("cpu"), []

    def get(key: int) -> torch.Tensor:
        return tables.get(key, device, lambda: built.append(key) or boundary_pack.make_records([]))

    first = get(1)
    assert get(1) is first and built == [1]
    get(2), get(1), get(3)  # 2 was used longest ago
    assert get(1) is first and built == [1, 2, 3]
    get(2)
    assert built == [1, 2, 3, 2] and tables.num_built == 4
