"""EPL's configuration: what each item becomes, where values come from, and that nothing wrong is taken silently."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rannc_backend.epl.config import Config, environment_name
from rannc_backend.epl.items import ITEMS, Integer, Item, Scale, Text, Truth
from rannc_backend.errors import OptionValueError, UnknownOptionError, UserInputError
from rannc_backend.settings.options import Config as Options
from rannc_backend.settings.sources import resolve

# Of each item: values, and what they become. Every documented value is there.
BECOMES: dict[str, list[tuple[Any, dict[str, object]]]] = {
    "pipeline.num_micro_batch": [(4, {"pipeline_num": 4}), (1, {"pipeline_num": 1})],
    "pipeline.num_stages": [(2, {"partition_num": 2}), (None, {})],
    "pipeline.strategy": [
        ("PreferBackward", {"schedule": "1f1b"}),
        ("PreferForward", {"schedule": "fill_drain"}),
        ("preferbackwardoptimizer", {"schedule": "1f1b"}),
    ],
    "gradient_checkpoint.type": [
        ("", {"recompute": "1"}),
        ("collection", {"recompute": "marked"}),
        ("auto", {"recompute": "segments"}),
    ],
    "gradient_checkpoint.end_taskgraph": [
        (1, {"recompute_last_stage": 1}),
        (-1, {"recompute_last_stage": -1}),
    ],
    "gradient_checkpoint.check_gradients": [(True, {"check_gradients": True})],
    "zero.level": [("", {"zero_stage": "0"}), ("v0", {"zero_stage": "1"}), ("V1", {"zero_stage": "2"})],
    "offload.level": [("", {"offload": "none"}), ("v0", {"offload": "parameters"})],
    "amp.level": [
        ("", {"autocast": "none"}),
        ("O1", {"autocast": "float16"}),
        ("o1", {"autocast": "float16"}),
    ],
    "amp.debug_log": [(True, {"log_casts": True}), (False, {"log_casts": False})],
    "amp.loss_scale": [("dynamic", {}), (128, {}), (0.5, {})],
    "optimizer.num_apply_group": [(30, {"num_apply_group": 30})],
    "cluster.device_place_prefer_intra_node": [
        (True, {"placement": "replica_major"}),
        (False, {"placement": "stage_major"}),
    ],
    "cluster.run_visible_devices": [("0,1", {"visible_devices": "0,1"}), ("", {"visible_devices": ""})],
    "cluster.colocate_split_and_replicate": [(True, {"stages_per_rank": 1, "partition_num": 1}), (False, {})],
    "communication.num_communicators": [(2, {"num_communicators": 2})],
    "communication.sparse_as_dense": [
        (True, {"sparse_gradients": "dense"}),
        (False, {"sparse_gradients": "sparse"}),
    ],
    "communication.max_splits": [(5, {"max_buckets": 5})],
    "communication.fp16": [
        (True, {"gradient_dtype": "fp16", "gradient_scale": 128.0}),
        (False, {"gradient_dtype": "same"}),
    ],
    "communication.fp16_scale": [(64, {}), (0, {})],
    "communication.clip_after_allreduce": [(True, {}), (False, {})],
    "communication.gradients_reduce_method": [
        ("mean", {"gradients_reduce_method": "mean"}),
        ("sum", {"gradients_reduce_method": "sum"}),
    ],
    "io.slicing": [(True, {})],
    "io.unbalanced_io_slicing": [(True, {})],
    "io.drop_last_files": [(True, {})],
    "auto.auto_parallel": [(True, {}), (False, {"partition_num": 1, "pipeline_num": 1})],
}
WRONG: dict[type[Item], tuple[Any, ...]] = {
    Integer: ("4", 4.0, True, 2**40, -5, "many"),
    Text: (1, True, "v9", None),
    Truth: (1, "true", None),
    Scale: (True, 0, -1, "static", None),
}


def values() -> st.SearchStrategy[dict[str, Any]]:
    good = {name: st.sampled_from([value for value, _ in rows]) for name, rows in BECOMES.items()}
    return st.fixed_dictionaries({}, optional=good)


def test_every_item_is_tried() -> None:
    assert sorted(BECOMES) == sorted(ITEMS)


@pytest.mark.parametrize(
    ("name", "value", "options"), [(name, *row) for name, rows in BECOMES.items() for row in rows]
)
def test_an_item_becomes_options(name: str, value: Any, options: dict[str, object]) -> None:
    config = Config({name: value})
    assert config.options() == options
    assert set(options) <= set(ITEMS[name].options)
    assert set(ITEMS[name].options) <= set(Options.model_fields)
    resolved = resolve(config, {})
    assert all(getattr(resolved.config, item) == wanted for item, wanted in options.items())
    assert all(resolved.is_told(item) == (item in options) for item in Options.model_fields)


@pytest.mark.parametrize("name", [name for name, item in ITEMS.items() if not isinstance(item, Text)])
def test_defaults_are_values(name: str) -> None:
    assert ITEMS[name].has(ITEMS[name].default)
    assert Config()[name] == ITEMS[name].default and Config().options() == {}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, item in ITEMS.items() for value in WRONG[type(item)]]
)
def test_wrong_values_are_refused(name: str, value: Any) -> None:
    may_be = {
        "pipeline.num_stages": (None,), "communication.fp16_scale": (-5,), "cluster.run_visible_devices": ("v9",)
    }.get(name, ())  # fmt: skip
    if value in may_be and not isinstance(value, bool):
        assert Config({name: value})[name] == value
        return
    with pytest.raises(OptionValueError) as caught:
        Config({name: value})
    assert name in str(caught.value) and ITEMS[name].accepts in str(caught.value)


def test_integers_say_whether_they_may_be_none() -> None:
    integers = {name: item for name, item in ITEMS.items() if isinstance(item, Integer)}
    says_none = {name for name, item in integers.items() if item.accepts.endswith(" or None")}
    assert (
        says_none
        == {name for name, item in integers.items() if item.default is None}
        == {"pipeline.num_stages"}
    )


@pytest.mark.parametrize(
    "given",
    [
        {"communication.num_communicators": 1000},
        {"cluster.run_visible_devices": "0; 1"},
        {"communication.fp16": True, "communication.fp16_scale": 2_000_000_000},
    ],
)
def test_values_that_no_option_has_are_refused_in_the_words_of_the_item(given: dict[str, Any]) -> None:
    item = list(given)[-1]
    with pytest.raises(OptionValueError) as caught:
        Config(given)
    assert caught.value.item == item and f"give {item} something for which the option" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("pipeline.num_micro_batches", "pipeline.num_micro_batch"),
        ("pipline.strategy", "pipeline.strategy"),
        ("io.slice", "io.slicing"),
        ("ZERO.LEVEL", "zero.level"),
    ],
)
def test_unknown_items_are_refused_with_the_nearest_names(text: str, near: str) -> None:
    with pytest.raises(UnknownOptionError) as caught:
        Config({text: 1})
    assert caught.value.nearest == near and "epl_parity" in str(caught.value)
    assert 1 <= str(caught.value).count("'") // 2 <= 4


def test_names_of_values_are_corrected() -> None:
    with pytest.raises(OptionValueError, match="did you mean 'PreferForward'"):
        Config({"pipeline.strategy": "PreferForwards"})


def test_the_environment_counts_below_the_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPL_PIPELINE_NUM_MICRO_BATCH", "4")
    monkeypatch.setenv("EPL_AMP_LEVEL", "O1")
    monkeypatch.setenv("EPL_AMP_LOSS_SCALE", "64")
    monkeypatch.setenv("EPL_COMMUNICATION_SPARSE_AS_DENSE", "true")
    monkeypatch.setenv("EPL_PIPELINE_NUM_STAGES", "None")
    config = Config({"pipeline.num_micro_batch": 2})
    assert config.options() == {"pipeline_num": 2, "autocast": "float16", "sparse_gradients": "dense"}
    assert Config()["pipeline.num_micro_batch"] == 4 and config["amp.loss_scale"] == 64
    monkeypatch.setenv("EPL_AMP_LOSS_SCALE", "dynamic")
    assert Config()["amp.loss_scale"] == "dynamic"


@pytest.mark.parametrize(
    ("variable", "text", "error", "what"),
    [
        (
            "EPL_PIPELINE_NUM_MICRO_BATCH",
            "four",
            OptionValueError,
            "environment EPL_PIPELINE_NUM_MICRO_BATCH",
        ),
        ("EPL_ZERO_LEVEL", "v7", OptionValueError, "'v0', 'v1'"),
        ("EPL_IO_SLICING", "maybe", OptionValueError, "True or False"),
        ("EPL_PIPELINE_STAGES", "2", UnknownOptionError, "EPL_PIPELINE_NUM_STAGES"),
        ("EPL_PIPELIN_NUM_STAGES", "2", UnknownOptionError, "EPL_PIPELINE_NUM_STAGES"),
    ],
)
def test_wrong_variables_are_refused(
    variable: str, text: str, error: type[Exception], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(error, match=what.replace("(", r"\(")):
        Config()


def test_variables_of_other_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPL_HOME", "/opt")
    assert not Config().given


@pytest.mark.parametrize("name", list(ITEMS))
def test_every_item_has_a_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = next(value for value, _ in BECOMES[name] if value is not None)
    monkeypatch.setenv(environment_name(name), str(value))
    assert Config().options() == Config({name: value}).options() and name in Config().given


def test_items_that_belong_together() -> None:
    scaled = Config({"communication.fp16": True, "communication.fp16_scale": 64})
    assert scaled.options()["gradient_scale"] == 64.0
    unscaled = Config({"communication.fp16": True, "communication.fp16_scale": 0})
    assert unscaled.options()["gradient_scale"] == 1.0
    given = {"auto.auto_parallel": False, "pipeline.num_stages": 2, "pipeline.num_micro_batch": 4}
    assert Config(given).options() == {"partition_num": 2, "pipeline_num": 4}
    together = Config({"cluster.colocate_split_and_replicate": True, "pipeline.num_stages": 2})
    assert together.options() == {"partition_num": 2, "stages_per_rank": 2}
    with pytest.raises(OptionValueError, match=r"io\.drop_last_files"):
        Config({"io.unbalanced_io_slicing": True, "io.drop_last_files": True})


def test_what_differs_is_said_where_it_is_given() -> None:
    assert not Config({"communication.clip_after_allreduce": True}).notices()
    config = Config(
        {"communication.clip_after_allreduce": False, "communication.gradients_reduce_method": "sum"}
    )
    assert [line.split(":")[0] for line in config.notices()] == [
        "communication.clip_after_allreduce=False",
        "communication.gradients_reduce_method=sum",
    ]
    assert resolve(config, {}).notices == config.notices()
    assert not Config().notices() and not resolve({}, {}).notices


def test_a_configuration_does_not_change() -> None:
    values = {"zero.level": "v1"}
    config, other = Config(values), Config({"zero.level": "V1"})
    values["zero.level"] = "v0"
    assert config == other and hash(config) == hash(other) and config != Config()
    assert repr(config) == "Config({'zero.level': 'v1'})"
    with pytest.raises(AttributeError):
        config.zero = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        config.given["zero.level"] = "v0"  # type: ignore[index]
    with pytest.raises(OptionValueError, match="a dict"):
        Config([("zero.level", "v1")])  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(values())
def test_good_values_give_options_or_an_error_of_ours(chosen: dict[str, Any]) -> None:
    try:
        resolve(Config(chosen), {})
    except UserInputError as error:
        assert "What to change" in str(error)


_ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2),
    st.sampled_from([value for rows in BECOMES.values() for value, _ in rows]),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.one_of(st.sampled_from(list(ITEMS)), st.text(max_size=12)), _ANYTHING, max_size=4))
def test_any_values_give_options_or_an_error_of_ours(chosen: dict[str, Any]) -> None:
    try:
        resolve(Config(chosen), {})
    except UserInputError as error:
        assert "What to change" in str(error)
