"""What the C++ compiler does ahead is what Inductor asks for later, to the letter; seen on torch 2.13."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import async_compile, config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from rannc_backend import backend
from rannc_backend.errors import UserInputError
from rannc_backend.runtime.world import World
from rannc_backend.stages import compile_ahead
from rannc_backend.stages.compile_ahead import ask_for, begin_header, compile_together, kernels_ahead
from rannc_backend.stages.quicker_compiler import quicker_compilation

KERNEL = "async_compile.cpp_pybinding(['float*'], r'''\nint a = '\\n';\n''')\n"
KERNEL_OF = (
    "async_compile.cpp_pybinding(['float*', 'const int64_t'], r'''\n"
    "#include <torch/csrc/inductor/cpp_prefix.h>\n%s"
    'extern "C"  void  kernel(float* out_ptr0, const int64_t ks0)\n'
    "{{ for (int64_t i = 0; i < ks0; ++i) out_ptr0[i] = {}; }}\n''')\n"
)
FORMULAS = ("2 * out_ptr0[i]", "std::exp(out_ptr0[i])", "out_ptr0[i] + i", "kernel_of_a_name(out_ptr0[i])")
DEFINITIONS = tuple((KERNEL_OF % "").format(formula) for formula in FORMULAS[:3])


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def load(types: Any, source: Any, *, submit_fn: Any) -> Any:
        calls.append((types, source))
        return lambda: None

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding_async", load)
    for module in (compile_ahead, async_compile):
        monkeypatch.setattr(module, "get_compile_threads", lambda: 2)
    return calls


def begin_kernel(definition: str) -> Future[None] | None:
    return compile_ahead._Kernels().begin(definition)


def test_a_kernel_is_what_inductors_code_will_ask_for(begun: list[Any]) -> None:
    work = begin_kernel(KERNEL)
    assert work is not None
    work.result(30)
    eval(KERNEL.strip(), {"async_compile": AsyncCompile()})
    assert begun[0] == begun[1] == (["float*"], "\nint a = '\\n';\n")


def test_kernels_of_other_devices_are_left_to_inductor(begun: list[Any]) -> None:
    assert begin_kernel("async_compile.triton('kernel', '''...''')") is None
    assert not begun


def test_one_compiler_thread_begins_nothing(begun: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "get_compile_threads", lambda: 1)
    assert begin_header() is None
    assert begin_kernel(KERNEL) is None
    assert not begun


def test_a_failure_is_left_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, types: Any, source: Any) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", fail)
    monkeypatch.setattr(compile_ahead, "get_compile_threads", lambda: 2)
    work = begin_header()
    assert work is not None
    assert work.result(30) is None


def test_settings_of_the_caller_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        CppPythonBindingsCodeCache,
        "load_pybinding_async",
        lambda types, source, submit_fn: seen.append(config.cpp.enable_unsafe_math_opt_flag),
    )
    monkeypatch.setattr(compile_ahead, "get_compile_threads", lambda: 2)
    with config.patch({"cpp.enable_unsafe_math_opt_flag": True}):
        work = begin_kernel(KERNEL)
    assert work is not None
    work.result(30)
    assert seen == [True]


def test_kernels_are_begun_when_they_are_written(begun: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(
        PythonWrapperCodegen, "define_kernel", lambda self, name, body, **rest: written.append(name)
    )
    before = PythonWrapperCodegen.define_kernel, AsyncCompile.cpp_pybinding
    with kernels_ahead():
        PythonWrapperCodegen.define_kernel(None, "first", KERNEL, gpu=False)
    assert before == (PythonWrapperCodegen.define_kernel, AsyncCompile.cpp_pybinding)
    compile_ahead._thread(os.getpid()).submit(lambda: None).result(30)  # after the kernel, in the one thread
    assert written == ["first"]
    assert len(begun) == 1


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Inductor's cache is empty; the sources that the compiler is called with."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for module in (compile_ahead, async_compile):
        monkeypatch.setattr(module, "get_compile_threads", lambda: 2)
    calls: list[str] = []
    run: Callable[..., Any] = subprocess.run

    def counted(command: Any, *args: Any, **rest: Any) -> Any:
        if "-shared" in command:
            calls.extend(Path(word).name for word in command if str(word).endswith(".cpp"))
        return run(command, *args, **rest)

    with quicker_compilation():
        CppPythonBindingsCodeCache.load_pybinding(*compile_ahead.KERNEL_WITH_VECTORS)  # the header
        monkeypatch.setattr(subprocess, "run", counted)
        yield calls
    CppPythonBindingsCodeCache.cache_clear()  # of libraries that are gone


def _results(definitions: tuple[str, ...]) -> list[torch.Tensor]:
    found = []
    for definition in definitions:
        kernel = eval(definition.strip(), {"async_compile": AsyncCompile()}).result()
        values = torch.arange(4, dtype=torch.float32)
        kernel(values, 3)
        found.append(values)
    return found


def _are_right(found: list[torch.Tensor]) -> bool:
    values = torch.arange(4, dtype=torch.float32)
    expected = [2 * values, values.exp(), values + torch.arange(4)]
    return all(
        torch.equal(left[3:], values[3:]) and torch.allclose(left[:3], right[:3], rtol=1e-6)
        for left, right in zip(found, expected, strict=True)
    )


def _inodes(folder: Path) -> list[int]:
    return [path.stat().st_ino for path in folder.glob("*/*.main.so")]


def test_kernels_are_compiled_together(compiled: list[str], tmp_path: Path) -> None:
    before = set(_inodes(tmp_path))
    asked: list[compile_ahead.Asked] = []
    for definition in DEFINITIONS:
        ask_for(definition, asked)
    compile_together(asked)
    assert _are_right(_results(DEFINITIONS))
    assert compiled == ["kernels.cpp"], "seen on torch 2.13"
    new = [inode for inode in _inodes(tmp_path) if inode not in before]
    assert len(new) == 3 and len(set(new)) == 1, "one library under three names"
    assert not list(tmp_path.glob("*/rannc_kernels_*")), "nothing else is left"


def test_kernels_written_while_the_compiler_works_are_compiled_together(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PythonWrapperCodegen, "define_kernel", lambda self, name, body, **rest: None)
    works = threading.Event()
    with kernels_ahead():
        compile_ahead._thread(os.getpid()).submit(works.wait, 60)
        for definition in DEFINITIONS:
            PythonWrapperCodegen.define_kernel(None, "name", definition, gpu=False)
        threading.Timer(0.2, works.set).start()
        assert _are_right(_results(DEFINITIONS))  # asks for them before the compiler has begun
    assert compiled == ["kernels.cpp"]


def test_a_kernel_with_headers_of_its_own_is_compiled_alone(compiled: list[str]) -> None:
    own = (KERNEL_OF % "#include <vector>\n").format(FORMULAS[2])
    definitions = (*DEFINITIONS[:2], own)
    asked: list[compile_ahead.Asked] = []
    for definition in definitions:
        ask_for(definition, asked)
    compile_together(asked)
    assert _are_right(_results(definitions))
    assert sorted(compiled)[-1] == "kernels.cpp" and len(compiled) == 2


def test_kernels_that_do_not_compile_together_are_compiled_alone(compiled: list[str]) -> None:
    broken = (KERNEL_OF % "").format(FORMULAS[3])
    asked: list[compile_ahead.Asked] = []
    for definition in (*DEFINITIONS, broken):
        ask_for(definition, asked)
    compile_together(asked)
    assert _are_right(_results(DEFINITIONS))
    with pytest.raises(Exception, match="kernel_of_a_name"):
        _results((broken,))
    # Each is compiled at once, and the broken one where Inductor asks for it again.
    assert compiled[0] == "kernels.cpp" and len(set(compiled)) == 5 and len(compiled) == 6


def test_a_call_that_takes_too_long_is_ended_and_kernels_are_compiled_alone(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Callable[..., Any] = subprocess.run

    def hang(command: Any, *args: Any, **rest: Any) -> Any:
        is_joint = any(str(word).endswith("kernels.cpp") for word in command)
        return run(["sleep", "60"] if is_joint else command, *args, **rest)

    monkeypatch.setattr(subprocess, "run", hang)
    monkeypatch.setattr(compile_ahead, "_LIMIT_SECONDS", 0.5)
    asked: list[compile_ahead.Asked] = []
    for definition in DEFINITIONS:
        ask_for(definition, asked)
    compile_together(asked)
    assert _are_right(_results(DEFINITIONS)) and len(set(compiled)) == len(compiled) == 3


def test_without_links_a_library_is_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*paths: Any) -> None:
        raise OSError("no links here")

    library, target = tmp_path / "kernels.so", tmp_path / "first.main.so"
    library.write_bytes(b"code")
    monkeypatch.setattr(os, "link", refuse)
    compile_ahead._put(library, target)
    assert target.read_bytes() == library.read_bytes() == b"code"
    assert len(list(tmp_path.iterdir())) == 2


def test_inductor_by_choice_is_begun_before_the_model_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[set[str]] = []
    phases: list[str] = []

    def capture(*arguments: Any, **rest: Any) -> Any:
        phases.append(f"captured after {len(begun)}")
        raise UserInputError("no further", cure="none.")

    monkeypatch.setattr(backend, "begin_compiling", begun.append)
    monkeypatch.setattr(backend.capture, "capture_or_restart", capture)
    for compiler in ("inductor", "eager", "auto"):
        begun.clear()
        torch._dynamo.reset()
        model = torch.compile(nn.Linear(2, 2), backend="rannc", options={"stage_compiler": compiler})
        with pytest.raises(UserInputError, match="no further"):
            model(torch.ones(3, 2))
        assert begun == ([{"cpu"}] if compiler == "inductor" else [])
    assert phases == ["captured after 1", "captured after 0", "captured after 0"]


def test_one_rank_of_each_host_has_least_to_do() -> None:
    hosts = ("one", "one", "one", "two", "three", "three")
    found = [
        World.has_least_to_do(SimpleNamespace(rank=rank, local_rank=local, hosts=hosts))  # type: ignore[arg-type]
        for rank, local in enumerate((0, 1, 2, 0, 0, 1))
    ]
    assert found == [False, True, False, True, False, True]
