"""A process alone: neither torch.distributed nor MPI nor hooks; ends with "ok 0"."""

from __future__ import annotations

import os
import sys

import torch

import rannc_backend.runtime.job.bootstrap as bootstrap

before = (sys.excepthook, sys.exit, os._exit)
assert "mpi4py" not in sys.modules, "importing the runtime imports mpi4py"
world = bootstrap.start()
assert (world.rank, world.size, world.launcher, str(world.device)) == (0, 1, "single", "cpu")
assert not torch.distributed.is_initialized() and "mpi4py" not in sys.modules
assert before == (sys.excepthook, sys.exit, os._exit), "a process alone needs no hooks"
assert world.control.allgather({"a": (1, 2)}) == [{"a": [1, 2]}]
assert world.control.broadcast("x") == "x"
world.control.barrier()
world.monitor.phase("step 1")
world.monitor.begin_call()
tensor = torch.ones(2)
world.transport.allreduce(tensor, (0,)).wait()
assert tensor.tolist() == [1, 1]
print("ok 0", flush=True)
