"""Faults that somebody thought of, in EPL's words and in the options and functions that they need."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault

_CONFIG = unit("epl/config")
_JOB = unit("epl/job")


def _epl(*cases: str) -> tuple[str, ...]:
    return tuple(f"tests/distributed/test_epl.py::test_what_else_it_does[{case}]" for case in cases)


CHOSEN_EPL: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "scale-of-float16-left-out",
            "epl/config.py",
            "float(scale) if scale > 0 else _NO_SCALE",
            "_NO_SCALE",
            _CONFIG,
        ),
        (
            "a-dict-below-the-environment",
            "epl/config.py",
            "given[known] =",
            "given.setdefault(known, None); _ =",
            _CONFIG,
        ),
        (
            "automatic-whatever-is-said",
            "epl/config.py",
            'get("auto.auto_parallel") is False',
            'get("no") is False',
            _CONFIG,
        ),
        (
            "differences-in-silence",
            "settings/sources.py",
            "remarks=tuple(options.notices())",
            "remarks=tuple([])",
            _CONFIG,
        ),
        (
            "defaults-for-models-of-before",
            "session_registry.py",
            "if self.defaults is None or",
            "if True or",
            _JOB,
        ),
        (
            "defaults-over-options",
            "settings/sources.py",
            "{**self.below.options(), **plain_options(self.above)}",
            "{**plain_options(self.above), **self.below.options()}",
            _JOB,
        ),
        (
            "autocast-over-the-scripts-own",
            "compiled_call.py",
            "if torch.is_autocast_enabled(device_type):",
            "if False:",
            _JOB,
        ),
        ("no-autocast", "compiled_call.py", 'if config.autocast == "none":', "if True:", _epl("amp_fixed")),
        (
            "a-fixed-scale-that-falls",
            "epl/job.py",
            "self.get_scale() if new_scale is None else new_scale",
            "new_scale",
            _JOB,
        ),
        (
            "devices-changed-under-cuda",
            "runtime/comm/device_connections.py",
            "    if context_exists:\n        raise",
            "    if False:\n        raise",
            unit("runtime/comm/device_connections"),
        ),
        ("files-in-a-row", "api/data_slices.py", ": num_ranks])", ":])", unit("api/data_slices")),
        (
            "a-sample-twice",
            "api/data_slices.py",
            "self.rank * each + min(self.rank, more)",
            "self.rank * each",
            unit("api/data_slices"),
        ),
        (
            "an-empty-batch",
            "api/data_slices.py",
            "missing = max(self.num_ranks - rest, 0)",
            "missing = 0",
            unit("api/data_slices"),
        ),
        (
            "any-placement",
            "planner/search/moves.py",
            'return preferred == "auto" or placement == preferred',
            "return True",
            unit("planner/search/placement"),
        ),
        (
            "sparse-gradients-that-nobody-asked-to-be-dense",
            "backend.py",
            'if resolution.config.sparse_gradients == "refuse":',
            "if False:",
            _epl("sparse"),
        ),
    )
)
