"""Where faults are drawn, how many per file, and which tests must notice them: a file's own unit tests, then
cases over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.planted_faults.drawing import draw
from tests.planted_faults.fault import Fault
from tests.planted_faults.tree import repository_file

SEED = 20261123


def _test_file(folder: str, name: str) -> str:
    *inner, last = name.split("/")
    return "/".join([folder, *inner, f"test_{last}.py"])


def unit(*names: str) -> tuple[str, ...]:
    """Files of tests/unit/rannc_backend."""
    return tuple(_test_file("tests/unit/rannc_backend", name) for name in names)


def passes(*names: str) -> tuple[str, ...]:
    """Files of tests/unit/passes."""
    return tuple(_test_file("tests/unit/passes", name) for name in names)


def point(*names: str) -> tuple[str, ...]:
    """Single points of the contract over ranks."""
    return tuple(f"tests/distributed/test_contract.py::test_point[{name}]" for name in names)


def equal(*names: str) -> tuple[str, ...]:
    """Cases of the contract that equal one process."""
    return tuple(f"tests/distributed/test_contract.py::test_equals_one_process[{name}]" for name in names)


def trained(*names: str) -> tuple[str, ...]:
    """Cases of the matrix of models and plans."""
    return tuple(f"tests/distributed/test_equality.py::test_equals_one_process[{name}]" for name in names)


def buffers(*names: str) -> tuple[str, ...]:
    """Buffers that a model changes."""
    return tuple(
        f"tests/distributed/test_buffers.py::test_buffers_that_a_model_changes[{name}]" for name in names
    )


def gathered(*names: str) -> tuple[str, ...]:
    """Cases of models that are whole for a while."""
    return tuple(f"tests/distributed/test_gathered.py::test_gathered[{name}]" for name in names)


def generated(*names: str) -> tuple[str, ...]:
    """Cases of generation over ranks."""
    return tuple(f"tests/distributed/test_generation.py::test_generation[{name}]" for name in names)


def noticed(*names: str) -> tuple[str, ...]:
    """Cases that were written because a planted fault went unnoticed."""
    return tuple(f"tests/distributed/test_noticed.py::test_noticed[{name}]" for name in names)


# Two ranks, one group of processes.
STEP = (
    *equal(
        "no_batch_dimension",
        "dict_output",
        "frozen",
        "unused_parameter",
        "nonlinear_loss",
        "small_buckets",
        "one_row_padded",
    ),
    *point(
        "retain_graph",
        "incoming_gradient",
        "accumulate",
        "forward_twice",
        "forward_without_backward",
        "rows_differentiated",
    ),
    *point("input_gradients", "modes", "sizes_change", "rank_0_feeds", "rank_0_feeds_padded"),
    *equal("written_into_messages"),
)
_OPTIMIZERS = "tests/distributed/test_optimizers.py::test_optimizers_beside_a_compiled_model"
CLIPPING = (
    "tests/unit/rannc_backend/runtime/gradients/test_clipping.py",
    *(f"{_OPTIMIZERS}[{name}]" for name in ("total_norm", "total_norm-replicas")),
    "tests/distributed/test_conformance.py::test_conforms[clipping-tied_embedding-r2-p2-a1]",
)
SCALER = (
    "tests/distributed/test_precision.py::test_an_infinity_in_one_stage_skips_the_step_on_all_ranks[scaler]",
    "tests/distributed/test_precision.py::test_precision[scales_differ]",
    "tests/distributed/test_precision.py::test_precision[another_model]",
)
CHECKPOINTS = (
    "tests/distributed/test_checkpoints.py::test_saved_and_loaded",
    *(
        f"tests/distributed/test_checkpoints.py::test_checkpoint[checkpoint-{name}-mlp_loss-2]"
        for name in ("failures", "meta")
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """Files of one part of the product, each with the number of faults that are drawn from it, and their
    tests.
    """

    name: str
    files: dict[str, int]
    tests: tuple[str, ...]


AREAS = (
    Area(
        name="words of EPL",
        files={"epl/config.py": 6, "epl/items.py": 2, "epl/job.py": 2},
        tests=unit("epl/config", "epl/job"),
    ),
    Area(
        name="loops of other libraries",
        files={
            "integrations/accelerate.py": 2,
            "integrations/tried_versions.py": 1,
            "integrations/trainer.py": 4,
        },
        tests=unit("integrations/accelerate", "integrations/trainer"),
    ),
    Area(
        name="files of other libraries",
        files={
            "integrations/hugging_face.py": 6,
            "integrations/distributed_checkpoint.py": 2,
            "integrations/dcp_reader.py": 4,
            "checkpoint/safetensors_directory.py": 4,
        },
        tests=unit("integrations/hugging_face", "integrations/distributed_checkpoint"),
    ),
    Area(
        name="optimizer steps",
        files={"runtime/gradients/optimizer_watch.py": 3, "runtime/step_counts.py": 4},
        tests=(
            *unit("runtime/agreement", "runtime/gradients/optimizer_watch"),
            "tests/distributed/test_loops.py::test_a_loop_equals_one_process[heads_apart-1,1]",
            "tests/distributed/test_loops.py::test_a_loop_equals_one_process[heads_in_one_optimizer-2]",
            "tests/distributed/test_loops.py::test_a_loop_equals_one_process[heads-2]",
            "tests/distributed/test_optimizers.py",
            "tests/distributed/test_zero.py",
        ),
    ),
    Area(
        name="where gradients come",
        files={"ir/reach.py": 4},
        tests=unit("ir/reach"),
    ),
    Area(name="parts of data", files={"api/data_slices.py": 5}, tests=unit("api/data_slices")),
    Area(
        name="kept plans and views",
        files={"planner/plan_cache.py": 3, "kernels/kept_views.py": 2},
        tests=(*unit("planner/plan_cache"), "tests/unit/kernels/test_kept_views.py"),
    ),
    Area(
        name="executor",
        files={
            "runtime/step/autograd.py": 5,
            "runtime/step/executor.py": 3,
            "runtime/step/graph_runtime.py": 4,
            "runtime/step/user_outputs.py": 1,
        },
        tests=(
            *unit("runtime/step/autograd", "runtime/step/graph_runtime"),
            *unit("runtime/step/executor", "runtime/step/send_buffers", "runtime/step/rehearsal"),
            *STEP,
            "tests/distributed/test_loops.py::test_a_loop_equals_one_process[heads-2]",
        ),
    ),
    Area(
        name="capture without Dynamo",
        files={
            "capture/nonstrict/watch.py": 3,
            "capture/nonstrict/guards.py": 4,
            "capture/nonstrict/captures.py": 6,
            "capture/nonstrict/arguments.py": 6,
            "capture/nonstrict/trace.py": 2,
            "capture/nonstrict/reachable.py": 5,
        },
        tests=(
            *unit("capture/nonstrict/captures", "capture/nonstrict/batch_dims"),
            *unit("capture/nonstrict/written_attributes"),
        ),
    ),
    Area(
        name="kept modules",
        files={
            "capture/nonstrict/kept_modules.py": 3,
            "capture/nonstrict/kept_operators.py": 3,
            "capture/nonstrict/swapping.py": 9,
        },
        tests=(
            *unit("capture/nonstrict/kept_modules", "capture/nonstrict/changing"),
            *unit("capture/nonstrict/written_attributes"),
        ),
    ),
    Area(
        name="messages",
        files={"runtime/step/messages.py": 2, "runtime/step/send_buffers.py": 2},
        tests=(
            *unit("runtime/step/exchange", "runtime/step/send_buffers"),
            *point("input_gradients_replicas"),
            *equal("skip_over_replicas"),
        ),
    ),
    Area(name="rows", files={"runtime/rows.py": 2}, tests=unit("runtime/rows")),
    Area(
        name="buckets",
        files={"runtime/gradients/buckets.py": 3, "runtime/gradients/bucket_layout.py": 5},
        tests=(*unit("runtime/gradients/buckets"), *equal("small_buckets")),
    ),
    Area(
        name="sums in fewer bits",
        files={"runtime/gradients/bucket_reductions.py": 3},
        tests=unit("runtime/gradients/bucket_reductions", "runtime/comm/transport_watch"),
    ),
    Area(
        name="formats of messages",
        files={"kernels/pack_reference.py": 3},
        tests=("tests/unit/kernels/test_boundary_pack.py",),
    ),
    Area(
        name="who updates",
        files={"ir/updates.py": 3, "planner/cost/update_shares.py": 2},
        tests=unit("ir/updates", "planner/cost/update_shares"),
    ),
    Area(
        name="new values",
        files={"runtime/gradients/new_values.py": 2},
        tests=(
            *unit("runtime/gradients/new_values"),
            "tests/distributed/test_zero.py::test_zero[optimizers-adamw-2,2-level1]",
        ),
    ),
    Area(
        name="buckets in graphs",
        files={"passes/stage/gradient_buckets.py": 2},
        tests=passes("stage/gradient_buckets"),
    ),
    Area(name="clipping", files={"runtime/gradients/clipping.py": 3}, tests=CLIPPING),
    Area(
        name="scaler",
        files={"runtime/gradients/grad_scaler.py": 1, "runtime/gradients/loss_gradients.py": 2},
        tests=(*unit("runtime/gradients/loss_gradients"), *SCALER),
    ),
    Area(
        name="checkpoints",
        files={
            "checkpoint/optimizer_state.py": 1,
            "checkpoint/model_state.py": 1,
            "checkpoint/reader.py": 1,
            "checkpoint/loading.py": 2,
        },
        tests=(*unit("checkpoint/state", "checkpoint/reader"), *CHECKPOINTS, *noticed("resumed")),
    ),
    Area(
        name="saving",
        files={"checkpoint/saving.py": 1, "checkpoint/directory.py": 1, "checkpoint/tensor_storage.py": 1},
        tests=(*unit("checkpoint/reader", "checkpoint/crash"), *CHECKPOINTS),
    ),
    Area(
        name="reductions",
        files={"runtime/step/scalars.py": 2, "runtime/comm/shared_memory_allreduce.py": 1},
        tests=(
            *unit("runtime/step/scalars", "runtime/comm/shared_memory_allreduce"),
            *equal("nonlinear_loss"),
        ),
    ),
    Area(
        name="sums",
        files={"passes/batch/split_reductions.py": 2},
        tests=(*passes("batch/split_reductions", "batch/rowwise_graphs"), *equal("nonlinear_loss")),
    ),
    Area(
        name="checks of values",
        files={"capture/nonstrict/reads.py": 3, "capture/nonstrict/read_values.py": 4},
        tests=unit("capture/nonstrict/reads", "capture/nonstrict/read_values"),
    ),
    Area(
        name="orders",
        files={"passes/batch/orders.py": 7, "passes/batch/counted_keys.py": 5},
        tests=passes("batch/orders"),
    ),
    Area(
        name="written out",
        files={"capture/written_out.py": 8, "capture/detached_writes.py": 12, "passes/ctc.py": 8},
        tests=(*unit("capture/written_out", "capture/nonstrict/changing"), *passes("ctc")),
    ),
    Area(
        name="pages",
        files={"errors/catalogue.py": 12},
        tests=unit("cli/documents"),
    ),
    Area(name="kept functions", files={"passes/kept_functions.py": 6}, tests=passes("kept_functions")),
    Area(
        name="values that need gradients",
        files={"passes/batch/differentiability.py": 4},
        tests=passes("batch/differentiability", "batch/split_reductions", "batch/choices", "data_sizes"),
    ),
    Area(
        name="outputs that bring gradients",
        files={"capture/analysis.py": 3},
        tests=(
            "tests/distributed/test_loops.py::test_a_loop_equals_one_process[some_outputs-2]",
            *equal("batch_norm_replicas", "several_outputs"),
        ),
    ),
    Area(name="choices", files={"passes/data_sizes.py": 3}, tests=passes("batch/choices", "data_sizes")),
    Area(
        name="equal values",
        files={"passes/stage/equal_values.py": 2, "passes/graph_queries.py": 2},
        tests=passes("stage/equal_values", "golden", "graph_queries"),
    ),
    Area(
        name="recompute that is told",
        files={
            "passes/stage/recompute.py": 2,
            "planner/blocks/told_recompute.py": 4,
            "stages/checked_stage.py": 2,
        },
        tests=unit(
            "planner/blocks/told_recompute",
            "planner/stage_pivots",
            "stages/joint_graph",
            "runtime/comm/transport_watch",
        ),
    ),
    Area(
        name="single scatters",
        files={"passes/stage/single_scatters.py": 2},
        tests=passes("stage/single_scatters"),
    ),
    Area(name="any layout", files={"passes/stage/any_layout.py": 2}, tests=passes("stage/any_layout")),
    Area(name="randomness", files={"passes/batch/randomness.py": 4}, tests=passes("batch/randomness")),
    Area(name="keys in memory", files={"passes/stage/shared_keys.py": 2}, tests=passes("stage/shared_keys")),
    Area(name="absent tensors", files={"runtime/absent_tensors.py": 2}, tests=unit("runtime/absent_tensors")),
    Area(
        name="devices behind the host",
        files={
            "schedule/message_order.py": 6,
            "runtime/step/queue_order.py": 4,
            "runtime/step/rehearsal.py": 3,
        },
        tests=unit("schedule/message_order", "runtime/step/rehearsal", "runtime/step/hangs"),
    ),
    Area(
        name="schedules",
        files={
            "schedule/one_f_one_b.py": 2,
            "schedule/lowering.py": 3,
            "schedule/simulator.py": 2,
            "schedule/verify.py": 2,
        },
        tests=unit(
            "schedule/lowering",
            "schedule/verify",
            "schedule/simulator",
            "schedule/chain",
            "schedule/several_stages",
            "log/progress",
        ),
    ),
    Area(
        name="backwards in two parts",
        files={
            "passes/stage/split_backward.py": 3,
            "schedule/several_stages.py": 7,
            "schedule/list_run.py": 5,
            "planner/settling.py": 2,
        },
        tests=(
            *passes("stage/split_backward"),
            *unit("schedule/split_backwards", "schedule/several_stages", "planner/own_orders"),
            *unit("planner/search/search", "planner/search/several_stages"),
        ),
    ),
    Area(
        name="planner",
        files={"planner/search/search.py": 2, "planner/search/problem.py": 1},
        tests=unit("planner/search/search"),
    ),
    Area(
        name="planner: programmes",
        files={"planner/search/ilp.py": 3, "schedule/chain.py": 1},
        tests=unit("planner/search/ilp", "schedule/chain"),
    ),
    Area(
        name="planner: limits",
        files={"planner/search/limits.py": 1},
        tests=unit("planner/search/limits", "planner/planner_limits"),
    ),
    Area(
        name="planner: several stages",
        files={
            "planner/search/several_stages.py": 4,
            "planner/planner.py": 2,
            "schedule/orders.py": 2,
        },
        tests=unit(
            "schedule/several_stages",
            "planner/search/several_stages",
            "planner/own_orders",
            "planner/what_binds",
            "planner/cost/output_bytes",
            "planner/formats",
        ),
    ),
    Area(
        name="planner: cuts",
        files={"planner/blocks/line_cuts.py": 1, "planner/blocks/coarsening.py": 1},
        tests=unit("planner/blocks/blocks_line"),
    ),
    Area(
        name="planner: pins",
        files={"planner/blocks/pins.py": 1},
        tests=unit("planner/blocks/blocks_line", "planner/planner_names", "planner/blocks/cut_blocks"),
    ),
    Area(
        name="planner: outputs and segments",
        files={"planner/cost/output_bytes.py": 4, "planner/cost/segments.py": 5},
        tests=unit("planner/cost/output_bytes", "planner/cost/segments"),
    ),
    Area(
        name="parameters on the host",
        files={"runtime/comm/host_link.py": 8},
        tests=unit("runtime/comm/host_link", "runtime/gradients/buckets_on_host"),
    ),
    Area(name="planner: costs", files={"planner/cost/transfer.py": 1}, tests=unit("planner/cost/cost")),
    Area(
        name="verification",
        files={"verify/rows.py": 3, "verify/comparing.py": 3},
        tests=unit("verify/verify"),
    ),
    Area(
        name="the size of the job",
        files={"planner/cluster/asked_job.py": 3},
        tests=unit("planner/cluster/asked_job"),
    ),
    Area(
        name="gathered models",
        files={"api/gathering.py": 4, "api/gathered.py": 1},
        tests=(*unit("api/gathering"), *gathered("works-1,1", "changes-1,1", "refused-1,1")),
    ),
    Area(
        name="generation",
        files={"integrations/generation.py": 2},
        tests=generated("gpt2", "refused-gpt2"),
    ),
    Area(
        name="AutoDist's items",
        files={"autodist/table.py": 3, "cli/other_systems.py": 2},
        tests=unit("autodist/config", "cli/other_systems"),
    ),
    Area(
        name="sparse gradients",
        files={"runtime/gradients/sparse_rows.py": 3},
        tests=unit("runtime/gradients/sparse_rows"),
    ),
    Area(name="numbers that change", files={"passes/size_nodes.py": 7}, tests=passes("size_nodes")),
    Area(name="padded calls", files={"padded_call.py": 9}, tests=unit("padded_call")),
    Area(
        name="kept rows",
        files={"kernels/kept_rows.py": 9},
        tests=("tests/unit/kernels/test_kept_rows.py",),
    ),
    Area(
        name="configuration",
        files={"settings/sources.py": 2, "settings/toml_lines.py": 1},
        tests=unit("settings/sources", "settings/options", "settings/config_values"),
    ),
)


def drawn(seed: int = SEED, times: int = 1) -> list[Fault]:
    """The faults drawn from the present source; `times` as many as an area asks for."""
    found: list[Fault] = []
    for area in AREAS:
        for path, count in area.files.items():
            found += draw(
                path, repository_file(path).read_text(encoding="utf-8"), seed, times * count, area.tests
            )
    return found
