"""`rannc verify` for real: scripts over two ranks and in one process, right ones, wrong ones, and such as
cannot be compared.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rannc_backend.cli.verify import described, diagnosis
from rannc_backend.errors import VerificationError
from rannc_backend.verify import job
from rannc_backend.verify.launching import Listener, Verified, verify
from rannc_backend.verify.settings import VerifySettings
from tests.distributed.harness.launch import environment, launcher
from tests.distributed.harness.template import Templates

WORKER = Path(__file__).with_name("workers") / "verify_worker.py"
ROOT = Path(__file__).parents[2]
PIPELINE = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}
REPLICAS = {"RANNC_PARTITION_NUM": "1", "RANNC_REPLICA_NUM": "2", "RANNC_PIPELINE_NUM": "2"}


def run(
    case: str, templates: Templates, options: dict[str, str], *, limit_seconds=120.0, auto=True, **settings
) -> Verified:
    chosen = VerifySettings(
        script=str(WORKER),
        arguments=(case,),
        num_ranks=2,
        **{"num_steps": 2, **settings},
        limit_seconds=limit_seconds,
    )
    command = [*launcher(2), *templates.command([str(job.__file__)])]
    seen: list[tuple[str, int]] = []
    listener = Listener(
        begins=lambda mode: None,
        step=lambda mode, number: seen.append((mode, number)),
        again=lambda reason: None,
    )
    verified = verify(
        chosen, command, environment({"PYTHONPATH": str(ROOT), **options}), listener, may_use_own_dtype=auto
    )
    assert ("ranks", len(verified.result.steps)) in seen or verified.result.ended != "steps"
    return verified


def is_equal(verified: Verified, *, tolerance: float = 1e-10) -> bool:
    result = verified.result
    assert result.num_differences == 0, [described(difference) for difference in result.differences]
    assert all(largest.relative < tolerance for step in result.steps for largest in step.largest.values()), (
        result.steps
    )
    return diagnosis(verified).startswith("EQUAL")


@pytest.mark.full
@pytest.mark.parametrize("options", [PIPELINE, REPLICAS])
def test_a_right_script_is_equal(templates, options):
    verified = run("outside", templates, options)
    assert is_equal(verified) and verified.result.narrowest == "float64"
    assert verified.plan.startswith(
        "2 stages on ranks 0 | 1, 2 micro-batches" if options is PIPELINE else "1 stage on ranks 0,1, 2 micro"
    )
    assert any("dropout is 0" in note for note in verified.result.notes)
    first = verified.result.steps[0]
    num_copies = 1 if options is PIPELINE else 2
    assert (first.num_calls, first.num_compared) == (
        2,
        {"output": 4, "gradient": 2 * 10 * num_copies, "parameter": 10 * num_copies},
    )


@pytest.mark.parametrize("layers", [{"transformer.h": 2}, pytest.param({}, marks=pytest.mark.full)])
def test_gpt2_is_equal_with_fewer_layers_too(templates, layers):
    verified = run("gpt2", templates, PIPELINE, layers=layers)
    assert (
        is_equal(verified, tolerance=1e-6)
        and verified.result.narrowest == "float32"
        and "loss_utils.py" in verified.result.narrowest_at
    )
    assert (
        verified.result.steps[0].num_compared["gradient"] == 4 + 12 * (2 if layers else 4) + 1
    )  # the tied embedding is on both ranks
    assert verified.result.steps[0].loss is not None


def test_parameters_that_one_replica_updates_are_equal_on_all(templates):
    verified = run("gpt2", templates, {**REPLICAS, "RANNC_ZERO_STAGE": "1"}, layers={"transformer.h": 2})
    assert is_equal(verified, tolerance=1e-6)
    # The gradient of each is on one rank, its value on both.
    first = verified.result.steps[0].num_compared
    assert first["parameter"] == 2 * first["gradient"]


@pytest.mark.parametrize("options", [PIPELINE, pytest.param(REPLICAS, marks=pytest.mark.full)])
def test_a_wrong_gradient_of_one_rank_is_named(templates, options):
    verified = run("wrong_gradient", templates, options)
    first = verified.result.differences[0]
    assert (first.step, first.call, first.kind, first.name, first.rank, first.index) == (
        1,
        1,
        "gradient",
        "head.bias",
        1,
        (1,),
    )
    assert first.here == pytest.approx(1.001 * first.there, rel=1e-9)
    assert diagnosis(verified).startswith("DIFFERENT: the gradient head.bias on rank 1, in step 1,")
    found = {(difference.kind, difference.name) for difference in verified.result.differences}
    if options is PIPELINE:
        # From the gradients that there are, the updates are right. Of replicas one makes another update than
        # the reference.
        assert found == {("gradient", "head.bias")}
        assert verified.result.num_differences == 4, "two backwards in each of two steps"
    assert {name for kind, name in found if kind == "gradient"} == {"head.bias"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "reason"), [("noise", "random numbers"), ("statistics", "batch normalisation")]
)
def test_what_cannot_be_compared_in_training_mode_is_in_evaluation_mode(templates, case, reason):
    verified = run(case, templates, PIPELINE)
    assert is_equal(verified) and verified.settings.evaluation and reason in verified.reasons[0]


@pytest.mark.full
def test_a_script_that_fails_in_float64_is_compared_in_its_own_dtype(templates):
    verified = run("single", templates, PIPELINE)
    assert (
        is_equal(verified, tolerance=1e-4)
        and verified.settings.dtype == "own"
        and "in float64" in verified.reasons[0]
    )
    assert verified.result.ended == "script" and verified.result.steps[0].num_compared["gradient"] == 2


@pytest.mark.parametrize(
    ("case", "limit_seconds", "words"),
    [
        (
            "fails",
            60.0,
            [
                "on its ranks failed on rank 1: KeyError: 'learning_rate'",
                "verify_worker.py:",
                "mpirun -np 2 python",
            ],
        ),
        ("plain", 60.0, ["ended without a call of a model that is compiled", 'backend="rannc"']),
        pytest.param(
            *(
                "hangs",
                40.0,
                [
                    "has not come to its end",
                    "rank 0: ",
                    "verify_worker.py:",
                    "rank 1: ",
                    "in main",
                    "--timeout-seconds",
                ],
            ),
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_cannot_be_run_has_cause_place_and_cure(templates, case, limit_seconds, words):
    with pytest.raises(VerificationError) as caught:
        run(case, templates, PIPELINE, limit_seconds=limit_seconds, auto=False)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_plain_model_casts_where_the_option_has_the_compiled_one_cast(templates):
    options = {**PIPELINE, "RANNC_PIPELINE_NUM": "1", "RANNC_AUTOCAST": "bfloat16"}
    verified = run("outside", templates, options, dtype="own")
    assert verified.result.num_differences == 0 and verified.result.narrowest == "bfloat16"
