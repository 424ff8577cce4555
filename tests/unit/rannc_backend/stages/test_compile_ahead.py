"""What the C++ compiler does ahead is what Inductor asks for later, to the letter; seen on torch 2.13."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from rannc_backend import backend
from rannc_backend.errors import UserInputError
from rannc_backend.runtime.world import World
from rannc_backend.stages import compile_ahead
from rannc_backend.stages.compile_ahead import begin_header, begin_kernel, kernels_ahead

KERNEL = "async_compile.cpp_pybinding(['float*'], r'''\nint a = '\\n';\n''')\n"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(
        AsyncCompile, "cpp_pybinding", lambda self, types, source: calls.append((types, source))
    )
    monkeypatch.setattr(compile_ahead, "get_compile_threads", lambda: 2)
    return calls


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
        AsyncCompile,
        "cpp_pybinding",
        lambda self, types, source: seen.append(config.cpp.enable_unsafe_math_opt_flag),
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
    before = PythonWrapperCodegen.define_kernel
    with kernels_ahead():
        PythonWrapperCodegen.define_kernel(None, "first", KERNEL, gpu=False)
    assert PythonWrapperCodegen.define_kernel is before
    compile_ahead._thread().submit(lambda: None).result(30)  # after the kernel, in the one thread
    assert written == ["first"]
    assert len(begun) == 1


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
