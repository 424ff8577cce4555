"""The cases of the golden tests: for every pass small graphs, what goes in and what comes out as text.

In: tiny functions, traced here. Out: `CASES` by "<pass>/<case>", and the texts of one, which lie in
`tests/unit/passes/golden/<pass>/<case>.in.txt` and `.out.txt`. After a wanted change write them anew and read
the difference: `python -m tests.unit.passes.golden --write`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from rannc_backend.kernels.gradient_writes import FIRST
from rannc_backend.passes import canonicalize
from rannc_backend.passes.batch.batch_axis import FindRows, KnownRows
from rannc_backend.passes.batch.batch_split import BatchSplit
from rannc_backend.passes.batch.loss_decompositions import DecomposeReductions
from rannc_backend.passes.batch.randomness import PureRandomness
from rannc_backend.passes.batch.split_reductions import SplitReductions, split_batch
from rannc_backend.passes.graph_text import graph_text
from rannc_backend.passes.pipeline import Pass, run_pass, with_facts
from rannc_backend.passes.plain_numbers import new_number
from rannc_backend.passes.size_nodes import FloatsAsTensors
from rannc_backend.passes.stage.any_layout import TakeAnyLayout
from rannc_backend.passes.stage.equal_values import ShareEqualValues
from rannc_backend.passes.stage.gradient_buckets import WriteIntoBuckets
from rannc_backend.passes.stage.lift_constants import LiftConstants
from rannc_backend.passes.stage.partition_backward import Box, DeliverEarly
from rannc_backend.passes.stage.send_slices import WriteToDestinations
from rannc_backend.passes.stage.shared_keys import KeepSharedKeys
from rannc_backend.passes.stage.single_scatters import ChooseInsteadOfScatter
from rannc_backend.passes.stage.split_backward import SplitBackward
from rannc_backend.passes.stage.split_stages import SplitStages
from rannc_backend.passes.stage.stage_boundaries import SecureGradients, SecureOutputs
from rannc_backend.stages.joint_graph import SplitJoint, TracedStage, TraceJoint, clean_tracing
from tests.unit.passes.batch.batch_tracing import Traced, trace

aten = torch.ops.aten
FOLDER = Path(__file__).with_suffix("")
X, Y = torch.zeros(4, 3), torch.ones(4, 3)


@dataclass(frozen=True)
class Case:
    """A pass and the graph that it runs on; `told` gives lines about the result that are not in its
    graphs.
    """

    graph_module: fx.GraphModule
    graph_pass: Pass[Any]
    told: Callable[[Any], Iterable[str]] = lambda result: ()

    def texts(self) -> tuple[str, str]:
        """The graph that goes in, and the graphs that come out."""
        before = _plain(graph_text(self.graph_module), [self.graph_module])
        result = run_pass(self.graph_pass, self.graph_module)
        graphs = self.graph_pass.graphs(result)
        parts = [(f"# {name}\n" if name else "") + graph_text(graph) for name, graph in graphs.items()]
        lines = "".join(f"# {line}\n" for line in self.told(result))
        return before, _plain("\n".join(parts) + lines, graphs.values())


def _plain(text: str, graphs: Iterable[fx.GraphModule]) -> str:
    """The names of the batch size, and the numbers at the end of nodes' names, differ between versions of
    torch: nodes are numbered in their order.
    """
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for graph_module in graphs:
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.name not in names:
                base = re.sub(r"(_default|_tensor|_scalar)?(_\d+)?$", "", node.name)
                names[node.name] = f"{base}_{counts[base]}" if counts[base] else base
                counts[base] += 1
    text = re.sub(r"\bs\d+\b", "rows", text)
    text = re.sub(r"\bzf\d+\b", "number", text)
    return re.sub(r"(?<![.\w])\w+(?!\()\b", lambda found: names.get(found[0], found[0]), text)


def _traced(graph_pass: Pass[Any], function: Callable[..., Any], *values: Tensor, **options: Any) -> Case:
    """The function's graph, of which holds what the pass requires."""
    mode = options.pop("mode", "fake")

    def flat(*given: Tensor) -> tuple[Any, ...]:
        result = function(*given)
        return result if isinstance(result, tuple) else (result,)

    graph_module = make_fx(flat, tracing_mode=mode)(*values)
    return Case(with_facts(graph_module, graph_pass.requires), graph_pass, **options)


# --- canonical graphs


def _checked(x: Tensor) -> Tensor:
    torch._assert_async((x.sum() != 3).all())
    return x + 1


def _slice_of_pairs(x: Tensor, y: Tensor) -> Tensor:
    return aten.slice_scatter(torch.complex(x, x), torch.complex(y, y), 0, 1, 2)


def _with_a_float(function: Callable[[Tensor, Any], Tensor]) -> Case:
    """A graph of a tensor and of the float 0.3, which comes as a tensor too."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    number = new_number(mode.shape_env, "number", 0.3)
    x, tensor = (mode.from_tensor(each, static_shapes=True) for each in (X, torch.tensor(0.3).double()))
    with mode:
        made = make_fx(lambda number, x, tensor: function(x, number))(number, x, tensor)
    first, _, last = made.graph.find_nodes(op="placeholder")
    graph_pass = FloatsAsTensors({first.name: last.name})
    return Case(
        with_facts(made, graph_pass.requires), graph_pass, lambda result: [f"needed: {len(result.needed)}"]
    )


CANONICAL_CASES: dict[str, Callable[[], Case]] = {
    "floats_as_tensors/arithmetic": lambda: _with_a_float(lambda x, b: x * (2 * (1 - b)) + b),
    "floats_as_tensors/needed": lambda: _with_a_float(lambda x, b: torch.nn.functional.leaky_relu(x, b)),
    "erase_assertions/a_check": lambda: _traced(canonicalize.EraseAssertions(), _checked, X),
    "erase_restriding/same_elements": lambda: _traced(
        canonicalize.EraseRestriding(),
        lambda x: (aten.as_strided(x, [1, 3], [9, 1]) + 1, aten.as_strided(x, [3, 1], [1, 1]) + 1),
        torch.zeros(1, 3),
    ),
    "fold_constants/one_value": lambda: _traced(
        canonicalize.FoldConstants(),
        lambda x: x * torch.tensor([2.0, 2.0, 2.0]) + torch.tensor([1.0, 2.0, 3.0]),
        X,
        mode="real",
    ),
    "fold_constants/empty_part_of_cat": lambda: _traced(
        canonicalize.FoldConstants(), lambda x, y, e: aten.cat([e, x, y]), X, Y, torch.zeros(0)
    ),
    "fold_constants/in_the_shape_of_a_sum": lambda: _traced(
        canonicalize.FoldConstants(), lambda x: x + torch.ones_like(x.sum()) + torch.full_like(x[0], 3), X
    ),
    "differentiable_fills/copy": lambda: _traced(
        canonicalize.DifferentiableFills(), lambda x, y: aten.copy(x, y), X, torch.zeros(3)
    ),
    "differentiable_fills/normal": lambda: _traced(
        canonicalize.DifferentiableFills(), lambda x: aten.normal_functional(x), X
    ),
    "named_squeezes/rows": lambda: _traced(
        canonicalize.NamedSqueezes(),
        lambda x, y: (x.unsqueeze(1).squeeze(), x.squeeze(0) + 1, y.squeeze(-1), y.squeeze((0, 1, 2))),
        X,
        torch.zeros(X.shape[0], 1, 1),
        mode="symbolic",
    ),
    "complex_scatters/slice": lambda: _traced(
        canonicalize.ComplexScatters(), _slice_of_pairs, X, torch.zeros(1, 3)
    ),
}


# --- rows


class _Applied(nn.Module):
    """A function of a batch and a parameter."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.w)


def _batch(function: Callable[[Tensor, Tensor], Any]) -> Traced:
    traced = trace(_Applied(function), {"x": X})
    with_facts(traced.graph_module, canonicalize.CANONICAL)
    return traced


def _sums(function: Callable[[Tensor, Tensor], Any]) -> Case:
    traced = _batch(function)
    # torch 2.13 has a size before what is computed from it, torch 2.15 before its first user.
    for node in traced.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        min(node.users).prepend(node)
    traced.graph_module.recompile()
    return Case(traced.graph_module, DecomposeReductions(traced.rows_symbol))


def _rows(function: Callable[[Tensor, Tensor], Any]) -> tuple[Traced, Case]:
    traced = _batch(function)
    graph_module = run_pass(DecomposeReductions(traced.rows_symbol), traced.graph_module)
    return traced, Case(graph_module, FindRows(traced.batch, traced.rows_symbol, traced.batch), _layouts)


def _layouts(found: KnownRows) -> list[str]:
    return [f"{name}: {layout}" for name, layout in found.layouts.items()]


def _random(function: Callable[[Tensor, Tensor], Any]) -> tuple[Traced, Case]:
    traced, case = _rows(function)
    found = run_pass(case.graph_pass, case.graph_module)
    return traced, Case(found.graph_module, PureRandomness(found.layouts, traced.rows_symbol))


def _reductions(function: Callable[[Tensor, Tensor], Any]) -> Case:
    traced, case = _random(function)
    pure = run_pass(case.graph_pass, case.graph_module)
    splits = SplitReductions(
        layouts=pure.layouts,
        num_user_outputs=traced.num_user_outputs,
        rows_symbol=traced.rows_symbol,
        buffer_updates=(),
        gradient_inputs=traced.parameters,
    )
    return Case(pure.graph_module, splits, _described_split)


def _described_split(split: BatchSplit) -> list[str]:
    outputs = [f"row-wise output: {output.kind} {output.name}" for output in split.outputs]
    users = [
        f"the user's output: {type(output).__name__.removeprefix('User').lower()}"
        for output in split.user_outputs
    ]
    return [*outputs, *users, f"sums before the step: {split.prologue_sums}, linear: {split.linear}"]


def _mean_square(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).square().mean()


def _sorted_tokens(x: Tensor, w: Tensor) -> Tensor:
    """A layer on elements in the order of keys, which its inverse ends."""
    keys, order = x.argmax(1).sort()
    done = (x[order] @ w)[order.argsort()] * x[:, :2]
    return done.sum() + torch.histc(keys.float(), 2, 0, 2).square().sum()


def _weighted(x: Tensor, w: Tensor) -> Tensor:
    """A mean over the elements that count, whose number is known before the step."""
    return (x @ w).sum() / (x > 0).sum()


BATCH_CASES: dict[str, Callable[[], Case]] = {
    "decompose_reductions/mean": lambda: _sums(_mean_square),
    "decompose_reductions/batch_size_as_number": lambda: _sums(lambda x, w: (x @ w).sum() / x.shape[0]),
    "batch_axis/matrix_product": lambda: _rows(_mean_square)[1],
    "batch_axis/sorted_tokens": lambda: _rows(_sorted_tokens)[1],
    "randomness/bernoulli": lambda: _random(lambda x, w: torch.bernoulli(x, 0.5) @ w)[1],
    "randomness/nothing_random": lambda: _random(lambda x, w: x @ w)[1],
    "split_reductions/mean": lambda: _reductions(_mean_square),
    "split_reductions/sum_of_inputs": lambda: _reductions(_weighted),
}


# --- stages


def _cut() -> Case:
    traced = _batch(lambda x, w: ((x @ w).tanh() @ w.t()).sum())
    split = split_batch(
        traced.graph_module,
        batch_inputs=traced.batch,
        gradient_inputs=traced.parameters,
        num_user_outputs=1,
        rows_symbol=traced.rows_symbol,
    )
    names = [node.name for node in split.rowwise.graph.nodes if node.op == "call_function"]
    place = names.index("tanh")
    splits = SplitStages(
        outputs=split.outputs,
        layouts=split.layouts,
        stage_of={name: int(index > place) for index, name in enumerate(names)},
        num_stages=2,
        input_kinds={**dict.fromkeys(traced.batch, "batch"), **dict.fromkeys(traced.parameters, "parameter")},
        rows_symbol=traced.rows_symbol,
    )
    return Case(split.rowwise, splits, _slots)


def _slots(result: Any) -> list[str]:
    return [
        f"stage {stage.index} {way}: {slot.kind} {slot.name}"
        for stage in result.stages
        for way, slots in (("takes", stage.inputs), ("gives", stage.outputs))
        for slot in slots
    ]


def _lifted() -> Case:
    constant = torch.tensor([1.0, 2.0, 3.0])
    return _traced(LiftConstants(("_tensor_constant0",)), lambda x: x * constant, X, mode="real")


def _secured() -> Case:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        value = x.sin()
        return value, value.view(12), value.t(), x, value

    graph_module = make_fx(function, tracing_mode="fake")(X)
    (fake,) = (node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder"))
    with_facts(graph_module, SecureOutputs.requires)
    return Case(
        graph_module, SecureOutputs([fake], fake.fake_mode), lambda result: [f"{result.output_index}"]
    )


def _joint() -> Case:
    """A stage as the compiler begins with it: x @ w, sin, over a batch of `rows`."""
    traced = _batch(lambda x, w: (x @ w).sin())
    with_facts(traced.graph_module, TraceJoint.requires)
    values = [node.meta["val"] for node in traced.graph_module.graph.find_nodes(op="placeholder")]
    with traced.fake_mode:
        w, x = (torch.empty(value.shape) for value in values)
        w.requires_grad_()
        x.requires_grad_()
    return Case(
        traced.graph_module,
        TraceJoint(
            fakes=[x.shape[0], w, x],
            needs_grad=[True],
            fake_mode=traced.fake_mode,
            decompositions={},
        ),
        lambda result: [f"tangents of {result.tangent_of}, gradients of {result.gradient_of}"],
    )


def _traced_joint() -> TracedStage:
    case = _joint()
    return run_pass(case.graph_pass, case.graph_module)


def _partition(budget: float) -> Case:
    traced = _traced_joint()
    run_pass(ShareEqualValues(), traced.joint)
    return Case(
        traced.joint,
        SplitJoint(traced=traced, activation_budget=budget, long_lived=(1,)),
        lambda result: [f"saved in the order {result.saved_order}"],
    )


def _simplified() -> Case:
    from rannc_backend.stages.inductor import SimplifyJoint

    @dataclass(frozen=True, slots=True)
    class Within(SimplifyJoint):
        """With the fake mode that Inductor looks for."""

        def run(self, graph_module: fx.GraphModule) -> fx.GraphModule:
            (node,) = graph_module.graph.find_nodes(op="placeholder")
            with clean_tracing(node.meta["val"].fake_mode), torch.no_grad():
                return SimplifyJoint.run(self, graph_module)

    return _traced(Within(), lambda x: x.view(4, 3).sin(), X)


def _two_gradients(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Of a weight, of a bias, of the input."""
    return x.t() @ g, g.sum(0), g.cos()


def _buckets(fuse: bool) -> Case:
    writes = WriteIntoBuckets(
        parameters={0: 10, 1: 11},
        slots={10: torch.zeros(3, 2), 11: torch.zeros(2)},
        accumulate=FIRST,
        fuse=fuse,
    )
    return _traced(
        writes,
        _two_gradients,
        X,
        torch.zeros(4, 2),
        told=lambda result: [f"gradient {position}: {how}" for position, how in result.how.items()],
    )


STAGE_CASES: dict[str, Callable[[], Case]] = {
    "split_stages/two": _cut,
    "lift_constants/one": _lifted,
    "any_layout/views": lambda: _traced(
        TakeAnyLayout(), lambda x: (x.view(12), aten.as_strided(x.sin(), [3, 4], [1, 3])), X
    ),
    "secure_outputs/all_kinds": _secured,
    "trace_joint/product": _joint,
    "simplify_joint/view_of_nothing": _simplified,
    "equal_values/twice": lambda: _traced(
        ShareEqualValues(), lambda x: (x.sin().cos() + x.sin().cos() * x.sin(),), X
    ),
    "single_scatters/of_a_loss": lambda: _traced(
        ChooseInsteadOfScatter(),
        lambda x, i, v: (x.gather(1, i), torch.zeros(4, 3).scatter_add(1, i, v)),
        X,
        torch.tensor([[0], [2], [1], [1]]),
        torch.ones(4, 1),
    ),
    "split_joint/saves": lambda: _partition(1.0),
    "split_joint/recomputes": lambda: _partition(0.0),
    "secure_gradients/turned": lambda: _traced(
        SecureGradients((0, 1)),
        lambda x: (x.sin().t(), x.view(12), x.cos()),
        X,
        told=lambda result: [f"borrowed: {result.borrowed}"],
    ),
    "split_backward/products": lambda: _traced(
        SplitBackward((0, 1)),
        lambda x, w, g: (x.t() @ g.sin(), g.sum(0), g.sin() @ w.t()),
        X,
        torch.zeros(3, 2),
        torch.zeros(4, 2),
    ),
    "split_backward/a_convolution": lambda: _traced(
        SplitBackward((1, 2)),
        lambda x, w, g: aten.convolution_backward(
            g, x, w, [2], [1], [0], [1], False, [0], 1, [True, True, True]
        ),
        torch.zeros(2, 3, 5),
        torch.zeros(2, 3, 1),
        torch.zeros(2, 2, 5),
    ),
    "split_backward/of_the_first_stage": lambda: _traced(
        SplitBackward((0, 1)), lambda x, g: (x.t() @ g, g.sum(0)), X, torch.zeros(4, 2)
    ),
    "gradient_buckets/one_by_one": lambda: _buckets(False),
    "gradient_buckets/fused": lambda: _buckets(True),
    "deliver_early/two_parameters": lambda: _traced(
        DeliverEarly({0: 10, 1: 11}, 3), _two_gradients, X, torch.zeros(4, 2)
    ),
    "send_slices/one_of_two": lambda: _traced(WriteToDestinations((1,)), lambda x: (x @ x.t(), x.sin()), X),
    "box/view": lambda: _traced(Box(), lambda x: x.view(12), X),
    "shared_keys/broadcast": lambda: _traced(
        KeepSharedKeys(), lambda x: x * (((torch.arange(3) * 5 + 1) * 7 + 2) * 3).view(1, 3).cos(), X
    ),
}

CASES = {**CANONICAL_CASES, **BATCH_CASES, **STAGE_CASES}


def paths_of(name: str) -> tuple[Path, Path]:
    """The files of a case: in and out."""
    return FOLDER / f"{name}.in.txt", FOLDER / f"{name}.out.txt"


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    for case_name, make in CASES.items():
        for path, text in zip(paths_of(case_name), make().texts(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
