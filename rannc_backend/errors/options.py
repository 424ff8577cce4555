"""Errors about options: their names, their values and the files that they come from."""

from __future__ import annotations

from collections.abc import Iterable

from rannc_backend.errors.base import UserInputError, did_you_mean, nearest, shown


class UnknownOptionError(UserInputError):
    """An option, an item of another system's configuration or an environment variable that does not exist. `where`: what
    has all of them.
    """

    def __init__(
        self,
        name: str,
        *,
        valid: Iterable[str],
        source: str,
        listed: str = "`rannc config` prints every option.",
    ) -> None:
        """`listed`: where all of the valid names are."""
        near = nearest(name, sorted(valid))
        self.name = name
        self.nearest = near[0] if near else None
        cure = f"{did_you_mean(near)}{listed}"
        super().__init__(f"unknown option {shown(name)} (from {source})", cure=cure, place=source)


class OptionValueError(UserInputError):
    """An option has a value outside of what it accepts, which is `expected`. `choices`: the names among them, of which the
    nearest are named.
    """

    def __init__(
        self, item: str, *, value: object, source: str, expected: str, choices: Iterable[str] = ()
    ) -> None:
        self.item = item
        self.value = value
        self.expected = expected
        near = nearest(value.strip(), choices) if isinstance(value, str) else []
        super().__init__(
            f"option {item!r} has the bad value {shown(value)} (from {source})",
            cure=f"{did_you_mean(near)}{'G' if near else 'g'}ive {item} {expected}.",
            place=source,
        )


class ConfigurationFileError(UserInputError):
    """A file of options or of logging cannot be read, or says something that it cannot say."""

    def __init__(self, file: str, *, problem: str, cure: str) -> None:
        self.file = file
        super().__init__(f"{file} {problem}", cure=cure, place=file)


class JobSizeError(UserInputError):
    """The options are of a job with another number of ranks, or with batches of other rows."""

    default_cure = (
        "give the job the size that the options say, or change mesh, num_ranks or micro_batch_rows."
    )


class UnknownModuleError(UserInputError):
    """An option names a module that has no operator in the model's graph."""

    def __init__(self, name: str, *, valid: Iterable[str], option: str, kinds: str = "") -> None:
        """`kinds`: what names there are, if not all dotted names of modules and nothing else."""
        near = nearest(name, sorted(valid), cutoff=0.0)
        self.name = name
        self.nearest = near[0] if near else None
        super().__init__(
            f"option {option!r} names {name!r}, but no module of that name computes anything from the batch",
            cure=did_you_mean(near) + (kinds or "Names are as model.named_modules() gives them."),
            place=f"option {option!r}",
        )


class NoMarkedTensorError(UserInputError):
    """Marked tensors are to be kept, and the model marks none."""

    def __init__(self) -> None:
        super().__init__(
            "option 'recompute' is 'marked', and the model marks no tensor that it computes from the batch",
            cure="write x = rannc_backend.checkpoint_tensor(x) in the model's forward for tensors that are to be kept; or "
            "name modules with recompute_modules, or set recompute to 'segments' or 'auto'.",
            place="option 'recompute'",
        )


class StagePinError(UserInputError):
    """What the options stage_starts, keep_together and stage_pins ask for cannot be had together."""

    default_cure = "change one of these options, or leave it out."
