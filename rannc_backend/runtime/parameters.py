"""Who owns which parameter, and what the user's module shows of parameters that live elsewhere.

In: the user's root module and, once a plan is there, the ranks that own each parameter and buffer. Out: on each rank the tensors of
its own stages; every other parameter gives its memory back; ``state_dict`` and ``load_state_dict`` of the module and of its
submodules work on all ranks together.

Terms. A parameter's *owners* are the ranks of all stages that use it, in ascending order; its *first owner* answers for it where a
value must be counted or sent once. A *released* parameter keeps its shape, dtype and strides of zero over one NaN: reading it is
visibly wrong instead of a crash, writing it is an error of torch, and its gradient stays None.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rannc_backend.errors import UnsupportedModelError
from rannc_backend.runtime.agreement import agree
from rannc_backend.runtime.world import World

STATE_CHANNEL = "state"


@dataclass(slots=True)
class ParameterTable:
    """Ownership of one root module's parameters and buffers; see the module docstring."""

    root: weakref.ref[nn.Module]
    world: World
    owners: dict[str, tuple[int, ...]]
    released_strides: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by id of the parameter
    _names: dict[int, str] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)

    @classmethod
    def build(cls, root: nn.Module, owners: Mapping[str, tuple[int, ...]], world: World) -> ParameterTable:
        """``owners`` by primary name; what is not in it (unused by any stage) stays with every rank."""
        everyone = tuple(range(world.size))
        tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
        table = cls(
            root=weakref.ref(root),
            world=world,
            owners={name: tuple(owners.get(name, everyone)) for name in tensors},
        )
        table._names = {id(tensor): name for name, tensor in root.named_parameters()}
        if world.size > 1:
            table._install_hooks(root)
        return table

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Primary name of a parameter object of the root module, else None."""
        return self._names.get(id(parameter))

    def owns(self, name: str) -> bool:
        """True where this rank keeps the parameter."""
        return self.world.rank in self.owners[name]

    def counts(self, name: str) -> bool:
        """True on the one rank that answers for the parameter."""
        return self.world.rank == self.owners[name][0]

    def synchronize(self) -> None:
        """Give every owner rank 0's values, so that a model initialised differently on each rank trains as one."""
        root = self.root()
        assert root is not None
        works = []
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            data = tensor.detach()
            works += self._send_from_zero(name, data)
        for work in works:
            work.wait()

    def _send_from_zero(self, name: str, data: torch.Tensor) -> list[Any]:
        transport, rank = self.world.transport, self.world.rank
        receivers = [owner for owner in self.owners[name] if owner != 0]
        if rank == 0:
            return [transport.isend(data.contiguous(), receiver, STATE_CHANNEL) for receiver in receivers]
        if rank in receivers:
            buffer = torch.empty_like(data, memory_format=torch.contiguous_format)
            transport.irecv(buffer, 0, STATE_CHANNEL).wait()
            data.copy_(buffer)
        return []

    def release(self) -> int:
        """Free the parameters that this rank does not own; returns the number of bytes given back."""
        root = self.root()
        assert root is not None
        freed = 0
        for name, parameter in root.named_parameters():
            if not self.owns(name):
                freed += parameter.numel() * parameter.element_size()
                filler = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
                cell = torch.full((), filler, dtype=parameter.dtype, device=parameter.device)
                self.released_strides[id(parameter)] = parameter.stride()
                parameter.data = cell.expand(parameter.shape)
                parameter.grad = None
        return freed

    def _install_hooks(self, root: nn.Module) -> None:
        # torch marks the functions that it is given, which bound methods do not allow.
        def after_state_dict(*args: Any) -> None:
            self._after_state_dict(*args)

        def before_load(*args: Any) -> None:
            self._before_load(*args)

        for module in root.modules():
            if module._parameters or module._buffers:
                self._handles.append(module.register_state_dict_post_hook(after_state_dict))
                self._handles.append(module.register_load_state_dict_pre_hook(before_load))

    def _tensors(self, module: nn.Module) -> dict[str, tuple[str, torch.Tensor]]:
        """Local name → (primary name, tensor) of the module's own parameters and persistent buffers."""
        root = self.root()
        assert root is not None
        buffers = {id(tensor): name for name, tensor in root.named_buffers()}
        own: dict[str, tuple[str, torch.Tensor]] = {}
        for local, tensor in module._parameters.items():
            if tensor is not None and (name := self.name_of(tensor)) is not None:
                own[local] = (name, tensor)
        for local, tensor in module._buffers.items():
            if tensor is not None and local not in module._non_persistent_buffers_set and id(tensor) in buffers:
                own[local] = (buffers[id(tensor)], tensor)
        return own

    def _agree(self, what: str, flags: list[bool]) -> list[list[bool]]:
        """All ranks' ``flags``; an error that names the ranks when they are not in the same call."""
        return agree(self.world, what, flags)

    def _after_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        transport, rank = self.world.transport, self.world.rank
        own = self._tensors(module)
        self._agree(f"state_dict of {prefix or 'the model'}", [])
        for local, (name, tensor) in own.items():
            key = prefix + local
            first = self.owners[name][0]
            if first != 0 and rank == first:
                transport.isend(tensor.detach().contiguous(), 0, STATE_CHANNEL).wait()
            if first != 0 and rank == 0:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                transport.irecv(buffer, first, STATE_CHANNEL).wait()
                state[key] = buffer
            if rank != 0:
                state.pop(key, None)

    def _before_load(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise UnsupportedModelError(
                "load_state_dict(assign=True) cannot replace parameters that are spread over ranks",
                cure="call load_state_dict without assign, or before the first call of the compiled model",
            )
        own = self._tensors(module)
        given = self._agree(f"load_state_dict of {prefix or 'the model'}", [prefix + local in state for local in own])
        for index, (local, (name, tensor)) in enumerate(own.items()):
            key = prefix + local
            if given[0][index] and not all(flags[index] for flags in given):
                self._fill_from_zero(key, name, tensor, state, [flags[index] for flags in given])
            released = not self.owns(name) and isinstance(tensor, nn.Parameter)
            if released and key in state and state[key].shape == tensor.shape:
                # Copying a parameter onto itself does nothing: torch sees the key as loaded.
                state[key] = tensor

    def _fill_from_zero(
        self, key: str, name: str, tensor: torch.Tensor, state: dict[str, Any], given: list[bool]
    ) -> None:
        transport, rank = self.world.transport, self.world.rank
        for receiver in range(1, self.world.size):
            if given[receiver]:
                continue
            if receiver not in self.owners[name]:
                if rank == receiver:
                    state[key] = tensor
            elif rank == 0:
                transport.isend(state[key].to(tensor.dtype).contiguous(), receiver, STATE_CHANNEL).wait()
            elif rank == receiver:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                transport.irecv(buffer, 0, STATE_CHANNEL).wait()
                state[key] = buffer
