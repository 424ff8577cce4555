"""The model as a line of blocks, each with what it costs."""
