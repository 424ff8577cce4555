"""One mpirun per world size runs many cases: case.py (data), launch.py (parent), template.py and
forked_rank.py (which spare ranks their imports), worker.py (ranks), reference.py, compare.py."""
