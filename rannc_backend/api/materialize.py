"""Models that no rank ever holds whole: parameters get their values when the plan says whose they are, on
their owners only.

In: a model on "meta" (or on the CPU of a job of GPUs), and where its values come from. Out: parameters
without memory, which the first call of the compiled model fills. Terms as in runtime/deferred.py: a *source*
makes values by name.

The rule for values that are made here: a module draws its own from a generator seeded with (seed, name of the
module), on the CPU, and the seed is drawn from torch's default generator on rank 0. So ``torch.manual_seed``
decides, and neither the number of stages nor of ranks does. They are not the numbers that building the model
on the CPU draws.
"""

from __future__ import annotations

import copy
import os
import pickle
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rannc_backend.api.record_model import recorded_source, seed_generator
from rannc_backend.checkpoint.loading import CheckpointSource
from rannc_backend.checkpoint.safetensors_directory import SafetensorsDirectory
from rannc_backend.errors import RanncError, UserInputError
from rannc_backend.runtime.absent_tensors import make_absent
from rannc_backend.runtime.deferred import DeferredValue, Source, give_no_memory
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.torch_internals import root_of
from rannc_backend.session_registry import REGISTRY
from rannc_backend.settings.user_files import UserFile, kind_of, require_file

ValueSource = str | os.PathLike[str] | Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor]
_META = torch.device("meta")
_NAMED_BY = "the source of materialize_by_stage"


def materialize_by_stage(model: nn.Module, source: ValueSource | None = None) -> None:
    """Lets each rank materialize, or move to its device, the parameters of its own stages only. Collective.

    For a model on "meta", or one on the CPU that is larger than a device. Call it before `torch.compile`;
    `RaNNCModule` does. Values are materialized at the first call of the compiled model, buffers on "meta" at
    once on every rank.

    Args:
        model: The model; its parameters become placeholders.
        source: Where the values of parameters on "meta" come from: the path of a safetensors file, of a
            directory of them with their index, or of a state_dict that `torch.save` wrote; a state_dict; or
            a function from a name to a tensor. None:
            what `DistributeModelParams` recorded, otherwise the modules' own ``reset_parameters``, each
            seeded by (seed, name of the module), with the seed drawn on rank 0.

    Raises:
        UserInputError: The source lacks a parameter, or a module has no ``reset_parameters``.
    """
    model = root_of(model)
    device = bootstrap.start().device
    named = list(model.named_parameters())
    own = HeldValues({name: p.detach() for name, p in named if p.device != _META and p.device != device})
    chosen = (
        None if source is None else _given_source(source, [name for name, p in named if p.device == _META])
    )
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    resets = ModuleResets(model, seed)
    _make_buffers(model, resets, device)
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    for name, parameter in named:
        if parameter.device == device:
            continue
        if parameter.device != _META:
            make_absent(parameter, name, owners=(), device=device)
            REGISTRY.deferred_values.add(parameter, DeferredValue(source=own, name=name))
            continue
        recorded = recorded_source(parameter) if chosen is None else None
        maker: Source = chosen or recorded or resets
        if maker is resets:
            resets.require(name)
        key = recorded.key_of(parameter) if recorded is not None else name
        # Tensors change places only while nothing refers to them weakly, as this and torch's recurrent
        # modules do.
        REGISTRY.recordings.pop(parameter, None)
        give_no_memory(parameter, name, device)
        REGISTRY.deferred_values.add(parameter, DeferredValue(source=maker, name=key))
    for module in recurrent:
        module._flat_weight_refs = [
            None if weight is None else weakref.ref(weight) for weight in module._flat_weights
        ]


def take_values(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """`load_state_dict` for a model whose parameters have no values yet: they are taken from ``state`` at the
    first call.

    Buffers are filled at once. Every rank must pass the same.

    Raises:
        RuntimeError: with ``strict``, names of the model are missing in ``state`` or the other way round; or
        shapes differ (torch's text).
    """
    # torch itself checks names and shapes, on a copy of the model without memory.
    skeleton = _skeleton(model)
    result = skeleton.load_state_dict(
        {name: _meta_like(value) for name, value in state.items()}, strict=strict, assign=True
    )
    source = StateDictValues(state)
    names = {
        id(parameter): name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in state
    }
    for parameter in model.parameters():
        deferred_value = REGISTRY.deferred_values.of(parameter)
        name = names.get(id(parameter))
        if name is None:
            continue
        if deferred_value is not None:
            REGISTRY.deferred_values.add(parameter, DeferredValue(source=source, name=name))
        else:
            with torch.no_grad():
                parameter.copy_(state[name])
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in state:
                buffer.copy_(state[name])
    return result


@dataclass(slots=True)
class HeldValues:
    """Values that this rank has in its host memory; given up one by one."""

    tensors: dict[str, torch.Tensor]
    seed: int = 0
    held: bool = True

    def value(self, name: str, seed: int) -> torch.Tensor:
        return self.tensors.pop(name)


@dataclass(slots=True)
class StateDictValues:
    """Values of a state_dict, which may be mapped from a file."""

    tensors: Mapping[str, torch.Tensor]
    seed: int = 0
    held: bool = False

    def value(self, name: str, seed: int) -> torch.Tensor:
        return self.tensors[name]


@dataclass(slots=True)
class FunctionValues:
    """Values that the user's function gives."""

    function: Callable[[str], torch.Tensor]
    seed: int = 0
    held: bool = False

    def value(self, name: str, seed: int) -> torch.Tensor:
        try:
            value = self.function(name)
        except RanncError:
            raise
        except Exception as error:
            raise UserInputError(
                f"the source of materialize_by_stage gave no value for {name!r}: {type(error).__name__}: {error}",
                cure="mend the source; a rank asks it for the parameters of its own stages.",
            ) from error
        if not isinstance(value, torch.Tensor):
            raise UserInputError(
                f"the source gave a {type(value).__name__} for {name!r}",
                cure="let it give a tensor for every name.",
            )
        return value


@dataclass(slots=True)
class ModuleResets:
    """Values that modules make themselves, in ``reset_parameters``; see the rule in the module docstring."""

    model: nn.Module
    seed: int
    held: bool = False
    _made: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # of the last module only

    def require(self, name: str) -> None:
        """UserInputError unless the module of a parameter can make it."""
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        if not callable(getattr(module, "reset_parameters", None)):
            raise UserInputError(
                f"{type(module).__name__} {path or '(the model)'!r} has no reset_parameters, so {leaf!r} on "
                "'meta' has no first value",
                cure="build the model under `with rannc_backend.DistributeModelParams():`, which remembers "
                "how values are made; or give materialize_by_stage a source; or give the module a "
                "reset_parameters.",
            )

    def value(self, name: str, seed: int) -> torch.Tensor:
        path, _, leaf = name.rpartition(".")
        if path not in self._made:
            # One module at a time: its parameters follow each other in the order in which values are asked
            # for.
            self._made = {path: reset_values(self.model.get_submodule(path), path, seed)}
        if leaf not in self._made[path]:
            raise UserInputError(
                f"reset_parameters of {path!r} makes no {leaf!r}",
                cure="let reset_parameters fill all parameters.",
            )
        return self._made[path][leaf]


def reset_values(module: nn.Module, path: str, seed: int) -> dict[str, torch.Tensor]:
    """The parameters and buffers that ``module.reset_parameters()`` makes, on the CPU; the module itself
    stays as it is.
    """
    # A copy without the tensors: a module's reset fills what lies directly in it.
    alone = copy.copy(module)
    fresh = {
        name: _unset(t) for name, t in {**module._parameters, **module._buffers}.items() if t is not None
    }
    alone.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(fresh[name], requires_grad=p.requires_grad)
        for name, p in module._parameters.items()
    }
    alone.__dict__["_buffers"] = {
        name: None if b is None else fresh[name] for name, b in module._buffers.items()
    }
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        seed_generator(f"{seed} {path}")
        alone.reset_parameters()  # type: ignore[operator]
    made = {
        name: tensor.detach()
        for name, tensor in {**alone._parameters, **alone._buffers}.items()
        if tensor is not None
    }
    return made


def _unset(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full(
        tensor.shape, float("nan") if tensor.is_floating_point() else 0, dtype=tensor.dtype, device="cpu"
    )


def _make_buffers(model: nn.Module, resets: ModuleResets, device: torch.device) -> None:
    world = bootstrap.start()
    here = [(name, buffer) for name, buffer in model.named_buffers() if buffer.device != device]
    on_meta = [name for name, buffer in here if buffer.device == _META]
    seed = world.control.broadcast(resets.seed, what="seed of buffers") if on_meta else 0
    made: dict[int, torch.Tensor] = {}
    for name, buffer in here:
        if buffer.device == _META:
            recorded = recorded_source(buffer)
            if recorded is not None:
                value = recorded.value(recorded.key_of(buffer), recorded.seed)
            else:
                resets.require(name)
                value = resets.value(name, seed)
        elif buffer.dim() == 0 and buffer.device.type == "cpu":
            continue  # a counter there goes with any device
        else:
            value = buffer
        made[id(buffer)] = value.to(device)
    for module in model.modules():
        for name, own in module._buffers.items():
            if own is not None and id(own) in made:
                module._buffers[name] = made[id(own)]


def _given_source(source: ValueSource, names: list[str]) -> Source:
    if isinstance(source, Mapping):
        _require_names(source, names)
        return StateDictValues(source)
    if not isinstance(source, str | os.PathLike):
        return FunctionValues(source)
    path = Path(source)
    if path.suffix in (".safetensors", ".json") or kind_of(_source_file(path)) == "a directory":
        reader = SafetensorsDirectory(path, _NAMED_BY)
        _require_names(dict.fromkeys(reader.names), names)
        return CheckpointSource(reader)
    require_file(_source_file(path))
    try:
        # Mapped, not read; and no code of the file is run.
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise _source_file(path).failed("cannot read the", reason) from None
    if not isinstance(state, Mapping):
        raise UserInputError(
            f"{str(path)!r} holds a {type(state).__name__}, no state_dict", cure="save model.state_dict()."
        )
    _require_names(state, names)
    return StateDictValues(state)


def _source_file(path: str | os.PathLike[str]) -> UserFile:
    cure = "give a safetensors file, or a state_dict saved by torch.save."
    return UserFile(path=path, what="parameters", named_by=_NAMED_BY, cure=cure)


def _require_names(given: Mapping[str, object], names: list[str]) -> None:
    missing = [name for name in names if name not in given]
    if missing:
        raise UserInputError(
            f"the source has no values for {len(missing)} of {len(names)} parameters, as {missing[0]!r}",
            cure="give values under the names of model.named_parameters().",
        )


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model's names and shapes on "meta", without what hooks and planning have added."""
    skeleton = nn.Module()
    for path, module in model.named_modules(remove_duplicate=False):
        place = skeleton
        for part in path.split(".") if path else ():
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                place.register_parameter(name, nn.Parameter(_meta_like(parameter), requires_grad=False))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                place.register_buffer(
                    name, _meta_like(buffer), persistent=name not in module._non_persistent_buffers_set
                )
    return skeleton


def _meta_like(value: Any) -> Any:
    return (
        torch.empty(value.shape, dtype=value.dtype, device=_META)
        if isinstance(value, torch.Tensor)
        else value
    )
