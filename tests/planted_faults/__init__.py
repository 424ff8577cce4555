"""Faults planted in copies of the package, each with the tests that must notice it: `make test-faults`.

`chosen.py` has those that somebody thought of, `drawing.py` draws others from the source, `runner.py` runs
them, `__main__.py` is the command.
"""
