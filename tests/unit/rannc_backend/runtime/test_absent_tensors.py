"""Tensors whose value is not here: whatever reads, writes or copies them is an error that names them; the
rest goes on.

The functions are those that scripts and libraries call on parameters, by way of Python, of C++ operators and
of torch's own helpers.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from rannc_backend.errors import ReleasedParameterError, ValueNotMadeError
from rannc_backend.runtime import absent_tensors
from rannc_backend.runtime.absent_tensors import (
    is_absent,
    make_absent,
    make_present,
    refuse_again,
    restore_classes,
    strides_of,
)
from rannc_backend.runtime.torch_internals import without_torch_function

CPU = torch.device("cpu")
X = torch.ones(2, 6)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.fixture
def p() -> nn.Parameter:
    return absent_parameter()


def absent_parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.arange(24.0).reshape(6, 4).t())
    make_absent(parameter, "layer.weight", owners=(1,), device=CPU)
    return parameter


def _ones(p: torch.Tensor) -> torch.Tensor:
    return torch.ones(p.shape)


READS: Mapping[str, Callable[[nn.Parameter], Any]] = {
    "sum": lambda p: p.sum(),
    "numpy": lambda p: p.detach().numpy(),
    "asarray": lambda p: np.asarray(p.detach()),
    "numpy function": lambda p: np.add(1, p),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[0, 0].item(),
    "iteration": lambda p: list(p),
    "comparison": lambda p: p == p,
    "equal": lambda p: torch.equal(p, p),
    "contains": lambda p: 1.0 in p,
    "truth": lambda p: bool(p),
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.T,
    "detach": lambda p: p.detach().sum(),
    "as_strided": lambda p: torch.as_strided(p.detach(), (2, 2), (1, 1)),
    "linear": lambda p: nn.functional.linear(X, p),
    "embedding": lambda p: nn.functional.embedding(torch.tensor([1]), p),
    "convolution": lambda p: nn.functional.conv1d(torch.ones(1, 6, 5), p.view(4, 6, 1)),
    "cat": lambda p: torch.cat([torch.ones(1, 6), p]),
    "stack": lambda p: torch.stack([p, p]),
    "where": lambda p: torch.where(p > 0, p, p),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "foreach norm": lambda p: torch._foreach_norm([p]),
    "foreach add": lambda p: torch._foreach_add([p.detach()], 1.0),
    "C++ operator": lambda p: torch.ops.aten.add(p, 1),
    "C++ overload": lambda p: torch.ops.aten.mul.Tensor(p, p),
    "C++ helper": lambda p: torch._utils._flatten_dense_tensors([p, p]),
    "autograd function": lambda p: Doubled.apply(p),
    "another dtype": lambda p: p.to(torch.float64),
    "half": lambda p: p.half(),
    "a copy": lambda p: p.to("cpu", copy=True),
    "a copy by place": lambda p: p.to("cpu", torch.float32, False, True),
    "svd": lambda p: torch.linalg.svd(p.detach()),
    "nonzero": lambda p: p.detach().nonzero(),
    "to_sparse": lambda p: p.detach().to_sparse(),
    "dlpack": lambda p: np.from_dlpack(p.detach()),
    "data_ptr": lambda p: p.data_ptr(),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "state_dict's values": lambda p: nn.ParameterList([p]).state_dict()["0"].sum(),
    "module": lambda p: _linear(p)(X),
    "functional_call": lambda p: torch.func.functional_call(_linear(p), {"weight": p}, (X,)),
}
WRITES: Mapping[str, Callable[[nn.Parameter], Any]] = {
    "copy_": lambda p: p.data.copy_(_ones(p)),
    "copy from": lambda p: torch.zeros(p.shape).copy_(p),
    "fill_": lambda p: p.detach().fill_(1.0),
    "init": lambda p: nn.init.xavier_uniform_(p),
    "setitem": lambda p: p.data.__setitem__(0, 1.0),
    "into another": lambda p: torch.zeros(p.shape).__setitem__(slice(None), p),
    "out": lambda p: torch.add(torch.ones(p.shape), 1, out=p),
    "assign data": lambda p: setattr(p, "data", _ones(p)),
    "resize_": lambda p: p.data.resize_(2),
    "foreach mul_": lambda p: torch._foreach_mul_([p.detach()], 1.0),
    "fused adam": lambda p: _fused_adam(p.detach()),
    "optimizer": lambda p: _step_with_gradient(p),
    "share_memory_": lambda p: p.share_memory_(),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.ones(24), [p]),
}
COPIES: Mapping[str, Callable[[nn.Parameter], Any]] = {
    "clone": lambda p: p.clone(),
    "copy": lambda p: copy.copy(p),
    "pickle": lambda p: pickle.dumps(p),
    "pickle of data": lambda p: pickle.dumps(p.data),
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "old torch.save": lambda p: torch.save(p, io.BytesIO(), _use_new_zipfile_serialization=False),
    "safetensors": lambda p: safetensors.torch.save({"p": p}),
    "torch.save of a module": lambda p: torch.save(_linear(p), io.BytesIO()),
    "Module.double": lambda p: _linear(p).double(),
}


def _linear(p: nn.Parameter) -> nn.Linear:
    module = nn.Linear(6, 4)
    module.weight = p
    return module


def _fused_adam(p: torch.Tensor) -> None:
    ones = [torch.ones(4, 6)]
    numbers = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.9,
        "weight_decay": 0.0,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    torch._fused_adam_([p], ones, ones, ones, [], [torch.tensor(1.0)], **numbers)


def _step_with_gradient(p: nn.Parameter) -> None:
    p.grad = _ones(p)
    torch.optim.SGD([p], lr=1.0).step()


@pytest.mark.parametrize("name", [*READS, *WRITES, *COPIES])
def test_a_value_that_is_not_here_is_neither_read_nor_written_nor_copied(p: nn.Parameter, name: str) -> None:
    use = {**READS, **WRITES, **COPIES}[name]
    with (
        torch.no_grad(),
        pytest.raises(ReleasedParameterError, match=r"'layer.weight' is not on this rank; rank 1 has it"),
    ):
        use(p)


def test_a_copy_is_absent_too_and_what_is_computed_of_it_is_computed_by_the_owners(p: nn.Parameter) -> None:
    module = _linear(p)
    average = torch.optim.swa_utils.AveragedModel(module)
    twin = average.module.weight
    assert isinstance(twin, nn.Parameter) and twin.shape == p.shape and twin.requires_grad == p.requires_grad
    assert is_absent(twin) and twin is not p and not is_absent(average.module.bias)
    with torch.no_grad():
        for _ in range(3):
            average.update_parameters(module)
        assert twin.mul_(0.9) is twin and twin.lerp_(p, 0.1) is twin
        twin.copy_(0.9 * twin + (1 - 0.9) * p.detach())
        here = [torch.ones(2), torch.ones(2)]
        torch._foreach_lerp_([twin, here[0]], [p.detach(), torch.zeros(2)], 0.5)
        assert torch.equal(here[0], torch.full((2,), 0.5))
        reads = (
            lambda: float((twin - p.detach()).norm()), lambda: bool(twin.sum() > 0), lambda: twin.tolist(),
            lambda: here[0].add_(twin[0, :2]), lambda: nn.functional.linear(X, twin), lambda: pickle.dumps(twin),
            lambda: torch._foreach_lerp_([here[0]], [twin[0, :2]], 0.5), lambda: p.detach().mul_(twin),
            lambda: torch.add(twin, 1, out=torch.zeros(p.shape)), lambda: twin + torch.ones(p.shape),
            lambda: np.asarray(twin), lambda: torch._foreach_norm([twin]), lambda: float((2 * p.detach())[0, 0]),
        )  # fmt: skip
        for number, read in enumerate(reads):
            with pytest.raises(ReleasedParameterError, match="rank 1 has it"):
                read()
                pytest.fail(f"read {number}")


def test_no_other_parameter_is_made_of_it(p: nn.Parameter) -> None:
    with pytest.raises(RuntimeError, match="Absent"):
        nn.Parameter(p)


def test_what_needs_no_value_goes_on(p: nn.Parameter) -> None:
    module = _linear(p)
    assert isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor) and module.weight is p and p in {p}
    assert (p.shape, p.dtype, p.device, p.ndim, p.numel(), p.element_size(), len(p)) == (
        (4, 6),
        torch.float32,
        CPU,
        2,
        24,
        4,
        4,
    )
    assert p.data.shape == p.detach().shape == (4, 6) and p.detach().dtype == torch.float32 and p.size(1) == 6
    assert (
        torch.zeros_like(p).sum() == 0
        and p.new_ones(3).sum() == 3
        and p.is_floating_point()
        and not torch.is_complex(p)
    )
    assert p.untyped_storage().nbytes() == 4 and strides_of(p) == (1, 4)
    assert (
        p.to("cpu:0") is p
        and p.contiguous() is p
        and module.to("cpu:0").weight is p
        and p.type() == "torch.FloatTensor"
    )
    assert (
        p.to("cpu") is p
        and p.float() is p
        and module.to(torch.float32).weight is p
        and module.cpu().weight is p
    )
    assert "'layer.weight'" in repr(p) and "rank 1" in f"{p}" and repr(module)
    assert list(module.state_dict()) == ["weight", "bias"]
    p.requires_grad_(False)
    p.requires_grad = True
    assert p.is_leaf and p.grad is None and p.grad_fn is None
    handle = p.register_hook(lambda gradient: gradient)
    handle.remove()


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adafactor]
)
@pytest.mark.parametrize("foreach", [True, False])
def test_optimizers_pass_over_it(p: nn.Parameter, kind: type[torch.optim.Optimizer], foreach: bool) -> None:
    other = nn.Parameter(torch.ones(3))
    optimizer = kind([p, other], lr=0.1, foreach=foreach)
    for _ in range(2):
        optimizer.zero_grad()
        other.sum().backward()
        torch.nn.utils.clip_grad_norm_([p, other], 1.0)
        optimizer.step()
    assert not other.eq(1).any() and p not in optimizer.state or kind is torch.optim.Adagrad
    optimizer.zero_grad(set_to_none=False)


def test_code_that_reads_its_gradient_is_told_once_that_it_is_elsewhere(
    p: nn.Parameter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent_tensors.logger, "filters", [])  # another test may have been told
    caplog.set_level("INFO")
    torch.optim.SGD([p], lr=0.1).step()
    nn.Module.zero_grad(nn.ParameterList([p]))
    assert not caplog.messages
    assert p.grad is None and p.grad is None
    (message,) = caplog.messages
    assert f"{__file__}:" in message and "rannc_backend.named_gradient_norms(model)" in message


def test_a_load_leaves_it_as_it_is(p: nn.Parameter) -> None:
    module = _linear(p)
    state = {"weight": p, "bias": torch.ones(4)}
    module.load_state_dict(state)
    assert module.weight is p and is_absent(p) and module.bias.sum() == 4
    with pytest.raises(RuntimeError, match="is not on this rank"):
        module.load_state_dict({"weight": torch.ones(4, 6), "bias": torch.ones(4)})


def test_it_comes_back_with_all_that_it_was(p: nn.Parameter) -> None:
    identity = id(p)
    make_present(p, torch.empty_strided(p.shape, strides_of(p)))
    p.data.fill_(2.0)
    assert type(p) is nn.Parameter and id(p) == identity and not is_absent(p)
    assert p.sum() == 48 and p.stride() == (1, 4) and copy.deepcopy(p).sum() == 48


def test_for_a_trace_it_has_its_own_class() -> None:
    p, present = absent_parameter(), nn.Parameter(torch.ones(2))
    restore_classes([p, present])
    assert type(p) is nn.Parameter and is_absent(p)
    refuse_again([p, present])
    assert type(p) is not nn.Parameter and type(present) is nn.Parameter
    with pytest.raises(ReleasedParameterError):
        p.sum()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_a_trace_may_look_at_a_counter_and_nobody_else(dtype: torch.dtype) -> None:
    """torch reads buffers without dimensions when it makes fake tensors of them (seen on 2.13 and 2.14)."""
    counter = torch.ones((), dtype=dtype)
    make_absent(counter, "norm.num_batches_tracked", owners=(1,), device=CPU)
    for _ in range(2):
        restore_classes([counter])
        with torch._C._DisableTorchDispatch():
            assert not counter.item() or counter.item() != counter.item()
            assert counter.data_ptr()  # no build of torch refuses this memory
        refuse_again([counter])
        with pytest.raises(ReleasedParameterError, match="num_batches_tracked"):
            counter.item()
        with pytest.raises(ReleasedParameterError):
            counter.add_(1)
        with without_torch_function(), pytest.raises(RuntimeError):
            counter.add_(1)  # as C++ code would
    make_present(counter, torch.ones((), dtype=dtype))
    assert counter.item() == 1


def test_buffers_of_any_dtype() -> None:
    for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.complex64):
        buffer = torch.ones(3, dtype=dtype)
        make_absent(buffer, "norm.running_mean", owners=(0, 2), device=CPU)
        with pytest.raises(
            ReleasedParameterError, match="buffer 'norm.running_mean' is not on this rank; ranks 0, 2 have it"
        ):
            buffer.any()
        assert type(buffer) is not torch.Tensor and not isinstance(buffer, nn.Parameter)


def test_nobody_has_made_it_yet() -> None:
    parameter = nn.Parameter(torch.ones(3))
    make_absent(parameter, "weight", owners=(), device=CPU)
    with pytest.raises(ValueNotMadeError, match="no value yet"):
        parameter.mean()


def test_a_subclass_of_the_users_comes_back() -> None:
    class Scaled(nn.Parameter):
        scale = 3

    parameter = Scaled(torch.ones(3))
    make_absent(parameter, "weight", owners=(1,), device=CPU)
    assert isinstance(parameter, Scaled) and parameter.scale == 3
    make_present(parameter, torch.ones(3))
    assert type(parameter) is Scaled


def test_memory_is_given_back() -> None:
    parameter = nn.Parameter(torch.ones(1000, 1000))
    storage = parameter.untyped_storage()
    make_absent(parameter, "weight", owners=(1,), device=CPU)
    assert torch._C._storage_Use_Count(storage._cdata) == 1 and parameter.untyped_storage().nbytes() == 4
