"""Frozen data that planner, schedule and runtime share: plans, actions, block graphs, exchanges."""
