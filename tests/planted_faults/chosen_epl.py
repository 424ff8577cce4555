"""Faults that somebody thought of, in EPL's words and in the options and functions that they need."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.fault import Fault

_CONFIG = unit("epl/config")
_JOB = unit("epl/job")


def _epl(*cases: str) -> tuple[str, ...]:
    return tuple(f"tests/distributed/test_epl.py::test_what_else_it_does[{case}]" for case in cases)


def _sparse(*cases: str) -> tuple[str, ...]:
    return tuple(f"tests/distributed/test_sparse.py::test_sparse_gradients[{case}]" for case in cases)


_ROWS = "runtime/gradients/sparse_rows.py"
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
            "capture/graph.py",
            'if of_tables == "dense":',
            "if True:",
            _epl("sparse"),
        ),
        (
            "rows-of-ranks-in-one-place",
            _ROWS,
            "begins = counts[:place].sum(0).tolist()",
            "begins = counts[:0].sum(0).tolist()",
            _sparse("trains-2"),
        ),
        (
            "rows-of-the-last-micro-batch-alone",
            _ROWS,
            "self._kept.setdefault(name, []).append((index.long(), wide))",
            "self._kept[name] = [(index.long(), wide)]",
            _sparse("trains-1-sgd"),
        ),
        (
            "rows-of-the-padding",
            "kernels/gradient_writes.py",
            "counts = numbers != padding_index if mask is None",
            "counts = numbers == numbers if mask is None",
            ("tests/unit/passes/stage/test_gradient_buckets.py",),
        ),
        (
            "a-table-that-others-read-too",
            "capture/inputs.py",
            "if set(table.users) == set(readers)",
            "if readers",
            _sparse("tied-2"),
        ),
        (
            "rows-for-all-under-zero",
            _ROWS,
            "if takers and self.rank not in takers:",
            "if False:",
            unit("runtime/gradients/sparse_rows"),
        ),
        (
            "rows-for-others-than-the-updaters",
            _ROWS,
            "start_reduce(of_all, ranks, takers)",
            "start_reduce(of_all, ranks, ranks[:1])",
            _sparse("trains-2-zero1"),
        ),
        (
            "rows-that-are-not-flat",
            "runtime/gradients/bucket_reductions.py",
            "        buffer = buffer.view(-1)\n",
            "",
            _sparse("wires-2"),
        ),
        (
            "items-checked-late",
            "epl/config.py",
            "check_translated(self.options(), items_of, given",
            "print(self.options(), items_of, given",
            _CONFIG,
        ),
        (
            "padding-in-a-bag",
            "capture/written_out.py",
            "torch.where(counts.unsqueeze(-1), rows, 0.0)",
            "torch.where(counts.unsqueeze(-1) | True, rows, 0.0)",
            unit("capture/written_out"),
        ),
        (
            "a-counter-of-micro-batches",
            "passes/stage/split_stages.py",
            "or _module_of(fqn) not in modules",
            "or False",
            ("tests/distributed/test_buffers.py::test_buffers_that_a_model_changes[counting_wholes]",),
        ),
    )
)
