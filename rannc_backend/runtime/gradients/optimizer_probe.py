"""Whether an optimizer updates each parameter from that parameter alone.

In: an optimizer. Out: yes, no, or that it cannot be told. A rank steps the parameters of its own stages only;
an optimizer that looks at several parameters together (L-BFGS, SAM, Prodigy, D-Adaptation) would see a part
of them, and every rank another one.

Method. Small parameters with as many dimensions stand for the optimizer's own, in copies of it with its
settings and without its state. They are stepped together in one copy, and each one by itself in a copy of its
own, with the same gradients; and together once more, with huge gradients for one of them, which an influence
that is small otherwise would show. Equal bits mean that there was none.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch

from rannc_backend.runtime.torch_internals import unhooked_step

_NUM_STEPS = 10
_MAX_PLACES = 4
_SMALL_SIZE = 3
_HUGE = 1e4  # its square is a number in half precision's wider formats too

Step = Callable[..., Any]
"""The ``step`` of an optimizer's class, without hooks."""

Place = tuple[int, int]
"""Number of a group, and of a parameter in it."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters of all groups, in the order in which torch numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def couples_parameters(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether the update of a parameter depends on others; None where copies of the optimizer cannot be
    stepped.

    Neither the optimizer, its parameters and its state nor random generators change.

    Raises:
        AssertionError: a parameter has changed all the same: a step of the copy reached it, by a closure for
        one.
    """
    parameters = parameters_of(optimizer)
    versions = [parameter._version for parameter in parameters]
    found = _compared(optimizer)
    assert versions == [parameter._version for parameter in parameters], (
        "a copy of the optimizer has changed its parameters"
    )
    return found


def is_same_in_parts(optimizer: torch.optim.Optimizer, in_parts: Callable[[Step], Step]) -> bool:
    """Whether copies of an optimizer have equal parameters and settings, bit by bit, when they step as ``in_parts``
    makes it of their step; False where that cannot be tried.
    """
    if couples_parameters(optimizer) is not False:
        return False
    for sparse in (False, True):
        # One that wants sparse gradients says so in its own way, as above.
        with contextlib.suppress(Exception):
            return _is_same_in_parts(optimizer, in_parts, sparse=sparse)
    return False


def _is_same_in_parts(
    optimizer: torch.optim.Optimizer, in_parts: Callable[[Step], Step], *, sparse: bool
) -> bool:
    found = []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for make in (lambda step: step, in_parts):
            settings: dict[str, str] = {}

            def noting(step: Step, make: Callable[[Step], Step] = make, into: Any = settings) -> Step:
                def stepped(clone: torch.optim.Optimizer) -> None:
                    make(step)(clone)
                    into.update(_settings_of(clone))

                return stepped

            values = _run(
                optimizer,
                _places_of(optimizer),
                None,
                with_closure=False,
                sparse=sparse,
                make_step=noting,
            )
            found.append((values, settings))
    (values, settings), (others, other_settings) = found
    return settings == other_settings and all(map(torch.equal, values, others))


def _settings_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Numbers and words of an optimizer and its groups: counters are among them."""
    holders = (vars(optimizer), *optimizer.param_groups)
    return {
        f"{number} {name}": repr(value)
        for number, holder in enumerate(holders)
        for name, value in holder.items()
        if isinstance(value, int | float | str | None) or (torch.is_tensor(value) and value.numel() == 1)
    }


def _places_of(optimizer: torch.optim.Optimizer) -> list[Place]:
    # The first of every group before the second ones: groups may be treated in different ways.
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    places = [
        (group, index) for index in range(_MAX_PLACES) for group, size in enumerate(sizes) if index < size
    ]
    return places[:_MAX_PLACES]


def _compared(optimizer: torch.optim.Optimizer) -> bool | None:
    places = _places_of(optimizer)
    if len(places) < 2:
        return False
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            together = _stepped(optimizer, places)
            for number, place in enumerate(places):
                if not torch.equal(_stepped(optimizer, [place])[0], together[number]):
                    return True
                others = _stepped(optimizer, places, huge=place)
                if any(
                    not torch.equal(one, other)
                    for i, (one, other) in enumerate(zip(others, together, strict=True))
                    if i != number
                ):
                    return True
        except Exception:  # noqa: BLE001 - whatever an optimizer of the user's may raise
            return None
    return False


def optimizers_of(parameters: Sequence[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """All optimizers of this process that have one of these parameters, wrappers around others (SAM,
    Lookahead) included.
    """
    wanted = {id(parameter) for parameter in parameters}
    return [
        each
        for each in _instances(_subclasses(torch.optim.Optimizer))
        if any(id(p) in wanted for group in vars(each).get("param_groups", ()) for p in group["params"])
    ]


def _instances(classes: Set[type]) -> list[Any]:
    """All objects of these classes. They refer to their class, so the collector finds them among what does, in half the
    time that it takes to look at all objects.
    """
    return [each for each in gc.get_referrers(*classes) if type(each) in classes]


def _subclasses(cls: type) -> set[type]:
    found = {cls}
    below: list[type] = cls.__subclasses__()
    for each in below:
        found |= _subclasses(each)
    return found


def _stepped(
    optimizer: torch.optim.Optimizer, places: Sequence[Place], huge: Place | None = None
) -> list[torch.Tensor]:
    """Small parameters at these places, after some steps in a copy of the optimizer that has no others;
    ``huge``: whose gradients are.
    """
    for sparse in (False, True):
        # One that wants sparse gradients, or a closure, says so in its own way.
        with contextlib.suppress(Exception):
            return _run(optimizer, places, huge, with_closure=False, sparse=sparse)
    return _run(optimizer, places, huge, with_closure=True)


def _run(
    optimizer: torch.optim.Optimizer,
    places: Sequence[Place],
    huge: Place | None,
    *,
    with_closure: bool,
    sparse: bool = False,
    make_step: Callable[[Step], Step] = lambda step: step,
) -> list[torch.Tensor]:
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        memo.update((id(parameter), _small(parameter)) for parameter in group["params"])
    torch.manual_seed(0)
    clone = _copy_of(optimizer, memo)
    small = [clone.param_groups[group]["params"][index] for group, index in places]
    kept = {id(parameter) for parameter in small}
    for group in clone.param_groups:
        group["params"][:] = [parameter for parameter in group["params"] if id(parameter) in kept]
    clone.param_groups[:] = [group for group in clone.param_groups if group["params"]]
    for group in clone.param_groups:
        if "lr" in group:
            group["lr"] = 1.0  # a schedule may begin with nothing, and a small rate would hide an influence
    targets = [_values(place, parameter, 0) for place, parameter in zip(places, small, strict=True)]

    def closure() -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for place, parameter, target in zip(places, small, targets, strict=True):
            difference = parameter.detach() - target
            parameter.grad = difference * (1 + 10 * sum(place)) * (_HUGE if place == huge else 1.0)
            loss = loss + difference.double().square().sum()
        return loss.requires_grad_()

    # Not clone.step: schedulers give an optimizer a step of its own, which is bound to it. And without hooks
    # of all optimizers.
    step = make_step(unhooked_step(type(clone)))
    for number in range(_NUM_STEPS):
        if with_closure:
            closure()  # some expect gradients, and call the closure for those of another point
            step(clone, closure)
            continue
        for place, parameter in zip(places, small, strict=True):
            # Of different size, so that a common norm would show; of one direction, so that estimates of a
            # distance grow.
            direction = _values(place, parameter, 1) + 0.1 * _values(place, parameter, number + 2)
            grad = direction * 10.0 ** (place[0] + place[1] - 1) * (_HUGE if place == huge else 1.0)
            parameter.grad = grad.to_sparse(1) if sparse else grad
        step(clone)
    return [parameter.detach().nan_to_num() for parameter in small]


def _small(parameter: torch.Tensor) -> torch.nn.Parameter:
    shape = [min(size, _SMALL_SIZE) for size in parameter.shape]
    return torch.nn.Parameter(
        torch.zeros(shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad
    )


def _values(place: Place, parameter: torch.Tensor, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * place[0] + 10 * place[1] + number)
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def _copy_of(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy with other parameters and without state; an optimizer within it is copied alike."""
    clone = object.__new__(type(optimizer))
    memo[id(optimizer)] = clone
    for inner in _inner_optimizers(vars(optimizer).values()):
        if id(inner) not in memo:
            _copy_of(inner, memo)
    memo[id(optimizer.state)] = collections.defaultdict(dict)
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            clone.__dict__[name] = collections.OrderedDict()
            continue
        if callable(getattr(type(optimizer), name, None)):
            continue  # put over a method of its class, and bound to the optimizer
        try:
            clone.__dict__[name] = copy.deepcopy(value, memo)
        except Exception:  # noqa: BLE001 - what cannot be copied is shared
            clone.__dict__[name] = value
    return clone


def _inner_optimizers(values: Any) -> Iterator[torch.optim.Optimizer]:
    for value in values:
        if isinstance(value, torch.optim.Optimizer):
            yield value
        elif isinstance(value, list | tuple):
            yield from _inner_optimizers(value)
        elif isinstance(value, dict) and not isinstance(value, collections.defaultdict):
            yield from _inner_optimizers(list(value.values()))
