"""Begin the work of the C++ compiler before Inductor waits for it: on CPUs, in a thread of its own.

In: that a graph will be compiled for a CPU, and its kernels as Inductor writes them. Out: nothing but files
in Inductor's own caches, where it finds them later. Left alone, Inductor writes all kernels of a graph first,
with one core, and compiles them then; what all kernels share (which vector instructions there are, the
compiled header) it makes when it first asks for it. A failure here is not one: Inductor comes to the same
place by itself and tells of it. With one compiler thread (``TORCHINDUCTOR_COMPILE_THREADS=1``) nothing is
begun ahead.
"""

from __future__ import annotations

import ast
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from rannc_backend.settings import hooks
from rannc_backend.stages.quicker_compiler import KERNEL_WITH_VECTORS, quicker_compilation

logger = logging.getLogger(__name__)

_KERNEL = "async_compile.cpp_pybinding("


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="rannc_compile_ahead")


def begin_header() -> Future[None] | None:
    """Compile what all kernels share; None where that is not done ahead."""

    def compile_header() -> None:
        with quicker_compilation():
            AsyncCompile().cpp_pybinding(*KERNEL_WITH_VECTORS)

    return _begin(compile_header)


def begin_kernel(definition: str) -> Future[None] | None:
    """Compile one kernel, given by the expression that Inductor's code will evaluate; None for those of other
    devices.
    """
    if not definition.lstrip().startswith(_KERNEL):
        return None

    def compile_kernel() -> None:
        call = ast.parse(definition.strip(), mode="eval").body
        assert isinstance(call, ast.Call), definition
        AsyncCompile().cpp_pybinding(*map(ast.literal_eval, call.args))

    return _begin(compile_kernel)


def _begin(work: Callable[[], Any]) -> Future[None] | None:
    if get_compile_threads() <= 1 or inductor_config.cpp_wrapper:
        return None
    context = contextvars.copy_context()  # settings of Inductor belong to the context

    def run() -> None:
        try:
            context.run(work)
        except Exception as error:  # Inductor will meet it too
            logger.debug("not compiled ahead: %s", error)

    return _thread().submit(run)


@contextmanager
def kernels_ahead() -> Iterator[None]:
    """Kernels that Inductor writes meanwhile are compiled at once."""
    before = PythonWrapperCodegen.define_kernel

    def define_kernel(self: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> None:
        before(self, kernel_name, kernel_body, *args, **kwargs)
        begin_kernel(kernel_body)

    undo = hooks.replace("compile ahead", PythonWrapperCodegen, "define_kernel", define_kernel)
    try:
        yield
    finally:
        undo()
