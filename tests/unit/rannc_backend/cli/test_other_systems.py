"""`rannc config --from`: the translation can be a file of options; files that are none are refused, and nothing is run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.autodist import AutoDistConfig
from rannc_backend.cli.main import main
from rannc_backend.cli.other_systems import SYSTEMS, as_toml, translated
from rannc_backend.errors import RanncError
from rannc_backend.settings.sources import resolve
from rannc_backend.settings.toml_lines import parse_toml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOML = 'task_name = "bert"\nmemory_constraint = 80\nupdate_freq = 4\npipeline_pivots = "encoder, decoder"\n'
OPTIONS = {"plan_name": "bert", "mem_limit_gb": 80.0, "pipeline_num": 4, "stage_pivots": "encoder,decoder"}


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["config", *arguments])
    return int(caught.value.code or 0)


@pytest.mark.parametrize("text", [TOML, json.dumps(tomllib.loads(TOML))])
def test_the_translation_is_a_file_of_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "autodist.txt"
    file.write_text(text)
    assert _run("--from", "autodist", str(file)) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed) == OPTIONS
    (tmp_path / "rannc_conf.toml").write_text(printed)
    config = resolve(None, {"RANNC_CONF_DIR": str(tmp_path)}).config
    assert {name: getattr(config, name) for name in OPTIONS} == OPTIONS
    assert _run("--from", "autodist", "--json", str(file)) == 0
    assert json.loads(capsys.readouterr().out) == OPTIONS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topkk = 3", "did you mean 'topk'"),
        ("topk = 0", "greater than or equal to 1"),
        ("[topk]\nof = 3", "'topk.of'"),
        ("topk: 3", "is not TOML"),
        ('{"topk": 3', "is not JSON"),
        ('{"topk": 3, "topk": 4}', "there twice"),
        ("{" * 5000, "is not JSON"),
        ('{"a": ' * 30000 + "1" + "}" * 30000, ""),
        ("a = 1\n" * 20000, ""),
    ],
)
def test_files_that_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file = tmp_path / "autodist.toml"
    file.write_text(text)
    assert _run("--from", "autodist", str(file)) == 2
    said = capsys.readouterr().err
    assert words in said and "What to change" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "autodst", "f"], "did you mean 'autodist'"),
        (["--from", "autodist"], "the path of a file"),
        (["f"], "one of autodist, epl"),
        (["--from", "autodist", "/nowhere/f"], "/nowhere/f"),
    ],
)
def test_commands_that_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert _run(*arguments) == 2
    assert words in capsys.readouterr().err


def test_systems_are_told() -> None:
    assert list(SYSTEMS) == ["autodist", "epl"]
    assert SYSTEMS["autodist"][:2] == (AutoDistConfig.__module__.rpartition(".")[0], AutoDistConfig.__name__)


@given(
    st.dictionaries(
        st.from_regex(r"\A[a-z_]{1,9}\Z"), st.text(st.characters(exclude_categories=["Cs"])), max_size=3
    )
)
def test_any_text_is_written_so_that_it_reads_back(options: dict[str, str]) -> None:
    assert parse_toml(as_toml(options), path="f").values == options


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_file_is_an_error_of_ours_or_options(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.mktemp("files") / "f"
    file.write_bytes(content)
    try:
        assert isinstance(translated("autodist", file), dict)
    except RanncError as error:
        assert "What to change" in str(error)
