"""Faults that somebody thought of, in clipping, scaling and randomness."""

from __future__ import annotations

from tests.planted_faults.areas import CLIPPING, SCALER, passes, point
from tests.planted_faults.fault import Fault

CHOSEN_SCALING: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        # clipping and scaling
        (
            "norm-of-this-rank",
            "runtime/gradients/clipping.py",
            "own = _over_ranks(own, tables[0], norm_type, _given(parameters, tables))",
            "pass",
            CLIPPING,
        ),
        (
            "norm-counts-replicas",
            "runtime/gradients/clipping.py",
            "any(table.answers_for(p) for table in tables)",
            "True",
            CLIPPING,
        ),
        (
            "clipped-to-more",
            "runtime/gradients/clipping.py",
            ".clamp(max=1.0)",
            ".clamp(min=1.0)",
            CLIPPING,
        ),
        (
            "infinite-norm-summed",
            "runtime/gradients/clipping.py",
            "places.max() if math.isinf(norm_type)",
            "places.sum() if math.isinf(norm_type)",
            CLIPPING,
        ),
        (
            "scaler-hears-of-no-other",
            "runtime/gradients/grad_scaler.py",
            "if any(answer[1] for answer in answers)",
            "if local",
            SCALER,
        ),
        (
            "scales-not-compared",
            "runtime/gradients/grad_scaler.py",
            "if len(set(scales)) > 1",
            "if False",
            SCALER,
        ),
        (
            "loss-gradient-not-averaged",
            "runtime/step/graph_runtime.py",
            "sum(answer[1][i] for answer in answers) / size",
            "sum(answer[1][i] for answer in answers)",
            point("incoming_gradient"),
        ),
        # randomness
        (
            "attention-dropout-unscaled",
            "passes/batch/randomness.py",
            "* (1.0 / (1.0 - drop)) @ value",
            "@ value",
            passes("batch/randomness"),
        ),
        (
            "keys-of-one-value",
            "passes/stage/shared_keys.py",
            "(node, [size], [1])",
            "(node, [size], [0])",
            passes("stage/shared_keys"),
        ),
        (
            "keys-kept-for-nobody",
            "passes/stage/shared_keys.py",
            "user.replace_input_with(node, kept)",
            "pass",
            passes("stage/shared_keys"),
        ),
        (
            "dropout-unscaled",
            "passes/batch/randomness.py",
            "0.0 if drop == 1 else 1.0 / (1.0 - drop)",
            "1.0",
            passes("batch/randomness"),
        ),
        (
            "draws-alike",
            "passes/batch/randomness.py",
            "0x1B873593 * (draw + 1)",
            "0x1B873593 * 1",
            passes("batch/randomness"),
        ),
        (
            "causal-mask-left-out",
            "passes/batch/randomness.py",
            'if arguments.get("is_causal"):',
            "if False:",
            passes("batch/randomness"),
        ),
        (
            "attention-bias-left-out",
            "passes/batch/randomness.py",
            "if bias is not None:",
            "if False:",
            passes("batch/randomness"),
        ),
        (
            "attention-scale-ignored",
            "passes/batch/randomness.py",
            "if scale is None else scale",
            "",
            passes("batch/randomness"),
        ),
    )
)
