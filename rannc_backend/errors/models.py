"""Errors about models: what cannot be captured, what would not be exact, and calls that go around the
compiled model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rannc_backend.errors.base import RanncError, UserInputError, ranks_text, shorten

_WRITE_OTHERWISE = (
    "write it with torch.where, or decide it outside of the compiled model; where an operator takes Python's numbers "
    "alone (eps), give it one, or write it out with operators that take tensors."
)
_SIZE_OF_INPUTS = (
    "take the batch size from the inputs (x.size(0)) wherever the model uses it as a number, and compute with all rows "
    "at once instead of in a loop over them; where another dimension counts the samples, set the option batch_dim."
)


class ModelError(UserInputError):
    """Base of the refusals of a model, or of the inputs that it is called with; `location` is the line that
    caused it.
    """

    needs_value = False  # whether the reason is a value that is known only when the model runs
    needs_batch_size = False  # or that its code uses the batch size as a number
    default_cure = "write the line in another way, or take it out of the compiled model."


class UnsupportedModelError(ModelError):
    """The model does something for which the exactness of the results could not be kept."""


def needing_batch_size(
    problem: str, *, cure: str = _SIZE_OF_INPUTS, location: str = ""
) -> UnsupportedModelError:
    """A refusal whose reason is that the model's code uses its batch size as a number."""
    error = UnsupportedModelError(problem, cure=cure, location=location)
    error.needs_batch_size = True
    return error


def needing_value(problem: str, location: str = "", *, cure: str = _WRITE_OTHERWISE) -> UnsupportedModelError:
    """A refusal whose reason is gone where the code runs as written: a value that is known only when it runs."""
    error = UnsupportedModelError(problem, cure=cure, location=location)
    error.needs_value = True
    return error


class ModelDevicesError(ModelError):
    """Parameters or buffers lie on more than one device."""

    def __init__(self, names_by_device: dict[str, Sequence[str]]) -> None:
        parts = [f"{device}: {shorten(names)}" for device, names in sorted(names_by_device.items())]
        super().__init__(
            f"the model lies on {len(parts)} devices ({'; '.join(parts)})",
            cure="move the whole model to one device before torch.compile (the CPU will do: each rank takes "
            "its own stages to its own device).",
        )


class NoBatchDimensionError(ModelError):
    """No tensor argument of the compiled model has a batch dimension."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        seen = ", ".join(f"{name}: {list(shape)}" for name, shape in shapes.items()) or "no tensor arguments"
        super().__init__(
            f"no batch dimension found in the inputs of the model ({seen})",
            cure="pass at least one tensor whose dimension 0 counts the samples (with another dimension, set the option "
            "batch_dim); all tensors with that size there are cut into micro-batches.",
        )


class BatchMixedError(ModelError):
    """An operator mixes samples of the batch, so that micro-batches would give another result."""

    def __init__(self, operator: str, *, reason: str, location: str = "") -> None:
        self.operator = operator
        super().__init__(
            f"operator {operator} mixes the samples of a batch: {reason}",
            location=location,
            cure="compute it per sample (dimension 0 kept as it is), or move it outside of the compiled model; where another "
            "dimension of the inputs counts the samples, set the option batch_dim.",
        )


class UnclearBatchDimError(UserInputError):
    """Samples meet along the first dimension of the inputs, and nothing does along the second one, as far as is known."""

    def __init__(self, reason: str, *, inputs: str, by_layers: bool = False, location: str = "") -> None:
        of_second = (
            f"its layers with batch_first=False take dimension 1 of {inputs} for that of samples"
            if by_layers
            else f"along dimension 1 of {inputs} nothing is mixed"
        )
        super().__init__(
            f"samples meet along dimension 0 of the inputs ({reason}), and {of_second}: it is not clear which one "
            "counts the samples",
            location=location,
            cure="say it: options={'batch_dim': 1}, for inputs [length, batch, ...] (batch_first=False), or "
            "options={'batch_dim': 0}, where the samples of a batch are meant to meet.",
        )


class TooFewSamplesError(UserInputError):
    """The global batch has fewer samples than a stage has replicas."""

    def __init__(self, *, num_samples: int, num_replicas: int, stage: int | None = None) -> None:
        where = "the plan" if stage is None else f"stage {stage}"
        super().__init__(
            f"the global batch has {num_samples} sample(s), fewer than the {num_replicas} replicas of "
            f"{where}",
            cure=f"give at least {num_replicas} samples over all ranks, or set replica_num "
            "(RANNC_REPLICA_NUM) to a smaller number.",
        )


class GraphBreakError(ModelError):
    """Dynamo could not capture the model as one graph."""

    def __init__(self, reason: str, *, location: str = "", cure: str = "") -> None:
        self.reason = reason
        super().__init__(
            f"the model is not one graph, Dynamo breaks it: {reason}",
            location=location,
            cure=cure or "take the statement out of forward, or guard it with torch.compiler.is_compiling().",
        )


class DataDependentControlFlowError(GraphBreakError):
    """The model branches on a value that is known only when it runs."""

    def __init__(self, reason: str, *, location: str = "") -> None:
        super().__init__(
            f"control flow depends on the data: {reason}",
            location=location,
            cure="write it with torch.where (or torch.cond), or decide it outside of the compiled model.",
        )


class BatchSizeTestError(ModelError):
    """The model tests its batch size, and a step's batch takes another path than the one that was captured."""

    def __init__(self, test: str, *, num_rows: int, location: str = "") -> None:
        self.num_rows = num_rows
        super().__init__(
            f"the model tests its batch size ({test}), and a batch of {num_rows} samples takes another path than "
            "the one that was captured",
            location=location,
            cure="give batches of a size on the same side of the test, or take the test out of the model.",
        )


class TraceError(ModelError):
    """Torch or this backend fails on an operator of the model while it is traced."""

    def __init__(self, reason: str, *, location: str = "", cure: str = "") -> None:
        self.reason = reason
        super().__init__(
            f"the model cannot be traced: {reason}",
            location=location,
            cure=cure
            or 'see whether torch.compile(model, backend="eager", fullgraph=True) runs with these inputs; if '
            "it does, write the "
            "line in another way, or take it out of the compiled model.",
        )


class InternalError(ModelError):
    """This backend, not torch and not the model, fails while it traces, plans or compiles a model."""

    def __init__(self, reason: str, *, location: str = "") -> None:
        self.reason = reason
        super().__init__(
            f"an error in rannc_backend itself: {reason}",
            location=location,
            cure="please report it, with the traceback above and the model's code or name; until then write "
            "the line in another way, or take it out of the compiled model.",
        )


class PlainCallError(UserInputError):
    """A compiled model was run without the backend, on one rank or on all."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"Dynamo ran the plain model in place of the compiled one{reason}: each rank would train, or "
            "evaluate, on its own",
            cure="leave torch.compile's fallbacks off around the model: torch.compiler.set_stance, "
            "torch._dynamo.disable, torch._dynamo.config.disable and suppress_errors; TORCH_LOGS=+dynamo "
            "tells more.",
        )


class WrappedModelError(UserInputError):
    """A compiled model is called from inside of another wrapper that makes replicas or shards of it."""

    def __init__(self, wrapper: str) -> None:
        super().__init__(
            f"the model is wrapped in {wrapper}, which makes replicas, or shards, and reduces gradients by "
            "itself",
            cure="compile the plain model, and call the compiled one: the backend makes replicas of stages "
            "and reduces their gradients itself. Accelerate and the Trainer of Hugging Face wrap a model "
            "when they prepare it: use rannc_backend.integrations (docs/accelerate.md, docs/trainer.md).",
        )


class OutputNotAvailableError(RanncError):
    """An output was touched that is neither moved nor kept: with `outputs="loss"`, or with `outputs="auto"` where
    the plan has no room for it; or one that mixes the samples of all ranks.

    Args:
        output: which.
        why: it is not there.
        is_left_out: option outputs would bring it.
    """

    def __init__(self, output: str, *, why: str, is_left_out: bool) -> None:
        if not is_left_out:
            super().__init__(
                f"output {output!r} is not available: {why}",
                cure="leave it unused, return it one row per sample, or compute what you need of it within the "
                "model and return that.",
            )
            return
        super().__init__(
            f"output {output!r} was not kept: {why}",
            cure='compile with options={"outputs": "all"} to get it back on every rank; plans then have room for '
            "it. Or compute what you need of it within the model and return that.",
        )


class ReleasedParameterError(RanncError):
    """The value of a parameter, or of a buffer, was used outside of the compiled model on a rank whose memory
    for it was given back.
    """

    def __init__(
        self, name: str, *, kind: str = "parameter", owners: Sequence[int] = (), use: str = ""
    ) -> None:
        owned = (
            f"; {ranks_text(owners)} has it"
            if len(owners) == 1
            else f"; {ranks_text(owners)} have it"
            if owners
            else ""
        )
        used = f" ({use} was to use it)" if use else ""
        super().__init__(
            f"the value of {kind} {name!r} is not on this rank{owned}{used}",
            cure="call the compiled model, not the plain one, a submodule or a copy of it (generate, "
            "AveragedModel and copy.deepcopy use the plain one), or use the plain one inside `with "
            "rannc_backend.gathered(model):`, which all ranks enter; compute what depends on parameters (a "
            "penalty) inside the model's forward; for values call model.state_dict() on all ranks (rank 0 "
            "gets the full one), or ask rannc_backend.is_held(parameter) before.",
        )


class GenerationError(UserInputError):
    """Generation cannot go through the stages of a model, because of the model or of an argument."""

    def __init__(self, problem: str, *, cure: str) -> None:
        super().__init__(problem, cure=cure)


class GatheringError(UserInputError):
    """The parameters of a model cannot be brought together by `gathered`, or what was done to them inside cannot be
    given back.
    """

    def __init__(self, problem: str, *, cure: str) -> None:
        super().__init__(problem, cure=cure)


class ValueNotMadeError(RanncError):
    """The value of a parameter was used before the first call of the compiled model, which has each rank make
    those of its stages.
    """

    def __init__(self, name: str, *, use: str = "") -> None:
        used = f" ({use} was to use it)" if use else ""
        super().__init__(
            f"parameter {name!r} has no value yet{used}",
            cure="call the compiled model once before: each rank then makes the parameters of its stages.",
        )
