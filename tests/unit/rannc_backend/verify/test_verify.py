"""The parts of `rannc verify` in one process: tensors in values, rows of ranks, what counts as different,
jobs that end badly, words.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from rannc_backend.cli.verify import _layers, described, diagnosis, launch_command, print_verified
from rannc_backend.errors import OptionValueError, UserInputError, VerificationError
from rannc_backend.verify import recording
from rannc_backend.verify.comparing import Comparison, NarrowestDtype, largest_in, tolerance_of
from rannc_backend.verify.launching import Listener, Verified, verify
from rannc_backend.verify.leaves import replaced, tensors_of
from rannc_backend.verify.models import Models, keep_layers, modules_behind
from rannc_backend.verify.records import Records
from rannc_backend.verify.rows import Layout, layout_of
from rannc_backend.verify.settings import Result, VerifySettings

SETTINGS = VerifySettings(script="train.py", num_ranks=2, num_steps=3, limit_seconds=2.0)
Pair = namedtuple("Pair", "first second")


@dataclass
class Held:
    mask: torch.Tensor
    number: int = 3


def test_tensors_are_found_and_replaced_in_whatever_holds_them() -> None:
    a, b, c, d, e = (torch.full((2,), float(index)) for index in range(5))
    other = {"keep": [1, "x", None]}
    value = ([a, Pair(b, 1)], UserDict(x=c), Held(d), {"y": e}, other)
    assert [(path, float(tensor[0])) for path, tensor in tensors_of(value)] == [
        ("[0][0]", 0.0), ("[0][1][0]", 1.0), ("[1].x", 2.0), ("[2].mask", 3.0), ("[3].y", 4.0),
    ]  # fmt: skip
    changed = replaced(value, lambda path, tensor: tensor + 10)
    assert [float(tensor[0]) for _, tensor in tensors_of(changed)] == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert isinstance(changed[0][1], Pair) and isinstance(changed[1], UserDict) and changed[2].number == 3
    assert changed[4] is other and value[2].mask is d, "what has no tensor stays, and so does what was given"
    assert replaced(value, lambda path, tensor: tensor) is value


def test_a_value_that_holds_itself_is_looked_at_once() -> None:
    held = Held(torch.zeros(1))
    held.itself = held
    assert len(tensors_of(held)) == 1


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    outer=st.integers(1, 3),
    inner=st.integers(1, 3),
    dim=st.integers(0, 1),
)
def test_parts_of_ranks_make_the_whole_and_gradients_go_back(
    sizes: list[int], outer: int, inner: int, dim: int
) -> None:
    total = sum(sizes)
    whole = torch.rand(outer, total, inner, 2).view(outer * total * inner, 2)
    parts = [part.reshape(-1, 2) for part in whole.view(outer, total, inner, 2).split(sizes, 1)]
    if dim:
        whole, parts = whole.T.contiguous(), [part.T.contiguous() for part in parts]
    layout = layout_of(parts, whole)
    assert all(torch.equal(layout.part(whole, rank), part) for rank, part in enumerate(parts))
    summed = layout.gradient(list(parts), whole, averages=False)
    # Of a value that all ranks have whole, gradients are averaged; of one rank that is the same.
    assert torch.equal(summed, whole) or (layout.is_whole and torch.allclose(summed, whole))
    if not layout.is_whole:
        assert torch.allclose(layout.gradient(list(parts), whole, averages=True), whole / len(parts))


@pytest.mark.parametrize("whole", [(4, 5), (5, 3), (4, 3, 1)])
def test_parts_of_another_shape_do_not_make_the_whole(whole: tuple[int, ...]) -> None:
    """Their rows are as many, but longer; or as long, but not as many; or of other dimensions."""
    assert layout_of([torch.ones(2, 3), torch.ones(2, 3)], torch.ones(whole)) == Layout(None)


def test_a_value_that_every_rank_has_gets_the_mean_of_the_gradients() -> None:
    layout = layout_of([torch.tensor(1.0), torch.tensor(2.0)], torch.tensor(1.5))
    assert layout == Layout(None)
    assert layout.gradient([torch.tensor(1.0), None], torch.tensor(0.0), averages=False) == 0.5


def test_rounding_is_no_difference_and_more_is_one_with_its_place() -> None:
    comparison = Comparison()
    there = torch.tensor([[1.0, -4.0], [2.0, 0.0]], dtype=torch.float64)
    assert comparison.value("gradient", "w", 0, there * (1 + 1e-12), there)
    here = there.clone()
    here[0, 1] += 1e-6
    assert not comparison.value("gradient", "w", 1, here, there)
    (found,) = comparison.differences
    assert (found.rank, found.index, found.scale) == (1, (0, 1), 4.0) and found.relative == pytest.approx(
        2.5e-7
    )
    assert "element [0, 1] is -3.999999, in one process -4;" in described(found)
    assert comparison.step.largest["gradient"].name == "w" and comparison.step.num_compared == {"gradient": 2}


@pytest.mark.parametrize(
    ("here", "there", "equal"),
    [
        (float("nan"), float("nan"), True),
        (float("inf"), float("inf"), True),
        (float("nan"), 1.0, False),
        (float("inf"), 1.0, False),
        (1.0, float("nan"), False),
    ],
)
def test_values_that_are_not_finite_must_be_so_on_both_sides(here: float, there: float, equal: bool) -> None:
    mine, theirs = (torch.tensor([value, 1.0], dtype=torch.float64) for value in (here, there))
    assert Comparison().value("output", "loss", 0, mine, theirs) is equal


def test_the_largest_value_is_a_finite_one() -> None:
    inf, nan = float("inf"), float("nan")
    assert largest_in([torch.tensor([nan, 0.25]), torch.tensor([-inf, inf, -0.5]), torch.ones(0)]) == 0.5
    assert (
        largest_in([torch.tensor([nan])]) == largest_in([torch.tensor([inf, -inf])]) == largest_in([]) == 0.0
    )


def test_another_shape_and_a_missing_value_are_differences() -> None:
    comparison = Comparison()
    assert not comparison.value("output", "x", 0, torch.zeros(2), torch.zeros(3))
    comparison.missing("gradient", "w", "no rank has a gradient")
    assert [difference.problem for difference in comparison.differences] == [
        "shape [2] in place of [3]",
        "no rank has a gradient",
    ]


def test_of_many_differences_the_first_are_kept_and_all_counted() -> None:
    comparison = Comparison()
    for index in range(25):
        comparison.missing("gradient", str(index), "no rank has a gradient")
    assert [difference.name for difference in comparison.differences] == [str(index) for index in range(20)]
    assert comparison.num_differences == 25


def test_zeros_have_the_scale_of_their_kind() -> None:
    comparison, noise = Comparison(), torch.full((2,), 1e-17, dtype=torch.float64)
    assert comparison.value("gradient", "key.bias", 0, noise, torch.zeros(2), floor=1e-3)
    assert not comparison.value("gradient", "key.bias", 0, noise, torch.zeros(2))


def test_an_update_is_compared_by_what_it_changes() -> None:
    before = torch.ones(3)
    there = before - 1e-4
    assert Comparison().update("parameter", "w", 0, there + 1.2e-7, there, before), "a rounding of float32"
    assert not Comparison().update("parameter", "w", 0, before - 1.02e-4, there, before), "2 % more"
    assert not Comparison().update("buffer", "count", 0, torch.tensor(3), torch.tensor(4), torch.tensor(3))


def test_the_narrowest_dtype_is_found_with_its_line() -> None:
    with NarrowestDtype() as found:
        x = torch.ones(2, dtype=torch.float64) * 2
        assert found.dtype == torch.float64 and not found.location
        (x.float() + 1).double()
    assert found.dtype == torch.float32 and found.location.startswith(f"{__file__}:")
    assert (
        tolerance_of(torch.float64)
        < 1e-10
        < tolerance_of(torch.float32)
        < 1e-4
        < tolerance_of(torch.bfloat16)
        < 0.1
    )


def test_models_are_found_behind_what_is_compiled_and_made_ready() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2), nn.Linear(2, 2)))
    criterion = nn.MSELoss()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return criterion(model(x), x)

    assert modules_behind(loss) == [criterion, model] and modules_behind(model.forward) == [model]
    models = Models(SETTINGS.model_copy(update={"layers": {"1": 2}, "evaluation": True}))
    assert models.see(loss) == [0, 1] and models.see(loss) == []
    assert (
        len(model[1]) == 2
        and model[1][0].p == 0.0
        and model[0].weight.dtype == torch.float64
        and not model.training
    )
    assert [name for _, name, _ in models.tensors()][0] == "Sequential 2: 0.weight"
    assert models.trained_by(torch.optim.SGD(model.parameters())) and not models.trained_by(
        torch.optim.SGD(nn.Linear(1, 1).parameters())
    )
    with pytest.raises(UserInputError, match="no parameters that `rannc verify` can find"):
        models.see(lambda x: x)
    with pytest.raises(UserInputError, match="have no values before its first call"):
        models.see(nn.Linear(2, 2, device="meta").forward)


def test_layers_that_are_not_there_are_told_with_those_that_are() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(1, 1)])})
    with pytest.raises(UserInputError, match=r"no list of layers 'layer'(.|\n)*did you mean 'layers'"):
        keep_layers(model, "layer", 1)
    with pytest.raises(UserInputError, match="'layers' has 1 layers, and 2 were to be kept"):
        keep_layers(model, "layers", 2)
    assert _layers(["transformer.h=2", "a=b=1"]) == {"transformer.h": 2, "a=b": 1}
    for wrong in ("h", "h=", "=2", "h=0", "h=-1"):
        with pytest.raises(OptionValueError, match="transformer.h=2"):
            _layers([wrong])


def test_records_are_private_and_run_nothing(tmp_path) -> None:
    records = Records(tmp_path)
    tensor = torch.arange(6).view(2, 3).T
    records.write(1, "call-0", {"input.0": tensor, "input.1": tensor}, {"kinds": ["batch"]})
    event = records.read(1, "call-0")
    assert torch.equal(event.of("input.")["0"], tensor) and event.facts == {"kinds": ["batch"]}
    assert records.has(1, "call-0") and not records.has(0, "call-0")
    assert (tmp_path / "rank-1").stat().st_mode & 0o077 == 0

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    torch.save({"tensors": {}, "facts": Evil()}, tmp_path / "rank-1" / "evil.pt")
    with pytest.raises(Exception, match="[Ww]eights"):
        records.read(1, "evil")
    assert not (tmp_path / "run").exists()


# A job without torch: what ranks leave in their directory, by the first argument of the script.
JOB = r"""
import json, pathlib, sys, time
case, folder, mode = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
settings = json.loads((folder / "settings.json").read_text())
def fail(rank, **failure):
    (folder / f"failure-{mode}-{rank}.json").write_text(json.dumps(failure))
if case == "hangs":
    stack = 'Current thread 0x1 (most recent call first):\n  File "/x/train.py", line 7 in load\n  File "/x/train.py", line 2 in <module>\n'
    (folder / f"stacks-{mode}-1.txt").write_text(stack)
    time.sleep(100)
if case == "waits":
    fail(1, what="KeyError: 'lr'", place="train.py:3, in main")
    time.sleep(100)
if case == "early":
    fail(0, what="ImportError" if settings["dtype"] == "float64" else "tried again"); sys.exit(1)
if case == "dies":
    print("the last words"); sys.exit(3)
if case == "noise" and not settings["evaluation"]:
    fail(0, needs="random numbers"); fail(1, what="rank 0 has gone", by_other=True); sys.exit(1)
if case == "dtypes" and settings["dtype"] == "float64":
    (folder / "rank-0").mkdir()
    fail(0, what="RuntimeError: Double and Float\nmore"); sys.exit(1)
if case in ("one", "noise", "dtypes", "two"):
    for rank in range(1 if case == "one" else 2):
        (folder / f"rank-{rank}").mkdir(exist_ok=True)
    (folder / "result.json").write_text(json.dumps({"steps": [], "differences": [], "num_differences": 0, "num_parameters": 1,
        "tolerance": 1e-9, "narrowest": "float64", "ended": "steps"}))
"""


def run_job(case: str, **settings: object) -> Verified:
    chosen = SETTINGS.model_copy(update=settings)
    listener = Listener(begins=lambda mode: None, step=lambda mode, number: None, again=lambda reason: None)
    return verify(
        chosen,
        [sys.executable, "-c", JOB, case],
        os.environ,
        listener,
        may_use_own_dtype=chosen.num_steps == 3,
    )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "hangs",
            [
                "train.py on its ranks has not come to its end after",
                "at rank 1: /x/train.py:7, in load",
                "--timeout-seconds",
            ],
        ),
        ("early", ["failed on rank 0: ImportError"]),
        ("waits", ["failed on rank 1: KeyError: 'lr'", "at train.py:3, in main", "by hand"]),
        ("dies", ["ended with exit code 3", "rannc doctor"]),
        ("never", ["without a call of a model", "torch.compile"]),
        ("one", ["2 ranks were started, and 1 have called the model", "rannc doctor"]),
    ],
)
def test_jobs_that_end_badly_have_cause_place_and_cure(
    case: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rannc_backend.verify.launching._ENDING_SECONDS", 0.2)
    monkeypatch.setattr("rannc_backend.verify.launching._GRACE_SECONDS", 0.2)
    with pytest.raises(VerificationError) as caught:
        run_job(case, limit_seconds=0.5 if case == "hangs" else 30.0, num_steps=3 if case == "early" else 1)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert case != "dies" or caught.value.output == "the last words"


def test_other_settings_are_tried_where_the_first_attempt_needs_them() -> None:
    verified = run_job("noise", limit_seconds=30.0)
    assert verified.settings.evaluation and "plain torch draws others" in verified.reasons[0]
    verified = run_job("dtypes", limit_seconds=30.0)
    assert (
        verified.settings.dtype == "own"
        and "RuntimeError: Double and Float; its own dtypes" in verified.reasons[0]
    )
    with pytest.raises(VerificationError, match="Double and Float"):
        run_job("dtypes", limit_seconds=30.0, num_steps=1)


def printed(result: Result) -> str:
    console = Console(file=io.StringIO(), width=140)
    verified = Verified(
        settings=SETTINGS, result=result, plan="1 stage", reasons=(), seconds={"ranks": 2.0, "reference": 1.0}
    )
    print_verified(verified, console)
    return console.file.getvalue()


def test_the_page_ends_with_a_sentence() -> None:
    comparison = Comparison()
    comparison.value("output", "loss", 0, torch.tensor(1.0), torch.tensor(1.0))
    comparison.loss(1.0, 1.0)
    comparison.end_step()
    facts = {
        "num_parameters": 7,
        "tolerance": 1e-9,
        "narrowest": "float32",
        "narrowest_at": "model.py:3, in forward",
        "ended": "script",
    }
    text = printed(Result(steps=tuple(comparison.steps), differences=(), num_differences=0, **facts))
    assert re.search(
        r"EQUAL: 1 output of 1 step on 2 ranks are what one process has; the script ended there \(2 s", text
    )
    assert "(the model computes in float32, at model.py:3, in forward)" in text
    comparison.value("parameter", "a[0]", 1, torch.tensor([2.0]), torch.tensor([1.0]))
    result = Result(
        steps=tuple(comparison.steps), differences=tuple(comparison.differences), num_differences=8, **facts
    )
    text = printed(result)
    assert "DIFFERENT: the parameter a[0] on rank 1, in step 2, is the first" in text and "and 3 more" in text
    assert "parameter a[0] on rank 1: element [0] is 2, in one process 1; the difference is 1.0e+00" in text
    assert Result.model_validate_json(result.model_dump_json()) == result
    assert diagnosis(Verified(settings=SETTINGS, result=result, plan="", reasons=(), seconds={})).startswith(
        "DIFFERENT"
    )


def test_ranks_are_started_as_the_user_says() -> None:
    assert launch_command("/usr/bin/mpirun", 3)[:3] == ["/usr/bin/mpirun", "-np", "3"]
    assert "torch.distributed.run" in launch_command(None, 2)
    assert launch_command(None, 2, f"{sys.executable} -x 'a b'")[:3] == [sys.executable, "-x", "a b"]
    with pytest.raises(OptionValueError, match="--launch"):
        launch_command(None, 2, "no-such-launcher -n 2")


def test_inputs_are_known_with_the_dimension_of_their_samples() -> None:
    x, hidden, mask, other = torch.randn(3, 4), torch.randn(2, 3, 4), torch.randn(4, 4), torch.randn(3, 4)
    call = recording._Call(0)
    call.seen += [(x, True), (hidden.movedim(1, 0), True), (mask, False)]
    assert call.kind_of(x) == ("batch", 0)
    assert call.kind_of(hidden) == ("batch", 1)
    assert call.kind_of(mask) == ("same", 0)
    assert call.kind_of(other) == ("unused", 0)
