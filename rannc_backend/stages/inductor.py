"""Compile forward, backward and inference graphs with Inductor.

In: graphs of `compile_joint` with fakes in ``meta["val"]``. Out: boxed callables (one list of inputs, emptied
by the call). Everything that is private to Inductor is used in this file; seen on torch 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.runtime_utils import default_cache_dir
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode

from rannc_backend.passes.graph_queries import output_values
from rannc_backend.passes.pipeline import GraphPass, run_pass
from rannc_backend.passes.stage.partition_backward import Box
from rannc_backend.passes.stage.shared_keys import KeepSharedKeys
from rannc_backend.stages.cache import remove_broken_library, require_own
from rannc_backend.stages.compile_ahead import begin_header, kernels_ahead
from rannc_backend.stages.joint_graph import BoxedCallable, clean_tracing
from rannc_backend.stages.once_per_host import compiled_once, digest_of
from rannc_backend.stages.quicker_compiler import quicker_compilation

# A graph has a library per fused kernel on a CPU; each attempt mends one.
_MAX_BROKEN_LIBRARIES = 64


def begin_compiling(devices: Iterable[str]) -> None:
    """Graphs on devices of these types are compiled soon: begin what can be begun before they are traced."""
    if "cpu" in devices:
        _require_own_cache()
        with _settings():
            begin_header()


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The operators that Inductor wants to see decomposed; graphs must be traced with them."""
    return dict(select_decomp_table())


@dataclass(frozen=True, slots=True)
class SimplifyJoint(GraphPass):
    """Inductor's own passes over a graph before it is split or (inference) compiled: attention patterns,
    constants, views. In place.
    """

    name: ClassVar[str] = "simplify_joint"
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})
    provides: ClassVar[frozenset[str]] = frozenset({"simplified"})

    def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        joint_graph_passes(graph_module)
        return graph_module


def simplify_joint(joint: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
    """Run `SimplifyJoint` with Inductor's settings."""
    with _compiling(fake_mode):
        run_pass(SimplifyJoint(), joint)


def compile_chain(
    graphs: Sequence[fx.GraphModule],
    *,
    num_visible: Sequence[int],
    orders: Sequence[Sequence[int]],
    fake_mode: FakeTensorMode,
) -> list[BoxedCallable]:
    """Compile a forward and its backward, in one or two parts, each for the strides that the values really have which
    the one before it keeps.

    Args:
        graphs: the forward graph first.
        num_visible: of each graph, how many outputs come before those that are kept for the next one.
        orders: of each graph but the first, which of those its first inputs are.
    """
    with _compiling(fake_mode):
        context = TracingContext.get()
        # With this flag the strides are reported as expressions in the batch size, not as their values for
        # the hint.
        context.fakify_first_call = True
        compiled: list[BoxedCallable] = []
        strides: Sequence[Any] = ()
        for place, (graph, visible) in enumerate(zip(graphs, num_visible, strict=False)):
            if place:
                inputs = graph.graph.find_nodes(op="placeholder")
                for node, position in zip(inputs, orders[place - 1], strict=False):
                    stride = strides[position] if position < len(strides) else None
                    if stride is not None:
                        _restride(node, stride)
            if not any(node.op == "call_function" for node in graph.graph.nodes):
                compiled.append(run_pass(Box(), graph).forward)
                strides = [_stride(node) for node in output_values(graph.graph)[visible:]]
                continue
            is_last = place + 1 == len(graphs)
            context.output_strides = None if is_last else []
            compiled.append(
                _compile(
                    graph, num_visible=0 if is_last else visible, is_backward=place > 0, is_inference=False
                )
            )
            strides = list(context.output_strides or ())[visible:]
        context.output_strides = None
    return compiled


def _stride(node: fx.Node) -> Sequence[Any] | None:
    value = node.meta["val"]
    return value.stride() if isinstance(value, torch.Tensor) else None


def compile_forward_only(graph_module: fx.GraphModule, fake_mode: FakeTensorMode) -> BoxedCallable:
    """Compile a graph of which nothing is kept for a backward."""
    with _compiling(fake_mode):
        run_pass(SimplifyJoint(), graph_module)
        (output,) = graph_module.graph.find_nodes(op="output")
        return _compile(graph_module, num_visible=len(output.args[0]), is_backward=False, is_inference=True)


def _compile(
    graph_module: fx.GraphModule, *, num_visible: int, is_backward: bool, is_inference: bool
) -> BoxedCallable:
    (output,) = graph_module.graph.find_nodes(op="output")
    # Inductor may choose the strides of the others.
    output.meta["user_visible_output_idxs"] = list(range(num_visible))
    fakes = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    run_pass(KeepSharedKeys(), graph_module)
    with _once(graph_module, f"{num_visible} {is_backward} {is_inference}"):
        for _ in range(_MAX_BROKEN_LIBRARIES):
            try:
                return compile_fx_inner(
                    _copy(graph_module),
                    fakes,
                    static_input_idxs=(),
                    is_backward=is_backward,
                    is_inference=is_inference,
                )
            except (InductorError, ImportError) as error:  # bare where the graph was in the cache
                if not remove_broken_library(error):
                    raise
        raise AssertionError(f"{_MAX_BROKEN_LIBRARIES} libraries in Inductor's cache were broken")


def _once(graph_module: fx.GraphModule, what: str) -> AbstractContextManager[None]:
    """Waits for another rank of this host that compiles the same; where nothing is cached, that would be for
    nothing.
    """
    if inductor_config.force_disable_caches or not inductor_config.fx_graph_cache:
        return contextlib.nullcontext()
    return compiled_once(Path(cache_dir()), digest_of(graph_module, what))


def _copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Inductor changes the graph that it is given: each attempt gets its own."""
    copied = fx.GraphModule(
        graph_module, copy.deepcopy(graph_module.graph)
    )  # nodes and their notes; values are shared
    copied.meta.update(graph_module.meta)
    return copied


def _restride(node: fx.Node, stride: Sequence[Any]) -> None:
    value = node.meta["val"]
    expressions = [getattr(getattr(size, "node", None), "expr", size) for size in value.stride()]
    if expressions != [getattr(getattr(size, "node", None), "expr", size) for size in stride]:
        node.meta["val"] = value.as_strided(value.size(), stride)


def _require_own_cache() -> None:
    """The default's name can be guessed, and the folder made by another user; one that the user names is the
    user's choice.
    """
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if chosen is None or os.path.abspath(chosen) == os.path.abspath(default_cache_dir()):
        require_own(Path(default_cache_dir()))


@contextlib.contextmanager
def _compiling(fake_mode: FakeTensorMode) -> Iterator[None]:
    _require_own_cache()
    with (
        clean_tracing(fake_mode),
        torch.no_grad(),
        V.set_fake_mode(fake_mode),
        _settings(),
        kernels_ahead(),
        quicker_compilation(),
    ):
        yield


def _settings() -> AbstractContextManager[None]:
    return inductor_config.patch({"triton.cudagraphs": False, "freezing": False, "cpp_wrapper": False})
