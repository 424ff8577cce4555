"""Fake values whose sizes are plain numbers: for questions whose answer does not depend on the batch size.

Also the hints themselves: numbers that no size of a graph equals by coincidence.

In: values over a symbolic batch size. Out: the same at its hint, under a fake mode of their own. Operators on
them take a third of the time that they take over symbols, and bind no symbol to anything. (Torch's own: fake
modes, a symbol's hint and the keys of autograd, seen on 2.11.0 and 2.13.0.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, statically_known_true
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from rannc_backend.passes.graph_queries import size_expression, symbols_in

_MIN_SMALL_HINT, _MIN_HINT, _MAX_HINT = 5, 53, 100_000
_AUTOGRAD_KEYS = ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView")


def plain_mode() -> FakeTensorMode:
    """A fake mode of plain sizes; only those that depend on data become symbols."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def hint_of(number: Any) -> Any:
    """The number itself, or the example that a symbolic one has; None for one that depends on data."""
    return number.node.hint if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) else number


def is_surely(condition: Any) -> bool:
    """Whether it holds for all sizes; nothing is recorded of one that may not."""
    return statically_known_true(condition)


def at_hint(value: Any, mode: FakeTensorMode) -> Any:
    """A tensor like `value` with memory of its own and without gradient, under `mode`; a number; a tuple or
    list of them.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(at_hint(item, mode) for item in value)
    if not isinstance(value, torch.Tensor):
        return hint_of(value)
    sizes, strides = (
        [_hint_or_stand_in(number) for number in numbers] for numbers in (value.shape, value.stride())
    )
    with mode, torch.no_grad():
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def _hint_or_stand_in(number: Any) -> int:
    """The hint of a size; of one that depends on data, that of what it has to be, or else any."""
    hint = hint_of(number)
    if hint is not None:
        return int(hint)
    environment = number.node.shape_env
    expression = environment.replace(number.node.expr).xreplace(hints_in(environment))
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(2))))


def hints_of(value: torch.Tensor) -> Any:
    """The hints of the symbols in a fake tensor's sizes, by symbol: the member has another name from torch 2.13
    on.
    """
    return hints_in(value.fake_mode.shape_env)  # type: ignore[attr-defined]


def rows_hint(graph_module: fx.GraphModule) -> int:
    """The smallest prime from 53 that divides no number of the graph: no size equals a multiple of it by
    coincidence.
    """
    return prime_apart_from(numbers_of(graph_module))


def numbers_of(graph_module: fx.GraphModule) -> set[int]:
    """All sizes and other integers in a graph."""
    numbers: set[int] = set()
    for node in graph_module.graph.nodes:
        pytree.tree_map_only(int, numbers.add, (node.args, node.kwargs))
        for value in pytree.tree_leaves(node.meta.get("example_value", node.meta.get("val"))):
            if isinstance(value, torch.Tensor):
                numbers.update(size for size in value.shape if isinstance(size, int))
    return numbers


def is_apart_from(hint: int, numbers: Iterable[int]) -> bool:
    """Whether a prime divides none of them."""
    return not any(number % hint == 0 for number in numbers if number)


def prime_apart_from(numbers: Iterable[int], suits: Callable[[int], bool] = bool) -> int:
    """The smallest prime from 53 that divides none of them and suits, else the largest such one below; 0 if
    there is none.
    """
    known = set(numbers)
    above = sympy.primerange(_MIN_HINT, _MAX_HINT)
    below = reversed(list(sympy.primerange(_MIN_SMALL_HINT, _MIN_HINT)))
    candidates = itertools.chain(above, below)
    return next((int(p) for p in candidates if is_apart_from(p, known) and suits(p)), 0)


def length_hints(sizes: tuple[int, ...], numbers: Collection[int]) -> Iterator[tuple[int, ...]]:
    """What may stand for lengths of these sizes in a trace: numbers that no other size equals by coincidence,
    then the sizes themselves.
    """
    known, apart = set(numbers), []
    for _ in sizes:
        apart.append(prime_apart_from(known))
        known.add(apart[-1])
    if sizes:
        yield tuple(apart)
        yield sizes


def hints_in(shape_env: Any) -> Any:
    """The hints of all symbols of an environment."""
    return getattr(shape_env, "backed_var_to_val", None) or shape_env.var_to_val


def new_size(shape_env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    """A size of its own (2 or more) with this hint, that a graph may take as an input."""
    source = ConstantSource(name)
    symbol = shape_env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    size = shape_env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(size, torch.SymInt), f"{name} is a number: {size}"
    return size


def new_number(shape_env: ShapeEnv, name: str, hint: float) -> torch.SymFloat:
    """A float with this hint, of which nothing else is known, that a graph may take as an input."""
    source = ConstantSource(name)
    symbol = shape_env.create_unspecified_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    number = shape_env.create_symfloatnode(symbol, hint=hint, source=source)
    assert isinstance(number, torch.SymFloat), f"{name} is a constant: {number}"
    return number


class NotingDraws(TorchDispatchMode):
    """Notes whether an operator draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = False

    def noted(self) -> None:
        """An operator is about to draw."""
        self.has_drawn = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _has_no_chance(func, args, kwargs):
            self.noted()
        return func(*args, **kwargs)


class RefusingDraws(NotingDraws):
    """Raises `error` where an operator draws random numbers."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def noted(self) -> None:
        raise self._error


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of the CPU and of `device` come from this seed; the user's generators stay as they are."""
    others = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(others, device_type=device.type):
        torch.default_generator.manual_seed(seed)
        if others:
            torch.get_device_module(device).manual_seed(seed)
        yield


def _has_no_chance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator that may draw drops nothing: attention in evaluation, dropout of 0."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    return any({**defaults, **given}.get(name, 1) == 0 for name in ("dropout_p", "dropout", "p"))


@contextmanager
def recording_gradients() -> Iterator[None]:
    """Operators have gradients, also in what runs below autograd, as an operator does under a mode that looks on."""
    with ExitStack() as stack:
        for name in _AUTOGRAD_KEYS:
            key = getattr(torch._C.DispatchKey, name)
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        stack.enter_context(torch.enable_grad())
        yield


def without_modes() -> AbstractContextManager[None]:
    """Operators run as they are, whatever traces or fakes them around."""
    return _disable_current_modes()


def fill_diagonal(tensor: torch.Tensor, fill_value: float, wrap: bool = False) -> torch.Tensor:
    """`Tensor.fill_diagonal_`, whose kernel takes the sizes of its operand as plain numbers."""
    numbers = [torch.arange(size, device=tensor.device) for size in tensor.shape]
    if tensor.dim() == 2:
        rows, columns = numbers
        # Behind the last column the diagonal begins again, one row further down.
        period = tensor.shape[1] + 1 if wrap else tensor.shape[0] + tensor.shape[1] + 1
        return tensor.masked_fill_((rows % period)[:, None] == columns, fill_value)
    first, *others = torch.meshgrid(*numbers, indexing="ij")
    on_diagonal = torch.stack([first == other for other in others]).all(0)
    return tensor.masked_fill_(on_diagonal, fill_value)


def numbers_at(sizes: Sequence[Any], more: int, unit: int = 1) -> dict[Any, int]:
    """A number for each symbol: its example, rounded up to a multiple of `unit`, and with `more` another one."""
    environments = {size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)}
    hints = {symbol: hint for environment in environments for symbol, hint in hints_in(environment).items()}
    ordered = sorted(symbols_in(sizes) & hints.keys(), key=str)
    return {
        symbol: (-(-int(hints[symbol]) // unit) * (1 + more) + more * (1 + 2 * place)) * unit
        for place, symbol in enumerate(ordered)
    }


def number_at(size: Any, numbers: Mapping[Any, int]) -> int:
    """A size with these numbers in place of its symbols."""
    return int(size_expression(size).xreplace(numbers))


def made_up(value: torch.Tensor, numbers: dict[Any, int], place: int, is_parameter: bool) -> torch.Tensor:
    """A tensor of such sizes on the CPU; of a parameter one number alone, since it may be large, and to each its own,
    since an average of equal ones changes nothing.
    """
    shape = [number_at(size, numbers) for size in value.shape]
    if is_parameter and value.is_floating_point():
        made = torch.full((), 0.01 + 0.001 * (place % 64), dtype=value.dtype).expand(shape)
    elif value.is_floating_point() or value.is_complex():
        made = torch.linspace(0.1, 1.0, math.prod(shape), dtype=torch.float64).to(value.dtype).view(shape)
    else:
        made = torch.full(shape, value.dtype is torch.bool, dtype=value.dtype)
    return made.requires_grad_(value.requires_grad)


@dataclass(frozen=True, slots=True)
class ShownSize:
    """A size of a result: a constant, or so many times the size of a dimension of an argument."""

    factor: Fraction
    place: tuple[int, int] | None = None

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """At these arguments."""
        if self.place is None:
            return int(self.factor)
        size = tensors[self.place[0]].shape[self.place[1]]
        return size * self.factor.numerator // self.factor.denominator


def shown_size(
    pair: tuple[int, int], first: Sequence[torch.Tensor], other: Sequence[torch.Tensor]
) -> ShownSize | None:
    """What two runs, on the arguments `first` and `other`, have shown of a size; None where it is neither kind."""
    if pair[0] == pair[1]:
        return ShownSize(Fraction(pair[0]))
    for index, (one, two) in enumerate(zip(first, other, strict=True)):
        for dim, sizes in enumerate(zip(one.shape, two.shape, strict=True)):
            if sizes[0] != sizes[1] and pair[0] * sizes[1] == pair[1] * sizes[0]:
                return ShownSize(Fraction(pair[0], sizes[0]), (index, dim))
    return None


Work = Callable[[], tuple[int, int]]


@contextmanager
def counting_work(inputs: Sequence[torch.Tensor], *, takes_hooks: bool = True) -> Iterator[Work]:
    """Gives a function that says how many FLOPs are done, and how many bytes are kept for a gradient, but for those of
    the inputs.

    `takes_hooks`: False for code with transforms of torch.func, which take neither hooks of saved tensors nor
    torch's own counter (seen on torch 2.13.0): the bytes are then all that operators make.
    """
    if not takes_hooks:
        with _CountingMade() as made:
            yield lambda: (made.num_flops, made.num_bytes)
        return
    with FlopCounterMode(display=False) as counter, _counting_saved(inputs) as saved:
        yield lambda: (counter.get_total_flops(), sum(saved.values()))


class _CountingMade(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_flops = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if count := flop_registry.get(func.overloadpacket):
            self.num_flops += count(*args, **kwargs, out_val=result)
        if not func.is_view and not func._schema.is_mutable:
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.num_bytes += sum(tensor.nbytes for tensor in made)
        return result


@contextmanager
def _counting_saved(inputs: Sequence[torch.Tensor]) -> Iterator[dict[int, int]]:
    """Bytes by where they lie."""
    own = {tensor.untyped_storage()._cdata for tensor in inputs}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def needs_gradient(value: object) -> bool:
    """Whether a tensor in nested containers has one."""
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(value))
