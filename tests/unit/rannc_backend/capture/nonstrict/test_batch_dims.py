"""Samples along another dimension of the inputs than the first: said by the option, found where the forward ties
sizes, and asked for where two dimensions could be meant.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tests.row_number_models as row_number_models
from rannc_backend import compiled_call
from rannc_backend.capture.analysis import analyze
from rannc_backend.capture.nonstrict.arguments import ALONE, BatchDims, Call, call_of
from rannc_backend.capture.nonstrict.captures import Capture, capture_call, find_capture, refuse_other_dim
from rannc_backend.compiled_call import batch_dim_check
from rannc_backend.errors import UnclearBatchDimError, UserInputError
from rannc_backend.passes.pipeline import PassError
from rannc_backend.settings.options import Config
from rannc_backend.settings.sources import resolve_config
from tests.batch_dim_models import LENGTH, MODELS, TOKENS, UNCLEAR, WIDTH, Entry, Loop
from tests.default_dtype import float64
from tests.kept_models import MODELS as KEPT
from tests.nonstrict_models import WIDTH as KEPT_WIDTH
from tests.nonstrict_models import ChosenByCount, graph_arguments


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with float64():
        yield


def call_with_option(entry: Entry, model: nn.Module, inputs: dict[str, Any]) -> Call:
    dims = BatchDims.of_option(Config(batch_dim=entry.option).batch_dims)
    return call_of(model, (), inputs, dims)


def results(capture: Capture, call: Call) -> tuple[Any, ...]:
    """What the graph gives, as the forward would."""
    graph = capture.recorded.captured
    outputs = graph.graph_module(*graph_arguments(capture, call))
    result = capture.recorded.result(outputs[: graph.num_user_outputs], call)
    return result if isinstance(result, tuple) else (result,)


@given(st.data())
def test_samples_come_first_and_go_back(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=4))
    tensors = [torch.randn(shape) for shape in shapes]
    dims = [data.draw(st.integers(0, max(len(shape) - 1, 0))) for shape in shapes]
    call = call_of(nn.Identity(), tensors, {}).moved(dims)
    assert call.dims == tuple(dims)
    for index, (mine, own) in enumerate(zip(call.tensors, tensors, strict=True)):
        places = [call.dim_of_tensor(index, dim) for dim in range(own.dim())]
        assert [call.dim_of_given(index, place) for place in places] == list(range(own.dim()))
        assert [mine.shape[place] for place in places] == list(own.shape)
        assert not own.dim() or places[dims[index]] == 0
    back = call.as_given([tensor.contiguous() for tensor in call.tensors])
    assert all(
        each.is_contiguous() and torch.equal(each, own) for each, own in zip(back, tensors, strict=True)
    )


def test_an_option_names_inputs_and_containers_of_them() -> None:
    entry = MODELS["word model"]
    model, inputs = entry.make(), entry.batch(3)
    assert call_with_option(entry, model, inputs).dims == (1, 1, 1, 1)
    everywhere = BatchDims.of_option(Config(batch_dim=1).batch_dims)
    # What has no such dimension has its samples along its last one.
    assert call_of(Loop(), (), MODELS["loop"].batch(3), everywhere).dims == (1, 0)
    one = BatchDims(by_input={"hidden": 1, "hidden_1": 2})
    assert call_of(model, (), inputs, one).dims == (0, 0, 1, 2)
    with pytest.raises(UserInputError, match=r"batch_dim names state, .* ids, targets, hidden_0, hidden_1"):
        call_of(model, (), inputs, BatchDims(by_input={"state": 1}))
    with pytest.raises(UserInputError, match=r"batch_dim says 2 of the input ids \[7, 3\], which has 2 dim"):
        call_of(model, (), inputs, BatchDims(by_input={"ids": 2}))


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_the_forward_for_every_number_of_samples(name: str) -> None:
    entry = MODELS[name]
    torch.manual_seed(0)
    model = entry.make()
    alone = copy.deepcopy(model)  # a layer of torch's keeps what it has worked out in its first call
    capture = capture_call(model, call_with_option(entry, model, entry.batch(4)))
    for num_rows in (2, 6, 3):
        inputs = entry.batch(num_rows, 1)
        call = call_with_option(entry, model, inputs)
        assert find_capture([capture], call) is capture
        mine, expected = results(capture, call), alone(**inputs)
        for found, wanted in zip(mine, expected if isinstance(expected, tuple) else (expected,), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    longer = {key: torch.cat([value, value]) for key, value in inputs.items() if key in ("ids", "targets")}
    if longer:
        assert find_capture([capture], call_with_option(entry, model, {**inputs, **longer})) is None


@pytest.mark.parametrize(("name", "dims"), [("hidden", (0, 1, 0)), ("loop", (1, 0))])
@pytest.mark.parametrize("num_rows", [1, 2, LENGTH])
def test_tied_sizes_say_where_samples_are(name: str, dims: tuple[int, ...], num_rows: int) -> None:
    """Also of one sample, and of as many as there are tokens."""
    entry = MODELS[name]
    model = entry.make()
    assert capture_call(model, call_of(model, (), entry.batch(num_rows))).dims == dims


def test_an_argument_that_is_given_back_is_the_argument() -> None:
    class Back(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x).mean(), x

    model, x = Back(), torch.randn(LENGTH, 3, WIDTH)
    call = call_of(model, (x,), {}, BatchDims(otherwise=1))
    assert results(capture_call(model, call), call)[1] is x


class Contrast(nn.Module):
    """Samples meet, as they are meant to: each is to be told from the others of the batch."""

    def __init__(self, of_tokens: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.linear, self.of_tokens = nn.Linear(WIDTH, WIDTH), of_tokens

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.rnn(self.embedding(x))[0][:, -1] if self.of_tokens else self.linear(x)
        return F.cross_entropy(hidden @ hidden.t(), torch.arange(x.size(0)))


def refused(model: nn.Module, inputs: dict[str, Any]) -> str:
    """What is said where samples meet; "" where they may."""
    capture = capture_call(model, call_of(model, (), inputs))

    def ask(error: PassError) -> None:
        refuse_other_dim(capture.recorded.captured, model, (), inputs, ALONE, error)

    try:
        analyze(capture.recorded.captured, where_rows_meet=ask)
    except UnclearBatchDimError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", UNCLEAR)
def test_it_is_asked_which_dimension_is_meant(name: str) -> None:
    entry = MODELS[name]
    inputs = entry.batch(3)
    if name == "word model":
        inputs["hidden"] = tuple(torch.zeros(2, 3, WIDTH) for _ in range(2))
    said = refused(entry.make(), inputs)
    first = "ids [7, 3]" if "ids" in inputs else "x [7, 3, 12]"
    assert f"dimension 1 of {first}" in said and "batch_dim" in said, said
    assert ("batch_first=False" in said.split("What to change")[0]) == (name == "deciding")


def test_it_is_not_asked_where_samples_are_to_meet() -> None:
    assert not refused(Contrast(of_tokens=False), {"x": torch.randn(5, WIDTH)})
    assert not refused(Contrast(of_tokens=True), {"x": torch.randint(TOKENS, (5, LENGTH))})
    make, _ = KEPT["values in the model's own forward"]
    assert not refused(make(), {"x": torch.randn(4, 4, KEPT_WIDTH)})


@pytest.mark.parametrize("name", ["numbered", "iterated", "halves", "first half", "share"])
def test_it_is_not_asked_where_rows_are_only_numbered(name: str) -> None:
    """Code that loops over its rows runs as written, and mixes nothing; shares of a batch are sums of scalars."""
    x, y = row_number_models.batch(4, 0)
    assert not refused(row_number_models.MODELS[name](), {"x": x, "y": y})


class Shifted(nn.Module):
    """Each token is to tell the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.linear(x)[:-1], x[1:])


class Placed(nn.Module):
    """Its code makes a number of the length, to have the places of tokens from a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 1, WIDTH))
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(x + self.table[: x.size(0)])).square().mean()


def test_it_is_asked_where_rows_have_places() -> None:
    x = torch.randn(LENGTH, 3, WIDTH)
    assert "dimension 1 of x" in refused(Placed(), {"x": x})
    assert "dimension 1 of x" in refused(Shifted(), {"x": x})


def test_it_is_not_asked_where_it_is_unknown_what_an_operator_does() -> None:
    assert not refused(ChosenByCount(), {"x": torch.randn(4, 5, KEPT_WIDTH)})


def test_it_is_not_asked_with_the_option_nor_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = MODELS["pooled"]
    model, inputs = entry.make(), entry.batch(3)
    captured = capture_call(model, call_of(model, (), inputs)).recorded.captured
    error = PassError(None, "they meet")
    ours = compiled_call._Call(kwargs=inputs)
    monkeypatch.setattr(compiled_call, "_CURRENT", ContextVar("call", default=ours))
    for config, num_ranks in ((Config(), 1), (Config(batch_dim="0"), 2), (Config(gather_inputs=False), 2)):
        batch_dim_check(config, num_ranks, captured)(error)
    with pytest.raises(UnclearBatchDimError):
        batch_dim_check(Config(), 2, captured)(error)
    # A function that is compiled is called as such.
    ours.function, ours.args, ours.kwargs = lambda number, values: number * model(**values), (2.0, inputs), {}
    with pytest.raises(UnclearBatchDimError, match="args_1_x"):
        batch_dim_check(Config(), 2, captured)(error)


@pytest.mark.parametrize("value", ["x", "-1", "1,2", "x=", "x=1,", 11, {"x": -1}, {"x": "y"}, [1]])
def test_values_that_are_no_dimensions_are_refused(value: object) -> None:
    with pytest.raises(UserInputError, match="batch_dim"):
        resolve_config({"batch_dim": value}, {})


def test_another_dimension_takes_the_capture_that_moves_it() -> None:
    assert resolve_config({"batch_dim": {"x": 1, "h": 0}}, {}).batch_dims == {"x": 1, "h": 0}
    assert resolve_config({"batch_dim": 1}, {}).batch_dims == {"": 1}
    with pytest.raises(UserInputError, match="batch_dim 0 with capture, which is dynamo"):
        resolve_config({"batch_dim": 1, "capture": "dynamo"}, {})
    assert resolve_config({"batch_dim": 0, "capture": "dynamo"}, {}).batch_dims == {"": 0}
