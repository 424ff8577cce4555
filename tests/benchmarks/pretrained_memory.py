"""Private memory of each rank while a model of Hugging Face is loaded by stage and saved.

    mpirun -n 2 python -m tests.benchmarks.pretrained_memory --directory DIRECTORY [--layers 20]

In: sizes. Out: for each rank the bytes of its own parameters, and the peak of its private memory above that
after imports (those of a first call too), for loading (with the first call) and for saving, as factors of the former.
The first run writes the model that is loaded, in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch


def private_bytes() -> int:
    """Memory of this process that no other has, and no file."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    sizes = {key: int(rest.split()[0]) * 1024 for key, _, rest in (line.partition(":") for line in lines[1:])}
    return sizes["Anonymous"]


class Peak:
    """The most private memory while it lasts."""

    def __enter__(self) -> Peak:
        self.num_bytes, self._ended = private_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.is_set():
            self.num_bytes = max(self.num_bytes, private_bytes())
            time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def build(num_layers: int, width: int) -> Any:
    """A Llama in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def _compiled(net: Any, num_stages: int) -> Any:
    options = {"partition_num": num_stages, "stage_compiler": "eager"}
    return torch.compile(net, backend="rannc", options=options)


def _call(model: Any) -> None:
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 2, dtype=torch.long))


def _import_all(num_stages: int) -> None:
    """Call a model of half a megabyte: what a first call imports is in memory then, in torch and in this package."""
    _call(_compiled(build(num_stages, 32).eval(), num_stages))
    torch._dynamo.reset()
    gc.collect()


def main() -> None:
    """Load, call, save; one line per rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--write", action="store_true", help="only write the model that is loaded")
    arguments = parser.parse_args()
    if arguments.write:
        build(arguments.layers, arguments.width).save_pretrained(arguments.directory / "start")
        return
    import rannc_backend

    rank, size = rannc_backend.get_rank(), rannc_backend.get_world_size()
    if rank == 0 and not (arguments.directory / "start").exists():
        command = [sys.executable, "-m", "tests.benchmarks.pretrained_memory", *sys.argv[1:], "--write"]
        subprocess.run(command, check=True)
    rannc_backend.barrier()
    _import_all(size)
    with torch.device("meta"):
        net = build(arguments.layers, arguments.width)
    net.eval()
    before = private_bytes()
    model = _compiled(net, size)
    with Peak() as loading:
        rannc_backend.load_pretrained(net, arguments.directory / "start")
        _call(model)
    own = sum(p.nbytes for p in net.parameters() if rannc_backend.is_held(p))
    with Peak() as saving:
        rannc_backend.save_pretrained(model, arguments.directory / "saved")
    factors = [(peak.num_bytes - before) / own for peak in (loading, saving)]
    print(
        f"rank {rank}: {own / 1e6:.0f} MB of parameters, loading {factors[0]:.2f}, saving {factors[1]:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
