"""Logging: the page's example of ~/.pyrannc/logging.toml, and the levels that the FAQ turns up to see the
search.
"""

import logging
import os
import pathlib
import tempfile

import torch
from torch import nn

import rannc_backend as pyrannc

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMES = (
    "RaNNCModule RaNNCProcess GraphLauncher GraphValueStorage GraphUtil Decomposer Decomposition "
    "GraphProfiler ParamStorage GraphConnector TorchDriver AllReduceRunner MLPartitioner DPStaging"
)
TEXT = """
global_pattern = "[%Y-%m-%d %T.%f] [%L] <%n>: %v"

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
"""
for name in NAMES.split():
    level = "debug" if name in ("MLPartitioner", "DPStaging") else "info"
    TEXT += f'\n[[logger]]\nname = "{name}"\nsinks = ["stderr_st"]\nlevel = "{level}"\n'

directory = pathlib.Path(tempfile.gettempdir()) / f"rannc_documents_logging_{pyrannc.get_world_size()}"
directory.mkdir(exist_ok=True)
if pyrannc.get_rank() == 0:
    (directory / "logging.toml").write_text(TEXT)
pyrannc.barrier()
os.environ["RANNC_CONF_DIR"] = str(directory)
try:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    pyrannc.RaNNCModule(net)(torch.randn(8, 4).to(device)).sum().backward()
    assert logging.getLogger("rannc_backend.planner.search.search").isEnabledFor(logging.DEBUG)
finally:
    del os.environ["RANNC_CONF_DIR"]
pyrannc.barrier()
