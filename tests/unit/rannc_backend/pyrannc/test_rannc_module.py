"""RaNNCModule on one rank: it looks like the module that it was given and says what it does not do; optimizer
state travels whole.
"""

from __future__ import annotations

import copy
import gc
import logging
import math
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rannc_backend as pyrannc
from rannc_backend.api.functions import rows_of_plan
from rannc_backend.api.materialize import HeldValues
from rannc_backend.backend import REGISTRY
from rannc_backend.errors import UserInputError
from rannc_backend.runtime.absent_tensors import make_absent
from rannc_backend.runtime.comm.exchange_values import Coded, tensors_of_form, value_of_form
from rannc_backend.runtime.deferred import DeferredValue
from tests.unit.rannc_backend.ir.sample_plans import sample_plan

EAGER = {"stage_compiler": "eager"}


class Net(nn.Module):
    """With everything that a front could lose: a submodule, a buffer, an attribute, a method, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))
        self.width = 4

    def doubled(self) -> int:
        return 2 * self.width

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        return self.head(self.inner(x)) * self.scale + shift


def test_it_looks_like_the_given_module() -> None:
    net = Net()
    model = pyrannc.RaNNCModule(net, options=EAGER)
    assert isinstance(model, nn.Module) and model.model is net
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert list(model.state_dict()) == list(net.state_dict()) and list(model.children()) == list(
        net.children()
    )
    assert (model.width, model.doubled(), model.inner) == (4, 8, net.inner)
    model.width = 6
    model.more = nn.Linear(2, 2)
    assert net.width == 6 and net.doubled() == 12 and "more.weight" in net.state_dict()
    del model.more
    assert not hasattr(net, "more") and "width" in dir(model)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = model.nothing_like_it
    model.eval()
    assert not net.training and not net.inner[1].training and not model.training
    assert model.train() is model and net.training
    model.enable_dropout(False)
    assert net.training and not net.inner[1].training
    assert model.double() is model and net.head.weight.dtype == torch.float64
    assert model.to(torch.float32) is model and net.head.weight.dtype == torch.float32
    assert model.requires_grad_(False) is model and not net.head.weight.requires_grad
    assert not model.ready and not model.is_checkpointing_enabled() and not model.use_amp_master_params()


def test_copies_and_pickles_are_fronts_of_their_own() -> None:
    model = pyrannc.RaNNCModule(Net(), options=EAGER)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.model is not model.model and twin.inner is twin.model.inner
        twin.head.weight.data.zero_()
        assert model.head.weight.any()


def test_a_front_of_a_compiled_module_has_one_model() -> None:
    net = Net()
    assert pyrannc.RaNNCModule(torch.compile(net, backend="rannc")).model is net


def test_both_entries_share_their_session_and_release_their_model() -> None:
    net, x = Net().eval(), torch.randn(4, 3)
    front = pyrannc.RaNNCModule(net, options=EAGER)
    expected = Net.forward(net, x, shift=1.0)
    assert torch.allclose(front(x, shift=1.0), expected)
    compiled = torch.compile(net, backend="rannc", options=EAGER)
    assert torch.allclose(compiled(x, shift=1.0), expected)
    assert front.ready and pyrannc.get_param(compiled, "head.weight").equal(net.head.weight)
    front.undeploy()
    assert not front.ready and torch.allclose(compiled(x, shift=1.0), expected)
    gone = weakref.ref(net)
    del front, compiled, net
    gc.collect()
    assert gone() is None, "a model that nobody has any more is kept"


@pytest.mark.parametrize(
    "argument",
    ["enable_apex_amp", "allreduce_amp_master_params", "use_amp_master_params", "allreduce_amp_master_param"],
)
def test_apex_arguments_show_the_line_to_write(argument: str) -> None:
    with pytest.raises(UserInputError, match=r"torch\.autocast\(\"cuda\", dtype=torch\.bfloat16\)"):
        pyrannc.RaNNCModule(Net(), **{argument: True})
    with pytest.raises(UserInputError, match="autocast"):
        pyrannc.amp.register_amp_params(None)


def test_what_has_no_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rannc_backend"):
        model = pyrannc.RaNNCModule(Net(), check_unused_values=False)
        model.to("cpu").cuda().cpu()
    said = [record.getMessage() for record in caplog.records]
    assert [text.split("(")[0].split("=")[0] for text in said] == [
        "to",
        "cuda",
        "cpu",
    ]


def test_wrong_things_are_named(tmp_path) -> None:
    with pytest.raises(UserInputError, match="given a list"):
        pyrannc.RaNNCModule([1])
    model = pyrannc.RaNNCModule(Net())
    with pytest.raises(UserInputError, match="no parameter 'ghost'"):
        model.get_param("ghost")
    with pytest.raises(UserInputError, match="no deployment yet"):
        model.save_deployment(tmp_path / "plan.json")
    with pytest.raises(UserInputError, match="no gradients yet"):
        model.allreduce_grads()
    with pytest.raises(UserInputError, match="no parameter is stored"):
        pyrannc.load_dist_param(1)


def test_an_optimizer_is_patched_alone_and_once() -> None:
    net = Net()
    optimizer, other = torch.optim.Adam(net.parameters()), torch.optim.Adam(net.parameters())
    pyrannc.RaNNCModule(net, optimizer)
    first = optimizer.state_dict
    pyrannc.patch_optimizer(net, optimizer)
    assert optimizer.state_dict is first and torch.optim.Adam.state_dict is torch.optim.Optimizer.state_dict
    with pytest.raises(TypeError):
        other.state_dict(from_global=True)
    net.head(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    whole = optimizer.state_dict(from_global=True)
    assert whole["param_groups"] == optimizer.state_dict()["param_groups"] and set(whole["state"]) == {2, 3}
    twin = copy.deepcopy(optimizer)
    with pytest.raises(TypeError):
        twin.state_dict(from_global=True)


plain = st.one_of(st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(), st.text(max_size=5))
tensors = st.sampled_from(
    [torch.zeros(()), torch.arange(6).view(2, 3), torch.empty(0, 4, dtype=torch.bfloat16)]
)
nests = st.recursive(
    plain | tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(nests)
def test_state_travels_in_any_form(value: object) -> None:
    coded = Coded.of(value)
    assert [(list(t.shape), t.dtype) for t in coded.tensors] == list(tensors_of_form(coded.form))
    assert _same(value_of_form(coded.form, iter(coded.tensors)), value)


def _same(found: object, value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return found is value
    if isinstance(value, dict):
        return (
            isinstance(found, dict)
            and list(found) == list(value)
            and all(_same(found[key], value[key]) for key in value)
        )
    if isinstance(value, list | tuple):
        return type(found) is type(value) and len(found) == len(value) and all(map(_same, found, value))
    return type(found) is type(value) and (found == value or (isinstance(value, float) and math.isnan(value)))


def test_state_that_cannot_travel_is_named() -> None:
    with pytest.raises(UserInputError, match="the optimizer keeps a object"):
        Coded.of({"state": object()})


def test_rows_of_a_plan_add_up() -> None:
    plan = sample_plan()
    lines = rows_of_plan(plan, 37)
    assert lines[0].startswith("37 rows in ") and len(lines) == len(plan.stages) + 1
    for line in lines[1:]:
        shares = line.split(": ")[1]
        assert sum(int(part) for micro_batch in shares.split("; ") for part in micro_batch.split("+")) == 37


def test_values_on_the_host_come_to_the_device_when_the_model_is_planned() -> None:
    # As on a GPU, whose rank has its model on the CPU: here both are the CPU, and only the promise is looked
    # at.
    net, x = Net().eval(), torch.randn(4, 3)
    expected, state = net(x), copy.deepcopy(net.state_dict())
    source = HeldValues({name: p.detach() for name, p in net.named_parameters()})
    for name, parameter in net.named_parameters():
        REGISTRY.deferred_values.add(parameter, DeferredValue(source=source, name=name))
        make_absent(parameter, name, owners=(), device=torch.device("cpu"))
    model = pyrannc.RaNNCModule(net, options=EAGER)
    with pytest.raises(UserInputError, match="no value yet"):
        model.state_dict()
    assert torch.allclose(model(x), expected) and not source.tensors
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_model_without_memory_runs_through_torch_compile() -> None:
    x = torch.randn(4, 3)
    with pyrannc.DistributeModelParams():
        net = Net()
    pyrannc.materialize_by_stage(net)
    compiled = torch.compile(net.eval(), backend="rannc", options=EAGER)
    outputs = compiled(x)
    outputs.sum().backward()
    assert (
        torch.allclose(outputs, Net.forward(net, x))
        and outputs.isfinite().all()
        and net.head.weight.grad.any()
    )
    assert net.head.weight.is_contiguous()


def test_asking_for_the_norm_leaves_gradients_alone() -> None:
    net = Net()
    model = pyrannc.RaNNCModule(net)
    net.head.weight.grad, net.head.bias.grad = torch.full((2, 4), float("inf")), torch.ones(2)
    assert model._calc_grad_norm() == float("inf") and torch.equal(net.head.bias.grad, torch.ones(2))
    net.head.weight.grad = None
    assert model._calc_grad_norm() == pytest.approx(2**0.5)
