"""Inductor's repeated work is spared without a change of what it finds; all places are there in torch
2.13.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
import sympy
import torch
from torch._inductor import config, cpu_vec_isa
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.codegen import common
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from rannc_backend.stages import quicker_compiler as compile_quicker
from rannc_backend.stages.quicker_compiler import quicker_compilation

PLACES = (
    (DtypePropagationOpsHandler, "__init__"),
    (ValueRanges, "tighten"),
    (cpu_vec_isa, "valid_vec_isa_list"),
)


def _there() -> list[Any]:
    return [vars(holder)[name] for holder, name in PLACES]


def test_all_is_replaced_and_goes_back() -> None:
    before = _there()
    with quicker_compilation():
        inside = _there()
        with quicker_compilation():
            assert _there() == inside
        assert _there() == inside
    assert all(now is not then for now, then in zip(inside, before, strict=True)), (
        "seen on torch 2.13: a place has moved"
    )
    assert _there() == before


def test_a_place_that_is_not_there_is_left_alone() -> None:
    compile_quicker._replace("torch._inductor.no_such_module", "name", lambda before: before)
    compile_quicker._replace(
        "torch._inductor.dtype_propagation", "DtypePropagationOpsHandler.no_such_name", lambda before: before
    )
    assert not compile_quicker._stretches.undo


def test_ranges_are_what_they_were() -> None:
    one = ValueRanges
    ranges = [
        one(0, 1), one(0, 4), one(-int_oo, 3), one(1, 1), one(0.0, 1.0), one(1.0, 1.0),
        one(sympy.false, sympy.true), one(sympy.true, sympy.true),
        ValueRanges.unknown(), ValueRanges.unknown_int(), ValueRanges.unknown_bool(),
    ]  # fmt: skip

    def outcome(left: Any, right: Any) -> Any:
        try:
            met = left.tighten(right)
        except Exception as error:
            return type(error)
        return met.lower, met.upper, met.is_int, met.is_float, met.is_bool, type(met.lower)

    pairs = list(itertools.product(ranges, repeat=2))
    expected = [outcome(*pair) for pair in pairs]
    with quicker_compilation():
        assert [outcome(*pair) for pair in pairs] == expected
        assert [outcome(*pair) for pair in pairs] == expected


def test_rules_of_result_types_are_filled_in_once_and_again_when_there_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(DtypePropagationOpsHandler, "__init__", lambda self: calls.append(self))
    with quicker_compilation():
        DtypePropagationOpsHandler()
        DtypePropagationOpsHandler()
        assert len(calls) == 1
        monkeypatch.setitem(
            common.pointwise_overrides_data, "one_more", next(iter(common.pointwise_overrides_data.values()))
        )
        DtypePropagationOpsHandler()
        assert len(calls) == 2


class _Instructions:
    def __init__(self, name: str, works: bool, tried: list[str]) -> None:
        self.name, self.works, self.tried = name, works, tried

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        if config.cpp.vec_isa_ok:
            return True  # the parts that torch tries alone: none here
        self.tried.append(self.name)
        return self.works


def _candidates(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels compile for those that work; what is tried, and with which instructions kernels compile."""
    tried: list[str] = []

    def load(types: list[str], source: str) -> None:
        (isa,) = cpu_vec_isa.valid_vec_isa_list()
        tried.append(f"kernel for {isa}")
        if not isa.works:
            raise OSError("unknown instruction")

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", load)
    names = {"absent": True, "broken": False, "best": True, "other": True}
    monkeypatch.setattr(
        cpu_vec_isa,
        "supported_vec_isa_list",
        [_Instructions(name, works, tried) for name, works in names.items()],
    )
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["broken", "best", "other"])
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: ["all"])
    monkeypatch.setattr(compile_quicker.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    return tried


def test_instructions_are_tried_from_the_best_on_until_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = _candidates(monkeypatch)
    with quicker_compilation():
        for _ in range(2):
            (found,) = cpu_vec_isa.valid_vec_isa_list()
            assert str(found) == "best"
    assert tried == ["kernel for broken", "broken", "kernel for best"]


def test_torch_tries_where_a_kernel_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = _candidates(monkeypatch)

    def fail(types: list[str], source: str) -> None:
        raise OSError("no header")

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", fail)
    with quicker_compilation():
        (found,) = cpu_vec_isa.valid_vec_isa_list()
    assert str(found) == "best"
    assert tried == ["broken", "best"]


def test_a_user_who_says_that_instructions_work_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = _candidates(monkeypatch)
    with quicker_compilation(), config.patch({"cpp.vec_isa_ok": True}):
        (found,) = cpu_vec_isa.valid_vec_isa_list()
    assert str(found) == "broken", "the first that the processor has"
    assert tried == []


def test_a_part_that_torch_tries_alone_decides_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = _candidates(monkeypatch)
    monkeypatch.setattr(_Instructions, "__bool__", lambda self: self.works)
    with quicker_compilation():
        (found,) = cpu_vec_isa.valid_vec_isa_list()
    assert str(found) == "best"
    assert tried == ["kernel for best"]


def test_instructions_are_tried_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = _candidates(monkeypatch)
    checker = cpu_vec_isa.x86_isa_checker

    def slow_checker() -> list[str]:
        time.sleep(0.2)
        return checker()

    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", slow_checker)
    with quicker_compilation():
        threads = [threading.Thread(target=cpu_vec_isa.valid_vec_isa_list) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert tried == ["kernel for broken", "broken", "kernel for best"]


def test_all_instructions_are_tried_where_the_user_asks_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = _candidates(monkeypatch)
    with quicker_compilation():
        with config.patch({"cpp.simdlen": 256}):
            assert cpu_vec_isa.valid_vec_isa_list() == ["all"]
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
        assert cpu_vec_isa.valid_vec_isa_list() == ["all"]
    assert not tried


def test_the_kernel_that_tries_instructions_compiles() -> None:
    types, source = compile_quicker.KERNEL_WITH_VECTORS
    with quicker_compilation():
        (isa,) = cpu_vec_isa.valid_vec_isa_list()
        kernel = CppPythonBindingsCodeCache.load_pybinding(types, source)
    assert isa, "seen on torch 2.13"
    values = torch.zeros(16)
    kernel(values)
    width = isa.nelements(torch.float)
    assert torch.equal(values[:width], torch.full((width,), torch.e)) and not values[width:].any()
