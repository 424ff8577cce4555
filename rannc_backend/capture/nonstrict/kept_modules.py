"""Parts of a model whose code decides by values that are known only when it runs (a loop over the experts that have
tokens, `tolist()` as sizes, a search that ends when it has converged): they stay whole, and run as written.

In: a run of the forward that has failed so, and in which modules. Out: which modules to keep in the next run, whose calls
are operators (`kept_operators.py`). What rows are inside of one is not known, so samples meet there (passes/batch),
unless the class is declared row-wise: a step runs as one micro-batch on one replica, exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from rannc_backend.capture.nonstrict.arguments import BatchSize
from rannc_backend.capture.nonstrict.kept_operators import called_whole
from rannc_backend.errors import DataDependentControlFlowError, ModelError, UnsupportedModelError

WHOLE_MODEL = "the model"  # in place of a path
_MAX_KEPT = 8


class KeptModules:
    """Which modules of a model stay whole, and which code of it has failed.

    Attributes:
        names: of those that were called as operators, with their classes.
        is_inside: whether one of them runs now.
        all_rows: whether all arguments as long as the batch have its rows, also where the code makes a number of that.
    """

    def __init__(self, root: nn.Module, *, all_rows: bool = False) -> None:
        self._root, self.all_rows = root, all_rows
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

    def begin(self, batch: BatchSize) -> None:
        """Before a run."""
        self._batch = batch

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
            assert self._batch is not None, "a run has begun"
            try:
                result = called_whole(module, path, args, kwargs, self._batch)
            except UnsupportedModelError as error:
                self._refusal = error
                self._kept.discard(_key(module))
                self._refused.add(_key(module))
                raise
            finally:
                self.is_inside = False
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
        return self._first or error

    def why(self) -> str:
        """What failed before anything was kept, or before all of the model was, and where."""
        is_whole = _key(self._root) in self._kept
        error = (self._refusal if is_whole else None) or self._first
        if error is None:
            return ""
        return error.problem + (f" at {error.location}" if error.location else "")

    def _modules_of(self, error: BaseException) -> Sequence[nn.Module]:
        cause: BaseException | None = error
        while cause is not None:
            if id(cause) in self._raised:
                return self._raised[id(cause)][1]
            cause = cause.__cause__
        return self._asked.get(getattr(error, "location", ""), ())


def _key(module: nn.Module) -> object:
    """All modules of a user's class are alike; those of torch's containers are not."""
    return id(module) if type(module).__module__.startswith("torch.nn") else type(module)
