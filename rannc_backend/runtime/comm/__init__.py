"""Tensors and small values between ranks."""
