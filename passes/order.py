"""The whole pipeline of passes, in its order: from what Dynamo's graph was traced to, to what is compiled.

In: nothing. Out: `PIPELINE`, the names of all passes by level. The facts that passes require and provide make
the runner refuse another order (pipeline.py); a test holds this table against the passes themselves.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Passes that run one after the other, and the function that runs them. `given`: facts of the graph that
    the level begins with, if they come from no pass.
    """

    what: str
    where: str
    passes: tuple[str, ...]
    given: frozenset[str] = frozenset()


PIPELINE: tuple[Level, ...] = (
    Level(
        what="Floats of Python that change between calls, where the graph has any, as tensors.",
        where="capture/aten_trace.py: trace_function",
        given=frozenset({"functional"}),
        passes=("floats_as_tensors",),
    ),
    Level(
        what="One spelling per meaning, on the functional graph of the model's forward.",
        where="capture/graph.py: capture",
        given=frozenset({"functional"}),
        passes=(
            "erase_assertions",
            "erase_restriding",
            "fold_constants",
            "differentiable_fills",
            "complex_scatters",
            "named_squeezes",
        ),
    ),
    Level(
        what="Where the rows of the batch are, and the graph cut where they are summed: prologue, row-wise "
        "graph, epilogue.",
        where="passes/batch/split_reductions.py: split_batch",
        passes=("decompose_reductions", "batch_axis", "randomness", "split_reductions"),
    ),
    Level(
        what="The row-wise graph cut into one graph per stage, along a plan.",
        where="passes/stage/split_stages.py: split_stages",
        passes=("split_stages",),
    ),
    Level(
        what="A stage's graph made ready: constants are inputs, any layout will do, outputs are safe to "
        "send.",
        where="stages/build.py: StageBuilder",
        passes=("lift_constants", "any_layout", "secure_outputs"),
    ),
    Level(
        what="Forward and backward, traced as one graph and then cut in two; `simplify_joint` and "
        "`single_scatters` for Inductor alone, `split_backward` for schedules whose backwards have two parts. A "
        "stage that only infers is traced too, and not cut.",
        where="stages/build.py: StageBuilder.trace, split_safely, _parts",
        passes=(
            "trace_joint",
            "simplify_joint",
            "equal_values",
            "single_scatters",
            "split_joint",
            "secure_gradients",
            "split_backward",
        ),
    ),
    Level(
        what="Gradients are born in buckets and values in messages. `deliver_early` stands for "
        "`gradient_buckets` where the planner looks at what an eager stage keeps.",
        where="stages/build.py: StageBuilder._add_training, _writing",
        passes=("gradient_buckets", "deliver_early", "send_slices"),
    ),
    Level(
        what="What runs: `box` for operators that run one by one, `shared_keys` before Inductor compiles.",
        where="stages/build.py: StageBuilder, stages/inductor.py: _compile",
        passes=("box", "shared_keys"),
    ),
)
