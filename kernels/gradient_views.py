"""Gradients of a backward graph to their views of buckets, in one launch per dtype, with everything that repeats made once.

In: views of buckets, and the gradients that go there. Out: ``view = gradient``, or ``view + gradient``, cast where dtypes differ. Terms: a
*shape* of a call is the sizes and dtypes of its tensors, which a graph never changes; a *launch* is a shape at addresses, with its table
on the device. Allocators hand out the same few addresses step by step, so a stage that keeps its launches (`GradientTables`) builds and
uploads nothing after its first steps, and what is left is to ask tensors for their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rannc_backend.kernels import gradient_bucket
from rannc_backend.kernels.gradient_bucket import ACCUMULATE, DTYPE_CODES, check_gradients, choose_config
from rannc_backend.kernels.plain_memory import has_marks, without_marks
from rannc_backend.kernels.record_table import CopyReport, KernelError, LaunchConfig, RecordTables, Span, record_template, upload
from rannc_backend.kernels.triton_support import HAS_TRITON, SIMULATED, on_device, triton_dtype

MOST_LAUNCHES = 1024
"""Per stage: groups of gradients, times addresses that take turns, times first and later micro-batches. A table has a few KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What launches of one shape have in common: records that count from the beginning of each tensor, and whose each record is."""

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
            gradient_bucket._bucket_kernel[(num_chunks,)](
                view,
                self.table,
                _BITS_OF_ONE,
                None,
                None,
                None,
                None,
                num_chunks,
                bucket_dtype=triton_dtype(view.dtype),
                codes=self.shape.codes,
                to_bucket=True,
                statistics=False,
                store=True,
                block=config.block,
                lanes=32 * config.num_warps,
                simulated=SIMULATED,
                num_warps=config.num_warps,
                enable_fp_fusion=False,
            )


_BITS_OF_ONE = gradient_bucket._bits_of(1.0)
_ADDRESS, _IS_CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.is_contiguous


@dataclass(slots=True)
class GradientTables:
    """The launches of one stage. It belongs to one device."""

    kept: RecordTables = field(default_factory=lambda: RecordTables(capacity=MOST_LAUNCHES))
    shapes: dict[Any, _Shape] = field(default_factory=dict)
    """One for each group of gradients that a backward writes together, first or later."""

    @property
    def num_built(self) -> int:
        """Calls for which tables were built and uploaded so far."""
        return self.kept.num_built

    def write(self, views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, accumulate: bool) -> CopyReport | None:
        """One launch per dtype of the views; None, and nothing done, where a tensor is of a kind that the kernel cannot move.

        Views always have the same sizes at the same addresses: those of a stage's parameters. Nothing may be marked as negative.
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

    def _make(self, views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], accumulate: bool) -> list[_Launch] | None:
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
            self._launch([views[index] for index in indices], [gradients[index] for index in indices], indices[0], accumulate)
            for indices in members.values()
        ]
        return [launch for launch in made if launch.table.shape[0] > 0]

    def _launch(self, views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], first: int, accumulate: bool) -> _Launch:
        kinds, numels = tuple([gradient.dtype for gradient in gradients]), tuple([gradient.numel() for gradient in gradients])
        shape = self._shape(views[0].dtype, kinds, numels, accumulate)
        table = shape.records.copy()
        table[:, 0] += np.array([gradient.data_ptr() for gradient in gradients], dtype=np.int64)[shape.owners]
        places = np.array([view.data_ptr() for view in views], dtype=np.int64)
        table[:, 1] += (places - places[0])[shape.owners]
        report = CopyReport(bytes_copied=sum(numels) * views[0].element_size(), launches=1)
        return _Launch(table=upload(table, views[0].device), shape=shape, first=first, report=report)

    def _shape(self, dtype: torch.dtype, kinds: tuple[torch.dtype, ...], numels: tuple[int, ...], accumulate: bool) -> _Shape:
        key = (dtype, kinds, numels, accumulate)
        if key not in self.shapes:
            config = choose_config(sum(numels))
            if torch.float64 in (dtype, *kinds):
                config = LaunchConfig(block=config.block // 2, num_warps=config.num_warps)
            codes = [DTYPE_CODES[kind] for kind in kinds]
            spans = [
                Span(0, 0, numel, code + (ACCUMULATE if accumulate else 0), kind.itemsize, dtype.itemsize, config.block)
                for numel, code, kind in zip(numels, codes, kinds)
            ]
            records, owners = record_template(spans)
            self.shapes[key] = _Shape(records=records, owners=owners, config=config, codes=sum({1 << code for code in codes}))
        return self.shapes[key]


def write_views(
    views: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    *,
    accumulate: bool = False,
    tables: GradientTables | None = None,
) -> CopyReport:
    """Each gradient to its contiguous view of a bucket, or added to it; views of one dtype, of one bucket or of several. One launch.

    ``tables``: the caller's; without, a table is built anew. Raises KernelError for views that cannot be, and for gradients of integers.
    """
    if not views:
        return CopyReport()
    check_views(views, gradients)
    report = CopyReport()
    if HAS_TRITON and views[0].is_cuda:
        check_gradients(views[0], gradients)
        marked = [gradient for gradient in gradients if has_marks(gradient)]
        report += CopyReport(bytes_copied=sum(each.nbytes for each in marked), launches=len(marked))
        written = (tables or GradientTables()).write(views, [without_marks(each) for each in gradients], accumulate=accumulate)
        assert written is not None, "checked tensors fit a launch"
        return report + written
    for view, gradient in zip(views, gradients):
        report += gradient_bucket.write_bucket(view.view(-1), [gradient], [0], accumulate=accumulate)
    return report


def check_views(views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Raise KernelError for views that are not contiguous, of one dtype and of their gradients' sizes, naming the first."""
    for index, (view, gradient) in enumerate(zip(views, gradients, strict=True)):
        if view.dtype != views[0].dtype or not view.is_contiguous() or view.numel() != gradient.numel():
            raise KernelError(
                f"view {index} must be contiguous {views[0].dtype} with {gradient.numel()} elements, not {view.dtype} {tuple(view.shape)}"
            )
