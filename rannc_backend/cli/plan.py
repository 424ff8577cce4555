"""The command `rannc plan`: a plan for machines that nobody has at hand.

In: the command line and the environment. Out: what planning does on stderr, the plan on stdout and, where
asked for, in files.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rannc_backend.cli.show import report_console
from rannc_backend.errors import OptionValueError
from rannc_backend.ir.plan_file import output_file, write_text
from rannc_backend.log.logger import is_logging_asked_for, setup_logging
from rannc_backend.log.progress import planning_progress
from rannc_backend.log.step_timer import StepTimer
from rannc_backend.planner.cluster.cluster_file import load_cluster
from rannc_backend.settings.options import Config
from rannc_backend.settings.sources import option_from_text, resolve_config
from rannc_backend.settings.user_files import require_writable

if TYPE_CHECKING:
    import torch

    from rannc_backend.ir.plan import Plan
    from rannc_backend.planner.blocks_file import PlannableModel
    from rannc_backend.planner.plan_blocks import PlanningQuestion

_WITH_BARS = ("blocks", "prices", "search")  # run while progress bars have the terminal
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE_OR_FILE:FACTORY",
            help="Function that returns (model, args, kwargs), or a file that --save-blocks wrote.",
            show_default=False,
        ),
    ],
    np: Annotated[
        int, typer.Option("--np", min=1, help="Number of devices to plan for.", show_default=False)
    ],
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size",
            min=1,
            help="Rows of one training step, of all replicas together.",
            show_default=False,
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            help="Shipped description, or TOML file; default: the option cluster.",
            show_default=False,
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node",
            min=1,
            help="Devices of a node; default: the description's.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="Of parameters, buffers and inputs: fp32, bf16, fp16, fp64.", show_default=False
        ),
    ] = None,
    mem_limit_gb: Annotated[
        float | None,
        typer.Option("--mem-limit-gb", min=0, help="As the option mem_limit_gb.", show_default=False),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="Any option of `rannc config`; repeatable."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="Measured prices: a profile_file, or a run_file.", show_default=False),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the plan here.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one self-contained page here.", show_default=False)
    ] = None,
    save_blocks: Annotated[
        Path | None,
        typer.Option(
            "--save-blocks", help="Write here what further plans of this model need.", show_default=False
        ),
    ] = None,
) -> None:
    """Plan a model that FACTORY makes, without a GPU, other processes or memory for its parameters.

    FACTORY is called under torch.device("meta"). Ctrl-C during the search takes the best plan so far; a
    second one aborts.
    """
    config = _config(option or [], cluster, mem_limit_gb, profile)
    if is_logging_asked_for(os.environ):
        setup_logging(0, os.environ)
    _check_folders(json, html, save_blocks)
    described = load_cluster(config.cluster, np, gpus_per_node)
    step_timer = _step_timer()
    # Only now: what is wrong with the words above is said before. Torch is imported for a model only, not for
    # its blocks.
    from rannc_backend.planner import plan_blocks as planning_search
    from rannc_backend.planner.blocks_file import PlannableModel, is_blocks_file

    question = planning_search.PlanningQuestion(
        config=config, cluster=described, batch_rows=batch_size, step_timer=step_timer
    )
    if is_blocks_file(model):
        if dtype is not None:
            raise OptionValueError(
                "--dtype",
                value=dtype,
                source="command line",
                expected="left out: the blocks have their dtype",
            )
        prepared = PlannableModel.read(model)
    else:
        prepared = _prepared(model, question, dtype)
    if save_blocks is not None:
        write_text(save_blocks, prepared.to_json(), what="blocks", named_by="--save-blocks")
        _say(f"blocks written to {save_blocks}")
    # From here on Ctrl-C means: enough. Before, there is no plan to give.
    with planning_progress() as progress:
        found = planning_search.plan_prepared(prepared, replace(question, progress=progress))
        if progress.cancelled():
            _say("the search was ended before it was done: this is the best plan so far")
    _deliver(found, json, html)


def _prepared(path: str, question: PlanningQuestion, dtype: str | None) -> PlannableModel:
    from rannc_backend.cli.model_factory import call_factory
    from rannc_backend.planner.plan_model import analyze_model, prepare

    floats = parse_dtype(dtype)
    with question.step_timer.step("model") as details:
        model, args, kwargs = call_factory(path)
        details.append(_size_of(model.parameters()))
    analysis = analyze_model(
        model,
        args,
        kwargs,
        cluster=question.cluster,
        config=question.config,
        dtype=floats,
        step_timer=question.step_timer,
    )
    with planning_progress(catches_interrupt=False) as progress:
        return prepare(analysis, replace(question, progress=progress))


def _deliver(plan: Plan, json: Path | None, html: Path | None) -> None:
    from rannc_backend.report.tables import plan_report

    console = report_console()
    for section in plan_report(plan):
        console.print(section)
    if json is not None:
        write_text(json, plan.to_json(), what="plan", named_by="--json")
        _say(f"plan written to {json}")
    if html is not None:
        from rannc_backend.report.page import plan_page

        write_text(html, plan_page(plan), what="page", named_by="--html")
        _say(f"page written to {html}")


def _config(
    texts: list[str], cluster: str | None, mem_limit_gb: float | None, profile: Path | None
) -> Config:
    options = dict(option_from_text(text) for text in texts)
    if cluster is not None:
        options["cluster"] = cluster
    if mem_limit_gb is not None:
        options["mem_limit_gb"] = mem_limit_gb
    if profile is not None:
        options["profile_file"] = str(profile)
    return resolve_config(options, os.environ)


def _check_folders(*paths: Path | None) -> None:
    """Before minutes of planning, not after."""
    for path in paths:
        if path is not None:
            require_writable(output_file(path, what="output file", named_by="command line"))


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of --dtype; None for None."""
    import torch

    if name is None:
        return None
    full = DTYPES.get(name, name)
    if full not in DTYPES.values():
        expected = "one of " + ", ".join([*DTYPES, *DTYPES.values()])
        raise OptionValueError(
            "--dtype",
            value=name,
            source="command line",
            expected=expected,
            choices=[*DTYPES, *DTYPES.values()],
        )
    return getattr(torch, full)


def _size_of(parameters: object) -> str:
    numbers = [parameter.numel() for parameter in parameters]  # type: ignore[attr-defined]
    return (
        f"{sum(numbers) / 1e9:.3g} billion parameters"
        if sum(numbers) >= 1e8
        else f"{sum(numbers):,} parameters"
    )


def _step_timer() -> StepTimer:
    if sys.stderr.isatty():
        console = Console(stderr=True)

        def show(name: str) -> AbstractContextManager[object]:
            return nullcontext() if name in _WITH_BARS else console.status(f"{name} ...")

        return StepTimer(log=lambda step: _say(str(step)), show=show)
    return StepTimer(log=lambda step: _say(str(step)))


def _say(text: str) -> None:
    typer.echo(text, err=True)
