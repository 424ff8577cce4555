"""Parts of a model whose code decides by values that are known only when it runs (a loop over the experts that have
tokens, `tolist()` as sizes, a search that ends when it has converged): they stay whole, and run as written.

In: a run of the forward that has failed so, and in which modules. Out: which modules to keep in the next run, whose calls
are operators (`kept_operators.py`). What rows are inside of one is not known, so samples meet there (passes/batch),
unless the class is declared row-wise: a step runs as one micro-batch on one replica, exactly.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx, nn

from rannc_backend.capture.nonstrict.arguments import BatchSize
from rannc_backend.capture.nonstrict.kept_operators import called_whole
from rannc_backend.capture.nonstrict.swapping import AttributeReadError, Attributes, hide
from rannc_backend.errors import DataDependentControlFlowError, ModelError, UnsupportedModelError
from rannc_backend.passes.kept_functions import operator_code
from rannc_backend.passes.plain_numbers import number_at, without_modes

logger = logging.getLogger(__name__)

WHOLE_MODEL = "the model"  # in place of a path
_MAX_KEPT = 8
_HALF = 3  # rows of a made-up batch
_MAX_MADE_UP = 1_000_000  # elements of a tensor that are each a number of its own
_TOLERANCE = 1e-4


class KeptModules:
    """Which modules of a model stay whole, and which code of it has failed.

    Attributes:
        names: of those that were called as operators, with their classes.
        is_inside: whether one of them runs now.
        all_rows: whether all arguments as long as the batch have its rows, also where the code makes a number of that.
        unread: names of attributes that the code writes and does not read, where nothing is kept.
        attributes: that the kept modules set, by their paths.
    """

    def __init__(
        self, root: nn.Module, *, all_rows: bool = False, unread: frozenset[str] = frozenset()
    ) -> None:
        self._root, self.all_rows, self.unread = root, all_rows, unread
        self._paths = {id(part): name for name, part in root.named_modules()}
        self._kept: set[object] = set()
        self._refused: set[object] = set()
        self._raised: dict[int, tuple[BaseException, list[nn.Module]]] = {}  # by id of the error
        self._asked: dict[str, tuple[nn.Module, ...]] = {}
        self._first: ModelError | None = None
        self._refusal: ModelError | None = None  # of the last module that could not be kept
        self.is_inside = False
        self._batch: BatchSize | None = None
        self.names: dict[str, str] = {}
        self.attributes: dict[str, Attributes] = {}
        self._hidden: dict[str, Callable[[], None]] = {}

    @contextlib.contextmanager
    def running(self, batch: BatchSize | None = None) -> Iterator[None]:
        """Around a run; attributes that kept modules set have no value for other code in it, and what they had after it."""
        self._batch = batch or self._batch
        try:
            yield
        finally:
            self._show(*self._hidden)

    def _show(self, *paths: str) -> None:
        for path in paths:
            if path in self._hidden:
                self._hidden.pop(path)()

    def note(self, location: str, modules: Sequence[nn.Module]) -> None:
        """A value was asked for at this line, within these modules, the outermost first."""
        self._asked[location] = tuple(reversed(modules))

    def calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`nn.Module.__call__` of this thread; below it lies the user's code."""
        thread = threading.get_ident()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(module, *args, **kwargs)
            return self._called(original, module, args, kwargs)

        return call

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of the model itself. Not its call, which may be compiled."""
        if _key(self._root) in self._kept:
            return self._called(nn.Module._call_impl, self._root, args, kwargs)
        return self._root._call_impl(*args, **kwargs)

    def _called(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.is_inside:
            return original(module, *args, **kwargs)
        if _key(module) in self._kept:
            path = self._paths.get(id(module)) or WHOLE_MODEL
            self.is_inside = True
            if self._batch is None:
                raise UnsupportedModelError(f"{path} runs as written, and no argument is known to have rows")
            self._show(path)
            try:
                result, self.attributes[path] = called_whole(module, path, args, kwargs, self._batch)
            except UnsupportedModelError as error:
                self._refusal = error
                self._kept.discard(_key(module))
                self._refused.add(_key(module))
                raise
            finally:
                self.is_inside = False
            self._hidden[path] = hide(self.attributes[path])
            self.names[path] = type(module).__name__
            return result
        try:
            return original(module, *args, **kwargs)
        except Exception as error:
            self._raised.setdefault(id(error), (error, []))[1].append(module)
            raise

    def extended(self, error: ModelError) -> bool:
        """Whether the forward may run with one more class of modules kept, after this error."""
        self._first = self._first or error
        self.names.clear()
        self.attributes.clear()
        if len(self._kept) + len(self._refused) >= _MAX_KEPT or not (
            error.needs_value or error.needs_batch_size or isinstance(error, DataDependentControlFlowError)
        ):
            return False
        modules = self._modules_of(error)
        self._raised.clear()
        for module in modules:
            key = _key(module)
            if (
                module is not self._root
                and id(module) in self._paths
                and key not in self._refused | self._kept
            ):
                self._kept.add(key)
                return True
        # Last of all the model itself: its code, and all that it calls, is one operator then.
        root = _key(self._root)
        if root not in self._refused | self._kept:
            self._kept = {root}
            return True
        return False

    def refusal(self, error: ModelError) -> ModelError:
        """What to tell the user: what failed before anything was kept."""
        return error if isinstance(error, AttributeReadError) else self._first or error

    def why(self) -> str:
        """What failed before anything was kept, or before all of the model was, and where."""
        is_whole = _key(self._root) in self._kept
        error = (self._refusal if is_whole else None) or self._first
        if error is None:
            return ""
        return error.problem + (f" at {error.location}" if error.location else "")

    def _modules_of(self, error: BaseException) -> Sequence[nn.Module]:
        cause: BaseException | None = error
        seen: set[int] = set()
        # An error that is raised again from one that it has caused is its own cause.
        while cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            if id(cause) in self._raised:
                return self._raised[id(cause)][1]
            cause = cause.__cause__
        return self._asked.get(getattr(error, "location", ""), ())


def _key(module: nn.Module) -> object:
    """All modules of a user's class are alike; those of torch's containers are not."""
    return id(module) if type(module).__module__.startswith("torch.nn") else type(module)


def computes_rows_apart(node: fx.Node, rows: sympy.Symbol, hints: Mapping[sympy.Symbol, int]) -> bool:
    """Whether a module that runs as written gives for two halves of a batch what it gives for the whole: their rows, or
    the sum or mean of numbers. Seen in a run on made-up numbers, on the CPU; False where that fails.

    ``node``: calls its operator; ``rows``: the batch size; ``hints``: of all sizes.
    """
    code = operator_code(node.target)
    if code is None:
        return False
    arguments: Any = node.args
    tensors, sizes = (
        [item.meta["val"] if isinstance(item, fx.Node) else item for item in items] for items in arguments
    )
    parts = [_whole_and_halves(tensor, rows, hints, seed) for seed, tensor in enumerate(tensors)]
    try:
        with without_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            found = [
                code.forward(
                    [made[place] for made in parts],
                    [number_at(size, {**hints, rows: number}) for size in sizes],
                )
                for place, number in enumerate((2 * _HALF, _HALF, _HALF))
            ]
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises for numbers that are not the user's
        logger.debug("a module that runs as written cannot be tried on made-up numbers: %s", error)
        return False
    return all(map(_is_put_together, *found))


def _whole_and_halves(
    tensor: torch.Tensor, rows: sympy.Symbol, hints: Mapping[sympy.Symbol, int], seed: int
) -> list[torch.Tensor]:
    """A tensor of such sizes with made-up numbers, for a small batch, and those of its halves."""
    shape, half = (
        [number_at(size, {**hints, rows: number}) for size in tensor.shape] for number in (2 * _HALF, _HALF)
    )
    generator = torch.Generator().manual_seed(seed)
    if math.prod(shape) > _MAX_MADE_UP:
        made = torch.full((), 0.01 + 0.001 * seed).to(tensor.dtype).expand(shape)
    elif tensor.is_floating_point() or tensor.is_complex():
        made = torch.randn(shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
    else:
        made = torch.randint(2, shape, generator=generator).to(tensor.dtype)
    dims = [dim for dim, (one, other) in enumerate(zip(shape, half, strict=True)) if one != other]
    if not dims:
        return [made, made, made]
    return [made, *(each.contiguous() for each in made.split(half[dims[0]], dims[0]))]


def _is_put_together(whole: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> bool:
    dims = [
        dim for dim, (one, other) in enumerate(zip(whole.shape, first.shape, strict=True)) if one != other
    ]
    eps = torch.finfo(whole.dtype).eps if whole.is_floating_point() else 0.0
    whole, first, second = (
        each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (whole, first, second)
    )
    wanted = [torch.cat([first, second], dims[0])] if dims else [(first + second) / 2, first + second]
    return any(torch.allclose(whole, each, rtol=max(_TOLERANCE, 16 * eps), equal_nan=True) for each in wanted)
