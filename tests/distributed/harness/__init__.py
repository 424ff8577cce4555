"""One mpirun per world size runs many cases: case.py (data), launch.py (parent), worker.py (ranks), reference.py, compare.py."""
