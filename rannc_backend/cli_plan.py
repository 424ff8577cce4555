"""The command `rannc plan`: a plan for machines that nobody has at hand.

In: the command line and the environment. Out: what planning does on stderr, the plan on stdout and, where asked for, in files.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rannc_backend.config import Config, option_from_text, resolve_config
from rannc_backend.cost.cluster_file import load_cluster
from rannc_backend.deployment_file import write_text
from rannc_backend.errors import OptionValueError
from rannc_backend.narrator import Narrator
from rannc_backend.progress import planning_progress

if TYPE_CHECKING:
    import torch

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def plan(
    factory: Annotated[
        str, typer.Argument(metavar="MODULE_OR_FILE:FACTORY", help="Function that returns (model, args, kwargs).", show_default=False)
    ],
    np: Annotated[int, typer.Option("--np", min=1, help="Number of devices to plan for.", show_default=False)],
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Rows of one training step, of all replicas together.", show_default=False)
    ],
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Shipped description, or TOML file; default: the option cluster.", show_default=False)
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=1, help="Devices of a node; default: the description's.", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of parameters, buffers and inputs: fp32, bf16, fp16, fp64.", show_default=False)
    ] = None,
    mem_limit_gb: Annotated[
        float | None, typer.Option("--mem-limit-gb", min=0, help="As the option mem_limit_gb.", show_default=False)
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Any option of `rannc config`; repeatable.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the plan here.", show_default=False)] = None,
) -> None:
    """Plan a model that FACTORY makes, without a GPU, other processes or memory for its parameters.

    FACTORY is called under torch.device("meta"). Ctrl-C during the search takes the best plan so far; a second one aborts.
    """
    config = _config(option or [], cluster, mem_limit_gb)
    _check_folder(json)
    described = load_cluster(config.cluster, np, gpus_per_node)
    # Only now: importing torch takes seconds, and what is wrong with the words above is said before.
    from rannc_backend.planning import analyze_model, plan_analysis
    from rannc_backend.planning_factory import call_factory

    floats = _dtype(dtype)
    narrator = _narrator()
    with narrator.step("model") as details:
        model, args, kwargs = call_factory(factory)
        details.append(_size_of(model.parameters()))
    analysis = analyze_model(model, args, kwargs, cluster=described, dtype=floats, narrator=narrator)
    with planning_progress() as progress:
        found = plan_analysis(
            analysis, config=config, num_devices=np, cluster=described, batch_rows=batch_size, progress=progress, narrator=narrator
        )
        if progress.cancelled():
            _say("the search was ended before it was done: this is the best plan so far")
    typer.echo(found.summary())
    if json is not None:
        write_text(json, found.to_json(), what="plan")
        _say(f"plan written to {json}")


def _config(texts: list[str], cluster: str | None, mem_limit_gb: float | None) -> Config:
    options = dict(option_from_text(text) for text in texts)
    if cluster is not None:
        options["cluster"] = cluster
    if mem_limit_gb is not None:
        options["mem_limit_gb"] = mem_limit_gb
    return resolve_config(options, os.environ)


def _check_folder(*paths: Path | None) -> None:
    """Before minutes of planning, not after."""
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise OptionValueError("output file", value=str(path), source="command line", expected="a file in a folder that exists")


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    if name is None:
        return None
    full = DTYPES.get(name, name)
    if full not in DTYPES.values():
        expected = "one of " + ", ".join([*DTYPES, *DTYPES.values()])
        raise OptionValueError("--dtype", value=name, source="command line", expected=expected)
    return getattr(torch, full)


def _size_of(parameters: object) -> str:
    numbers = [parameter.numel() for parameter in parameters]  # type: ignore[attr-defined]
    return f"{sum(numbers) / 1e9:.3g} billion parameters" if sum(numbers) >= 1e8 else f"{sum(numbers):,} parameters"


def _narrator() -> Narrator:
    if sys.stderr.isatty():
        console = Console(stderr=True)
        return Narrator(tell=lambda step: _say(str(step)), show=lambda name: console.status(f"{name} ..."))
    return Narrator(tell=lambda step: _say(str(step)))


def _say(text: str) -> None:
    typer.echo(text, err=True)
