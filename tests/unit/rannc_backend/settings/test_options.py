"""Options: which source wins, and that nothing wrong is taken silently."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rannc_backend.errors import OptionValueError, RanksDifferError, UnknownOptionError
from rannc_backend.settings.accepted import accepted_values
from rannc_backend.settings.options import Config, environment_name
from rannc_backend.settings.same_options import check_same_options
from rannc_backend.settings.sources import ENVIRONMENT_ONLY, resolve, resolve_config

ITEMS = sorted(Config.model_fields)
# A good value that is not the default, as an option and as text in the environment.
OTHER_VALUES = {
    "states_on_all_ranks": (True, "1"),
    "check_optimizers": (False, "0"),
    "plan_name": ("bert", "bert"),
    "training": (False, "0"),
    "num_ranks": (4, "4"),
    "mesh": ("2x4", "2x4"),
    "micro_batch_rows": (2, "2"),
    "partition_num": (2, "2"),
    "stages_per_rank": (2, "2"),
    "replica_num": (2, "2"),
    "stage_replicas": ("2,1", "2,1"),
    "max_partition_num": (64, "64"),
    "min_partition_num": (5, "5"),
    "coarsen_by_time": (False, "false"),
    "stage_starts": ("encoder.1,head", "encoder.1,head"),
    "stage_pivots": ("encoder.layer,Block", "encoder.layer,Block"),
    "keep_together": ("encoder.1", "encoder.1"),
    "stage_pins": ("encoder=0,head=1", "encoder=0,head=1"),
    "pipeline_num": (4, "4"),
    "min_pipeline": (2, "2"),
    "max_pipeline": (8, "8"),
    "max_pipeline_bubble_ratio": (0.2, "0.2"),
    "max_pipeline_unbalance_ratio": (0.5, "0.5"),
    "mem_limit_gb": (1.5, "1.5"),
    "ignore_memory": (True, "true"),
    "mem_margin": (0.2, "0.2"),
    "opt_param_factor": (1.0, "1"),
    "opt_transient_factor": (2.0, "2"),
    "transient_memory_factor": (1.5, "1.5"),
    "memory_granularity_bytes": (4096, "4096"),
    "small_tensor_elements": (100, "100"),
    "num_apply_group": (3, "3"),
    "zero_stage": ("2", "2"),
    "zero_ngroups": (2, "2"),
    "offload": ("parameters", "parameters"),
    "recompute": ("0.5", "0.5"),
    "recompute_modules": ("encoder.layer,Block", "encoder.layer,Block"),
    "recompute_last_stage": (1, "1"),
    "check_gradients": (True, "true"),
    "checkpointing": (True, "true"),
    "verify_recomp": (True, "true"),
    "num_plans": (3, "3"),
    "plan_trial_seconds": (5.0, "5"),
    "solver": ("ilp", "ilp"),
    "solver_seconds": (5.0, "5.0"),
    "search_processes": (2, "2"),
    "parallel_profile": (False, "0"),
    "profile_again": (True, "1"),
    "costs": ("measured", "measured"),
    "profile_file": ("profile.json", "profile.json"),
    "save_graph_profile": (True, "true"),
    "load_graph_profile": (True, "true"),
    "graph_profile_file": ("profiles.json", "profiles.json"),
    "profile_by_acc": (False, "0"),
    "stage_memory": ("traced", "traced"),
    "profiling_iter": (3, "3"),
    "cluster": ("a100-80gb", "a100-80gb"),
    "cache_dir": ("cache", "cache"),
    "capture": ("nonstrict", "nonstrict"),
    "autocast": ("bfloat16", "bfloat16"),
    "log_casts": (True, "true"),
    "visible_devices": ("0,1", "0,1"),
    "placement": ("replica_major", "replica_major"),
    "stage_compiler": ("eager", "eager"),
    "schedule": ("fill_drain", "fill_drain"),
    "outputs": ("loss", "loss"),
    "gather_inputs": (False, "0"),
    "batch_dim": ("x=1,hidden=0", "x=1,hidden=0"),
    "pad_inputs": ("ids=0,labels=-100", "ids=0,labels=-100"),
    "gradients_reduce_method": ("sum", "sum"),
    "gradient_accumulation_dtype": ("float32", "float32"),
    "sparse_gradients": ("dense", "dense"),
    "skip_grad_scaling": (True, "true"),
    "sync_allreduce": (True, "true"),
    "sync_params_on_init": (False, "false"),
    "start_timeout_seconds": (300.0, "300"),
    "step_timeout_seconds": (30.0, "30"),
    "compile_timeout_seconds": (60.0, "60"),
    "bucket_mb": (1.0, "1"),
    "max_buckets": (5, "5"),
    "num_communicators": (2, "2"),
    "boundary_dtype": ("fp8", "fp8"),
    "gradient_dtype": ("bf16", "bf16"),
    "gradient_scale": (128.0, "128"),
    "partitioning_dry_run_np": (32, "32"),
    "shared_memory": (False, "0"),
    "save_deployment": (True, "1"),
    "load_deployment": (True, "1"),
    "deployment_file": ("plan.json", "plan.json"),
    "report_steps": (0, "0"),
    "run_file": ("run.json", "run.json"),
    "plan_cache": (False, "0"),
    "whole_batch": ("never", "never"),
    "batch_norm": ("global", "global"),
    "print_program": (True, "1"),
    "profiling": (True, "true"),
    "trace_events": (True, "true"),
    "event_trace_file": ("trace.json", "trace.json"),
    "dump_graph": (True, "true"),
    "dump_graph_prefix": ("graph_dump", "graph_dump"),
    "validate_comm": (True, "true"),
    "display_comm_value": (True, "true"),
    "display_act_value": (True, "true"),
    "show_config_items": (True, "true"),
    "verbose": (True, "true"),
}
# Items that are refused without another.
COMPANIONS = {"gradient_scale": {"gradient_dtype": "fp16"}}
ANY_VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.just({}),
)


def test_every_item_has_another_value_here() -> None:
    assert sorted(OTHER_VALUES) == ITEMS


@pytest.mark.parametrize("item", ITEMS)
def test_default_environment_options_in_this_order(item: str) -> None:
    default = getattr(Config(), item)
    value, text = OTHER_VALUES[item]
    assert value != default
    assert getattr(resolve_config(None, {}), item) == default
    companions = COMPANIONS.get(item, {})
    from_environment = resolve(companions, {environment_name(item): text})
    assert getattr(from_environment.config, item) == value
    assert from_environment.sources[item] == f"environment {environment_name(item)}"
    from_options = resolve({item: default}, {environment_name(item): text})
    assert getattr(from_options.config, item) == default
    assert from_options.sources[item] == "options"
    assert set(from_options.sources.values()) == {"options", "default"}


@pytest.mark.parametrize("item", ITEMS)
def test_every_item_is_documented(item: str) -> None:
    assert (Config.model_fields[item].description or "").endswith(".")
    assert accepted_values(item)


@given(st.text(min_size=1, max_size=20).filter(lambda name: name not in Config.model_fields))
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(UnknownOptionError) as caught:
        resolve_config({name: 1}, {})
    assert repr(name) in str(caught.value)


@given(st.sampled_from(ITEMS), st.data())
def test_one_wrong_letter_is_corrected(item: str, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(item) - 1))
    misspelt = item[:position] + item[position + 1 :]
    with pytest.raises(UnknownOptionError) as caught:
        resolve_config({misspelt: 1}, {})
    assert caught.value.nearest is not None
    with pytest.raises(UnknownOptionError) as caught:
        resolve_config({}, {environment_name(misspelt): "1"})
    assert caught.value.nearest is not None and caught.value.nearest.startswith("RANNC_")


def test_module_names_may_be_lists_and_dicts() -> None:
    config = resolve_config(
        {"stage_starts": ["a.1", "b"], "keep_together": ("c",), "stage_pins": {"a": 0, "b": 1}}, {}
    )
    assert (config.stage_starts, config.keep_together, config.stage_pins) == ("a.1,b", "c", "a=0,b=1")
    bad = [
        ("stage_pins", {"a": "x"}),
        ("stage_pins", {"a": -1}),
        ("stage_pins", ["a=0"]),
        ("stage_starts", [1]),
    ]
    bad += [("stage_starts", {"a": 0}), ("keep_together", ["a b"]), ("stage_starts", "a,,b")]
    for item, value in bad:
        with pytest.raises(OptionValueError) as caught:
            resolve_config({item: value}, {})
        assert caught.value.item == item


@given(st.sampled_from(ITEMS), ANY_VALUE)
def test_any_value_gives_a_config_or_an_error_that_names_the_item(item: str, value: object) -> None:
    try:
        config = resolve_config({item: value}, {})
    except OptionValueError as error:
        # A max_pipeline below the default of min_pipeline would be told of as min_pipeline; that default is
        # the least there is.
        assert error.item == item
        assert "from options" in str(error)
    else:
        taken = getattr(config, item)
        # No names at all may be an empty list or dict.
        assert taken == (value if value or isinstance(value, str | int | float) else "")
        assert isinstance(taken, bool) == isinstance(value, bool), "True must not pass as 1"
        assert not isinstance(taken, float) or math.isfinite(taken)


@given(
    st.sampled_from(ITEMS),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
)
def test_any_text_in_the_environment_gives_a_config_or_an_error_that_names_it(item: str, text: str) -> None:
    try:
        resolve_config(None, {environment_name(item): text})
    except OptionValueError as error:
        assert environment_name(item) in str(error)


@pytest.mark.parametrize(
    ("options", "item"),
    [
        ({"pipeline_num": -1}, "pipeline_num"),
        ({"pipeline_num": 2.0}, "pipeline_num"),
        ({"pipeline_num": True}, "pipeline_num"),
        ({"pipeline_num": "4"}, "pipeline_num"),
        ({"min_pipeline": 0}, "min_pipeline"),
        ({"mem_margin": 1.0}, "mem_margin"),
        ({"mem_limit_gb": math.nan}, "mem_limit_gb"),
        ({"mem_limit_gb": math.inf}, "mem_limit_gb"),
        ({"step_timeout_seconds": 0}, "step_timeout_seconds"),
        ({"outputs": "none"}, "outputs"),
        ({"gather_inputs": 1}, "gather_inputs"),
        ({"deployment_file": None}, "deployment_file"),
        ({"deployment_file": ""}, "deployment_file"),
        ({"run_file": "run.json", "report_steps": 0}, "run_file"),
        ({"min_pipeline": 8, "max_pipeline": 4}, "min_pipeline"),
        ({"gradient_scale": 128.0}, "gradient_scale"),
        ({"gradient_scale": 0.0, "gradient_dtype": "fp16"}, "gradient_scale"),
        ({"gradient_dtype": "fp8"}, "gradient_dtype"),
        ({"num_communicators": 0}, "num_communicators"),
        ({"stage_replicas": "2,0"}, "stage_replicas"),
        ({"stage_replicas": "2, 1"}, "stage_replicas"),
        ({"stage_replicas": "2,1", "partition_num": 3}, "stage_replicas"),
        ({"stage_replicas": "2,1", "replica_num": 2}, "stage_replicas"),
        ({"checkpointing": True, "recompute": 0.5}, "checkpointing"),
        ({"checkpointing": True, "recompute": "marked"}, "checkpointing"),
        ({"checkpointing": True, "recompute_modules": "layer"}, "recompute_modules"),
        ({"recompute": 0.5, "recompute_modules": "layer"}, "recompute_modules"),
        ({"recompute": "marked", "recompute_modules": "layer"}, "recompute_modules"),
        ({"recompute_modules": "layer=2"}, "recompute_modules"),
        ({"recompute_last_stage": -2}, "recompute_last_stage"),
        ({"pipeline_num": 2**60}, "pipeline_num"),
        ({"pipeline_num": 16**5000}, "pipeline_num"),
    ],
)
def test_bad_options(options: dict[str, object], item: str) -> None:
    with pytest.raises(OptionValueError) as caught:
        resolve_config(options, {})
    assert caught.value.item == item
    assert "from options" in str(caught.value)


def test_a_range_over_two_sources_names_both() -> None:
    with pytest.raises(
        OptionValueError, match=r"(?s)environment RANNC_MIN_PIPELINE.*which is 4 \(from options\)"
    ):
        resolve_config({"max_pipeline": 4}, {"RANNC_MIN_PIPELINE": "8"})


def test_stage_replicas_as_numbers() -> None:
    assert Config().stage_replica_counts == ()
    assert Config(stage_replicas="2,1,12", partition_num=3).stage_replica_counts == (2, 1, 12)
    assert Config(stage_replicas="2,2", replica_num=2).stage_replica_counts == (2, 2)


def test_names_in_the_environment() -> None:
    assert resolve_config(None, {"PATH": "/bin", "PIPELINE_NUM": "3", "RANNC_LOG_LEVEL": "debug"}) == Config()
    assert all(variable.startswith("RANNC_") for variable in ENVIRONMENT_ONLY)
    with pytest.raises(UnknownOptionError, match="RANNC_PIPELINE_NUM"):
        resolve_config(None, {"RANNC_pipeline_num": "3"})


def test_gpipe_is_another_name_of_fill_drain() -> None:
    given, in_environment = {"schedule": "gpipe"}, {"RANNC_SCHEDULE": " gpipe "}
    for config in (resolve_config(given, {}), resolve_config(None, in_environment), Config(**given)):
        assert config == Config(schedule="fill_drain")
    assert "gpipe" not in accepted_values("schedule")
    with pytest.raises(OptionValueError, match="(?s)'gpip'.*'fill_drain'"):
        resolve_config({"schedule": "gpip"}, {})


def test_config_is_frozen_and_takes_no_other_names() -> None:
    with pytest.raises(ValidationError):
        Config().pipeline_num = 3
    with pytest.raises(ValidationError):
        Config(pipelines=3)
    with pytest.raises(ValidationError):
        Config(min_pipeline=3, max_pipeline=2)


def test_ranks_must_agree() -> None:
    same = Config().model_dump()
    check_same_options([same, dict(same), dict(same)])
    other = Config(schedule="fill_drain").model_dump()
    with pytest.raises(RanksDifferError, match="'schedule'") as caught:
        check_same_options([same, same, other])
    assert caught.value.odd_ranks == (2,)


OWN = {
    "cache_dir",
    "deployment_file",
    "graph_profile_file",
    "dump_graph_prefix",
    "event_trace_file",
    "run_file",
    "search_processes",
    "show_config_items",
}


@pytest.mark.parametrize("item", ITEMS)
def test_ranks_may_differ_in_what_is_their_own(item: str) -> None:
    """Paths on disks of their hosts; everything else decides what ranks do together."""
    other = {**Config().model_dump(), item: OTHER_VALUES[item][0]}
    if item in OWN:
        check_same_options([Config().model_dump(), other])
    else:
        with pytest.raises(RanksDifferError, match=repr(item)):
            check_same_options([Config().model_dump(), other])


@pytest.mark.parametrize(
    ("value", "budget"), [("auto", None), (0, 0.0), (1, 1.0), (0.25, 0.25), ("0.5", 0.5)]
)
def test_recompute_is_a_word_or_a_number(value: object, budget: float | None) -> None:
    assert resolve_config({"recompute": value}, {}).fixed_recompute == budget


@pytest.mark.parametrize("value", [1.5, -0.5, True, "all", "1.01"])
def test_recompute_from_0_to_1(value: object) -> None:
    with pytest.raises(OptionValueError, match="recompute"):
        resolve_config({"recompute": value}, {})
