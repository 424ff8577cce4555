"""From a stage graph to its forward and backward graphs.

In: a stage graph whose outputs are safe (see `passes.stage_boundaries`), fake inputs that say what requires a
gradient.
Out: `TracedStage` (one joint graph of forward and backward), then `SplitStage` (two graphs and what passes
between them). What is private to torch's AOTAutograd is used in this file; seen on torch 2.13.

Terms. The joint graph's *primals* are the batch size (a number) and the stage's inputs; its *tangents* are
the gradients of those outputs that require one. The *activation budget* is the part of the default amount of
saved values that may be saved; 1.0 is the default, less makes backward recompute more. At SEGMENTS_BUDGET what
goes from one segment of the stage to a later one is saved, and the rest is computed again, segment by segment.
"""

from __future__ import annotations

import contextlib
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
import torch._functorch.config as functorch_config
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.graph_capture_wrappers import set_partitioner_tag_is_backward
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rannc_backend.errors import UnsupportedModelError
from rannc_backend.passes.pipeline import Pass
from rannc_backend.passes.stage.liveness import storages
from rannc_backend.passes.stage.recompute import choose_recomputed, lift_marks, with_mark
from rannc_backend.settings.choices import SEGMENTS_BUDGET

aten = torch.ops.aten
BoxedCallable = Callable[[list[Any]], Sequence[Any]]
"""One list of inputs, which the call empties."""

# Operators that functionalization has left without a derivative, and the forms that have one but write
# running statistics.
_MUTATING_FORMS = {
    aten._native_batch_norm_legit_functional.default: aten._native_batch_norm_legit.default,
    aten._batch_norm_with_update_functional.default: aten._batch_norm_with_update.default,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStage:
    """Joint graph: outputs are `num_outputs` results of forward, then one gradient per element of
    `gradient_of`.

    `tangent_of[i]` is the output that tangent i is the gradient of, `gradient_of[i]` the input (the batch
    size counts as input 0) that gradient i belongs to. Without tangents there is no backward.
    """

    joint: fx.GraphModule
    num_outputs: int
    tangent_of: tuple[int, ...]
    gradient_of: tuple[int, ...]

    def named_graphs(self) -> dict[str, fx.GraphModule]:
        return {"": self.joint}


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStage:
    """Forward graph: (batch size, *inputs) to (*outputs, *saved). Backward: (*saved by `saved_order`,
    *tangents).
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved_order: tuple[int, ...]

    def named_graphs(self) -> dict[str, fx.GraphModule]:
        return {"forward": self.forward, "backward": self.backward}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJoint(Pass[TracedStage]):
    """The pass of `trace_joint`; fields as its arguments."""

    name: ClassVar[str] = "trace_joint"
    requires: ClassVar[frozenset[str]] = frozenset({"safe_outputs"})
    provides: ClassVar[frozenset[str]] = frozenset({"traced", "joint", "all_outputs", "all_gradients"})
    fakes: Sequence[Any]
    needs_grad: Sequence[bool]
    fake_mode: FakeTensorMode
    decompositions: Mapping[Any, Callable[..., Any]]

    def run(self, graph_module: fx.GraphModule) -> TracedStage:
        return trace_joint(graph_module, self.fakes, self.needs_grad, self.fake_mode, self.decompositions)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitJoint(Pass[SplitStage]):
    """The pass of `split_joint`, on the joint graph of `traced`; fields as its arguments."""

    name: ClassVar[str] = "split_joint"
    requires: ClassVar[frozenset[str]] = frozenset({"joint", "values_shared", "all_outputs"})
    provides: ClassVar[frozenset[str]] = frozenset({"partitioned"})
    ends: ClassVar[frozenset[str]] = frozenset({"joint", "values_shared"})
    traced: TracedStage
    activation_budget: float
    long_lived: Sequence[int]

    def run(self, graph_module: fx.GraphModule) -> SplitStage:
        assert graph_module is self.traced.joint, "the joint graph of another stage"
        return split_joint(self.traced, activation_budget=self.activation_budget, long_lived=self.long_lived)


def trace_joint(
    graph_module: fx.GraphModule,
    fakes: Sequence[Any],
    needs_grad: Sequence[bool],
    fake_mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> TracedStage:
    """Trace forward and backward of a stage, once and without the layer that takes mutation out where nothing
    mutates.

    Args:
        graph_module: placeholders are the inputs without the batch size; outputs are distinct tensors,
        ``meta["val"]`` set.
        fakes: the batch size (SymInt), then one fake tensor per placeholder, with `requires_grad` set.
        needs_grad: per output, whether it takes a gradient.
    """
    tracer = _JointTracer(graph_module, fakes, needs_grad, fake_mode, decompositions)
    joint = (
        None
        if any(node.target in _MUTATING_FORMS for node in graph_module.graph.nodes)
        else tracer.trace(functionalized=False)
    )
    if joint is None or not write_elsewhere(joint):
        joint = tracer.trace(functionalized=True)
    return TracedStage(
        joint=joint, num_outputs=len(needs_grad), tangent_of=tracer.tangent_of, gradient_of=tracer.gradient_of
    )


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def write_elsewhere(joint: fx.GraphModule) -> bool:
    """Let operators of a graph that change an operand give a new value instead; False where one cannot.

    An operand whose memory nobody has seen before the change is known by the change's result alone, so that
    all who read it afterwards may read the new value: tracing a second time does the same for all others.
    """
    order = {node: place for place, node in enumerate(joint.graph.nodes)}
    changes = {node for node in order if _mutates(node)}
    if not changes:
        return True
    users: dict[int, list[fx.Node]] = {}
    for node in order:
        for memory in storages(node):
            users.setdefault(memory, []).append(node)
    for node in sorted(changes, key=order.__getitem__):
        operand, form = node.args[0] if node.args else None, _form_without_change(node.target)
        if form is None or not isinstance(operand, fx.Node) or operand.op != "call_function":
            return False
        others = [user for memory in storages(operand) for user in users[memory] if user is not operand]
        if any(order[user] < order[node] for user in others) or len(changes.intersection(others)) > 1:
            return False
        value = operand.meta["val"]
        with value.fake_mode:
            operand.meta["val"] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
        node.target = form
        for user in [user for user in operand.users if order[user] > order[node]]:
            user.replace_input_with(operand, node)
    joint.recompile()
    return True


def _form_without_change(target: Any) -> Any:
    """`aten.f` for `aten.f_`, which changes its first operand and gives it back; None where there is none."""
    schema = target._schema
    space, _, name = schema.name.partition("::")
    changed = [
        argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
    ]
    is_plain = space == "aten" and name.endswith("_") and not name.endswith("__") and len(schema.returns) == 1
    if not is_plain or changed.count(True) != 1 or not changed[0]:
        return None
    packet = getattr(aten, name.removesuffix("_"), None)
    form = getattr(packet, target._overloadname, None)
    if form is None or form._schema.is_mutable:
        return None
    same = [argument.name for argument in form._schema.arguments] == [
        argument.name for argument in schema.arguments
    ]
    return form if same else None


class _JointTracer:
    """The function (*primals, *tangents) to (*outputs, *gradients), and its graph.

    After `trace`: `tangent_of` and `gradient_of` as in `TracedStage`.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        primals: Sequence[Any],
        needs_grad: Sequence[bool],
        fake_mode: FakeTensorMode,
        decompositions: Mapping[Any, Callable[..., Any]],
    ) -> None:
        self._graph_module = graph_module
        self._primals = tuple(primals)
        self._needs_grad = tuple(needs_grad)
        self._fake_mode = fake_mode
        self._decompositions = dict(decompositions)
        self.tangent_of: tuple[int, ...] = ()
        self.gradient_of: tuple[int, ...] = ()

    def trace(self, *, functionalized: bool) -> fx.GraphModule:
        """The joint graph. `functionalized`: operators that change their operands are replaced by such that
        do not.
        """
        wanted = [index for index, needs in enumerate(self._needs_grad) if needs]
        with clean_tracing(self._fake_mode), contextlib.ExitStack() as stack:
            stack.enter_context(self._fake_mode)
            # Fixes no size to a number, see passes/tracing.py; and backward must run in this thread, where
            # the modes are.
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(fx.traceback.preserve_node_meta())
            stack.enter_context(torch.enable_grad())
            values = [node.meta["val"] for node in _results(self._graph_module)]
            tangents = [
                torch.empty(values[i].shape, dtype=values[i].dtype, device=values[i].device) for i in wanted
            ]
            function = without_mutation(self._run) if functionalized else self._run
            joint = make_fx(function, decomposition_table=self._decompositions)(*self._primals, *tangents)
        lift_marks(joint.graph)
        self._name_inputs(joint, wanted)
        return joint

    def _run(self, *arguments: Any) -> tuple[Any, ...]:
        primals, tangents = arguments[: len(self._primals)], arguments[len(self._primals) :]
        results = _DifferentiableInterpreter(self._graph_module).run(*primals[1:])
        outputs = [r if needs else r.detach() for r, needs in zip(results, self._needs_grad, strict=True)]
        # An output through which no gradient can flow takes no tangent.
        self.tangent_of = tuple(index for index, value in enumerate(outputs) if value.requires_grad)
        leaves = {
            index: value
            for index, value in enumerate(primals)
            if isinstance(value, torch.Tensor) and value.requires_grad
        }
        gradients: Sequence[torch.Tensor | None] = ()
        if self.tangent_of and leaves:
            wanted = [index for index, needs in enumerate(self._needs_grad) if needs]
            gradients_of_outputs = [tangents[wanted.index(index)] for index in self.tangent_of]
            with set_partitioner_tag_is_backward():
                gradients = torch.autograd.grad(
                    [outputs[index] for index in self.tangent_of],
                    list(leaves.values()),
                    gradients_of_outputs,
                    allow_unused=True,
                )
        made = {index: gradient for index, gradient in zip(leaves, gradients) if gradient is not None}
        self.gradient_of = tuple(made)
        return (*outputs, *made.values())

    def _name_inputs(self, joint: fx.GraphModule, wanted: Sequence[int]) -> None:
        """Name the inputs as the partitioner knows them; drop the tangents that no output takes."""
        inputs = joint.graph.find_nodes(op="placeholder")
        for number, node in enumerate(inputs[: len(self._primals)], 1):
            node.target = f"primals_{number}"
            node._rename(node.target)
        for index, node in zip(wanted, inputs[len(self._primals) :], strict=True):
            if index in self.tangent_of:
                node.target = f"tangents_{self.tangent_of.index(index) + 1}"
                node._rename(node.target)
                node.meta["partitioner_tag"] = "is_backward"
            else:
                joint.graph.erase_node(node)
        joint.recompile()


def without_mutation(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """`function` in which operators that change their operands have been replaced; it must not change its
    arguments.
    """

    def run(*values: Any) -> tuple[Any, ...]:
        exclude = torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        )
        with exclude, FunctionalTensorMode():
            wrapped = pytree.tree_map_only(torch.Tensor, FunctionalTensor.to_functional, values)
            return pytree.tree_map_only(FunctionalTensor, _unwrapped, function(*wrapped))

    return run


def _unwrapped(value: FunctionalTensor) -> torch.Tensor:
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)


class _DifferentiableInterpreter(fx.Interpreter):
    """Runs a graph; operators that functionalization has left without a derivative are computed in another
    way.
    """

    def run_node(self, n: fx.Node) -> Any:
        return with_mark(n, super().run_node(n))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _MUTATING_FORMS:
            assert not kwargs, f"{target} with keyword arguments {kwargs}"
            return _batch_norm(_MUTATING_FORMS[target], *args)
        return super().call_function(target, args, kwargs)


def _batch_norm(
    operator: Callable[..., tuple[torch.Tensor, ...]],
    value: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    *settings: Any,
) -> tuple[torch.Tensor, ...]:
    """What `operator` gives and the new running statistics, which it writes over copies of the old ones."""
    new_mean, new_var = running_mean.clone(), running_var.clone()
    return (*operator(value, weight, bias, new_mean, new_var, *settings), new_mean, new_var)


@contextlib.contextmanager
def clean_tracing(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Trace or compile under `fake_mode` only: without an outer capture's context and without the user's
    autocast.
    """
    with tracing(TracingContext(fake_mode)), torch._C._DisableAutocast():
        yield


@contextlib.contextmanager
def _computed_again_by_segment(joint: fx.GraphModule) -> Iterator[Callable[..., Any]]:
    """Gives the partitioner that computes again what belongs to a segment, and saves what leaves it."""
    partition = min_cut_rematerialization_partition
    if choose_recomputed(joint):
        # The partitioner takes the state of random numbers for what attention reads; graphs have numbers of their own
        # in place of random ones (passes/batch/randomness.py), and attention is computed without dropout.
        known = {**partition.__globals__, "has_recomputable_rng_ops": lambda graph_module: False}
        made = types.FunctionType(
            partition.__code__, known, partition.__name__, partition.__defaults__, partition.__closure__
        )
        made.__kwdefaults__ = partition.__kwdefaults__
        partition = made
    try:
        yield partition
    finally:
        for node in joint.graph.nodes:
            node.meta.pop("recompute", None)


def split_joint(traced: TracedStage, *, activation_budget: float, long_lived: Sequence[int]) -> SplitStage:
    """Split the joint graph into forward and backward by the minimum cut, so that little is saved.

    Args:
        activation_budget: see the module docstring, from 0 to 1, or SEGMENTS_BUDGET.
        long_lived: inputs (the batch size is input 0) that exist until backward anyway, so that saving them
        is free.
    """
    fake_mode = _fake_mode(traced.joint)
    by_segment = activation_budget == SEGMENTS_BUDGET
    with (
        clean_tracing(fake_mode),
        torch.no_grad(),
        # What is equal is one already (passes/stage/equal_values.py).
        functorch_config.patch(activation_memory_budget=1.0 if by_segment else activation_budget, cse=False),
        _computed_again_by_segment(traced.joint)
        if by_segment
        else contextlib.nullcontext(min_cut_rematerialization_partition) as partition,
    ):
        forward, backward = partition(
            traced.joint,
            None,
            num_fwd_outputs=traced.num_outputs,
            static_lifetime_input_indices=list(long_lived),
        )
    saved = [node.name for node in _results(forward)[traced.num_outputs :]]
    wanted = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    wanted = wanted[: len(wanted) - len(traced.tangent_of)]
    assert sorted(saved) == sorted(wanted), f"forward saves {saved}, backward takes {wanted}"
    return SplitStage(
        forward=forward, backward=backward, saved_order=tuple(saved.index(name) for name in wanted)
    )


def _results(graph_module: fx.GraphModule) -> Sequence[Any]:
    (output,) = graph_module.graph.find_nodes(op="output")
    return output.args[0]


def _fake_mode(joint: fx.GraphModule) -> FakeTensorMode:
    for node in joint.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta["val"], FakeTensor):
            return node.meta["val"].fake_mode
    raise AssertionError("a joint graph has a tensor among its inputs")


def size_conditions(
    fake_mode: FakeTensorMode, rows_symbol: sympy.Symbol, symbols: Collection[sympy.Symbol]
) -> tuple[sympy.Basic, ...]:
    """What torch has assumed about the batch size and the lengths (all of them: `symbols`) in all traces under
    `fake_mode`; code compiled so far relies on it.

    Raises UnsupportedModelError if a single batch size was assumed.
    """
    shape_env = fake_mode.shape_env
    assert shape_env is not None, "traces have symbols"
    if rows_symbol in shape_env.replacements:
        raise UnsupportedModelError(
            f"a part of the model compiles for one batch size only ({shape_env.replacements[rows_symbol]})",
            cure="look for an operation that needs the batch size to be a certain number.",
        )
    return tuple(
        guard.expr
        for guard in shape_env.guards
        if not guard.expr.free_symbols.isdisjoint(symbols) and not _only_chooses_convolution(guard)
    )


def _only_chooses_convolution(guard: Any) -> bool:
    """Whether a guard comes from which kernel a convolution would pick for this batch size (oneDNN from 16
    samples on).

    The kernel is picked again at run time; the trace needs it for the memory format alone, which is the
    operands' own.
    """
    frame = guard.sloc.framework_loc
    return (
        isinstance(frame, traceback.FrameSummary)
        and frame.name == "conv"
        and frame.filename.endswith("fake_impls.py")
    )
