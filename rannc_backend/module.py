"""What a training script may call beside torch's own API.

In: the user's model, compiled or not, or its parameters. Out: results that take all ranks into account. Functions that are collective say
so: all ranks must call them. RaNNC's functions have RaNNC's names; docs/rannc_parity.md says where they differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from torch import nn

from rannc_backend.backend import REGISTRY
from rannc_backend.deployment_file import read_plan, write_text
from rannc_backend.errors import UserInputError
from rannc_backend.ir.plan import Plan
from rannc_backend.optimizer_state import GlobalState, globals_of
from rannc_backend.report.tables import plan_report
from rannc_backend.runtime import bootstrap
from rannc_backend.runtime.absent_tensors import is_absent
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.clipping import clip_gradients
from rannc_backend.runtime.parameters import ParameterTable


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` over all stages: collective, the same norm on every rank, tied parameters counted once.

    Args:
        parameters: the model (compiled or not), or parameters of it.
        max_norm: largest norm that is left as it is.
        norm_type: order of the norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: raise instead of scaling by something that is not finite.

    Returns:
        The norm before clipping, a 0-dim tensor.

    Raises:
        UserInputError: the norm is not finite and ``error_if_nonfinite`` is set, or the all-reduce of gradients is still owed.
    """
    if isinstance(parameters, nn.Module):
        parameters = _module_of(parameters).parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    return clip_gradients(parameters, REGISTRY.tables(), max_norm, norm_type, error_if_nonfinite)


def calc_grad_norm(model: nn.Module) -> float:
    """The norm (L2) of all gradients of all ranks. Collective."""
    return float(clip_grad_norm_(model, float("inf")))


def is_held(tensor: torch.Tensor) -> bool:
    """Whether this rank has the value of a parameter or buffer; elsewhere reading, writing and copying it is an error. Not collective."""
    return not is_absent(tensor)


def allreduce_grads(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, prescale: float = 1.0) -> bool:
    """Sum the gradients that `delay_grad_allreduce` left on each rank. Collective.

    Args:
        optimizer: not needed; older RaNNC had it.
        prescale: what the gradients are multiplied by.

    Returns:
        Whether some gradient of some rank is infinite or NaN: a step that RaNNC's scripts skip.
    """
    session = REGISTRY.of(model)
    if session is None or session.table is None:
        raise UserInputError("the model has no gradients yet", cure="call the compiled model before allreduce_grads.")
    agree(session.world, "allreduce_grads", prescale)
    session.reduce_gradients()
    grads = [parameter.grad for parameter in session.table.module().parameters() if parameter.grad is not None]
    with torch.no_grad():
        for grad in grads if prescale != 1.0 else ():
            grad.mul_(prescale)
        broken = any(not bool(torch.isfinite(grad).all()) for grad in grads)
    return any(agree(session.world, "allreduce_grads, whether all are finite", broken))


def delay_grad_allreduce(delay: bool) -> None:
    """While True, gradients stay each rank's own: until a step without it, or `allreduce_grads`. Set it alike on all ranks.

    The sum over all steps since is then that of the steps on their own. Meanwhile ``p.grad`` is what this rank's rows gave.
    """
    REGISTRY.switches.delay_reductions = bool(delay)


def keep_graph(keep: bool) -> None:
    """While True, every backward through a model keeps what another backward through the same forward needs, as retain_graph does."""
    REGISTRY.switches.keep_graph = bool(keep)


def sync_params_on_init(sync: bool) -> None:
    """False: do not give rank 0's parameters to all owners before the first step, because all ranks have the same ones already.

    For models that have not been called yet. The option of the same name wins where it is given.
    """
    REGISTRY.switches.sync_params = bool(sync)


def get_param(model: nn.Module, name: str) -> torch.Tensor:
    """A whole parameter or buffer by name, on the CPU of every rank. Collective once the model is planned."""
    table, name = _table_of(model), _primary_name(model, name)
    if table is None:
        root = _module_of(model)
        tensor = dict([*root.named_parameters(), *root.named_buffers()])[name]
        if REGISTRY.promises.of(tensor) is not None:
            raise _no_value_yet()
        return tensor.detach().cpu().clone()
    return table.gather(name)


def get_param_grad(model: nn.Module, name: str) -> torch.Tensor | None:
    """A parameter's whole gradient, on the CPU of every rank; None where there is none. Collective once the model is planned."""
    table, name = _table_of(model), _primary_name(model, name)
    if table is None:
        grad = dict(_module_of(model).named_parameters())[name].grad
        return None if grad is None else grad.detach().cpu().clone()
    return table.gather_gradient(name)


def full_state_dict(
    model: nn.Module, *args: Any, no_hook: bool = False, on_all_ranks: bool = False, **kwargs: Any
) -> dict[str, Any]:
    """`model.state_dict` on the CPU of rank 0 ({} elsewhere) or of all ranks; whole before the first call, too. Collective once planned.

    Args:
        no_hook: leave out the state_dict hooks of the model and of its modules.
        args, kwargs: as of nn.Module.state_dict.
    """
    root, table = _module_of(model), _table_of(model)
    if REGISTRY.promises.any_in(root):
        raise _no_value_yet()
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
    """Write the plan of a model, compiled or not, as JSON: rank 0 writes, the others do nothing.

    Raises:
        UserInputError: no call of the compiled model has been planned yet, or the file cannot be written.
    """
    plan = REGISTRY.plan_of(model)
    if plan is None:
        raise UserInputError(
            "the model has no deployment yet", cure="call the compiled model once before save_deployment."
        )
    if bootstrap.start().rank == 0:
        write_text(path, plan.to_json(), what="plan")


def load_deployment(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file, to look at. options={"load_deployment": True, "deployment_file": path} runs a model under it.

    Raises:
        PlanError: the file cannot be read, or holds no plan whose parts agree with each other.
    """
    return read_plan(path)


def show_deployment(path: str | os.PathLike[str], batch_size: int = 0) -> None:
    """Print a saved plan, and how the rows of a global batch of ``batch_size`` (0: the batch it was made for) are shared out.

    Raises:
        PlanError: the file cannot be read, or holds no plan whose parts agree with each other.
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
    lines = [f"{batch_rows} rows in {num_micro_batches} micro-batches of {', '.join(map(str, micro_batches))}"]
    for index, stage in enumerate(plan.stages):
        shares = "; ".join("+".join(map(str, _even(rows, len(stage.ranks)))) for rows in micro_batches)
        lines.append(f"stage {index} on ranks {', '.join(map(str, stage.ranks))}: {shares}")
    return lines


def undeploy(model: nn.Module) -> None:
    """Free what the model's steps need, and take its parameters off the device; the next call plans anew. Collective.

    Parameters, their owners and optimizer state stay; gradients are dropped.
    """
    session = REGISTRY.of(model)
    if session is not None:
        agree(session.world, "undeploy")
        session.undeploy()


def clear() -> None:
    """Undeploy all models of this process, and set what `delay_grad_allreduce` and the like have changed back. Collective."""
    for session in list(REGISTRY.sessions.values()):
        session.undeploy()
    REGISTRY.reset_switches()


def patch_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer ``state_dict(from_global=True)`` and ``load_state_dict(state, from_global=True)``; RaNNCModule does it by itself.

    Only this object changes. With ``from_global``: ``state_dict`` is collective and gives rank 0 what one process would have (on the
    CPU, parameters in their original order) and None to the others; ``load_state_dict`` takes that on every rank, or None on others
    than rank 0, and keeps this rank's part, before the first call of the model or after. Without it they are torch's own.
    State of parameters that other ranks own is dropped when the model is planned.
    """
    root = _module_of(model)
    if globals_of(optimizer, REGISTRY) is None:
        GlobalState.attach(root, optimizer, REGISTRY)


def get_rank() -> int:
    """This process's rank. Collective the first time: joins the job."""
    return bootstrap.start().rank


def get_world_size() -> int:
    """Number of ranks. Collective the first time: joins the job."""
    return bootstrap.start().size


def barrier() -> None:
    """Wait until every rank has called it."""
    world = bootstrap.start()
    world.monitor.begin_call()
    world.control.barrier(what="rannc_backend.barrier")


def recreate_all_communicators() -> None:
    """Make the process groups for tensors anew, for instance after an operation of NCCL failed. Collective."""
    world = bootstrap.start()
    agree(world, "recreate_all_communicators")
    world.transport.recreate()


def _module_of(model: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


def _table_of(model: nn.Module) -> ParameterTable | None:
    session = REGISTRY.of(model)
    return None if session is None else session.table


def _primary_name(model: nn.Module, name: str) -> str:
    root = _module_of(model)
    by_name: dict[str, torch.Tensor] = dict(root.named_parameters(remove_duplicate=False))
    by_name |= dict(root.named_buffers(remove_duplicate=False))
    if name not in by_name:
        raise UserInputError(f"the model has no parameter {name!r}", cure="give a name of model.named_parameters().")
    wanted = by_name[name]
    return next(key for key, tensor in by_name.items() if tensor is wanted)


def _state_names(root: nn.Module, prefix: str) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors of a state_dict, in its order."""
    names = []
    for path, module in root.named_modules(prefix=prefix.rstrip("."), remove_duplicate=False):
        start = f"{path}." if path else ""
        names += [(start + name, tensor) for name, tensor in module._parameters.items() if tensor is not None]
        kept = module._buffers.items()
        names += [(start + name, t) for name, t in kept if t is not None and name not in module._non_persistent_buffers_set]
    return names


def _no_value_yet() -> UserInputError:
    return UserInputError(
        "parameters of the model have no value yet: each rank makes those of its stages at the first call",
        cure="call the model once before asking for its parameters.",
    )


def _even(total: int, num_parts: int) -> list[int]:
    return [total // num_parts + (part < total % num_parts) for part in range(num_parts)]
