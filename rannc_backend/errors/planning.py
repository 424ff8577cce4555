"""Errors of planning: plans, clusters, profiles and limits that no plan satisfies."""

from __future__ import annotations

from collections.abc import Sequence

from rannc_backend.errors.base import RanncError, UserInputError, clip

BYTES_PER_GB = 1024**3


class FactoryError(UserInputError):
    """The function that makes a model to plan cannot be found, fails, or returns something else."""

    default_cure = (
        "see that the file can be imported by itself, and that the function returns (model, args, kwargs)."
    )


class BlocksFileError(UserInputError):
    """A file of blocks to plan with cannot be read, or was made under other options."""

    default_cure = "save the blocks again with `rannc plan --save-blocks`."


class PlanError(UserInputError):
    """A plan cannot be read, or does not fit this model, world size or version."""

    default_cure = "plan again, with save_deployment=True, for this model, release and number of ranks."


class ProfileError(UserInputError):
    """A file of measured prices cannot be read or is not one, or measuring was asked for where nothing can be
    measured.
    """

    default_cure = "name the file of an earlier run (profile_file, run_file), or leave the option out."


class ClusterFileError(UserInputError):
    """A description of a cluster cannot be found or read, or says what cannot be."""

    def __init__(self, file: str, *, key: str = "", problem: str, cure: str) -> None:
        self.file = file
        self.key = key
        where = f": {key}" if key else ""
        super().__init__(f"cluster {clip(file)}{where} {problem}", cure=cure, place=f"{clip(file)}{where}")


class InfeasiblePlanError(UserInputError):
    """No plan satisfies the limits. Says the smallest limits that would do.

    Args:
        reason: which limit binds.
        smallest_bytes: smallest memory limit per device with which a plan exists; None if memory is not what
        binds.
        smallest_num_devices: smallest number of devices with which a plan exists; None if unknown.
        smallest_max_pipeline: a larger number of micro-batches with which a plan exists; None if there is
        none.
        options_that_would_do: each text names options, as set, with which a plan exists.
    """

    default_cure = "give more devices or more memory (RANNC_MEM_LIMIT_GB), smaller batches, or fewer wishes (stage_starts, replica_num)."

    def __init__(
        self,
        reason: str,
        *,
        smallest_bytes: float | None = None,
        smallest_num_devices: int | None = None,
        smallest_max_pipeline: int | None = None,
        options_that_would_do: Sequence[str] = (),
    ) -> None:
        self.smallest_bytes = smallest_bytes
        self.smallest_num_devices = smallest_num_devices
        self.smallest_max_pipeline = smallest_max_pipeline
        self.options_that_would_do = tuple(options_that_would_do)
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
        if options_that_would_do:
            other = "Or" if cure else "What would do:"
            cure = f"{cure} {other} other options: {', or '.join(options_that_would_do)}.".strip()
        super().__init__(f"no plan satisfies the limits: {reason}", cure=cure)


class OffloadError(UserInputError):
    """Parameters cannot lie on the host, as option offload asks, for a model that is compiled as it is."""

    default_cure = "compile the model itself, not a function that calls it, and without capture=dynamo; or leave offload out."

    def __init__(self, why: str) -> None:
        super().__init__(f"offload=parameters is not possible on a GPU here: {why}")


class ScheduleError(RanncError):
    """A program of actions could hang, mixes up messages or leaks a buffer. Names the action, as `2F0`."""

    default_cure = "report this with the plan and the programs that print_program=True logs; another schedule or pipeline_num may do."

    def __init__(self, problem: str, *, action: str = "", rank: int | None = None) -> None:
        self.action = action
        self.rank = rank
        place = "" if rank is None else f"rank {rank}: "
        subject = f"action {action}: " if action else ""
        # The action is the subject of the sentence.
        super().__init__(f"{place}{subject}{problem}", place=f"{place}{subject}".removesuffix(": "))
