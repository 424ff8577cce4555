"""What several examples begin with: a text that every machine has, and the checkpoint of an earlier run.

In: the standard library's own sources; the flags --save and --resume. Out: bytes as a tensor; whether there
is something to resume.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch


def standard_library_text(most_bytes: int = 4_000_000) -> torch.Tensor:
    """Bytes of the standard library's modules, one after the other, as an int64 vector."""
    text = b""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= most_bytes:
            break
    return torch.frombuffer(bytearray(text[:most_bytes]), dtype=torch.uint8).long()


def has_checkpoint(flags: argparse.Namespace) -> bool:
    """Whether there is something to resume from."""
    return bool(flags.resume and flags.save) and any(Path(flags.save).glob("step-*"))
