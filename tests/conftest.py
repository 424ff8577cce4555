"""Settings for all tests: the same examples on every run, no deadline on a busy machine, nothing from the user's environment."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("rannc", derandomize=True, deadline=None, database=None)
settings.load_profile("rannc")

for variable in [name for name in os.environ if name.startswith("RANNC_")]:
    del os.environ[variable]
# A folder without files of options or logging, in place of the one in the home directory.
os.environ["RANNC_CONF_DIR"] = os.path.dirname(os.path.abspath(__file__))
# No plan of a test depends on how fast this machine is, and only tests of the calibration itself wait for one.
os.environ["RANNC_CLUSTER"] = "generic-cpu"
# The tests build small random models from configurations; no weights are fetched.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# A shell starts what it puts in the background with Ctrl-C ignored; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file share captured models: with several workers they stay together. Distributed ones are grouped in their folder."""
    folder = Path(__file__).parent
    for item in items:
        if folder / "distributed" not in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(folder))))
