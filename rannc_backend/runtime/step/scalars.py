"""Scalar outputs from sums over all rows, and the gradient of each sum.

In: the prologue graph (sums that depend on inputs only), the epilogue graph (scalar outputs from sums), and
the sums that each rank made of its own slices. Out: the same scalars on every rank, and partial_gradients:
the gradient of the scalars for each partial sum.

Terms. A *partial* is a sum over the rows of one slice; its total is the sum over all micro-batches and
replicas. Totals of floats are formed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rannc_backend.kernels.plain_memory import plain_memory
from rannc_backend.runtime.gradients.loss_gradients import Number, filled_like

AllReduce = Callable[[torch.Tensor], None]
"""Sums a float64 tensor over all ranks in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumSpec:
    """A partial or prologue sum: node name, dtype and shape of the total."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_doubles(self) -> int:
        """Numbers that it is added up as: two for a complex one."""
        return torch.Size(self.shape).numel() * (2 if self.dtype.is_complex else 1)


def total_over_ranks(
    sums: Mapping[str, torch.Tensor],
    specs: Sequence[SumSpec],
    all_reduce: AllReduce | None,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Totals by name; ``sums`` holds this rank's share of those that it has a share in."""
    if not specs:
        return {}
    zeros = {spec.name: torch.zeros(spec.num_doubles, dtype=torch.float64, device=device) for spec in specs}
    flat = torch.cat(
        [_as_doubles(sums[spec.name]) if spec.name in sums else zeros[spec.name] for spec in specs]
    )
    if all_reduce is not None:
        all_reduce(flat)
    totals = flat.split([spec.num_doubles for spec in specs])
    return {spec.name: _of_doubles(total, spec) for spec, total in zip(specs, totals, strict=True)}


def _as_doubles(total: torch.Tensor) -> torch.Tensor:
    if total.is_complex():
        total = torch.view_as_real(plain_memory(total.to(torch.complex128)))
    return total.reshape(-1).double()


def _of_doubles(doubles: torch.Tensor, spec: SumSpec) -> torch.Tensor:
    values = torch.complex(*doubles.view(-1, 2).unbind(1)) if spec.dtype.is_complex else doubles
    return values.view(spec.shape).to(spec.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarGraphs:
    """Prologue and epilogue of one graph. The callables take tensors in the order of their ``*_inputs``."""

    prologue: Callable[..., Sequence[torch.Tensor]] | None
    prologue_inputs: tuple[str, ...]
    prologue_sums: tuple[SumSpec, ...]
    epilogue: Callable[..., Sequence[torch.Tensor]] | None
    epilogue_inputs: tuple[str, ...]
    partials: tuple[SumSpec, ...]
    linear: bool

    def prologue_totals(
        self, inputs: Mapping[str, Any] | None, all_reduce: AllReduce | None, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Totals of the prologue sums; ``inputs`` (lengths among them) is None on a rank whose rows do not count."""
        if self.prologue is None:
            return {}
        sums: dict[str, torch.Tensor] = {}
        if inputs is not None:
            with torch.no_grad():
                results = self.prologue(*[inputs[name] for name in self.prologue_inputs])
            sums = {spec.name: result for spec, result in zip(self.prologue_sums, results, strict=True)}
        return total_over_ranks(sums, self.prologue_sums, all_reduce, device)

    def scalars(self, totals: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Scalar outputs; ``totals`` holds partials, prologue sums and global_rows by name."""
        if self.epilogue is None:
            return []
        with torch.no_grad():
            return list(self.epilogue(*[totals[name] for name in self.epilogue_inputs]))

    def partial_gradients(
        self, totals: Mapping[str, torch.Tensor], grad_outputs: Sequence[Number], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Gradient of sum(grad_output * scalar) for each partial, in the partial's dtype and shape.

        Where the epilogue is linear, totals of partials may be missing: they do not matter.
        """
        leaves: dict[str, torch.Tensor] = {}
        for spec in self.partials:
            value = totals.get(spec.name)
            if value is None:
                value = torch.ones(spec.shape, dtype=spec.dtype, device=device)
            leaves[spec.name] = value.detach().clone()
            if spec.dtype.is_floating_point or spec.dtype.is_complex:
                leaves[spec.name].requires_grad_()
        grads: Sequence[torch.Tensor | None] = []
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        if self.epilogue is not None and wanted:
            with torch.enable_grad():
                results = self.epilogue(
                    *[leaves.get(name, totals.get(name)) for name in self.epilogue_inputs]
                )
                used = [
                    (result, grad_output)
                    for result, grad_output in zip(results, grad_outputs, strict=True)
                    if result.requires_grad
                ]
                if used:
                    grads = torch.autograd.grad(
                        [result for result, _ in used],
                        wanted,
                        [filled_like(result, grad_output) for result, grad_output in used],
                        allow_unused=True,
                    )
        by_leaf = {id(leaf): grad for leaf, grad in zip(wanted, grads, strict=False)}
        partial_gradients = {}
        for name, leaf in leaves.items():
            grad = by_leaf.get(id(leaf))
            partial_gradients[name] = (
                torch.zeros_like(leaf, requires_grad=False) if grad is None else grad.detach()
            )
        return partial_gradients
