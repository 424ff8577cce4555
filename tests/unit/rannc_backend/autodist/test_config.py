"""AutoDist's configuration: its names, defaults and ranges, what each item becomes, and what is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.autodist import AutoDistConfig
from rannc_backend.autodist.table import PROFILE, TABLE
from rannc_backend.errors import OptionValueError, RanncError, UnknownOptionError
from rannc_backend.settings.options import Config
from rannc_backend.settings.sources import resolve, resolve_config

# AutoDist's document: each item with its default, a value that is not the default, and the options of that.
DOCUMENTED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "task_name": ("default", "bert", {"plan_name": "bert"}),
    "consider_mem": (True, False, {"ignore_memory": True}),
    "memory_constraint": (32, 80, {"mem_limit_gb": 80.0}),
    "memory_granularity": (1, 4096, {"memory_granularity_bytes": 4096}),
    "transient_mem_coef": (2, 1.5, {"transient_memory_factor": 1.5}),
    "opt_resident_coef": (2, 6, {"opt_param_factor": 6.0}),
    "opt_transient_coef": (0, 4, {"opt_transient_factor": 4.0}),
    "recompute_modules": ("", "attention, mlp", {"recompute_modules": "attention,mlp"}),
    "zero_stage": (0, 1, {"zero_stage": "1"}),
    "zero_ngroups": (1, 4, {"zero_ngroups": 4}),
    "pipeline_pivots": ("", "encoder,decoder", {"stage_pivots": "encoder,decoder"}),
    "pipeline_nstages": ("auto", 4, {"partition_num": 4}),
    "pipeline_scheduler": ("1f1b", "1f1b", {"schedule": "1f1b"}),
    "max_pipeline_bubble_ratio": (0.2, 0.1, {"max_pipeline_bubble_ratio": 0.1}),
    "max_pipeline_unbalance_ratio": (0.5, 0.7, {"max_pipeline_unbalance_ratio": 0.7}),
    "mesh_row": (1, 2, {"mesh": "2x1"}),
    "mesh_col": (1, 4, {"mesh": "1x4"}),
    "world_size": (1, 16, {"num_ranks": 16}),
    "micro_batch_size": (1, 2, {"micro_batch_rows": 2}),
    "update_freq": (1, 4, {"pipeline_num": 4}),
    "profile_dir": ("", "profiles", {"profile_file": f"profiles/{PROFILE}"}),
    "parallel_profile": (True, False, {"parallel_profile": False}),
    "re_profile": (False, True, {"profile_again": True}),
    "topk": (20, 3, {"num_plans": 3}),
    "solver": ("dp", "ilp", {"solver": "ilp"}),
    "nproc": (1, 2, {"search_processes": 2}),
    "load_plan_path": ("", __file__, {"load_deployment": True, "deployment_file": __file__}),
    "save_plan_path": ("", "plan.json", {"save_deployment": True, "deployment_file": "plan.json"}),
    "partition_constraints_path": ("", "", {}),
    "is_train": (True, False, {"training": False}),
    "verbose": (False, True, {"verbose": True}),
    "ignore_small_tensor_threshold": (1, 100, {"small_tensor_elements": 100}),
}
ITEMS = sorted(DOCUMENTED)


def test_all_items_are_there_with_their_defaults() -> None:
    assert sorted(AutoDistConfig.model_fields) == ITEMS == sorted(TABLE)
    config = AutoDistConfig()
    assert {item: getattr(config, item) for item in ITEMS} == {
        item: row[0] for item, row in DOCUMENTED.items()
    }


def test_what_is_not_passed_stands_for_nothing() -> None:
    assert AutoDistConfig().options() == {}
    assert resolve_config(AutoDistConfig(), {}) == Config()


@pytest.mark.parametrize("item", ITEMS)
def test_what_an_item_becomes(item: str) -> None:
    _, value, options = DOCUMENTED[item]
    config = AutoDistConfig(**{item: value})
    assert config.options() == options
    resolution = resolve(config, {"RANNC_PARTITION_NUM": "3"})
    assert all(getattr(resolution.config, name) == wanted for name, wanted in options.items())
    assert all(resolution.sources[name] == "AutoDistConfig" for name in options)


def test_a_default_that_is_passed_binds() -> None:
    given_defaults = AutoDistConfig(memory_constraint=32, mesh_row=1, mesh_col=1, update_freq=1, topk=20)
    assert given_defaults.options() == {
        "mem_limit_gb": 32.0,
        "mesh": "1x1",
        "pipeline_num": 1,
        "num_plans": 20,
    }
    assert AutoDistConfig(pipeline_nstages="auto", recompute_modules="", save_plan_path="").options() == {}


def test_items_of_one_meaning_are_put_together() -> None:
    copies = AutoDistConfig(mesh_row=2, mesh_col=4, world_size=32, micro_batch_size=2, update_freq=4)
    assert copies.options() == {"mesh": "2x4", "num_ranks": 32, "micro_batch_rows": 2 * 4, "pipeline_num": 4}
    inference = AutoDistConfig(is_train=False, pipeline_scheduler="1f1b")
    assert inference.options() == {"training": False}


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ({"topk": 0}, "greater than or equal to 1"),
        ({"topk": "3"}, "valid integer"),
        ({"topk": 101}, "num_plans is an integer, at least 1, at most 100"),
        ({"micro_batch_size": 10**8, "mesh_row": 1, "world_size": 10**8}, "micro_batch_rows"),
        ({"zero_stage": 2}, "less than or equal to 1"),
        ({"zero_stage": True}, "valid integer"),
        ({"pipeline_scheduler": "gpipe"}, "'1f1b'"),
        ({"solver": "ipl"}, "did you mean 'ilp'"),
        ({"pipeline_nstages": "aut"}, "did you mean 'auto'"),
        ({"pipeline_nstages": 0}, "at least 1"),
        ({"pipeline_nstages": 1, "pipeline_pivots": "encoder"}, "pipeline_pivots"),
        ({"max_pipeline_bubble_ratio": 1.0}, "less than 1"),
        ({"max_pipeline_unbalance_ratio": 0.0}, "greater than 0"),
        ({"memory_constraint": float("nan")}, "finite"),
        ({"world_size": 12, "mesh_row": 2, "mesh_col": 4}, "2 x 4 = 8"),
        ({"world_size": 8, "zero_stage": 1, "zero_ngroups": 3}, "divides world_size, which is 8"),
        ({"load_plan_path": "/nowhere/plan.json"}, "there is no such file"),
        ({"load_plan_path": __file__, "save_plan_path": "b"}, "save_plan_path"),
        ({"partition_constraints_path": "c.yaml"}, "how operators may be split"),
        ({"task_name": ""}, "at least 1 character"),
        ({"recompute_modules": "a=b"}, "pattern"),
    ],
)
def test_what_is_refused_and_why(items: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionValueError) as caught:
        AutoDistConfig(**items)
    assert words in str(caught.value) and caught.value.item in items and "AutoDistConfig" in str(caught.value)


def test_names_that_autodist_does_not_have() -> None:
    with pytest.raises(UnknownOptionError) as caught:
        AutoDistConfig(memory_constrain=32)
    assert caught.value.nearest == "memory_constraint" and "autodist_parity.md" in str(caught.value)


def test_a_configuration_is_frozen_and_can_be_copied() -> None:
    config = AutoDistConfig(topk=3)
    with pytest.raises(ValueError, match="frozen"):
        config.topk = 4
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    assert config.options() == copy.deepcopy(config).options()


def test_home_stands_for_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert AutoDistConfig(save_plan_path="~/plan.json").options()["deployment_file"] == "/home/me/plan.json"
    assert AutoDistConfig(profile_dir="~/p").options()["profile_file"] == f"/home/me/p/{PROFILE}"


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(0, 8), st.floats(), st.text(max_size=8),
    st.sampled_from(["auto", "1f1b", "dp", "a,b", "a, b", "~", "~\0"]), st.lists(st.integers(), max_size=1),
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(ITEMS) | st.text(max_size=5), VALUES, max_size=6))
def test_any_configuration_is_an_error_of_ours_or_valid_options(items: dict[str, Any]) -> None:
    try:
        config = AutoDistConfig(**items)
        assert isinstance(resolve_config(config.options(), {}), Config)
    except RanncError as error:
        assert "What to change" in str(error)


@pytest.mark.parametrize("options", [3, [("pipeline_num", 4)], AutoDistConfig, object()])
def test_what_gives_no_options_is_refused(options: Any) -> None:
    with pytest.raises(OptionValueError, match="as a dict, or as an object whose method"):
        resolve_config(options, {})


def test_documents_of_the_parity_page_name_every_item() -> None:
    page = (Path(__file__).parents[4] / "docs" / "autodist_parity.md").read_text(encoding="utf-8")
    assert [item for item in AutoDistConfig.model_fields if f"\n| `{item}` |" not in page] == []
