"""Every error that rannc_backend raises at its users, with templates that say what is wrong and what to
change.

In: plain values (names, numbers, places in the user's source). Out: exception classes. Nothing here imports
torch, so that each floor of the package can raise these. Terms: *problem* is what is wrong, *cure* is what
the user can change, *location* is a place in the user's source ("model.py:12, in forward").

All classes derive from `RanncError` (a RuntimeError). Those caused by what the user passed in derive from
`UserInputError` too, which is also a ValueError. Breaches of our own invariants are plain asserts, not these.
"""

from rannc_backend.errors.base import (
    RanncError,
    UserInputError,
    extended,
    is_of_user,
    located,
    rebuild_error,
    user_location,
)
from rannc_backend.errors.checkpoints import (
    CheckpointFileError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointStateError,
    CheckpointVersionError,
    CheckpointWriteError,
)
from rannc_backend.errors.models import (
    BatchMixedError,
    BatchSizeTestError,
    DataDependentControlFlowError,
    GraphBreakError,
    InternalError,
    ModelDevicesError,
    ModelError,
    NoBatchDimensionError,
    OutputNotAvailableError,
    PlainCallError,
    ReleasedParameterError,
    TooFewSamplesError,
    TraceError,
    UnsupportedModelError,
    ValueNotMadeError,
    WrappedModelError,
)
from rannc_backend.errors.options import (
    ConfigurationFileError,
    OptionValueError,
    StagePinError,
    UnknownModuleError,
    UnknownOptionError,
)
from rannc_backend.errors.planning import (
    BYTES_PER_GB,
    BlocksFileError,
    ClusterFileError,
    FactoryError,
    InfeasiblePlanError,
    OffloadError,
    PlanError,
    ProfileError,
    ScheduleError,
)
from rannc_backend.errors.ranks import (
    CallsDifferError,
    CommunicationError,
    LaunchError,
    OutOfStepError,
    RankFailedError,
    RanksDifferError,
    failure_of_rank,
)
from rannc_backend.errors.training import (
    CoupledOptimizerError,
    GroupedStepError,
    PartialStateError,
    PlainGradientError,
    ShardingOptimizerError,
    StaleParameterError,
    UnsynchronizedGradientError,
    VerificationError,
)

__all__ = [
    "BYTES_PER_GB",
    "BatchMixedError",
    "BlocksFileError",
    "CallsDifferError",
    "CheckpointFileError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointStateError",
    "CheckpointVersionError",
    "CheckpointWriteError",
    "ClusterFileError",
    "CommunicationError",
    "ConfigurationFileError",
    "CoupledOptimizerError",
    "DataDependentControlFlowError",
    "FactoryError",
    "GraphBreakError",
    "GroupedStepError",
    "InfeasiblePlanError",
    "InternalError",
    "LaunchError",
    "ModelDevicesError",
    "ModelError",
    "NoBatchDimensionError",
    "OptionValueError",
    "OffloadError",
    "OutOfStepError",
    "OutputNotAvailableError",
    "PartialStateError",
    "PlainCallError",
    "PlainGradientError",
    "PlanError",
    "ProfileError",
    "RankFailedError",
    "RanksDifferError",
    "RanncError",
    "ReleasedParameterError",
    "ScheduleError",
    "ShardingOptimizerError",
    "StaleParameterError",
    "StagePinError",
    "TooFewSamplesError",
    "BatchSizeTestError",
    "TraceError",
    "UnknownModuleError",
    "UnknownOptionError",
    "UnsupportedModelError",
    "UnsynchronizedGradientError",
    "UserInputError",
    "ValueNotMadeError",
    "VerificationError",
    "WrappedModelError",
    "extended",
    "failure_of_rank",
    "is_of_user",
    "located",
    "rebuild_error",
    "user_location",
]
