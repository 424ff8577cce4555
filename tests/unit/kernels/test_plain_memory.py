"""Tensors that torch only marks as conjugate or negative are computed before anything reads their memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rannc_backend
from rannc_backend.api.record_model import recorded_source
from rannc_backend.checkpoint.reader import CheckpointReader
from rannc_backend.ir.action import Channel
from rannc_backend.kernels.boundary_pack import pack, plan_message
from rannc_backend.kernels.gradient_writes import LATER
from rannc_backend.kernels.message_layout import MessageLayout
from rannc_backend.kernels.plain_memory import (
    crc32_of,
    has_marks,
    has_plain_memory,
    plain_memory,
    without_marks,
)
from rannc_backend.kernels.scale_unless_one import scale_unless_one
from rannc_backend.runtime.agreement import digest
from rannc_backend.runtime.step.messages import make_message
from rannc_backend.runtime.step.send_buffers import SendBuffers
from tests.unit.rannc_backend.checkpoint.checkpoint_jobs import save

COMPLEX = torch.complex(
    torch.linspace(-1, 2, 12, dtype=torch.float64), torch.linspace(3, -5, 12, dtype=torch.float64)
).view(4, 3)
MARKED = {
    "conjugate": COMPLEX.conj(),
    "negative": torch._neg_view(COMPLEX.real.contiguous()),
    "imaginary": COMPLEX.conj().imag,
    "both": torch._neg_view(COMPLEX.conj()),
    "of_bytes": torch._neg_view(torch.arange(12, dtype=torch.uint8).view(4, 3)),
}
PLAIN = {name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for name, tensor in MARKED.items()}


def bits(tensor: Tensor) -> bytes:
    assert has_plain_memory(tensor)
    return tensor.view(-1).view(torch.uint8).numpy().tobytes()


def layout_like(tensors: list[Tensor]) -> MessageLayout:
    return plan_message([tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors])


READERS: dict[str, Callable[[Tensor], bytes]] = {
    "plain_memory": lambda tensor: bits(plain_memory(tensor)),
    "alone in a message": lambda tensor: bits(
        pack([tensor], plan_message([tensor.shape], [tensor.dtype])).message
    ),
    "with others": lambda tensor: _values(pack([tensor] * 2, layout_like([tensor] * 2)).message, tensor),
    "for the user": lambda tensor: bits(make_message([tensor], layout_like([tensor]))),
    "to a stage": lambda tensor: bits(_sent([tensor])),
    "to a stage with others": lambda tensor: _values(_sent([tensor] * 2), tensor),
    "checksum": lambda tensor: str(crc32_of(tensor)).encode(),
    "digest": lambda tensor: str(digest(tensor)).encode(),
}


def _values(message: Tensor, tensor: Tensor) -> bytes:
    return b"".join(map(bits, layout_like([tensor] * 2).views(message)))


def _sent(rows: list[Tensor]) -> Tensor:
    return SendBuffers(torch.device("cpu")).pack(Channel(0, 1, "F"), 0, 1, rows, layout_like(rows)).message


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", MARKED)
def test_what_is_read_is_the_value(kind: str, reader: str) -> None:
    assert has_marks(MARKED[kind]) and not has_marks(PLAIN[kind])
    assert READERS[reader](MARKED[kind]) == READERS[reader](PLAIN[kind])


@pytest.mark.parametrize("kind", ["negative", "imaginary"])
def test_gradients_reach_their_bucket_as_values(kind: str) -> None:
    bucket = torch.ones(12, dtype=torch.float64).view(4, 3)
    torch.ops.rannc.write_gradients_([bucket], [MARKED[kind]], LATER)
    torch.testing.assert_close(bucket, 1 + PLAIN[kind], rtol=1e-15, atol=0)


def test_what_needs_no_copy_gets_none() -> None:
    tensor = torch.randn(4, 3)
    assert plain_memory(tensor) is tensor and without_marks(tensor.t()).data_ptr() == tensor.data_ptr()
    assert has_plain_memory(tensor) and not has_plain_memory(tensor.t())


def test_checkpoints_hold_values(tmp_path: Path) -> None:
    # The format of the files has no complex numbers of two doubles.
    marked = {
        name: without_marks(tensor).to(torch.complex64).conj() if tensor.is_complex() else tensor
        for name, tensor in MARKED.items()
    }
    save(tmp_path, [marked])
    reader = CheckpointReader(tmp_path)
    for name, expected in marked.items():
        assert has_marks(expected) and torch.equal(reader.tensor(name), expected), name


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        ones = torch.complex(torch.ones(3), 2 * torch.ones(3))
        self.turned = nn.Parameter(ones.conj())
        self.register_buffer("shift", ones.conj().imag)


def test_promised_values_keep_their_marks() -> None:
    with rannc_backend.DistributeModelParams():
        model = Marked()
    expected = Marked()
    for name in ("turned", "shift"):
        tape = recorded_source(getattr(model, name))
        assert tape is not None
        assert torch.equal(
            tape.value(tape.key_of(getattr(model, name)), tape.seed), getattr(expected, name).detach()
        ), name


def test_a_complex_bucket_is_scaled_as_one() -> None:
    bucket = torch.complex(torch.ones(5), torch.arange(5.0))
    scale_unless_one([bucket], torch.tensor(0.5))
    assert torch.equal(bucket, torch.complex(torch.full((5,), 0.5), torch.arange(5.0) / 2))
