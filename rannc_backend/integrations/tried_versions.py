"""The versions of other libraries that the adapters were tried with."""

from __future__ import annotations

import logging
from types import ModuleType

from rannc_backend.log.logger import say_once
from rannc_backend.runtime.job import bootstrap
from rannc_backend.settings.torch_version import numbers_of

logger = logging.getLogger(__name__)

TRIED = {"accelerate": "1.15", "lightning": "2.6", "peft": "0.21", "transformers": "5.24", "trl": "1.16"}


def mention_untried(module: ModuleType) -> None:
    """Warn once, on rank 0, where a library's version has not been tried with this package's adapters."""
    found, tried = str(module.__version__), TRIED[module.__name__]
    if numbers_of(found) != numbers_of(tried) and bootstrap.leads():
        message = f"{module.__name__} {found} has not been tried with this adapter, {tried} has"
        say_once(logger, message, level=logging.WARNING)
