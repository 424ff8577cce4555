"""Every error that rannc_backend raises at its users, with templates that say what is wrong and what to change.

In: plain values (names, numbers, places in the user's source). Out: exception classes. Nothing here imports torch,
so that each floor of the package can raise these. Terms: *problem* is what is wrong, *cure* is what the user can
change, *location* is a place in the user's source ("model.py:12, in forward").

All classes derive from `RanncError` (a RuntimeError). Those caused by what the user passed in derive from
`UserInputError` too, which is also a ValueError. Breaches of our own invariants are plain asserts, not these.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence

BYTES_PER_GB = 1024**3


class RanncError(RuntimeError):
    """Base of all errors of this package.

    Args:
        problem: what is wrong, with the numbers and names that matter.
        cure: what the user can change; printed on a line of its own.
        location: place in the user's source, as `user_location` gives it.
    """

    def __init__(self, problem: str, *, cure: str = "", location: str = "") -> None:
        self.problem = problem
        self.cure = cure
        self.location = location
        lines = [problem]
        if location:
            lines.append(f"  at {location}")
        if cure:
            lines.append(f"  What to change: {cure}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Callable[..., RanncError], tuple[type[RanncError], str, dict[str, object]]]:
        # Subclasses take keyword arguments of their own, so the default way (cls(*args)) could not rebuild them.
        return _restore, (type(self), str(self), dict(self.__dict__))


def _restore(cls: type[RanncError], text: str, members: dict[str, object]) -> RanncError:
    error = cls.__new__(cls, text)
    error.args = (text,)
    error.__dict__.update(members)
    return error


def rebuild_error(class_name: str, text: str) -> RanncError:
    """The error of another rank, from its class name and text: same class, same words."""
    cls = globals().get(class_name)
    if not (isinstance(cls, type) and issubclass(cls, RanncError)):
        cls = RanncError
    return _restore(cls, text, {"problem": text, "cure": "", "location": ""})


class UserInputError(RanncError, ValueError):
    """Something that the user passed in is wrong: an option, a model, a batch, a plan."""




class UnknownOptionError(UserInputError):
    """An option or a RANNC_ environment variable that does not exist."""

    def __init__(self, name: str, *, valid: Iterable[str], source: str) -> None:
        choices = sorted(valid)
        self.name = name
        folded = {choice.lower(): choice for choice in choices}
        near = difflib.get_close_matches(name.lower(), list(folded), n=1, cutoff=0.5)
        self.nearest = folded[near[0]] if near else None
        hint = f"did you mean {self.nearest!r}? " if self.nearest else ""
        super().__init__(
            f"unknown option {name!r} (from {source})",
            cure=f"{hint}Valid names are: {', '.join(choices)}.",
        )


class OptionValueError(UserInputError):
    """An option has a value outside of what it accepts."""

    def __init__(self, item: str, *, value: object, source: str, expected: str) -> None:
        self.item = item
        self.value = value
        super().__init__(
            f"option {item!r} has the bad value {_shown(value)} (from {source})",
            cure=f"give {item} {expected}.",
        )




class ConfigurationFileError(UserInputError):
    """A file of options or of logging cannot be read, or says something that it cannot say."""

    def __init__(self, file: str, *, problem: str, cure: str) -> None:
        self.file = file
        super().__init__(f"{file} {problem}", cure=cure)


class UnsupportedModelError(UserInputError):
    """The model does something for which the exactness of the results could not be kept."""


class ModelDevicesError(UserInputError):
    """Parameters or buffers lie on more than one device."""

    def __init__(self, names_by_device: dict[str, Sequence[str]]) -> None:
        parts = [f"{device}: {_shorten(names)}" for device, names in sorted(names_by_device.items())]
        super().__init__(
            f"the model lies on {len(parts)} devices ({'; '.join(parts)})",
            cure="move the whole model to one device before torch.compile (the CPU will do: each rank takes its own "
            "stages to its own device).",
        )


class NoBatchDimensionError(UserInputError):
    """No tensor argument of the compiled model has a batch dimension."""

    def __init__(self, shapes: dict[str, Sequence[int]]) -> None:
        seen = ", ".join(f"{name}: {list(shape)}" for name, shape in shapes.items()) or "no tensor arguments"
        super().__init__(
            f"no batch dimension found in the inputs of the model ({seen})",
            cure="pass at least one tensor whose dimension 0 counts the samples; all tensors with that size in "
            "dimension 0 are cut into micro-batches.",
        )


class BatchMixedError(UserInputError):
    """An operator mixes samples of the batch, so that micro-batches would give another result."""

    def __init__(self, operator: str, *, reason: str, location: str = "", cure: str = "") -> None:
        self.operator = operator
        super().__init__(
            f"operator {operator} mixes the samples of a batch: {reason}",
            location=location,
            cure=cure or "compute it per sample (dimension 0 kept as it is), or move it outside of the compiled model.",
        )


class TooFewSamplesError(UserInputError):
    """The global batch has fewer samples than a stage has replicas."""

    def __init__(self, *, num_samples: int, num_replicas: int, stage: int | None = None) -> None:
        where = "the plan" if stage is None else f"stage {stage}"
        super().__init__(
            f"the global batch has {num_samples} sample(s), fewer than the {num_replicas} replicas of {where}",
            cure=f"give at least {num_replicas} samples over all ranks, or set replica_num "
            "(RANNC_REPLICA_NUM) to a smaller number.",
        )


class GraphBreakError(UserInputError):
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


class RanksDifferError(UserInputError):
    """Ranks called with different models or different options."""

    def __init__(self, what: str, *, value_by_rank: Sequence[str]) -> None:
        groups: dict[str, list[int]] = {}
        for rank, value in enumerate(value_by_rank):
            groups.setdefault(value, []).append(rank)
        ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
        parts = [f"{_ranks(ranks)}: {_clip(value)}" for value, ranks in ordered]
        self.odd_ranks = tuple(sorted(rank for _, ranks in ordered[1:] for rank in ranks))
        super().__init__(
            f"ranks have different {what} ({'; '.join(parts)})",
            cure=f"make {_ranks(self.odd_ranks)} build the same model with the same options, versions and "
            "environment as the others.",
        )




class UnknownModuleError(UserInputError):
    """An option names a module that has no operator in the model's graph."""

    def __init__(self, name: str, *, valid: Iterable[str], option: str) -> None:
        choices = sorted(valid)
        self.name = name
        near = difflib.get_close_matches(name, choices, n=1, cutoff=0.0)
        self.nearest = near[0] if near else None
        hint = f"did you mean {self.nearest!r}? " if self.nearest else ""
        super().__init__(
            f"option {option!r} names {name!r}, but no module of that name computes anything from the batch",
            cure=f"{hint}Names are as model.named_modules() gives them.",
        )


class StagePinError(UserInputError):
    """What the options stage_starts, keep_together and stage_pins ask for cannot be had together."""


class FactoryError(UserInputError):
    """The function that makes a model to plan cannot be found, fails, or returns something else."""


class BlocksFileError(UserInputError):
    """A file of blocks to plan with cannot be read, or was made under other options."""


class PlanError(UserInputError):
    """A plan cannot be read, or does not fit this model, world size or version."""


class ProfileError(UserInputError):
    """A file of measured prices cannot be read or is not one, or measuring was asked for where nothing can be measured."""


class ClusterFileError(UserInputError):
    """A description of a cluster cannot be found or read, or says what cannot be."""

    def __init__(self, file: str, *, key: str = "", problem: str, cure: str) -> None:
        self.file = file
        self.key = key
        where = f": {key}" if key else ""
        super().__init__(f"cluster {_clip(file)}{where} {problem}", cure=cure)


class CheckpointNotFoundError(UserInputError):
    """There is no complete checkpoint at the path that was given."""


class CheckpointFileError(UserInputError):
    """A file of a checkpoint is missing, torn, changed since it was written, or was never one."""


class CheckpointVersionError(CheckpointFileError):
    """A checkpoint was written by a later release, in a form that this one does not know."""


class CheckpointMismatchError(UserInputError):
    """A checkpoint holds other tensors, shapes, dtypes or parameter groups than what it is loaded into."""


class CheckpointStateError(UserInputError):
    """Something that was to be saved is neither a tensor nor a plain value, so that no file without code could hold it."""


class CheckpointWriteError(RanncError):
    """A checkpoint could not be written, in this call or by the thread of an earlier one."""


class InfeasiblePlanError(UserInputError):
    """No plan satisfies the limits. Says the smallest limits that would do.

    Args:
        reason: which limit binds.
        smallest_bytes: smallest memory limit per device with which a plan exists; None if memory is not what binds.
        smallest_num_devices: smallest number of devices with which a plan exists; None if unknown.
        smallest_max_pipeline: a larger number of micro-batches with which a plan exists; None if there is none.
    """

    def __init__(
        self,
        reason: str,
        *,
        smallest_bytes: float | None = None,
        smallest_num_devices: int | None = None,
        smallest_max_pipeline: int | None = None,
    ) -> None:
        self.smallest_bytes = smallest_bytes
        self.smallest_num_devices = smallest_num_devices
        self.smallest_max_pipeline = smallest_max_pipeline
        cures = []
        if smallest_bytes is not None:
            # Rounded up: the printed number itself must be enough.
            smallest_gb = -(-smallest_bytes * 1000 // BYTES_PER_GB) / 1000
            cures.append(f"a memory limit of {smallest_gb:.3f} GB per device (RANNC_MEM_LIMIT_GB)")
        if smallest_num_devices is not None:
            cures.append(f"{smallest_num_devices} devices")
        cure = f"the smallest that would do: {', or '.join(cures)}." if cures else ""
        if smallest_max_pipeline is not None:
            other = "Otherwise" if cures else "What would do:"
            cure = f"{cure} {other} smaller micro-batches: max_pipeline={smallest_max_pipeline} (RANNC_MAX_PIPELINE).".strip()
        super().__init__(f"no plan satisfies the limits: {reason}", cure=cure)


class ScheduleError(RanncError):
    """A program of actions could hang, mixes up messages or leaks a buffer. Names the action, as `2F0`."""

    def __init__(self, problem: str, *, action: str = "", rank: int | None = None) -> None:
        self.action = action
        self.rank = rank
        place = "" if rank is None else f"rank {rank}: "
        subject = f"action {action}: " if action else ""
        super().__init__(f"{place}{subject}{problem}")




class LaunchError(RanncError):
    """The ranks could not find each other, or the launcher's environment contradicts itself."""


class CommunicationError(RanncError):
    """A message or a collective did not arrive in time, or its connection broke."""

    def __init__(
        self,
        problem: str,
        *,
        rank: int,
        peer: int | None = None,
        stage: int | None = None,
        micro_batch: int | None = None,
        limit_seconds: float | None = None,
        cure: str = "",
    ) -> None:
        self.rank = rank
        self.peer = peer
        self.stage = stage
        self.micro_batch = micro_batch
        place = _place(rank, stage, micro_batch)
        with_peer = "" if peer is None else f", with rank {peer}"
        limit = "" if limit_seconds is None else f" (limit {limit_seconds:g} s)"
        super().__init__(f"{place}{with_peer}: {problem}{limit}", cure=cure)


class RankFailedError(RanncError):
    """Another rank has ended, and so this one ends too."""

    def __init__(self, *, rank: int, cause: str, stage: int | None = None, micro_batch: int | None = None) -> None:
        self.rank = rank
        super().__init__(f"{_place(rank, stage, micro_batch)} failed: {cause}")


class OutputNotAvailableError(RanncError):
    """An output was touched that `outputs="loss"` neither moves nor keeps."""

    def __init__(self, output: str) -> None:
        super().__init__(
            f'output {output!r} was not kept, because the model is compiled with options={{"outputs": "loss"}}',
            cure='compile with options={"outputs": "all"} (the default) to get it back on every rank.',
        )


class ReleasedParameterError(RanncError):
    """The value of a parameter, or of a buffer, was used outside of the compiled model on a rank whose memory for it was given back."""

    def __init__(self, name: str, *, kind: str = "parameter", owners: Sequence[int] = (), use: str = "") -> None:
        owned = f"; {_ranks(owners)} has it" if len(owners) == 1 else f"; {_ranks(owners)} have it" if owners else ""
        used = f" ({use} was to use it)" if use else ""
        super().__init__(
            f"the value of {kind} {name!r} is not on this rank{owned}{used}",
            cure="call the compiled model, not the plain one, a submodule or a copy of it (generate, AveragedModel and copy.deepcopy use "
            "the plain one); compute what depends on parameters (a penalty) inside the model's forward; for values call "
            "model.state_dict() on all ranks (rank 0 gets the full one), or ask rannc_backend.is_held(parameter) before.",
        )


class ValueNotMadeError(RanncError):
    """The value of a parameter was used before the first call of the compiled model, which has each rank make those of its stages."""

    def __init__(self, name: str, *, use: str = "") -> None:
        used = f" ({use} was to use it)" if use else ""
        super().__init__(
            f"parameter {name!r} has no value yet{used}",
            cure="call the compiled model once before: each rank then makes the parameters of its stages.",
        )


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages)[/\\]torch[/\\]|<frozen |<string>")


def user_location(stack_trace: str | None) -> str:
    """Innermost frame outside of torch in a traceback text, as "model.py:12, in forward"; "" if there is none.

    Args:
        stack_trace: text as in fx `node.meta["stack_trace"]` or `traceback.format_list`.
    """
    frames = list(_FRAME.finditer(stack_trace or ""))
    own = [frame for frame in frames if not _LIBRARY.search(frame["file"])]
    if not own:
        return ""
    frame = own[-1]
    function = f", in {frame['function']}" if frame["function"] else ""
    return f"{frame['file']}:{frame['line']}{function}"


def _place(rank: int, stage: int | None, micro_batch: int | None) -> str:
    parts = [f"rank {rank}"]
    if stage is not None:
        parts.append(f"stage {stage}")
    if micro_batch is not None:
        parts.append(f"micro-batch {micro_batch}")
    return ", ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


def _shorten(names: Sequence[str], most: int = 3) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def _shown(value: object) -> str:
    try:
        return _clip(repr(value))
    except (ValueError, RecursionError):  # an integer of thousands of digits, or thousands of lists in lists
        return f"(a very long {type(value).__name__})"


def _clip(text: str, most: int = 120) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
