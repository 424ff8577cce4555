"""Errors of checkpoints."""

from __future__ import annotations

from rannc_backend.errors.base import RanncError, UserInputError


class CheckpointNotFoundError(UserInputError):
    """There is no complete checkpoint at the path that was given."""

    default_cure = "give the directory that save_checkpoint was given, on a file system that all ranks see."


class CheckpointFileError(UserInputError):
    """A file of a checkpoint is missing, torn, changed since it was written, or was never one."""

    default_cure = (
        "load an older checkpoint of the directory (step=...), and look at the disk that this one lies on."
    )


class CheckpointVersionError(CheckpointFileError):
    """A checkpoint was written by a later release, in a form that this one does not know."""

    default_cure = "update rannc-backend."


class CheckpointMismatchError(UserInputError):
    """A checkpoint holds other tensors, shapes, dtypes or parameter groups than what it is loaded into."""

    default_cure = "build the model and the optimizer as when the checkpoint was saved."


class CheckpointStateError(UserInputError):
    """Something that was to be saved is neither a tensor nor a plain value, so that no file without code
    could hold it.
    """

    default_cure = "save tensors, numbers, texts, and lists and dicts of them."


class CheckpointWriteError(RanncError):
    """A checkpoint could not be written, in this call or by the thread of an earlier one."""

    default_cure = "see whether every host can write there and has room; older checkpoints are as they were."
