"""Compiled stages, chained by hand, give the uncut model's outputs and gradients; planted faults are seen."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

from rannc_backend.errors import UnsupportedModelError
from rannc_backend.passes.stage.split_stages import StageGraph
from rannc_backend.planner.blocks.partitions import StagePartition, partitions_of
from rannc_backend.stages.compiled_stage import CompileCache, CompiledStage
from rannc_backend.stages.gradient_sink import ScratchGradients
from tests.choice import mostly
from tests.unit.stage_models import Results, Rowwise, capture, relative_error, run_pipeline
from tests.unit.stage_networks import NETWORKS, Network

EXACT = 1e-12
SIZES = (3, 3, 1, 1)


@functools.cache
def captured(name: str, dtype: torch.dtype = torch.float64) -> tuple[Network, nn.Module, Rowwise]:
    torch.manual_seed(0)
    network = NETWORKS[name]
    model = network.build().to(dtype)
    return network, model, capture(model, network.function, network.inputs(6), ["rows", "partial"])


def expected_results(
    network: Network,
    model: nn.Module,
    rowwise: Rowwise,
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    grad: Tensor,
) -> Results:
    """The uncut model under autograd: one batch, or micro-batch by micro-batch where statistics are taken
    over it.
    """
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    chunks = list(sizes) if network.batch_statistics else [sum(sizes)]
    rows, partials = [], []
    for *parts, part_grad in zip(*(leaf.split(chunks) for leaf in leaves), grad.split(chunks), strict=True):
        value, partial = network.function(model, *parts)
        ((value * part_grad).sum() + 0.5 * partial).backward()
        rows.append(value.detach())
        partials.append(partial.detach())
    fqn_of = {id(p): n for n, p in rowwise.parameters.items()}
    results = Results(
        partials={rowwise.outputs[-1].name: torch.stack(partials).sum()},
        rows={rowwise.outputs[-2].name: torch.cat(rows)},
        parameter_gradients={fqn_of[id(p)]: p.grad for p in model.parameters() if p.grad is not None},
        input_gradients={
            name: leaf.grad
            for name, leaf in zip(rowwise.batch_names, leaves, strict=True)
            if leaf.grad is not None
        },
        buffers={n: dict(model.named_buffers())[f].clone() for n, f in rowwise.buffer_fqns.items()},
    )
    with torch.no_grad():
        model.zero_grad()
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
    return results


def worst_error(actual: Results, expected: Results) -> float:
    """Largest relative error over all values; gradients relative to the largest gradient of the model."""
    errors = []
    scale = max(gradient.abs().max().item() for gradient in expected.parameter_gradients.values())
    for name, value in expected.parameter_gradients.items():
        errors.append((actual.parameter_gradients[name] - value).abs().max().item() / scale)
    for field in ("partials", "rows", "input_gradients", "buffers"):
        wanted = getattr(expected, field)
        assert set(wanted) <= set(getattr(actual, field)), field
        errors += [relative_error(getattr(actual, field)[name], value) for name, value in wanted.items()]
    assert set(actual.parameter_gradients) == set(expected.parameter_gradients)
    return max(errors)


def compare(
    name: str, stages: Sequence[CompiledStage], sizes: Sequence[int], *, partial_gradient: float = 0.5
) -> float:
    """Run the stages and the uncut model; give the worst error."""
    network, model, rowwise = captured(name)
    torch.manual_seed(1)
    inputs = network.inputs(sum(sizes))
    grad = torch.randn_like(network.function(model.eval(), *inputs)[0].detach())
    model.train()
    expected = expected_results(network, model, rowwise, inputs, sizes, grad)
    rows_name, partial_name = (output.name for output in rowwise.outputs[-2:])
    seed = torch.tensor(partial_gradient, dtype=torch.float64)
    actual = run_pipeline(rowwise, stages, inputs, sizes, {rows_name: grad}, {partial_name: seed})
    return worst_error(actual, expected)


@pytest.mark.parametrize(
    ("name", "num_stages"),
    mostly(
        itertools.product(NETWORKS, (1, 2, 3, 4)),
        list(itertools.product([name for name in NETWORKS if name not in ("gpt2", "bert")], (2, 4))),
    ),
)
def test_stages_equal_the_uncut_model(name: str, num_stages: int) -> None:
    _, _, rowwise = captured(name)
    stages = rowwise.compile(rowwise.cut(num_stages))
    assert compare(name, stages, SIZES) <= EXACT


@pytest.mark.parametrize("name", ["skip", "awkward", "convolutions"])
def test_every_place_can_be_cut(name: str) -> None:
    _, _, rowwise = captured(name)
    cache = CompileCache()
    step = 1 + len(rowwise.staged_names) // 12
    for place in range(1, len(rowwise.staged_names), step):
        stages = rowwise.compile(rowwise.cut(2, [place]), cache=cache)
        assert compare(name, stages, (2, 1)) <= EXACT, rowwise.staged_names[place]


@pytest.mark.parametrize(
    ("name", "budget"),
    mostly(
        itertools.product(["gpt2", "convolutions"], [0.5, 0.0]),
        [("gpt2", 0.5), ("convolutions", 0.5), ("convolutions", 0.0)],
    ),
)
def test_recompute_changes_no_number(name: str, budget: float) -> None:
    _, _, rowwise = captured(name)
    stages = rowwise.compile(rowwise.cut(2), activation_budget=budget)
    assert compare(name, stages, SIZES) <= EXACT


def test_less_budget_saves_less() -> None:
    _, _, rowwise = captured("gpt2")
    sizes = []
    for budget in (1.0, 0.5, 0.0):
        (stage,) = rowwise.compile(rowwise.cut(4)[1:2], activation_budget=budget)
        sizes.append(stage.saved_bytes.subs(rowwise.rows_symbol, 8))
    assert sizes[0] > sizes[1] > sizes[2] > 0


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
@pytest.mark.parametrize("name", ["gpt2", "awkward", "tied"])
def test_one_compilation_serves_any_number_of_rows(name: str, rows: int) -> None:
    _, _, rowwise = captured(name)
    stages = rowwise.compile(rowwise.cut(3), cache=_cache_for(name))
    assert compare(name, stages, (rows,)) <= EXACT


@functools.cache
def _cache_for(name: str) -> CompileCache:
    return CompileCache()


def test_a_wrong_seed_is_seen() -> None:
    _, _, rowwise = captured("perceptron")
    assert compare("perceptron", rowwise.compile(rowwise.cut(2)), SIZES, partial_gradient=0.51) > 1e-4


def test_swapped_parameter_gradients_are_seen() -> None:
    _, _, rowwise = captured("perceptron")
    stages = rowwise.compile(rowwise.cut(2))
    weights = [
        p for p in stages[0].grad_parameters if rowwise.parameters[stages[0].inputs[p].name].dim() == 2
    ]
    honest = stages[0].backward

    def swapped(saved: Any, grads: Any, sink: Any) -> list[Tensor]:
        other = {weights[0]: weights[1], weights[1]: weights[0]}
        own = stages[0].scratch_gradients()
        returned = honest(saved, grads, own)
        for position, gradient in own.gradients.items():
            sink.target(other.get(position, position))[0].copy_(gradient)
            sink.made(other.get(position, position))
        return returned

    stages[0].backward = swapped  # type: ignore[method-assign]
    assert compare("perceptron", stages, SIZES) > 1e-4


def test_a_dropped_boundary_gradient_is_seen() -> None:
    _, _, rowwise = captured("skip")
    stages = rowwise.compile(rowwise.cut(4))
    honest = stages[3].backward

    def dropping(saved: Any, grads: Any, sink: Any) -> list[Tensor]:
        return [torch.zeros_like(g) if i == 0 else g for i, g in enumerate(honest(saved, grads, sink))]

    stages[3].backward = dropping  # type: ignore[method-assign]
    assert compare("skip", stages, SIZES) > 1e-4


def _forward_args(rowwise: Rowwise, stage: CompiledStage, inputs: Sequence[Tensor]) -> list[Tensor]:
    values = {**rowwise.parameters, **rowwise.buffers, **dict(zip(rowwise.batch_names, inputs, strict=True))}
    return [values[source.name] for source in stage.inputs]


def one_stage(
    name: str, rows: int = 4, **options: Any
) -> tuple[CompiledStage, list[Tensor], list[Tensor], Any]:
    network, _, rowwise = captured(name)
    (stage,) = rowwise.compile(rowwise.cut(1), **options)
    args = _forward_args(rowwise, stage, network.inputs(rows))
    outputs, saved = stage.forward(args)
    return stage, args, outputs, saved


def test_saved_values_serve_twice_unless_handed_over() -> None:
    stage, _, outputs, saved = one_stage("gpt2")
    grads = [torch.ones_like(outputs[position]) for position in stage.grad_outputs]
    sinks = [stage.scratch_gradients() for _ in range(3)]
    handed_over = list(saved)
    for kept, sink in zip((saved, saved, handed_over), sinks, strict=True):
        stage.backward(kept, grads, sink)
    runs = [sink.gradients for sink in sinks]
    assert handed_over == []
    assert isinstance(saved, tuple)
    assert set(runs[0]) == set(stage.grad_parameters)
    for position in runs[0]:
        assert torch.equal(runs[0][position], runs[1][position])
        assert torch.equal(runs[0][position], runs[2][position])


def test_gradients_come_early_and_saved_values_go_early() -> None:
    stage, args, outputs, saved = one_stage("perceptron")
    saved = list(saved)
    given = {id(arg) for arg in args} | {id(output) for output in outputs}
    watched = [weakref.ref(v) for v in saved if isinstance(v, Tensor) and id(v) not in given]
    assert len(watched) >= 3
    grads = [torch.ones_like(outputs[position]) for position in stage.grad_outputs]
    alive_at: list[int] = []
    sink = stage.scratch_gradients()
    sink.on_made = lambda position: alive_at.append(sum(w() is not None for w in watched))
    stage.backward(saved, grads, sink)
    assert len(alive_at) == 8
    # Something is still kept when the first gradient comes, and less and less after it.
    assert alive_at[0] > alive_at[4] > alive_at[-1] or alive_at[0] > alive_at[-1] == 0
    _, saved_again = stage.forward(args)
    again = stage.scratch_gradients()
    stage.backward(saved_again, grads, again)
    used = [position for position, source in enumerate(stage.inputs) if source.kind == "parameter"]
    assert set(again.order[:2]) == set(used[-2:]), "the last layer's gradients come first"


def test_nothing_of_autograd_is_recorded_and_inputs_stay() -> None:
    network, _, rowwise = captured("convolutions")
    (stage,) = rowwise.compile(rowwise.cut(1))
    args = _forward_args(rowwise, stage, network.inputs(4))
    before = [arg.detach().clone() for arg in args]
    outputs, saved = stage.forward(args)
    assert not any(output.requires_grad for output in outputs)
    tensors = [value for value in saved if isinstance(value, Tensor)]
    assert all(value.grad_fn is None for value in tensors)
    assert saved[0] == (4,) and all(isinstance(value, (Tensor, int)) for value in saved[1:])
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_infer_gives_the_outputs_of_forward() -> None:
    for name in ("gpt2", "awkward", "convolutions"):
        stage, args, outputs, _ = one_stage(name)
        for actual, expected in zip(stage.infer(args), outputs, strict=True):
            assert torch.allclose(actual.double(), expected.double(), rtol=1e-14, atol=1e-14)


def test_compiled_for_inference_only() -> None:
    network, _, rowwise = captured("perceptron")
    (stage,) = rowwise.compile(rowwise.cut(1), training=False)
    args = _forward_args(rowwise, stage, network.inputs(2))
    assert stage.infer(args)[0].shape == (2, 6)
    assert stage.grad_parameters == ()
    with pytest.raises(AssertionError, match="inference only"):
        stage.forward(args)


def test_equal_stages_compile_once() -> None:
    _, _, rowwise = captured("perceptron")
    cache = CompileCache()
    names = rowwise.staged_names
    quarter = [i for i, n in enumerate(names) if n.startswith("tanh")]
    stages = rowwise.compile(rowwise.cut(4, [i + 1 for i in quarter[:-1]]), cache=cache)
    # The first stage differs in its input's kind, the last in its outputs.
    assert cache.num_hits == 1
    assert stages[1]._variants is stages[2]._variants
    assert compare("perceptron", stages, SIZES) <= EXACT
    rowwise.compile(rowwise.cut(4, [i + 1 for i in quarter[:-1]]), cache=cache, activation_budget=0.5)
    assert cache.num_hits == 2, "another budget is another compilation, shared by two stages again"


def test_constants_do_not_separate_equal_stages() -> None:
    class Shifts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first = torch.sin(x + torch.tensor([1.0, 2.0], dtype=x.dtype))
            return torch.sin(first + torch.tensor([3.0, 4.0], dtype=x.dtype)).cos()

    torch.manual_seed(0)
    x = torch.randn(6, 2, dtype=torch.float64)
    rowwise = capture(Shifts(), lambda m, v: (m(v),), [x], ["rows"])
    places = [i + 1 for i, n in enumerate(rowwise.staged_names) if n.startswith("sin")]
    stages = rowwise.compile(rowwise.cut(3, places), needs_grad=frozenset(), cache=CompileCache())
    value = x
    for stage in stages:
        value = stage.forward([value])[0][0]
    assert torch.equal(value, Shifts()(x))


def test_gradients_of_a_value_listed_twice_are_summed() -> None:
    # tanh is a boundary value and a user output.
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            inner = torch.tanh(x)
            return inner, inner.sin()

    x = torch.randn(6, 3, dtype=torch.float64)
    rowwise = capture(Twice(), lambda m, v: m(v), [x], ["rows", "rows"])
    first, second = rowwise.compile(rowwise.cut(2, [1]))
    assert [output.kind for output in first.outputs] == ["boundary", "rows"]
    (boundary, shown), saved = first.forward([x])
    assert torch.equal(boundary, shown)
    one, two = torch.randn_like(x), torch.randn_like(x)
    (gradient,) = first.backward(saved, [one, two], _no_sink(first))
    leaf = x.clone().requires_grad_()
    torch.tanh(leaf).backward(one + two)
    assert relative_error(gradient, leaf.grad) <= EXACT
    (only_one,) = first.backward(saved, [one, None], _no_sink(first))
    assert relative_error(only_one, one * (1 - torch.tanh(x) ** 2)) <= EXACT
    (nothing,) = first.backward(saved, [None, None], _no_sink(first))
    assert torch.equal(nothing, torch.zeros_like(x))


def test_too_many_names_in_needs_grad_are_harmless() -> None:
    class Stopped(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.detach().sin() * 2.0, x.round().to(torch.int64)

    x = torch.randn(6, 3, dtype=torch.float64)
    rowwise = capture(Stopped(), lambda m, v: m(v), [x], ["rows", "rows"])
    (stage,) = rowwise.compile(rowwise.cut(1))
    outputs, saved = stage.forward([x[:5]])
    assert stage.grad_outputs == (0,), "integers take no gradient"
    (gradient,) = stage.backward(saved, [torch.ones_like(outputs[0])], _no_sink(stage))
    assert torch.equal(gradient, torch.zeros(5, 3, dtype=torch.float64))


def test_outputs_and_gradients_own_their_memory() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            value = x * 2.0
            return x.view(-1, 2, 2), value, value.transpose(0, 1)[:2].transpose(0, 1)

    x = torch.randn(6, 4, dtype=torch.float64)
    rowwise = capture(Views(), lambda m, v: m(v), [x], ["rows"] * 3)
    (stage,) = rowwise.compile(rowwise.cut(1))
    outputs, saved = stage.forward([x])
    assert all(output.is_contiguous() for output in outputs)
    assert all(output.untyped_storage().nbytes() == output.numel() * 8 for output in outputs)
    pointers = {output.untyped_storage().data_ptr() for output in outputs}
    assert x.untyped_storage().data_ptr() not in pointers
    grads = [torch.randn_like(outputs[position]) for position in stage.grad_outputs]
    (gradient,) = stage.backward(saved, grads, _no_sink(stage))
    leaf = x.clone().requires_grad_()
    torch.autograd.backward(Views()(leaf), grads)
    assert relative_error(gradient, leaf.grad) <= EXACT

    class Passing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1.0

    rowwise = capture(Passing(), lambda m, v: (m(v),), [x], ["rows"])
    (stage,) = rowwise.compile(rowwise.cut(1))
    (output,), saved = stage.forward([x])
    grad = torch.randn_like(output)
    (gradient,) = stage.backward(saved, [grad], _no_sink(stage))
    assert torch.equal(gradient, grad)
    assert gradient.untyped_storage().data_ptr() != grad.untyped_storage().data_ptr()


def test_inputs_and_gradients_may_be_strided_or_of_another_dtype() -> None:
    network, _, rowwise = captured("perceptron")
    (stage,) = rowwise.compile(rowwise.cut(1))
    x = network.inputs(4)[0]
    strided = torch.cat([x, x], dim=1)[:, :6]
    assert not strided.is_contiguous()
    results = []
    for value in (x, strided):
        outputs, saved = stage.forward(_forward_args(rowwise, stage, [value]))
        grads = [torch.ones((), dtype=torch.float32).expand(outputs[p].shape) for p in stage.grad_outputs]
        results.append(stage.backward(saved, grads, stage.scratch_gradients())[0])
    assert torch.equal(results[0], results[1])


def test_autocast_of_the_caller_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    x = torch.randn(6, 6)
    rowwise = capture(model, lambda m, v: (m(v),), [x], ["rows"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (stage,) = rowwise.compile(rowwise.cut(1))
        args = _forward_args(rowwise, stage, [x])
        (output,), saved = stage.forward(args)
        sink = stage.scratch_gradients()
        (gradient,) = stage.backward(saved, [torch.ones_like(output)], sink)
    assert {value.dtype for value in (output, gradient, *sink.gradients.values())} == {torch.float32}
    assert relative_error(output, model(x).detach()) <= 1e-6
    assert relative_error(gradient, torch.ones(6, 6) @ model.weight.detach()) <= 1e-6


def _partition(rowwise: Rowwise, stage_graph: StageGraph) -> StagePartition:
    (partition,) = partitions_of(
        stage_graph,
        needs_grad=frozenset(node.name for node in rowwise.graph_module.graph.nodes),
        requires_grad_parameters=frozenset(rowwise.parameters),
        rows_symbol=rowwise.rows_symbol,
        compiler="eager",
    )
    return partition


@pytest.mark.parametrize("name", mostly(NETWORKS, [name for name in NETWORKS if name != "bert"]))
def test_no_operator_of_the_two_graphs_changes_its_operands(name: str) -> None:
    # Operators are moved and computed twice in the belief that they only give values.
    _, _, rowwise = captured(name)
    partition = _partition(rowwise, rowwise.cut(1)[0])
    assert partition.backward is not None
    for node in [*partition.forward.graph.nodes, *partition.backward.graph.nodes]:
        assert not getattr(getattr(node.target, "_schema", None), "is_mutable", False), node


def test_saved_bytes_are_what_is_saved() -> None:
    # In float64, torch before 2.13 expects attention's sums of exponentials in float32.
    network, _, rowwise = captured("gpt2", torch.float32)
    for stage_graph in rowwise.cut(2)[:1]:
        (stage,) = rowwise.compile([stage_graph])
        args = _forward_args(rowwise, stage, network.inputs(5))
        _, saved = stage.forward(args)
        kept_anyway = {
            arg.untyped_storage().data_ptr()
            for arg, s in zip(args, stage.inputs, strict=True)
            if s.kind != "batch"
        }
        storages = {
            value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
            for value in saved
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in kept_anyway
        }
        assert stage.saved_bytes.subs(rowwise.rows_symbol, 5) == sum(storages.values())
        assert stage.saved_bytes.free_symbols == {rowwise.rows_symbol}
        estimate = _partition(rowwise, stage_graph)
        estimated = estimate.saved_bytes.subs(estimate.rows_symbol, rowwise.rows_symbol)
        assert sympy.simplify(estimated - stage.saved_bytes) == 0


@pytest.mark.parametrize("name", mostly(NETWORKS, [name for name in NETWORKS if name != "bert"]))
def test_no_batch_size_is_assumed(name: str) -> None:
    _, _, rowwise = captured(name)
    stages = rowwise.compile(rowwise.cut(2))
    assert all(stage._variants.built[0].size_conditions() == () for stage in stages)


def test_a_batch_size_that_compilation_excluded_is_compiled_for_again() -> None:
    x = torch.randn(6, 3)
    rowwise = capture(nn.Tanh(), lambda m, v: (m(v),), [x], ["rows"])
    (stage,) = rowwise.compile(rowwise.cut(1))
    stage.forward([x[:3]])
    size = rowwise.graph_module.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
    assert size < 100
    (stage,) = rowwise.compile(rowwise.cut(1))
    stage.forward([torch.randn(99, 3)])
    assert len(stage._variants.built) == 1
    large = torch.randn(100, 3)
    torch.testing.assert_close(stage.forward([large])[0][0], large.tanh())
    torch.testing.assert_close(stage.infer([large])[0], large.tanh())
    assert len(stage._variants.built) == 2
    assert size == 6
    with pytest.raises(UnsupportedModelError, match="one batch size only"):
        rowwise.compile(rowwise.cut(1))[0].forward([x])


def _no_sink(stage: CompiledStage) -> ScratchGradients:
    assert stage.grad_parameters == (), "no parameter has a gradient"
    return stage.scratch_gradients()


def test_kernel_choice_of_a_convolution_does_not_limit_the_batch() -> None:
    # oneDNN takes batches from 16 samples on; a trace at a larger hint must serve smaller ones too.
    network, _, rowwise = captured("convolutions")
    (stage,) = rowwise.compile(rowwise.cut(1))
    shape_env = rowwise.fake_mode.shape_env
    assert all("16" not in str(condition) for condition in stage._variants.built[0].size_conditions()), (
        shape_env.guards
    )
