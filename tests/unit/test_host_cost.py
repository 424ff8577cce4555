"""The benchmark of host time runs through, and steps keep what it shows to repeat."""

from __future__ import annotations

import pytest
import torch

from rannc_backend.kernels import boundary_pack
from rannc_backend.runtime.gradients.bucket_layout import plan_buckets
from rannc_backend.runtime.gradients.buckets import GradientBuckets
from rannc_backend.runtime.rows import RowTable
from tests.benchmarks import host_cost


def test_the_benchmark_runs_through() -> None:
    kernel = boundary_pack._pack_kernel
    found = host_cost.measure(8)
    assert boundary_pack._pack_kernel is kernel, "the kernels are back"
    for number in (1, 3):
        costs = found[f"message of {number} value" + "s" * (number > 1)]
        assert set(costs) == {"sent", "received", "gradient sent", "gradient received"} and all(
            0 < cost < 10**5 for cost in costs.values()
        )
    calls = found["call with 50 gradients"]
    assert calls["same addresses"] < calls["built anew"]
    if not torch.cuda.is_available():
        assert set(found["on a device"].values()) == {"not yet measured"}


def test_rows_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RowTable(local_rows=(5, 3), num_micro_batches=2, stage_ranks=((0,), (1,)))
    first = [table.pieces(0, 1, 0, m) for m in range(2)]
    monkeypatch.setattr(RowTable, "_find_pieces", None)
    monkeypatch.setattr(RowTable, "_interval", None)
    assert [table.pieces(0, 1, 0, m) for m in range(2)] == first and first[0][0].stop == 4


def test_views_of_a_bucket_are_made_once_and_do_not_keep_it_in_use() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    layout = plan_buckets([("p", parameter)], {"p": (0,)}, (0,), 1e9)
    buckets = GradientBuckets(
        layout=layout, parameters={"p": parameter}, stage_ranks=(0,), start_reduce=lambda *given: None
    )
    addresses = []
    held = None
    for step in range(5):
        if step == 3:
            held = parameter.grad  # the user keeps one
        parameter.grad = None
        pending = buckets.pending()
        view, _ = pending.target("p")
        view.fill_(step)
        pending.made("p")
        pending.finish()
        buckets.publish(pending, 1.0, keep=False)
        assert parameter.grad is view and view._base is None and not view._is_view()
        addresses.append(view.data_ptr())
        del pending, view
    assert held is not None and bool((held == 2).all())
    assert (
        len(set(addresses[:3])) == 1
        and addresses[3] == addresses[4] != held.data_ptr()
        and len(buckets.tensors()) == 2
    )
    assert {len(pooled.templates) for pooled in next(iter(buckets.pool._buffers.values()))} == {1}
