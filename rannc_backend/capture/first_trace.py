"""Lets Dynamo's first trace of a frame be the one that counts: with the batch size symbolic from its start.

In: the backend, known to Dynamo. Out: at the start of each compilation of a frame for that backend, the
trace's settings are those of `capture_dynamo.symbolic_trace`; `begun_trace` gives them to the backend call.
Without this, or where it finds less than the graph shows, the backend asks for a second trace, which takes as
long as the first: nothing but time depends on it.

What is private to torch here: how the list of callbacks is cleared (seen on torch 2.11.0 and 2.13.0; see
tests/unit/rannc_backend/capture/test_first_trace.py).
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch._dynamo.callback as dynamo_callback
import torch._dynamo.config as dynamo_config
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._guards import CompileContext
from torch.utils import _pytree as pytree

from rannc_backend.capture.batch_inputs import may_be_batch
from rannc_backend.capture.dynamo import (
    MarkedLengths,
    RestartReason,
    SeenNumbers,
    guard_module_hooks,
    symbolic_trace,
)
from rannc_backend.capture.refusals import find_compilation, refuse_wrapped, told_as_they_are
from rannc_backend.ir.length import SMALLEST
from rannc_backend.settings import hooks
from rannc_backend.settings.rare_collections import begin_rare_collections

logger = logging.getLogger(__name__)

Callback = Callable[[dynamo_callback.CallbackArgs], None]

Key = TypeVar("Key", str, int)

_ATTRIBUTE = "rannc_begun_trace"  # of the context of one compilation


def begin_symbolically(
    is_ours: Callable[[object], bool],
    *,
    before: Callable[[object], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """From now on, in this process, begin traces for backends that `is_ours` knows with a symbolic batch
    size; gives what ends it.

    `before`: called at the start of each compilation for such a backend, with the model; `after`: at the end of every
    compilation.
    """

    begun: list[weakref.finalize[..., Any]] = []
    seen = SeenSizes()
    numbers: weakref.WeakKeyDictionary[Any, SeenNumbers] = weakref.WeakKeyDictionary()

    def begin(event: dynamo_callback.CallbackArgs) -> None:
        if event.callback_trigger is not dynamo_callback.CallbackTrigger.DYNAMO:
            return
        try:
            compilation = find_compilation(is_ours)
            if compilation is None:
                return
            # The context lives as long as the compilation, also where its exception is kept: settings go back
            # however it ends.
            context = CompileContext.get()
            begun.append(weakref.finalize(context, begin_rare_collections()))
            begun.append(weakref.finalize(context, guard_module_hooks()))
            if before is not None:
                told_as_they_are(compilation, before)
            refuse_wrapped(compilation)
            tensors = _tensors(compilation.variables)
            batches = [tensor for tensor in tensors.values() if may_be_batch(tensor, single=False)]
            # torch.compile(..., dynamic=False) switches that off.
            wanted = dynamo_config.automatic_dynamic_shapes
            changed = seen.changed(compilation.owner, tensors) if wanted else {}
            lengths = MarkedLengths(
                dims=tuple((tensors[place], dims) for place, dims in changed.items()),
                give_up=functools.partial(seen.give_up, weakref.ref(compilation.owner)),
                numbers=numbers.setdefault(compilation.owner, SeenNumbers()) if wanted else None,
            )
            # A batch of one row shows in the second trace, which goes on with the lengths and numbers of this one.
            if batches or wanted:
                reason = symbolic_trace(batches, lengths=lengths)
                reason.restore = weakref.finalize(context, reason.restore)
                setattr(context, _ATTRIBUTE, reason)
        except BackendCompilerFailed:
            raise
        except Exception:
            # The backend asks for a second trace.
            logger.debug("the first trace begins without a symbolic batch size", exc_info=True)

    def ended(event: dynamo_callback.CallbackArgs) -> None:
        # Contexts may be kept for longer (torch 2.14): until a collection, which would be rare.
        while begun:
            begun.pop()()
        if after is not None:
            after()

    handler = dynamo_callback.callback_handler
    return hooks.together(
        hooks.register("first trace", _lasting(handler, "start_callbacks").add, begin),
        hooks.register("first trace", _lasting(handler, "end_callbacks").add, ended),
    )


def _lasting(handler: dynamo_callback.CompilationCallbackHandler, name: str) -> _LastingCallbacks:
    callbacks = getattr(handler, name)
    if not isinstance(callbacks, _LastingCallbacks):
        callbacks = _LastingCallbacks(callbacks)
        hooks.replace("callback lists", handler, name, callbacks)
    return callbacks


class _LastingCallbacks(list[Callback]):
    """Callbacks of which ours stay when `torch._dynamo.reset` clears them: the backend stays too."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        super().__init__(callbacks)
        self.lasting: list[Callback] = []

    def add(self, callback: Callback) -> Callable[[], None]:
        self.append(callback)
        self.lasting.append(callback)

        def remove() -> None:
            self.remove(callback)
            self.lasting.remove(callback)

        return remove

    def clear(self) -> None:
        self[:] = self.lasting


def begun_trace() -> RestartReason | None:
    """To be asked in a backend call: what its frame's first trace ran under; None where nothing was begun."""
    return getattr(CompileContext.try_get(), _ATTRIBUTE, None)


def _tensors(variables: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors among the arguments that are not those of a module, by where they are."""
    leaves, _ = pytree.tree_flatten_with_path(dict(variables))
    own = {
        id(tensor)
        for _, module in leaves
        if isinstance(module, nn.Module)
        for tensor in (*module.parameters(), *module.buffers())
    }
    return {
        pytree.keystr(path): leaf
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and id(leaf) not in own
    }


class SeenSizes:
    """Sizes of arguments in the calls that were compiled so far, by model: what has changed is symbolic from then
    on, as torch has it.
    """

    def __init__(self) -> None:
        self._sizes: weakref.WeakKeyDictionary[Any, dict[tuple[Any, int, int], set[int]]] = (
            weakref.WeakKeyDictionary()
        )
        self._given_up: weakref.WeakSet[Any] = weakref.WeakSet()

    def give_up(self, owner: weakref.ref[Any]) -> None:
        """Nothing of this model is symbolic from now on: it cannot be traced so."""
        if (model := owner()) is not None:
            self._given_up.add(model)

    def changed(self, owner: object, tensors: Mapping[Key, torch.Tensor]) -> dict[Key, frozenset[int]]:
        """Dimensions behind the first that had other sizes in earlier calls, and have one that may be symbolic, by
        the keys of the tensors; notes those of this call.
        """
        if owner in self._given_up:
            return {}
        known = self._sizes.setdefault(owner, {})
        marked: dict[Key, frozenset[int]] = {}
        for place, tensor in tensors.items():
            dims = set()
            for dim, size in enumerate(tensor.shape):
                seen = known.setdefault((place, tensor.dim(), dim), set())
                seen.add(int(size))
                if dim > 0 and len(seen) > 1 and size >= SMALLEST:
                    dims.add(dim)
            if dims:
                marked[place] = frozenset(dims)
        return marked
