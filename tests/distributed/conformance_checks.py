"""What RaNNC's own tests do with a model, through `RaNNCModule`: compared with one process, and failing when
something differs.

In: a context whose case says how many forwards make an update ("accumulate"). Out: findings. Every function
is collective.
Terms: *alone* is the plain model in one process on the global batch; an *update* is the last of the forwards
whose gradients add up. The optimizer is RaNNC's, Adam with learning rate 0.01, but for its epsilon: with the
usual 1e-8 a gradient of 1e-9, which is rounding, moves a parameter as far as any other, and nothing could be
held to 1e-5.
"""

from __future__ import annotations

import contextlib
import math
import os
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rannc_backend as pyrannc
from rannc_backend.backend import REGISTRY
from tests.distributed.contract_checks import Alone
from tests.distributed.harness.compare import floor_of
from tests.distributed.harness.context import Context
from tests.model_entry import Batch

NUM_UPDATES = 2
LEARNING_RATE = 0.01
EPSILON = 1e-3


@contextlib.contextmanager
def environment(context: Context, **more: object) -> Iterator[None]:
    """The case's options as RaNNC takes them: RANNC_<NAME> in the environment."""
    items = context.case.compile_options() | more
    variables = {
        f"RANNC_{name.upper()}": str(value) for name, value in items.items() if name != "gather_inputs"
    }
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def adam(module: nn.Module) -> torch.optim.Adam:
    """The optimizer of all these checks."""
    return torch.optim.Adam(module.parameters(), lr=LEARNING_RATE, eps=EPSILON)


class Pair:
    """A RaNNCModule and the plain model, with an optimizer each."""

    def __init__(self, context: Context, **arguments: Any) -> None:
        self.context = context
        self.alone = Alone(context)
        net = context.model()
        self.trains = context.entry.trains
        self.optimizer = adam(net) if self.trains else None
        self.plain_optimizer = adam(self.alone.model) if self.trains else None
        self.model = pyrannc.RaNNCModule(net, self.optimizer, **arguments)
        self.gathers = arguments.get("gather_inputs", True)

    def forward_backward(self, step: int) -> None:
        """One forward and backward of both; outputs must agree."""
        context, entry = self.context, self.context.entry
        batch = context.batch(step)
        local = context.local(batch) if self.gathers else self._of_rank_0(batch)
        outputs = entry.call(self.model, local)
        if self.gathers:
            expected, loss = self.alone.loss(batch)
            context.compare_rows(outputs, dict(entry.rows_of(expected)))
        else:
            expected = entry.call(self.alone.model, batch)
            loss = entry.loss_of(expected, batch)
            for name, value in entry.rows_of(expected).items():
                context.findings.close("rows", name, entry.rows_of(outputs)[name], value, context.tolerance)
        if entry.loss_inside:
            context.findings.close(
                "loss", f"of step {step}", entry.loss_of(outputs, local), loss.detach(), context.tolerance
            )
        if self.trains:
            entry.loss_of(outputs, local).backward()
            loss.backward()

    def _of_rank_0(self, batch: Batch) -> Batch:
        """All of the batch on rank 0. What the others pass is not looked at; their loss outside is that of
        the same rows.
        """
        passed = self.context.entry.outside
        return {
            n: v.clone() if self.context.rank == 0 or n in passed else torch.zeros_like(v)
            for n, v in batch.items()
        }

    def compare_gradients(self, what: str) -> None:
        """All gradients, on every rank, by get_param_grad."""
        expected = self.alone.gradients()
        self._compare(
            f"gradient, {what}", expected, {name: self.model.get_param_grad(name) for name in expected}
        )

    def compare_parameters(self, what: str) -> None:
        """All parameters, on every rank, by get_param."""
        expected = {name: p.detach() for name, p in self.alone.model.named_parameters()}
        self._compare(f"parameter, {what}", expected, {name: self.model.get_param(name) for name in expected})

    def _compare(self, kind: str, expected: dict[str, Tensor], actual: dict[str, Any]) -> None:
        floor = floor_of(expected)
        for name, value in expected.items():
            self.context.findings.close(kind, name, actual[name], value, self.context.tolerance, floor)

    def update(self) -> None:
        """A step of both optimizers; gradients start anew."""
        assert self.optimizer is not None and self.plain_optimizer is not None, "nothing to train"
        self.optimizer.step()
        self.plain_optimizer.step()
        self.model.zero_grad()
        self.plain_optimizer.zero_grad()

    def train(self, num_updates: int, accumulate: int, *, first: int = 0, explicitly: bool = False) -> None:
        """Updates of so many forwards each; ``explicitly``: all of them without all-reduce, then
        allreduce_grads.
        """
        for step in range(first * accumulate, (first + num_updates) * accumulate):
            last = step % accumulate == accumulate - 1
            pyrannc.delay_grad_allreduce(explicitly or not last)
            self.forward_backward(step)
            if not self.trains or not last:
                continue
            if explicitly:
                self.model.allreduce_grads()
            self.compare_gradients(f"update at step {step}")
            self.update()
            self.compare_parameters(f"after step {step}")
        pyrannc.delay_grad_allreduce(False)


def conformance(context: Context) -> None:
    """The common procedure of RaNNC's tests: train and compare everything, then save, load and go on."""
    accumulate = context.case.parameters["accumulate"]
    with environment(context):
        asked = {
            name: True for name in ("enable_zero", "offload_params") if context.case.parameters.get(name)
        }
        pair = Pair(context, gather_inputs=context.case.options.get("gather_inputs", True), **asked)
        pair.compare_parameters("before training")
        pair.train(NUM_UPDATES, accumulate)
        plan = REGISTRY.plan_of(pair.model)
        found = (plan.zero_stage, plan.offload) if plan is not None else None
        wanted = (int("enable_zero" in asked), "parameters" if "offload_params" in asked else "none")
        context.findings.that(found == wanted, f"{asked}: {found}")
        if pair.trains:
            pair.train(1, accumulate, first=NUM_UPDATES, explicitly=True)
            _saved_and_loaded(pair)


def _saved_and_loaded(pair: Pair) -> None:
    """Model and optimizer: saved by rank 0, loaded by a plain model and optimizer, and back."""
    context, findings = pair.context, pair.context.findings
    assert pair.optimizer is not None and pair.plain_optimizer is not None, "nothing to save"
    path = context.directory / f"{context.case.name}.pt"
    state, optimizer_state = pair.model.state_dict(), pair.optimizer.state_dict(from_global=True)
    if context.rank == 0:
        torch.save({"model": state, "optimizer": optimizer_state}, path)
    else:
        findings.that(
            not state and optimizer_state is None,
            f"rank {context.rank} has {list(state)} and {optimizer_state}",
        )
    pyrannc.barrier()
    saved = torch.load(path)
    fresh = context.model()
    fresh.load_state_dict(saved["model"])
    context.compare_state(dict(fresh.state_dict()), dict(pair.alone.model.state_dict()), factor=1.0)
    plain_optimizer = adam(fresh)
    plain_optimizer.load_state_dict(saved["optimizer"])
    _compare_optimizers(context, plain_optimizer.state_dict(), pair.plain_optimizer.state_dict())
    pair.optimizer.load_state_dict(saved["optimizer"], from_global=True)
    pair.model.load_state_dict(saved["model"])
    pair.train(1, 1, first=100)


def _compare_optimizers(context: Context, actual: dict[str, Any], expected: dict[str, Any]) -> None:
    findings = context.findings
    findings.that(
        actual["param_groups"] == expected["param_groups"],
        f"groups {actual['param_groups']}, not {expected['param_groups']}",
    )
    findings.that(
        set(actual["state"]) == set(expected["state"]),
        f"state of {set(actual['state'])}, not of {set(expected['state'])}",
    )
    for index, values in expected["state"].items():
        for name, value in values.items():
            floor = floor_of({str(i): state[name] for i, state in expected["state"].items()})
            mine = actual["state"].get(index, {}).get(name)
            findings.close(
                "optimizer", f"{name} of parameter {index}", mine, value, context.tolerance * 2, floor
            )


def conformance_clipping(context: Context) -> None:
    """clip_grad_norm over all stages is torch's over all parameters, with accumulated gradients; and the norm
    alone.
    """
    with environment(context):
        pair = Pair(context)
        for step, max_norm in enumerate((1.0, 1e-3, 1e6)):
            for part in range(2):
                pyrannc.delay_grad_allreduce(part == 0)
                pair.forward_backward(2 * step + part)
            norm = pair.model.clip_grad_norm(max_norm)
            expected = torch.nn.utils.clip_grad_norm_(pair.alone.model.parameters(), max_norm)
            context.findings.close(
                "norm",
                f"at most {max_norm}",
                torch.as_tensor(norm).to(expected.dtype),
                expected,
                context.tolerance,
            )
            pair.compare_gradients(f"clipped to {max_norm}")
            pair.update()
            pair.compare_parameters(f"after clipping to {max_norm}")


def conformance_evaluation(context: Context) -> None:
    """A second pass in eval mode after training, and training goes on; RaNNC's tests stopped at the first."""
    with environment(context):
        pair = Pair(context)
        pair.train(1, 1)
        pair.model.eval()
        pair.alone.model.eval()
        with torch.no_grad():
            batch = context.batch(50)
            outputs = context.entry.call(pair.model, context.local(batch))
            context.compare_rows(outputs, dict(context.entry.rows_of(pair.alone.loss(batch)[0])))
        pair.model.train()
        pair.alone.model.train()
        pair.train(1, 1, first=1)


def conformance_deployment(context: Context) -> None:
    """A saved deployment is loaded by another module, which trains as the first one did."""
    path = context.directory / f"{context.case.name}.json"
    with environment(context):
        pair = Pair(context)
        error = context.findings.raises(
            "saving before the first call", ("UserInputError",), lambda: pair.model.save_deployment(path)
        )
        context.findings.that(error is None or "deployment" in str(error), f"the error says: {error}")
        pair.train(1, 1)
        pair.model.save_deployment(path)
        pyrannc.barrier()
        saved = pyrannc.load_deployment(path)
        again = Pair(context, load_deployment=str(path))
        again.train(1, 1)
        copy = context.directory / f"{context.case.name}-again.json"
        again.model.save_deployment(copy)
        pyrannc.barrier()
        context.findings.that(
            pyrannc.load_deployment(copy).stages == saved.stages, "the loaded deployment has other stages"
        )


def conformance_switches(context: Context) -> None:
    """sync_params_on_init, buffers of this rank and of all, allreduce_grads_zero with a scale, clear."""
    findings = context.findings
    with environment(context):
        pyrannc.sync_params_on_init(False)
        net, plain = context.model(), context.model()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(context.rank)
        model = pyrannc.RaNNCModule(net)
        every = dict(plain.named_buffers())
        findings.that(dict(model.named_buffers()).keys() == every.keys(), "buffers before the first call")
        batch = context.local(context.batch())
        context.entry.loss_of(context.entry.call(model, batch), batch).backward()
        pyrannc.sync_params_on_init(True)
        own = {name for name, _ in model.named_parameters()}
        findings.that(bool(own) and len(own) < len(list(plain.parameters())), f"this rank owns {sorted(own)}")
        for name, value in plain.named_parameters():
            if name in own:
                findings.that(
                    torch.equal(model.get_parameter(name), value + context.rank), f"{name} was given away"
                )
        here = {name for name, _ in model.named_buffers()}
        findings.that(bool(here) and len(here) < len(every), f"buffers here: {sorted(here)}")
        findings.that(
            {name for name, _ in model.named_buffers(from_global=True)} == set(every), "buffers of all ranks"
        )
        findings.that(
            len(list(model.buffers())) == len(here)
            and len(list(model.buffers(from_global=True))) == len(every),
            "buffers()",
        )
        before = {name: model.get_param_grad(name) for name, _ in plain.named_parameters()}
        model.zero_grad()
        pyrannc.delay_grad_allreduce(True)
        context.entry.loss_of(context.entry.call(model, batch), batch).backward()
        pyrannc.delay_grad_allreduce(False)
        model.allreduce_grads_zero(0.5)
        floor = floor_of({name: value for name, value in before.items() if value is not None})
        for name, value in before.items():
            assert value is not None, f"{name} has no gradient"
            findings.close(
                "prescaled", name, model.get_param_grad(name), value * 0.5, context.tolerance, floor
            )
        pyrannc.clear()
        findings.that(not model.ready and not list(net.parameters())[0].grad, "clear() left a deployment")


def conformance_training(context: Context) -> None:
    """Training alone: in bfloat16 outputs, gradients and parameters agree within a few roundings to eight
    bits.
    """
    with environment(context):
        pair = Pair(context)
        pair.train(2, context.case.parameters["accumulate"])


def document(context: Context) -> None:
    """A script of tests/rannc_documents runs to its end on all ranks; it checks itself."""
    script = Path(__file__).parents[1] / "rannc_documents" / f"{context.case.parameters['script']}.py"
    variables = {"RANNC_STAGE_COMPILER": "eager"} | dict(context.case.parameters["variables"])
    os.environ.update(variables)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        for name in variables:
            os.environ.pop(name, None)
        pyrannc.delay_grad_allreduce(False)
    pyrannc.barrier()


def run_example(context: Context, *flags: str) -> Any:
    """What main() of the case's example returns."""
    folder = Path(__file__).parents[2] / "examples"
    sys.path.insert(0, str(folder))
    os.environ["RANNC_STAGE_COMPILER"] = "eager"
    try:
        return runpy.run_path(str(folder / f"{context.case.parameters['script']}.py"))["main"](
            [*context.case.parameters["flags"], *flags]
        )
    finally:
        sys.path.remove(str(folder))
        del os.environ["RANNC_STAGE_COMPILER"]


def example(context: Context) -> None:
    """An example trains: its loss falls, or it says how much it gets right."""
    result = run_example(context)
    if isinstance(result, list):
        context.findings.that(
            result[-1] < result[0] and all(math.isfinite(loss) for loss in result),
            f"the loss does not fall: {result}",
        )
    else:
        context.findings.that(0.0 <= result <= 1.0, f"accuracy {result}")


def example_resumed(context: Context) -> None:
    """An example that goes on from its checkpoint ends where one without interruption does, bit for bit."""
    first, second = (context.directory / f"{context.case.name}-{part}" for part in ("first", "second"))
    whole = run_example(context, "--save", str(first))
    if context.rank == 0:
        earlier = sorted(first.glob("step-*"))[0]
        shutil.copytree(earlier, second / earlier.name)
    pyrannc.barrier()
    rest = run_example(context, "--save", str(second), "--resume")
    if isinstance(whole, list):
        context.findings.that(
            0 < len(rest) < len(whole) and rest == whole[-len(rest) :], f"resumed {rest}, at once {whole}"
        )
    else:
        context.findings.that(rest == whole, f"resumed {rest}, at once {whole}")
