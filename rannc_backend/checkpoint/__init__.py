"""Checkpoints: each rank writes its part, and any layout reads them."""
