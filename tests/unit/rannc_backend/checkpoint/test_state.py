"""State of optimizers, schedulers, scalers and generators survives a checkpoint exactly, and what cannot is
refused by name.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from rannc_backend.checkpoint import optimizer_state, random_state
from rannc_backend.checkpoint.model_state import ModelTensors
from rannc_backend.checkpoint.plain_values import decode, encode
from rannc_backend.checkpoint.reader import CheckpointReader
from rannc_backend.errors import CheckpointFileError, CheckpointMismatchError, CheckpointStateError
from tests.unit.rannc_backend.checkpoint.checkpoint_jobs import save

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, 2.5, "x", None, True], "b": {}},
        (1, (2, [3])),
        {1: "one", 2.5: (), None: [], False: "x"},
        {"$tuple": 1, "a": {"$dict": []}},
        Counter({30: 1, 80: 2}),
        float("inf"),
        [-0.0, 1e-320, 0.1 + 0.2],
        2**100,
        "\ud800 and \x00",
    ],
)
def test_plain_values_come_back(value: object) -> None:
    import json

    back = decode(json.loads(json.dumps(encode(value, "it"))), "it")
    assert back == value and type(back) is type(value) and repr(back) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_tensors_of_one_element(dtype: torch.dtype) -> None:
    for tensor in (
        torch.tensor(1, dtype=dtype),
        torch.tensor([[1]], dtype=dtype),
        (torch.rand(()) / 3).to(dtype),
    ):
        back = decode(encode(tensor, "it"), "it")
        assert torch.equal(back, tensor) and back.dtype == dtype and back.shape == tensor.shape


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"f": [len]}, "extra['f'][0] is a builtin_function_or_method"),
        ({"w": torch.ones(3)}, "extra['w'] is a tensor of shape [3]"),
        ({(1, 2): 3}, "extra has a key of type tuple"),
        (b"bytes", "extra is a bytes"),
        ({1, 2}, "extra is a set"),
    ],
)
def test_what_is_no_plain_value_is_refused_with_its_place(value: object, words: str) -> None:
    with pytest.raises(CheckpointStateError) as caught:
        encode(value, "extra")
    assert words in str(caught.value) and "What to change" in str(caught.value)


def test_a_list_in_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointStateError, match="nested"):
        encode(value, "extra")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "fused_adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
}


def save_optimizer(path: Path, net: nn.Module, *optimizers: torch.optim.Optimizer) -> CheckpointReader:
    tensors = ModelTensors.of(net, None, 1)
    share = {name: tensor.detach() for name, tensor in tensors.tensors.items()}
    records = []
    for number, optimizer in enumerate(optimizers):
        record, states = optimizer_state.capture(
            optimizer, number, tensors.names_of(), tensors.tensors, with_groups=True
        )
        records.append(record)
        share.update(states)
    save(path, [share], optimizers=tuple(records))
    return CheckpointReader(path)


def load_optimizer(reader: CheckpointReader, net: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    tensors = ModelTensors.of(net, None, 1)
    optimizer_state.check_fit(optimizers, reader, tensors.names_of())
    net.load_state_dict(reader.state_dict())
    for number, optimizer in enumerate(optimizers):
        optimizer_state.restore_groups(optimizer, number, reader)
        optimizer_state.restore_state(optimizer, number, reader, tensors.names_of(), set(tensors.tensors))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_nothing_had_been(tmp_path: Path, kind: str) -> None:
    net = model()
    optimizer = OPTIMIZERS[kind](net.parameters())
    for _ in range(3):
        step(net, optimizer)
    reader = save_optimizer(tmp_path, net, optimizer)
    other = model()
    fresh = OPTIMIZERS[kind](other.parameters())
    step(other, fresh)
    load_optimizer(reader, other, fresh)
    assert fresh.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for _ in range(2):
        step(net, optimizer)
        step(other, fresh)
    for (name, expected), actual in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(actual, expected), name


def test_two_optimizers_with_groups_in_another_order(tmp_path: Path) -> None:
    def make(net: nn.Sequential, order: int) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        groups = [{"params": list(net[0].parameters())[::order], "lr": 0.3}, {"params": net[1].parameters()}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9), torch.optim.Adam(net[2].parameters(), lr=0.2)

    net, other = model(), model()
    optimizers, fresh = make(net, 1), make(other, -1)
    for optimizer in optimizers:
        step(net, optimizer)
    reader = save_optimizer(tmp_path, net, *optimizers)
    load_optimizer(reader, other, *fresh)
    for optimizer, twin in zip(optimizers, fresh, strict=True):
        step(net, optimizer)
        step(other, twin)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_state_that_is_wider_than_its_parameter_is_not_rounded(tmp_path: Path) -> None:
    net = model().to(torch.bfloat16)
    optimizer = torch.optim.Adam(net.parameters())
    weight = net[0].weight
    optimizer.state[weight] = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.full_like(weight, 0.1, dtype=torch.float32),
    }
    reader = save_optimizer(tmp_path, net, optimizer)
    fresh = torch.optim.Adam(net.parameters())
    load_optimizer(reader, net, fresh)
    assert fresh.state[weight]["exp_avg"].dtype == torch.float32
    assert torch.equal(fresh.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg"])


def mismatched(kind: str) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    net = model()
    parameters = list(net.parameters())
    return net, {
        "number": [torch.optim.Adam(parameters), torch.optim.Adam(parameters)],
        "class": [torch.optim.SGD(parameters)],
        "groups": [torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:]}])],
        "names": [torch.optim.Adam(parameters[1:])],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("number", "1 optimizer.*2 were given"),
        ("class", "saved as Adam"),
        ("groups", "2 parameter group.*1 were"),
        ("names", "'0.weight' is only"),
    ],
)
def test_an_optimizer_that_does_not_fit(tmp_path: Path, kind: str, words: str) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    reader = save_optimizer(tmp_path, net, optimizer)
    other, optimizers = mismatched(kind)
    with pytest.raises(CheckpointMismatchError, match=words):
        load_optimizer(reader, other, *optimizers)


def test_an_optimizer_of_another_model_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointStateError, match="shape .4, 3. is not one of the model's"):
        save_optimizer(tmp_path, model(), torch.optim.SGD(model().parameters()))


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "cosine_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on(kind: str) -> None:
    def run(scheduler: Any, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
        rates = []
        for _ in range(num_steps):
            scheduler.step(*([1.0] if kind == "plateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    first, second = (torch.optim.SGD(model().parameters(), lr=0.1, momentum=0.5) for _ in range(2))
    scheduler, fresh = SCHEDULERS[kind](first), SCHEDULERS[kind](second)
    run(scheduler, first, 3)
    state = encode(scheduler.state_dict(), "scheduler")
    second.load_state_dict(first.state_dict())
    fresh.load_state_dict(decode(state, "scheduler"))
    assert run(scheduler, first, 5) == run(fresh, second, 5)


def test_a_scaler_comes_back() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(decode(encode(scaler.state_dict(), "scaler"), "scaler"))
    assert other.state_dict() == scaler.state_dict()


def test_generators_come_back() -> None:
    states = random_state.capture(CPU)

    def draw() -> list[float]:
        return [
            torch.rand(()).item(),
            random.random(),
            random.gauss(0, 1),
            float(numpy.random.rand()),
            float(numpy.random.randn()),
        ]

    first = draw()
    random_state.restore(states, CPU)
    assert draw() == first


@pytest.mark.parametrize(
    "states",
    [
        {"torch": "AAAA"},
        {"torch": 3},
        {"python": [1]},
        {"numpy": ["MT19937", [1], 0, 0, 0.0]},
        {"numpy": 7},
        {"torch": "ä"},
    ],
)
def test_states_that_are_none(states: dict[str, object]) -> None:
    with pytest.raises(CheckpointFileError, match="random generator"):
        random_state.restore(states, CPU)


class Counting(torch.optim.SGD):
    """Keeps plain values beside tensors, as optimizers of others do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["history"] = (*state.get("history", ()), number)


def test_plain_states_of_a_parameter_come_back_to_it(tmp_path: Path) -> None:
    one, two = model(), model()
    saved, loaded = (Counting(net.parameters(), lr=0.1, momentum=0.9) for net in (one, two))
    for _ in range(3):
        step(one, saved)
    load_optimizer(save_optimizer(tmp_path, one, saved), two, loaded)
    for mine, theirs in zip(two.parameters(), one.parameters(), strict=True):
        state, expected = loaded.state[mine], saved.state[theirs]
        assert (
            state["count"] == 3
            and state["history"] == expected["history"]
            and state.keys() == expected.keys()
        )
        assert torch.equal(state["momentum_buffer"], expected["momentum_buffer"])
