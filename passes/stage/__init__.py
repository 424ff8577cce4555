"""A graph cut into stages, and each stage's forward and backward rewritten for the runtime."""
