"""Gradients from the backward to the optimizer, and optimizers over ranks."""
