"""A library that a killed compiler left cut off in Inductor's cache is compiled again, and nothing else
is.
"""

from __future__ import annotations

import os
import random
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._inductor.exc import InductorError
from torch._inductor.runtime.runtime_utils import cache_dir

from rannc_backend.errors import ConfigurationFileError
from rannc_backend.passes.pipeline import with_facts
from rannc_backend.stages import cache as compile_cache
from rannc_backend.stages import inductor as compile_inductor
from rannc_backend.stages.cache import is_cut_off, remove_broken_library

LIBRARY = Path(torch.__file__).parent / "lib" / "libshm.so"


def end_of_sections() -> int:
    """Where the library's section headers end: a packager's tool may have put something behind them."""
    header = LIBRARY.read_bytes()[:64]
    (offset,), (entry_bytes, num_entries) = (
        struct.unpack_from("<Q", header, 0x28),
        struct.unpack_from("<HH", header, 0x3A),
    )
    return offset + entry_bytes * num_entries


RUN = """
import torch
from torch import nn
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
    def forward(self, x):
        return torch.tanh(self.linear(x)) * NUMBER
model = torch.compile(Scaled(), backend="rannc", options={"report_steps": 0, "stage_compiler": "inductor"})
model(torch.ones(4, 5)).sum().backward()
print("trained")
"""


def failure(path: Path) -> Exception:
    """As Inductor wraps it."""
    error = RuntimeError("inductor")
    error.inner_exception = ImportError("file too short", name="kernel", path=str(path))  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize("kept", [0, 1, 63, 64, 1000, end_of_sections() - 1])
def test_what_is_cut_off_goes(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "kernel.so"
    path.write_bytes(LIBRARY.read_bytes()[:kept])
    assert is_cut_off(path)
    assert remove_broken_library(failure(path)) and not path.exists()
    assert remove_broken_library(failure(path)), "another rank has removed it"


def test_a_file_of_zeros_goes(tmp_path: Path) -> None:
    path = tmp_path / "kernel.so"
    path.write_bytes(bytes(5000))  # a linker fills the file in that it has made long enough
    assert remove_broken_library(failure(path)) and not path.exists()


def test_what_is_whole_stays_and_other_errors_are_left_alone(tmp_path: Path) -> None:
    path, text = tmp_path / "kernel.so", tmp_path / "kernel.py"
    path.write_bytes(LIBRARY.read_bytes())
    text.write_text("")
    assert not is_cut_off(path)
    assert not remove_broken_library(failure(path)) and path.exists(), "a missing symbol, say"
    assert not remove_broken_library(failure(text)) and text.exists()
    assert not remove_broken_library(ValueError("no library"))
    assert not remove_broken_library(ImportError("No module named 'x'"))


def test_each_attempt_has_the_whole_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[str] = []

    def attempt(graph_module: fx.GraphModule, *_: object, **__: object) -> str:
        graphs.append(str(graph_module.graph))
        assert graph_module.graph.output_node().meta["user_visible_output_idxs"] == [0]
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.relu):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
        if len(graphs) < 3:
            path = tmp_path / f"{len(graphs)}.so"
            path.touch()
            raise InductorError(ImportError("file too short", path=str(path)), None)
        if len(graphs) == 3:
            raise InductorError(ValueError("no such kernel"), None)
        return "compiled"

    monkeypatch.setattr(compile_inductor, "compile_fx_inner", attempt)
    traced = with_facts(fx.symbolic_trace(lambda value: torch.relu(value)), {"traced"})
    traced.graph.find_nodes(op="placeholder")[0].meta["val"] = torch.ones(2)
    output = traced.graph.output_node()
    output.args = ((output.args[0],),)
    arguments = {"num_visible": 1, "is_backward": False, "is_inference": True}
    with pytest.raises(InductorError, match="no such kernel"):
        compile_inductor._compile(traced, **arguments)
    assert len(graphs) == 3 and len(set(graphs)) == 1 and "relu" in graphs[0] and not list(tmp_path.iterdir())
    assert compile_inductor._compile(traced, **arguments) == "compiled"


def test_code_is_not_taken_from_a_folder_that_others_may_have_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's default in the temporary folder has a name that anybody knows."""
    own = tmp_path / "torchinductor_me"
    compile_cache.require_own(own)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    for mode in (0o700, 0o755, 0o775):
        own.chmod(mode)
        compile_cache.require_own(own)
    own.chmod(0o777)
    with pytest.raises(
        ConfigurationFileError, match=r"anybody can write into it .*\n.*TORCHINDUCTOR_CACHE_DIR"
    ):
        compile_cache.require_own(own)
    own.chmod(0o700)
    monkeypatch.setattr(compile_inductor, "default_cache_dir", lambda: str(own))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(compile_cache.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigurationFileError, match=f"belongs to another user .number {os.getuid()}"):
        compile_inductor._require_own_cache()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
    compile_inductor._require_own_cache()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(own))
    with pytest.raises(ConfigurationFileError, match="another user"):
        compile_inductor._require_own_cache()
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationFileError, match="cannot be Inductor's cache"):
        compile_cache.require_own(tmp_path / "file" / "inside")


@pytest.mark.full
def test_inductor_compiles_it_again() -> None:
    # Seen on torch 2.13. The number is in the kernels, so that no run before has compiled them.
    number = f"0.{random.SystemRandom().randrange(10**8, 10**9)}"

    def train() -> str:
        command = [sys.executable, "-c", RUN.replace("NUMBER", number)]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
        )
        assert result.returncode == 0 and "trained" in result.stdout, result.stderr[-3000:]
        return result.stderr

    assert "half written" not in train()
    own = [
        source.with_suffix(".so")
        for source in Path(cache_dir()).rglob("*.main.cpp")
        if number in source.read_text()
    ]
    assert own
    for library in own:
        library.write_bytes(b"")
    assert train().count("half written") == len(own)
    assert not any(map(is_cut_off, own))
