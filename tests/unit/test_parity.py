"""docs/rannc_parity.md against the code: every test, script, check and public name in it exists, and no
document of RaNNC is left out.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rannc_backend
from rannc_backend.settings.options import Config
from rannc_backend.settings.rannc_items import RETIRED

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "rannc_parity.md").read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`((?:tests|examples)/[\w/]+\.py)(?:::(\w+))?(?: [^`]*)?`", PAGE)))
NAMES = sorted(set(re.findall(r"`pyrannc\.(\w+)`", PAGE)) - {"amp"})
METHODS = sorted(set(re.findall(r"`RaNNCModule\.(\w+)`", PAGE)))
CHECKS = sorted(set(re.findall(r"check `(\w+)`", PAGE)))


@pytest.mark.parametrize(("path", "function"), FILES, ids=[f"{path}-{function}" for path, function in FILES])
def test_what_shows_it_exists(path: str, function: str) -> None:
    assert (ROOT / path).is_file()
    assert not function or f"\ndef {function}(" in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CHECKS)
def test_checks_exist(name: str) -> None:
    texts = [
        path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "distributed").glob("*_checks.py")
    ]
    assert any(f"\ndef {name}(" in text for text in texts)
    used = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "distributed").glob("test_*.py")]
    # The check "conformance" is the default of its cases.
    assert any(f'"{name}"' in text for text in used)


@pytest.mark.parametrize("name", NAMES)
def test_functions_are_public(name: str) -> None:
    assert name in rannc_backend.__all__ and callable(getattr(rannc_backend, name))


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_those_of_the_module(name: str) -> None:
    assert callable(vars(rannc_backend.RaNNCModule)[name])


def test_every_public_name_of_rannc_is_in_the_page() -> None:
    functions = (
        "get_rank get_world_size barrier clear delay_grad_allreduce keep_graph sync_params_on_init "
        "recreate_all_communicators show_deployment DistributeModelParams store_dist_param load_dist_param "
        "set_dist_param get_dist_param_range set_dist_param_dtype patch_optimizer all_gather tensor_coll "
        "register_amp_params named_master_params patch_amp_scaler allreduce_grads_rannc allreduce_grads "
        "_dump_events _run_dp_dry"
    )
    arguments = (
        "optimizer gather_inputs load_deployment enable_apex_amp use_amp_master_params "
        "allreduce_amp_master_params enable_zero check_unused_values offload_params"
    )
    methods = (
        "to cuda train eval enable_dropout parameters named_parameters buffers named_buffers state_dict "
        "load_state_dict get_param get_param_grad zero_grad clip_grad_norm allreduce_grads "
        "allreduce_grads_zero save_deployment load_deployment undeploy is_checkpointing_enabled "
        "use_amp_master_params"
    )
    missing = [
        name
        for name in f"{functions} {arguments} {methods}".split()
        if not re.search(rf"`[^`]*\b{name}\b[^`]*`", PAGE)
    ]
    assert not missing


def test_every_documented_item_of_the_configuration_is_in_the_page() -> None:
    documented = (
        "show_config_items mem_limit_gb mem_margin save_deployment load_deployment deployment_file "
        "partition_num min_pipeline max_pipeline opt_param_factor trace_events event_trace_file "
        "profile_by_acc sync_allreduce partitioning_dry_run_np profiling dump_graph dump_graph_prefix "
        "replica_num pipeline_num validate_comm display_comm_value profiling_iter consolidate_grads "
        "checkpointing checkpointing_no_last auto_parallel p2p_comm min_partition_num max_partition_num "
        "do_uncoarsening save_graph_profile load_graph_profile verify_recomp coarsen_by_time "
        "skip_grad_scaling"
    )
    for item in documented.split():
        assert f"`{item}`" in PAGE, item
        assert item in Config.model_fields or item in RETIRED, item


def test_every_script_is_in_the_page() -> None:
    for path in (ROOT / "tests" / "rannc_documents").glob("[a-z]*.py"):
        assert f"`tests/rannc_documents/{path.name}`" in PAGE, path.name
