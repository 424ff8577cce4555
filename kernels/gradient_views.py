"""Gradients of a backward graph to their views of buckets, in one launch per dtype, with everything that
repeats made once.

In: views of buckets, and the gradients that go there. Out: ``view = gradient``, or ``view + gradient``, cast
where dtypes differ. Terms: a *shape* of a call is the sizes and dtypes of its tensors, which a graph never
changes; a *launch* is a shape at addresses, with its table on the device. Allocators hand out the same few
addresses step by step, so a stage that keeps its launches (`GradientTables`) builds and uploads nothing after
its first steps, and what is left is to ask tensors for their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rannc_backend.kernels.chunk_moves import move_elements
from rannc_backend.kernels.record_table import (
    LARGE,
    SMALL,
    CopyReport,
    LaunchConfig,
    RecordTables,
    Span,
    record_template,
    upload,
)
from rannc_backend.kernels.triton_support import SIMULATED, jit, on_device, tl, triton_dtype

MAX_LAUNCHES = 1024
"""Per stage: groups of gradients, times addresses that take turns, times first and later micro-batches. A
table has a few KB.
"""
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
ACCUMULATE = 4
"""Added to a record's dtype code: the chunk is added to what is there."""
LARGE_FROM_ELEMENTS = 1 << 20


def choose_config(num_elements: int) -> LaunchConfig:
    """Short chunks while there are too few elements to give every multiprocessor several long ones."""
    return LARGE if num_elements >= LARGE_FROM_ELEMENTS else SMALL


@jit
def _gradient_kernel(
    bucket,
    table,
    bucket_dtype: tl.constexpr,
    codes: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    simulated: tl.constexpr,
):
    """Program i moves chunk i to its place, counted from ``bucket``. ``codes``: one bit for each dtype code
    that is in ``table``.
    """
    record = table + tl.program_id(0).to(tl.int64) * 4
    address, place = tl.load(record), bucket.to(tl.int64) + tl.load(record + 1)
    count, kind = tl.load(record + 2).to(tl.int32), tl.load(record + 3).to(tl.int32)
    for code in tl.static_range(4):
        if (codes >> code) & 1:
            if (kind & 3) == code:
                _move_chunk(
                    address, place, count, (kind & 4) != 0, code, bucket_dtype, block, lanes, simulated
                )


@jit
def _move_chunk(
    address,
    place,
    count,
    accumulate,
    code: tl.constexpr,
    bucket_dtype: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    simulated: tl.constexpr,
):
    dtype: tl.constexpr = (
        tl.float32 if code == 0 else tl.float16 if code == 1 else tl.bfloat16 if code == 2 else tl.float64
    )
    compute: tl.constexpr = tl.float64 if bucket_dtype == tl.float64 else tl.float32
    move_elements(address, place, count, accumulate, dtype, bucket_dtype, compute, block, lanes, simulated)


def reference(view: torch.Tensor, gradient: torch.Tensor, *, accumulate: bool) -> None:
    """What the kernel does to one view, in plain PyTorch: sums are formed in float32 (float64 where the view
    is float64) and rounded once.
    """
    compute = torch.float64 if view.dtype == torch.float64 else torch.float32
    view.copy_(view.to(compute) + gradient.to(compute) if accumulate else gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What launches of one shape have in common: records that count from the beginning of each tensor, and
    whose each record is.
    """

    records: np.ndarray
    owners: np.ndarray
    config: LaunchConfig
    codes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    table: torch.Tensor
    shape: _Shape
    first: int
    """Which view of the call the table counts from."""
    report: CopyReport

    def start(self, view: torch.Tensor) -> None:
        config, num_chunks = self.shape.config, self.table.shape[0]
        with on_device(view):
            _gradient_kernel[(num_chunks,)](
                view,
                self.table,
                bucket_dtype=triton_dtype(view.dtype),
                codes=self.shape.codes,
                block=config.block,
                lanes=32 * config.num_warps,
                simulated=SIMULATED,
                num_warps=config.num_warps,
                enable_fp_fusion=False,
            )


_ADDRESS, _IS_CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.is_contiguous


@dataclass(slots=True)
class GradientTables:
    """The launches of one stage. It belongs to one device."""

    kept: RecordTables = field(default_factory=lambda: RecordTables(capacity=MAX_LAUNCHES))
    shapes: dict[Any, _Shape] = field(default_factory=dict)
    """One for each group of gradients that a backward writes together, first or later."""

    @property
    def num_built(self) -> int:
        """Calls for which tables were built and uploaded so far."""
        return self.kept.num_built

    def write(
        self, views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, accumulate: bool
    ) -> CopyReport | None:
        """One launch per dtype of the views; None, and nothing done, where a tensor is of a kind that the
        kernel cannot move.

        Views always have the same sizes at the same addresses: those of a stage's parameters. Nothing may be
        marked as negative.
        """
        report = CopyReport()
        if not all(map(_IS_CONTIGUOUS, gradients)):
            strided = [gradient for gradient in gradients if not gradient.is_contiguous()]
            report += CopyReport(bytes_copied=sum(each.nbytes for each in strided), launches=len(strided))
            gradients = [gradient.contiguous() for gradient in gradients]
        # The fewest questions to tensors that tell: in the steady state this is what a call costs.
        addresses = (*map(_ADDRESS, views), *map(_ADDRESS, gradients))
        key = (accumulate, addresses, tuple([gradient.dtype for gradient in gradients]))
        launches = self.kept.kept(key, views[0].device, lambda: self._make(views, gradients, accumulate))
        if launches is None:
            return None
        for launch in launches:
            launch.start(views[launch.first])
            report += launch.report
        return report

    def _make(
        self, views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], accumulate: bool
    ) -> list[_Launch] | None:
        device = views[0].device
        tensors = (*views, *gradients)
        sizes = [(view.numel(), gradient.numel()) for view, gradient in zip(views, gradients, strict=True)]
        assert all(view == gradient for view, gradient in sizes), f"views and gradients have {sizes} elements"
        if not all(tensor.device == device and tensor.dtype in DTYPE_CODES for tensor in tensors):
            return None
        if not all(view.is_contiguous() for view in views):
            return None
        members: dict[torch.dtype, list[int]] = {}
        for index, view in enumerate(views):
            members.setdefault(view.dtype, []).append(index)
        made = [
            self._launch(
                [views[index] for index in indices],
                [gradients[index] for index in indices],
                indices[0],
                accumulate,
            )
            for indices in members.values()
        ]
        return [launch for launch in made if launch.table.shape[0] > 0]

    def _launch(
        self, views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], first: int, accumulate: bool
    ) -> _Launch:
        kinds, numels = (
            tuple([gradient.dtype for gradient in gradients]),
            tuple([gradient.numel() for gradient in gradients]),
        )
        shape = self._shape(views[0].dtype, kinds, numels, accumulate)
        table = shape.records.copy()
        table[:, 0] += np.array([gradient.data_ptr() for gradient in gradients], dtype=np.int64)[shape.owners]
        places = np.array([view.data_ptr() for view in views], dtype=np.int64)
        table[:, 1] += (places - places[0])[shape.owners]
        report = CopyReport(bytes_copied=sum(numels) * views[0].element_size(), launches=1)
        return _Launch(table=upload(table, views[0].device), shape=shape, first=first, report=report)

    def _shape(
        self, dtype: torch.dtype, kinds: tuple[torch.dtype, ...], numels: tuple[int, ...], accumulate: bool
    ) -> _Shape:
        key = (dtype, kinds, numels, accumulate)
        if key not in self.shapes:
            config = choose_config(sum(numels))
            if torch.float64 in (dtype, *kinds):
                config = LaunchConfig(block=config.block // 2, num_warps=config.num_warps)
            codes = [DTYPE_CODES[kind] for kind in kinds]
            spans = [
                Span(
                    0,
                    0,
                    numel,
                    code + (ACCUMULATE if accumulate else 0),
                    kind.itemsize,
                    dtype.itemsize,
                    config.block,
                )
                for numel, code, kind in zip(numels, codes, kinds)
            ]
            records, owners = record_template(spans)
            self.shapes[key] = _Shape(
                records=records, owners=owners, config=config, codes=sum({1 << code for code in codes})
            )
        return self.shapes[key]
