"""What a training script may call beside torch's own API.

In: the user's model, compiled or not, or its parameters. Out: results that take all ranks into account.
Functions that are collective say
so: all ranks must call them. RaNNC's functions have RaNNC's names; docs/rannc_parity.md says where they
differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from torch import nn

from rannc_backend.api.whole_optimizer_state import GlobalState, globals_of
from rannc_backend.errors import GatheringError, UserInputError
from rannc_backend.ir.plan import Plan
from rannc_backend.ir.plan_file import read_plan, write_text
from rannc_backend.report.tables import plan_report
from rannc_backend.runtime.absent_tensors import is_absent
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.gradients.clipping import clip_gradients
from rannc_backend.runtime.gradients.sparse_rows import numbers_of
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.torch_internals import root_of
from rannc_backend.session_registry import REGISTRY


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clips gradients by their norm over all stages, as `torch.nn.utils.clip_grad_norm_`. Collective.

    The norm is the same on every rank; tied parameters count once.

    Args:
        parameters: The model (compiled or not), or parameters of it.
        max_norm: Largest norm that is left unchanged.
        norm_type: Order of the norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: Raise if the norm is not finite, instead of scaling by it.

    Returns:
        The norm before clipping, a 0-dim tensor.

    Raises:
        UserInputError: The norm is not finite and ``error_if_nonfinite`` is set, or the all-reduce of
            gradients is still deferred.
    """
    if isinstance(parameters, nn.Module):
        parameters = root_of(parameters).parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    return clip_gradients(parameters, REGISTRY.tables(), max_norm, norm_type, error_if_nonfinite)


def calc_grad_norm(model: nn.Module) -> float:
    """The norm (L2) of all gradients of all ranks. Collective."""
    return float(clip_grad_norm_(model, float("inf")))


def is_held(tensor: torch.Tensor) -> bool:
    """Whether this rank has the value of a parameter or buffer. Not collective.

    Reading, writing or copying a tensor that is not held is an error.

    Args:
        tensor: A parameter or buffer of a model, planned or not.

    Returns:
        False if the value is on other ranks, or not materialized yet.
    """
    return not is_absent(tensor)


def allreduce_grads(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, prescale: float = 1.0
) -> bool:
    """Sums the gradients that `delay_grad_allreduce` left on each rank. Collective.

    Args:
        model: A compiled model that has been called.
        optimizer: Ignored; older versions of RaNNC had it.
        prescale: Factor by which the gradients are multiplied.

    Returns:
        Whether any gradient on any rank is infinite or NaN. RaNNC's scripts skip such a step.

    Raises:
        UserInputError: The model has not been called yet.
    """
    session = REGISTRY.of(model)
    if session is None or session.table is None:
        raise UserInputError(
            "the model has no gradients yet", cure="call the compiled model before allreduce_grads."
        )
    agree(session.world, "allreduce_grads", prescale)
    session.reduce_gradients()
    grads = [
        parameter.grad for parameter in session.table.module().parameters() if parameter.grad is not None
    ]
    with torch.no_grad():
        for grad in grads if prescale != 1.0 else ():
            grad.mul_(prescale)
        broken = any(not bool(torch.isfinite(numbers_of(grad)).all()) for grad in grads)
    return any(agree(session.world, "allreduce_grads, whether all are finite", broken))


def delay_grad_allreduce(delay: bool) -> None:
    """Defers the all-reduce of gradients while True; call it alike on all ranks.

    Deferring ends with a step after ``delay_grad_allreduce(False)``, or with `allreduce_grads`; the sum is
    then that over all steps since. Until then ``p.grad`` is the gradient of this rank's rows alone.

    Args:
        delay: Whether the following steps defer it. Applies to all models of the process.
    """
    REGISTRY.switches.delay_reductions = bool(delay)


def keep_graph(keep: bool) -> None:
    """Keeps what a second backward through the same forward needs, as ``retain_graph=True`` does.

    Args:
        keep: Whether every following backward keeps it. Applies to all models of the process.
    """
    REGISTRY.switches.keep_graph = bool(keep)


def sync_params_on_init(sync: bool) -> None:
    """Whether owners take rank 0's parameters before the first step; False if all ranks have the same
    already.

    Args:
        sync: Applies to models that have not been called yet. The option ``sync_params_on_init`` takes
            precedence where it is set.
    """
    REGISTRY.switches.sync_params = bool(sync)


def get_param(model: nn.Module, name: str) -> torch.Tensor:
    """A whole parameter or buffer by name. Collective once the model is planned.

    Args:
        model: The model, compiled or not.
        name: A name of ``model.named_parameters()`` or ``model.named_buffers()``, or an alias of a tied one.

    Returns:
        A copy on the CPU of every rank, in the parameter's own shape and dtype.

    Raises:
        UserInputError: The model has no such parameter, or its values are not materialized yet.
    """
    table, name = _table_of(model), _primary_name(model, name)
    if table is None:
        root = root_of(model)
        tensor = dict([*root.named_parameters(), *root.named_buffers()])[name]
        if REGISTRY.deferred_values.of(tensor) is not None:
            raise no_value_yet()
        return tensor.detach().cpu().clone()
    return table.gather(name)


def get_param_grad(model: nn.Module, name: str) -> torch.Tensor | None:
    """The whole gradient of a parameter. Collective once the model is planned.

    Args:
        model: The model, compiled or not.
        name: A name of ``model.named_parameters()``, or an alias of a tied one.

    Returns:
        A copy on the CPU of every rank, in the parameter's shape; None if there is no gradient.

    Raises:
        UserInputError: The model has no such parameter, or the all-reduce of gradients is still deferred.
    """
    table, name = _table_of(model), _primary_name(model, name)
    if table is None:
        grad = dict(root_of(model).named_parameters())[name].grad
        return None if grad is None else grad.detach().to_dense().cpu().clone()
    return table.gather_gradient(name)


def full_state_dict(
    model: nn.Module, *args: Any, no_hook: bool = False, on_all_ranks: bool = False, **kwargs: Any
) -> dict[str, Any]:
    """`model.state_dict` on the CPU of rank 0 ({} elsewhere) or of all ranks; whole before the first call,
    too. Collective once planned.

    Args:
        no_hook: leave out the state_dict hooks of the model and of its modules.
        args, kwargs: as of nn.Module.state_dict.
    """
    root, table = root_of(model), _table_of(model)
    if REGISTRY.deferred_values.any_in(root):
        raise no_value_yet()
    if no_hook:
        names = _state_names(root, str(kwargs.get("prefix", "")))
        if table is not None:
            return table.full_state(names, on_all_ranks=on_all_ranks)
        return {name: tensor.detach() for name, tensor in names}
    if table is None:
        return root.state_dict(*args, **kwargs)
    with table.giving_states(on_all_ranks=on_all_ranks):
        state = root.state_dict(*args, **kwargs)
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            state[key] = value.cpu()
    return state


def save_deployment(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the plan of a model as JSON: rank 0 writes, other ranks do nothing.

    Args:
        model: The model, compiled or not, after a call of the compiled model.
        path: The file to write.

    Raises:
        UserInputError: No call of the compiled model has been planned yet, or the file cannot be written.
    """
    plan = REGISTRY.plan_of(model)
    if plan is None:
        raise UserInputError(
            "the model has no deployment yet", cure="call the compiled model once before save_deployment."
        )
    if bootstrap.start().rank == 0:
        write_text(path, plan.to_json(), what="plan")


def load_deployment(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan from a file, for inspection. Not collective.

    To run a model under it, compile with ``options={"load_deployment": True, "deployment_file": path}``.

    Args:
        path: A file that `save_deployment`, a run or ``rannc plan`` wrote.

    Returns:
        The plan.

    Raises:
        PlanError: The file cannot be read, or is not a consistent plan.
    """
    return read_plan(path)


def show_deployment(path: str | os.PathLike[str], batch_size: int = 0) -> None:
    """Prints a saved plan, and how the rows of a batch are divided. Not collective.

    Args:
        path: A file that `save_deployment`, a run or ``rannc plan`` wrote.
        batch_size: Rows of the global batch; 0 for the batch that the plan was made for.

    Raises:
        PlanError: The file cannot be read, or is not a consistent plan.
    """
    plan = read_plan(path)
    console = Console(highlight=False)
    for section in plan_report(plan):
        console.print(section)
    for line in rows_of_plan(plan, batch_size or plan.batch_rows):
        console.print(line, markup=False, soft_wrap=True)


def rows_of_plan(plan: Plan, batch_rows: int) -> list[str]:
    """A line per stage: the rows of each micro-batch, by replica."""
    most = max(len(stage.ranks) for stage in plan.stages)
    num_micro_batches = max(1, min(plan.num_micro_batches, batch_rows // most))
    micro_batches = _even(batch_rows, num_micro_batches)
    lines = [
        f"{batch_rows} rows in {num_micro_batches} micro-batches of {', '.join(map(str, micro_batches))}"
    ]
    for index, stage in enumerate(plan.stages):
        shares = "; ".join("+".join(map(str, _even(rows, len(stage.ranks)))) for rows in micro_batches)
        lines.append(f"stage {index} on ranks {', '.join(map(str, stage.ranks))}: {shares}")
    return lines


def undeploy(model: nn.Module) -> None:
    """Frees what the model's steps need and moves its parameters off the device. Collective.

    The next call plans again. Parameters, their owners and optimizer state stay; gradients are dropped.

    Args:
        model: The model, compiled or not. One that has not been called is left as it is.
    """
    session = REGISTRY.of(model)
    _refuse_gathered("undeploy")
    if session is not None:
        agree(session.world, "undeploy")
        session.undeploy()


def clear() -> None:
    """Undeploys all models of this process and resets switches such as `delay_grad_allreduce`. Collective."""
    _refuse_gathered("clear")
    for session in list(REGISTRY.sessions.values()):
        session.undeploy()
    REGISTRY.reset_switches()


def patch_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer ``state_dict(from_global=True)`` and ``load_state_dict(state, from_global=True)``.

    Only this object changes; `RaNNCModule` calls it for its optimizer. With ``from_global``, ``state_dict``
    is collective and returns what one process would have (on the CPU, parameters in their original order) on
    rank 0, and None on the others. ``load_state_dict`` takes that on every rank, or None on ranks other than
    0, before or after the first call of the model, and keeps this rank's part. Without ``from_global`` both
    are torch's own. State of parameters that other ranks own is dropped when the model is planned.

    Args:
        model: The model, compiled or not.
        optimizer: An optimizer over the model's parameters.
    """
    root = root_of(model)
    if globals_of(optimizer, REGISTRY) is None:
        GlobalState.attach(root, optimizer, REGISTRY)


def get_rank() -> int:
    """This process's rank, from 0. Collective at the first call in a process, which joins the job."""
    return bootstrap.start().rank


def get_world_size() -> int:
    """Number of ranks. Collective at the first call in a process, which joins the job."""
    return bootstrap.start().size


def barrier() -> None:
    """Waits until every rank has called it. Collective."""
    world = bootstrap.start()
    world.monitor.begin_call()
    world.control.barrier(what="rannc_backend.barrier")


def recreate_all_communicators() -> None:
    """Recreates the process groups for tensors, provided that no link has failed. Collective.

    A failed link ends the job.
    """
    world = bootstrap.start()
    agree(world, "recreate_all_communicators")
    world.transport.recreate()


def _table_of(model: nn.Module) -> ParameterTable | None:
    session = REGISTRY.of(model)
    return None if session is None else session.table


def _primary_name(model: nn.Module, name: str) -> str:
    root = root_of(model)
    by_name: dict[str, torch.Tensor] = dict(root.named_parameters(remove_duplicate=False))
    by_name |= dict(root.named_buffers(remove_duplicate=False))
    if name not in by_name:
        raise UserInputError(
            f"the model has no parameter {name!r}", cure="give a name of model.named_parameters()."
        )
    wanted = by_name[name]
    return next(key for key, tensor in by_name.items() if tensor is wanted)


def _state_names(root: nn.Module, prefix: str) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of a state_dict, in its order."""
    names = []
    for path, module in root.named_modules(prefix=prefix.rstrip("."), remove_duplicate=False):
        start = f"{path}." if path else ""
        names += [(start + name, tensor) for name, tensor in module._parameters.items() if tensor is not None]
        kept = module._buffers.items()
        names += [
            (start + name, t)
            for name, t in kept
            if t is not None and name not in module._non_persistent_buffers_set
        ]
    return names


def _refuse_gathered(what: str) -> None:
    if REGISTRY.gathered:
        raise GatheringError(
            f"{what} inside rannc_backend.gathered", cure=f"call {what} before or after its block."
        )


def no_value_yet() -> UserInputError:
    return UserInputError(
        "parameters of the model have no value yet: each rank makes those of its stages at the first call",
        cure="call the model once before asking for its parameters.",
    )


def _even(total: int, num_parts: int) -> list[int]:
    return [total // num_parts + (part < total % num_parts) for part in range(num_parts)]
