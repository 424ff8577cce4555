"""Begin the work of the C++ compiler before Inductor waits for it: on CPUs, in a thread of its own.

In: that a graph will be compiled for a CPU, and its kernels as Inductor writes them. Out: nothing but files
in Inductor's own caches, where it finds them later. Left alone, Inductor writes all kernels of a graph first,
with one core, and compiles them then; what all kernels share (which vector instructions there are, the
compiled header) it makes when it first asks for it. Kernels that are written while the compiler is at work are
compiled together afterwards (`compile_together`). A failure here is not one: Inductor comes to the same
place by itself and tells of it. With one compiler thread (``TORCHINDUCTOR_COMPILE_THREADS=1``) nothing is
begun ahead. What is private to Inductor was seen on torch 2.13
(`tests/unit/rannc_backend/stages/test_compile_ahead.py`).
"""

from __future__ import annotations

import ast
import contextvars
import functools
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch.utils._filelock import FileLock

from rannc_backend.settings import hooks
from rannc_backend.stages.quicker_compiler import KERNEL_WITH_VECTORS, quicker_compilation

logger = logging.getLogger(__name__)

_KERNEL = "async_compile.cpp_pybinding("
# Of a call of the compiler; and for a process that compiles the same kernel, as Inductor has it.
_LIMIT_SECONDS = 600.0

# What each kernel's file includes; a kernel that needs more is compiled alone.
_HEADERS = ("torch/csrc/inductor/cpp_prefix.h", "Python.h", "sstream", "cstdlib", "cerrno")
_DIRECTIVE = re.compile(r"^\s*#\s*(include|define|undef)\b\s*(.*?)\s*$", re.MULTILINE)
_HARMLESS = {("define", "PY_SSIZE_T_CLEAN"), *(("include", f"<{header}>") for header in _HEADERS)}

_BEGIN = "\n".join(["#define PY_SSIZE_T_CLEAN", *(f"#include <{header}>" for header in _HEADERS)])
_ONE_KERNEL = """
#define kernel kernel_{place}
#define PyInit_kernel PyInit_kernel_{place}
namespace kernels_{place} {{
{source}
}}
#undef kernel
#undef PyInit_kernel
"""
# Every kernel's name leads to this one library, which makes the module that is asked for.
_END = """
#include <cstring>
static PyObject* make_module(PyObject* spec, PyModuleDef*) {
    for (const char* attribute : {"name", "origin"}) {
        PyObject* value = PyObject_GetAttrString(spec, attribute);
        const char* text = value ? PyUnicode_AsUTF8(value) : nullptr;
        PyObject* (*make)() = nullptr;
        if (!text) PyErr_Clear();
%s
        Py_XDECREF(value);
        if (make) return make();
    }
    PyErr_SetString(PyExc_ImportError, "this library has other kernels");
    return nullptr;
}
static PyModuleDef_Slot slots[] = {
    {Py_mod_create, reinterpret_cast<void*>(make_module)},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernel", nullptr, 0, nullptr, slots, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit_kernel(void) { return PyModuleDef_Init(&definition); }
"""
_CHOICE = '        else if (std::strstr(text, "{key}.")) make = kernels_{place}::PyInit_kernel_{place};'


@functools.cache
def _thread(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="rannc_compile_ahead")


def _is_begun() -> bool:
    return get_compile_threads() > 1 and not inductor_config.cpp_wrapper


def begin_header() -> Future[None] | None:
    """Compile what all kernels share; None where that is not done ahead."""
    if not _is_begun():
        return None
    context = contextvars.copy_context()  # settings of Inductor belong to the context

    def compile_header() -> None:
        with quicker_compilation():
            AsyncCompile().cpp_pybinding(*KERNEL_WITH_VECTORS)

    return _thread(os.getpid()).submit(_quietly, functools.partial(context.run, compile_header))


def _quietly(work: Callable[[], Any]) -> None:
    try:
        work()
    except Exception as error:  # Inductor will meet it too
        logger.debug("not compiled ahead: %s", error)


@contextmanager
def kernels_ahead() -> Iterator[None]:
    """Kernels that Inductor writes meanwhile are compiled at once."""
    kernels = _Kernels()
    define, load = PythonWrapperCodegen.define_kernel, AsyncCompile.cpp_pybinding

    def define_kernel(self: Any, kernel_name: str, kernel_body: str, *args: Any, **kwargs: Any) -> None:
        define(self, kernel_name, kernel_body, *args, **kwargs)
        kernels.begin(kernel_body)

    def cpp_pybinding(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernels.wait_until_asked()
        return load(self, *args, **kwargs)

    undo = hooks.together(
        hooks.replace("compile ahead", PythonWrapperCodegen, "define_kernel", define_kernel),
        hooks.replace("compile ahead", AsyncCompile, "cpp_pybinding", cpp_pybinding),
    )
    try:
        yield
    finally:
        undo()


@dataclass(frozen=True, slots=True)
class _Written:
    """A kernel: what Inductor's code will evaluate, with the settings of then."""

    definition: str
    context: contextvars.Context
    is_asked: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class Asked:
    """A kernel that Inductor waits for: how it would compile it, and when that need not be waited for any
    longer.
    """

    work: Callable[[], Any]
    done: Future[None] = field(default_factory=Future)


class _Kernels:
    """Those of the graphs that are compiled in a stretch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Written] = []
        self._all: list[_Written] = []

    def begin(self, definition: str) -> Future[None] | None:
        """Compile one kernel, soon; None for those of other devices."""
        if not definition.lstrip().startswith(_KERNEL) or not _is_begun():
            return None
        written = _Written(definition, contextvars.copy_context())
        with self._lock:
            self._waiting.append(written)
            self._all.append(written)
        return _thread(os.getpid()).submit(self._compile_waiting)

    def wait_until_asked(self) -> None:
        """Until Inductor knows of all kernels: it would begin those again of which it does not."""
        with self._lock:
            written, self._all = self._all, []
        for each in written:
            each.is_asked.wait()

    def _compile_waiting(self) -> None:
        with self._lock:
            written, self._waiting = self._waiting, []
        asked: list[Asked] = []
        for each in written:
            try:
                _quietly(functools.partial(each.context.run, ask_for, each.definition, asked))
            finally:
                each.is_asked.set()
        compile_together(asked)


def ask_for(definition: str, asked: list[Asked]) -> None:
    """Ask Inductor for a kernel as its code will; where it has to be compiled, add that to ``asked``."""
    call = ast.parse(definition.strip(), mode="eval").body
    assert isinstance(call, ast.Call), definition

    def submit(work: Callable[[], Any]) -> Future[None]:
        asked.append(Asked(work))
        return asked[-1].done

    types, source = map(ast.literal_eval, call.args)
    CppPythonBindingsCodeCache.load_pybinding_async(types, source, submit_fn=submit)


def compile_together(asked: Sequence[Asked]) -> None:
    """Compile kernels, those with equal settings in one call of the compiler, and let Inductor go on.

    A call reads the header that all kernels share (half of the time of one kernel) and links (a third). Where it
    fails, or Inductor's work is not what was seen, each kernel is compiled as Inductor would.
    """
    groups: dict[tuple[str, ...], list[_Kernel]] = {}
    alone: list[Callable[[], Any]] = []
    try:
        for each in asked:
            kernel = _Kernel.of(each.work)
            if kernel is None:
                alone.append(each.work)
            else:
                groups.setdefault(kernel.command, []).append(kernel)
        for command, kernels in groups.items():
            if len(kernels) == 1 or not _is_made(command, kernels):
                alone.extend(kernel.work for kernel in kernels)
        wait([AsyncCompile.submit(functools.partial(_quietly, work)) for work in alone])
    finally:
        for each in asked:
            each.done.set_result(None)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What Inductor's work says of a kernel: its source, its library and what guards it, and the compiler's
    command, in which those two are `SOURCE` and `TARGET`.
    """

    work: Callable[[], Any]
    text: str
    target: Path
    lock: str
    command: tuple[str, ...]

    @classmethod
    def of(cls, work: Callable[[], Any]) -> _Kernel | None:
        """None where it cannot be compiled with others."""
        try:
            lock, (builder,) = work.args  # type: ignore[attr-defined]
            target = Path(builder.get_target_file_path())
            source = target.with_suffix(".cpp")
            names = {str(source): "SOURCE", str(target): "TARGET"}
            command = tuple(names.get(word, word) for word in shlex.split(builder.get_command_line()))
            text = source.read_text(encoding="utf-8")
        except (AttributeError, TypeError, ValueError, OSError) as error:
            logger.debug("not what Inductor was seen to compile with: %s", error)
            return None
        fits = {"SOURCE", "TARGET"} <= set(command) and set(_DIRECTIVE.findall(text)) <= _HARMLESS
        return cls(work, text, target, lock, command) if fits else None


def source_of(kernels: Sequence[tuple[str, str]]) -> str:
    """One file of C++ for kernels, each given by the part of its module's name before the dot and its source."""
    parts = [_ONE_KERNEL.format(place=place, source=text) for place, (_, text) in enumerate(kernels)]
    choices = [_CHOICE.format(place=place, key=key) for place, (key, _) in enumerate(kernels)]
    return "".join([_BEGIN, *parts, _END % "\n".join(choices)])


def _is_made(command: Sequence[str], kernels: Sequence[_Kernel]) -> bool:
    """Whether one library now stands for all of these kernels."""
    try:
        _make_library(command, kernels)
    except Exception as error:  # the compiler's, and the file system's
        said = getattr(error, "stderr", None) or b""  # None where it has taken too long
        logger.debug("not compiled together: %s %s", error, said[-1000:])
        return False
    return True


def _make_library(command: Sequence[str], kernels: Sequence[_Kernel]) -> None:
    with tempfile.TemporaryDirectory(prefix="rannc_kernels_", dir=kernels[0].target.parent) as folder:
        source, target = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
        keys = [kernel.target.name.split(".")[0] for kernel in kernels]
        source.write_text(
            source_of(list(zip(keys, (kernel.text for kernel in kernels), strict=True))), "utf-8"
        )
        names = {"SOURCE": str(source), "TARGET": str(target)}
        # Warnings are for nobody here, and there are a thousand in torch's header.
        call = [*(names.get(word, word) for word in command), "-w"]
        subprocess.run(call, cwd=folder, check=True, capture_output=True, timeout=_LIMIT_SECONDS)
        for kernel in kernels:
            with FileLock(kernel.lock, timeout=_LIMIT_SECONDS):
                if not kernel.target.exists():
                    _put(target, kernel.target)


def _put(library: Path, target: Path) -> None:
    """Give a library another name, at once, so that nobody sees half of it."""
    try:
        os.link(library, target)
    except OSError:  # a file system without links
        copy = library.with_name(target.name)
        shutil.copy2(library, copy)
        os.replace(copy, target)
