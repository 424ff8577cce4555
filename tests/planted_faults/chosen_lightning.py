"""Faults that somebody thought of, in the strategies for Lightning's Trainer and Fabric."""

from __future__ import annotations

from tests.planted_faults.areas import unit
from tests.planted_faults.chosen_loops import loops
from tests.planted_faults.fault import Fault

CHOSEN_LIGHTNING: tuple[Fault, ...] = tuple(
    Fault(*row)
    for row in (
        (
            "fabric-reduces-into-another-tensor",
            "integrations/fabric.py",
            "return tensor.detach().copy_(result) if isinstance(tensor, Tensor) else result",
            "return result",
            loops("fabric_parts-1,1"),
        ),
        (
            "fabric-trains-what-is-not-compiled",
            "integrations/fabric.py",
            "self._trained.check(trained)",
            "pass",
            loops("fabric_parts-1,1"),
        ),
        (
            "early-averages-stay-where-they-were",
            "integrations/lightning.py",
            "self._whole.set_submodule(self._name, anew)",
            "pass",
            loops("trainer_parts-1,1"),
        ),
        (
            "early-averages-lose-what-was-loaded",
            "integrations/lightning.py",
            "anew.load_state_dict(early.state_dict())",
            "pass",
            loops("trainer_parts-1,1"),
        ),
        (
            "any-object-is-sent",
            "integrations/lightning_ranks.py",
            'return ["refused", type(value).__name__]',
            "return str(value)",
            loops("fabric_parts-1,1"),
        ),
        (
            "every-rank-of-fabric-is-one-process",
            "capture/refusals.py",
            "    if seen not in (None, num_ranks):",
            "    if False:",
            unit("capture/refusals"),
        ),
        (
            "values-of-no-gradient-are-clipped",
            "runtime/gradients/clipping.py",
            "if any(parameter.grad is not None for parameter in given):  # torch's own asks for one at least",
            "if given:",
            (*unit("runtime/gradients/clipping"), *loops("fabric_parts-1,1")),
        ),
    )
)
