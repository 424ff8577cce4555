"""Who owns which parameter, how parameters come to their owners, and what the user's module shows of those
that live elsewhere.

In: the user's root module and, once a plan is there, the ranks that own each parameter and buffer. Out: on
each rank the tensors of its own stages; every other parameter gives its memory back; ``state_dict`` and
``load_state_dict`` of the module and of its submodules work on all ranks together.

Terms. A parameter's *owners* are the ranks of all stages that use it, in ascending order; its *first owner*
answers for it where a value must be counted or sent once. So are those of a buffer the ranks of the stages
that give it new values; other buffers stay with every rank. On other ranks a parameter, and such a buffer, is
*released*: its memory is given back, and using its value is an error (`absent_tensors.py`). A *deferred*
parameter has no value on any rank yet: each owner makes it (see `deferred.py`). *Holders* are the ranks that
have a value at present. *Updaters* are the owners that have a parameter's gradient and its optimizer state: all of
them, or some (see `ir/updates.py`), whose new values the others get.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from rannc_backend.errors import UnsupportedModelError, UserInputError
from rannc_backend.ir.updates import Update
from rannc_backend.kernels.plain_memory import plain_memory
from rannc_backend.runtime.absent_tensors import bring_to, is_absent, make_absent, make_present, strides_of
from rannc_backend.runtime.agreement import agree, exchanging
from rannc_backend.runtime.deferred import DeferredValues, Make
from rannc_backend.runtime.host_resources import give_back_memory
from rannc_backend.runtime.state_hooks import (
    STATE_CHANNEL,
    GivenCopies,
    StatesOfCopies,
    all_names,
    complete,
    fill_from_zero,
    install_hooks,
    loaded_alike,
    no_value,
    size_in_bytes,
    value_of_rank,
    wait_all,
    with_changes_of_its_own,
)
from rannc_backend.runtime.step_counts import key_of, model_of, name_of
from rannc_backend.runtime.torch_internals import GradientNote
from rannc_backend.runtime.world import Ranks, World
from rannc_backend.settings import hooks

# Bytes that are made or on their way to their owners at once: the whole model must not come to a device.
_MAX_UNDER_WAY = 16 * 2**20


def is_spread(parameters: Sequence[torch.Tensor], tables: Sequence[ParameterTable]) -> bool:
    """Whether these are of a model whose parameters are spread over ranks; they may be where there are none:
    this rank was left without.
    """
    return bool(tables) and (
        not parameters
        or any(table.name_of(parameter) is not None for table in tables for parameter in parameters)
    )


@dataclass(slots=True)
class Moved:
    """Bytes that this rank gave back, and those that it took into its memory or onto its device."""

    freed_bytes: int = 0
    made_bytes: int = 0

    @property
    def changed(self) -> bool:
        """Whether parameters are no longer where, or what, they were when the model was traced."""
        return bool(self.freed_bytes or self.made_bytes)


@dataclass(slots=True)
class ParameterTable:
    """Ownership of one root module's parameters and buffers; see the module docstring."""

    root: weakref.ref[nn.Module]
    world: World
    owners: dict[str, Ranks]
    tensors: dict[str, torch.Tensor]  # by every name: the objects that steps use
    number: int = 0  # of the model, the same on all ranks
    written: Collection[str] = ()  # what the forward changes
    offloads: bool = False  # parameters lie on the host, pinned where there is a device
    updates: dict[str, Update] = field(default_factory=dict)  # of parameters that not all owners update
    is_in_backward: bool = False  # gradients are being published, and hooks called
    gradients_are_local: bool = False  # p.grad holds sums over this rank's rows only: see accumulation.py
    is_gathered: bool = False  # see gathering.py
    states_on_all_ranks: bool = False  # state_dict() gives every rank what rank 0 gets otherwise
    versions: dict[str, int] = field(default_factory=dict)  # of those, when all owners had the same values
    given: GivenCopies = field(default_factory=GivenCopies)  # by state_dict()
    _names: dict[int, str] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _plain_gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        root: nn.Module,
        owners: Mapping[str, Ranks],
        world: World,
        number: int = 0,
        updates: Mapping[str, Update] | None = None,
    ) -> ParameterTable:
        """``owners`` by primary name; what is not in it (unused by any stage) stays with every rank.
        Collective.
        """
        tensors = {name: tensor for name, tensor in all_names(root)}
        table = cls(
            root=weakref.ref(root),
            world=world,
            owners=complete(root, owners, world),
            tensors=tensors,
            number=number,
            updates=dict(updates or {}),
        )
        table._names = {id(tensor): name for name, tensor in root.named_parameters()}
        if world.size > 1:
            world.transport.prepare(channels=[STATE_CHANNEL], groups=[table.everyone])
            is_spread = any(ranks != table.everyone for ranks in table.owners.values())
            copies = StatesOfCopies(world, lambda: table.states_on_all_ranks) if is_spread else None
            saving = (world, lambda: table.is_gathered)
            table._handles += install_hooks(root, table._after_state_dict, table._before_load, copies, saving)
            table._note_plain_gradients()
        return table

    @property
    def everyone(self) -> Ranks:
        """All ranks of the job."""
        return tuple(range(self.world.size))

    def module(self) -> nn.Module:
        """The root module. AssertionError when it is gone."""
        root = self.root()
        assert root is not None, "the model is gone"
        return root

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Primary name of a parameter object of the root module, else None."""
        return self._names.get(id(parameter))

    def owns(self, name: str) -> bool:
        """True where this rank keeps the parameter."""
        return self.world.rank in self.owners[name]

    def updaters(self, name: str) -> Ranks:
        """The ranks that update a parameter, ascending; its owners for a buffer."""
        return self.updates[name].updaters if name in self.updates else self.owners[name]

    @property
    def all_updaters(self) -> dict[str, Ranks]:
        """`updaters` by name."""
        return {name: self.updaters(name) for name in self.owners}

    def counts(self, name: str) -> bool:
        """True on the one rank that answers for the parameter's gradient."""
        return self.world.rank == self.updaters(name)[0]

    def answers_for(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is of this model, and this rank is the one that answers for its gradient."""
        name = self.name_of(parameter)
        return name is not None and self.counts(name)

    def lacks(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is of this model, and updated by other ranks only."""
        name = self.name_of(parameter)
        return name is not None and self.world.rank not in self.updaters(name)

    def key_of(self, parameter: torch.Tensor) -> str:
        """A name of a parameter of this model that no other model has, the same on all ranks."""
        return key_of(self.number, str(self.name_of(parameter)))

    def owners_of_key(self, key: str, *, updaters: bool = False) -> Ranks | None:
        """The owners, or ``updaters``, of the parameter with this key; None where it is of another model."""
        name = name_of(key)
        if model_of(key) != self.number or name not in self.owners:
            return None
        return self.updaters(name) if updaters else self.owners[name]

    def take_plain_gradients(self) -> dict[str, torch.Tensor]:
        """By key: two numbers of what autograd itself has added to the gradients of replicated parameters
        since the last call.
        """
        found = {key_of(self.number, name): numbers for name, numbers in self._plain_gradients.items()}
        self._plain_gradients.clear()
        return found

    def _note_plain_gradients(self) -> None:
        # Steps publish their gradients themselves: what passes autograd comes from elsewhere.
        notes = self._plain_gradients

        def note(name: str, gradient: torch.Tensor) -> None:
            exact = gradient.detach().double()
            numbers = torch.stack([exact.sum(), exact.abs().sum()])
            notes[name] = notes[name] + numbers if name in notes else numbers

        for name, parameter in self.module().named_parameters():
            if parameter.requires_grad and len(self.owners[name]) > 1:
                hook = GradientNote(partial(note, name))
                self._handles.append(hooks.register("plain gradients", parameter.register_hook, hook))

    def settle(self, deferred_values: DeferredValues, *, synchronize: bool) -> Moved:
        """First deployment: bring every value to its owners' devices and free the others. Collective.

        ``synchronize``: owners take rank 0's values (for deferred ones: the first owner's), so that a model
        initialised differently on each rank trains as one.
        """
        holders = {}
        for name, tensor in self._all_tensors():
            deferred_value = deferred_values.of(tensor)
            holders[name] = self.everyone if deferred_value is None or deferred_value.source.held else ()
        if () in holders.values():
            gc.collect()  # what capture and planning have left, before the values come
        with deferred_values.materializing(self.module(), self.world) as make, exchanging(self.world):
            return self._move(holders, deferred_values, make, synchronize=synchronize)

    def transfer(self, owners: Mapping[str, Ranks], updates: Mapping[str, Update]) -> Moved:
        """Give the parameters to other owners, after the model was planned anew. Collective."""
        before, self.owners = self.owners, complete(self.module(), owners, self.world)
        self.updates = dict(updates)
        return self._move(before, DeferredValues(), no_value, synchronize=False)

    def take_replaced(self, found: Mapping[str, torch.Tensor]) -> None:
        """Tensors of the model that are other objects than those that steps use: take a buffer's value, and
        put the known object back.

        ``self.average = 0.9 * self.average + x`` puts another tensor in the place of a buffer; Dynamo does so
        for ``self.count += 1``.

        Args:
            found: the objects by name; those that are known are passed over.

        Raises:
            UserInputError: a parameter was replaced, or a buffer by one of another shape or dtype.
        """
        for name, tensor in found.items():
            known = self.tensors.get(name)
            if known is None:
                self.tensors[name] = tensor
                self.owners.setdefault(name, self.everyone)
                continue
            if known is tensor:
                continue
            kind = "parameter" if isinstance(known, nn.Parameter) else "buffer"
            if kind == "parameter" or (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise UserInputError(
                    f"{kind} {name!r} is another one than the {kind} for which the model was planned, "
                    f"of shape {list(tensor.shape)} and dtype {tensor.dtype}",
                    cure="change values in place or by load_state_dict on all ranks; replace layers before "
                    "the first call of the compiled model, or build a new model with them.",
                )
            if not is_absent(known) and not is_absent(tensor):
                with torch.no_grad():
                    known.copy_(tensor)
            for place, other in self.tensors.items():
                if other is known:
                    path, _, local = place.rpartition(".")
                    self.module().get_submodule(path)._buffers[local] = known

    def take_all_replaced(self) -> None:
        """`take_replaced` for the whole model."""
        self.take_replaced(dict(all_names(self.module())))

    def _all_tensors(self) -> list[tuple[str, torch.Tensor]]:
        root = self.module()
        return [*root.named_parameters(), *root.named_buffers()]

    def _move(
        self, holders: Mapping[str, Ranks], deferred_values: DeferredValues, make: Make, *, synchronize: bool
    ) -> Moved:
        moved, rank, device = Moved(), self.world.rank, self.world.device
        under_way: list[Any] = []
        num_bytes = 0
        for name, tensor in self._all_tensors():
            owners, held, home = self.owners[name], holders[name], self._home(tensor)
            is_deferred = deferred_values.of(tensor) is not None
            source = held[0] if held else owners[0]
            takers = [
                taker
                for taker in owners
                if taker != source and (synchronize or taker not in (held or owners))
            ]
            room: torch.Tensor | None = None
            made: torch.Tensor | None = None
            if rank in owners and (is_deferred or rank not in held):
                room = torch.empty_strided(tensor.shape, strides_of(tensor), dtype=tensor.dtype, device=home)
            if is_deferred and (rank == source or (rank in owners and rank not in takers)):
                made = make(name, tensor)
            if room is not None:
                make_present(tensor, room)
                moved.made_bytes += size_in_bytes(tensor)
                if made is not None:
                    tensor.data.copy_(made)
            elif rank in owners:
                moved.made_bytes += bring_to(home, tensor)
            if rank == source and takers:
                value = tensor.detach() if made is None else made
                data = plain_memory(value.to(dtype=tensor.dtype, device=device))
                under_way += [self.world.transport.isend(data, taker, STATE_CHANNEL) for taker in takers]
            elif rank in takers:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                self.world.transport.irecv(buffer, source, STATE_CHANNEL).wait()
                tensor.detach().copy_(buffer)
            if rank not in owners:
                moved.freed_bytes += self._release(name, tensor)
            elif home != device and not tensor.is_pinned():
                tensor.data = tensor.data.pin_memory()
            num_bytes += size_in_bytes(tensor)
            if num_bytes > _MAX_UNDER_WAY:
                wait_all(under_way)
                made = None
                give_back_memory()  # what has come and gone between what stays is not kept by the allocator
                num_bytes = 0
        wait_all(under_way)
        return moved

    def _home(self, tensor: torch.Tensor) -> torch.device:
        """Where a parameter or buffer lies."""
        is_offloaded = self.offloads and isinstance(tensor, nn.Parameter)
        return torch.device("cpu") if is_offloaded else self.world.device

    def _release(self, name: str, tensor: torch.Tensor) -> int:
        is_freed = isinstance(tensor, nn.Parameter) and not is_absent(tensor)
        freed = tensor.untyped_storage().nbytes() if is_freed else 0
        is_written = name in self.written
        make_absent(tensor, name, owners=self.owners[name], device=self._home(tensor), is_written=is_written)
        tensor.grad = None
        return freed

    def to_host(self) -> None:
        """Take this rank's parameters off its device, and drop their gradients."""
        for name, parameter in self.module().named_parameters():
            parameter.grad = None
            if self.owns(name) and parameter.device.type != "cpu":
                parameter.data = parameter.data.cpu()
        self.gradients_are_local = False

    def require_reduced_gradients(self, what: str) -> None:
        """UserInputError where gradients have not been summed over ranks yet (`delay_grad_allreduce`)."""
        if self.gradients_are_local and any(p.grad is not None for p in self.module().parameters()):
            raise UserInputError(
                f"{what} while gradients are those of each rank's own rows, because "
                "delay_grad_allreduce(True) is on",
                cure="call allreduce_grads() before, or delay_grad_allreduce(False) before the last forward "
                "of the step.",
            )

    def gather(self, name: str) -> torch.Tensor:
        """The value of a parameter or buffer, on the CPU of every rank. Collective."""
        agree(self.world, f"get_param({name!r})")
        return self._from_owner(name, dict(self._all_tensors())[name])

    def gather_gradient(self, name: str) -> torch.Tensor | None:
        """The gradient of a parameter, on the CPU of every rank; None where it has none. Collective."""
        parameter = dict(self.module().named_parameters())[name]
        self.require_reduced_gradients("get_param_grad")
        given = agree(self.world, f"get_param_grad({name!r})", parameter.grad is not None)
        root = self.updaters(name)[0]
        if not given[root]:
            return None
        gradient = None if parameter.grad is None else parameter.grad.to_dense()
        return value_of_rank(self.world, root, parameter, gradient)

    def _from_owner(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The first owner's ``tensor``, as `value_of_rank`."""
        return value_of_rank(self.world, self.owners[name][0], tensor)

    def full_state(
        self, names: Sequence[tuple[str, torch.Tensor]], *, on_all_ranks: bool
    ) -> dict[str, torch.Tensor]:
        """Values of the named tensors on the CPU, on rank 0 (else {}) or on all ranks; tied names share one
        tensor. Collective.
        """
        agree(self.world, "state_dict", on_all_ranks)
        primary = {id(tensor): name for name, tensor in self._all_tensors()}
        made: dict[int, torch.Tensor] = {}
        state = {}
        for name, tensor in names:
            key = id(tensor)
            if key not in made:
                made[key] = (
                    self._from_owner(primary[key], tensor)
                    if on_all_ranks
                    else self._to_zero(primary[key], tensor)
                )
            state[name] = made[key]
        return state if on_all_ranks or self.world.rank == 0 else {}

    def _to_zero(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The first owner's value on rank 0's CPU; elsewhere ``tensor`` itself."""
        transport, rank, first = self.world.transport, self.world.rank, self.owners[name][0]
        if rank == first == 0:
            return tensor.detach().cpu()
        if rank == first:
            transport.isend(plain_memory(tensor.detach().to(self.world.device)), 0, STATE_CHANNEL).wait()
        elif rank == 0:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.world.device)
            transport.irecv(buffer, first, STATE_CHANNEL).wait()
            # The whole model may be larger than the device.
            return buffer.cpu()
        return tensor

    @contextmanager
    def giving_states(self, *, on_all_ranks: bool) -> Iterator[None]:
        """While it lasts, ``state_dict`` of the module gives every rank what rank 0 gets otherwise, or rank 0
        alone.
        """
        before, self.states_on_all_ranks = self.states_on_all_ranks, on_all_ranks
        try:
            yield
        finally:
            self.states_on_all_ranks = before

    def _tensors(self, module: nn.Module) -> dict[str, tuple[str, torch.Tensor]]:
        """Local name → (primary name, tensor) of the module's own parameters and persistent buffers."""
        buffers = {id(tensor): name for name, tensor in self.module().named_buffers()}
        own: dict[str, tuple[str, torch.Tensor]] = {}
        for local, tensor in module._parameters.items():
            if tensor is not None and (name := self.name_of(tensor)) is not None:
                own[local] = (name, tensor)
        for local, buffer in module._buffers.items():
            if (
                buffer is not None
                and local not in module._non_persistent_buffers_set
                and id(buffer) in buffers
            ):
                own[local] = (buffers[id(buffer)], buffer)
        return own

    def _after_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if self.is_gathered:
            return  # each rank has what it asks for
        own = self._tensors(module)
        self.given.check(agree(self.world, f"state_dict of {prefix or 'the model'}", self.given.changed()))
        for local, (name, tensor) in own.items():
            key = prefix + local
            if self.states_on_all_ranks:
                state[key] = self._from_owner(name, tensor)
            elif self.owners[name][0] != 0:
                state[key] = self._to_zero(name, tensor)
            elif self.world.rank == 0 and len(self.owners[name]) > 1:
                state[key] = with_changes_of_its_own(state[key])
            if self.world.rank != 0 and not self.states_on_all_ranks:
                state.pop(key, None)
            elif self.states_on_all_ranks or self.owners[name] != (0,):
                self.given.note((id(module), local), key, state[key])

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
        if self.is_gathered:
            return
        own, what = self._tensors(module), f"load_state_dict of {prefix or 'the model'}"
        owners = {local: self.owners[name] for local, (name, _) in own.items()}
        given = loaded_alike(self.world, what, state, prefix, owners)
        for index, (local, (name, tensor)) in enumerate(own.items()):
            key = prefix + local
            self.given.loaded((id(module), local), (flags[index] for flags in given))
            if given[0][index] and not all(flags[index] for flags in given):
                flags = [each[index] for each in given]
                fill_from_zero(self.world, self.owners[name], key, tensor, state, flags)
            if is_absent(tensor) and key in state and state[key].shape == tensor.shape:
                # Copying a parameter onto itself does nothing: torch sees the key as loaded.
                state[key] = tensor
