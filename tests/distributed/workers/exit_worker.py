"""One rank of a job that trains nothing and ends in the way that the arguments name.

usage: exit_worker.py HOW [RANK]

RANK ends so, and the others wait for it; without RANK all do.
"""

from __future__ import annotations

import atexit
import errno
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import torch

import rannc_backend
from rannc_backend.checkpoint.directory import Disk
from rannc_backend.runtime.job import bootstrap
from rannc_backend.runtime.world import StartOptions


def catch_exits() -> None:
    """As who calls a command line tool's main()."""
    for status in (3, "text", None, True):
        try:
            sys.exit(status)
        except SystemExit as error:
            assert error.code == status
    try:
        raise SystemExit(4)
    except SystemExit as error:
        kept.append(error)
    assert kept[0].code == 4


def fail_to_save(*, wait: bool) -> None:
    """A save in the background that finds the disk full."""

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Disk.write_tensors = full  # type: ignore[method-assign]
    torch.manual_seed(0)
    folder = bootstrap.start().control.broadcast(tempfile.mkdtemp())
    rannc_backend.save_checkpoint(folder, torch.nn.Linear(2, 2), asynchronous=True)
    atexit.register(print, "at exit", flush=True)
    if wait:
        try:
            rannc_backend.wait_for_checkpoint()
        except rannc_backend.errors.CheckpointWriteError:
            print("told", flush=True)


kept: list[SystemExit] = []
how = sys.argv[1]
world = bootstrap.start(StartOptions(start_limit_seconds=60, limit_seconds=60))
if len(sys.argv) > 2 and int(sys.argv[2]) != world.rank:
    world.control.barrier(what="the rank that ends")
elif len(sys.argv) > 2:
    time.sleep(0.3)
    sys.stderr.write(f"FAULT_AT {time.time()}\n")
    sys.stderr.flush()
if how == "caught":
    catch_exits()
elif how == "raise_3":
    catch_exits()
    raise SystemExit(3)
elif how == "text":
    sys.exit("the reason why")
elif how == "none":
    sys.exit(None)
elif how == "atexit_hook":
    atexit.register(sys.exit, 5)
elif how == "save":
    fail_to_save(wait=False)
elif how == "save_told":
    fail_to_save(wait=True)
print(f"{Path(__file__).stem} ok {world.rank}", flush=True)
