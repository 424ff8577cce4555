"""The file of options: what it may say, the line of what is wrong, and which source wins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.errors import ConfigurationFileError, OptionValueError, RanncError, UnknownOptionError
from rannc_backend.settings.options import Config, environment_name
from rannc_backend.settings.rannc_items import RETIRED
from rannc_backend.settings.sources import CONFIG_FILE, FileOnce, is_item, option_from_text, resolve
from rannc_backend.settings.toml_lines import MAX_FILE_BYTES, parse_toml

# The example file of RaNNC's documentation of 0.4.2.
RANNC_EXAMPLE = (Path(__file__).parents[3] / "rannc_documents" / "manual_conf.toml").read_text()
# All 65 items of RaNNC 0.7.5 but `conf_dir`, which only its environment variable sets, and the two that 0.5
# alone had.
RANNC_ITEMS = """show_config_items profiling graph_profiling profile_dump_path dump_graph dump_graph_prefix partition_num replica_num
pipeline_num validate_comm display_comm_value display_act_value consolidate_grads profiling_iter checkpointing checkpointing_no_last
disable_balancing auto_parallel max_mp_num opt_param_factor p2p_comm decomposer mem_limit_gb mem_margin min_partition_num
max_partition_num do_coarsening do_uncoarsening coarsen_by_time min_pipeline max_pipeline min_pipeline_bs dp_search_all
limit_dev_num_pot limit_dev_num_more_than_bs profile_by_acc alloc_repl_flat sync_allreduce save_deployment load_deployment
deployment_file save_graph_profile load_graph_profile graph_profile_file save_mlpart_results load_mlpart_results
mlpart_results_file save_alloc_solutions load_alloc_solutions alloc_solutions_file_prefix dump_dp_node_profiles dump_dp_cache
partitioning_dry_run_np trace_events event_trace_file verify_recomp verify_partitioning use_mpi_to_gather_dist_params run_watchdog
watchdog_lockfile_dir force_dist_matmul use_named_tensors profiler_cache_size enable_kineto skip_grad_scaling
use_amp_master_param""".split()


def environ_with(folder: Path, text: str, **variables: str) -> dict[str, str]:
    """An environment in which the file of options says `text`."""
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8", newline="")
    return {"RANNC_CONF_DIR": str(folder), **variables}


def test_every_item_of_rannc_is_an_item_here() -> None:
    assert [item for item in RANNC_ITEMS if not is_item(item)] == []
    assert sorted(RETIRED) == list(RETIRED)
    assert not set(RETIRED) & set(Config.model_fields)


def test_the_example_of_rannc(tmp_path: Path) -> None:
    found = resolve(None, environ_with(tmp_path, RANNC_EXAMPLE))
    assert (found.config.partition_num, found.config.max_pipeline, found.config.save_deployment) == (
        2,
        4,
        True,
    )
    assert found.config.fixed_recompute == 0.0
    assert found.sources["partition_num"] == f"{tmp_path / CONFIG_FILE}, line 4"
    assert sorted(found.retired) == [
        "auto_parallel",
        "checkpointing_no_last",
        "consolidate_grads",
        "do_uncoarsening",
        "p2p_comm",
    ]
    assert len(found.notices) == 5 and all(
        "\n" not in notice and "line" in notice for notice in found.notices
    )
    assert found.file == str(tmp_path / CONFIG_FILE)
    assert len(found.lines()) == len(Config.model_fields)


def test_file_below_environment_below_options(tmp_path: Path) -> None:
    environ = environ_with(tmp_path, "pipeline_num = 2\nmem_limit_gb = 8\n")
    assert resolve(None, environ).config.pipeline_num == 2
    assert resolve(None, environ).config.mem_limit_gb == 8.0
    environ["RANNC_PIPELINE_NUM"] = "3"
    assert resolve(None, environ).config.pipeline_num == 3
    assert resolve({"pipeline_num": 4}, environ).config.pipeline_num == 4


def test_the_home_directory_is_the_default_place(tmp_path: Path) -> None:
    assert resolve(None, {"HOME": str(tmp_path)}).file is None
    (tmp_path / ".pyrannc").mkdir()
    (tmp_path / ".pyrannc" / CONFIG_FILE).write_text("partition_num = 3", encoding="utf-8")
    assert resolve(None, {"HOME": str(tmp_path)}).config.partition_num == 3
    (tmp_path / "other").mkdir()
    assert (
        resolve(None, {"HOME": str(tmp_path), "RANNC_CONF_DIR": str(tmp_path / "other")}).config.partition_num
        == 0
    )
    with pytest.raises(ConfigurationFileError, match="RANNC_CONF_DIR"):
        resolve(None, {"RANNC_CONF_DIR": str(tmp_path / "missing")})


def test_a_file_in_the_working_directory_is_not_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve(None, {"HOME": "/nowhere"}).notices == []
    (tmp_path / CONFIG_FILE).write_text("pipeline_num = 4\n")
    resolution = resolve(None, {"HOME": "/nowhere"})
    assert resolution.config.pipeline_num != 4
    (notice,) = resolution.notices
    assert CONFIG_FILE in notice and "/nowhere/.pyrannc" in notice and "RANNC_CONF_DIR" in notice
    assert resolve(None, {}).unread
    for directory in (".", str(tmp_path)):
        read = resolve(None, {"RANNC_CONF_DIR": directory})
        assert read.config.pipeline_num == 4 and read.notices == []


def test_an_edit_while_a_job_runs_is_for_the_next_job(tmp_path: Path) -> None:
    once = FileOnce()
    environ = environ_with(tmp_path, "pipeline_num = 2\n")
    assert resolve(None, environ, once).config.pipeline_num == 2
    environ_with(tmp_path, "pipeline_num = 3\n")
    assert resolve(None, environ, once).config.pipeline_num == 2
    assert resolve(None, environ, FileOnce()).config.pipeline_num == 3
    assert resolve(None, {}, once).config.pipeline_num == 0


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a = 1\n", 1, "unknown option 'a'"),
        ("# first\n\npartition_nun = 2\n", 3, "did you mean 'partition_num'"),
        ("PARTITION_NUM = 2\n", 1, "did you mean 'partition_num'"),
        ("partition_num = 2\nmem_margin = 1.5\n", 2, "at least 0, below 1"),
        ("partition_num = '2'\n", 1, "an integer, at least 0"),
        ("save_deployment = 1\n", 1, "True or False"),
        ("\n\nconsolidate_grads = 1\n", 3, "True or False"),
        ("decomposer = true\n", 1, "a string"),
        ('stage_starts = [\n "a",\n "b",\n]\nmem_margin = 2\n', 5, "mem_margin"),
        ('run_file = """\n\n\n"""\nmin_pipeline = 0\n', 5, "min_pipeline"),
        ("min_pipeline = 9\r\nmax_pipeline = 4\r\n", 1, "line 2"),
        ("mem_margin = 0.1\n[partition_num]\nmem_margin = 2\n", 2, "partition_num"),
        ("stage_pins.a = 0\nstage_pins.b = -1\n", 1, "stage_pins"),
        ("pipeline_num = 0x" + "f" * 5000, 1, "pipeline_num"),
        ("pipeline_num = 1979-05-27\n", 1, "datetime.date(1979, 5, 27)"),
        ("mem_limit_gb = nan\n", 1, "a finite number"),
        ('"" = 1', 1, "unknown option ''"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    with pytest.raises((UnknownOptionError, OptionValueError)) as caught:
        resolve(None, environ_with(tmp_path, text))
    assert f"(from {tmp_path / CONFIG_FILE}, line {line})" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"partition_num = \n", "line 1"),
        (b"a = 1\na = 2\n", "line 2"),
        (b"partition_num = 1" + b"0" * 5000, "not TOML"),
        (b"a = " + b"[" * 20000, "not TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"#" * (MAX_FILE_BYTES + 1), "more than"),
    ],
)
def test_a_file_that_is_no_toml(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(data)
    with pytest.raises(ConfigurationFileError, match=words):
        resolve(None, {"RANNC_CONF_DIR": str(tmp_path)})


def test_a_directory_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).mkdir()
    with pytest.raises(ConfigurationFileError, match="it is a directory, not a file"):
        resolve(None, {"RANNC_CONF_DIR": str(tmp_path)})


@pytest.mark.parametrize("item", sorted(RETIRED))
def test_retired_items_are_accepted_with_their_type_and_say_so(item: str) -> None:
    retired = RETIRED[item]
    value = retired.default or {bool: True, int: 1, str: "text"}[retired.type]
    found = resolve({item: value}, {})
    assert found.config == Config() and found.retired == {item: "options"}
    (notice,) = found.notices
    assert item in notice and retired.instead in notice
    assert resolve(None, {environment_name(item): str(value)}).retired == {
        item: f"environment {environment_name(item)}"
    }
    with pytest.raises(OptionValueError):
        resolve({item: [value]}, {})
    assert option_from_text(f"{item}={value}") == (item, value)


def test_items_that_stand_for_others() -> None:
    assert resolve({"checkpointing": True, "recompute": 0.0}, {}).config.fixed_recompute == 0.0
    assert not resolve({"skip_grad_scaling": True}, {}).config.mean_gradients
    assert resolve({"profiling": True, "report_steps": 0}, {}).config.num_measured_steps == 5
    saving = resolve({"save_graph_profile": True}, {}).config
    assert (saving.profile_to_read, saving.profile_to_write) == ("", "rannc_graph_profiles.json")
    loading = resolve({"load_graph_profile": True, "graph_profile_file": "x"}, {}).config
    assert (loading.profile_to_read, loading.profile_to_write) == ("x", "")
    both = resolve({"profile_file": "y", "save_graph_profile": True}, {}).config
    assert (both.profile_to_read, both.profile_to_write) == ("y", "y")


# Statements that are valid on their own, of one line or more, in which lines look like other statements.
KEYS = st.sampled_from(["a", "b", "partition_num", '"q k"', "'l'", "d.e", "d . f"])
VALUES = st.sampled_from(
    [
        "1",
        '"[x]"',
        '"""\na = 1\n[t]\n"""',
        "'''\n\n# no\n'''",
        "[\n 1, # ]\n [2],\n]",
        "{ x = 1, y = [1] }",
        "true",
        '"""\\\n  x"""',
    ]
)
STATEMENTS = st.one_of(
    st.tuples(KEYS, VALUES).map(lambda pair: f"{pair[0]} = {pair[1]}"),
    st.sampled_from(["[t]", "[u.v]", "[[w]]", "  [ x ] # c", ""]),
    st.sampled_from(["# partition_num = 1", "   ", "\t# [t]"]),
)


@given(st.lists(STATEMENTS, max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_lines_of_statements(statements: list[str], newline: str) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    line, in_table, text = 1, False, ""
    for statement in statements:
        head = statement.strip()
        key = None
        if head.startswith("["):
            in_table, key = True, head.strip("[] #c").split(".")[0].strip()
        elif "=" in head and not head.startswith("#") and not in_table:
            key = head.partition("=")[0].strip().split(".")[0].strip(" \"'")
        if key is not None:
            expected[key] = (*expected.get(key, ()), line)
        line += statement.count("\n") + 1
        text += statement + "\n"
    try:
        found = parse_toml(text.replace("\n", newline), path="x")
    except ConfigurationFileError:
        return  # the same key twice
    assert found.lines == expected
    assert set(found.values) == set(expected)


LINES = st.one_of(
    st.tuples(st.sampled_from([*Config.model_fields, *RETIRED, "x"]), st.text(max_size=6)).map(
        lambda pair: f"{pair[0]} = {pair[1]}"
    ),
    st.tuples(
        st.sampled_from([*Config.model_fields, *RETIRED]), st.from_type(str | int | float | bool | list[int])
    ).map(lambda pair: f"{pair[0]} = {json.dumps(pair[1])}"),
    st.text(max_size=12),
    st.sampled_from(["[[sink]]", "[a.b]", "__import__('os').system('false')", '"""', "=", "[" * 2000]),
)


@given(st.lists(LINES, max_size=6).map("\n".join) | st.text(max_size=60))
def test_any_text_is_a_configuration_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_bytes(text.encode("utf-8", errors="surrogatepass"))
    try:
        found = resolve(None, {"RANNC_CONF_DIR": str(folder)})
    except RanncError as error:
        assert str(folder) in str(error)
    else:
        assert isinstance(found.config, Config)


@pytest.mark.parametrize(
    "variable", ["RANNC_PIPLINE_NUM", "RANNC_pipeline_num", "RANNC_", "RANNC_CONF_DIRECTORY"]
)
def test_a_variable_of_ours_that_is_no_option_is_refused(variable: str) -> None:
    with pytest.raises(UnknownOptionError) as caught:
        resolve(None, {variable: "4"})
    assert repr(variable) in str(caught.value) and "environment" in str(caught.value)
    assert resolve(None, {variable.replace("RANNC_", "OTHER_"): "4"}).config == resolve(None, {}).config
