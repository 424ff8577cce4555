"""What the package says: logger, files, progress, phases of the first call."""
