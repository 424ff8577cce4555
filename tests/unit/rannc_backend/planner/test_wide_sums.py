"""Plans under gradient_accumulation_dtype: gradients of 16 bits take six bytes per element, not two."""

from __future__ import annotations

import pytest
import torch

from rannc_backend.errors import PlanError
from rannc_backend.ir.plan import Plan
from rannc_backend.planner.plan_fits_graph import check_plan, exact_schedules
from rannc_backend.settings.options import Config
from tests.unit.rannc_backend.planner.planning_graphs import Chain, SplitModel, plan_stages, split_model

ROWS = 16


def _model(dtype: torch.dtype) -> SplitModel:
    return split_model(Chain(num_layers=4, width=32).to(dtype), {"x": torch.randn(4, 32, dtype=dtype)})


def _plan(model: SplitModel, accumulates_in: str) -> Plan:
    config = Config(partition_num=2, pipeline_num=4, gradient_accumulation_dtype=accumulates_in)
    return plan_stages(
        model.split,
        model.inputs,
        model.needs_grad,
        config,
        world_size=2,
        batch_rows=ROWS,
        fingerprint="wide",
    )


@pytest.mark.parametrize(("dtype", "times"), [(torch.bfloat16, 3), (torch.float16, 3), (torch.float32, 1)])
def test_gradients_of_16_bits_are_planned_with_their_sums(dtype: torch.dtype, times: int) -> None:
    model = _model(dtype)
    plain, wide = (_plan(model, name) for name in ("none", "float32"))
    for before, after in zip(plain.stages, wide.stages, strict=True):
        assert after.predicted.gradient_bytes == times * before.predicted.gradient_bytes > 0
        added = after.predicted.gradient_bytes - before.predicted.gradient_bytes
        assert after.predicted.peak_bytes - before.predicted.peak_bytes >= added


def test_a_plan_that_was_made_for_narrow_sums_needs_room_for_wide_ones() -> None:
    model = _model(torch.bfloat16)
    plan = _plan(model, "none")
    limit = max(stage.predicted.peak_bytes for stage in plan.stages) + 1.0
    possible = exact_schedules(model.split, model.needs_grad)

    def check(accumulates_in: str) -> None:
        config = Config(
            gradient_accumulation_dtype=accumulates_in, mem_limit_gb=limit / 2**30, mem_margin=0.0
        )
        check_plan(
            plan, model.split, model.inputs, config=config,
            fingerprint="wide", world_size=2, possible_schedules=possible, device_memory_bytes=int(limit),
        )  # fmt: skip

    check("none")
    with pytest.raises(PlanError, match="stage 0 needs"):
        check("float32")
