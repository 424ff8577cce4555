"""Errors of checkpoints."""

from __future__ import annotations

from rannc_backend.errors.base import RanncError, UserInputError


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
