"""The ranks' side: what the models of the script take, give and become, written down while it runs with the
backend.

In: every call of a compiled model, every backward, every step of an optimizer. Out: an event of `Records` for
each, with what this rank has of it. Nothing is sent to another rank, so that what is recorded owes nothing to
the messages that are to be verified.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from rannc_backend.capture.inputs import named_tensors
from rannc_backend.capture.module_compile import plain_function
from rannc_backend.errors import BYTES_PER_GB, UserInputError
from rannc_backend.ir.graph_input import BatchInput
from rannc_backend.ir.plan import Plan
from rannc_backend.runtime.step.graph_runtime import GraphRuntime
from rannc_backend.runtime.step.user_outputs import UnavailableOutput
from rannc_backend.session_registry import REGISTRY
from rannc_backend.settings import hooks
from rannc_backend.verify.leaves import replaced, tensors_of
from rannc_backend.verify.models import Models
from rannc_backend.verify.records import Records, backward_event, call_event, start_event, step_event
from rannc_backend.verify.settings import (
    MAX_CALLS_PER_STEP,
    Needs,
    VerifySettings,
    plan_file,
    progress_file,
    write_whole,
)


class EnoughError(SystemExit):
    """Ends the script as a success: what was asked for is done."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(0)


class OtherSettingsNeededError(SystemExit):
    """Ends the script: it can be compared in another way only. ``needs``: why."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        super().__init__(1)


@dataclass(slots=True)
class _Call:
    """One call under way. ``seen``: the input tensors that the graph uses, and whether they belong to the batch."""

    number: int
    seen: list[tuple[Tensor, bool]] = field(default_factory=list)
    runtime: GraphRuntime | None = None

    def kind_of(self, tensor: Tensor) -> tuple[str, int]:
        """What a tensor of the user is to the graph, and which of its dimensions is the first one there."""
        for seen, is_batch in self.seen:
            for dim in range(max(tensor.dim(), 1)):
                if seen is tensor or (dim and _is_same_view(seen, tensor.detach().movedim(dim, 0))):
                    return ("batch", dim) if is_batch else ("same", 0)
        return "unused", 0


def _is_same_view(first: Tensor, second: Tensor) -> bool:
    return (
        first.shape == second.shape
        and first.stride() == second.stride()
        and first.data_ptr() == second.data_ptr()
        and first.dtype == second.dtype
    )


@dataclass(slots=True)
class Recorder:
    """See the module docstring."""

    settings: VerifySettings
    records: Records
    rank: int
    models: Models
    num_calls: int = 0
    num_steps: int = 0
    current: _Call | None = None
    arrived: dict[int, dict[int, Tensor]] = field(
        default_factory=dict
    )  # incoming gradients, by call and output
    num_backwards: dict[int, int] = field(default_factory=dict)  # by call

    def install(self) -> None:
        """Look at the steps of all optimizers from now on."""
        hooks.register("verify steps", register_optimizer_step_post_hook, self._stepped)

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What `torch.compile` has made, recorded."""
        function = plain_function(compiled)

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.current is not None:
                return compiled(*args, **kwargs)
            return self._call(compiled, function, args, kwargs)

        call._torchdynamo_wrapper_id = id(call)  # type: ignore[attr-defined]
        return call

    def _call(
        self, compiled: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if self.num_calls >= MAX_CALLS_PER_STEP * self.settings.num_steps:
            raise EnoughError("calls")
        for number in self.models.see(function):
            self._check_space()
            if self.rank == 0:
                self.records.write(0, start_event(number), named_tensors(self.models.modules[number]))
        REGISTRY.switches.observer = self
        args, kwargs = replaced((args, kwargs), lambda _, tensor: self.models.cast(tensor))
        inputs = [tensor for _, tensor in tensors_of((args, kwargs))]
        kept = {f"input.{index}": tensor.detach().clone() for index, tensor in enumerate(inputs)}
        self.current = _Call(self.num_calls)
        self.num_calls += 1
        try:
            result = compiled(*args, **kwargs)
            self._record(self.current, inputs, kept, result)
        finally:
            self.current = None
        return result

    def _record(self, call: _Call, inputs: Sequence[Tensor], kept: dict[str, Tensor], result: Any) -> None:
        outputs = dict(enumerate(tensor for _, tensor in tensors_of(result)))
        available = {
            index: tensor for index, tensor in outputs.items() if not isinstance(tensor, UnavailableOutput)
        }
        found = [call.kind_of(tensor) for tensor in inputs]
        kinds, dims = [kind for kind, _ in found], [dim for _, dim in found]
        settings = None if call.runtime is None else call.runtime.settings
        facts = {
            "kinds": kinds,
            "requires_grad": [tensor.requires_grad for tensor in inputs],
            "batch_dims": dims,
            "batch_rows": [
                int(tensor.shape[dim])
                for tensor, (kind, dim) in zip(inputs, found, strict=True)
                if kind == "batch"
            ][:1],
            "gathers": settings is None or settings.gather_inputs,
            "averages": settings is None or settings.mean_gradients,
            "autocast": torch.is_autocast_enabled(inputs[0].device.type if inputs else "cpu"),
        }
        tensors = kept | {f"output.{index}": tensor for index, tensor in available.items()}
        self.records.write(self.rank, call_event(call.number), tensors, facts)
        for index, tensor in available.items():
            if tensor.requires_grad:
                note = functools.partial(self._note_gradient, call.number, index)
                hooks.register("verify gradients", tensor.register_hook, note)

    def _note_gradient(self, call: int, index: int, gradient: Tensor | None) -> None:
        # None: another output of the same call alone is differentiated.
        if gradient is not None:
            self.arrived.setdefault(call, {})[index] = gradient.detach().clone()

    def begun(self, runtime: GraphRuntime, user_tensors: Sequence[Tensor]) -> None:
        """As of `StepObserver`."""
        if self.current is None:
            return
        if runtime.is_random:
            raise OtherSettingsNeededError("random numbers")
        if (
            any("statistics" in session.notices.said for session in REGISTRY.sessions.values())
            and not self.settings.evaluation
        ):
            raise OtherSettingsNeededError("batch statistics")
        self.current.runtime = runtime
        if self.rank == 0 and self.current.number == 0:
            write_whole(
                plan_file(self.records.directory),
                "; ".join(_in_words(session.plan) for session in REGISTRY.sessions.values()),
            )
        for spec, tensor in zip(runtime.inputs, user_tensors, strict=True):
            self.current.seen.append((tensor, isinstance(spec, BatchInput)))

    def published(self, runtime: GraphRuntime) -> None:
        """As of `StepObserver`."""
        for call, gradients in self.arrived.items():
            number = self.num_backwards.get(call, 0)
            self.num_backwards[call] = number + 1
            tensors = {f"grad_output.{index}": gradient for index, gradient in gradients.items()}
            delayed = runtime.switches.delay_reductions
            if not delayed:
                held = self.models.parameters().items()
                tensors |= {
                    f"gradient.{name}": tensor.grad.to_dense()
                    for name, tensor in held
                    if tensor.grad is not None
                }
            self.records.write(self.rank, backward_event(call, number), tensors, {"delayed": delayed})
        self.arrived.clear()

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.num_calls or not self.models.trained_by(optimizer):
            return
        tensors = {f"{kind}.{name}": tensor for kind, name, tensor in self.models.tensors()}
        self.records.write(self.rank, step_event(self.num_steps), tensors, {"num_calls": self.num_calls})
        self.num_steps += 1
        if self.rank == 0:
            with progress_file(self.records.directory, "ranks").open("a", encoding="utf-8") as file:
                file.write(f"{self.num_steps}\n")
        if self.num_steps >= self.settings.num_steps:
            raise EnoughError("steps")

    def _check_space(self) -> None:
        held = sum(tensor.nbytes for tensor in self.models.parameters().values())
        wanted = held * (2 * self.settings.num_steps + 1)
        free = shutil.disk_usage(self.records.directory).free
        if self.rank == 0 and wanted > free:
            raise UserInputError(
                f"recording {self.settings.num_steps} steps of this model takes {wanted / BYTES_PER_GB:.1f} "
                f"GB, and there are {free / BYTES_PER_GB:.1f} GB for temporary files",
                cure="let TMPDIR name a larger disk, or give fewer --steps or --layers.",
            )


def _in_words(plan: Plan | None) -> str:
    if plan is None:
        return "none"
    stages = " | ".join(",".join(map(str, stage.ranks)) for stage in plan.stages)
    micro_batches = f"{plan.num_micro_batches} micro-batch{'es' if plan.num_micro_batches > 1 else ''}"
    return f"{plan.num_stages} stage{'s' if plan.num_stages > 1 else ''} on ranks {stages}, {micro_batches}, {plan.schedule}"
