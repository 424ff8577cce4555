"""Errors say what is wrong and what to change, survive pickling, and point at the user's own line."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from rannc_backend import errors
from rannc_backend.errors import (
    BatchMixedError,
    BatchSizeTestError,
    BlocksFileError,
    CallsDifferError,
    CheckpointFileError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointStateError,
    CheckpointVersionError,
    CheckpointWriteError,
    ClusterFileError,
    CommunicationError,
    ConfigurationFileError,
    CoupledOptimizerError,
    DataDependentControlFlowError,
    FactoryError,
    GatheringError,
    GenerationError,
    GradientsDifferError,
    GraphBreakError,
    GroupedStepError,
    InfeasiblePlanError,
    InternalError,
    JobSizeError,
    LaunchError,
    ModelDevicesError,
    ModelError,
    NoBatchDimensionError,
    NoMarkedTensorError,
    OffloadError,
    OptionValueError,
    OutOfStepError,
    OutputNotAvailableError,
    PartialStateError,
    PlainCallError,
    PlainGradientError,
    PlanError,
    ProfileError,
    RankFailedError,
    RanksDifferError,
    RanncError,
    ReleasedParameterError,
    ReplicasDifferError,
    ScheduleError,
    ShardingOptimizerError,
    StagePinError,
    StaleParameterError,
    TooFewSamplesError,
    TraceError,
    UnclearBatchDimError,
    UnknownModuleError,
    UnknownOptionError,
    UnsupportedModelError,
    UnsynchronizedGradientError,
    UserInputError,
    ValueNotMadeError,
    VerificationError,
    WrappedModelError,
    failure_of_rank,
    located,
    rebuild_error,
    user_location,
)
from rannc_backend.settings.options import Config
from rannc_backend.settings.sources import choices_of, resolve

# Each error with words that its message must have: the culprit first, then what to change.
EXAMPLES = [
    (
        UnknownOptionError("pipline_num", valid=["pipeline_num", "outputs"], source="options"),
        ["'pipline_num'", "'pipeline_num'"],
    ),
    (
        OptionValueError("outputs", value=3, source="RANNC_OUTPUTS", expected="one of 'all', 'loss'"),
        ["outputs", "3", "RANNC_OUTPUTS", "'loss'"],
    ),
    (
        JobSizeError("option 'mesh' asks for 2 x 4 = 8 ranks, and there are 2", cure="start 8 ranks"),
        ["mesh", "2 x 4 = 8", "start 8 ranks"],
    ),
    (
        UnsupportedModelError("the model writes its input", cure="copy it first", location="m.py:7"),
        ["input", "m.py:7", "copy it first"],
    ),
    (
        ModelDevicesError({"cuda:0": ["b"], "cpu": ["a", "c", "d", "e"]}),
        ["cpu: a, c, d and 1 more", "cuda:0: b", "move"],
    ),
    (NoBatchDimensionError({"x": (), "scale": (1,)}), ["x: []", "scale: [1]", "dimension 0"]),
    (
        BatchMixedError("aten.sort", reason="it sorts over rows", location="m.py:12, in forward"),
        ["aten.sort", "m.py:12, in forward"],
    ),
    (
        BatchSizeTestError("s >= 64", num_rows=8, location="m.py:12, in forward"),
        ["s >= 64", "8 samples", "m.py:12, in forward"],
    ),
    (
        UnclearBatchDimError("aten.max reduces it", inputs="x [7, 2, 12]", location="m.py:4, in forward"),
        ["aten.max reduces it", "x [7, 2, 12]", "m.py:4, in forward", "'batch_dim': 1", "'batch_dim': 0"],
    ),
    (
        TooFewSamplesError(num_samples=1, num_replicas=2, stage=3),
        ["1 sample", "2 replicas", "stage 3", "RANNC_REPLICA_NUM"],
    ),
    (
        GraphBreakError("print was called", location="m.py:3"),
        ["print was called", "m.py:3", "take the statement out"],
    ),
    (
        DataDependentControlFlowError("if x.sum() > 0", location="m.py:4"),
        ["x.sum()", "m.py:4", "torch.where"],
    ),
    (
        RanksDifferError("models", value_by_rank=["a", "b", "a", "c"]),
        ["ranks 0, 2: a", "rank 1: b", "make ranks 1, 3"],
    ),
    (PlanError("stage 1 has no ranks", cure="give it one"), ["stage 1", "give it one"]),
    (
        BlocksFileError("bert.blocks was made with another value of outputs", cure="save it again"),
        ["bert.blocks", "outputs", "save it"],
    ),
    (FactoryError("make() returned 3", cure="return (model, args, kwargs)"), ["make()", "return (model"]),
    (
        StagePinError("'a' is in stage 1, and 'b' before it in 2", cure="change one"),
        ["'a'", "'b'", "change one"],
    ),
    (
        UnknownModuleError("layer.1", valid=["layers.1", "head"], option="stage_starts"),
        ["layer.1", "'layers.1'", "stage_starts"],
    ),
    (
        ProfileError("prices.json is no profile", cure="name another file"),
        ["prices.json", "no profile", "another file"],
    ),
    (
        ClusterFileError("c.toml", key="device.name", problem="is missing", cure="add it"),
        ["c.toml", "device.name", "missing", "add it"],
    ),
    (
        CheckpointNotFoundError("no checkpoint in 'runs'", cure="give its directory"),
        ["'runs'", "give its directory"],
    ),
    (CheckpointFileError("model.safetensors is torn", cure="load an older one"), ["torn", "older one"]),
    (CheckpointVersionError("schema 9", cure="update rannc_backend"), ["schema 9", "update"]),
    (
        CheckpointMismatchError("'a' has shape [2], not [3]", cure="build the same model"),
        ["'a'", "[2]", "same model"],
    ),
    (CheckpointStateError("extra['f'] is a function", cure="leave it out"), ["extra['f']", "leave it out"]),
    (CheckpointWriteError("rank 3: disk full", cure="free some space"), ["rank 3", "free some space"]),
    (
        ConfigurationFileError("conf.toml", problem="is not TOML: line 3", cure="mend it"),
        ["conf.toml", "line 3", "mend it"],
    ),
    (
        InfeasiblePlanError("memory", smallest_bytes=3 * 2**30, smallest_num_devices=8),
        ["memory", "3.000 GB", "8 devices"],
    ),
    (
        InfeasiblePlanError("memory", options_that_would_do=["zero_stage=1", "without partition_num=2"]),
        ["What would do: other options: zero_stage=1, or without partition_num=2."],
    ),
    (OffloadError("Dynamo traces it"), ["offload=parameters", "Dynamo traces it", "leave offload out"]),
    (ScheduleError("nobody receives it", action="2SF0>3", rank=2), ["rank 2", "2SF0>3", "nobody"]),
    (LaunchError("no launcher found", cure="use mpirun"), ["no launcher", "mpirun"]),
    (
        CommunicationError("no message", rank=1, peer=2, stage=0, micro_batch=3, limit_seconds=600.0),
        [
            "no message (limit 600 s)",
            "at rank 1, stage 0, micro-batch 3, with rank 2",
            "rannc doctor --launch",
        ],
    ),
    (
        RankFailedError(rank=0, stage=0, micro_batch=0, cause="killed by signal 9"),
        ["rank 0 failed: killed by signal 9", "at rank 0, stage 0, micro-batch 0"],
    ),
    (
        OutputNotAvailableError("logits", why="they need 32 GB", is_left_out=True),
        ["'logits'", "they need 32 GB", '"outputs": "all"'],
    ),
    (
        OutputNotAvailableError("logits", why="its rows are mixed", is_left_out=False),
        ["'logits'", "its rows are mixed", "within the model"],
    ),
    (
        ReleasedParameterError("wte.weight", owners=(0, 3), use="norm"),
        ["'wte.weight'", "ranks 0, 3 have it", "norm", "state_dict", "rannc_backend.gathered"],
    ),
    (
        GenerationError("output_attentions is not given", cure="leave it out."),
        ["output_attentions", "leave it out"],
    ),
    (
        GatheringError("5 bytes too few", cure="gather it on rank 0 alone."),
        ["5 bytes too few", "rank 0 alone"],
    ),
    (
        InternalError("KeyError: 'x'", location="m.py:3, in forward"),
        ["in rannc_backend itself", "KeyError: 'x'", "m.py:3", "report"],
    ),
    (
        TraceError("TorchRuntimeError: shapes differ", location="m.py:3, in forward"),
        ["cannot be traced", "shapes differ", "m.py:3"],
    ),
    (PlainCallError(", because of force_eager"), ["plain model", "force_eager", "set_stance"]),
    (WrappedModelError("DistributedDataParallel"), ["DistributedDataParallel", "compile the plain model"]),
    (
        CallsDifferError(value_by_rank=["state_dict", "a call"]),
        ["rank 0: state_dict", "rank 1: a call", "if rank == 0"],
    ),
    (
        OutOfStepError(value_by_rank=["3 calls", "2 calls"]),
        ["rank 0: 3 calls", "rank 1: 2 calls", "skips a bad batch"],
    ),
    (
        UnsynchronizedGradientError("AdamW", ["a", "b", "c", "d"]),
        ["AdamW", "4 parameter(s)", "a, b, c and 1 more", "synchronize"],
    ),
    (PlainGradientError("'w' has gradients of a plain call"), ["'w'", "compiled model"]),
    (
        CoupledOptimizerError("LBFGS", known=True),
        ["LBFGS updates parameters from each other", "RANNC_PARTITION_NUM=1"],
    ),
    (CoupledOptimizerError("Odd", known=False), ["Odd may update", "check_optimizers"]),
    (GroupedStepError("LBFGS", "it has a closure"), ["LBFGS", "it has a closure", "num_apply_group"]),
    (StaleParameterError(["w", "b"]), ["'w' and 1 more", "zero_stage"]),
    (
        ReplicasDifferError(["w", "b"]),
        ["replicas hold different values of 'w' and 1 more", "torch.manual_seed"],
    ),
    (
        ShardingOptimizerError("ZeroRedundancyOptimizer"),
        ["ZeroRedundancyOptimizer", "the optimizer that it wraps"],
    ),
    (PartialStateError("9 of 11 entries", cure="save on all ranks"), ["9 of 11", "all ranks"]),
    (
        VerificationError(
            "train.py failed on rank 1: KeyError: 'x'", cure="start it by hand", place="train.py:3, in main"
        ),
        ["rank 1", "train.py:3", "start it by hand"],
    ),
    (NoMarkedTensorError(), ["'marked'", "rannc_backend.checkpoint_tensor(x)", "recompute_modules"]),
    (
        GradientsDifferError(
            "parameter h.0.weight", rank=3, stage=1, micro_batch=2, difference=0.25, tolerance=1e-5
        ),
        ["h.0.weight", "0.25", "rank 3, stage 1, micro-batch 2", "check_gradients"],
    ),
    (
        ValueNotMadeError("wte.weight", use="norm"),
        ["'wte.weight'", "no value yet", "norm", "call the compiled model"],
    ),
]
IDS = [type(error).__name__ for error, _ in EXAMPLES]


@pytest.mark.parametrize(("error", "words"), EXAMPLES, ids=IDS)
def test_message_names_culprit_and_cure(error: RanncError, words: list[str]) -> None:
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(("error", "words"), EXAMPLES, ids=IDS)
def test_errors_travel_between_processes(error: RanncError, words: list[str]) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert twin.__dict__ == error.__dict__


def test_every_error_class_has_an_example() -> None:
    classes = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, RanncError)}
    assert classes - {RanncError, UserInputError, ModelError} == {type(error) for error, _ in EXAMPLES}


@pytest.mark.parametrize(("error", "words"), EXAMPLES, ids=IDS)
def test_cause_place_and_cure_are_said_in_this_order(error: RanncError, words: list[str]) -> None:
    text = str(error)
    assert (
        error.problem
        and error.cure
        and text.startswith(error.problem)
        and text.endswith(f"\n  What to change: {error.cure}")
    )
    assert error.place in text.removesuffix(error.cure)
    if error.location:
        assert text == f"{error.problem}\n  at {error.place}\n  What to change: {error.cure}"


def test_every_class_knows_a_cure_and_what_it_is_about() -> None:
    """An error that is raised without a cure says its class's own."""
    for error, _ in EXAMPLES:
        cls = type(error)
        assert cls.default_cure and inspect.getdoc(cls), cls
        inherited = cls.default_cure in (RanncError.default_cure, UserInputError.default_cure)
        takes_a_cure = cls.__init__ in (RanncError.__init__, UserInputError.__init__)
        assert not (inherited and takes_a_cure), f"{cls.__name__} can be raised with no cure but the base's"


@pytest.mark.parametrize("item", [item for item in Config.model_fields if len(choices_of(item)) > 1])
def test_a_misspelt_value_is_answered_by_the_nearest(item: str) -> None:
    for choice in choices_of(item):
        misspelt = choice[:1] + choice[2:] if len(choice) > 2 else choice + "x"
        if misspelt in choices_of(item):
            continue
        with pytest.raises(OptionValueError) as caught:
            resolve(None, {f"RANNC_{item.upper()}": misspelt})
        text = str(caught.value)
        assert (
            "did you mean" in text
            and repr(choice) in text.split("?")[0]
            and text.split("?")[0].count(" or ") <= 2
        ), text


def test_values_without_names_are_answered_by_what_they_accept() -> None:
    with pytest.raises(OptionValueError, match="at least 0") as caught:
        resolve(None, {"RANNC_PIPELINE_NUM": "-1"})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "cls"), [("ValueError", ValueError), ("KeyError", KeyError), ("UserInputError", UserInputError)]
)
def test_a_failure_of_another_rank_has_its_class(name: str, cls: type[Exception]) -> None:
    error = failure_of_rank(3, name, "too short")
    assert isinstance(error, cls) and isinstance(error, RanncError)
    assert error.failed_rank == 3 and str(error) == f"rank 3 failed in this call: {name}: too short"


@pytest.mark.parametrize(
    "name", ["OSError", "OutOfMemoryError", "SystemExit", "type", "__import__", "no such name"]
)
def test_a_failure_of_a_class_that_cannot_be_made(name: str) -> None:
    error = failure_of_rank(0, name, "x")
    assert type(error) is RankFailedError and error.failed_rank == 0 and name in str(error)


def test_errors_of_other_ranks_keep_cause_place_and_cure() -> None:
    """So that a job's first lines have them in this order, and say once what all ranks have."""
    error = located(PlanError("a plan\nof two lines", cure="plan\nagain."), "plan.json, line 3")
    other = rebuild_error("PlanError", str(error))
    assert type(other) is PlanError and str(other) == str(error)
    for member in ("problem", "location", "place", "cure"):
        assert getattr(other, member) == getattr(error, member)
    bare = rebuild_error("PlanError", "it is set\n  attention")
    assert (bare.problem, bare.place, bare.cure) == ("it is set\n  attention", "", "")
    failed = failure_of_rank(2, "PlanError", str(error))
    assert failed.problem.startswith("rank 2 failed in this call") and failed.place == "plan.json, line 3"
    assert failed.cure == error.cure
    assert failure_of_rank(2, "PlanError", "x").place == "rank 2"


def test_user_input_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="outputs"):
        raise OptionValueError("outputs", value=3, source="options", expected="x")
    assert not issubclass(CommunicationError, ValueError)
    assert issubclass(CommunicationError, RuntimeError)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("pipline_num", "pipeline_num"), ("PIPELINE_NUM", "pipeline_num"), ("zzz", None)],
)
def test_nearest_option(name: str, nearest: str | None) -> None:
    error = UnknownOptionError(name, valid=["pipeline_num", "outputs"], source="options")
    assert error.nearest == nearest
    assert ("did you mean" in str(error)) == (nearest is not None)


def test_a_misspelt_option_is_answered_by_three_names_at_most() -> None:
    text = str(UnknownOptionError("stage_pin", valid=Config.model_fields, source="options"))
    named = [name for name in Config.model_fields if f"'{name}'" in text]
    assert "stage_pins" in named and len(named) <= 3 and len(text) < 200, text


def test_ranks_differ_blames_the_few() -> None:
    assert RanksDifferError("models", value_by_rank=["b", "a", "a"]).odd_ranks == (0,)
    # No majority: rank 0 is taken as the measure.
    assert RanksDifferError("models", value_by_rank=["b", "a"]).odd_ranks == (1,)


def test_smallest_memory_is_rounded_up() -> None:
    wanted_bytes = 1_234_567_891
    text = str(InfeasiblePlanError("memory", smallest_bytes=wanted_bytes))
    shown_gb = float(text.split("limit of ")[1].split(" GB")[0])
    assert wanted_bytes <= shown_gb * 2**30 < wanted_bytes * 1.01


TRACE = """  File "/home/me/model.py", line 10, in forward
    x = self.block(x)
  File "/home/me/block.py", line 21, in forward
    return self.norm(x)
  File "/usr/lib/python3/site-packages/torch/nn/modules/batchnorm.py", line 193, in forward
    return F.batch_norm(
"""


@pytest.mark.parametrize(
    ("trace", "location"),
    [
        (TRACE, "/home/me/block.py:21, in forward"),
        ('File "model.py", line 3', "model.py:3"),
        (
            'File "/x/site-packages/transformers/a.py", line 5, in loss',
            "/x/site-packages/transformers/a.py:5, in loss",
        ),
        ('File "/x/site-packages/torch/nn/a.py", line 5, in f', ""),
        ("", ""),
        (None, ""),
    ],
)
def test_user_location_is_the_innermost_line_outside_of_torch(trace: str | None, location: str) -> None:
    assert user_location(trace) == location
