"""Configurations: the file that the page gives as its example, the larger one of 0.4.2, and variables that
win over the file.
"""

import os
import pathlib
import tempfile

import torch
from torch import nn

import rannc_backend as pyrannc

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = """
opt_param_factor=2
mem_margin=0.1
min_pipeline=1
max_pipeline=32
save_deployment=true
load_deployment=false
trace_events=false
"""
MANUAL = pathlib.Path(__file__).with_name("manual_conf.toml").read_text()


def train():
    torch.manual_seed(0)
    model = pyrannc.RaNNCModule(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    )
    out = model(torch.randn(8, 4).to(device))
    out.backward(torch.randn_like(out))
    return model


def stages(path):
    pyrannc.barrier()
    return pyrannc.load_deployment(path).num_stages


def use(name, text):
    """A directory of its own with this rannc_conf.toml: an edit of a file that has been read is for the next
    job.
    """
    directory = pathlib.Path(tempfile.gettempdir()) / f"rannc_documents_{name}_{pyrannc.get_world_size()}"
    directory.mkdir(exist_ok=True)
    if pyrannc.get_rank() == 0:
        (directory / "rannc_conf.toml").write_text(text)
        (directory / "deployment.bin").unlink(missing_ok=True)
    pyrannc.barrier()
    os.environ["RANNC_CONF_DIR"] = str(directory)
    os.environ["RANNC_DEPLOYMENT_FILE"] = str(directory / "deployment.bin")
    return directory / "deployment.bin"


try:
    saved = use("page", PAGE)
    train()
    assert stages(saved) >= 1

    saved = use("manual", MANUAL)
    train()
    assert stages(saved) == 2

    os.environ["RANNC_PARTITION_NUM"] = (
        "1"  # "You can overwrite a configuration by setting environment variables"
    )
    os.environ["RANNC_REPLICA_NUM"] = "0"
    train()
    assert stages(saved) == 1
    pyrannc.barrier()
finally:
    for name in ("CONF_DIR", "DEPLOYMENT_FILE", "PARTITION_NUM", "REPLICA_NUM"):
        os.environ.pop(f"RANNC_{name}", None)
