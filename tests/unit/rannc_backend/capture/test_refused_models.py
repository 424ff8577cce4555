"""What capture refuses, with the user's line, and that it leaves no setting changed when it does."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from rannc_backend import errors
from rannc_backend.ir.graph_input import StateInput
from tests.unit.rannc_backend.capture.capture_harness import Recorder, fresh_dynamo, trace_settings

HERE = Path(__file__).name
LOGGER = logging.getLogger("user")


@pytest.fixture(autouse=True, params=[True, False], ids=["begun", "again"])
def begins(request):
    """Whether the first trace has a symbolic batch size from its start, as for the backend, or a second one
    is asked for.
    """
    with fresh_dynamo(begins=request.param):
        yield request.param


class Model(nn.Module):
    """A linear layer, then whatever the test wants done."""

    def __init__(self, then):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(3))
        self.then = then

    def forward(self, x):
        y = self.linear(x)
        y = self.then(self, x, y)
        return y * 2


def refusal(model, *args):
    """The error with which capture refuses."""
    before, marks = trace_settings(), [dict(vars(value)) for value in args]
    recorder = Recorder()
    with pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(model, backend=recorder)(*args)
    assert not recorder.graphs
    assert trace_settings() == before and [dict(vars(value)) for value in args] == marks
    return caught.value.inner_exception


def test_graph_break_names_reason_line_and_cure():
    def then(self, x, y):
        print("hello")  # noqa: T201
        return y

    error = refusal(Model(then), torch.randn(4, 3))
    assert type(error) is errors.GraphBreakError
    assert "print" in error.reason and HERE in error.location and "in then" in error.location
    assert error.cure in str(error)


def test_graph_break_inside_of_a_with_block():
    class Inside(Model):
        def forward(self, x):
            with torch.no_grad():
                y = self.linear(x)
                torch._dynamo.graph_break()
                return y + 1

    error = refusal(Inside(None), torch.randn(4, 3))
    assert type(error) is errors.GraphBreakError and "graph_break" in error.reason


def test_graph_break_before_the_first_operator():
    class Early(Model):
        def forward(self, x):
            torch._dynamo.graph_break()
            return self.linear(x)

    error = refusal(Early(None), torch.randn(4, 3))
    assert type(error) is errors.GraphBreakError and HERE in error.location


def test_part_of_a_function_that_dynamo_gave_up():
    inner = Model(lambda self, x, y: y)

    def outer(x):
        for _ in iter(int, 1):  # a generator in a loop with a break in a try block: nothing can be resumed
            try:
                torch._dynamo.graph_break()
                return inner(x)
            finally:
                pass

    error = refusal(outer, torch.randn(4, 3))
    assert type(error) is errors.GraphBreakError and "outer" in error.location


@pytest.mark.parametrize("kind", ["branch", "item", "nonzero", "loop"])
def test_data_dependent_control_flow(kind):
    def then(self, x, y):
        if kind == "branch":
            return y + 1 if y.sum() > 0 else y
        if kind == "item":
            return y * y.sum().item()
        if kind == "nonzero":
            return y[y.sum(1) > 0].sum(0)
        while y.sum() > 100:
            y = y / 2
        return y

    error = refusal(Model(then), torch.randn(4, 3))
    assert type(error) is errors.DataDependentControlFlowError
    assert HERE in error.location


def test_logging_of_the_users_own_is_refused_with_its_cure():
    def then(self, x, y):
        LOGGER.warning("in forward")
        return y

    error = refusal(Model(then), torch.randn(4, 3))
    assert type(error) is errors.GraphBreakError and "is_compiling" in error.cure


def test_logging_once_by_a_library_is_left_out(monkeypatch):
    monkeypatch.setattr(logging.Logger, "shout_once", lambda self, text: None, raising=False)

    def then(self, x, y):
        LOGGER.shout_once("in forward")
        return y

    # The recorder comes first: the library adds its method after the backend was looked up, a restart makes
    # up for it.
    recorder = Recorder()
    model, x = Model(then), torch.randn(4, 3)
    torch.testing.assert_close(torch.compile(model, backend=recorder)(x), model(x))
    assert len(recorder.graphs) == 1


def test_inputs_that_come_after_a_break_are_found(monkeypatch, begins):
    """Where the first trace is not begun with the logger left out, it ends there and has not seen y."""
    monkeypatch.setattr(logging.Logger, "shout_once", lambda self, text: None, raising=False)

    class Later(Model):
        def forward(self, x, y):
            x = self.linear(x)
            LOGGER.shout_once("in forward")
            return ((x - y) ** 2).mean()

    recorder = Recorder()
    # As if the backend had not been looked up before the trace: only then does the logger break it.
    with torch._dynamo.config.patch(ignore_logging_functions=set()):
        torch.compile(Later(None), backend=recorder)(torch.randn(4, 3), torch.randn(4, 3))
    assert [item.kind for item in recorder.graph.inputs if not isinstance(item, StateInput)] == [
        "batch",
        "batch",
    ]
    assert recorder.num_calls == (1 if begins else 3)


@pytest.mark.parametrize("condition", ["equal", "greater", "odd"])
def test_branches_on_the_batch_size(condition):
    def then(self, x, y):
        rows = x.shape[0]
        if rows == 4 if condition == "equal" else rows > 2 if condition == "greater" else rows % 2 == 0:
            return y + 1
        return y

    error = refusal(Model(then), torch.randn(4, 3))
    assert type(error) is errors.DataDependentControlFlowError
    assert "batch size" in str(error) and "rows" in error.location


@pytest.mark.parametrize("which", ["x", "y"])
def test_branch_on_a_size_that_is_only_later_known_as_the_batchs(which):
    def function(x, y):
        z = y + 1 if (x if which == "x" else y).shape[0] > 2 else y
        return x - z

    error = refusal(function, torch.randn(4, 3), torch.randn(4, 3))
    assert type(error) is errors.DataDependentControlFlowError and "shape[0] > 2" in error.location


def test_batch_size_fixed_by_an_operator():
    table = torch.randn(4, 3)
    error = refusal(Model(lambda self, x, y: y + table), torch.randn(4, 3))
    assert type(error) is errors.UnsupportedModelError and "one batch size" in str(error)
    assert "y + table" in error.location


def test_no_batch_dimension():
    model = Model(lambda self, x, y: y)

    def only_numbers(scale):
        return model.linear.weight.sum() * scale

    error = refusal(only_numbers, torch.tensor(2.0))
    assert type(error) is errors.NoBatchDimensionError and "scale" in str(error)


def test_two_sizes_that_could_be_the_batch():
    error = refusal(lambda x, prototypes: x @ prototypes.T, torch.randn(4, 3), torch.randn(7, 3))
    assert type(error) is errors.UnsupportedModelError
    assert "x: 4" in str(error) and "prototypes: 7" in str(error)


def test_a_multiple_of_the_batch_size():
    error = refusal(lambda x, flat: (x.view(-1) * flat).sum(), torch.randn(4, 3), torch.randn(12))
    assert type(error) is errors.UnsupportedModelError and "flat" in str(error)


def test_dimensions_marked_by_the_user_are_lengths():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.randn(()))

        def forward(self, x):
            return x.exp() * self.gain

    model, recorder, x = Scaled(), Recorder(), torch.randn(4, 3)
    torch._dynamo.mark_dynamic(x, 1)
    torch.testing.assert_close(torch.compile(model, backend=recorder)(x), model(x))
    (captured,) = recorder.graphs
    assert [(length.carrier, length.dim) for length in captured.lengths] == [("x_x", 1)]


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


def test_gradients_written_by_hand():
    error = refusal(Model(lambda self, x, y: Halve.apply(y)), torch.randn(4, 3))
    assert type(error) is errors.UnsupportedModelError and "autograd.Function" in str(error)


def test_functions_with_a_backward_pass_where_none_is_needed():
    model = Model(lambda self, x, y: y + Halve.apply(x))
    recorder, x = Recorder(), torch.randn(4, 3)
    torch.testing.assert_close(torch.compile(model, backend=recorder)(x), model(x))


def test_changes_of_inputs_and_parameters_in_place():
    error = refusal(lambda x: x.add_(1).sum(), torch.randn(4, 3))
    assert type(error) is errors.UnsupportedModelError and "x in place" in str(error).replace("x_x", "x")

    def then(self, x, y):
        view = self.linear.weight[0]
        with torch.no_grad():
            view.mul_(2)
        return y

    error = refusal(Model(then), torch.randn(4, 3))
    assert type(error) is errors.UnsupportedModelError


def test_in_place_under_no_grad_on_a_value_with_a_gradient():
    def then(self, x, y):
        with torch.no_grad():
            y[:, 0] = 0
        return y

    error = refusal(Model(then), torch.randn(4, 3))
    assert type(error) is errors.UnsupportedModelError and HERE in error.location


def test_parameters_of_separate_modules():
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    error = refusal(lambda x: two(one(x)), torch.randn(4, 3))
    assert type(error) is errors.UnsupportedModelError and "2 separate modules" in str(error)


def test_parameters_outside_of_any_module():
    weight = nn.Parameter(torch.randn(3, 3))
    error = refusal(lambda x: x @ weight, torch.randn(4, 3))
    assert type(error) is errors.UnsupportedModelError and "weight" in str(error)


def test_models_on_two_devices():
    model = Model(lambda self, x, y: y + self.other[:, :3].to("cpu").sum() if False else y)
    model.count = model.count.to("meta")
    model.then = lambda self, x, y: y + torch.zeros_like(self.count, device="cpu")
    error = refusal(model, torch.randn(4, 3))
    assert type(error) is errors.ModelDevicesError and "meta: count" in str(error)


def test_settings_come_back_when_the_symbolic_trace_fails(begins):
    """With fullgraph Dynamo itself raises in that trace, before it calls the backend (again)."""
    attempts = []

    def then(self, x, y):
        attempts.append(1)
        return y

    class Fails(Model):
        def forward(self, x):
            y = self.linear(x)
            if torch.fx.experimental._config.backed_size_oblivious:
                torch._dynamo.graph_break()
            return y

    before, x = trace_settings(), torch.randn(4, 3)
    recorder = Recorder()
    try:
        torch.compile(Fails(then), backend=recorder, fullgraph=True)(x)
    except torch._dynamo.exc.Unsupported:
        pass
    else:
        pytest.fail("the second trace was meant to fail")
    assert recorder.num_calls == (0 if begins else 1)
    assert trace_settings() == before and not vars(x)


def test_outside_of_dynamo():
    from rannc_backend.capture.graph import capture_or_restart

    with pytest.raises(errors.LaunchError, match="torch.compile"):
        capture_or_restart(torch.fx.symbolic_trace(nn.Linear(2, 2)), [torch.randn(2, 2)])
