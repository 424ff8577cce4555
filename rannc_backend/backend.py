"""The backend that `torch.compile(model, backend="rannc")` finds: from a Dynamo graph to the callable that
plays this rank's part.

In: Dynamo's graph and example inputs. Out: a callable over Dynamo's flat arguments. The story from top to
bottom: resolve the options, capture, find the model's session (which analyses, plans, cuts and deploys),
bind.

What the user did wrong is raised when the compiled model is called, as one of `rannc_backend.errors`, not
wrapped by Dynamo.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from rannc_backend.ir.graph_input import StateInput
from rannc_backend.runtime.job.disabled_compile import (
    say_if_unused,
    warn_if_disabled,
    warn_if_looked_up_in_vain,
)
from rannc_backend.settings import hooks
from rannc_backend.settings.torch_version import refuse_old_torch

# Before the imports that an old torch would fail in, with names that say nothing to the user.
refuse_old_torch(torch.__version__)
warn_if_disabled(os.environ)
warn_if_looked_up_in_vain(os.environ)

from rannc_backend.capture import graph as capture  # noqa: E402
from rannc_backend.capture.analysis import sizes_of_call, with_fixed_inputs  # noqa: E402
from rannc_backend.capture.errors import own_errors_only  # noqa: E402
from rannc_backend.capture.first_trace import begin_symbolically  # noqa: E402
from rannc_backend.capture.inputs import plain_numbers  # noqa: E402
from rannc_backend.capture.module_compile import trace_modules_of_torch  # noqa: E402
from rannc_backend.capture.nonstrict.arguments import BatchDims, Call, Changing, places_of  # noqa: E402
from rannc_backend.capture.nonstrict.captures import Capture, capture_call  # noqa: E402
from rannc_backend.capture.refusals import GivenUpModels, recompile_limit, refuse_sharded  # noqa: E402
from rannc_backend.capture.written_out import trace_margin_loss, trace_soft_labels  # noqa: E402
from rannc_backend.compiled_call import (  # noqa: E402
    Prepare,
    arguments_of_call,
    arrive,
    casting,
    gated,
    note_capture,
    note_compilation,
    refuse_gathered,
    refuse_wrappers,
)
from rannc_backend.errors import ModelError, OffloadError, RanncError, UserInputError  # noqa: E402
from rannc_backend.log.first_call import FirstCall, memory_of  # noqa: E402
from rannc_backend.log.logger import setup_logging  # noqa: E402
from rannc_backend.log.startup import say_options  # noqa: E402
from rannc_backend.log.step_timer import log_step_timer  # noqa: E402
from rannc_backend.nonstrict_call import NonstrictCalls, Way, ranks_of_job  # noqa: E402
from rannc_backend.padded_call import padded_arguments  # noqa: E402
from rannc_backend.passes.pipeline import dumping  # noqa: E402
from rannc_backend.planner.cluster.this_machine import cache_directory  # noqa: E402
from rannc_backend.runtime.absent_tensors import refuse_again, restore_classes, strides_of  # noqa: E402
from rannc_backend.runtime.agreement import agree, digest  # noqa: E402
from rannc_backend.runtime.job import bootstrap  # noqa: E402
from rannc_backend.runtime.step.autograd import call_training  # noqa: E402
from rannc_backend.runtime.step.graph_runtime import GraphRuntime  # noqa: E402
from rannc_backend.runtime.world import World  # noqa: E402
from rannc_backend.session import Session  # noqa: E402
from rannc_backend.session_registry import REGISTRY  # noqa: E402
from rannc_backend.settings.options import Config  # noqa: E402
from rannc_backend.settings.rare_collections import rare_collections  # noqa: E402
from rannc_backend.settings.sources import Given, Resolution, resolve  # noqa: E402
from rannc_backend.stages.build import begin_compiling  # noqa: E402
from rannc_backend.stages.graph_dump import pass_dump  # noqa: E402

logger = logging.getLogger(__name__)

_FIRST_CALL = FirstCall()


def rannc(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Given = None,
    mode: str | None = None,
) -> Callable[..., Sequence[Any]]:
    """Backend for torch.compile; ``options`` are the items of `Config`, or something that gives them (`AutoDistConfig`).

    Raises:
        Whatever Dynamo answers with another trace (the batch made symbolic, parameters moved): not an error.
    """
    try:
        call = _compile(graph_module, example_inputs, options, mode)
    except BaseException:
        # Another trace may follow, and looks at the model's tensors.
        restore_classes(REGISTRY.absent_tensors())
        raise
    # Dynamo makes its guards next, of the tensors as they are.
    refuse_again(REGISTRY.absent_tensors())
    return call


def _compile(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Given,
    mode: str | None,
) -> Callable[..., Sequence[Any]]:
    try:
        with own_errors_only():
            return _compile_or_refuse(graph_module, example_inputs, options, mode)
    except RanncError as error:
        # Parameters may have moved before it: the guards' own error would take its place.
        capture.run_without_check_of_guards()
        return _raising(error)


def _compile_or_refuse(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Given,
    mode: str | None,
) -> Callable[..., Sequence[Any]]:
    if mode not in (None, "default"):
        raise UserInputError(f"mode={mode!r} means nothing to this backend", cure="use options={...}")
    resolution = _resolution(options)
    config = resolution.config
    # First of all, so that the job knows of whatever fails on this rank from here on. Collective the first
    # time.
    world = _started(config, str(graph_module.graph))
    if _lies_on_host(config, world):
        raise OffloadError("it is a function that is compiled, which only Dynamo captures")
    if any(config.batch_dims.values()):
        raise UserInputError(
            "option batch_dim is for the inputs of an nn.Module, and a function is compiled",
            cure="compile the model (torch.compile(model, backend='rannc')), or give the function's inputs with the "
            "samples along their first dimension.",
        )
    _check_device(example_inputs, world, lambda: capture.check_one_device(graph_module, example_inputs))
    if config.stage_compiler == "inductor" and world.has_least_to_do():
        begin_compiling({world.device.type})

    def captured_as(with_lengths: bool) -> tuple[capture.CapturedGraph, Sequence[Any]]:
        captured = capture.capture_or_restart(
            graph_module, example_inputs, strides_of=strides_of, with_lengths=with_lengths
        )
        return captured, example_inputs

    session, captured, runtime, moved = _deployed(resolution, world, captured_as)
    if moved:
        capture.renew_guards(captured, graph_module, example_inputs)
    return _bind(session, runtime, captured)


def _deployed(
    resolution: Resolution,
    world: World,
    captured_as: Callable[[bool], tuple[capture.CapturedGraph, Sequence[Any]]],
) -> tuple[Session, capture.CapturedGraph, GraphRuntime, bool]:
    """The session of a model, its captured graph and what runs that; whether parameters have moved for it. A graph
    that cannot be deployed with lengths is captured again without.

    ``captured_as(with_lengths)``: the graph and the values of its inputs in this call, by position.
    """

    def captured_now(with_lengths: bool) -> tuple[capture.CapturedGraph, Sequence[Any]]:
        with _capturing(resolution.config, world) as details:
            captured, values = captured_as(with_lengths)
            details.append(f"{len(captured.graph_module.graph.nodes)} nodes")
        captured = captured.with_gradients(resolution.config.sparse_gradients, world.device)
        return with_fixed_inputs(captured, values, digest), values

    captured, values = captured_now(True)
    session = _session_for(captured.root_module, resolution, capture.fixed_shapes(captured))
    runtime = None
    try:
        runtime = session.best_runtime(captured, values, *sizes_of_call(captured, values))
    except ModelError as error:
        if not captured.lengths and not captured.number_symbols:
            raise
        logger.debug("the model is captured for the sizes and numbers of this call alone: %s", error)
    if runtime is None:
        captured, values = captured_now(False)
        runtime = session.best_runtime(captured, values, *sizes_of_call(captured, values))
    return session, captured, runtime, session.take_moved()


def _started(config: Config, model: str) -> World:
    """The job, in which the model is about to be captured. Collective the first time. `model`: its text."""
    world = bootstrap.start(bootstrap.options_of(config))
    world.monitor.phase("capture")
    _FIRST_CALL.attach(
        world.monitor.current_phase,
        memory_of(cache_directory(config), model, world.size, config),
        on_gpu=world.device.type == "cuda",
    )
    return world


@contextlib.contextmanager
def _capturing(config: Config, world: World) -> Iterator[list[str]]:
    """The stretch in which a model becomes a graph; gives what its line in the log says beside the time."""
    # Something else may have started the job, without these options: load_checkpoint, barrier.
    world.limit_waits(config.step_timeout_seconds)
    with (
        log_step_timer(verbose=config.verbose).step("capture") as details,
        dumping(pass_dump(config.dump_graph_prefix, world.rank) if config.dump_graph else None),
    ):
        yield details


def _session_for(module: nn.Module, resolution: Resolution, shapes: tuple[str, ...]) -> Session:
    """The session of a model that has just been captured for inputs of these shapes."""
    note_capture()
    refuse_sharded(module)
    refuse_gathered(REGISTRY.is_gathered(module))
    session = REGISTRY.session_of(module, resolution.config)
    say_options(resolution)
    _check_number(session, module, shapes)
    return session


def _config_of(told: Mapping[str, Any]) -> Callable[[], Config]:
    """The options of a compiled model, read at the first question: it is asked at every call."""
    return functools.cache(lambda: _resolution(told.get("options")).config)


def _second_way(module: nn.Module | None, told: Mapping[str, Any]) -> NonstrictCalls | None:
    """What serves the calls of a module that Dynamo refuses; None where it is no module's call."""
    if module is None:
        return None
    config = _config_of(told)
    return NonstrictCalls(
        module=weakref.ref(module),
        batch_dims=lambda: BatchDims.of_option(config().batch_dims),
        way=lambda: _way(config()),
        dynamic=told.get("dynamic") is not False,
        prepare=functools.partial(_prepare_without_dynamo, told.get("options")),
        ranks=functools.cache(lambda: ranks_of_job(config())),
        leads=bootstrap.leads,
    )


def _way(config: Config) -> Way:
    """How a module's forward is captured. Dynamo would take parameters on the host for what they are; the other way
    traces as if they were on the device, where their copies will be. It alone moves dimensions of inputs.
    """
    on_host = config.offload != "none" and torch.cuda.is_available()
    return "nonstrict" if on_host or any(config.batch_dims.values()) else config.capture


def _lies_on_host(config: Config, world: World) -> bool:
    """Whether parameters lie on the host, and stages compute elsewhere."""
    return config.offload != "none" and world.device.type != "cpu"


def _padding(module: nn.Module | None, told: Mapping[str, Any]) -> Prepare | None:
    """What option pad_inputs does to the arguments of a module's calls; None where it is no module's call."""
    if module is None:
        return None
    found, config_of = weakref.ref(module), _config_of(told)

    def prepared(
        args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Callable[[Any], None]]:
        try:
            config, model = config_of(), found()
        except RanncError:
            return args, kwargs, lambda result: None  # a wrong option is told where all options are read
        if model is None or not config.pad_inputs or not config.gather_inputs:
            return args, kwargs, lambda result: None
        world = _started(config, str(type(model)))
        exchange = functools.partial(
            agree, world, "the shapes of a call", limit_seconds=config.compile_timeout_seconds
        )
        dims = BatchDims.of_option(config.batch_dims)
        return padded_arguments(
            model, args, kwargs, paddings=config.paddings, batch_dims=dims, exchange=exchange
        )

    return prepared


def _gathered(module: nn.Module | None) -> Callable[[], bool]:
    """Whether `rannc_backend.gathered` is under way for a module."""
    found = None if module is None else weakref.ref(module)
    return lambda: bool(REGISTRY.gathered) and found is not None and REGISTRY.is_gathered(found())


def _prepare_without_dynamo(
    options: Given, module: nn.Module, call: Call, changing: Changing
) -> tuple[Capture, Callable[..., Sequence[Any]]]:
    if bootstrap.leads():
        _FIRST_CALL.begin()
    REGISTRY.refuse_copy(module)
    restore_classes(REGISTRY.absent_tensors())
    try:
        with own_errors_only(), rare_collections():
            resolution = _resolution(options)
            config = resolution.config
            world = _started(config, str(module))
            on_host = _lies_on_host(config, world)
            if on_host and config.capture == "dynamo":
                raise OffloadError("Dynamo traces parameters where they lie")
            # What is the model's goes to its place when that is deployed.
            own = [] if on_host else [place.tensor() for place in places_of(module)]
            _check_device([*own, *call.tensors], world)
            ranks = ranks_of_job(config, world.device if on_host else None)
            found: list[Capture] = []

            def captured_as(
                with_lengths: bool, all_rows: bool = False
            ) -> tuple[capture.CapturedGraph, Sequence[Any]]:
                dims = changing if with_lengths else set()
                found.append(capture_call(module, call, ranks, dims, all_rows=all_rows))
                return found[-1].recorded.captured, found[-1].tensors(call)

            try:
                session, captured, runtime, _ = _deployed(resolution, world, captured_as)
            except ModelError as error:
                if not error.needs_batch_size:
                    raise
                again = functools.partial(captured_as, all_rows=True)
                session, captured, runtime, _ = _deployed(resolution, world, again)
            return found[-1].renewed(module), _bind(session, runtime, captured)
    finally:
        refuse_again(REGISTRY.absent_tensors())


def _is_rannc(backend: object) -> bool:
    return backend is rannc


_GIVEN_UP = GivenUpModels(_is_rannc)


def _before_compilation(model: object) -> None:
    REGISTRY.refuse_copy(model)
    _GIVEN_UP.watch()
    if bootstrap.leads():
        # Options of the log that are wrong are told where all options are.
        with contextlib.suppress(RanncError):
            setup_logging(0, os.environ)
        _FIRST_CALL.begin()
    restore_classes(REGISTRY.absent_tensors())


def _after_compilation() -> None:
    note_compilation()
    if not _FIRST_CALL.is_attached:
        _FIRST_CALL.cancel()
    refuse_again(REGISTRY.absent_tensors())


def _resolution(options: Given) -> Resolution:
    resolution = resolve(options, os.environ, REGISTRY.options_file)
    if REGISTRY.switches.sync_params is not None and not resolution.is_told("sync_params_on_init"):
        config = resolution.config.model_copy(update={"sync_params_on_init": REGISTRY.switches.sync_params})
        return replace(resolution, config=config)
    return resolution


def _check_device(
    values: Sequence[Any], world: World, check_one_device: Callable[[], object] = lambda: None
) -> None:
    # A counter on the CPU goes with any device.
    elsewhere = {value.device for value in values if isinstance(value, torch.Tensor) and value.dim()} - {
        world.device
    }
    if elsewhere:
        check_one_device()
        raise UserInputError(
            f"the model or its inputs are on {', '.join(sorted(map(str, elsewhere)))}, and this rank "
            f"computes on {world.device}",
            cure="call rannc_backend.materialize_by_stage(model) before torch.compile, which brings each "
            f"rank the stages that it owns, and pass inputs on {world.device}; to compute on the CPU, start "
            "the ranks with CUDA_VISIBLE_DEVICES= in the environment.",
        )


def _check_number(session: Session, module: nn.Module, shapes: tuple[str, ...]) -> None:
    """Of what has been compiled of the model, as Dynamo's setting limits it: other models of the class do not
    count. New lengths of sequences and sizes of images have no limit.
    """
    if session.world.size == 1:
        return
    limit, number = recompile_limit(), len(session.compiled)
    before, numbers = session.compiled_for.get(shapes), plain_numbers(module, *arguments_of_call())
    session.compiled_for[shapes] = numbers
    if number < limit:
        return
    if before is not None:
        changed = [name for name, value in numbers.items() if before.get(name, value) != value]
        told = ", ".join(f"{name} was {before[name]} and is {numbers[name]}" for name in changed[:3])
        raise UserInputError(
            f"the model has been compiled {number} times, as often as torch._dynamo.config.recompile_limit allows, "
            f"and now again for inputs of shapes that it was compiled for before{told and ': '}{told}",
            cure="give a number that changes as a tensor, torch.tensor(value, dtype=torch.float64), an attribute as a buffer "
            "that is changed in place (where an operator takes Python's numbers alone, eps, write it out with operators that "
            "take tensors); look for what else changes between calls (a global, an argument that is no tensor); "
            "or set the limit higher at the start.",
        )
    if number == limit and session.world.rank == 0:
        logger.warning(
            "the model is compiled for the %dth time, for inputs of another shape: each new shape takes as long "
            "as the first call; pad them to a few lengths where that is too long",
            number + 1,
        )


def _bind(
    session: Session, runtime: GraphRuntime, captured: capture.CapturedGraph
) -> Callable[..., Sequence[Any]]:
    positions = {spec.name: spec.position for spec in captured.inputs}
    order = [positions[spec.name] for spec in runtime.inputs]
    stored = [(spec.position, spec.fqn) for spec in captured.inputs if isinstance(spec, StateInput)]
    # Dynamo keeps what is returned here for as long as it likes (a record of collectives has its callers'
    # code): it must keep neither the model alive nor what steps need, which the session has.
    key, root = captured.fingerprint, weakref.ref(captured.root_module)
    session.captured[key] = replace(captured, root_module=nn.Module())

    def call(*flat_args: Any) -> Sequence[Any]:
        arrive()
        model = root()
        assert model is not None, "the model is gone"
        refuse_sharded(model)
        refuse_gathered(REGISTRY.is_gathered(model))
        session = REGISTRY.sessions[model]
        if session.table is not None:
            known = session.table.tensors
            if any(flat_args[position] is not known[name] for position, name in stored):
                session.table.take_replaced({name: flat_args[position] for position, name in stored})
        current = session.runtimes.get(key)
        if current is None:
            again = replace(session.captured[key], root_module=model)
            current = session.runtime_for(again, *sizes_of_call(again, flat_args))
        tensors = [flat_args[position] for position in order]
        if torch.is_grad_enabled() and any(output.differentiable for output in current.outputs):
            results = call_training(current, tensors, REGISTRY.is_averaged, REGISTRY.is_synchronized)
        else:
            results = current.infer(tensors)
        # Only after success: a failure is told with the phase in which it happened.
        session.world.monitor.phase("between steps")
        _FIRST_CALL.done()
        return results

    session.compiled.add(call)
    return call


def _raising(error: RanncError) -> Callable[..., Sequence[Any]]:
    def call(*flat_args: Any) -> Sequence[Any]:
        raise error

    return call


# torch.compile imports this module when it looks the backend up: before the first trace, and long before all
# ranks come to a call.
hooks.install(
    (
        bootstrap.watch_others,
        lambda: say_if_unused(os.environ, lambda: bootstrap.started() is not None),
        capture.skip_library_loggers,
        trace_soft_labels,
        trace_margin_loss,
        lambda: trace_modules_of_torch(
            _is_rannc,
            lambda compiled, module, told: gated(
                compiled,
                _FIRST_CALL.cancel,
                _second_way(module, told),
                _padding(module, told),
                casting(_config_of(told)),
                _gathered(module),
            ),
            REGISTRY.over_defaults,
        ),
        lambda: refuse_wrappers(REGISTRY.has_spread, REGISTRY.note_averaged),
        lambda: begin_symbolically(_is_rannc, before=_before_compilation, after=_after_compilation),
    )
)
