"""Settings for all tests: the same examples on every run, no deadline on a busy machine, nothing from the
user's environment.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.only_in_full import ONLY_IN_FULL
from tests.sampled import SAMPLED, left_out

settings.register_profile("rannc", derandomize=True, deadline=None, database=None)
settings.load_profile("rannc")

for variable in [name for name in os.environ if name.startswith("RANNC_")]:
    del os.environ[variable]
# A folder without files of options or logging, in place of the one in the home directory.
os.environ["RANNC_CONF_DIR"] = os.path.dirname(os.path.abspath(__file__))
# No plan of a test depends on how fast this machine is, and only tests of the calibration itself wait for
# one.
os.environ["RANNC_CLUSTER"] = "generic-cpu"
# Where cuts are matters to tests of the planner, which say what they plan with; tracing each distinct block
# to price it would be a third of the time of all others.
os.environ["RANNC_COSTS"] = "rules"
# The tests build small random models from configurations; no weights are fetched.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# A shell starts what it puts in the background with Ctrl-C ignored; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="without a CUDA device, or with a test skipped, the run fails",
    )
    parser.addoption(
        "--tenth",
        metavar="COMMIT",
        default="",
        help="also the tenth of the sampled tests that belongs to this commit",
    )


class FilesTogether(LoadScopeScheduling):
    """With several workers the tests of a file stay together, as they share captured models, and those of all
    files with cases do too.

    A worker that is asked for one distributed case runs all of them. The processes that their ranks are
    forked from are its own.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        texts = {
            path.name: path.read_text(encoding="utf-8")
            for path in (Path(__file__).parent / "distributed").glob("test_*.py")
        }
        self._with_cases = {
            name
            for name, text in texts.items()
            if any(fixture in text for fixture in ("outcome_of", "templates"))
        }

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        return "cases" if Path(path).name in self._with_cases else path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before pytest leaves out what is marked so."""
    others = left_out(SAMPLED, config.getoption("--tenth"))
    for item in items:
        if item.nodeid in ONLY_IN_FULL:
            item.add_marker(pytest.mark.full)
        if item.nodeid in others:
            item.add_marker(pytest.mark.sampled)


# Not the group marks of pytest-xdist: version 3.8 does not see them under pytest 9.2.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether:
    """How tests are shared out under ``-n``."""
    return FilesTogether(config, log)
