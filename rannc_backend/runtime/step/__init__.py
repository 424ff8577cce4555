"""One call of a compiled model on all ranks, from its inputs to its gradients."""
