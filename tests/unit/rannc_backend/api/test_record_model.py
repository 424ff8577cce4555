"""Models built without memory: every value is made as the constructor would make it, by itself, whatever else
is made.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rannc_backend
from rannc_backend.api.materialize import reset_values
from rannc_backend.api.record_model import recorded_source
from rannc_backend.backend import REGISTRY
from rannc_backend.errors import UserInputError, ValueNotMadeError
from rannc_backend.runtime.absent_tensors import strides_of


class Odd(nn.Module):
    """Constructors do all of these things."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.more = torch.linspace(0, 1, 3).tolist()
        self.halves = nn.Parameter(torch.ones(3) * 0.5)
        self.given = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.orthogonal = nn.Parameter(torch.empty(4, 4))
        nn.init.orthogonal_(self.orthogonal)
        self.narrow = nn.Parameter(torch.zeros(500, 4))
        nn.init.trunc_normal_(self.narrow, std=0.02, a=-0.04, b=0.04)
        self.table = nn.Embedding(5, 4, padding_idx=0)
        self.tied = nn.Linear(4, 5)
        self.tied.weight = self.table.weight
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.register_buffer(
            "frequencies", 1.0 / (10 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False
        )
        self.recurrent = nn.GRU(3, 4)
        self.scaled = nn.Linear(4, 4)
        self.scaled.weight.data.mul_(0.1)
        self.scaled.bias.data = torch.full((4,), 7.0)
        with torch.no_grad():
            self.scaled.weight[0] = 3.0
        drawn = torch.rand(6)
        self.first, self.second = nn.Parameter(drawn[:3]), nn.Parameter(drawn[3:])
        self.apply(self._again)
        self.to(torch.float64)

    def _again(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.out_features == 5:
            nn.init.zeros_(module.bias)


def _recorded() -> nn.Module:
    torch.manual_seed(3)
    with rannc_backend.DistributeModelParams():
        return Odd()


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    made = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tape = recorded_source(tensor)
        assert tensor.device.type == "meta" and tape is not None, name
        made[name] = tape.value(tape.key_of(tensor), tape.seed)
    return made


def test_values_are_what_the_constructor_makes() -> None:
    model = _recorded()
    assert model.rates == pytest.approx([0.0, 0.1, 0.2, 0.3]) and model.more == [0.0, 0.5, 1.0]
    made, plain = _values(model), Odd()
    assert set(made) == {name for name, _ in [*plain.named_parameters(), *plain.named_buffers()]}
    for name, value in [*plain.named_parameters(), *plain.named_buffers()]:
        assert (made[name].shape, made[name].dtype, made[name].stride()) == (
            value.shape,
            value.dtype,
            value.stride(),
        ), name
    for name in (
        "halves",
        "given",
        "frequencies",
        "norm.weight",
        "norm.running_var",
        "scaled.bias",
        "tied.bias",
        "attention.in_proj_bias",
    ):
        assert torch.equal(
            made[name],
            plain.state_dict().get(name, plain.get_buffer(name) if name == "frequencies" else None),
        ), name
    assert torch.allclose(
        made["orthogonal"] @ made["orthogonal"].T, torch.eye(4, dtype=torch.float64), atol=1e-6
    )
    assert made["narrow"].abs().max() <= 0.04 and 0.01 < made["narrow"].std() < 0.025
    assert not made["table.weight"][0].any() and made["table.weight"][1:].std() > 0.3
    assert torch.equal(made["scaled.weight"][0], torch.full((4,), 3.0, dtype=torch.float64))
    assert 0 < made["scaled.weight"][1:].abs().max() <= 0.05
    assert ((0 <= made["first"]) & (made["first"] < 1)).all() and not torch.equal(
        made["first"], made["second"]
    )


def test_values_depend_on_the_seed_alone() -> None:
    first, second = _values(_recorded()), _values(_recorded())
    assert all(torch.equal(first[name], second[name]) for name in first)
    model = _recorded()
    tape = recorded_source(model.narrow)
    # By itself, and from another rank's seed.
    assert torch.equal(tape.value(tape.key_of(model.narrow), tape.seed), first["narrow"])
    assert not torch.equal(tape.value(tape.key_of(model.narrow), tape.seed + 1), first["narrow"])


def test_only_what_a_value_needs_is_run() -> None:
    with rannc_backend.DistributeModelParams():
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(20)])
        nn.init.normal_(model[0].weight)
    tape = recorded_source(model[0].weight)
    ran: list[object] = []
    for number, write in enumerate(tape.writes):
        tape.writes[number] = type(write)(
            **{name: getattr(write, name) for name in write.__slots__ if name != "operator"},
            operator=lambda *args, operator=write.operator, **kwargs: (
                ran.append(operator) or operator(*args, **kwargs)
            ),
        )
    tape.value(tape.key_of(model[0].weight), 0)
    # Not the first initialisation either, of which the second leaves nothing.
    assert ran == [torch.ops.aten.normal_.default]


def test_recording_ends_with_the_context_and_may_be_off() -> None:
    state = torch.random.get_rng_state()
    with pytest.raises(ZeroDivisionError), rannc_backend.DistributeModelParams():
        nn.Linear(2, 2)
        _ = 1 // 0
    assert (
        nn.Linear(2, 2).weight.device.type == "cpu"
        and nn.init._no_grad_trunc_normal_.__name__ == "_no_grad_trunc_normal_"
    )
    with rannc_backend.DistributeModelParams(enable=False):
        assert nn.Linear(2, 2).weight.device.type == "cpu"
    torch.random.set_rng_state(state)


def test_a_value_from_nowhere_is_refused() -> None:
    with torch.device("meta"):
        before = nn.Linear(2, 2)
    with rannc_backend.DistributeModelParams():
        model = nn.Linear(2, 2)
        model.weight.data.copy_(before.weight.data)
    tape = recorded_source(model.weight)
    with pytest.raises(UserInputError, match="cannot be recorded"):
        tape.value(tape.key_of(model.weight), 0)


def test_parameters_keep_their_identity_and_no_memory() -> None:
    model = _recorded()
    optimizer = torch.optim.Adam(model.parameters())
    rannc_backend.materialize_by_stage(model)
    assert [id(p) for p in model.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
    assert model.tied.weight is model.table.weight
    assert all(p.device.type == "cpu" and p.untyped_storage().nbytes() <= 8 for p in model.parameters())
    for parameter in model.parameters():
        with pytest.raises(ValueNotMadeError, match="no value yet"):
            parameter.sum()
    assert torch.equal(model.norm.running_var, torch.ones(4, dtype=torch.float64))
    assert torch.allclose(
        model.frequencies, torch.tensor([1.0, 10**-0.25, 10**-0.5, 10**-0.75], dtype=torch.float64)
    )
    assert strides_of(model.orthogonal) == (4, 1)


def test_modules_reset_themselves_by_name() -> None:
    module = nn.Linear(3, 3)
    before = module.weight.detach().clone()
    first, again, other = (
        reset_values(module, "a", 1),
        reset_values(module, "a", 1),
        reset_values(module, "b", 1),
    )
    assert torch.equal(first["weight"], again["weight"]) and not torch.equal(first["weight"], other["weight"])
    assert torch.equal(module.weight, before)


def test_a_module_that_cannot_reset_itself_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(Bare())
    with pytest.raises(UserInputError, match="Bare '0' has no reset_parameters, so 'scale'"):
        rannc_backend.materialize_by_stage(model)


@pytest.mark.parametrize("kind", ["safetensors", "pt", "mapping", "function"])
def test_sources(kind: str, tmp_path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state = nn.Linear(3, 2).state_dict()
    source = {"mapping": state, "function": state.__getitem__}.get(kind, tmp_path / f"weights.{kind}")
    if kind == "safetensors":
        save_file(state, source)
    elif kind == "pt":
        torch.save(state, source)
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    rannc_backend.materialize_by_stage(model, source)
    for name, parameter in model.named_parameters():
        deferred_value = REGISTRY.deferred_values.of(parameter)
        assert torch.equal(deferred_value.source.value(deferred_value.name, 0), state[name])


def test_bad_sources_are_named(tmp_path) -> None:
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"not a file of tensors")
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    for source, text in (
        (tmp_path / "none.pt", "none.pt"),
        (broken, "broken.pt"),
        (tmp_path / "none.safetensors", "none.safetensors"),
        ({"weight": torch.ones(2, 3)}, "no values for 1 of 2 parameters, as 'bias'"),
    ):
        with pytest.raises(UserInputError, match=text):
            rannc_backend.materialize_by_stage(model, source)
