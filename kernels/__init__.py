"""Triton kernels for messages and gradient buckets, with references in torch."""
