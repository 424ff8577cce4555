"""`module.compile` reaches the backend where the module's forward is torch's own, on torch 2.11.0 and
2.13.0.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rannc_backend.capture.module_compile import trace_modules_of_torch
from rannc_backend.ir.graph_input import StateInput
from tests.unit.rannc_backend.capture.capture_harness import Recorder, fresh_dynamo


@pytest.fixture
def recorder():
    recorder = Recorder()
    end = trace_modules_of_torch(lambda backend: backend is recorder)
    with fresh_dynamo():
        yield recorder
    end()


class Inherited(nn.Sequential):
    """Its forward is that of torch."""


class Own(nn.Module):
    """Its forward is the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


MODULES = {
    "sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
    "inherited": lambda: Inherited(nn.Linear(4, 4), nn.Tanh()),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4)), Own()),
    "layer": lambda: nn.Linear(4, 4),
    "own": Own,
}


@pytest.mark.parametrize("name", MODULES)
def test_the_whole_module_is_one_graph(recorder: Recorder, name: str) -> None:
    module, x = MODULES[name](), torch.randn(5, 4)
    expected = module(x)
    module.compile(backend=recorder)
    torch.testing.assert_close(module(x), expected)
    assert recorder.graph.root_module is module
    assert {item.fqn for item in recorder.graph.inputs if isinstance(item, StateInput)} == set(
        module.state_dict()
    )


def test_modules_of_one_kind_are_told_apart(recorder: Recorder) -> None:
    first, second, x = MODULES["sequential"](), MODULES["sequential"](), torch.randn(5, 4)
    expected = first(x), second(x)
    first.compile(backend=recorder, options={})
    second.compile(backend=recorder, options={})
    assert torch.equal(first(x), expected[0]) and torch.equal(second(x), expected[1])


def test_other_backends_are_as_they_were() -> None:
    """Whether torch traces such a module depends on its version (2.14 does); with ours installed it does what
    it does without.
    """

    def num_calls() -> int:
        calls = []

        def other(graph_module, example_inputs):
            calls.append(graph_module)
            return graph_module

        torch.compiler.reset()
        module = MODULES["sequential"]()
        module.compile(backend=other)
        module(torch.randn(5, 4))
        return len(calls)

    without = num_calls()
    asked = []
    end = trace_modules_of_torch(lambda backend: bool(asked.append(backend)))
    try:
        assert num_calls() == without and asked
    finally:
        end()


def test_it_ends() -> None:
    before = torch._dynamo.eval_frame._TorchDynamoContext.__call__
    end = trace_modules_of_torch(lambda backend: True)
    assert torch._dynamo.eval_frame._TorchDynamoContext.__call__ is not before
    end()
    assert torch._dynamo.eval_frame._TorchDynamoContext.__call__ is before


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("in_place", [False, True])
def test_hooks_of_the_module_itself_are_part_of_its_graph(
    recorder: Recorder, name: str, in_place: bool
) -> None:
    module, x, seen = MODULES[name](), torch.randn(5, 4), []
    compiled = module
    if in_place:
        module.compile(backend=recorder)
    else:
        compiled = torch.compile(module, backend=recorder)
    expected = module._call_impl(x * 2)
    before = module.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    after = module.register_forward_hook(lambda _, given, found: seen.append(found.detach().sum()))
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(seen, [expected.detach().sum()])
    assert recorder.graph.root_module is module, "one graph, of the model and its hooks"
    before.remove()
    after.remove()
    torch.testing.assert_close(compiled(x * 2), expected)
    assert len(seen) == 1
