"""Seconds and bytes of blocks, stages and messages."""
