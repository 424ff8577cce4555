"""What the hooks of ``state_dict``, ``load_state_dict`` and ``save_pretrained`` are made of."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rannc_backend.errors import UnsupportedModelError, UserInputError
from rannc_backend.kernels.plain_memory import crc32_of, plain_memory
from rannc_backend.runtime.absent_tensors import is_absent
from rannc_backend.runtime.agreement import agree, exchanging, failing_together
from rannc_backend.runtime.torch_internals import state_dict_hooks
from rannc_backend.runtime.world import Ranks, World
from rannc_backend.settings import hooks

STATE_CHANNEL = "state"


class StateHook:
    """A hook of one module, for torch.nn.Module: copies of the module have the hook ``in_copies``, those by way of a
    file one that does nothing.
    """

    def __init__(self, function: Callable[..., None], in_copies: Callable[..., None] | None = None) -> None:
        self._function, self._in_copies = function, in_copies or do_nothing

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def is_of_copy(self) -> bool:
        """Whether the module is a copy."""
        return isinstance(getattr(self._function, "__self__", None), StatesOfCopies)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateHook:
        return StateHook(self._in_copies, self._in_copies)

    def __reduce__(self) -> tuple[Any, ...]:
        return StateHook, (do_nothing,)


class SavedByZero:
    """`save_pretrained` of one module: all ranks call it, and rank 0, which gets the state, writes.

    Every rank would take itself for the one that writes: those without a state would write nothing, and remove
    rank 0's files as left over from an earlier save. A rank that is given a ``state_dict`` writes it. Copies of
    the module, also by way of a file, save as the library does, and so do ranks on which it is whole.
    """

    def __init__(self, module: nn.Module, world: World | None, is_whole: Callable[[], bool]) -> None:
        self._module, self._world, self._is_whole = weakref.ref(module), world, is_whole

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, world = self._module(), self._world
        assert module is not None, "the module is gone"
        kind: Any = type(module)
        save = kind.save_pretrained
        if world is None or kwargs.get("state_dict") or self._is_whole():
            return save(module, *args, **kwargs)
        signature = inspect.signature(save)
        if "is_main_process" not in signature.parameters:
            raise UnsupportedModelError(
                f"save_pretrained of {type(module).__name__} does not let one rank write for all",
                cure="call rannc_backend.save_pretrained(model, directory) on all ranks.",
            )
        bound = signature.bind(module, *args, **kwargs)
        if bound.arguments.get("state_dict"):
            return save(module, *args, **kwargs)
        bound.arguments["is_main_process"] = world.rank == 0 and bound.arguments.get("is_main_process", True)
        with failing_together(world, "save_pretrained"):
            result = save(*bound.args, **bound.kwargs)
        # Files are there for every rank when it returns.
        agree(world, "the end of save_pretrained")
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedByZero, (self._module(), None, bool)


def install_hooks(
    root: nn.Module,
    after_state_dict: Callable[..., None],
    before_load: Callable[..., None],
    copies: StatesOfCopies | None,
    saving: tuple[World, Callable[[], bool]],
) -> list[hooks.Undo]:
    """The hooks of all modules of a model; what ends each of them.

    Args:
        copies: what copies of the modules have; None: nothing.
        saving: the job, and whether the model is whole on this rank at present.
    """
    in_copies = (None, None) if copies is None else (copies.after_state_dict, copies.before_load)
    undo = []
    for module in root.modules():
        if module._parameters or module._buffers:
            for register, hook in (
                (module.register_state_dict_post_hook, StateHook(after_state_dict, in_copies[0])),
                (module.register_load_state_dict_pre_hook, StateHook(before_load, in_copies[1])),
            ):
                undo.append(hooks.register("module states", register, hook))
        if callable(getattr(type(module), "save_pretrained", None)):
            undo.append(
                hooks.replace("module states", module, "save_pretrained", SavedByZero(module, *saving))
            )
    return undo


def do_nothing(*args: Any) -> None:
    return


class GivenCopies:
    """Values that ``state_dict`` has given on this rank and that other ranks have too, or alone: changed in place, as
    averages of weights are made in one process, they would change nothing there.
    """

    def __init__(self) -> None:
        self._given: dict[object, tuple[str, torch.Tensor, int]] = {}

    def note(self, key: object, name: str, value: torch.Tensor) -> None:
        """Remember a value that is given now, without its memory; ``key``: of the one that it replaces."""
        if value.is_inference() or isinstance(value, nn.Parameter):
            return  # has no version, or is the model's own (keep_vars)
        counter = value.detach()
        counter.data = torch.empty(0, dtype=value.dtype, device=value.device)
        self._given[key] = (name, counter, counter._version)

    def loaded(self, key: object, given: Iterable[bool]) -> None:
        """The value is loaded, changed or not, where some rank has given it."""
        if any(given):
            self._given.pop(key, None)

    def changed(self) -> list[str]:
        """Names of those that were changed in place since they were given."""
        return [name for name, counter, version in self._given.values() if counter._version != version]

    def check(self, changed: Iterable[Sequence[str]]) -> None:
        """Raises UserInputError where ``changed`` has names, of all ranks or of this one."""
        names = sorted(set().union(*changed))
        if names:
            self._given.clear()
            raise UserInputError(
                f"values that state_dict() has given were changed in place ({', '.join(names[:3])}"
                f"{', ...' if len(names) > 3 else ''}), and other ranks have these values, which stay as they were",
                cure="change the parameters under torch.no_grad() on all ranks (each changes those that it has, of a model or "
                "a copy of it), or pass the changed values to load_state_dict on all ranks.",
            )


def with_changes_of_its_own(value: torch.Tensor) -> torch.Tensor:
    """A value of ``state_dict``, over the same memory, but changes in place are counted apart from those by
    optimizers. A parameter itself (``keep_vars``) stays.
    """
    return value if isinstance(value, nn.Parameter) else value.data


def loaded_alike(
    world: World, what: str, state: Mapping[str, Any], prefix: str, owners: Mapping[str, Ranks]
) -> list[list[bool]]:
    """Which values each rank passes to ``load_state_dict``, in the order of ``owners``. Collective.

    Raises:
        UserInputError: ranks that hold a tensor, such as replicas of a stage, pass different values, with which each would
        go on by itself.
    """
    marks: list[int | bool] = []
    for local, ranks in owners.items():
        value = state.get(prefix + local)
        if (
            isinstance(value, torch.Tensor)
            and len(ranks) > 1
            and world.rank in ranks
            and not is_absent(value)
            and value.device.type != "meta"
        ):
            marks.append(crc32_of(value))
        else:
            marks.append(prefix + local in state)
    answers = agree(world, what, marks)
    for index, local in enumerate(owners):
        numbers = {answer[index] for answer in answers if not isinstance(answer[index], bool)}
        if len(numbers) > 1:
            raise UserInputError(
                f"ranks pass different values of {prefix + local!r} to load_state_dict, and replicas would go on with them",
                cure="load the same state on all ranks, or pass it on rank 0 alone: load_state_dict(state if rank == 0 else "
                "{}). An average by way of state_dict().values() is made on rank 0 alone (docs/loops.md, Averages).",
            )
    return [[answer[index] is not False for index in range(len(owners))] for answer in answers]


def fill_from_zero(
    world: World,
    owners: Ranks,
    key: str,
    tensor: torch.Tensor,
    state: dict[str, Any],
    given: Sequence[bool],
) -> None:
    """Give ranks that pass no value for a tensor rank 0's; those that do not hold it keep the tensor itself."""
    transport, rank = world.transport, world.rank
    for receiver in range(1, world.size):
        if given[receiver]:
            continue
        if receiver not in owners:
            if rank == receiver:
                state[key] = tensor
        elif rank == 0:
            value = state[key].to(dtype=tensor.dtype, device=world.device)
            transport.isend(plain_memory(value), receiver, STATE_CHANNEL).wait()
        elif rank == receiver:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
            transport.irecv(buffer, 0, STATE_CHANNEL).wait()
            state[key] = buffer


class StatesOfCopies:
    """``state_dict`` and ``load_state_dict`` of copies of a model whose parameters are spread over ranks: a copy's are
    where the model's were.
    """

    def __init__(self, world: World, on_all_ranks: Callable[[], bool]) -> None:
        self._world, self._on_all_ranks = world, on_all_ranks
        self._given = GivenCopies()

    def after_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Rank 0, or every rank, gets all values, and the others nothing. Collective."""
        world, own = self._world, _own_tensors(module)
        answers = agree(
            world,
            f"state_dict of {prefix or 'a copy'}",
            [[not is_absent(t) for t in own.values()], self._given.changed()],
        )
        self._given.check(changed for _, changed in answers)
        held = [flags for flags, _ in answers]
        for index, (local, tensor) in enumerate(own.items()):
            first = next(rank for rank, flags in enumerate(held) if flags[index])
            key = prefix + local
            if first != 0 or self._on_all_ranks():
                state[key] = self._from_rank(first, tensor, tensor)
                self._given.note((id(module), local), key, state[key])
            elif world.rank == 0 and sum(flags[index] for flags in held) > 1:
                state[key] = with_changes_of_its_own(state[key])
                self._given.note((id(module), local), key, state[key])
            if world.rank != 0 and not self._on_all_ranks():
                state.pop(key, None)

    def before_load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any
    ) -> None:
        """Ranks that pass nothing get rank 0's values. Collective."""
        world, own = self._world, _own_tensors(module)
        given = agree(
            world, f"load_state_dict of {prefix or 'a copy'}", [prefix + local in state for local in own]
        )
        for index, (local, tensor) in enumerate(own.items()):
            key = prefix + local
            self._given.loaded((id(module), local), (flags[index] for flags in given))
            if given[0][index] and not all(flags[index] for flags in given):
                state[key] = self._from_rank(0, tensor, state.get(key, tensor))
            if is_absent(tensor) and key in state and state[key].shape == tensor.shape:
                state[key] = tensor

    def _from_rank(self, root: int, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with exchanging(self._world):
            return value_of_rank(self._world, root, tensor, value)


def is_copy(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is a copy of one whose parameters are spread over ranks; the same on all ranks."""
    found = (hook for module in model.modules() for hook in state_dict_hooks(module))
    return any(isinstance(hook, StateHook) and hook.is_of_copy() for hook in found)


def value_of_rank(
    world: World, root: int, tensor: torch.Tensor, value: torch.Tensor | None = None
) -> torch.Tensor:
    """The ``value`` of one rank, on the CPU of all; elsewhere only the shape and dtype of ``tensor`` matter. Collective.

    Args:
        value: None: ``tensor`` itself.
    """
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
    if world.rank == root:
        buffer.copy_((tensor if value is None else value).detach())
    if world.size > 1:
        world.transport.broadcast(buffer, root, tuple(range(world.size))).wait()
    return buffer.cpu()


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """What ``state_dict`` has of the module itself."""
    found = {**module._parameters, **module._buffers}
    return {
        name: tensor
        for name, tensor in found.items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


def all_names(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]


def complete(root: nn.Module, owners: Mapping[str, Ranks], world: World) -> dict[str, Ranks]:
    everyone = tuple(range(world.size))
    found = [*root.named_parameters(), *root.named_buffers()]
    # Dynamo looks at the values of floating-point scalars, wherever they are.
    alike = {
        name
        for name, tensor in found
        if tensor.dim() == 0 and not isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    }
    return {name: everyone if name in alike else tuple(owners.get(name, everyone)) for name, _ in found}


def no_value(name: str, tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError(f"nobody has a value for {name}")


def size_in_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def wait_all(works: list[Any]) -> None:
    """Wait for messages, and forget them."""
    for work in works:
        work.wait()
    works.clear()
