#!/usr/bin/env bash
# Makes the virtual environment in which the Makefile runs everything: make_environment.sh PYTHON VENV
# Works from a fresh clone with python3 (3.10 to 3.13) and pip alone; a second run completes what a first one left undone.
set -euo pipefail

python=$1
venv=$2
cd "$(dirname "$0")/.."

"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || {
    echo "Python 3.10 to 3.13 is needed, and '$python' is $("$python" --version 2>&1). Say which: make PYTHON=python3.12 ..." >&2
    exit 2
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
    if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
        # Some systems ship venv without ensurepip: the pip outside then fills the environment.
        rm -rf "$venv"
        "$python" -m venv --without-pip "$venv"
        "$python" -m pip --python "$venv/bin/python" install --quiet pip
    fi
fi
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input)

# torch first, so that the right build is there before anything else asks for it.
if ! "$venv/bin/python" -c 'import torch' >/dev/null 2>&1; then
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        echo "Installing torch for the NVIDIA GPU that is here"
        "${pip[@]}" "${TORCH:-torch>=2.11,<2.16}"
    else
        echo "Installing torch for CPUs (the CPU build, where your package index has one)"
        if [ -n "${TORCH:-}" ]; then
            "${pip[@]}" "$TORCH"
        else
            "${pip[@]}" 'torch==2.13.0+cpu' >/dev/null 2>&1 || "${pip[@]}" 'torch==2.13.0'
        fi
    fi
fi

# The Triton that belongs to this torch, where torch has brought none: a newer one may lack what Inductor imports.
if ! "$venv/bin/python" -c 'import triton' >/dev/null 2>&1; then
    "${pip[@]}" "$("$venv/bin/python" -c 'import torch; print("triton==3." + str(7 + max(0, int(torch.__version__.split(".")[1]) - 13)) + ".*")')"
fi

echo "Installing rannc-backend and what its tests and examples need"
"${pip[@]}" --editable '.[test,demo]'

# The oldest Triton that the package admits, beside the environment's own: the tests of the kernels run with both.
oldest_triton=3.6.0
beside="$venv/share/triton-$oldest_triton"
if [ ! -d "$beside/triton" ]; then
    rm -rf "$beside" "$beside.part"
    "${pip[@]}" --no-deps --target "$beside.part" "triton==$oldest_triton"
    mv "$beside.part" "$beside"
fi

# An MPI of this machine is used if mpi4py really joins two of its ranks; otherwise a wheel brings one into the environment.
two_ranks='from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 2'
if [ ! -e "$venv/bin/mpirun" ] && command -v mpirun >/dev/null 2>&1; then
    "${pip[@]}" 'mpi4py>=4.0' || true
    . scripts/mpi_environment.sh
    if timeout 60 mpirun -np 2 "$venv/bin/python" -c "$two_ranks" >/dev/null 2>&1 </dev/null; then
        echo "Using this machine's MPI: $(command -v mpirun)"
    else
        echo "mpi4py does not work with $(command -v mpirun); installing an MPI wheel beside it"
        "${pip[@]}" --editable '.[mpi]'
    fi
else
    "${pip[@]}" --editable '.[mpi]'
fi
. scripts/mpi_environment.sh
PATH="$venv/bin:$PATH" timeout 60 mpirun -np 2 "$venv/bin/python" -c "$two_ranks" </dev/null || {
    echo "mpirun does not start two ranks; 'rannc-backend[mpi]' brings an MPI that does, torchrun works without" >&2
    exit 2
}
date >"$venv/.ready"
