"""Runs the scaling kernel in Triton's interpreter, in a process of its own, and prints {"triton": version,
"problems": [...]} as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from rannc_backend.kernels.scale_unless_one import BLOCK, _scale_kernel, scale_reference

# bfloat16 is left to the GPU: the interpreter truncates where the GPU rounds.
DTYPES = (torch.float32, torch.float16, torch.float64)
SIZES = (1, 15, 127, 4096, 70_003)
SCALES = (1.0, 0.5, 3.0, float("inf"))


def problems() -> list[str]:
    """What differs from the reference, or touches what lies behind the buffer."""
    found = []
    generator = torch.Generator().manual_seed(0)
    for dtype, size, scale in itertools.product(DTYPES, SIZES, SCALES):
        memory = torch.full((size + 64,), 7.0, dtype=dtype)
        memory[:size] = torch.randn(size, dtype=torch.float64, generator=generator).to(dtype)
        memory[size // 2] = 0.0  # times infinity: not a number
        expected = memory.clone()
        number = torch.tensor(scale, dtype=torch.float64)
        scale_reference(expected[:size], number)
        grid = (min(-(-size // BLOCK), 3),)
        _scale_kernel[grid](memory, number, size, wide=dtype == torch.float64, block=BLOCK)
        if not ((memory == expected) | (memory.isnan() & expected.isnan())).all():
            found.append(f"{dtype} {size} times {scale}")
    return found


if __name__ == "__main__":
    import triton

    json.dump({"triton": triton.__version__, "problems": problems()}, sys.stdout)
