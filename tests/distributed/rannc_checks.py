"""Checks of RaNNC's own surface: RaNNCModule, its methods, the functions beside it, and optimizers with
from_global.

In: a context. Out: findings. Every function is collective. Terms as in contract_checks.py: *alone* is the
plain model in one process.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rannc_backend as pyrannc
from tests.distributed.contract_checks import Alone
from tests.distributed.harness.context import LATER_STEPS_FACTOR, Context
from tests.distributed.harness.equality import num_elements


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with hyperparameters of their own, biases and other vectors apart from matrices."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "lr": 1e-3}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=2e-3, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(groups, lr=2e-3, eps=1e-6, amsgrad=kind == "amsgrad")


def wrap(
    context: Context, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **arguments: Any
) -> pyrannc.RaNNCModule:
    """As a RaNNC script wraps it."""
    return pyrannc.RaNNCModule(model, optimizer, options=context.case.compile_options(), **arguments)


def loss_of(context: Context, model: Any, step: int = 0) -> torch.Tensor:
    """The loss of this rank's rows of a step."""
    batch = context.local(context.batch(step))
    return context.entry.loss_of(context.entry.call(model, batch), batch)


def compare_optimizer(
    context: Context, found: dict[str, Any] | None, expected: dict[str, Any], what: str
) -> None:
    """Rank 0's whole optimizer state against that of one process; None elsewhere."""
    findings = context.findings
    if context.rank != 0:
        findings.that(found is None, f"{what}: this rank got {type(found).__name__}")
        return
    assert found is not None
    findings.that(
        found["param_groups"] == expected["param_groups"], f"{what}: groups {found['param_groups']}"
    )
    findings.that(
        list(found["state"]) == sorted(expected["state"]), f"{what}: state for {list(found['state'])}"
    )
    for index, members in expected["state"].items():
        for name, value in members.items():
            actual = found["state"].get(index, {}).get(name)
            findings.close(
                "optimizer", f"{what} {index} {name}", actual, value, context.tolerance * LATER_STEPS_FACTOR
            )


def trains_as_rannc_module(context: Context) -> dict[str, Any]:
    """The common procedure of RaNNC's tests: outputs, gradients by name, steps, whole states; and the module
    looks like the given one.
    """
    case, entry, findings = context.case, context.entry, context.findings
    kind = case.parameters.get("optimizer", "adam")
    given, alone = context.model(), Alone(context)
    optimizer, expected = make_optimizer(kind, given), make_optimizer(kind, alone.model)
    names = [name for name, _ in given.named_parameters()]
    model = wrap(context, given, optimizer)
    findings.that(isinstance(model, nn.Module) and model.model is given, "it is no module, or another")
    findings.that([name for name, _ in model.named_parameters()] == names, "names before the first call")
    findings.that(
        not model.ready and list(model.state_dict()) == list(given.state_dict()),
        "state_dict before the first call",
    )
    for step in range(case.num_steps):
        optimizer.zero_grad()
        expected.zero_grad()
        factor = 1.0 if step == 0 else LATER_STEPS_FACTOR
        outputs = entry.call(model, context.local(context.batch(step)))
        loss = entry.loss_of(outputs, context.local(context.batch(step)))
        loss.backward()
        plain, plain_loss = alone.loss(context.batch(step))
        plain_loss.backward()
        context.compare_rows(outputs, entry.rows_of(plain), factor=factor)
        if entry.loss_inside:
            findings.close("loss", f"step {step}", loss, plain_loss, context.tolerance * factor)
        for name, gradient in alone.gradients().items():
            findings.close(
                "gradient", name, model.get_param_grad(name), gradient, context.tolerance * factor * 10
            )
        norm = torch.nn.utils.clip_grad_norm_(alone.model.parameters(), 0.05)
        findings.close(
            "norm",
            f"step {step}",
            torch.tensor(model._calc_grad_norm(), dtype=norm.dtype),
            norm,
            context.tolerance * factor,
        )
        findings.close(
            "norm",
            f"clipped {step}",
            model.clip_grad_norm(0.05).to(norm.dtype),
            norm,
            context.tolerance * factor,
        )
        optimizer.step()
        expected.step()
    for name, parameter in alone.model.named_parameters(remove_duplicate=False):
        findings.close(
            "parameter", name, model.get_param(name), parameter, context.tolerance * LATER_STEPS_FACTOR
        )
    _states(context, model, alone.model)
    compare_optimizer(
        context, optimizer.state_dict(from_global=True), expected.state_dict(), "after training"
    )
    here = [name for name, _ in model.named_parameters()]
    findings.that(
        [name for name, _ in model.named_parameters(from_global=True)] == names, "names of all parameters"
    )
    findings.that(len(list(model.parameters())) == len(here), "parameters() and named_parameters() differ")
    findings.raises("an unknown name", ("UserInputError",), lambda: pyrannc.get_param(model, "ghost"))
    return {"owned": here, "names": names}


def _states(context: Context, model: pyrannc.RaNNCModule, plain: nn.Module) -> None:
    findings = context.findings
    for arguments in (
        {},
        {"no_hook": True},
        {"rank0_only": False},
        {"no_hook": True, "rank0_only": False},
        {"sync_all_ranks": True},
    ):
        state = model.state_dict(**arguments)
        everywhere = "rank0_only" in arguments or "sync_all_ranks" in arguments
        if context.rank == 0 or everywhere:
            context.compare_state(state, dict(plain.state_dict()), factor=LATER_STEPS_FACTOR)
        else:
            findings.that(not state, f"state_dict({arguments}) gives this rank {list(state)}")
        if arguments == {}:
            fresh = context.model()
            if context.rank == 0:
                fresh.load_state_dict(copy.deepcopy(state))


def optimizer_state_goes_round(context: Context) -> None:
    """Whole optimizer state loaded into a new job's optimizer, before its first call and after, given by all
    ranks or by rank 0 only.
    """
    kind = context.case.parameters["optimizer"]
    alone = Alone(context)
    expected = make_optimizer(kind, alone.model)
    first = context.model()
    optimizer = make_optimizer(kind, first)
    model = wrap(context, first, optimizer)
    for step in range(2):
        _step(context, model, optimizer, alone, expected, step)
    for group in (*optimizer.param_groups, *expected.param_groups):
        group["lr"] *= 0.5
    whole = optimizer.state_dict(from_global=True)
    weights = model.state_dict(rank0_only=False)
    compare_optimizer(context, whole, expected.state_dict(), "saved")
    shared = Path(context.directory) / f"{context.case.name}.pt"
    if context.rank == 0:
        torch.save(whole, shared)
    pyrannc.barrier()
    given_by_all = torch.load(shared)
    for moment, giver in context.case.parameters["loads"]:
        state = given_by_all if giver == "all ranks" else whole
        what = f"loaded {moment} the first call by {giver}"
        again = context.model()
        fresh = make_optimizer(kind, again)
        loaded = wrap(context, again, fresh)
        loaded.load_state_dict(copy.deepcopy(weights))
        if moment == "after":
            loss_of(context, loaded, 7).backward()
            fresh.zero_grad()
        fresh.load_state_dict(copy.deepcopy(state), from_global=True)
        if moment == "before":
            loss_of(context, loaded, 7).backward()
            fresh.zero_grad()
        compare_optimizer(context, fresh.state_dict(from_global=True), expected.state_dict(), what)
        twin = Alone(context)
        twin.model.load_state_dict(alone.model.state_dict())
        twin_optimizer = make_optimizer(kind, twin.model)
        # The twin's own state: a loaded state_dict is not copied.
        twin_optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
        _step(context, loaded, fresh, twin, twin_optimizer, 3)
        for name, value in twin.model.named_parameters():
            context.findings.close(
                "parameter", f"{name}, {what}", loaded.get_param(name), value, context.tolerance * 1e3
            )
        held = {id(p) for p in fresh.state if num_elements(fresh.state[p])}
        context.findings.that(
            held <= {id(p) for p in loaded.parameters()}, f"{what}: state of other ranks' parameters is kept"
        )
    context.findings.that(
        type(optimizer).state_dict is torch.optim.Optimizer.state_dict, "the optimizer's class was changed"
    )


def _step(
    context: Context,
    model: Any,
    optimizer: torch.optim.Optimizer,
    alone: Alone,
    expected: torch.optim.Optimizer,
    step: int,
) -> None:
    optimizer.zero_grad()
    expected.zero_grad()
    loss_of(context, model, step).backward()
    alone.backward(context.batch(step))
    optimizer.step()
    expected.step()


def gradients_are_delayed(context: Context) -> None:
    """delay_grad_allreduce: however steps with and without it follow each other, the sum is that of one
    process on all their batches.
    """
    findings = context.findings
    given, alone = context.model(), Alone(context)
    optimizer = make_optimizer("adam", given)
    model = wrap(context, given, optimizer)
    world = context.case.world
    # A letter is a step: d delayed, n not; w: its forward delayed and its backward not, v the other way
    # round. r is allreduce_grads.
    for pattern in ("ddn", "nddr", "dwn", "dvr", "vdn", "n", "drdr"):
        optimizer.zero_grad()
        alone.model.zero_grad()
        for number, letter in enumerate(pattern):
            if letter == "r":
                findings.that(pyrannc.allreduce_grads(model) is False, f"{pattern}: gradients are not finite")
                continue
            pyrannc.delay_grad_allreduce(letter in "dw")
            loss = loss_of(context, model, number)
            pyrannc.delay_grad_allreduce(letter in "dv")
            loss.backward()
            alone.backward(context.batch(number))
            if letter == "d" and world > 1:
                raised = findings.raises("a step in between", ("UserInputError",), optimizer.step)
                findings.that("delay_grad_allreduce" in str(raised), f"{raised}")
        for name, gradient in alone.gradients().items():
            found = model.get_param_grad(name)
            findings.close("gradient", f"{name} after {pattern}", found, gradient, context.tolerance * 10)
        context.compare_gradients(given, alone.gradients(), kind=f"own gradient after {pattern}", factor=10)
        norm = torch.nn.utils.clip_grad_norm_(alone.model.parameters(), 1e9)
        findings.close(
            "norm", pattern, model.clip_grad_norm(1e9).to(norm.dtype), norm, context.tolerance * 10
        )
    pyrannc.clear()


def surface(context: Context) -> dict[str, Any]:
    """keep_graph, undeploy and planning anew with optimizer state, recreated communicators, modes, to and
    cuda, refusals, helpers.
    """
    findings, case = context.findings, context.case
    given, alone = context.model(), Alone(context)
    optimizer, expected = make_optimizer("adam", given), make_optimizer("adam", alone.model)
    model = wrap(context, given, optimizer)
    _step(context, model, optimizer, alone, expected, 0)

    pyrannc.keep_graph(True)
    optimizer.zero_grad()
    alone.model.zero_grad()
    outputs = context.entry.call(model, context.local(context.batch(1)))
    outputs.backward(torch.ones_like(outputs))
    outputs.backward(torch.ones_like(outputs))
    pyrannc.keep_graph(False)
    (context.entry.call(alone.model, context.batch(1)).sum() * 2 / case.world).backward()
    context.compare_gradients(given, alone.gradients(), kind="gradient of two backwards", factor=10)
    second = context.entry.call(model, context.local(context.batch(1))).sum()
    second.backward()
    findings.raises("a second backward without keep_graph", ("RuntimeError",), second.backward)

    plan = context.directory / f"{case.name}.json"
    model.save_deployment(plan)
    pyrannc.barrier()
    findings.that(plan.exists() and model.ready, "no deployment was saved")
    model.undeploy()
    findings.that(not model.ready, "it is ready after undeploy")
    findings.that(all(p.grad is None for p in given.parameters()), "gradients are kept after undeploy")
    compare_optimizer(
        context, optimizer.state_dict(from_global=True), expected.state_dict(), "after undeploy"
    )
    before = [name for name, _ in model.named_parameters()]
    if case.num_stages == 2:
        # Other owners: parameters and their optimizer state change places.
        swapped = context.directory / f"{case.name}-swapped.json"
        if context.rank == 0:
            swapped.write_text(_swapped(plan.read_text()))
        pyrannc.barrier()
        model.load_deployment(swapped)
    for step in (2, 3):
        _step(context, model, optimizer, alone, expected, step)
    after = [name for name, _ in model.named_parameters()]
    findings.that((before != after) == (case.num_stages == 2), f"parameters here: {before}, then {after}")
    findings.raises("a deployment now", ("UserInputError",), lambda: model.load_deployment(plan))
    compare_optimizer(context, optimizer.state_dict(from_global=True), expected.state_dict(), "planned anew")
    context.compare_gradients(
        given, alone.gradients(), kind="gradient when planned anew", factor=LATER_STEPS_FACTOR
    )

    pyrannc.recreate_all_communicators()
    _step(context, model, optimizer, alone, expected, 4)
    context.compare_gradients(
        given, alone.gradients(), kind="gradient over new communicators", factor=LATER_STEPS_FACTOR
    )
    with torch.no_grad():
        model.eval()
        batch = context.batch(5)
        rows = context.entry.rows_of(context.entry.call(model, context.local(batch)))
        alone.model.eval()
        findings.that(not given.training and not model.training, "eval() did not reach the model")
        for name, value in context.entry.rows_of(context.entry.call(alone.model, batch)).items():
            start, stop = context.interval
            findings.close("rows", f"{name} in eval", rows[name], value[start:stop], context.tolerance * 1e3)
        findings.that(model.train() is model and given.training, "train() did not reach the model")
        alone.model.train()
    findings.that(model.to("cpu") is model and model.cuda() is model, "to and cuda give something else")
    findings.raises("another dtype now", ("UserInputError",), lambda: model.to(torch.float32))
    apex = findings.raises(
        "Apex", ("UserInputError",), lambda: wrap(context, context.model(), enable_apex_amp=True)
    )
    findings.that("autocast" in str(apex), f"the Apex error says {apex}")
    _helpers(context)
    return {"before": before, "after": after}


def _helpers(context: Context) -> None:
    findings, world, rank = context.findings, context.case.world, context.rank
    own = torch.tensor([rank, -rank], dtype=torch.int32)
    rows = [[other, -other] for other in range(world)]
    findings.that(pyrannc.all_gather(own).tolist() == rows, "all_gather")
    findings.that(
        pyrannc.tensor_coll._allreduce_min(own.clone()).tolist() == [0, 1 - world], "_allreduce_min"
    )
    findings.that(
        pyrannc.tensor_coll._allreduce_sum(own.clone()).tolist() == [sum(range(world)), -sum(range(world))],
        "_allreduce_sum",
    )
    findings.that(pyrannc.tensor_coll.bcast(own, world - 1).tolist() == [world - 1, 1 - world], "bcast")
    whole = torch.arange(15.0).reshape(3, 5)
    whole[0, 0] = float("nan")
    parameter = nn.Parameter(whole.clone())
    pid = pyrannc.store_dist_param(parameter)
    piece = pyrannc.get_dist_param_range(pid)
    findings.that(
        parameter.numel() == piece.stop - piece.start < 15 or world == 1, "each rank keeps its part"
    )
    findings.that(
        torch.equal(pyrannc.load_dist_param(pid).nan_to_num(-1), whole.nan_to_num(-1)), "load_dist_param"
    )
    pyrannc.set_dist_param(pid, whole * 2)
    pyrannc.set_dist_param_dtype(pid, torch.float64)
    pyrannc.remove_dist_param(pid)
    findings.that(
        torch.equal(parameter.detach().nan_to_num(-1), (whole * 2).double().nan_to_num(-1)),
        "a stored parameter came back",
    )


def _swapped(text: str) -> str:
    plan = json.loads(text)
    first, second = plan["stages"]
    first["ranks"], second["ranks"] = second["ranks"], first["ranks"]
    return json.dumps(plan)


def recorded_models_fill_by_stage(context: Context) -> dict[str, Any]:
    """A model built under DistributeModelParams, and one on meta: values as in one process, made on their
    owners only.
    """
    findings, case = context.findings, context.case
    results: dict[str, Any] = {}
    for kind in case.parameters["kinds"]:
        given = _without_memory(context, kind)
        total = sum(p.numel() * p.element_size() for p in given.parameters())
        optimizer = make_optimizer("adam", given)
        model = wrap(context, given, optimizer)
        here = sum(p.untyped_storage().nbytes() for p in given.parameters())
        findings.that(
            here <= 8 * len(list(given.parameters())),
            f"{kind}: {here} of {total} bytes before the first call",
        )
        findings.raises(f"{kind}: state_dict before there is one", ("UserInputError",), model.state_dict)
        if kind == "loaded":
            weights = dict(context.model().state_dict())
            model.load_state_dict(weights)
        loss = loss_of(context, model)
        held = sum(
            p.untyped_storage().nbytes() for p in given.parameters() if p.untyped_storage().nbytes() > 8
        )
        owned = sum(p.numel() * p.element_size() for p in model.parameters())
        findings.that(
            held == owned <= total, f"{kind}: this rank holds {held} bytes, and {owned} are of its stage"
        )
        results[f"{kind} bytes"] = held
        state = model.state_dict(rank0_only=False)
        # Now: in one process the state is the parameters themselves, which a step changes.
        results[kind] = {name: float(value.double().sum()) for name, value in state.items()}
        results["total bytes"] = total
        plain = Alone(context)
        plain.model.load_state_dict(state)
        findings.close("loss", kind, loss, plain.loss(context.batch())[1], context.tolerance)
        loss.backward()
        plain.backward(context.batch())
        context.compare_gradients(given, plain.gradients(), kind=f"gradient of the {kind} model")
        optimizer.step()
        findings.that(
            all(bool(torch.isfinite(value).all()) for value in state.values()),
            f"{kind}: values that nobody made",
        )
        if kind == "loaded":
            findings.that(
                all(torch.equal(state[name], value) for name, value in weights.items()),
                "loaded values are others",
            )
    return results


def _without_memory(context: Context, kind: str) -> nn.Module:
    torch.manual_seed(11)
    if kind == "recorded":
        with pyrannc.DistributeModelParams():
            return context.entry.build(context.dtype)
    with torch.device("meta"):
        return context.entry.build(context.dtype)
