"""A job from its start to its end: meeting, watching, failing."""
