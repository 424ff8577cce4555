"""Each point of the semantics (docs/semantics.md) over ranks: fails when the point is broken.

Points that are plain equality are cases of the check "equality"; the others name their function in
contract_checks.py, or in shared_sums_checks.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import choice
from tests.distributed.conftest import OutcomeOf
from tests.distributed.harness.case import Case
from tests.distributed.test_equality import check_ownership


def _case(name: str, model: str, replicas: str, num_micro_batches: int, **members: Any) -> Case:
    per_rank = members.get("stages_per_rank", 1)
    world = sum(int(number) for number in replicas.split(",")) // per_rank
    return Case(
        name=f"contract-{name}",
        model=model,
        replicas=replicas,
        world=world,
        num_micro_batches=num_micro_batches,
        **members,
    )


EQUAL = (
    _case("fourteen_padded", "padded", "1,1,1,1", 3, rows=(4, 4, 4, 2)),
    _case("fourteen_padded_replicas", "padded", "2,2", 4, rows=(4, 4, 4, 2)),
    _case("very_uneven", "mlp_loss", "1,2,1", 3, rows=(1, 9, 2, 1)),
    _case("more_micro_batches_than_rows", "mlp_loss", "1,1", 8, rows=(2, 1)),
    # A rank of one row has its share of what is counted before the step.
    _case("one_row_padded", "padded", "1,1", 2, rows=(1, 4)),
    _case("loss_outside_uneven", "mlp", "1,2", 2, rows=(1, 5, 2)),
    _case("loss_outside_uneven_four", "mlp", "1,1,2", 2, rows=(1, 5, 2, 3)),
    _case("tied_over_four", "tied_embedding", "1,1,1,1", 3),
    _case("tied_over_replicas", "tied_embedding", "2,2", 2),
    _case("three_stages_later", "long_skip", "1,1,1,1", 4),
    _case("skip_over_replicas", "long_skip", "1,2,1", 3),
    _case("frozen", "frozen", "1,1", 2),
    _case("lora_over_four", "lora", "1,1,1,1", 2),
    _case("unused_parameter", "unused_parameter", "1,1", 2),
    _case("several_outputs", "several_outputs", "1,1,1,1", 3),
    _case("dict_output", "dict_output", "1,1", 2),
    _case("dict_output_four", "dict_output", "1,2,1", 2),
    _case("dataclass_output", "dataclass_output", "1,1", 3),
    _case("no_batch_dimension", "no_batch_input", "1,1", 3),
    _case("no_batch_dimension_four", "no_batch_input", "1,2,1", 3),
    _case("auxiliary_loss", "auxiliary_loss", "2,2", 3),
    _case("nonlinear_loss", "root_loss", "1,1", 3),
    _case("nonlinear_loss_four", "root_loss", "1,1,1,1", 3),
    _case("batch_norm_four_stages", "batch_norm", "1,1,1,1", 3, rows=(5, 4, 6, 5)),
    _case("batch_norm_replicas", "batch_norm", "2,2", 2, rows=(5, 4, 6, 5)),
    _case("fill_drain", "mlp_loss", "1,1,1,1", 4, options={"schedule": "fill_drain"}),
    *(
        _case(
            f"reversed_gpipe_{model}",
            model,
            "1,1",
            4,
            check="equality_with_reversed_gpipe",
            options={"schedule": "reversed_gpipe", "bucket_mb": 0.0001},
        )
        for model in ("mlp_loss", "mlp")
    ),
    _case("small_buckets", "mlp_loss", "2", 3, options={"bucket_mb": 0.0001}),
    _case("small_buckets_four", "mlp_loss", "2,2", 3, options={"bucket_mb": 0.0001}),
    _case("rows_not_kept", "mlp_loss", "1,2,1", 3, options={"outputs": "loss"}),
    _case("segments", "gpt2", "1,1", 3, options={"recompute": "segments"}),
    _case("segments_tied", "tied_embedding", "2,1", 2, options={"recompute": "segments"}),
    _case(
        "segments_inductor", "gpt2", "1,1", 2, options={"recompute": "segments"}, stage_compiler="inductor"
    ),
    *(
        _case(f"{schedule}_{model}", model, replicas, number, options={"schedule": schedule})
        for schedule, model, replicas, number in (
            ("zb_h1", "mlp_loss", "1,1,1,1", 5),
            ("zb_h1", "tied_embedding", "2,1", 4),
            ("zb_h1", "long_skip_loss", "1,2,1", 3),
            ("zb_h1", "auxiliary_loss", "2,2", 3),
            ("zb_h1", "root_loss", "1,1", 3),
            ("list_scheduled", "mlp_loss", "1,1,1,1", 8),
            ("list_scheduled", "gpt2", "1,1", 4),
            ("list_scheduled", "long_skip_loss", "1,1,1,1", 6),
            ("list_scheduled", "lora", "1,1,1", 2),
            ("list_scheduled", "batch_norm", "2,2", 2),
        )
    ),
    _case("zb_h1_inductor", "gpt2", "1,1", 3, options={"schedule": "zb_h1"}, stage_compiler="inductor"),
    _case("zb_h1_segments", "gpt2", "1,1", 3, options={"schedule": "zb_h1", "recompute": "segments"}),
    _case("planner_decides", "mlp_loss", "1,1,1,1", 0, options={"costs": "analytic"}),
    # Two values cross the cut in one message, which Inductor's kernels write; what is copied is counted by
    # all ranks.
    _case(
        "written_into_messages",
        "long_skip_loss",
        "1,1",
        3,
        stage_compiler="inductor",
        options={"verbose": True},
        limit_seconds=200.0,
    ),
)
_SIZES = {"rows_of_steps": [[4, 3], [3, 4], [7, 2], [1, 1], [1, 2], [4, 3]]}
_FOUR_SIZES = {"rows_of_steps": [[4, 4, 4, 4], [4, 4, 4, 2], [1, 1, 1, 1], [2, 1, 1, 9]]}
_FROM_ONE = {"rows_of_steps": [[1, 1], [4, 3], [1, 1], [2, 2]]}
OTHER = (
    _case("sizes_change", "mlp_loss", "1,1", 3, check="sizes_change", parameters=_SIZES),
    _case("sizes_change_outside", "mlp", "1,1", 2, check="sizes_change", parameters=_SIZES),
    _case("sizes_change_padded", "padded", "1,2,1", 3, check="sizes_change", parameters=_FOUR_SIZES),
    _case("first_batch_of_one", "mlp_loss", "1,1", 2, check="sizes_change", parameters=_FROM_ONE),
    _case(
        "one_row_alone", "padded", "1", 2, check="sizes_change", parameters={"rows_of_steps": [[3], [1], [2]]}
    ),
    _case(
        "sizes_change_inductor",
        "mlp_loss",
        "1,1",
        2,
        check="sizes_change",
        parameters={"rows_of_steps": [[4, 3], [1, 1], [5, 2]]},
        stage_compiler="inductor",
        limit_seconds=180,
    ),
    _case(
        "sum_over_ranks",
        "mlp",
        "1,1",
        2,
        check="gradients_scaled",
        parameters={"scale": 2.0},
        options={"gradients_reduce_method": "sum"},
    ),
    _case(
        "loss_inside_ignores_the_method",
        "mlp_loss",
        "1,1",
        2,
        check="gradients_scaled",
        parameters={"scale": 1.0},
    ),
    _case("accumulate", "mlp_loss", "1,1", 3, check="accumulate"),
    _case("accumulate_outside", "mlp", "1,2,1", 2, check="accumulate"),
    _case("accumulate_tied", "tied_embedding", "2,2", 2, check="accumulate"),
    _case("incoming_gradient", "mlp_loss", "1,1", 3, check="incoming_gradient"),
    _case("incoming_gradient_nonlinear", "root_loss", "1,1,1,1", 2, check="incoming_gradient"),
    _case("incoming_gradient_outside", "mlp", "1,1", 3, check="incoming_gradient"),
    _case("retain_graph", "mlp_loss", "1,1", 3, check="retain_graph"),
    _case("retain_graph_outside", "mlp", "1,2,1", 2, check="retain_graph"),
    _case("forward_twice", "mlp_loss", "1,1", 3, check="forward_twice"),
    _case("forward_twice_outside", "long_skip", "1,1,1,1", 2, check="forward_twice"),
    _case("forward_without_backward", "mlp_loss", "1,1", 3, check="forward_without_backward"),
    _case("forward_without_backward_outside", "mlp", "1,1", 3, check="forward_without_backward"),
    _case("rows_differentiated", "mlp_loss", "1,1", 3, check="rows_differentiated"),
    _case("rows_differentiated_padded", "padded", "1,2,1", 3, check="rows_differentiated"),
    _case("rows_differentiated_several", "several_outputs", "1,1,1,1", 2, check="rows_differentiated"),
    _case("only_rows_differentiated", "padded", "1,1", 2, check="only_rows_differentiated"),
    *(
        _case(
            f"{check}_{schedule}",
            "mlp_loss",
            "1,1",
            3,
            check=check,
            options={"schedule": schedule},
            parameters=_SIZES if check == "sizes_change" else {},
        )
        for schedule, check in (
            ("zb_h1", "accumulate"),
            ("zb_h1", "retain_graph"),
            ("zb_h1", "rows_differentiated"),
            ("zb_h1", "input_gradients"),
            ("list_scheduled", "sizes_change"),
            ("list_scheduled", "incoming_gradient"),
        )
    ),
    _case("input_gradients", "mlp_loss", "1,1", 3, check="input_gradients"),
    _case("input_gradients_replicas", "long_skip_loss", "2,1", 2, check="input_gradients"),
    _case("input_gradients_replicas_four", "long_skip_loss", "2,1,1", 2, check="input_gradients"),
    _case("gradient_through_the_input", "mlp_loss", "1,1", 2, check="gradient_through_the_input"),
    _case("gradient_through_the_input_four", "mlp_loss", "1,1,1,1", 2, check="gradient_through_the_input"),
    _case("modes", "mlp_loss", "1,1", 3, check="modes"),
    _case("modes_outside", "mlp", "1,1,2", 2, check="modes"),
    _case("modes_of_segments", "gpt2", "1,1", 2, check="modes", options={"recompute": "segments"}),
    _case("modes_tied", "tied_embedding", "1,2,1", 2, check="modes"),
    _case("eval_batch_norm", "batch_norm", "1,1", 2, check="eval_differentiated"),
    _case("eval_batch_norm_four", "batch_norm", "1,1,1,1", 2, check="eval_differentiated"),
    _case("eval_dropout", "dropout", "1,1", 2, check="eval_differentiated"),
    _case("eval_dropout_four", "dropout", "2,2", 2, check="eval_differentiated"),
    _case("eval_first", "mlp_loss", "1,1", 3, check="eval_first"),
    _case("eval_first_outside", "mlp", "1,2,1", 2, check="eval_first"),
    _case("loss_only", "mlp_loss", "1,1", 3, check="loss_only", options={"outputs": "loss"}),
    _case("outputs_by_room", "mlp_loss", "1,1", 3, check="outputs_by_room", rows=(40, 24)),
    _case("outputs_by_room_replicas", "mlp_loss", "1,2", 2, check="outputs_by_room", rows=(24, 8, 32)),
    _case("loss_only_padded", "padded", "1,2,1", 2, check="loss_only", options={"outputs": "loss"}),
    _case("rank_0_feeds", "mlp_loss", "1,1", 2, check="rank_0_feeds", options={"gather_inputs": False}),
    # What is counted before the step is counted on rank 0's rows alone.
    _case("rank_0_feeds_padded", "padded", "1,1", 2, check="rank_0_feeds", options={"gather_inputs": False}),
    _case("nested_inputs", "dataclass_output", "1,1", 2, check="nested_inputs"),
    _case("compiled_in_place", "mlp_loss", "1,1", 2, check="compiled_in_place"),
    _case("compiled_in_place_container", "mlp", "1,1", 2, check="compiled_in_place"),
    _case("one_trace", "mlp_loss", "1,1", 2, check="one_trace"),
    _case("two_models", "mlp_loss", "1,1", 2, check="two_models"),
    _case("too_many_shapes", "padded", "1,1", 2, check="too_many_shapes"),
    _case("shared_sums", "mlp_loss", "2", 3, check="shared_sums", options={"bucket_mb": 0.0001}),
    _case("shared_sums_tied", "tied_embedding", "2,2", 2, check="shared_sums", options={"bucket_mb": 0.0001}),
    _case(
        "shared_sums_in_a_ring",
        "tied_ring",
        "1,1,1",
        2,
        check="shared_sums",
        options={"stage_starts": "layers.2,layers.4"},
    ),
    _case(
        "shared_sums_late",
        "mlp_loss",
        "2,2",
        2,
        check="shared_sums",
        options={"bucket_mb": 0.0001, "sync_allreduce": True},
    ),
    _case("shared_sums_without_memory", "mlp_loss", "2", 3, check="shared_sums", parameters={"without": 1}),
    _case("shared_sums_refused", "mlp_loss", "2", 3, check="shared_sums", options={"shared_memory": False}),
    _case("seed_decides", "dropout", "1,1", 2, check="seed_decides", rows=(20, 20)),
)
# The same eight global rows and weights under plans with 1, 2 and 4 stages, replicas, and other
# micro-batches.
_RANDOM = {"model": "dropout", "check": "same_random_rows"}
RANDOM = (
    _case("random-1", num_micro_batches=2, replicas="1", rows=(8,), **_RANDOM),
    _case("random-1-1", num_micro_batches=2, replicas="1,1", rows=(5, 3), **_RANDOM),
    _case("random-2", num_micro_batches=2, replicas="2", rows=(2, 6), **_RANDOM),
    _case("random-1-1-1-1", num_micro_batches=2, replicas="1,1,1,1", rows=(3, 1, 2, 2), **_RANDOM),
    _case("random-2-2", num_micro_batches=2, replicas="2,2", rows=(3, 1, 2, 2), **_RANDOM),
    _case(
        "random-1-1-recompute",
        num_micro_batches=2,
        replicas="1,1",
        rows=(5, 3),
        options={"recompute": 0},
        **_RANDOM,
    ),
    _case(
        "random-1-1-segments",
        num_micro_batches=2,
        replicas="1,1",
        rows=(5, 3),
        options={"recompute": "segments"},
        **_RANDOM,
    ),
    _case(
        "random-1-1-modules",
        num_micro_batches=2,
        replicas="1,1",
        rows=(5, 3),
        options={"recompute_modules": "layers,Dropout"},
        **_RANDOM,
    ),
    *(
        _case(
            f"random-1-1-1-1-{schedule}",
            num_micro_batches=2,
            replicas="1,1,1,1",
            rows=(5, 3),
            stages_per_rank=2,
            options={"schedule": schedule},
            **_RANDOM,
        )
        for schedule in ("interleaved", "zb_v", "v_half")
    ),
    _case("random-1-2-1-m4", num_micro_batches=4, replicas="1,2,1", rows=(2, 2, 2, 2), **_RANDOM),
)


# The same point in a second shape: minutes together.
ONLY_IN_FULL = (
    "fourteen_padded_replicas", "tied_over_replicas", "batch_norm_four_stages", "lora_over_four", "accumulate_outside",
    "retain_graph_outside", "modes_outside", "modes_tied", "eval_first_outside", "loss_only_padded", "rows_differentiated_several",
    "incoming_gradient_nonlinear", "random-1-2-1-m4", "sum_over_ranks", "incoming_gradient_outside", "forward_without_backward_outside",
    "sizes_change_outside", "sizes_change_padded", "forward_twice_outside", "rows_differentiated_padded", "random-2-2",
    "loss_outside_uneven_four", "dict_output_four", "no_batch_dimension_four", "nonlinear_loss_four", "small_buckets_four",
    "input_gradients_replicas_four", "gradient_through_the_input_four", "eval_batch_norm_four", "eval_dropout_four",
    "random-1-1-1-1-v_half",
)  # fmt: skip
PARAMETERS = choice.cases((*EQUAL, *OTHER, *RANDOM), "contract", ONLY_IN_FULL)


def _parameters(chosen: tuple[Case, ...]) -> list[Any]:
    return [parameter for parameter in PARAMETERS if parameter.values[0] in chosen]


@pytest.mark.parametrize("case", _parameters(EQUAL))
def test_equals_one_process(case: Case, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    if case.num_micro_batches:
        check_ownership(case, outcome)


@pytest.mark.parametrize("case", _parameters(OTHER))
def test_point(case: Case, outcome_of: OutcomeOf) -> None:
    outcome_of(case).raise_if_failed()


def _joined(
    case: Case, outcome_of: OutcomeOf, step: str
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    outcome = outcome_of(case)
    outcome.raise_if_failed()
    kept = [torch.load(result["path"])[step] for result in outcome.results]
    gradients: dict[str, torch.Tensor] = {}
    for part in kept:
        gradients |= part["gradients"]
    return kept[0]["loss"], torch.cat([part["rows"] for part in kept]), gradients


@pytest.mark.parametrize(
    "cases",
    [pytest.param((RANDOM[0], *one.values), id=one.id, marks=one.marks) for one in _parameters(RANDOM[1:])],
)
def test_dropout_does_not_depend_on_the_plan(cases: tuple[Case, Case], outcome_of: OutcomeOf) -> None:
    for step in ("step0", "step1"):
        one_loss, one_rows, one_gradients = _joined(cases[0], outcome_of, step)
        loss, rows, gradients = _joined(cases[1], outcome_of, step)
        assert torch.equal(rows == 0, one_rows == 0), f"{step}: other values were dropped"
        # Two of few elements may be alike by chance, not most of them.
        assert len(torch.unique(rows == 0, dim=0)) > len(rows) // 2, f"{step}: rows have the same mask"
        torch.testing.assert_close(rows, one_rows, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(loss, one_loss, rtol=1e-12, atol=0)
        assert set(gradients) == set(one_gradients)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, one_gradients[name], rtol=1e-10, atol=1e-12)
