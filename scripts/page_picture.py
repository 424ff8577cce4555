"""Makes docs/images/plan_page.png, the picture of a plan's page in the README: `python -m
scripts.page_picture`.

The plan is that of `examples/train_gpt2.py --stages 2` for two ranks: a GPT-2 of 4 layers, width 128, as a
pipeline of two stages, on the CPU that `rannc_backend/planner/cluster/clusters/generic-cpu.toml` describes.
It lies beside the picture as JSON; `--keep-plan` pictures it again as it is. The picture says which page it
shows (`shown_page`), so a test sees when it is out of date.
"""

from __future__ import annotations

import argparse
import hashlib
import struct
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from rannc_backend.ir.plan import Plan
from rannc_backend.ir.plan_file import read_plan
from rannc_backend.planner.cluster.cluster_file import load_cluster
from rannc_backend.report.page import plan_page
from rannc_backend.settings.options import Config
from scripts.browser import Browser

COMMAND = "python -m scripts.page_picture --keep-plan"
IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
PICTURE, PLAN = IMAGES / "plan_page.png", IMAGES / "plan_page.json"
_WIDTH = 1180
_LAST_SECTION = "Stages"  # what is below it is left out
_KEYWORD = b"page"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def example_plan() -> Plan:
    """The plan, made anew."""
    import torch
    import transformers

    from rannc_backend.planner.plan_blocks import PlanningQuestion
    from rannc_backend.planner.plan_model import plan_model

    config = transformers.GPT2Config(
        vocab_size=256, n_positions=128, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        tokens = torch.zeros(8, 128, dtype=torch.int64)
    question = PlanningQuestion(
        config=Config(partition_num=2, outputs="loss"),
        cluster=load_cluster("generic-cpu", 2, None),
        batch_rows=16,
    )
    return plan_model(model, (), {"input_ids": tokens, "labels": tokens}, question)


def page_digest(plan: Plan) -> str:
    """Of the page as it is made today."""
    return hashlib.sha256(plan_page(plan).encode()).hexdigest()


def shown_page(picture: bytes) -> str:
    """The digest of the page that a picture shows; "" if it does not say."""
    place = len(_SIGNATURE)
    while place < len(picture):
        (length,) = struct.unpack(">I", picture[place : place + 4])
        kind, data = picture[place + 4 : place + 8], picture[place + 8 : place + 8 + length]
        if kind == b"tEXt" and data.startswith(_KEYWORD + b"\0"):
            return data.partition(b"\0")[2].decode("ascii")
        place += 12 + length
    return ""


def make_picture(plan: Plan) -> bytes:
    """The upper part of the page as PNG."""
    with tempfile.TemporaryDirectory() as directory, Browser() as browser:
        page = Path(directory) / "plan.html"
        page.write_text(plan_page(plan), encoding="utf-8")
        browser.open(page, width=_WIDTH)
        script = (
            "return [...document.querySelectorAll('main > section')].find((section) => "
            "section.querySelector('h2 .term')?.firstChild.textContent === "
            "arguments[0]).getBoundingClientRect().bottom"
        )
        height = round(browser.run(script, _LAST_SECTION)) + 9
        picture = browser.picture(width=_WIDTH, height=height)
    text = b"tEXt" + _KEYWORD + b"\0" + page_digest(plan).encode("ascii")
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    header_end = len(_SIGNATURE) + 25  # the header is the first chunk and has a fixed size
    return picture[:header_end] + chunk + picture[header_end:]


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep-plan", action="store_true", help=f"picture {PLAN.name} as it is")
    flags = parser.parse_args(arguments)
    plan = read_plan(PLAN) if flags.keep_plan else example_plan()
    picture = make_picture(plan)
    IMAGES.mkdir(exist_ok=True)
    PLAN.write_text(plan.to_json(), encoding="utf-8")
    PICTURE.write_bytes(picture)
    sys.stdout.write(f"{PICTURE}: {len(picture)} bytes\n")


if __name__ == "__main__":
    main()
