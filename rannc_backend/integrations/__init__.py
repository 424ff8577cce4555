"""Adapters between this backend and the training loops of other libraries, one module per library."""
