"""Checks of what a rank holds: memory of the process, state_dict and load_state_dict, clipping, touching what
was given back.

In: a context. Out: findings, and for memory the measured bytes. Terms: *given back* are parameters of other
ranks' stages, whose values are not on this rank; *share* is a rank's part of the model's bytes.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.distributed.contract_checks import Alone, released
from tests.distributed.harness.context import Context
from tests.distributed.harness.equality import num_elements

LARGE_WIDTH = 4096
NUM_LARGE_LAYERS = 16
# Code that is loaded and caches that are filled by the first step, whatever the model's size.
SLACK_BYTES = 160 * 1024**2


class Large(nn.Module):
    """Sixteen layers of 64 MiB: 1 GiB of parameters in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.utils.skip_init(nn.Linear, LARGE_WIDTH, LARGE_WIDTH, bias=False)
            for _ in range(NUM_LARGE_LAYERS)
        )
        with torch.no_grad():
            for index, layer in enumerate(self.layers):
                # Random initialisation of 1 GiB takes longer than the rest of the test.
                layer.weight.fill_((index + 1) * 1e-6)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, target)


def _resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def memory_falls(context: Context) -> dict[str, Any]:
    """A rank's own memory: the whole model before the first step, its share of parameters, gradients and
    state after.
    """
    findings, num_stages = context.findings, context.case.num_stages
    base = _resident_bytes()
    model = Large()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    findings.that(total >= 1024**3, f"the model has {total} bytes only")
    measured = {"built": _resident_bytes() - base}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    compiled = context.compile(model)
    generator = torch.Generator().manual_seed(context.rank)
    for _ in range(2):
        optimizer.zero_grad()
        batch = torch.randn(2, 2, LARGE_WIDTH, generator=generator)
        compiled(batch[0], batch[1]).backward()
        measured.setdefault("first backward", _resident_bytes() - base)
        optimizer.step()
        measured["step"] = _resident_bytes() - base
    share = total / num_stages
    owned = [p for p in model.parameters() if p.grad is not None]
    own_bytes = sum(p.numel() * p.element_size() for p in owned)
    findings.that(
        own_bytes <= share * 1.3, f"this rank owns {own_bytes} of {total} bytes, over {num_stages} stages"
    )
    # A process that has run other cases has some memory to give again.
    findings.that(
        measured["built"] >= total - SLACK_BYTES,
        f"before the first step the process held {measured['built']} bytes",
    )
    # Parameters and gradients; then AdamW's two moments as well.
    for moment, copies in (("first backward", 2), ("step", 4)):
        allowed = copies * own_bytes * 1.05 + SLACK_BYTES
        text = f"after {moment}: {measured[moment]} bytes held, {allowed:.0f} allowed for {own_bytes} bytes of parameters"
        findings.that(measured[moment] <= allowed, text)
    state = sum(num_elements(members) for members in optimizer.state.values()) * 4
    findings.that(
        state <= 2.1 * own_bytes, f"the optimizer keeps {state} bytes for {own_bytes} of parameters"
    )
    return {"measured": measured, "total": total, "owned": own_bytes}


def _train(
    context: Context, model: nn.Module, call: Callable[..., Any], first: int, last: int, loss: Any = None
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(first, last):
        optimizer.zero_grad()
        batch = context.batch(step)
        if loss is None:
            batch = context.local(batch)
            context.entry.loss_of(context.entry.call(call, batch), batch).backward()
        else:
            loss(batch)[1].backward()
        optimizer.step()


def _original_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("_orig_mod."): value for name, value in state.items()}


def state_dict_round_trip(context: Context) -> None:
    """state_dict before and after the first step, saved and loaded as a file, into a plain model and back
    into this one.
    """
    findings = context.findings
    model, alone = context.model(), Alone(context)
    compiled = context.compile(model)
    before = model.state_dict()
    if context.rank == 0:
        context.compare_state(before, dict(alone.model.state_dict()), factor=1)
    start = {name: value.clone() for name, value in alone.model.state_dict().items()}
    _train(context, model, compiled, 0, 2)
    _train(context, alone.model, alone.model, 0, 2, alone.loss)
    for source in (model, compiled):
        state = _original_names(source.state_dict())
        for value in state.values():
            # A storage that was given back would crash here.
            findings.that(
                bool(torch.isfinite(value.double().sum())), "state_dict has values that cannot be read"
            )
        if context.rank == 0:
            context.compare_state(state, dict(alone.model.state_dict()), factor=1e3)
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            plain = context.model()
            plain.load_state_dict(torch.load(file))
    gone = released(model)
    model.load_state_dict(start)
    alone.model.load_state_dict(start)
    findings.that(released(model) == gone, "load_state_dict brought parameters back")
    _train(context, model, compiled, 4, 6)
    _train(context, alone.model, alone.model, 4, 6, alone.loss)
    state = model.state_dict()
    if context.rank == 0:
        context.compare_state(state, dict(alone.model.state_dict()), factor=1e3)


def load_before_first_step(context: Context) -> None:
    """load_state_dict between torch.compile and the first step; and a wrong name is an error as in torch."""
    model, alone = context.model(), Alone(context)
    compiled = context.compile(model)
    other = {name: value * 0.5 for name, value in alone.model.state_dict().items()}
    model.load_state_dict(other)
    alone.model.load_state_dict(other)
    _train(context, model, compiled, 0, 2)
    _train(context, alone.model, alone.model, 0, 2, alone.loss)
    state = model.state_dict()
    if context.rank == 0:
        context.compare_state(state, dict(alone.model.state_dict()), factor=1e3)
    wrong = {f"{name}.wrong": value for name, value in other.items()}
    context.findings.raises("a wrong name", ("RuntimeError",), lambda: model.load_state_dict(wrong))


def memory_is_reported(context: Context) -> dict[str, Any]:
    """`memory_report` counts what this rank really holds, and what the first steps needed."""
    import rannc_backend
    from rannc_backend.errors import UserInputError

    model, findings = context.model(), context.findings
    compiled = context.compile(model, report_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        rannc_backend.memory_report(model)
        findings.that(False, "a report of a model that was not called")
    except UserInputError as error:
        findings.that("not planned yet" in str(error), f"of a model that was not called: {error}")
    local = context.local(context.batch())
    early = None
    for step in range(6):
        optimizer.zero_grad()
        context.entry.loss_of(context.entry.call(compiled, local), local).backward()
        optimizer.step()
        if step == 0:
            early = rannc_backend.memory_report(model)
    report = rannc_backend.memory_report(model, optimizer)
    assert early is not None, "there was a first step"
    for stage in early.stages:
        unknown = (stage.measured.optimizer, stage.measured.step, stage.measured.peak)
        findings.that(unknown == (None, None, None), f"known after one step, without an optimizer: {unknown}")
    findings.that("not known" in str(early), "unknown bytes look known")
    (own,) = (stage for stage in report.stages if context.rank in stage.ranks)
    held = {p.untyped_storage().data_ptr(): p for p in model.parameters() if p.grad is not None}
    weights = sum(p.numel() * p.element_size() for p in held.values())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    # What is elsewhere is one element.
    cells = 16 * len(list(model.parameters()))
    state = sum(
        value.numel() * value.element_size()
        for values in optimizer.state.values()
        for value in values.values()
    )
    measured = own.measured
    findings.that(
        weights <= measured.parameters <= weights + buffers + cells, f"{measured}, {weights} of weights"
    )
    findings.that(measured.optimizer == state, f"{measured}, {state} of optimizer state")
    findings.that(
        weights <= measured.gradients <= 1.5 * weights + 4096, f"{measured}, {weights} of gradients"
    )
    known = measured.step is not None and measured.peak is not None
    findings.that(known, f"not known after six steps: {measured}")
    if measured.step is not None and measured.peak is not None:
        findings.that(measured.step > 0, "a step without activations")
        findings.that(measured.peak >= measured.step + weights, f"a peak below its parts: {measured}")
    findings.that(own.predicted.parameters >= weights, f"predicted {own.predicted}")
    return report.model_dump(mode="json")


def clipping(context: Context) -> None:
    """clip_grad_norm_ returns and does over all stages what torch's does in one process; tied parameters
    count once.
    """
    import rannc_backend

    model, alone = context.model(), Alone(context)
    compiled = context.compile(model)
    batch = context.batch()
    local = context.local(batch)

    def by_name(given: nn.Module, *norms: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_([p for p in given.parameters() if p.grad is not None], *norms)

    ways = (
        rannc_backend.clip_grad_norm_,
        lambda given, *norms: clip_grad_norm_(given.parameters(), *norms),
        by_name,
    )
    for norm_type, clip in itertools.product((2.0, 1.0, float("inf")), ways):
        for max_norm in (1e-3, 1e6):
            model.zero_grad()
            alone.model.zero_grad()
            context.entry.loss_of(context.entry.call(compiled, local), local).backward()
            alone.backward(batch)
            norm = clip(model, max_norm, norm_type)
            expected = torch.nn.utils.clip_grad_norm_(alone.model.parameters(), max_norm, norm_type)
            what = f"of type {norm_type}, at most {max_norm}"
            context.findings.close(
                "norm", what, torch.as_tensor(norm).to(expected.dtype), expected, context.tolerance * 10
            )
            context.compare_gradients(
                model, alone.gradients(), kind=f"gradient clipped by the norm {what}", factor=10
            )
    _one_by_one(context, model, alone.model)


def _one_by_one(context: Context, model: nn.Module, alone: nn.Module) -> None:
    """Clipped one parameter at a time: alike on all ranks, or refused."""
    import rannc_backend

    for given in (model, alone):
        for parameter in given.parameters():
            clip_grad_norm_(parameter, 1e-4)
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    context.compare_gradients(model, wanted, kind="gradient clipped alone", factor=10)
    held = [p for p in model.parameters() if rannc_backend.is_held(p) and p.grad is not None]
    if context.case.num_stages > 1 and context.entry.name == "mlp_loss":
        one = next(iter(held), next(model.parameters()))
        error = context.findings.raises(
            "one of each rank", ("UserInputError",), lambda: clip_grad_norm_(one, 1e-4)
        )
        context.findings.that("one parameter at a time" in str(error), f"another error: {error}")


def hooks(context: Context) -> None:
    """Hooks of parameters get and give what they do in one process: whole gradients, one per backward, and
    then p.grad is there.
    """
    import rannc_backend

    model, alone = context.model(), Alone(context)
    called: dict[str, int] = {}

    def register(of: nn.Module, counts: dict[str, int]) -> None:
        for number, (name, parameter) in enumerate(of.named_parameters()):
            if not parameter.requires_grad:
                continue
            parameter.register_hook(lambda gradient, number=number: gradient.clamp(-1e-3 * number, 1e-3))
            parameter.register_hook(lambda gradient: None)

            def tell(p: nn.Parameter, name: str = name) -> None:
                counts[name] = counts.get(name, 0) + 1
                p.grad = p.grad * 0.5

            parameter.register_post_accumulate_grad_hook(tell)

    register(model, called)
    register(alone.model, {})
    compiled = context.compile(model)
    for step in range(2):
        # Nothing is set to zero in between: each backward's gradient goes through the hooks by itself.
        local = context.local(context.batch(step))
        context.entry.loss_of(context.entry.call(compiled, local), local).backward()
        alone.backward(context.batch(step))
        names = context.compare_gradients(
            model, alone.gradients(), kind=f"gradient after {step + 1} backwards"
        )
        context.findings.that(
            called == dict.fromkeys(names, step + 1), f"told of {called}, and there are {names}"
        )
    rannc_backend.delay_grad_allreduce(True)
    context.findings.raises(
        "hooks of local gradients", ("UserInputError",), lambda: context.entry.call(compiled, local)
    )
    rannc_backend.delay_grad_allreduce(False)


def anomaly(context: Context) -> None:
    """Under anomaly detection everything is as without, from the first call on."""
    model, alone = context.model(), Alone(context)
    compiled, local = context.compile(model), context.local(context.batch())
    with torch.autograd.set_detect_anomaly(True):
        context.entry.loss_of(context.entry.call(compiled, local), local).backward()
    alone.backward(context.batch())
    context.compare_gradients(model, alone.gradients())


# What a training script may do with a model beside calling the compiled one. Each works, or is an error that
# names the owners.
TOUCHES: Mapping[str, tuple[bool, Callable[[nn.Module, nn.Parameter], Any]]] = {
    "norm": (False, lambda model, p: p.norm()),
    "penalty": (False, lambda model, p: p.pow(2).sum().backward()),
    "all norms": (False, lambda model, p: sum(q.norm() for q in model.parameters())),
    "deepcopy": (True, lambda model, p: copy.deepcopy(model)),
    "average": (True, lambda model, p: torch.optim.swa_utils.AveragedModel(model)),
    "save": (False, lambda model, p: torch.save(model, io.BytesIO())),
    "parameters_to_vector": (False, lambda model, p: torch.nn.utils.parameters_to_vector(model.parameters())),
    "to another dtype": (False, lambda model, p: model.to(torch.float16)),
    "copy_": (False, lambda model, p: p.data.copy_(torch.zeros(p.shape))),
    "init": (False, lambda model, p: nn.init.normal_(p)),
    "assign data": (False, lambda model, p: setattr(p, "data", torch.zeros(p.shape, dtype=p.dtype))),
    "repr": (True, lambda model, p: repr(p)),
    "number of parameters": (
        True,
        lambda model, p: sum(q.numel() * q.element_size() for q in model.parameters()),
    ),
    "device": (True, lambda model, p: next(model.parameters()).device),
    "to where it is": (True, lambda model, p: model.to(p.device, p.dtype)),
    "plain clip": (True, lambda model, p: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)),
    "zero_grad": (True, lambda model, p: model.zero_grad()),
    "freeze": (True, lambda model, p: p.requires_grad_(True)),
    "new optimizer": (True, lambda model, p: torch.optim.AdamW(model.parameters()).step()),
}


def touch_released(context: Context) -> dict[str, Any]:
    """Things that a user may do with a parameter that is not here: they work or are an error, never a crash
    or a wrong number.
    """
    model = context.model()
    compiled = context.compile(model)
    _train(context, model, compiled, 0, 1)
    names = released(model)
    find = context.findings.that
    find(bool(names), "nothing was given back")
    for what, (works, touch) in TOUCHES.items():
        print(f"rank {context.rank} touches by {what}", file=sys.stderr, flush=True)
        parameter = dict(model.named_parameters())[names[0]]
        if works:
            touch(model, parameter)
            continue
        error = context.findings.raises(
            what, ("ReleasedParameterError",), lambda touch=touch, p=parameter: touch(model, p)
        )
        find(
            error is None or ("rank" in str(error) and "What to change" in str(error)),
            f"{what}: no owner or no cure in {error}",
        )
    find(released(model) == names, "touching brought parameters back")
    local = context.local(context.batch())
    past: Mapping[str, Callable[[], Any]] = {
        "the plain model": lambda: context.entry.call(model, local),
        "a copy without memory": lambda: torch.func.functional_call(
            model, dict(model.named_parameters()), tuple(local.values())
        ),
    }
    for what, call in past.items():
        context.findings.raises(what, ("ReleasedParameterError",), call)
    _train(context, model, compiled, 1, 2)
    return {"released": names}


def generate_past_the_call(context: Context) -> None:
    """`generate()` of Hugging Face calls the plain model, on the compiled one too: an error, not token 0 for
    ever.
    """
    model = context.model()
    compiled = context.compile(model)
    ids = torch.ones(2, 3, dtype=torch.long)
    _train(context, model, compiled, 0, 1)
    for what, call in {"model": model.generate, "compiled": compiled.generate}.items():
        error = context.findings.raises(
            f"{what}.generate()", ("ReleasedParameterError",), lambda call=call: call(ids, max_new_tokens=3)
        )
        context.findings.that("rannc_backend.gathered" in str(error), f"no cure in {error}")
    _train(context, model, compiled, 1, 2)
