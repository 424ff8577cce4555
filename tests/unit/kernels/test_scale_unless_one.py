"""The scaling kernel in Triton's interpreter against its reference; the reference itself: tests/unit/rannc_backend/test_tangents.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rannc_backend.kernels.triton_support import HAS_TRITON


def test_the_kernel_gives_what_its_reference_gives(tmp_path: Path) -> None:
    assert HAS_TRITON, "no Triton: `make environment`, or pip install 'rannc-backend[test]'"
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("scale_cases.py"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout)
    assert found["triton"] and not found["problems"], found["problems"][:20]
