"""Checks of the one gate: calls that would go around the backend, and steps that ranks do not make together.

In: a context. Out: findings. Every error is the same on all ranks, comes before an update, and training goes
on after it where that is possible.
"""

from __future__ import annotations

import copy
import gc
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rannc_backend.backend import REGISTRY
from rannc_backend.runtime.job import bootstrap
from tests.distributed.contract_checks import Alone
from tests.distributed.harness.context import Context

WIDTH = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(x))), y)


def _data(context: Context, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, sum(context.case.local_rows), WIDTH, generator=generator, dtype=context.dtype)
    return x, y


def _local(context: Context, *tensors: Tensor) -> list[Tensor]:
    start, stop = context.interval
    return [tensor[start:stop].clone() for tensor in tensors]


def _realign() -> None:
    """As if the job began: cases of one group share its counts, which this one has left different on
    purpose.
    """
    counts = bootstrap.counts()
    counts.num_calls = counts.num_backwards = 0
    counts.optimizers.clear()
    counts.last_failure = ""


def many_models(context: Context) -> None:
    """More models of one class than Dynamo compiles of one function: each trains right, and is gone when it
    is dropped.
    """
    kept: list[Any] = []
    known: list[weakref.ref[Any]] = []
    sessions = len(REGISTRY.sessions)
    num_models = context.case.parameters["num_models"]
    for number in range(num_models):
        torch.manual_seed(number)
        model = Net().to(context.dtype)
        plain = copy.deepcopy(model)
        compiled = (
            context.compile(model, stage_starts="second")
            if context.case.num_stages > 1
            else context.compile(model)
        )
        batch = _data(context, number)
        for _ in range(2):
            loss = compiled(*_local(context, *batch))
        loss.backward()
        plain(*batch).backward()
        context.compare_gradients(
            model, {name: p.grad for name, p in plain.named_parameters()}, kind=f"gradient of model {number}"
        )
        runtime = next(iter(REGISTRY.of(model).runtimes.values()))
        known += [
            weakref.ref(model),
            weakref.ref(compiled),
            *map(weakref.ref, (*model.parameters(), *runtime.buckets.tensors())),
        ]
        if context.case.parameters["kept"]:
            kept.append((model, compiled))
        del model, plain, compiled, runtime, loss
    if not kept:
        gc.collect()
        alive = [place for place, ref in enumerate(known) if ref() is not None]
        context.findings.that(
            not alive, f"{len(alive)} of {len(known)} objects of dropped models are alive: {alive}"
        )
        context.findings.that(
            len(REGISTRY.sessions) <= sessions, f"{len(REGISTRY.sessions)} sessions, {sessions} before"
        )
    for number, (model, compiled) in enumerate(kept):
        model.zero_grad()
        batch = _data(context, number + 100)
        compiled(*_local(context, *batch)).backward()
        torch.manual_seed(number)
        plain = Net().to(context.dtype)
        plain(*batch).backward()
        context.compare_gradients(
            model, {name: p.grad for name, p in plain.named_parameters()}, kind=f"second of model {number}"
        )


@contextmanager
def _stance(name: str) -> Any:
    torch.compiler.set_stance(name)
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


FALLBACKS: Mapping[str, Callable[[], Any]] = {
    "force_eager": lambda: _stance("force_eager"),
    "eager_on_recompile": lambda: _stance("eager_on_recompile"),
    "config_disable": lambda: torch._dynamo.config.patch(disable=True),
    "recompile_limit_reached": lambda: torch._dynamo.config.patch(recompile_limit=0),
}


def fallbacks(context: Context) -> None:
    """What makes Dynamo run the plain model: an error on all ranks, also where one rank alone falls back;
    then training goes on.
    """
    find, case = context.findings, context.case
    kind, everywhere = case.parameters["kind"], case.parameters["ranks"] == "all"
    torch.manual_seed(0)
    model = Net().to(context.dtype)
    plain = copy.deepcopy(model)
    compiled = (
        context.compile(model, stage_starts="second") if case.num_stages > 1 else context.compile(model)
    )
    falls = everywhere or context.rank == case.world - 1
    for number in range(3):
        batch = _data(context, number)
        if number == 1:
            # Another dtype of the targets: Dynamo must compile again, where it is allowed to.
            local = _local(context, *batch)
            args = (local[0], local[1].to(torch.float32))
            with FALLBACKS[kind]() if falls else nullcontext():
                if kind == "recompile_limit_reached":
                    find.raises(kind, ("UserInputError",), lambda args=args: compiled(*args))
                else:
                    error = find.raises(kind, ("PlainCallError",), lambda args=args: compiled(*args))
                    find.that(
                        everywhere or falls or f"rank {case.world - 1} failed" in str(error),
                        f"no rank is named: {error}",
                    )
            if kind == "config_disable":
                break  # Dynamo leaves a function alone for good that it has come to so
            continue
        model.zero_grad()
        plain.zero_grad()
        compiled(*_local(context, *batch)).backward()
        plain(*batch).backward()
        context.compare_gradients(
            model, {name: p.grad for name, p in plain.named_parameters()}, kind=f"gradient {number}"
        )


class Picky(Net):
    """Raises for a batch that it does not like, while it is traced or on the host: of one rank alone."""

    def forward(self, x: Tensor, y: Tensor, extra: Tensor | None = None) -> Tensor:
        if extra is not None:
            x = x + extra  # a shape that does not fit
        return super().forward(x, y)


FAILURES: Mapping[str, Callable[[Callable[..., Tensor], list[Tensor]], Any]] = {
    "in_the_trace": lambda compiled, local: compiled(*local, torch.ones(3, WIDTH + 1, dtype=local[0].dtype)),
    "inputs_disagree": lambda compiled, local: compiled(local[0], local[1][:-1]),
    "no_tensor": lambda compiled, local: compiled("text", local[1]),
    "missing_argument": lambda compiled, local: compiled(),
}


def one_rank_fails(context: Context) -> None:
    """`try: step() except: continue` with a batch that is bad on one rank: all ranks raise, skip the same
    step and go on right.
    """
    find, case = context.findings, context.case
    fail = FAILURES[case.parameters["kind"]]
    torch.manual_seed(0)
    model = Picky().to(context.dtype)
    plain = copy.deepcopy(model)
    compiled = (
        context.compile(model, stage_starts="second") if case.num_stages > 1 else context.compile(model)
    )
    optimizer, reference = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    skipped = []
    for number in range(5):
        batch = _data(context, number)
        local = _local(context, *batch)
        try:
            bad = number in (2, 3) and context.rank == case.world - 1
            loss = fail(compiled, local) if bad else compiled(*local)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        except Exception as error:  # noqa: BLE001 - as scripts do
            skipped.append(number)
            named = context.rank == case.world - 1 or f"rank {case.world - 1} failed" in str(error)
            find.that(named, f"step {number}: no rank is named in {type(error).__name__}: {error}")
            continue
        plain(*batch).backward()
        reference.step()
        reference.zero_grad()
    find.that(skipped == [2, 3], f"skipped {skipped}")
    state = model.state_dict()
    if context.rank == 0:
        context.compare_state(state, plain.state_dict(), factor=1e3)


def one_rank_skips(context: Context) -> None:
    """A rank that leaves out a call, a backward, an update or a zero_grad: an error that names it, at the
    next thing that all ranks do.
    """
    find, case = context.findings, context.case
    what = case.parameters["what"]
    torch.manual_seed(0)
    model = Net().to(context.dtype)
    compiled = (
        context.compile(model, stage_starts="second") if case.num_stages > 1 else context.compile(model)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    odd = context.rank == case.world - 1
    error: BaseException | None = None
    for number in range(4):
        local = _local(context, *_data(context, number))
        skips = odd and number == 1
        try:
            if not (skips and what == "zero_grad"):
                optimizer.zero_grad()
            if skips and what == "step":
                continue
            if not (skips and what == "call"):
                loss = compiled(*local)
            if not (skips and what in ("backward", "call")):
                loss.backward()
            if skips and what == "rate":
                optimizer.param_groups[0]["lr"] = 0.5
            if not (skips and what == "update"):
                optimizer.step()
        except Exception as caught:  # noqa: BLE001 - any: looked at below
            error = caught
            break
    names = {base.__name__ for base in type(error).__mro__}
    find.that(
        bool(names & {"OutOfStepError", "CallsDifferError"}),
        f"{what}: raised {type(error).__name__}: {error}",
    )
    find.that(
        f"rank {case.world - 1}:" in str(error) and "What to change" in str(error),
        f"{what}: no rank, or no cure, in {error}",
    )
    find.that(number <= 2, f"{what}: found in step {number} only")
    _realign()


def steps_of_owners(context: Context) -> None:
    """An optimizer for each parameter, stepped by hooks within the backward: ranks make different numbers of
    steps, rightly.
    """
    model, alone = context.model(), Alone(context)
    compiled = context.compile(model)
    for each in (model, alone.model):
        for parameter in each.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=1e-3)

            def update(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
    for number in range(3):
        batch = context.batch(number)
        local = context.local(batch)
        context.entry.loss_of(context.entry.call(compiled, local), local).backward()
        alone.backward(batch)
    state = model.state_dict()
    if context.rank == 0:
        context.compare_state(state, alone.model.state_dict(), factor=1e4)


def state_of_one_rank(context: Context) -> None:
    """`state_dict` on rank 0 alone, as scripts write it: an error with the cure on all ranks; then, on all
    ranks, it works.
    """
    model = context.model()
    compiled = context.compile(model)
    local = context.local(context.batch())
    context.entry.loss_of(context.entry.call(compiled, local), local).backward()
    alone = context.rank == 0

    def save_or_train() -> Any:
        return model.state_dict() if alone else context.entry.call(compiled, local)

    error = context.findings.raises("state_dict of rank 0", ("CallsDifferError",), save_or_train)
    context.findings.that("state_dict" in str(error) and "if rank == 0" in str(error), f"no cure in {error}")
    _realign()
    model.state_dict()
    context.entry.loss_of(context.entry.call(compiled, local), local).backward()


class Weighted(nn.Module):
    """The weight of a term comes with each call, and a factor is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.factor: Any = 1.0

    def forward(self, x: Tensor, y: Tensor, weight: float) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.factor
        return F.mse_loss(self.second(hidden), y) + weight * (1 - weight) * hidden.square().mean()


class Normed(Weighted):
    """Operators need the numbers themselves."""

    def forward(self, x: Tensor, y: Tensor, weight: float) -> Tensor:
        hidden = F.layer_norm(self.first(x), (WIDTH,), eps=weight)
        return F.mse_loss(self.second(F.layer_norm(hidden, (WIDTH,), eps=self.factor)), y)


def numbers_that_change(context: Context) -> None:
    """Numbers in arithmetic are inputs of the graph from their second value on. What needs the number itself is compiled
    for each; the error names the one that changes, and its cures are exact.
    """
    for name, is_attribute in (("weight", False), ("factor", True)):
        for kind in ("arithmetic", "needed", "tensor"):
            torch.manual_seed(3)
            model = (Normed if kind == "needed" else Weighted)().to(context.dtype)
            alone = copy.deepcopy(model)
            if kind == "tensor" and is_attribute:
                for each in (model, alone):
                    del each.factor
                    each.register_buffer("factor", torch.ones((), dtype=torch.float64))
            _steps_with_numbers(context, model, alone, name, kind)


def _steps_with_numbers(context: Context, model: nn.Module, alone: nn.Module, name: str, kind: str) -> None:
    as_tensor = kind == "tensor"
    options = {"stage_starts": "second"} if context.case.num_stages > 1 else {}
    compiled = context.compile(model, **options)

    def step(number: float) -> None:
        values = _data(context, 5)
        for each in (model, alone):
            each.zero_grad()
            if name == "factor" and as_tensor:
                each.factor.fill_(number)
            elif name == "factor":
                each.factor = number
        weight: Any = number if name == "weight" else 0.5
        given = torch.tensor(weight, dtype=torch.float64) if as_tensor else weight
        loss, expected = compiled(*_local(context, *values), given), alone(*values, weight)
        if torch.is_grad_enabled():
            loss.backward()
            expected.backward()
        context.findings.close("loss", f"{name} {number}", loss, expected, context.tolerance)
        for (path, parameter), own in zip(alone.named_parameters(), model.parameters(), strict=True):
            if own.grad is not None:
                context.findings.close("gradient", path, own.grad, parameter.grad, context.tolerance)

    with torch._dynamo.config.patch(recompile_limit=2 if kind == "needed" else 3):
        step(0.25)
        step(0.5)
        if kind != "needed":
            step(0.75)
            step(0.25)
            step(1.25)
            with torch.no_grad():
                for number in (0.3, 0.6):
                    step(number)
            number = len(REGISTRY.sessions[model].compiled)
            context.findings.that(number == (2 if as_tensor else 3), f"{name}: compiled {number} times")
            if kind == "arithmetic":
                context.findings.raises(name, ("RanksDifferError",), lambda: step(0.5 + context.rank))
                _realign()
            return
        error = context.findings.raises(name, ("UserInputError",), lambda: step(0.75))
        context.findings.that(f"{name} was 0.5 and is 0.75" in str(error), f"not named in {error}")
    _realign()


def wrapped(context: Context) -> None:
    """A compiled model inside of a wrapper that replicates or shards it: an error on all ranks, before a step
    and after it.
    """
    find, case = context.findings, context.case
    kind, first = case.parameters["kind"], case.parameters["first"]
    torch.manual_seed(0)
    model = Net().to(context.dtype)
    compiled = (
        context.compile(model, stage_starts="second") if case.num_stages > 1 else context.compile(model)
    )
    local = _local(context, *_data(context, 0))
    if first == "call":
        compiled(*local).backward()
    else:
        bootstrap.start()
    makers: Mapping[str, Callable[[], Any]] = {
        "DistributedDataParallel": lambda: nn.parallel.DistributedDataParallel(compiled),
        "FullyShardedDataParallel": lambda: _sharded(compiled),
        "fully_shard": lambda: _fully_sharded(compiled),
        "Accelerator": lambda: _accelerated(compiled),
        "Trainer": lambda: _trained(compiled, local),
        "in place": lambda: nn.parallel.DistributedDataParallel(model),
    }
    if kind == "in place":
        model.compile(**context.compile_arguments(stage_starts="second"))

    def use() -> None:
        makers[kind]()(*local)

    late = first == "call" and kind in (
        "FullyShardedDataParallel",
        "fully_shard",
    )  # where parameters have no memory, they say so
    error = find.raises(
        kind, ("WrappedModelError", *(("NotImplementedError", "ReleasedParameterError") if late else ())), use
    )
    find.that(error is None or late or "What to change" in str(error), f"no cure in {error}")
    if kind not in ("FullyShardedDataParallel", "fully_shard", "in place"):
        compiled(*local).backward()


@contextmanager
def _accelerate() -> Iterator[None]:
    """What Accelerate asks for on CPUs, and its state afterwards as if it had never been used."""
    from accelerate.state import AcceleratorState

    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    names = [*variables, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(variables)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def _accelerated(model: Any) -> Any:
    from accelerate import Accelerator

    with _accelerate():
        return Accelerator(cpu=True).prepare(model)


def _trained(model: Any, local: list[Tensor]) -> Any:
    """As Hugging Face's documentation has it; it would multiply a loss over all ranks by their number."""
    from transformers import Trainer, TrainingArguments

    rows = [{"x": x, "y": y} for x, y in zip(*local)]
    with tempfile.TemporaryDirectory() as directory, _accelerate():
        arguments = TrainingArguments(
            output_dir=directory, use_cpu=True, report_to=[], max_steps=1, disable_tqdm=True
        )
        Trainer(model=model, args=arguments, train_dataset=rows).train()
    return model


def _sharded(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def _fully_sharded(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
