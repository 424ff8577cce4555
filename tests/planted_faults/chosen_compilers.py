"""Faults that somebody thought of, in what is done beside Inductor and its C++ compiler."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault

CHOSEN_COMPILERS: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "ranges-of-the-first-alone",
            "stages/quicker_compiler.py",
            "return known(self, other)",
            "return self",
            unit("stages/quicker_compiler"),
        ),
        (
            "first-instructions-always",
            "stages/quicker_compiler.py",
            "not best\n",
            "False\n",
            unit("stages/quicker_compiler"),
        ),
        (
            "instructions-tried-at-once",
            "stages/quicker_compiler.py",
            "with _trials:",
            "if True:",
            unit("stages/quicker_compiler"),
        ),
        (
            "instructions-not-tried-with-a-kernel",
            "stages/quicker_compiler.py",
            "CppPythonBindingsCodeCache.load_pybinding(*KERNEL_WITH_VECTORS)",
            "pass",
            unit("stages/quicker_compiler"),
        ),
        (
            "header-begun-by-no-rank",
            "backend.py",
            'if config.stage_compiler == "inductor" and world.has_least_to_do():',
            "if False:",
            unit("stages/compile_ahead"),
        ),
        (
            "kernels-not-begun",
            "stages/compile_ahead.py",
            "        kernels.begin(kernel_body)",
            "        pass",
            unit("stages/compile_ahead"),
        ),
        (
            "kernels-begun-with-other-settings",
            "stages/compile_ahead.py",
            "functools.partial(each.context.run, ask_for, each.definition, asked)",
            "functools.partial(ask_for, each.definition, asked)",
            unit("stages/compile_ahead"),
        ),
        (
            "kernels-compiled-one-by-one",
            "stages/compile_ahead.py",
            "if len(kernels) == 1 or",
            "if kernels or",
            unit("stages/compile_ahead"),
        ),
        (
            "one-kernel-under-all-names",
            "stages/compile_ahead.py",
            "kernels_{place}::PyInit_kernel_{place};'",
            "kernels_0::PyInit_kernel_0;'",
            unit("stages/compile_ahead"),
        ),
        (
            "kernels-with-other-headers-compiled-together",
            "stages/compile_ahead.py",
            "set(_DIRECTIVE.findall(text)) <= _HARMLESS",
            "bool(text)",
            unit("stages/compile_ahead"),
        ),
        (
            "kernels-begun-twice",
            "stages/compile_ahead.py",
            "            each.is_asked.wait()",
            "            pass",
            unit("stages/compile_ahead"),
        ),
    )
)
