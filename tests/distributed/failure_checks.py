"""Checks of wrong input, run in worker groups: each must raise its class of errors.py, the same on every
rank.

In: a context. Out: findings. Failures that end the job are jobs of their own (failing_job.py).
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.contract_checks import Alone
from tests.distributed.harness.context import Context
from tests.models import Mlp

WIDTH = 6


def misbehave(context: Context) -> dict[str, Any]:
    """For the tests of the harness: end or hang in the way that the case names."""
    how = context.case.parameters["how"]
    if how == "exception":
        raise RuntimeError("planted exception")
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
    return {}


class _Body(nn.Module):
    """Layers around a statement that must be refused; `refused` marks its line."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)


class MixedByCumsum(_Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = x.cumsum(0)  # refused
        return self.after(x)


class MixedBySort(_Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = torch.sort(x, dim=0).values  # refused
        return self.after(x)


class MixedByMean(_Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = x - x.mean(0)  # refused
        return self.after(x)


class MixedByAttention(_Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = torch.softmax(x @ x.t(), -1) @ x  # refused
        return self.after(x)


class MixedByFlip(_Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = x + x.flip(0)  # refused
        return self.after(x)


class MixedByReshape(_Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = x.t().reshape(-1, WIDTH)  # refused
        return self.after(x)


class BranchOnData(_Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if x.sum() > 0:  # refused
            x = x * 2
        return self.after(x)


class Breaks(_Body):
    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        torch._dynamo.graph_break()  # refused
        return self.after(x)


class GivenUp(_Body):
    """Dynamo gives the whole call up and would run it as it is, on each rank by itself."""

    lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:  # refused
            x = self.before(x)
        return self.after(x)


class Recurrent(_Body):
    """Of which Dynamo traces nothing unless it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.recurrent(x)[0])  # refused


class TwoDevices(_Body):
    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Linear(WIDTH, WIDTH, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.before(x).to("meta"))


class NoRows(_Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.before(torch.ones(3, WIDTH) * x)).sum()


class _Table(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.table: nn.Module = nn.Embedding(8, WIDTH, **options)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table((x > 0).long())  # refused
        return self.after(x)


class SparseGradients(_Table):
    """Of bags with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(8, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x > 0).long()
        x = self.table(ids.flatten(), torch.arange(ids.shape[0]) * ids.shape[1])  # refused
        return self.after(x)


class ScaledByFrequency(_Table):
    def __init__(self) -> None:
        super().__init__(scale_grad_by_freq=True)


REFUSED: Mapping[str, tuple[type[nn.Module], str]] = {
    "cumsum": (MixedByCumsum, "BatchMixedError"),
    "sort": (MixedBySort, "BatchMixedError"),
    "mean": (MixedByMean, "BatchMixedError"),
    "attention": (MixedByAttention, "BatchMixedError"),
    "flip": (MixedByFlip, "BatchMixedError"),
    "reshape": (MixedByReshape, "BatchMixedError"),
    "scaled_by_frequency": (ScaledByFrequency, "BatchMixedError"),
    "sparse_gradients": (SparseGradients, "UnsupportedModelError"),
    "branch": (BranchOnData, "DataDependentControlFlowError"),
    "break": (Breaks, "GraphBreakError"),
    "given_up": (GivenUp, "GraphBreakError"),
    "recurrent": (Recurrent, "GraphBreakError"),
    "two_devices": (TwoDevices, "ModelDevicesError"),
    "no_rows": (NoRows, "NoBatchDimensionError"),
}
_OPERATORS = {"cumsum": "cumsum", "sort": "sort", "flip": "flip"}


def _line_of(kind: type[nn.Module]) -> tuple[str, str]:
    """The marked line's place, in the two ways of writing it."""
    code = kind.forward.__code__
    with open(code.co_filename) as file:
        lines = file.read().split("\n")
    number = next(n for n in range(code.co_firstlineno, len(lines)) if "# refused" in lines[n]) + 1
    return f"failure_checks.py:{number}", f'failure_checks.py", line {number}'


def refused(context: Context) -> None:
    """A model that cannot be exact: the error's class, the user's line, the operator, and what to change."""
    name = context.case.parameters["name"]
    kind, error_name = REFUSED[name]
    torch.manual_seed(0)
    model = kind()
    compiled = context.compile(model, capture="dynamo", whole_batch="never")
    x = torch.tensor(2.0) if name == "no_rows" else torch.randn(context.case.local_rows[context.rank], WIDTH)
    error = context.findings.raises(name, (error_name,), lambda: compiled(x))
    if error is None:
        return
    text = str(error)
    context.findings.that("What to change" in text, f"the error does not say what to change: {text}")
    if name not in ("two_devices", "no_rows"):
        named = any(place in text for place in _line_of(kind))
        context.findings.that(named, f"the error does not name {_line_of(kind)[0]}: {text}")
    context.findings.that(_OPERATORS.get(name, "") in text, f"the error does not name the operator: {text}")
    # The process must be usable afterwards, for other models too.
    torch._dynamo.reset()
    other = nn.Linear(WIDTH, WIDTH)
    context.compile(other, stage_replicas=str(context.case.world))(torch.randn(4, WIDTH)).sum().backward()


def second_derivative(context: Context) -> None:
    """A gradient that is to be differentiated again is an error, not a gradient without one; then training
    goes on.
    """
    model = context.model()
    compiled, alone = context.compile(model), Alone(context)
    entry, local = context.entry, context.local(context.batch())
    local["x"].requires_grad_(True)
    loss = entry.loss_of(entry.call(compiled, local), local)
    name = ("UnsupportedModelError",)
    context.findings.raises(
        "create_graph", name, lambda: torch.autograd.grad(loss, local["x"], create_graph=True)
    )
    local = context.local(context.batch(1))
    entry.loss_of(entry.call(compiled, local), local).backward()
    alone.backward(context.batch(1))
    context.compare_gradients(model, alone.gradients(), kind="gradient")


def _try_options(
    context: Context, options: Mapping[str, Any], names: tuple[str, ...]
) -> BaseException | None:
    def call() -> None:
        model = Mlp()
        F.mse_loss(context.compile(model, **options)(torch.randn(4, WIDTH)), torch.zeros(4, WIDTH)).backward()

    return context.findings.raises(str(dict(options)), names, call)


def wrong_options(context: Context) -> None:
    """Names and values that do not exist, and limits that no plan can keep."""
    find = context.findings.that
    error = _try_options(context, {"pipline_num": 2}, ("UnknownOptionError",))
    find(error is None or "'pipeline_num'" in str(error), f"the nearest name is missing: {error}")
    torch._dynamo.reset()
    error = _try_options(context, {"pipeline_num": -2}, ("OptionValueError",))
    find(
        error is None or ("pipeline_num" in str(error) and "-2" in str(error)),
        f"the item is missing: {error}",
    )
    torch._dynamo.reset()
    _try_options(context, {"stage_compiler": "gcc"}, ("OptionValueError",))
    torch._dynamo.reset()
    error = _try_options(context, {"mem_limit_gb": 1e-7}, ("InfeasiblePlanError",))
    find(error is None or "GB" in str(error), f"the smallest limit is missing: {error}")
    torch._dynamo.reset()
    _try_options(context, {"stage_replicas": "3,4"}, ("UserInputError",))


def too_few_rows(context: Context) -> None:
    """Fewer rows than a stage has replicas, in the first and in a later step; then training goes on."""
    model = context.model()
    compiled = context.compile(model)
    for step in range(2):
        # Rank 0 alone has one row; the others have none.
        rows = 1 if context.rank == 0 else 0
        x = torch.randn(rows, WIDTH, dtype=context.dtype)
        if step == 1:
            compiled(torch.randn(4, WIDTH, dtype=context.dtype)).sum().backward()
        error = context.findings.raises(f"step {step}", ("TooFewSamplesError",), lambda x=x: compiled(x))
        context.findings.that(error is None or "replica" in str(error), f"no word of replicas: {error}")


def ranks_differ(context: Context) -> None:
    """Other weights' shapes, another activation, other options, another value without batch dimension on rank
    1.
    """
    odd = context.rank == 1
    what = context.case.parameters["what"]
    torch.manual_seed(0)
    makers: Mapping[str, Callable[[], nn.Module]] = {
        "layers": lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5 if odd else 4))),
        "widths": lambda: nn.Sequential(nn.Linear(WIDTH, 9 if odd else 8), nn.Linear(9 if odd else 8, WIDTH)),
        "activation": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU() if odd else nn.Tanh()),
        "frozen": lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH).requires_grad_(not odd), nn.Linear(WIDTH, WIDTH)
        ),
        "options": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
    }
    model = makers[what]()
    options = {"pipeline_num": 3 if odd else 2} if what == "options" else {}
    compiled = context.compile(model, **options)
    error = context.findings.raises(
        what, ("RanksDifferError",), lambda: compiled(torch.randn(4, WIDTH)).sum().backward()
    )
    context.findings.that(error is None or "rank" in str(error), f"no rank is named: {error}")
    context.findings.that(
        error is None or context.case.world == 2 or "rank 1" in str(error), f"rank 1 is not named: {error}"
    )


def inputs_disagree(context: Context) -> None:
    """Inputs with different numbers of rows on one rank, after a good step; options that are a rank's own
    differ.
    """
    model = context.model()
    with tempfile.TemporaryDirectory(prefix=f"of_rank_{context.rank}_") as own:
        compiled = context.compile(model, cache_dir=own)
        good = context.local(context.batch())
        context.entry.loss_of(context.entry.call(compiled, good), good).backward()
    bad = good | {"target": good["target"][:-1]}
    context.findings.raises(
        "another number of rows",
        ("UserInputError", "RuntimeError", "TorchRuntimeError"),
        lambda: context.entry.call(compiled, bad),
    )
