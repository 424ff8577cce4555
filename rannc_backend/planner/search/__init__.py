"""The search over stages, replicas, micro-batches, schedules and recompute."""
