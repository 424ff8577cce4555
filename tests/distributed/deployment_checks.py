"""Checks of saved, loaded, hand-edited and measured deployments.

In: a context. Out: findings, and results for the parent. Every function is collective: all ranks make the
same calls in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rannc_backend
from rannc_backend.errors import PlanError, UserInputError
from rannc_backend.planner import plan_on_ranks as planning_ranks
from rannc_backend.planner.plan_model import plan_analysis
from rannc_backend.report.run_report import RunReport
from rannc_backend.runtime.trace.meter import NUM_WARM_UP_STEPS
from tests.distributed.harness.context import LATER_STEPS_FACTOR, Context
from tests.distributed.harness.reference import make_optimizer

Json = dict[str, Any]


def _step(context: Context, model: nn.Module, compiled: Callable[..., Any], step: int = 0) -> float:
    batch = context.local(context.batch(step))
    loss = context.entry.loss_of(context.entry.call(compiled, batch), batch)
    loss.backward()
    return float(loss.detach())


def _trains_exactly(context: Context, path: Path, kind: str) -> Json:
    """One step under the deployment in a file; the deployment that was run."""
    model = context.model()
    compiled = context.compile(model, load_deployment=True, deployment_file=str(path))
    _step(context, model, compiled)
    owned = context.compare_gradients(model, context.reference().steps[0].gradients, kind=f"{kind} gradient")
    copy = context.directory / f"{context.case.name}-{kind}-again.json"
    rannc_backend.save_deployment(compiled, copy)
    rannc_backend.barrier()
    ran: Json = json.loads(copy.read_text())
    parameters = next((s["parameters"] for s in ran["stages"] if context.rank in s["ranks"]), [])
    context.findings.that(
        set(owned) <= set(parameters), f"{kind}: gradients of {owned}, and the stage has {parameters}"
    )
    return ran


def saved_and_loaded(context: Context) -> dict[str, Any]:
    """A plan is saved; a later model loads it, as it is and edited by hand, and trains as one process
    does.
    """
    case, rank = context.case, context.rank
    path = context.directory / f"{case.name}.json"
    model = context.model()
    if rank == 0:
        try:
            rannc_backend.save_deployment(model, path)
            context.findings.that(False, "a model was saved before its first call")
        except UserInputError:
            pass
    _step(
        context,
        model,
        context.compile(model, **case.parameters["save"], save_deployment=True, deployment_file=str(path)),
    )
    rannc_backend.barrier()
    plan = rannc_backend.load_deployment(path)
    saved = json.loads(path.read_text())
    context.findings.that(
        _trains_exactly(context, path, "loaded") == saved, "the loaded deployment is another one"
    )
    for kind, edit in EDITS.items():
        edited = json.loads(path.read_text())
        edit(edited)
        context.findings.that(edited != saved, f"{kind} changes nothing")
        other = context.directory / f"{case.name}-{kind}.json"
        if rank == 0:
            other.write_text(json.dumps(edited))
        rannc_backend.barrier()
        ran = _trains_exactly(context, other, kind)
        context.findings.that(
            ran["stages"] == edited["stages"], f"{kind}: the stages that ran are not those of the file"
        )
    return {"stages": plan.num_stages}


def planned_once(context: Context) -> dict[str, Any]:
    """The second of two equal models has the first one's plan, and trains alike; another one without the
    cache, too.
    """
    case = context.case
    folder = context.directory / f"{case.name}-cache"
    losses, plans, searches = [], [], []

    def counted(*arguments: Any, **named: Any) -> Any:
        searches.append(len(plans))
        return plan_analysis(*arguments, **named)

    planning_ranks.plan_analysis = counted  # type: ignore[attr-defined]
    for options in ({}, {}, {"plan_cache": False}):
        model = context.model()
        path = context.directory / f"{case.name}-{len(plans)}.json"
        compiled = context.compile(
            model,
            **case.parameters["save"],
            save_deployment=True,
            deployment_file=str(path),
            cache_dir=str(folder),
            **options,
        )
        losses.append(_step(context, model, compiled))
        rannc_backend.barrier()
        plans.append(path.read_text())
    context.findings.that(len(set(losses)) == 1, f"the losses are {losses}")
    context.findings.that(
        searches == ([0, 2] if context.rank == 0 else []), f"searches of rank {context.rank}: {searches}"
    )
    context.findings.that(plans[0] == plans[1] == plans[2], "the plan that was kept is another one")
    kept = sorted((folder / "plans").iterdir())
    context.findings.that([path.read_text() for path in kept] == [plans[0]], f"{len(kept)} plans are kept")
    return {}


def _move_a_block(data: Json) -> None:
    """The last block of the first stage, mostly one node, becomes the first of the next."""
    first, second = data["stages"][:2]
    second["blocks"].insert(0, first["blocks"].pop())
    for stage in (first, second):
        own = [data["blocks"][index] for index in stage["blocks"]]
        stage["nodes"] = [name for block in own for name in block["nodes"]]
        stage["parameters"] = sorted({name for block in own for name in block["parameters"]})


def _other_replicas(data: Json) -> None:
    """Ranks turned around: the last stage gets what the first one had."""
    ranks = [stage["ranks"] for stage in data["stages"]]
    for stage, chosen in zip(data["stages"], reversed(ranks), strict=True):
        stage["ranks"] = chosen


def _other_settings(data: Json) -> None:
    data["schedule"] = "fill_drain"
    data["num_micro_batches"] = 3
    for stage in data["stages"]:
        stage["recompute"] = 0.5


EDITS: dict[str, Callable[[Json], None]] = {
    "block": _move_a_block,
    "replicas": _other_replicas,
    "settings": _other_settings,
}


def refused_deployments(context: Context) -> dict[str, Any]:
    """Files that are no plan for this run end in a PlanError on every rank, and the job goes on."""
    case = context.case
    path = context.directory / f"{case.name}.json"
    model = context.model()
    _step(
        context,
        model,
        context.compile(model, **case.parameters["save"], save_deployment=True, deployment_file=str(path)),
    )
    rannc_backend.barrier()
    good = path.read_text()
    texts = {
        "bad JSON": good[:-10],
        "another graph": good.replace('"fingerprint": "', '"fingerprint": "0'),
        "another world": json.dumps(json.loads(good) | {"world_size": 7}),
        "unknown node": good.replace(json.loads(good)["stages"][0]["nodes"][0], "ghost"),
        "code": "__import__('os').abort()",
    }
    told: dict[str, str] = {}
    for kind, text in texts.items():
        bad = context.directory / f"{case.name}-bad.json"
        rannc_backend.barrier()
        if context.rank == 0:
            bad.write_text(text)
        rannc_backend.barrier()
        told[kind] = _refusal(context, str(bad))
    told["no file"] = _refusal(context, str(context.directory / "nowhere.json"))
    told["options"] = _refusal(context, str(path), partition_num=5)
    return told


def _refusal(context: Context, path: str, **options: Any) -> str:
    torch._dynamo.reset()
    model = context.model()
    try:
        _step(context, model, context.compile(model, load_deployment=True, deployment_file=path, **options))
    except PlanError as error:
        return str(error)
    context.findings.that(False, f"{path} was taken")
    return ""


def measured_steps(context: Context) -> dict[str, Any]:
    """Measuring changes nothing, counts training steps only, and rank 0 writes what was measured."""
    case, entry = context.case, context.entry
    path = context.directory / f"{case.name}-run.json"
    model = context.model()
    compiled = context.compile(model, run_file=str(path), report_steps=2)
    optimizer = make_optimizer(entry, model)
    written = []
    for number, expected in enumerate(context.reference().steps):
        optimizer.zero_grad()
        batch = context.local(context.batch(number))
        with torch.no_grad():
            entry.call(compiled, batch)
        _step(context, model, compiled, number)
        rannc_backend.barrier()
        written.append(path.exists())
        factor = 1.0 if number == 0 else LATER_STEPS_FACTOR
        context.compare_gradients(model, expected.gradients, factor=factor)
        optimizer.step()
    context.findings.that(NUM_WARM_UP_STEPS + 3 <= case.num_steps - 1, "too few steps")
    last = NUM_WARM_UP_STEPS + 3  # the memory step and two timed ones
    early = [number for number, there in enumerate(written, start=1) if there and number < last]
    context.findings.that(not early and written[-1], f"the run file was there after steps {written}")
    report = RunReport.from_json(path.read_text())
    return report.model_dump(mode="json")
