"""Processes of a host that need the same graph: one compiles, the others wait, whatever becomes of the
one.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import fx

from rannc_backend.stages.once_per_host import compiled_once, digest_of

HOLDER = "import sys, time, pathlib; from rannc_backend.stages.once_per_host import compiled_once\n" + (
    "with compiled_once(pathlib.Path(sys.argv[1]), 'graph'):\n"
    "    print('held', flush=True)\n    time.sleep(60)\n"
)


def _spans(cache: Path, digests: list[str]) -> list[tuple[float, float]]:
    spans: list[tuple[float, float]] = []

    def run(digest: str) -> None:
        with compiled_once(cache, digest, wait_seconds=30):
            begin = time.monotonic()
            time.sleep(0.1)
            spans.append((begin, time.monotonic()))

    threads = [threading.Thread(target=run, args=(digest,)) for digest in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(spans) == len(digests)
    return sorted(spans)


def test_the_same_graph_is_compiled_by_one_at_a_time(tmp_path: Path) -> None:
    spans = _spans(tmp_path, ["graph"] * 3)
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:]))
    assert not list((tmp_path / "rannc_locks").iterdir())


def test_different_graphs_are_compiled_at_once(tmp_path: Path) -> None:
    spans = _spans(tmp_path, ["one", "other", "third"])
    assert max(begin for begin, _ in spans) < min(end for _, end in spans)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_holder_that_is_killed_or_frozen_holds_nobody_up(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        holder.send_signal(number)
        begin = time.monotonic()
        with compiled_once(tmp_path, "graph", wait_seconds=0.5):
            waited = time.monotonic() - begin
        holder.kill()
    assert waited < 5
    assert number != signal.SIGSTOP or waited >= 0.5


def test_a_cache_that_cannot_be_written_to_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "rannc_locks").write_text("no directory")
    with compiled_once(tmp_path, "graph"):
        pass


def _graph(width: int, slope: float) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(width, device="meta")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, slope)),))
    return fx.GraphModule({}, graph)


def test_digests_tell_graphs_apart() -> None:
    assert digest_of(_graph(4, 2.0), "forward") == digest_of(_graph(4, 2.0), "forward")
    others = [
        digest_of(_graph(5, 2.0), "forward"),
        digest_of(_graph(4, 3.0), "forward"),
        digest_of(_graph(4, 2.0), "backward"),
    ]
    assert len({digest_of(_graph(4, 2.0), "forward"), *others}) == 4
