"""The command `rannc`."""
