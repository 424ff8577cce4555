"""Spare Inductor work that it repeats with the same result, while this package compiles.

In: a stretch in which graphs are compiled. Out: the same code, made in less time, and Inductor as it was
afterwards. What is private to Inductor is replaced here, a function for each; seen on torch 2.13
(`tests/unit/rannc_backend/stages/test_quicker_compiler.py`). Where a version of torch lacks one of the
places, that one is left alone.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rannc_backend.settings import hooks

logger = logging.getLogger(__name__)

_MAX_RANGES = 16384

_lock = threading.Lock()
_trials = threading.Lock()
_tried: ContextVar[Any] = ContextVar("the vector instructions that this thread tries", default=None)

KERNEL_WITH_VECTORS = (
    ["float*"],
    "#include <torch/csrc/inductor/cpp_prefix.h>\n"
    'extern "C" void kernel(float* out_ptr0)\n{\n'
    "    at::vec::Vectorized<float>(1).exp().store(out_ptr0);\n}\n",
)
"""Its arguments and its source; it needs what all kernels share."""


@dataclass(slots=True)
class _Stretches:
    """Those that go on in this process, and how the places get back what was there."""

    running: int = 0
    undo: list[Callable[[], None]] = field(default_factory=list)


_stretches = _Stretches()


@contextmanager
def quicker_compilation() -> Iterator[None]:
    """Replace the functions below; stretches may lie within each other and in several threads."""
    with _lock:
        _stretches.running += 1
        if _stretches.running == 1:
            for replace in (_rules_once, _ranges_once, _first_instructions):
                replace()
    try:
        yield
    finally:
        with _lock:
            _stretches.running -= 1
            while not _stretches.running and _stretches.undo:
                _stretches.undo.pop()()


def _replace(module: str, path: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(what is there)`` in a place, until the stretch ends."""
    *outer, name = path.split(".")
    try:
        holder = functools.reduce(getattr, outer, importlib.import_module(module))
        before = vars(holder)[name]
    except (ImportError, AttributeError, KeyError):
        return
    _stretches.undo.append(hooks.replace("quicker compilation", holder, name, make(before)))


def _rules_once() -> None:
    """The one handler of result types fills in its rules, some hundred, at each operator of each kernel: now
    when there are other rules.
    """
    filled: dict[str, Any] = {}

    def rules() -> tuple[int, ...]:
        from torch._inductor import utils
        from torch._inductor.codegen import common

        return len(utils.op_dtype_propagation_rules), len(common.pointwise_overrides_data)

    def make(fill: Callable[[Any], None]) -> Callable[[Any], None]:
        def fill_once(self: Any) -> None:
            state = (id(self), *rules())
            if filled.get("state") != state:
                fill(self)
                filled["state"] = state

        return fill_once

    _replace("torch._inductor.dtype_propagation", "DtypePropagationOpsHandler.__init__", make)


def _ranges_once() -> None:
    """The intersection of two ranges of numbers, which never change, is worked out once; constants ask for
    the same ones all the time.
    """

    def make(intersect: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        known = functools.lru_cache(maxsize=_MAX_RANGES)(intersect)

        def tighten(self: Any, other: Any) -> Any:
            return known(self, other)

        return tighten

    _replace("torch.utils._sympy.value_ranges", "ValueRanges.tighten", make)


def _first_instructions() -> None:
    """Which vector instructions the compiler and the host have is tried from the best on, and the first is
    taken: no need to try the rest.

    Torch's own trial compiles the vector headers for some seconds and keeps nothing of it; here the trial is
    a kernel that uses them, for which the header that all kernels share is compiled and kept. Where that
    fails, torch's own trial decides. Where the user has asked for other ones than the best, all are tried.
    One thread at a time: during a trial torch changes the flags of the instructions that are tried, and two
    of them would leave them changed.
    """

    def make(try_all: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        @functools.cache
        def first() -> list[Any]:
            from torch._inductor import cpu_vec_isa

            has = cpu_vec_isa.x86_isa_checker()
            candidates = (
                isa
                for isa in cpu_vec_isa.supported_vec_isa_list
                if all(flag in has for flag in str(isa).split())
            )
            return list(next(([isa] for isa in candidates if _runs_a_kernel(isa) or isa), []))

        def valid() -> list[Any]:
            from torch._inductor import config

            best = config.cpp.simdlen is None and not os.environ.get("ATEN_CPU_CAPABILITY")
            known = getattr(try_all, "cache_info", None)
            if (
                not best
                or sys.platform != "linux"
                or platform.machine() != "x86_64"
                or (known and known().currsize)
            ):
                return try_all()
            return first()

        def one_at_a_time() -> list[Any]:
            if (tried := _tried.get()) is not None:
                return [tried]
            with _trials:
                return valid()

        return one_at_a_time

    _replace("torch._inductor.cpu_vec_isa", "valid_vec_isa_list", make)


def _runs_a_kernel(isa: Any) -> bool:
    """Whether a kernel with these instructions compiles and can be loaded, the parts that torch tries for
    them alone as well.
    """
    from torch._inductor import config
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    if not hasattr(config.cpp, "vec_isa_ok") or config.cpp.vec_isa_ok is not None:
        return False
    token = _tried.set(isa)
    try:
        with config.patch({"cpp.vec_isa_ok": True}):
            if not isa:
                return False
        CppPythonBindingsCodeCache.load_pybinding(*KERNEL_WITH_VECTORS)
    except Exception as error:  # torch's own trial tells what it is
        logger.debug("a kernel for %s does not compile: %s", isa, error)
        return False
    finally:
        _tried.reset(token)
    return True
