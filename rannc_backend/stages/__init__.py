"""From a stage's graph to the functions that run it."""
