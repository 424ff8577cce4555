"""A run of the forward on fakes gives the graph of that forward, for as long as nothing that it read has
changed; what a graph cannot hold is refused, and nothing is left behind.
"""

from __future__ import annotations

import copy
import random
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import tests.nonstrict_models as nonstrict
from rannc_backend.capture.nonstrict import trace
from rannc_backend.capture.nonstrict.arguments import ParameterPlace, Ranks, call_of, places_of
from rannc_backend.capture.nonstrict.captures import Capture, capture_call, find_capture
from rannc_backend.errors import (
    ModelError,
    NoBatchDimensionError,
    UnsupportedModelError,
)
from rannc_backend.ir.graph_input import StateInput
from rannc_backend.passes.plain_numbers import fill_diagonal
from tests.default_dtype import float64
from tests.nonstrict_models import (
    MODELS,
    REFUSED,
    WIDTH,
    ChosenByCount,
    Ends,
    Paths,
    batch,
    graph_arguments,
)


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with float64():
        yield


def captured(module: nn.Module, *args: Any, **kwargs: Any) -> Capture:
    return capture_call(module, call_of(module, args, kwargs))


def serves(capture: Capture, module: nn.Module, *args: Any, **kwargs: Any) -> str:
    return capture.serves(call_of(module, args, kwargs))


def results(capture: Capture, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the graph gives, as the forward would."""
    call = call_of(module, args, kwargs)
    graph = capture.recorded.captured
    outputs = graph.graph_module(*graph_arguments(capture, call))
    return capture.recorded.result(outputs[: graph.num_user_outputs], call)


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_the_forward_for_every_batch_size(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    capture = captured(model, batch(4))
    for rows in (2, 7):
        assert serves(capture, model, batch(rows, 1)) == ""
        alone = copy.deepcopy(model)
        result, expected = results(capture, model, batch(rows, 1)), alone(batch(rows, 1))
        model.zero_grad()
        result.backward()
        expected.backward()
        torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-13)


def test_new_values_of_buffers_are_outputs() -> None:
    model = MODELS["buffer"]()
    capture = captured(model, batch(4))
    assert capture.recorded.captured.buffer_updates == ("steps", "decay")
    call = call_of(model, (batch(3),), {})
    *_, steps, decay = capture.recorded.captured.graph_module(*graph_arguments(capture, call))
    model(batch(3))
    assert torch.equal(steps, model.steps) and torch.equal(decay, model.decay)


@pytest.mark.parametrize("rows", [5, 9, 17, 18, 100])
def test_the_path_is_that_of_the_whole_batch(rows: int) -> None:
    """Whatever this rank has of it; the capture says for which batches it holds."""
    model = Paths()
    call = call_of(model, (batch(4),), {})
    capture = capture_call(model, call, Ranks(global_rows=lambda local: rows))
    assert [capture.recorded.takes(number) for number in (5, 9, 17, 18, 100)] == [
        (number >= 9) == (rows >= 9) and (number >= 18) == (rows >= 18) for number in (5, 9, 17, 18, 100)
    ]
    torch.testing.assert_close(
        results(capture, model, batch(rows)), model(batch(rows)), rtol=1e-13, atol=1e-13
    )


def test_checks_that_only_raise_are_named() -> None:
    found = captured(MODELS["checks of values"](), batch(4)).recorded.unchecked
    assert len(found) == 3 and all(nonstrict.__file__ in place for place in found), found
    assert not captured(MODELS["lock"](), batch(4)).recorded.unchecked


class _Compiling(Ends):
    def middle(self, x: Tensor) -> Tensor:
        return 3 * x if torch.compiler.is_compiling() else x


def test_what_only_raises_is_found_without_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    for name in ("_recorded", "_without_graph"):
        run = getattr(trace, name)
        monkeypatch.setattr(trace, name, lambda *args, run=run, name=name: runs.append(name) or run(*args))
    captured(MODELS["checks of values"](), batch(4))
    # Until one run comes to its end each makes a graph; the contrary of its answers is tried without.
    assert runs == sorted(runs) and "_without_graph" not in runs[: runs.count("_recorded")]
    assert runs.count("_without_graph") >= 2


def test_libraries_are_told_that_they_are_compiled() -> None:
    """They leave out what a graph cannot hold."""
    graph = captured(_Compiling(), batch(4)).recorded.captured.graph_module.graph
    assert any(3 in node.args for node in graph.nodes) and not torch.compiler.is_compiling()


class _Unused(Ends):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)


def test_what_the_forward_does_not_use_is_no_input() -> None:
    """An optimizer makes a difference between no gradient and zeros."""
    names = [
        item.fqn
        for item in captured(_Unused(), batch(4)).recorded.captured.inputs
        if isinstance(item, StateInput)
    ]
    assert "first.weight" in names and "never.weight" not in names


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold_is_refused_and_nothing_is_left(name: str) -> None:
    make, reason = REFUSED[name]
    model = make()
    before, members = model.state_dict(), set(vars(model))
    tensors = {key: value.clone() for key, value in before.items()}
    python, drawn = random.getstate(), numpy.random.get_state()[2]
    clock, apply = time.time, vars(torch.autograd.Function)["apply"]
    with pytest.raises(ModelError, match=reason):
        captured(model, batch(4))
    assert set(vars(model)) == members and not torch.compiler.is_compiling()
    assert all(torch.equal(tensors[key], value) for key, value in model.state_dict().items())
    assert all(type(parameter) is nn.Parameter and parameter.grad is None for parameter in model.parameters())
    assert random.getstate() == python and numpy.random.get_state()[2] == drawn
    assert time.time is clock and vars(torch.autograd.Function)["apply"] is apply


@pytest.mark.parametrize("name", ["global tensor", "kept gradient", "backward", "clock"])
def test_the_users_line_is_named(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        captured(REFUSED[name][0](), batch(4))
    assert nonstrict.__file__ in caught.value.location


class _Switched(Ends):
    """Reads values in the ways that code does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.settings = {"shift": 0.5, "powers": [1, 2]}
        self.options, self.numbers = Options(), Numbers(0)

    def middle(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.settings["shift"] + FACTOR * cell_reader()
        if self.options.inner.doubled:
            x = x * 2
        return sum(x**power for power in self.settings["powers"]) if self.training else x


class Options:
    """An object in an attribute, with one in it."""

    def __init__(self) -> None:
        self.inner = Inner()


class Inner:
    """See `Options`."""

    def __init__(self) -> None:
        self.doubled = False


class Other(Inner):
    """With the same members."""


class Numbers(random.Random):
    """What it has is no member."""


FACTOR = 3.0


def _make_reader() -> Any:
    value = 1.0

    def read() -> float:
        return value

    def write(new: float) -> None:
        nonlocal value
        value = new

    return read, write


cell_reader, cell_writer = _make_reader()


def _replace_global(model: Any) -> None:
    globals()["FACTOR"] = 5.0


def _replace_function(model: Any) -> None:
    globals()["cell_reader"] = lambda: 7.0


CHANGES = {
    "trained": (lambda model: model.first.weight.requires_grad_(False), "parameters"),
    "type": (lambda model: model.last.float(), "parameters"),
    "attribute": (lambda model: setattr(model, "scale", 3.0), "the model.scale"),
    "item": (lambda model: model.settings.update(shift=1.0), "the model.settings['shift']"),
    "item of a list": (lambda model: model.settings["powers"].append(3), "powers"),
    "object": (lambda model: setattr(model.options.inner, "doubled", True), "doubled"),
    "another object": (lambda model: setattr(model.options, "inner", Other()), "options.inner"),
    "another object with hidden state": (lambda model: setattr(model, "numbers", Numbers(1)), "numbers"),
    "mode": (lambda model: model.eval(), "training"),
    "global": (_replace_global, "FACTOR"),
    "function": (_replace_function, "cell_reader"),
    "cell": (lambda model: cell_writer(4.0), "value"),
    "layer": (lambda model: setattr(model, "last", nn.Linear(WIDTH, WIDTH)), "last"),
    "hook": (lambda model: model.last.register_forward_hook(lambda *_: None), "_forward_hooks"),
    "new attribute": (lambda model: setattr(model, "extra", 1), "extra"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_value_that_has_changed_ends_a_capture(what: str) -> None:
    change, place = CHANGES[what]
    model = _Switched()
    capture = captured(model, batch(4))
    assert serves(capture, model, batch(4)) == ""
    kept = dict(globals())
    try:
        change(model)
        assert place in serves(capture, model, batch(4))
        if what == "type":
            return  # which the plain model does not take
        second = captured(model, batch(4))
        trained = [item.requires_grad for item in second.recorded.captured.inputs if item.kind == "parameter"]
        assert trained == [parameter.requires_grad for parameter in model.parameters()]
        torch.testing.assert_close(results(second, model, batch(3)), model(batch(3)))
    finally:
        cell_writer(1.0)
        globals().update(kept)


def test_a_value_that_is_set_to_what_it_was_changes_nothing() -> None:
    model = _Switched()
    capture = captured(model, batch(4))
    model.scale = float("2.0")
    model.settings["powers"] = model.settings["powers"]
    model.last.weight.data.zero_()
    assert serves(capture, model, batch(4)) == ""
    model.options.inner = Inner()
    assert serves(capture, model, batch(4)) == ""
    model.options.inner.doubled = True
    assert "options.inner" in serves(capture, model, batch(4))


@pytest.mark.parametrize("mode", [torch.no_grad, lambda: torch.autocast("cpu"), torch.inference_mode])
def test_modes_of_torch_end_a_capture(mode: Any) -> None:
    model = Ends()
    capture = captured(model, batch(4))
    with mode():
        assert serves(capture, model, batch(4)) == "a mode of torch"


class _Arguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, pair: Any = None, *rest: Any, scale: float = 1.0, flag: Any = None) -> Any:
        y = self.layer(x) * scale
        if pair is not None:
            y = y + pair["left"] * pair["right"][0]
        return {"y": y, "x": x, "scale": scale, "nothing": None, "pair": (y.sum(), flag)}


def test_arguments_and_results_keep_their_structure() -> None:
    model = _Arguments()
    pair = {"left": batch(4, 1), "right": [batch(4, 2), "word"]}
    capture = captured(model, batch(4), pair, scale=2.0)
    kinds = {item.name: item.kind for item in capture.recorded.captured.inputs if item.kind == "batch"}
    assert set(kinds) == {"x_x", "x_pair_left", "x_pair_right_0"}
    x, other = batch(3), {"left": batch(3, 1), "right": [batch(3, 2), "word"]}
    result, expected = results(capture, model, x, other, scale=2.0), model(x, other, scale=2.0)
    assert result["x"] is x and result["nothing"] is None and result["scale"] == 2.0
    torch.testing.assert_close((result["y"], result["pair"][0]), (expected["y"], expected["pair"][0]))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((batch(4),), {}),
        ((batch(4),), {"scale": 2.5}),
        ((batch(4),), {"scale": 2.0, "flag": 1}),
        ((batch(4).float(),), {"scale": 2.0}),
        ((batch(4).requires_grad_(),), {"scale": 2.0}),
        ((batch(4)[:, :3],), {"scale": 2.0}),
        ((batch(4), None), {"scale": 2.0}),
    ],
)
def test_other_arguments_need_another_capture(args: Any, kwargs: Any) -> None:
    model = _Arguments()
    capture = captured(model, batch(4), scale=2.0)
    call = call_of(model, args, kwargs)
    assert capture.serves(call) == "other arguments" and find_capture([capture], call) is None
    assert find_capture([capture], call_of(model, (batch(9),), {"scale": 2.0})) is capture


class _Holder:
    def __init__(self) -> None:
        self.tensor = batch(4)


def test_tensors_that_are_hidden_in_objects_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="flag is a _Holder that holds tensors"):
        captured(_Arguments(), batch(4), flag=_Holder())


def test_sparse_arguments_and_foreign_parameters_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="plain dense tensors"):
        captured(_Arguments(), batch(4).to_sparse())
    with pytest.raises(UnsupportedModelError, match="does not belong to the model"):
        captured(_Arguments(), nn.Parameter(batch(4)))


class _Neighbours(nn.Module):
    """Sums over the edges of a graph that all samples have."""

    def __init__(self, way: str) -> None:
        super().__init__()
        matrix = torch.tensor([[0.0, 1, 0], [1, 0, 1], [0, 2, 0]], dtype=torch.float64)
        edges = matrix.to_sparse().coalesce()
        self.way, self.layer = way, nn.Linear(3, 3, dtype=torch.float64)
        self.register_buffer("matrix", matrix if way == "dense" else edges if way == "sparse" else None)
        if way == "edges":
            self.register_buffer("indices", edges.indices())
            self.register_buffer("weights", edges.values())

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.way == "edges":
            target, source = self.indices
            return torch.zeros_like(x).index_add(1, target, x[:, source] * self.weights).square().mean()
        product = torch.sparse.mm if self.way == "sparse" else torch.matmul
        return product(self.matrix, x.t()).square().mean()


def test_a_sparse_buffer_is_refused_and_its_cures_work() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(
        UnsupportedModelError, match="buffer matrix is a Tensor with layout torch.sparse_coo"
    ) as refused:
        captured(_Neighbours("sparse"), x)
    assert "to_dense()" in refused.value.cure and "index_add" in refused.value.cure
    for way in ("dense", "edges"):
        captured(_Neighbours(way), x)


class _Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.layer(x) @ x.transpose(1, 2)
        return (scores.masked_fill(mask, 0.0) @ x).mean()


def test_a_mask_of_as_many_rows_as_the_batch_is_none_of_its_rows() -> None:
    model = _Mask()
    mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    capture = captured(model, batch(5), mask)
    assert [item.name for item in capture.recorded.captured.inputs if item.kind == "batch"] == ["x_x"]
    torch.testing.assert_close(results(capture, model, batch(3), mask), model(batch(3), mask))


def test_a_batch_of_one_row_is_traced_as_a_larger_one() -> None:
    model = Ends()
    capture = captured(model, batch(1))
    torch.testing.assert_close(results(capture, model, batch(3)), model(batch(3)))


def test_without_rows_there_is_no_batch() -> None:
    class Numbers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum() * len(range(x.shape[0]))

    with pytest.raises(NoBatchDimensionError):
        captured(Numbers(), torch.tensor(1.0))


def test_a_cache_that_is_filled_once_is_no_change() -> None:
    class Caching(Ends):
        cache: Any = None

        def middle(self, x: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = {"scale": 2.0}
            return x * self.cache["scale"]

    model = Caching()
    capture = captured(model, batch(4))
    assert model.cache == {"scale": 2.0} and serves(capture, model, batch(4)) == ""
    model.cache["scale"] = 3.0
    assert "scale" in serves(capture, model, batch(4))


class _State:
    """As einx keeps it: an object that is never changed, but replaced."""

    def __init__(self, **values: Any) -> None:
        self.kinds = dict(values)
        self.seen, self.order = {"torch", *values}, [tuple(values)]
        self.table = torch.ones(3)


def _copy_of(state: _State, *seen: str, **more: Any) -> _State:
    made = _State(**state.kinds | more)
    made.table = state.table
    made.seen |= state.seen.union(seen)
    return made


STATE = types.SimpleNamespace(value=_State(scale=2.0))


@pytest.mark.parametrize("what", ["a copy", "another value", "another key", "another set", "another tensor"])
def test_an_object_that_is_replaced_by_a_copy_is_no_change(what: str) -> None:
    """Others are: a graph that is captured has the values that the first call found."""
    changes: dict[str, Callable[[], _State]] = {
        "a copy": lambda: _copy_of(STATE.value),
        "another value": lambda: _copy_of(STATE.value, scale=STATE.value.kinds["scale"] + 1.0),
        "another key": lambda: _copy_of(STATE.value, **{f"scale{len(STATE.value.kinds)}": 2.0}),
        "another set": lambda: _copy_of(STATE.value, str(len(STATE.value.seen))),
        "another tensor": lambda: _State(scale=2.0),
    }

    class Replacing(Ends):
        def middle(self, x: Tensor) -> Tensor:
            STATE.value = changes[what]()
            return x * STATE.value.kinds["scale"]

    STATE.value = _State(scale=2.0)
    model = Replacing()
    if what != "a copy":
        with pytest.raises(UnsupportedModelError, match="changes .*STATE.value"):
            captured(model, batch(4))
        return
    capture = captured(model, batch(4))
    model(batch(4))
    assert serves(capture, model, batch(4)) == ""
    torch.testing.assert_close(results(capture, model, batch(4)), model(batch(4)))
    STATE.value = _copy_of(STATE.value, scale=3.0)
    assert "STATE" in serves(capture, model, batch(4))


def test_tensors_have_one_place_and_all_their_names() -> None:
    model = MODELS["tied"]()
    places = {place.names[0]: place for place in places_of(model)}
    assert places["first.weight"].names == ("first.weight", "last.weight")
    assert isinstance(places["first.weight"], ParameterPlace) and "alias" not in places


def test_modules_are_noted_and_lines_are_the_users() -> None:
    capture = captured(MODELS["comprehension"](), batch(4))
    nodes = capture.recorded.captured.graph_module.graph.nodes
    layers = [node for node in nodes if node.target is torch.ops.aten.addmm.default]
    assert [node.meta["module_path"] for node in layers] == ["towers.0", "towers.1", "towers.2", "last"]
    assert all(nonstrict.__file__ in node.meta["stack_trace"] for node in layers)
    capture = captured(MODELS["checks"](), batch(4))
    graph = capture.recorded.captured.graph_module.graph
    (after,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default)
    assert after.meta["module_path"] == "block"


class _Lazy(dict):  # type: ignore[type-arg]
    """Imports what it is asked for, as transformers' tables of configurations do."""

    def items(self) -> Any:
        raise AssertionError("asked for its items")

    values = __iter__ = items


_TABLE = _Lazy(scale=2.0)


def test_a_table_that_makes_its_items_is_not_asked_for_them() -> None:
    class Scaled(Ends):
        def middle(self, x: Tensor) -> Tensor:
            return x * _TABLE["scale"]

    model = Scaled()
    capture = captured(model, batch(4))
    assert serves(capture, model, batch(4)) == ""
    dict.__setitem__(_TABLE, "scale", 3.0)
    try:
        assert serves(capture, model, batch(4)).endswith("_TABLE['scale']")
    finally:
        dict.__setitem__(_TABLE, "scale", 2.0)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("shape", [(3, 3), (7, 3), (3, 7), (9, 2), (4, 4, 4), (5, 1)])
def test_a_diagonal_is_filled_as_torch_fills_it(shape: tuple[int, ...], wrap: bool) -> None:
    expected, found = torch.zeros(shape), torch.zeros(shape)
    assert fill_diagonal(found, 5.0, wrap) is found
    assert torch.equal(found, expected.fill_diagonal_(5.0, wrap=wrap))


def test_a_diagonal_over_the_batch_fixes_no_size() -> None:
    class Pairs(Ends):
        def middle(self, x: Tensor) -> Tensor:
            flat = x.flatten(1)
            return (flat @ flat.t()).fill_diagonal_(0.0).sum() * x

    model = Pairs()
    capture = captured(model, batch(4))
    for rows in (3, 6):
        torch.testing.assert_close(results(capture, model, batch(rows)), model(batch(rows)))


class _PlacesOfTokens(nn.Module):
    """Places of tokens have no batch dimension; both kinds together have the length of the tokens."""

    def forward(self, x: Tensor, text_places: Tensor, image_places: Tensor) -> Tensor:
        return x * torch.cat((text_places, image_places)).sum(-1, keepdim=True)


@pytest.mark.parametrize("rows", [4, 2, 3])
def test_the_batch_size_is_the_one_that_may_change_alone(rows: int) -> None:
    model, places = _PlacesOfTokens(), (torch.randn(2, 3), torch.randn(3, 3))
    capture = captured(model, torch.randn(rows, 5, WIDTH), *places)
    other = torch.randn(7, 5, WIDTH)
    assert serves(capture, model, other, *places) == ""
    torch.testing.assert_close(results(capture, model, other, *places), model(other, *places))


def test_a_count_of_selected_rows_chooses_the_path() -> None:
    model, some, none = ChosenByCount(), batch(6), batch(6)
    some[:, 0, 0], none[:, 0, 0] = torch.arange(6.0), 0.0
    captures = [captured(model, some), captured(model, none)]
    for x, capture in zip((some, none), captures, strict=True):
        assert len(capture.recorded.decisions) == 1
        assert find_capture(captures, call_of(model, (x,), {})) is capture
        torch.testing.assert_close(results(capture, model, x), model(x), rtol=1e-13, atol=1e-13)
    some[:, 0, 0] = torch.tensor([0.0, 0.0, 2.0, 0.0, 0.0, 0.0])
    assert find_capture(captures, call_of(model, (some,), {})) is captures[0]
    torch.testing.assert_close(results(captures[0], model, some), model(some), rtol=1e-13, atol=1e-13)
