"""The kernels on a GPU: the cases of tests/unit/kernels against their references, reuse of tables,
memory checking.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rannc_backend.kernels.boundary_pack import Wire, pack, plan_message, unpack
from rannc_backend.kernels.gradient_views import GradientTables
from rannc_backend.kernels.pack_reference import FLOAT8_CAPABILITY
from rannc_backend.kernels.record_table import CopyReport, KernelError, RecordTables
from rannc_backend.kernels.triton_support import HAS_TRITON

CASES = Path(__file__).resolve().parents[1] / "unit" / "kernels" / "kernel_cases.py"
DEVICE = torch.device("cuda")


def load_cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_cases", CASES)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_cases"] = module
    spec.loader.exec_module(module)
    return module


def test_kernels_give_what_their_references_give() -> None:
    assert HAS_TRITON, "no Triton beside this torch: pip install 'rannc-backend[kernels]'"
    cases = load_cases()
    # Blocks that only the interpreter can have.
    cases.WIDE_PACK = None
    found = cases.problems(torch.device("cuda"), thorough=True)
    assert not found, "\n".join(found[:40])


@pytest.mark.full
def test_memory_checker_finds_nothing() -> None:
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        pytest.fail(
            "compute-sanitizer is missing: it comes with the CUDA toolkit, or as the package "
            "nvidia-cuda-sanitizer-api"
        )
    code = (
        f"import sys; sys.path.insert(0, {str(CASES.parent)!r}); import torch, kernel_cases as cases\n"
        "cases.WIDE_PACK = None; cases.LARGE_SIZE = 100_003\n"
        "sys.exit(len(cases.problems(torch.device('cuda'), thorough=False)))\n"
    )
    # Each tensor an allocation of its own, so that a byte beyond it is seen.
    command = [checker, "--tool", "memcheck", "--error-exitcode", "77", sys.executable, "-c", code]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=580, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def test_one_launch_and_a_table_that_is_used_again() -> None:
    tensors = [torch.randn(numel, device=DEVICE) for numel in (3, 5000, 0, 100_000)]
    layout = plan_message([tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors])
    tables = RecordTables()
    for message in (None, torch.zeros(layout.num_bytes, dtype=torch.uint8, device=DEVICE)):
        packed = pack(tensors, layout, message=message, tables=tables)
        assert packed.report == CopyReport(bytes_copied=105_003 * 4, launches=1)
        for got, wanted in zip(unpack(packed.message, layout).tensors, tensors, strict=True):
            assert torch.equal(got, wanted)
    assert tables.num_built == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pack(tensors, layout, message=packed.message, tables=tables)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == 1 and "_pack_kernel" in names[0], names


def test_views_of_several_buckets_take_one_launch() -> None:
    views = [torch.zeros(100, device=DEVICE), torch.zeros(7, 3, device=DEVICE)]
    gradients = [torch.randn(100, device=DEVICE).bfloat16(), torch.randn(7, 3, device=DEVICE)]
    tables = GradientTables()
    assert tables.write(views, gradients, accumulate=False) == CopyReport(bytes_copied=484, launches=1)
    tables.write(views, gradients, accumulate=True)
    assert tables.num_built == 2
    for view, gradient in zip(views, gradients, strict=True):
        assert torch.equal(view, 2 * gradient.float())


def test_float8_is_refused_where_the_gpu_has_none() -> None:
    values = torch.randn(256, device=DEVICE)
    layout = plan_message([values.shape], [values.dtype], [Wire.FLOAT8])
    if torch.cuda.get_device_capability() < FLOAT8_CAPABILITY and torch.version.hip is None:
        with pytest.raises(KernelError, match="need 8.9"):
            pack([values], layout)
    else:
        assert pack([values], layout).report.launches == 1
