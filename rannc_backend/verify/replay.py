"""The reference's side: the same script with the plain model, which is given the rows of all ranks.

In: what the ranks have recorded. Out: a `Comparison`. Every process of this job runs the script, as its own
messages may need them all. The first is the reference: each call of a compiled model is a call of the plain
one on the ranks' inputs put one after the other; the script gets rank 0's rows of the outputs; the backward
begins with what reached the outputs on the ranks. Everything else, the optimizer for one, is what the script
does. The others only keep it company: their outputs are those of their own rows, without a graph.

Every link is compared by itself: a call begins with the ranks' inputs, a backward with the ranks' gradients
of the outputs, a step with the ranks' gradients of the parameters. So rounding does not grow from step to
step, and what differs first is named, not its consequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from rannc_backend.capture.inputs import named_tensors
from rannc_backend.capture.module_compile import plain_function
from rannc_backend.errors import UserInputError
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.world import StartOptions
from rannc_backend.settings import hooks
from rannc_backend.verify.comparing import (
    Comparison,
    NarrowestDtype,
    first_scalar,
    floor_of,
    largest_in,
    tolerance_of,
)
from rannc_backend.verify.leaves import replaced, tensors_of
from rannc_backend.verify.models import Models
from rannc_backend.verify.recording import EnoughError
from rannc_backend.verify.records import Event, Records, backward_event, call_event, start_event, step_event
from rannc_backend.verify.rows import Layout, layout_of
from rannc_backend.verify.settings import (
    MAX_CALLS_PER_STEP,
    Result,
    VerifySettings,
    progress_file,
    result_file,
    write_whole,
)

_OUT_OF_STEP = "the script calls its models otherwise in the second run than in the first"
_SAME_CALLS = (
    "let it depend on nothing that changes from run to run (time, files that it writes), and set its seeds."
)


@dataclass(slots=True)
class _Call:
    """A call of the plain model.

    Attributes:
        origins: the script's own input tensors; ``inputs``: those with all rows that took their places.
        outputs: of all rows, by position; ``layouts``: how the ranks' rows lie in them.
    """

    number: int
    events: list[Event]
    origins: list[Tensor]
    kinds: list[str]
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    layouts: dict[int, Layout] = field(default_factory=dict)
    num_backwards: int = 0

    def dim_of(self, index: int) -> int:
        """The dimension of samples of an input of the batch."""
        return int(self.events[0].facts["batch_dims"][index])

    def rows_of(self, rank: int) -> tuple[int, int]:
        """The rows of a rank in the batch."""
        sizes = [int((event.facts["batch_rows"] or [0])[0]) for event in self.events]
        return sum(sizes[:rank]), sum(sizes[: rank + 1])


@dataclass(slots=True)
class Reference:
    """See the module docstring."""

    settings: VerifySettings
    records: Records
    rank: int
    models: Models
    comparison: Comparison = field(default_factory=Comparison)
    narrowest: NarrowestDtype = field(default_factory=NarrowestDtype)
    num_calls: int = 0
    num_steps: int = 0
    is_inside: bool = False
    notes: set[str] = field(default_factory=set)
    before: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers before the step

    def install(self) -> None:
        """Look at the steps of all optimizers from now on."""
        hooks.register("verify steps", register_optimizer_step_post_hook, self._stepped)

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The plain function in the place of what `torch.compile` has made of it."""
        function = plain_function(compiled)

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_inside:
                return function(*args, **kwargs)
            self.is_inside = True
            try:
                return self._call(function, args, kwargs)
            finally:
                self.is_inside = False

        return call

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # As the backend does at its first call: what the script does with torch.distributed goes on.
        bootstrap.start(
            StartOptions(
                start_limit_seconds=self.settings.limit_seconds, limit_seconds=self.settings.limit_seconds
            )
        )
        if self.num_calls >= MAX_CALLS_PER_STEP * self.settings.num_steps:
            self._enough("calls")
        for number in self.models.see(function):
            self._start_as_rank_0(number)
        args, kwargs = replaced((args, kwargs), lambda _, tensor: self.models.cast(tensor))
        number = self.num_calls
        self.num_calls += 1
        if self.rank != 0:
            return _accompany(function, args, kwargs, list(self.models.parameters().values()))
        events = self._events(call_event(number))
        if not events:
            raise UserInputError(
                f"{_OUT_OF_STEP}: call {number + 1} was made in the second alone", cure=_SAME_CALLS
            )
        self.comparison.call = number + 1
        call, args, kwargs = self._with_all_rows(number, events, args, kwargs)
        with self.narrowest:
            result = function(*args, **kwargs)
        self.comparison.tolerance = tolerance_of(self.narrowest.dtype)
        if any(event.facts["autocast"] for event in events) and self.settings.dtype == "float64":
            self.notes.add("autocast leaves float64 as it is: --dtype own compares the script under autocast")
        return self._with_own_rows(call, result)

    def _start_as_rank_0(self, number: int) -> None:
        saved = self.records.read(0, start_event(number)).tensors
        mine = named_tensors(self.models.modules[number])
        if saved.keys() != mine.keys() or any(saved[name].shape != mine[name].shape for name in mine):
            raise UserInputError(
                "the script builds another model in the second run than in the first", cure=_SAME_CALLS
            )
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(saved[name])
        if self.rank == 0:
            self._remember()
            for tensor in mine.values():
                if (
                    tensor.is_floating_point()
                    and torch.finfo(tensor.dtype).eps > torch.finfo(self.narrowest.dtype).eps
                ):
                    self.narrowest.dtype = tensor.dtype

    def _remember(self) -> None:
        self.before = {
            f"{kind}.{name}": tensor.detach().cpu().clone() for kind, name, tensor in self.models.tensors()
        }

    def _events(self, event: str) -> list[Event]:
        """Of all ranks; empty where some rank has none."""
        ranks = range(self.settings.num_ranks)
        return (
            [self.records.read(rank, event) for rank in ranks]
            if all(self.records.has(rank, event) for rank in ranks)
            else []
        )

    def _with_all_rows(
        self, number: int, events: list[Event], args: Any, kwargs: Any
    ) -> tuple[_Call, Any, Any]:
        own = [tensor for _, tensor in tensors_of((args, kwargs))]
        first = events[0]
        if any(len(event.facts["kinds"]) != len(own) for event in events):
            raise UserInputError(
                f"{_OUT_OF_STEP}: call {number + 1} has another number of tensors", cure=_SAME_CALLS
            )
        call = _Call(number, events, own, list(first.facts["kinds"]))
        for index, mine in enumerate(own):
            parts = [event.tensors[f"input.{index}"] for event in events]
            whole = parts[0]
            if self._is_batch(call, index, parts) and first.facts["gathers"]:
                whole = torch.cat(parts, call.dim_of(index))
            whole = whole.to(mine.device).clone()
            call.inputs.append(whole.requires_grad_(first.facts["requires_grad"][index]))
        fresh = iter(call.inputs)
        args, kwargs = replaced((args, kwargs), lambda _, tensor: next(fresh))
        return call, args, kwargs

    @staticmethod
    def _is_batch(call: _Call, index: int, parts: Sequence[Tensor]) -> bool:
        if call.kinds[index] != "unused":
            return call.kinds[index] == "batch"
        rows = [event.facts["batch_rows"] for event in call.events]
        is_batch = all(
            part.dim() and size and part.shape[0] == size[0] for part, size in zip(parts, rows, strict=True)
        )
        call.kinds[index] = "batch" if is_batch else "same"
        return is_batch

    def _with_own_rows(self, call: _Call, result: Any) -> Any:
        paths = [path for path, _ in tensors_of(result)]
        call.outputs = [tensor for _, tensor in tensors_of(result)]
        self._compare_outputs(call, paths, first_scalar(result))
        own = []
        for index, whole in enumerate(call.outputs):
            layout = call.layouts.get(index)
            own.append(whole.detach().clone() if layout is None else layout.part(whole.detach(), 0).clone())
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.outputs):
            anchor = torch.zeros((), requires_grad=True)
            own = list(_Replayed.apply(self, call, own, anchor, *call.origins))
        fresh = iter(own)
        return replaced(result, lambda _, tensor: next(fresh))

    def _compare_outputs(self, call: _Call, paths: Sequence[str], loss: int | None) -> None:
        floor = floor_of(largest_in(call.outputs))
        step = self.comparison.step
        self.comparison.step = step.model_copy(update={"num_calls": step.num_calls + 1})
        for index, (path, whole) in enumerate(zip(paths, call.outputs, strict=True)):
            parts = [event.tensors.get(f"output.{index}") for event in call.events]
            if any(part is None for part in parts):
                self.notes.add("outputs that did not come back (option outputs) were not compared")
                continue
            found = [part for part in parts if part is not None]
            layout = call.layouts[index] = layout_of(found, whole)
            for rank, part in enumerate(found):
                self.comparison.value(
                    "output", path or "output", rank, part, layout.part(whole, rank), floor=floor
                )
            if index == loss:
                self.comparison.loss(found[0].item(), whole.item())

    def backward(self, call: _Call) -> list[Tensor | None]:
        """Begin the plain backward with what reached the outputs on the ranks; gives gradients of the
        script's own rows of the inputs.
        """
        events = self._events(backward_event(call.number, call.num_backwards))
        call.num_backwards += 1
        if not events:
            raise UserInputError(
                f"{_OUT_OF_STEP}: call {call.number + 1} has a backward in the second alone", cure=_SAME_CALLS
            )
        averages = bool(call.events[0].facts["averages"])
        outputs, gradients, only_rows = [], [], True
        for index, whole in enumerate(call.outputs):
            parts = [event.tensors.get(f"grad_output.{index}") for event in events]
            if not whole.requires_grad or all(part is None for part in parts) or index not in call.layouts:
                continue
            layout = call.layouts[index]
            only_rows = only_rows and not layout.is_whole
            outputs.append(whole)
            gradients.append(layout.gradient(parts, whole, averages=averages))
        for tensor in call.inputs:
            tensor.grad = None
        torch.autograd.backward(outputs, gradients, retain_graph=True)
        if any(event.facts["delayed"] for event in events):
            self.notes.add(
                "gradients whose sum over ranks is delayed (delay_grad_allreduce) were not compared; "
                "parameters were"
            )
        else:
            self._compare_gradients(events)
        first, last = call.rows_of(0)
        scale = len(events) if only_rows and averages else 1
        given = []
        for index, (tensor, kind) in enumerate(zip(call.inputs, call.kinds, strict=True)):
            part = tensor.grad
            if part is not None and kind == "batch":
                part = part.narrow(call.dim_of(index), first, last - first)
            given.append(None if part is None else part * scale)
        return given

    def _compare_gradients(self, events: Sequence[Event]) -> None:
        by_rank = [event.of("gradient.") for event in events]
        mine = self.models.parameters()
        floor = floor_of(
            largest_in(tensor.grad.to_dense() for tensor in mine.values() if tensor.grad is not None)
        )
        for name, parameter in mine.items():
            found = {rank: gradients[name] for rank, gradients in enumerate(by_rank) if name in gradients}
            rows = (
                parameter.grad.coalesce() if parameter.grad is not None and parameter.grad.is_sparse else None
            )
            grad = None if parameter.grad is None else parameter.grad.to_dense()
            if grad is not None and not found and grad.any():
                self.comparison.missing("gradient", name, "no rank has a gradient")
            for rank, gradient in found.items():
                there = torch.zeros_like(parameter) if grad is None else grad
                self.comparison.value("gradient", name, rank, gradient, there, floor=floor)
            if found and next(iter(found.values())).shape == parameter.shape:
                first = next(iter(found.values())).to(parameter.device)
                if rows is not None:
                    # Optimizers make a difference between the rows that a sparse gradient has and the others.
                    parameter.grad = first.sparse_mask(rows)
                else:
                    parameter.grad = first.clone() if grad is None else grad.detach().copy_(first)

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.num_calls or not self.models.trained_by(optimizer):
            return
        if self.rank == 0:
            events = self._events(step_event(self.num_steps))
            if not events or events[0].facts["num_calls"] != self.num_calls:
                text = f"{_OUT_OF_STEP}: step {self.num_steps + 1} comes after another number of calls"
                raise UserInputError(text, cure=_SAME_CALLS)
            self._compare_step(events)
            self.comparison.end_step()
            with progress_file(self.records.directory, "reference").open("a", encoding="utf-8") as file:
                file.write(f"{self.num_steps + 1}\n")
        self.num_steps += 1
        if self.num_steps >= self.settings.num_steps:
            self._enough("steps")

    def _compare_step(self, events: Sequence[Event]) -> None:
        for kind, name, tensor in self.models.tensors():
            found = {
                rank: event.tensors[f"{kind}.{name}"]
                for rank, event in enumerate(events)
                if f"{kind}.{name}" in event.tensors
            }
            if not found:
                self.comparison.missing(kind, name, "no rank has it")
            for rank, value in found.items():
                self.comparison.update(kind, name, rank, value, tensor, self.before[f"{kind}.{name}"])
            if found and next(iter(found.values())).shape == tensor.shape:
                with torch.no_grad():
                    tensor.copy_(next(iter(found.values())))
        self._remember()

    def _enough(self, why: str) -> None:
        if self.rank == 0:
            self.write_result(why)
        world = bootstrap.started()
        if world is not None:
            # The others have less to do, and none is to be missed before the first is done.
            world.control.barrier(
                what="the end of the verification", limit_seconds=self.settings.limit_seconds
            )
        raise EnoughError(why)

    def write_result(self, why: str) -> None:
        """What was found, for the one who asked; of rank 0."""
        comparison = self.comparison
        if comparison.step.num_calls:
            comparison.end_step()
        result = Result(
            steps=tuple(comparison.steps),
            differences=tuple(comparison.differences),
            num_differences=comparison.num_differences,
            num_parameters=sum(tensor.numel() for tensor in self.models.parameters().values()),
            tolerance=comparison.tolerance,
            narrowest=str(self.narrowest.dtype).removeprefix("torch."),
            narrowest_at=self.narrowest.location,
            ended=why,
            notes=tuple(sorted(self.notes | self.models.notes)),
        )
        write_whole(result_file(self.records.directory), result.model_dump_json())


class _Replayed(torch.autograd.Function):
    """Rank 0's rows of the outputs; their backward is the plain model's, of all rows."""

    @staticmethod
    def forward(
        ctx: Any, reference: Reference, call: _Call, own: Sequence[Tensor], anchor: Tensor, *origins: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.reference, ctx.call = reference, call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(part for part, whole in zip(own, call.outputs, strict=True) if not whole.requires_grad)
        )
        return tuple(own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with torch.enable_grad():
            given = ctx.reference.backward(ctx.call)
        return (None, None, None, None, *given)


class _Company(torch.autograd.Function):
    """Outputs without a graph; their backward gives one parameter a gradient of zeros, so that an optimizer
    has something to do.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, anchor: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.parameter = parameter
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.parameter.grad is None:
            ctx.parameter.grad = torch.zeros_like(ctx.parameter)
        return (None, None, *(None for _ in grads))


def _accompany(function: Callable[..., Any], args: Any, kwargs: Any, parameters: Sequence[Tensor]) -> Any:
    with torch.no_grad():
        result = function(*args, **kwargs)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not torch.is_grad_enabled() or not trained:
        return result
    smallest = min(trained, key=lambda parameter: parameter.numel())
    outputs: Mapping[int, Tensor] = dict(enumerate(tensor for _, tensor in tensors_of(result)))
    fresh = iter(_Company.apply(smallest, torch.zeros((), requires_grad=True), *outputs.values()))
    return replaced(result, lambda _, tensor: next(fresh))
