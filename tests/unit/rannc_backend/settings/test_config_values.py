"""Values that are no values, for every option, from every source: taken, or refused by name; and what is
taken can be used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.errors import ConfigurationFileError, LaunchError, OptionValueError
from rannc_backend.log.logger import setup_logging
from rannc_backend.runtime.job.bootstrap import options_of
from rannc_backend.runtime.launch import _MPI_VARIABLES, _TORCHRUN_VARIABLES, find_launch
from rannc_backend.settings.options import Config, environment_name
from rannc_backend.settings.rannc_items import RETIRED
from rannc_backend.settings.sources import choices_of, option_from_text, resolve

ITEMS = sorted((*Config.model_fields, *RETIRED))
HUGE = "9" * 5000
TEXTS = st.one_of(
    st.sampled_from(
        [
            HUGE,
            f"-{HUGE}",
            f"1,{HUGE}",
            f"{HUGE},1",
            f"a={HUGE}",
            f"0.{HUGE}",
            f"{HUGE}.5",
            "1e999",
            "-1e999",
            "nan",
            "inf",
            "-inf",
        ]
        + [
            "\0",
            "a\0b",
            "\ud800",
            "\x1b[2J",
            "\n",
            "",
            " ",
            "٣",
            "1_000",
            "1,,2",
            ",",
            "=",
            "a=",
            "=1",
            "true,true",
            "-0",
            "1e-400",
        ]
    ),
    st.text(max_size=20),
    st.integers().map(str),
    st.floats().map(str),
)
NUMBERS = st.one_of(
    st.sampled_from(
        [
            10**5000,
            -(10**5000),
            2**63,
            -(2**63) - 1,
            2**1024,
            1e308,
            5e-324,
            math.inf,
            -math.inf,
            math.nan,
            1j,
        ]
    ),
    st.integers(),
    st.floats(),
)
VALUES = st.one_of(
    TEXTS,
    NUMBERS,
    st.lists(TEXTS | NUMBERS, max_size=2),
    st.dictionaries(TEXTS, NUMBERS | TEXTS, max_size=2),
    st.none(),
    st.booleans(),
    st.binary(max_size=3),
)


def use(options: Mapping[str, object], environ: Mapping[str, str]) -> Config:
    """Resolve, and look at what is derived."""
    resolution = resolve(options, environ)
    config = resolution.config
    assert all(0 < count < 10**9 for count in config.stage_replica_counts)
    assert config.fixed_recompute is None or 0 <= config.fixed_recompute <= 1
    assert all(math.isfinite(value) for value in config.model_dump().values() if isinstance(value, float))
    assert resolution.lines() and options_of(config).start_limit_seconds < 10**9
    return config


def named(error: OptionValueError, item: str) -> None:
    text = str(error)
    assert (error.item == item or item in text) and "What to change" in text
    assert len(text) < 2000, "the whole of a long value"


@given(st.sampled_from(ITEMS), VALUES)
def test_options(item: str, value: object) -> None:
    try:
        use({item: value}, {})
    except OptionValueError as error:
        named(error, item)


@given(st.sampled_from(ITEMS), TEXTS)
def test_environment_and_command_line(item: str, text: str) -> None:
    try:
        use({}, {environment_name(item): text})
    except OptionValueError as error:
        named(error, item)
        assert environment_name(item) in str(error)
    try:
        use(dict([option_from_text(f"{item}={text}")]), {})
    except OptionValueError as error:
        named(error, item)


@pytest.mark.parametrize("item", ITEMS)
def test_thousands_of_digits(item: str) -> None:
    """RANNC_STAGE_REPLICAS was a KeyError."""
    for text in (HUGE, f"{HUGE},{HUGE}", f"a={HUGE}", f"1.{HUGE}e{HUGE}"):
        try:
            use({}, {environment_name(item): text})
        except OptionValueError as error:
            named(error, item)
        else:
            kind = type(RETIRED[item].default if item in RETIRED else Config.model_fields[item].default)
            assert kind is str, f"{item} took {text[:20]}"
    for text in (HUGE, f"1,{HUGE}"):
        with pytest.raises(OptionValueError, match="RANNC_STAGE_REPLICAS"):
            use({}, {"RANNC_STAGE_REPLICAS": text})


@given(st.sampled_from(ITEMS), TEXTS.filter(lambda text: "\ud800" not in text))
def test_the_file_of_options(tmp_path_factory: pytest.TempPathFactory, item: str, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "values"
    folder.mkdir(exist_ok=True)
    # As a number, a date, a table or whatever it happens to be; and as a text, as far as TOML can write it.
    for value in (text, f"'{text}'"):
        Path(folder, "rannc_conf.toml").write_bytes(
            f"{item} = {value}\n".encode("utf-8", errors="surrogatepass")
        )
        try:
            use({}, {"RANNC_CONF_DIR": str(folder)})
        except OptionValueError as error:
            named(error, item)
            assert "rannc_conf.toml, line 1" in str(error)
        except ConfigurationFileError as error:
            assert "rannc_conf.toml" in str(error) and len(str(error)) < 2000


@given(
    st.sampled_from(sorted({name for pair in (*_MPI_VARIABLES, _TORCHRUN_VARIABLES) for name in pair})), TEXTS
)
def test_what_launchers_say(name: str, text: str) -> None:
    others = {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "PMI_SIZE": "2",
        "PMI_RANK": "0",
    }
    try:
        launch = find_launch(others | {name: text})
        assert 0 <= launch.rank < 10**9 and 1 <= launch.size < 10**9
    except LaunchError as error:
        assert name in str(error) and len(str(error)) < 500


@given(TEXTS)
def test_the_level_of_the_log(text: str) -> None:
    try:
        setup_logging(0, {"RANNC_LOG_LEVEL": text})
    except OptionValueError as error:
        assert "RANNC_LOG_LEVEL" in str(error) and len(str(error)) < 500


def test_what_an_item_may_be_is_known_by_its_names() -> None:
    assert choices_of("coarsen_by_time") == ["true", "false"]
    assert choices_of("schedule") == [
        "auto",
        "1f1b",
        "fill_drain",
        "zb_h1",
        "list_scheduled",
        "interleaved",
        "zb_v",
        "v_half",
    ]
    assert choices_of("recompute") == ["auto", "segments", "marked"] and choices_of("zero_stage") == ["auto"]
    assert choices_of("pipeline_num") == choices_of("cache_dir") == []
