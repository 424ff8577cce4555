"""`logging.toml`: spdlog's patterns, sinks by rank, RaNNC's names for our modules, and that no text of a file
brings us down.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannc_backend.errors import ConfigurationFileError, RanncError
from rannc_backend.log.logger import LOGGING_FILE, setup_logging
from rannc_backend.log.pattern import FLAGS, PatternError, PatternFormatter
from rannc_backend.log.rannc_names import MODULES, python_loggers
from rannc_backend.log.sinks import SinkHandler, rank_path
from tests.unit.rannc_backend.log.log_harness import fresh_logger

ROOT = Path(__file__).resolve().parents[4]
# As RaNNC's documentation shows it, with some of its loggers.
RANNC_EXAMPLE = """global_pattern = "[%Y-%m-%d %T.%f] [%L] <%n>: %v"
# Sinks
[[sink]]
name = "console_st"
type = "stdout_sink_st"
[[sink]]
name = "stderr_st"
type = "color_stdout_sink_st"
# Loggers
[[logger]]
name = "root"
sinks = ["console_st"]
level = "info"
[[logger]]
name = "AllReduceRunner"
sinks = ["stderr_st"]
level = "info"
[[logger]]
name = "MLPartitioner"
sinks = ["stderr_st"]
level = "info"
[[logger]]
name = "DPStaging"
sinks = ["stderr_st"]
level = "debug"
"""


def environ_with(folder: Path, text: str, **variables: str) -> dict[str, str]:
    """An environment in which `logging.toml` says `text`."""
    (folder / LOGGING_FILE).write_text(text, encoding="utf-8")
    return {"RANNC_CONF_DIR": str(folder), **variables}


def search_logger() -> logging.Logger:
    return logging.getLogger("rannc_backend.planner.search.search")


def record(
    message: str = "text", level: int = logging.WARNING, name: str = "rannc_backend.session"
) -> logging.LogRecord:
    made = logging.LogRecord(name, level, "/tmp/a/file.py", 12, message, (), None, func="work")
    made.created = 1_700_000_000.012345
    made.process, made.thread = 42, 7
    return made


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("%v", "text"),
        ("[%l] [%L] %n", "[warning] [W] rannc_backend.session"),
        ("%P %t %& %%", "42 7 rank 3 %"),
        ("%s:%# %g %@ %!", "file.py:12 /tmp/a/file.py /tmp/a/file.py:12 work"),
        ("%e %f %E", "012 012345 1700000000"),
        (
            "<%8l> <%-8l> <%=9l> <%3!l> <%12v>",
            "<warning> <warning > < warning > <war> <        text>".replace("<warning>", "< warning>"),
        ),
        ("%^%v%$", "text"),
        ("%O %o", "0 0"),
        ("100%% %+", None),
    ],
)
def test_flags(pattern: str, text: str | None) -> None:
    found = PatternFormatter(pattern, rank=3).format(record())
    if text is None:
        assert re.fullmatch(
            r"100% \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.012\] \[rannc_backend\.session\] \[warning\] text", found
        )
    else:
        assert found == text


def test_time_flags_are_those_of_strftime() -> None:
    moment = (
        PatternFormatter("%Y-%m-%d %H:%M:%S|%T|%X|%D %R %r %a %b %C %z|%c", rank=0)
        .format(record())
        .split("|")
    )
    assert re.fullmatch(r"2023-11-1[45] \d\d:\d\d:20", moment[0])
    assert moment[0].endswith(moment[1]) and moment[1] == moment[2]
    assert re.fullmatch(r"11/1[45]/23 \d\d:\d\d \d\d:\d\d:20 [AP]M \w{3} Nov 23 [+-]\d\d:\d\d", moment[3])
    assert re.fullmatch(r"\w{3} Nov 1[45] \d\d:\d\d:20 2023", moment[4])


def test_elapsed_flags_count_from_the_line_before() -> None:
    formatter = PatternFormatter("%o %i", rank=0)
    first, second = record(), record()
    second.created = first.created + 1.5
    assert formatter.format(first) == "0 0"
    assert formatter.format(second) == "1500 1500000"


def test_levels_below_debug_and_above_error() -> None:
    formatter = PatternFormatter("%l%L", rank=0)
    names = [formatter.format(record(level=level)) for level in (5, 10, 20, 25, 30, 40, 50)]
    assert names == ["traceT", "debugD", "infoI", "infoI", "warningW", "errorE", "criticalC"]
    assert (
        PatternFormatter("a%^b%$c", rank=0).render(record(level=40), colored=True) == "a\x1b[1;31mb\x1b[0mc"
    )


@pytest.mark.parametrize("pattern", ["%q", "%v %", "%5", "%-", "x" * 1001])
def test_wrong_patterns(pattern: str) -> None:
    with pytest.raises(PatternError):
        PatternFormatter(pattern, rank=0)


@given(st.lists(st.sampled_from(sorted(FLAGS)) | st.text(max_size=3), max_size=8))
def test_any_pattern_of_flags_formats_any_message(pieces: list[str]) -> None:
    pattern = "".join(f"%{piece}" if piece in FLAGS else piece.replace("%", "%%") for piece in pieces)
    assert isinstance(PatternFormatter(pattern, rank=0).render(record("a %s b"), colored=True), str)


def test_the_example_of_rannc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_logger():
        setup_logging(0, environ_with(tmp_path, RANNC_EXAMPLE))
        search_logger().debug("best step 3 ms")
        logging.getLogger("rannc_backend.planner.blocks.cut_blocks").debug("not heard")
        logging.getLogger("rannc_backend.session").info("a plan")
        logging.getLogger("rannc_backend.session").debug("not heard")
        lines = capsys.readouterr().out.splitlines()
        assert [re.sub(r"\d", "0", line) for line in lines] == [
            "[0000-00-00 00:00:00.000000] [D] <DPStaging>: best step 0 ms",
            "[0000-00-00 00:00:00.000000] [I] <root>: a plan",
        ]


def test_files_belong_to_ranks_and_levels_go_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"""
[[sink]]
name = "file"
type = "basic_file_sink_mt"
filename = {json.dumps(str(tmp_path / "logs" / "search.log"))}
create_parent_dir = true
[[sink]]
name = "nothing"
type = "null_sink_st"
[[sink]]
name = "loud"
type = "stderr_sink_st"
level = "err"
[[pattern]]
name = "short"
value = "%& %n %v"
[[logger]]
name = "root"
sinks = ["loud", "file"]
pattern = "short"
[[logger]]
name = "DPStaging"
sinks = ["file"]
level = "trace"
pattern = "short"
[[logger]]
name = "rannc_backend.capture.graph"
sinks = ["nothing"]
"""
    with fresh_logger() as package_logger:
        environ = environ_with(tmp_path, text)
        setup_logging(0, {**environ, "RANNC_LOG_LEVEL": "warning"})  # before the rank is known
        setup_logging(2, environ)
        search_logger().debug("cell")
        logging.getLogger("rannc_backend.session").info("not heard: rank 2")
        logging.getLogger("rannc_backend.session").warning("careful")
        logging.getLogger("rannc_backend.session").error("broken")
        logging.getLogger("rannc_backend.capture.graph").error("to nothing")
        assert (tmp_path / "logs" / "search.rank2.log").read_text().splitlines() == [
            "rank 2 DPStaging cell",
            "rank 2 root careful",
            "rank 2 root broken",
        ]
        assert not (tmp_path / "logs" / "search.log").exists()
        assert capsys.readouterr().err == "rank 2 root broken\n"
        assert len([handler for handler in package_logger.handlers if isinstance(handler, SinkHandler)]) == 1
        setup_logging(0, {})
        assert search_logger().level == logging.NOTSET
        assert not any(isinstance(handler, SinkHandler) for handler in package_logger.handlers)


def test_the_users_root_handlers_take_the_place_of_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fresh_logger():
        setup_logging(0, environ_with(tmp_path, RANNC_EXAMPLE))
        stream = io.StringIO()
        logging.getLogger().handlers = [logging.StreamHandler(stream)]
        logging.getLogger("rannc_backend.session").info("once")
        assert (stream.getvalue(), capsys.readouterr().out) == ("once\n", "")


def test_rotating_and_daily_files(tmp_path: Path) -> None:
    text = f"""
global_pattern = "%v"
[[sink]]
name = "a"
type = "rotating_file_sink_st"
base_filename = {json.dumps(str(tmp_path / "a.log"))}
max_size = "1K"
max_files = 2
[[sink]]
name = "b"
type = "daily_file_sink_st"
base_filename = {json.dumps(str(tmp_path / "b.log"))}
rotation_hour = 3
rotation_minute = 30
[[logger]]
name = "root"
sinks = ["a", "b"]
"""
    with fresh_logger() as package_logger:
        setup_logging(0, environ_with(tmp_path, text))
        for number in range(40):
            package_logger.info("x" * 99 + str(number % 10))
        assert sorted(path.name for path in tmp_path.glob("*.log*")) == [
            "a.log",
            "a.log.1",
            "a.log.2",
            "b.log",
        ]
        assert max(path.stat().st_size for path in tmp_path.glob("a.log*")) <= 1024
        assert len((tmp_path / "b.log").read_text().splitlines()) == 40


def test_names_stand_for_modules_that_exist() -> None:
    for modules in MODULES.values():
        for module in modules:
            place = ROOT / "rannc_backend" / module.replace(".", "/")
            alike = ROOT / module.replace(".", "/")  # passes/ and kernels/ lie beside the package
            assert place.with_suffix(".py").exists() or place.is_dir() or alike.is_dir(), module
    listed = [module for modules in MODULES.values() for module in modules]
    assert len(listed) == len(set(listed)), "a module of two loggers"
    assert python_loggers("root") == ("rannc_backend",) and python_loggers("nobody") is None
    page = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8")
    for name, modules in MODULES.items():
        row = (
            ", ".join(f"`{module}`" if module else "all of it" for module in modules)
            or "none: nothing here does that"
        )
        assert f"| `{name}` | {row} |" in page
    assert all(f"`%{flag}`" in page for flag in FLAGS)


def test_paths_of_ranks() -> None:
    assert rank_path("logs/a.log", 0) == Path("logs/a.log")
    assert rank_path("logs/a.log", 3) == Path("logs/a.rank3.log")
    assert rank_path("a", 1) == Path("a.rank1")


SINK = '[[sink]]\nname = "s"\ntype = "stdout_sink_st"\n'


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (SINK.replace("stdout_sink_st", "stdot_sink_st"), 1, "did you mean 'stdout_sink_st'"),
        (SINK + SINK, 4, "two of the name 's'"),
        (SINK + '[[logger]]\nname = "DPStagin"\nsinks = []\n', 4, "did you mean 'DPStaging'"),
        (SINK + '\n# x\n[[logger]]\nname = "root"\nsinks = ["t"]\n', 6, "no sink 't'"),
        ('[[logger]]\nname = "root"\n', 1, "logger.0.sinks is missing"),
        (SINK + '[[logger]]\nname = "root"\nsinks = ["s"]\nlevel = "loud"\n', 4, "logger.0.level"),
        (SINK + '[[logger]]\nname = "root"\nsinks = ["s"]\nlevle = "info"\n', 4, "did you mean 'level'"),
        (SINK + '[[logger]]\nname = "root"\nsinks = ["s"]\npattern = "p"\n', 4, "no pattern 'p'"),
        ('global_pattern = "%q"\n', 1, "there is no flag 'q'"),
        ('\n[[pattern]]\nname = "p"\nvalue = "%"\n', 2, "ends with %"),
        ('[[sink]]\nname = "s"\ntype = "basic_file_sink_st"\n', 1, "needs the key 'filename'"),
        (
            "[[sink]]\n"
            'name = "s"\n'
            'type = "rotating_file_sink_st"\nbase_filename = "x"\nmax_size = "1X"\nmax_files = 1\n',
            1,
            "is no size",
        ),
        (
            '[[sink]]\nname = "s"\ntype = "basic_file_sink_st"\nfilename = "/missing/folder/x"\n',
            1,
            "there is no directory",
        ),
        (
            '[[sink]]\nname = "s"\ntype = "basic_file_sink_st"\nfilename = "/"\n',
            1,
            "it is a directory, not a file",
        ),
        ('[[sink]]\nname = "s"\ntype = "basic_file_sink_st"\nfilename = "a\\u0000b"\n', 1, "zero byte"),
        ("\n[[sinks]]\n", 2, "did you mean 'sink'"),
        ("sink = 3\n", 1, "sink has a bad value"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    with fresh_logger() as package_logger:
        with pytest.raises(ConfigurationFileError) as caught:
            setup_logging(0, environ_with(tmp_path, text))
        assert str(caught.value).startswith(f"{tmp_path / LOGGING_FILE}, line {line}:")
        assert words in str(caught.value)
        assert package_logger.handlers == []


TABLES = st.sampled_from(
    ["[[sink]]", "[[logger]]", "[[pattern]]", "[sink]", "[global_thread_pool]", "[[logger.x]]", "[x"]
)
KEYS = st.sampled_from(
    [
        "name",
        "type",
        "sinks",
        "level",
        "pattern",
        "value",
        "base_filename",
        "max_size",
        "rotation_hour",
        "global_pattern",
        "x",
    ]
)
VALUES = st.one_of(
    st.sampled_from(
        [
            '"s"',
            '["s"]',
            '"stdout_sink_st"',
            '"null_sink_mt"',
            '"rotating_file_sink_st"',
            '"root"',
            '"debug"',
            '"%v%q"',
            "[[[[",
        ]
    ),
    st.from_type(str | int | float | bool).map(json.dumps),
)
LINES = TABLES | st.tuples(KEYS, VALUES).map(lambda pair: f"{pair[0]} = {pair[1]}") | st.text(max_size=8)


@given(st.lists(LINES, max_size=10).map("\n".join), st.integers(0, 2))
def test_any_text_is_a_logging_file_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, text: str, rank: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed_logging"
    folder.mkdir(exist_ok=True)
    (folder / LOGGING_FILE).write_bytes(text.encode("utf-8", errors="surrogatepass"))
    here = os.getcwd()
    os.chdir(folder)  # where a file that the text names would be made
    with fresh_logger():
        try:
            setup_logging(rank, {"RANNC_CONF_DIR": str(folder)})
            search_logger().info("a line")
        except RanncError as error:
            assert str(folder / LOGGING_FILE) in str(error)
        finally:
            os.chdir(here)
    assert search_logger().level == logging.NOTSET
