"""EPL's own names: a script takes over its configuration with ``import rannc_backend.epl as epl``."""

import torch

from rannc_backend.settings.torch_version import refuse_old_torch

# Before the imports that an old torch would fail in, with names that say nothing to the user.
refuse_old_torch(torch.__version__)

from rannc_backend.epl.config import Config  # noqa: E402
from rannc_backend.epl.job import init, scaler, slice_files  # noqa: E402

__all__ = ["Config", "init", "scaler", "slice_files"]
