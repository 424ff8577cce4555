"""The adapter to torch's private parts. Every function that relies on one is tried here; seen on torch
2.13.0.

When a test of this file fails on another version, rannc_backend/capture/dynamo.py or capture_trace.py has to
learn its ways.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import re

import pytest
import torch
from torch import nn

from rannc_backend.capture import dynamo as capture_dynamo
from rannc_backend.capture import dynamo_sizes
from rannc_backend.capture import graph as capture
from rannc_backend.capture.graph import renew_guards, run_without_check_of_guards, trace_again
from rannc_backend.passes.plain_numbers import rows_hint
from tests.unit.rannc_backend.capture.capture_harness import Recorder, fresh_dynamo, trace_settings


@pytest.fixture(autouse=True)
def dynamo():
    with fresh_dynamo():
        yield


def inspected(function, *args, probe, restarts=0, **restart_options):
    """What `probe(call, graph_module, example_inputs)` gives in the backend call after so many restarts."""
    results = []

    def backend(graph_module, example_inputs):
        call = capture_dynamo.find_dynamo_call()
        previous = capture_dynamo.previous_restart(call)
        if previous is not None:
            previous.restore()
        if len(results) < restarts:
            results.append(None)
            capture_dynamo.restart_trace(call, args, **restart_options)
        results.append(probe(call, graph_module, example_inputs))
        return graph_module.forward

    torch.compile(function, backend=backend)(*args)
    return results[-1]


def test_find_dynamo_call():
    model = nn.Linear(3, 3)

    def step(x):
        return model(x)

    call = inspected(step, torch.randn(4, 3), probe=lambda call, *_: call)
    assert call.code is step.__code__ and not call.is_resumed and call.skipped_functions == ()


def dotted_path(source, root):
    """`h.0.weight` from `L['self']._modules['h']._modules['0']._parameters['weight']` below `L['self']`."""
    rest = source.removeprefix(root)
    rest = re.sub(r"\._(?:modules|parameters|buffers)\[", "[", rest)
    rest = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", rest)
    return rest.strip(".")


def test_scope_and_sources():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(3, 3)])

        def forward(self, x):
            return self.inner[0](x)

    model, x = Model(), torch.randn(4, 3)

    def probe(call, graph_module, example_inputs):
        found = {}
        for node in graph_module.graph.find_nodes(op="placeholder"):
            source = capture_dynamo.source_of(node)
            chain = [
                capture_dynamo.source_value(part, call.scope) for part in capture_dynamo.source_chain(source)
            ]
            path = dotted_path(capture_dynamo.source_name(source), "L['self']")
            found[path] = (chain, capture_dynamo.is_argument(source, call.code))
        return found

    found = inspected(model, x, probe=probe)
    chain, _ = found["inner.0.weight"]
    assert chain[0] is model and chain[-1] is model.inner[0].weight
    chain, is_argument = next(value for key, value in found.items() if "inner" not in key)
    assert chain[-1] is x and is_argument


def test_closures_are_no_arguments():
    table = torch.randn(4, 3)
    names = inspected(
        lambda x: x * table,
        torch.randn(4, 3),
        probe=lambda call, graph, _: [
            capture_dynamo.is_argument(capture_dynamo.source_of(node), call.code)
            for node in graph.graph.find_nodes(op="placeholder")
        ],
    )
    assert sorted(names) == [False, True]


def test_arguments_of_inner_functions_are_arguments():
    def model(x, y):
        scaled = [part * y for part in (x, x + 1)]
        return sum(value @ (lambda: x)().T for value in scaled)

    def probe(call, graph, _):
        nodes = graph.graph.find_nodes(op="placeholder")
        return [capture_dynamo.is_argument(capture_dynamo.source_of(node), call.code) for node in nodes]

    assert inspected(model, torch.randn(4, 3), torch.randn(4, 3), probe=probe) == [True, True]


def shape_of_input(call, graph_module, example_inputs):
    values = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
    return next(value.shape for value in values if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("rows", [4, 1])
def test_restart_makes_the_batch_symbolic(rows):
    x = torch.randn(rows, 3)
    before, marks = trace_settings(), dict(vars(x))
    assert inspected(lambda x: x.exp(), x, probe=shape_of_input) == (rows, 3)
    torch._dynamo.reset()
    shape = inspected(lambda x: x.exp(), x, probe=shape_of_input, restarts=1)
    assert isinstance(shape[0], torch.SymInt) and shape[1] == 3
    torch._dynamo.reset()
    # As often as it takes.
    shape = inspected(lambda x: x.exp(), x, probe=shape_of_input, restarts=3)
    assert isinstance(shape[0], torch.SymInt)
    assert trace_settings() == before and dict(vars(x)) == marks


def test_restart_with_another_hint():
    def probe(call, graph_module, example_inputs):
        shape = shape_of_input(call, graph_module, example_inputs)
        conditions = dynamo_sizes.size_conditions(call)
        dynamo_sizes.forget_size_conditions(call, {shape[0].node.expr})
        return shape[0].node.hint, conditions

    x = torch.randn(1, 3)
    hint, conditions = inspected(
        lambda x: x.exp() + 1 if x.shape[0] > 2 else x.exp(), x, probe=probe, restarts=1, hint=53
    )
    assert hint == 53 and "_dynamo_hint_overrides" not in vars(x)
    (condition,) = conditions
    assert condition.is_branch and not condition.is_general and "x.shape[0] > 2" in condition.location


def test_make_equal():
    def probe(call, graph_module, example_inputs):
        values = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
        symbols = {value.shape[0].node.expr for value in values if isinstance(value, torch.Tensor)}
        before = dynamo_sizes.size_conditions(call)
        common = dynamo_sizes.make_equal(call, symbols)
        return symbols, before, common, dynamo_sizes.size_conditions(call)

    def function(x, y):
        return x.exp(), y.exp() if x.shape[0] >= y.shape[0] else y

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    symbols, before, common, after = inspected(function, x, y, probe=probe, restarts=1)
    assert len(symbols) == 2 and common in symbols
    (branch,) = before
    assert branch.symbols == symbols and not branch.is_general
    # The branch holds for equal sizes, and that they are equal is a condition of its own.
    assert len(after) == 2 and all(condition.is_general for condition in after) and not after[1].is_branch


def test_conditions_of_operators_are_no_branches():
    model = nn.Conv2d(3, 4, 3)
    conditions = inspected(
        model,
        torch.randn(4, 3, 8, 8),
        probe=lambda call, *_: dynamo_sizes.size_conditions(call),
        restarts=1,
    )
    assert conditions and not any(condition.is_branch for condition in conditions)


def test_settings_go_back_with_the_end_of_the_compilation():
    """The backend is not called again when the second trace has no operators."""
    before, x = trace_settings(), torch.randn(4, 3)

    def function(x):
        if torch.fx.experimental._config.backed_size_oblivious:
            return x
        return x.exp()

    recorder = Recorder()
    torch.compile(function, backend=recorder)(x)
    gc.collect()
    assert recorder.num_calls == 1
    assert trace_settings() == before and not vars(x)


def test_library_loggers(monkeypatch):
    def once(self, text):
        raise AssertionError("must not be called while compiled")

    monkeypatch.setattr(logging.Logger, "whisper_once", once, raising=False)
    assert capture_dynamo.library_log_methods()["whisper_once"] is once
    assert "warning" not in capture_dynamo.library_log_methods()
    capture_dynamo.skip_library_loggers()
    log = logging.getLogger("user")

    def nested(x):
        log.whisper_once("hello")
        return x * 2

    recorder = Recorder()
    x = torch.randn(4, 3)
    assert torch.equal(torch.compile(lambda x: nested(x) + 1, backend=recorder)(x), x * 2 + 1)
    torch._dynamo.config.ignore_logging_functions.discard(once)


def test_break_reasons_are_counted_from_the_restart():
    torch._dynamo.utils.counters.clear()  # what earlier tests of this process have counted
    torch._dynamo.utils.counters["graph_break"]["old"] = 2
    restart = capture_dynamo.RestartReason("reason")
    restart.break_counts = {"old": 2}
    assert capture_dynamo.break_reasons_since(restart) == ()
    torch._dynamo.utils.counters["graph_break"]["old"] = 3
    torch._dynamo.utils.counters["graph_break"]["new"] = 1
    assert capture_dynamo.break_reasons_since(restart) == ("old", "new")
    torch._dynamo.utils.counters.clear()


def test_loggers_of_libraries_imported_later_are_left_out(monkeypatch):
    capture_dynamo.skip_library_loggers()
    ignored = capture_dynamo._ignored_set()
    assert not any(getattr(function, "__name__", "") == "later_once" for function in ignored)

    def later_once(self, text):
        return None

    monkeypatch.setattr(logging.Logger, "later_once", later_once, raising=False)
    assert later_once in ignored and any(function is later_once for function in ignored)


def test_only_the_complaint_about_settings_is_dropped():
    capture_dynamo.skip_library_loggers()
    logger, kept = logging.getLogger("torch._dynamo.metrics_context"), []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append((record.getMessage(), type(record.exc_info[1])))
    logger.addHandler(handler)
    try:
        for error in (TypeError("'<' not supported"), ValueError("another")):
            for message in ("Unexpected exception logging compilation metrics", "something else"):
                logger.error(message, exc_info=error)
    finally:
        logger.removeHandler(handler)
    assert kept == [
        ("something else", TypeError),
        ("Unexpected exception logging compilation metrics", ValueError),
        ("something else", ValueError),
    ]


def test_trace_again(monkeypatch):
    captured = []

    class Again(Recorder):
        def __call__(self, graph_module, example_inputs):
            result = super().__call__(graph_module, example_inputs)
            if len(self.graphs) == 1:
                trace_again(self.graphs[0])
            return result

    num_traces = 0
    trace_aten = capture.trace_aten

    def counted(*args, **keywords):
        nonlocal num_traces
        num_traces += 1
        return trace_aten(*args, **keywords)

    monkeypatch.setattr(capture, "trace_aten", counted)
    for number, rows in enumerate((4, 1), start=1):
        torch._dynamo.reset()
        recorder = Again()
        compiled = torch.compile(nn.Linear(3, 3), backend=recorder)
        for size in (rows, 7):
            compiled(torch.randn(size, 3))
        assert recorder.num_calls == 3
        assert num_traces == number, "the same graph is not traced to ATen again"
        captured += [graph.fingerprint for graph in recorder.graphs]
    assert len(captured) == 4 and len(set(captured)) == 1


@pytest.mark.parametrize("renewed", [True, False])
def test_guards_as_the_parameters_are(renewed):
    """A parameter whose memory was given back has strides of 0."""

    class Released(Recorder):
        def __call__(self, graph_module, example_inputs):
            result = super().__call__(graph_module, example_inputs)
            with torch.no_grad():
                model.weight.data = torch.zeros(()).expand(3, 3)
            if renewed:
                renew_guards(self.graphs[-1], graph_module, example_inputs)
            return result

    model, recorder = nn.Linear(3, 3), Released()
    compiled = torch.compile(model, backend=recorder)
    with contextlib.nullcontext() if renewed else pytest.raises(AssertionError, match="stride mismatch"):
        for rows in (4, 7, 2):
            assert torch.equal(compiled(torch.randn(rows, 3)), model.bias.expand(rows, 3))
    assert len(recorder.graphs) == 1


@pytest.mark.parametrize("told", [True, False])
def test_an_error_of_the_backend_is_not_replaced_by_that_of_the_guards(told):
    """Where parameters had moved before it."""

    class Refusing(Recorder):
        def __call__(self, graph_module, example_inputs):
            super().__call__(graph_module, example_inputs)
            model.weight.data = torch.zeros(()).expand(3, 3)
            if told:
                run_without_check_of_guards()

            def call(*args):
                raise ValueError("the cause")

            return call

    model = nn.Linear(3, 3)
    compiled = torch.compile(model, backend=Refusing())
    kind, text = (ValueError, "the cause") if told else (AssertionError, "stride mismatch")
    with pytest.raises(kind, match=text):
        compiled(torch.randn(4, 3))


def test_another_device_takes_another_trace():
    model, calls = nn.Linear(3, 3), []

    def probe(call, graph_module, example_inputs):
        before = {
            source: dict(entry) for source, entry in call.output_graph.input_source_to_sizes_strides.items()
        }
        elsewhere = [value.to("meta") if value is model.weight else value for value in example_inputs]
        calls.append(capture_dynamo.guard_as_they_are(call, graph_module, elsewhere, range(2)))
        assert before == call.output_graph.input_source_to_sizes_strides, "nothing is done by halves"
        calls.append(capture_dynamo.guard_as_they_are(call, graph_module, example_inputs, range(2)))

    inspected(model, torch.randn(4, 3), probe=probe)
    assert calls == [False, True]


def test_rows_hint_divides_no_size():
    def graph(size):
        traced = torch.fx.symbolic_trace(lambda x: x.view(size, 2))
        traced.graph.find_nodes(op="placeholder")[0].meta["example_value"] = torch.empty(59, 2)
        return traced

    assert rows_hint(graph(4)) == 53
    assert rows_hint(graph(106)) == 61  # 2 * 53, and 59 is a size
