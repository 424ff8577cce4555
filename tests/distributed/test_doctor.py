"""`rannc doctor` for real: this host is good, and its two jobs of two ranks say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_the_doctor_finds_this_host_good() -> None:
    command = [sys.executable, "-m", "rannc_backend.cli.main", "doctor", "--json", "--limit", "200"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert result.returncode == 0, [
        finding for finding in findings.values() if finding["status"] == "problem"
    ]
    needed = {
        "Python",
        "torch",
        "MPI",
        "options",
        "shared memory",
        "two ranks",
        "message",
        "all-reduce",
        "abort",
    }
    needed |= {"platform", "MPI launchers", "GPU use", "connections", "training step"}
    assert needed <= set(findings)
    assert findings["two ranks"]["text"].startswith("2 ranks started with mpi on")
    assert "GB/s" in findings["message"]["text"] and "GB/s" in findings["all-reduce"]["text"]
    assert "s after one of its ranks had died" in findings["abort"]["text"]
    assert "as in one process" in findings["training step"]["text"]
    assert findings["connections"]["text"] == "2 ranks reach each other at 127.0.0.1 (loopback)"
