"""The package's logger as in a fresh process, for tests of logging."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rannc_backend.log.logger import ROOT_LOGGER


@contextmanager
def fresh_logger() -> Iterator[logging.Logger]:
    """No handler, no level, and no handler on the root logger (pytest has some); what is made inside is
    closed.
    """
    root, own = logging.getLogger(), logging.getLogger(ROOT_LOGGER)
    kept = root.handlers, own.handlers, own.level
    root.handlers, own.handlers = [], []
    own.setLevel(logging.NOTSET)
    try:
        yield own
    finally:
        for handler in own.handlers:
            handler.close()
        root.handlers, own.handlers = kept[:2]
        own.setLevel(kept[2])
