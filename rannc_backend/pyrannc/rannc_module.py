"""`RaNNCModule`: the model as a script written for RaNNC wraps it. A front of `torch.compile(model,
backend="rannc")`, no second backend.

In: an nn.Module and what RaNNC's constructor takes. Out: an nn.Module that looks like the given one (same
names, same attributes) and computes on all ranks. Its forward is a call of the compiled model; everything
else is the session's work, which a script that uses torch.compile reaches through the functions of
`module.py`. Terms: *planned* is a model from its first call on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rannc_backend.api.functions import (
    allreduce_grads,
    calc_grad_norm,
    clip_grad_norm_,
    full_state_dict,
    get_param,
    get_param_grad,
    patch_optimizer,
    save_deployment,
    undeploy,
)
from rannc_backend.api.materialize import materialize_by_stage, take_values
from rannc_backend.capture.nonstrict.meta_model import convert_values
from rannc_backend.errors import UserInputError
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.parameters import ParameterTable
from rannc_backend.runtime.torch_internals import root_of
from rannc_backend.session_registry import REGISTRY
from rannc_backend.settings.sources import Given, plain_options

logger = logging.getLogger(__name__)

# What the front and its model have in common: registering in one is registering in the other.
_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_AUTOCAST = 'with torch.autocast("cuda", dtype=torch.bfloat16): loss = model(x)'


class RaNNCModule(nn.Module):
    """A model that trains over all ranks, with RaNNC's interface. Collective: all ranks must construct it.

    See docs/rannc_parity.md for what differs from RaNNC.

    Args:
        model: Any module, on this rank's device, on the CPU (where it may be larger than a device), or on
            "meta" (then no rank ever holds all of it, see `materialize_by_stage`).
        optimizer: Gets ``state_dict(from_global=True)`` and ``load_state_dict(state, from_global=True)``.
        gather_inputs: If True, the global batch is the ranks' batches in rank order. If False, it is rank
        0's,
            and all ranks get its outputs.
        load_deployment: Path of a saved plan to run under.
        enable_apex_amp, allreduce_amp_master_params, use_amp_master_params, allreduce_amp_master_param: Apex
        is
            not supported; True is refused.
        enable_zero: The optimizer state of a parameter is on one replica of its stage alone (option zero_stage=1).
        offload_params: Parameters, gradients and optimizer state are on the host (option offload="parameters").
        check_unused_values: Accepted without effect; values that nothing uses are left out.
        options: Further options of ``torch.compile(model, backend="rannc", options=...)``.

    Raises:
        UserInputError: Apex was requested (the text shows the autocast line to write), or ``model`` is not a
            module.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        gather_inputs: bool = True,
        load_deployment: str | os.PathLike[str] | None = None,
        enable_apex_amp: bool = False,
        allreduce_amp_master_params: bool = False,
        enable_zero: bool = False,
        check_unused_values: bool = True,
        offload_params: bool = False,
        *,
        use_amp_master_params: bool = False,
        allreduce_amp_master_param: bool = False,
        options: Given = None,
    ) -> None:
        _refuse_apex(
            enable_apex_amp=enable_apex_amp,
            allreduce_amp_master_params=allreduce_amp_master_params,
            use_amp_master_params=use_amp_master_params,
            allreduce_amp_master_param=allreduce_amp_master_param,
        )
        if not isinstance(model, nn.Module):
            raise UserInputError(f"RaNNCModule was given a {type(model).__name__}", cure="give an nn.Module.")
        super().__init__()
        _backend()  # what happens to the other ranks from here on is noticed
        model = root_of(model)
        self.__dict__["_wrapped"] = model
        for name in _SHARED:
            self.__dict__[name] = model.__dict__[name]
        chosen = dict(plain_options(options))
        if not gather_inputs:
            chosen["gather_inputs"] = False
        if enable_zero:
            chosen.setdefault("zero_stage", 1)
        if offload_params:
            chosen.setdefault("offload", "parameters")
        self.__dict__["_options"] = chosen
        self.__dict__["_compiled"] = None
        if load_deployment is not None:
            self.load_deployment(load_deployment)
        if any(id(parameter) in REGISTRY.stored for parameter in model.parameters()):
            raise UserInputError(
                "parameters of the model were spread over ranks by store_dist_param, so their shapes are "
                "lost",
                cure="build the model under `with rannc_backend.DistributeModelParams():` instead, or call "
                "remove_dist_param on each.",
            )
        world = bootstrap.start()
        if any(parameter.device != world.device for parameter in model.parameters()) and not self.ready:
            materialize_by_stage(model)
        if optimizer is not None:
            patch_optimizer(model, optimizer)

    @property
    def model(self) -> nn.Module:
        """The module that was given."""
        return self.__dict__["_wrapped"]

    @property
    def _orig_mod(self) -> nn.Module:
        # By this name torch.compile's own wrapper shows its module, and the backend looks through it.
        return self.__dict__["_wrapped"]

    @property
    def ready(self) -> bool:
        """Whether the model is planned: True from its first call to `undeploy`."""
        return REGISTRY.plan_of(self.model) is not None

    @property
    def training(self) -> bool:
        """As of the given module."""
        return bool(self.__dict__["_wrapped"].training) if "_wrapped" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "_wrapped" in self.__dict__:
            self.__dict__["_wrapped"].training = mode

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_wrapped")
        if model is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or name in type(self).__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.__dict__["_wrapped"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_wrapped"], name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.model)})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for this rank's batch; see docs/semantics.md. Collective."""
        if self.__dict__["_compiled"] is None:
            self.__dict__["_compiled"] = torch.compile(
                self.model, backend=_backend(), options=self.__dict__["_options"]
            )
        args, kwargs = convert_values((args, kwargs), bootstrap.start().device, None)
        return self.__dict__["_compiled"](*args, **kwargs)

    def _table(self) -> ParameterTable | None:
        session = REGISTRY.of(self.model)
        return None if session is None else session.table

    # Parameters

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True, from_global: bool = False
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters before the first call; after it those of this rank, or all names with
        ``from_global`` (NaN where not here).
        """
        table = self._table()
        for name, parameter in self.model.named_parameters(prefix, recurse, remove_duplicate):
            if from_global or _is_here(table, parameter):
                yield name, parameter

    def parameters(self, recurse: bool = True, from_global: bool = False) -> Iterator[nn.Parameter]:
        """As `named_parameters`, without names."""
        for _, parameter in self.named_parameters(recurse=recurse, from_global=from_global):
            yield parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True, from_global: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As `named_parameters`, for buffers; those of other ranks' stages have the values that they had at
        the first call.
        """
        table = self._table()
        primary = {id(buffer): name for name, buffer in self.model.named_buffers()}
        for name, buffer in self.model.named_buffers(prefix, recurse, remove_duplicate):
            if from_global or table is None or table.owns(primary.get(id(buffer), name)):
                yield name, buffer

    def buffers(self, recurse: bool = True, from_global: bool = False) -> Iterator[torch.Tensor]:
        """As `named_buffers`, without names."""
        for _, buffer in self.named_buffers(recurse=recurse, from_global=from_global):
            yield buffer

    def get_param(self, name: str, amp_master_param: bool = False) -> torch.Tensor:
        """The whole parameter on the CPU of every rank. Collective once the model is planned."""
        return get_param(self.model, name)

    def get_param_grad(self, name: str, amp_master_param: bool = False) -> torch.Tensor | None:
        """The whole gradient on the CPU of every rank; None where there is none. Collective once the model is
        planned.
        """
        return get_param_grad(self.model, name)

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        no_hook: bool = False,
        amp_master_params: bool = True,
        rank0_only: bool = True,
        sync_all_ranks: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """All parameters and buffers under their original names, on rank 0's CPU; {} elsewhere. Collective
        once the model is planned.

        Args:
            no_hook: leave out the state_dict hooks of the model and of its modules.
            amp_master_params: accepted; there are no master parameters beside the parameters.
            rank0_only: False gives it to all ranks. ``sync_all_ranks``, of older RaNNC, is its opposite.
            args, kwargs: as of nn.Module.state_dict.
        """
        on_all_ranks = not rank0_only if sync_all_ranks is None else sync_all_ranks
        return full_state_dict(self.model, *args, no_hook=no_hook, on_all_ranks=on_all_ranks, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """At any time. Collective once the model is planned; ranks that then pass {} take rank 0's values."""
        if REGISTRY.deferred_values.any_in(self.model):
            return take_values(self.model, state_dict, strict=strict)
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.model.zero_grad(set_to_none)

    def clip_grad_norm(self, max_grad_norm: float) -> torch.Tensor:
        """Scale all gradients of all ranks so that their norm is at most ``max_grad_norm``; the norm before.
        Collective.
        """
        return clip_grad_norm_(self.model, max_grad_norm)

    def _calc_grad_norm(self) -> float:
        return calc_grad_norm(self.model)

    def allreduce_grads(self) -> None:
        """Sum the gradients that `delay_grad_allreduce` left on each rank. Collective."""
        allreduce_grads(self.model)

    def allreduce_grads_zero(self, prescale: float = 1.0) -> None:
        """As `allreduce_grads`, after multiplying by ``prescale``. Collective."""
        allreduce_grads(self.model, prescale=prescale)

    def is_checkpointing_enabled(self) -> bool:
        """Whether some stage recomputes activations in backward."""
        plan = REGISTRY.plan_of(self.model)
        return plan is not None and any(stage.recompute < 1.0 for stage in plan.stages)

    def use_amp_master_params(self) -> bool:
        """False: autocast keeps the parameters themselves in full precision."""
        return False

    # Deployment

    def save_deployment(self, file: str | os.PathLike[str]) -> None:
        """Write the plan: rank 0 does, the others do nothing. Raises UserInputError before the first call."""
        save_deployment(self.model, file)

    def load_deployment(self, file: str | os.PathLike[str]) -> None:
        """Run under a saved plan. Raises UserInputError after the first call."""
        if self.ready:
            raise UserInputError(
                "the model has a deployment already",
                cure="call load_deployment before the first call, or undeploy().",
            )
        # Another dict: torch.compile tells its results apart by the options that it was given.
        self.__dict__["_options"] = {
            **self.__dict__["_options"],
            "load_deployment": True,
            "deployment_file": os.fspath(file),
        }
        self.__dict__["_compiled"] = None

    def undeploy(self, sync: bool = False) -> None:
        """Free gradients, buffers and compiled stages, and take the parameters off the device; the next call
        plans anew. Collective.

        ``sync``: accepted; parameters stay with their owners, and state_dict gives all of them as before.
        """
        undeploy(self.model)

    # Modes and devices

    def train(self, mode: bool = True) -> RaNNCModule:
        """Training or evaluation mode, as of any module: the next call computes in it, under the same
        plan.
        """
        self.model.train(mode)
        return self

    def eval(self) -> RaNNCModule:
        """Evaluation mode."""
        return self.train(False)

    def enable_dropout(self, enable: bool) -> None:
        """Switch the dropout modules on or off, whatever the mode of the rest. All ranks must call it."""
        for module in self.model.modules():
            if isinstance(module, _DROPOUTS):
                module.training = enable

    def requires_grad_(self, requires_grad: bool = True) -> RaNNCModule:
        """As of the given module, for the parameters of all ranks."""
        self.model.requires_grad_(requires_grad)
        return self

    def to(self, *args: Any, **kwargs: Any) -> RaNNCModule:
        """Devices are ignored, with a warning: each rank takes its own stages to its own device. Dtypes are
        for before the first call.
        """
        dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        dtypes += [value.dtype for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if dtypes:
            self._apply(
                lambda tensor: (
                    tensor.to(dtypes[0]) if tensor.is_floating_point() or tensor.is_complex() else tensor
                )
            )
        if not dtypes or len(args) + len(kwargs) > 1:
            _say_once_ignored("to")
        return self

    def cuda(self, *args: Any, **kwargs: Any) -> RaNNCModule:
        """Ignored, with a warning."""
        _say_once_ignored("cuda")
        return self

    def cpu(self) -> RaNNCModule:
        """Ignored, with a warning."""
        _say_once_ignored("cpu")
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RaNNCModule:
        if self._table() is not None or REGISTRY.deferred_values.any_in(self.model):
            raise UserInputError(
                "the parameters of a RaNNCModule cannot be converted: they are spread over ranks",
                cure="convert the model before it is wrapped: model.to(torch.bfloat16), then "
                "RaNNCModule(model, ...).",
            )
        self.model._apply(fn, recurse)
        return self


def _is_here(table: ParameterTable | None, parameter: nn.Parameter) -> bool:
    name = None if table is None else table.name_of(parameter)
    return table is None or name is None or table.owns(name)


def _backend() -> Callable[..., Any]:
    # Its import installs its hooks; that of this module does nothing.
    from rannc_backend.backend import rannc

    return rannc


def _refuse_apex(**arguments: bool) -> None:
    for name, given in arguments.items():
        if given:
            raise UserInputError(
                f"{name}=True asks for Apex AMP, which no longer exists",
                cure=f"leave it and amp.initialize out, and call the model under autocast: {_AUTOCAST}",
            )


def _say_once_ignored(method: str) -> None:
    if bootstrap.start().rank == 0:
        logger.warning("%s() was ignored: each rank takes the stages that it owns to its own device", method)
