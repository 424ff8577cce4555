"""AutoDist's configuration, in its own words: `AutoDistConfig`, of which each item becomes options of this package."""

from rannc_backend.autodist.config import AutoDistConfig

__all__ = ["AutoDistConfig"]
