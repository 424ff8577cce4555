"""RaNNC's own names: a script that was written for RaNNC runs with its import changed."""

import torch

from rannc_backend.settings.torch_version import refuse_old_torch

# Before the imports that an old torch would fail in, with names that say nothing to the user.
refuse_old_torch(torch.__version__)
