"""Predicted and measured step time, stage order and peak memory of small models on CPU ranks; prints a table,
then one JSON line.

    python tests/benchmarks/predicted_vs_measured.py --ranks 2,4

In: ranks, models, the stage compiler. Out: per model and plan what the planner predicted (cluster "local",
measured costs) and what the run measured of itself, with medians over all cases. Goals: steps within 15 % in
the median, stages in the right order, peak memory never predicted too low and at most 20 % too high. Peak
memory counts operator by operator, so with Inductor it is only a lower bound.

All cases of one number of ranks run in the same processes, one after the other: starting them takes longer
than the cases.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LIMIT_SECONDS = 600
STEP_GOAL, MEMORY_GOAL = 0.15, 0.20
# Stages predicted closer to each other than this have no order that could be wrong.
CLEAR_DIFFERENCE = 0.10
NOT_TIMED = 4  # two steps to warm up, one for memory, and one for the report to be gathered
LENGTH, VOCABULARY = 64, 1024
NUM_LAYERS = 4  # tracing takes most of the time
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")

Example = tuple[nn.Module, dict[str, Tensor]]


class Mlp(nn.Module):
    """Equal layers and a loss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (x - target).square().mean()


def mlp(rows: int) -> Example:
    """A step of about 0.2 s on one core; the others likewise."""
    x = torch.randn(16 * rows, 768)
    return Mlp(768, 8), {"x": x, "target": x.flip(0)}


def gpt2(rows: int) -> Example:
    """Causal language model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "n_embd": 192,
        "n_layer": NUM_LAYERS,
        "n_head": 6,
        "n_positions": LENGTH,
        "vocab_size": VOCABULARY,
    }
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return GPT2LMHeadModel(config), _tokens(rows)


def bert(rows: int) -> Example:
    """Masked language model."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        **_transformer(),
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config), {
        **_tokens(rows),
        "attention_mask": torch.ones(rows, LENGTH, dtype=torch.long),
    }


def llama(rows: int) -> Example:
    """Causal language model with gated MLPs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **_transformer(), num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False
    )
    return LlamaForCausalLM(config), _tokens(rows)


def vit(rows: int) -> Example:
    """Image classifier with attention."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        **{**_transformer(), "vocab_size": 0}, image_size=64, patch_size=8, num_labels=10, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config), _images(rows)


def resnet(rows: int) -> Example:
    """Image classifier with convolutions; batch statistics are those of each slice."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[32, 64, 128, 128],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=10,
    )
    return ResNetForImageClassification(config), _images(rows)


def _transformer() -> dict[str, int]:
    return {
        "hidden_size": 192, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 6, "intermediate_size": 768, "vocab_size": VOCABULARY
    }  # fmt: skip


def _tokens(rows: int) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (rows, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _images(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 64, 64), "labels": torch.randint(10, (rows,))}


MODELS: dict[str, Callable[[int], Example]] = {
    "mlp": mlp, "gpt2": gpt2, "bert": bert, "llama": llama, "vit": vit, "resnet": resnet
}  # fmt: skip
# The planner's own choice, and pipelines, which it would rarely choose on cores that share their memory.
PLANS = {2: ("", "1,1"), 4: ("", "1,1,1,1", "2,2")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One case. Ratios are measured / predicted; `misplaced`: pairs of stages in the wrong order."""

    model: str
    ranks: int
    replicas: str
    num_micro_batches: int
    predicted_seconds: float
    measured_seconds: float
    stage_ratios: tuple[float, ...]
    memory_ratios: tuple[float, ...]
    misplaced: int

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return abs(self.predicted_seconds / self.measured_seconds - 1)


def finding_of(model: str, report: dict[str, Any]) -> Finding:
    """What a run file says of one case."""
    stages = report["stages"]

    def busy(stage: dict[str, Any], prefix: str) -> float:
        return float(stage[f"{prefix}forward_seconds"] + stage[f"{prefix}backward_seconds"])

    misplaced = 0
    for first, second in itertools.combinations(stages, 2):
        predicted = busy(first, "predicted_") / busy(second, "predicted_")
        if max(predicted, 1 / predicted) > 1 + CLEAR_DIFFERENCE:
            misplaced += (predicted > 1) != (busy(first, "") > busy(second, ""))
    return Finding(
        model=model,
        ranks=report["world_size"],
        replicas=",".join(str(stage["num_replicas"]) for stage in stages),
        num_micro_batches=report["num_micro_batches"],
        predicted_seconds=report["predicted_step_seconds"],
        measured_seconds=report["step_seconds"],
        stage_ratios=tuple(busy(stage, "") / busy(stage, "predicted_") for stage in stages),
        memory_ratios=tuple(stage["peak_bytes"] / stage["predicted_peak_bytes"] for stage in stages),
        misplaced=misplaced,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, comma separated")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--compiler", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--costs", choices=("measured", "analytic"), default="measured")
    parser.add_argument("--rows", type=int, default=16, help="rows of the global batch")
    parser.add_argument("--steps", type=int, default=7, help="timed steps, of which the median counts")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def work(flags: argparse.Namespace) -> None:
    """One rank: every model under every plan; rank 0 leaves a run file for each."""
    torch.set_num_threads(1)
    ranks, directory = int(flags.ranks), Path(flags.worker)
    rank = next(int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ)
    for name, replicas in itertools.product(flags.models.split(","), PLANS[ranks]):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batch = MODELS[name](flags.rows)
        options = {
            "stage_compiler": flags.compiler, "outputs": "loss", "cluster": "local", "costs": flags.costs, "stage_replicas": replicas,
            "report_steps": flags.steps, "stage_memory": "traced", "run_file": str(directory / f"{name}-{ranks}-{replicas or 'auto'}.json"),
            # The plans of a model have the same blocks: each is measured once.
            "profile_file": str(directory / f"{ranks}.profile"),
        }  # fmt: skip
        compiled = torch.compile(model, backend="rannc", options=options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        own = {key: value.tensor_split(ranks)[rank] for key, value in batch.items()}
        for _ in range(flags.steps + NOT_TIMED):
            optimizer.zero_grad()
            outputs = compiled(**own)
            loss = outputs if isinstance(outputs, Tensor) else outputs.loss
            loss.backward()
            optimizer.step()


def launch(flags: argparse.Namespace, ranks: int, directory: Path, limit_seconds: float) -> None:
    """Run the workers; their log goes to stderr."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    own = [
        "--ranks",
        str(ranks),
        "--worker",
        str(directory),
        "--models",
        flags.models,
        "--compiler",
        flags.compiler,
    ]
    own += ["--costs", flags.costs, "--rows", str(flags.rows), "--steps", str(flags.steps)]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    command = [str(mpirun), "-n", str(ranks), sys.executable, __file__, *own]
    try:
        subprocess.run(command, env=environment, timeout=limit_seconds, check=True, stdout=sys.stderr)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        print(f"{ranks} ranks: {error}; the cases that were done count", file=sys.stderr)


def table(findings: Sequence[Finding]) -> str:
    """One line per case."""
    lines = [
        f"{'model':8} {'ranks':5} {'replicas':8} {'m':>3} {'predicted':>10} {'measured':>10} {'error':>7}  "
        "stages / peak memory"
    ]
    for item in findings:
        ratios = " ".join(f"{ratio:.2f}" for ratio in item.stage_ratios)
        memory = " ".join(f"{ratio:.2f}" for ratio in item.memory_ratios)
        lines.append(
            f"{item.model:8} {item.ranks:<5} {item.replicas:8} {item.num_micro_batches:>3} "
            f"{item.predicted_seconds * 1e3:>7.1f} ms {item.measured_seconds * 1e3:>7.1f} ms "
            f"{item.error:>6.1%}  {ratios} / {memory}{'  order!' if item.misplaced else ''}"
        )
    return "\n".join(lines)


def summary(flags: argparse.Namespace, findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """The figures that the goals are about."""
    memory = [ratio for item in findings for ratio in item.memory_ratios]
    median = statistics.median(item.error for item in findings)
    return {
        "compiler": flags.compiler,
        "costs": flags.costs,
        "cases": len(findings),
        "median_error": round(median, 4),
        "median_error_by_ranks": {
            ranks: round(statistics.median(item.error for item in findings if item.ranks == ranks), 4)
            for ranks in sorted({item.ranks for item in findings})
        },
        "worst_error": round(max(item.error for item in findings), 4),
        "stages_misplaced": sum(item.misplaced for item in findings),
        "memory_predicted_too_low": round(max(0.0, max(memory) - 1), 4),
        "memory_predicted_too_high": round(max(0.0, 1 / min(memory) - 1), 4),
        "goals_met": {
            "step": median <= STEP_GOAL,
            "order": not any(item.misplaced for item in findings),
            "memory": max(memory) <= 1 and 1 / min(memory) - 1 <= MEMORY_GOAL,
        },
        "seconds": round(seconds, 1),
        "findings": [asdict(item) for item in findings],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run all numbers of ranks, print, and give 0 if every case was measured."""
    flags = parse(argv)
    if flags.worker:
        work(flags)
        return 0
    begin = time.monotonic()
    counts = [int(text) for text in flags.ranks.split(",")]
    with tempfile.TemporaryDirectory() as directory:
        for ranks in counts:
            launch(flags, ranks, Path(directory), max(1.0, LIMIT_SECONDS - (time.monotonic() - begin)))
        findings = [
            finding_of(path.stem.split("-")[0], json.loads(path.read_text()))
            for path in sorted(Path(directory).glob("*.json"))
        ]
    if findings:
        print(table(findings))
        print(json.dumps(summary(flags, findings, time.monotonic() - begin)))
    return int(len(findings) < len(flags.models.split(",")) * sum(len(PLANS[ranks]) for ranks in counts))


if __name__ == "__main__":
    raise SystemExit(main())
