"""Prices of blocks from measurements: of the blocks alone, and of whole stages that ran.

In: a `Profile`, and the analytic prices for whatever it does not hold. Out: `MeasuredPricer`.

Terms. Seconds between measured numbers of rows are interpolated, and never fall as rows rise; beyond them the
analytic seconds are scaled to meet the nearest measurement. Another activation budget than the measured one
is scaled alike. A *correction* is what whole stages took, over the sum of their blocks: it is applied to all
blocks of the same structure. Saved bytes are the analytic ones, which are exact; workspace is the larger of
the analytic and the measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rannc_backend.ir.block_graph import Block
from rannc_backend.planner.cost.pricing import BlockPricer, BlockPrices, Floats
from rannc_backend.planner.cost.profile import BlockProfile, StageProfile

_MIN_CORRECTION, _MAX_CORRECTION = 0.2, 5.0  # a correction beyond these says that something else was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Factors on a block's seconds."""

    forward: float = 1.0
    backward: float = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class MeasuredPricer:
    """Prices by structure. `profiles`: by structure and activation budget; `corrections`: by structure."""

    fallback: BlockPricer
    profiles: Mapping[tuple[str, float], BlockProfile]
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    device_name: str = ""
    _known: dict[tuple[str, tuple[int, ...], float], BlockPrices] = field(init=False, default_factory=dict)

    @property
    def budgets(self) -> tuple[float, ...]:
        """See `BlockPricer`."""
        return self.fallback.budgets

    @property
    def holds_gradients(self) -> bool:
        """See `BlockPricer`."""
        return self.fallback.holds_gradients

    @property
    def source(self) -> str:
        """See `BlockPricer`."""
        what = [name for name, given in (("blocks", self.profiles), ("stages", self.corrections)) if given]
        return f"measured {' and '.join(what)} on {self.device_name}" if what else self.fallback.source

    def prices(self, block: Block, rows: Sequence[int], budget: float) -> BlockPrices:
        """See `BlockPricer`."""
        key = (block.structure, tuple(rows), budget)
        if key not in self._known:
            self._known[key] = self._prices(block, rows, budget)
        return self._known[key]

    def _prices(self, block: Block, rows: Sequence[int], budget: float) -> BlockPrices:
        analytic = self.fallback.prices(block, rows, budget)
        correction = self.corrections.get(block.structure, Correction())
        profile, measured_budget = self._profile_of(block.structure, budget)
        if profile is None:
            return _scaled(analytic, correction)
        fitting = [point for point in profile.points if point.fits]
        points = [point.rows for point in fitting]
        least_unfit = min((point.rows for point in profile.points if not point.fits), default=np.inf)
        too_many = np.asarray(rows) >= least_unfit
        if not points:
            return _scaled(analytic, correction, too_many)
        at_points = self.fallback.prices(block, points, measured_budget)
        here = self.fallback.prices(block, rows, measured_budget)
        forward = [float(point.forward_seconds or 0.0) for point in fitting]
        backward = [float(point.backward_seconds or 0.0) for point in fitting]
        peaks = np.array([float(point.peak_bytes or 0) for point in fitting])
        # Recompute costs what the analytic prices say, on the scale of the measurement.
        share = (
            analytic.backward_seconds / np.maximum(here.backward_seconds, 1e-30)
            if budget != measured_budget
            else 1.0
        )
        measured_backward = share * _between(
            rows, points, backward, here.backward_seconds, at_points.backward_seconds
        )
        workspace = np.maximum(np.interp(rows, points, peaks - at_points.saved_bytes), 0.0)
        workspace[np.asarray(rows) > points[-1]] = 0.0
        return _scaled(
            BlockPrices(
                forward_seconds=_between(
                    rows, points, forward, here.forward_seconds, at_points.forward_seconds
                ),
                backward_seconds=measured_backward,
                saved_bytes=analytic.saved_bytes,
                workspace_bytes=np.maximum(
                    analytic.workspace_bytes, workspace if budget == measured_budget else 0.0
                ),
                # Its part in the backward, as the analytic prices say.
                weight_seconds=measured_backward
                * (analytic.weight_seconds / np.maximum(analytic.backward_seconds, 1e-30)),
                kept_bytes=analytic.kept_bytes,
            ),
            correction,
            too_many,
        )

    def _profile_of(self, structure: str, budget: float) -> tuple[BlockProfile | None, float]:
        for candidate in dict.fromkeys((budget, *self.budgets)):
            if (structure, candidate) in self.profiles:
                return self.profiles[structure, candidate], candidate
        return None, budget

    def corrected(self, blocks: Iterable[Block], stages: Iterable[StageProfile]) -> MeasuredPricer:
        """With corrections from whole stages; those with blocks that are not among `blocks` say nothing."""
        of_structure = {block.structure: block for block in blocks}
        plain = MeasuredPricer(fallback=self.fallback, profiles=self.profiles, device_name=self.device_name)
        found: dict[str, list[Correction]] = defaultdict(list)
        for stage in stages:
            known = all(structure in of_structure for structure in stage.structures)
            if not known or not stage.point.fits or stage.budget not in self.budgets:
                continue
            parts = [
                plain.prices(of_structure[s], [stage.point.rows], stage.budget) for s in stage.structures
            ]
            forward = sum(float(part.forward_seconds[0]) for part in parts)
            backward = sum(float(part.backward_seconds[0]) for part in parts)
            correction = Correction(
                forward=_factor(stage.point.forward_seconds, forward),
                backward=_factor(stage.point.backward_seconds, backward),
            )
            for structure in stage.structures:
                found[structure].append(correction)
        corrections = {
            structure: Correction(
                forward=float(np.mean([item.forward for item in items])),
                backward=float(np.mean([item.backward for item in items])),
            )
            for structure, items in sorted(found.items())
        }
        return MeasuredPricer(
            fallback=self.fallback,
            profiles=self.profiles,
            corrections={**self.corrections, **corrections},
            device_name=self.device_name,
        )


def _factor(measured: float | None, predicted: float) -> float:
    if not measured or not np.isfinite(predicted) or predicted <= 0:
        return 1.0
    return float(np.clip(measured / predicted, _MIN_CORRECTION, _MAX_CORRECTION))


def _between(
    rows: Sequence[int], points: Sequence[int], seconds: Sequence[float], analytic: Floats, at_points: Floats
) -> Floats:
    """Seconds at `rows` from those at `points`; `analytic` and `at_points` are the analytic seconds at
    both.
    """
    where = np.asarray(rows, dtype=np.float64)
    rising = np.maximum.accumulate(np.asarray(seconds))
    result = np.interp(where, points, rising)
    below, above = where < points[0], where > points[-1]
    result[below] = (analytic * rising[0] / max(at_points[0], 1e-30))[below]
    result[above] = (analytic * rising[-1] / max(at_points[-1], 1e-30))[above]
    return np.asarray(result)


def _scaled(prices: BlockPrices, correction: Correction, too_many: NDArray[Any] | None = None) -> BlockPrices:
    impossible = (
        np.zeros(len(prices.forward_seconds), dtype=bool) if too_many is None else too_many.astype(bool)
    )
    return BlockPrices(
        forward_seconds=np.where(impossible, np.inf, prices.forward_seconds * correction.forward),
        backward_seconds=np.where(impossible, np.inf, prices.backward_seconds * correction.backward),
        saved_bytes=prices.saved_bytes,
        workspace_bytes=prices.workspace_bytes,
        weight_seconds=prices.weight_seconds * correction.backward,
        kept_bytes=prices.kept_bytes,
    )
