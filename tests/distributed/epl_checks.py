"""Checks of EPL's words: a model is configured as EPL's documents do it, and a training is that of one process.

In: a context; `block` of its parameters is Python code of EPL's documents, or `config` the items. Out: findings. Every
function is collective.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

import rannc_backend
from rannc_backend import epl
from rannc_backend.backend import REGISTRY
from tests.distributed.harness.context import Context

EXACT = 1e-12
WIDTH, WORDS, LENGTH = 12, 17, 5
# The Python of EPL's page on its configuration, block by block. TensorFlow's collection of tensors is
# `rannc_backend.checkpoint_tensor` here, which the model below calls.
BLOCKS = {
    "micro_batches": """
config = epl.Config({"pipeline.num_micro_batch": 4})
epl.init(config)
""",
    "automatic_checkpoints": """
# Enable auto GC.
config = epl.Config({"gradient_checkpoint.type": "auto"})
epl.init(config)
""",
    "checkpoints": """
config = epl.Config({"gradient_checkpoint.type": "collection"})
epl.init(config)
""",
    "zero": """
config = epl.Config({"zero.level": "v1"})
epl.init(config)
""",
    "offload": """
config = epl.Config({"offload.level": "v0"})
epl.init(config)
""",
    "groups": """
config = epl.Config({"optimizer.num_apply_group": 30})
epl.init(config)
""",
    "amp": """
config = epl.Config({"amp.level": "O1", "amp.loss_scale": "dynamic"})
epl.init(config)
""",
    "amp_fixed": """
# fixed loss scaling
config = epl.Config({"amp.level": "O1", "amp.loss_scale": 128})
epl.init(config)
""",
}


class Layers(nn.Module):
    """A loss inside; what `collection` keeps is marked."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=0, sparse=sparse)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = rannc_backend.checkpoint_tensor(layer(hidden))
        scores = self.head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(scores, ids.roll(1, 1).flatten())


def _configured(context: Context) -> Any:
    """The block, or the items, taken as a script takes them; gives the configuration."""
    parameters = context.case.parameters
    if "block" in parameters:
        names: dict[str, Any] = {"epl": epl}
        exec(BLOCKS[parameters["block"]], names)
        return names["config"]
    return epl.init(epl.Config(parameters["config"]))


class _Training:
    """A model compiled with what the process was told, and its copy in one process."""

    def __init__(self, context: Context, dtype: torch.dtype, *, more: dict[str, Any] | None = None) -> None:
        self.context = context
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model, self.alone = Layers().to(dtype), Layers().to(dtype)
        self.alone.load_state_dict(self.model.state_dict())
        # What a job sets for itself, so that several ranks have work.
        options = {"stage_compiler": "eager", "max_partition_num": 16} | (more or {})
        self.compiled = torch.compile(self.model, backend="rannc", options=options)
        self.optimizers = [torch.optim.Adam(each.parameters(), 0.01) for each in (self.model, self.alone)]

    def ids(self, seed: int) -> Tensor:
        rows = sum(self.context.case.local_rows)
        return torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))

    def losses(self, seed: int) -> list[Tensor]:
        ids = self.ids(seed)
        start, stop = self.context.interval
        return [self.compiled(ids[start:stop].clone()), self.alone(ids)]

    def compare(self, bound: float) -> None:
        """Losses of three steps, and parameters after each."""
        find = self.context.findings
        for step in range(3):
            losses = self.losses(step)
            error = float((losses[0] - losses[1]).detach().abs())
            find.that(error <= bound, f"loss of step {step}: off by {error}")
            for loss, optimizer in zip(losses, self.optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            expected = dict(self.alone.named_parameters())
            for name, parameter in self.model.named_parameters():
                if rannc_backend.is_held(parameter):
                    off = float((parameter.detach() - expected[name].detach()).abs().max())
                    find.that(off <= bound, f"step {step}: {name} is off by {off}")

    def shows(self, expected: dict[str, Any]) -> None:
        """What the plan and the options are to show, by name."""
        session = REGISTRY.of(self.model)
        assert session is not None and session.plan is not None, "not planned yet"
        plan = session.plan
        found = {
            "stages": plan.num_stages,
            "micro_batches": plan.num_micro_batches,
            "schedule": plan.schedule,
            "recompute": [stage.recompute for stage in plan.stages],
            "told": plan.told_recompute,
            "zero": plan.zero_stage,
            "offload": plan.offload,
            "ranks": [list(stage.ranks) for stage in plan.stages],
            "options": {name: getattr(session.config, name) for name in expected.get("options", {})},
        }
        for name, value in expected.items():
            self.context.findings.that(found[name] == value, f"{name}: {found[name]}, not {value}")


def epl_trains(context: Context) -> None:
    """As one process, under a plan that shows what was asked for."""
    _configured(context)
    try:
        parameters = context.case.parameters
        training = _Training(context, torch.float64, more=parameters.get("more"))
        training.compare(EXACT)
        training.shows(parameters["shows"])
    finally:
        REGISTRY.defaults = None


def epl_amp(context: Context) -> None:
    """The compiled model casts without a word of the script, its scaler scales, and losses are those of one process
    under autocast.
    """
    config = _configured(context)
    find = context.findings
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rannc_backend").addHandler(handler)
    try:
        training = _Training(context, torch.float32, more={"log_casts": True})
        scalers = [epl.scaler(), torch.amp.GradScaler("cpu", init_scale=context.case.parameters["scale"])]
        for step in range(3):
            ids = training.ids(step)
            start, stop = context.interval
            with torch.autocast("cpu", dtype=torch.float16):
                alone = training.alone(ids)
            losses = [training.compiled(ids[start:stop].clone()), alone]
            error = float((losses[0] - losses[1]).detach().abs())
            find.that(error <= 2e-3, f"loss of step {step}: off by {error}")
            for loss, optimizer, scaler in zip(losses, training.optimizers, scalers, strict=True):
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        find.that(scalers[0].get_scale() == context.case.parameters["scale"], f"{scalers[0].get_scale()}")
        training.shows({"options": {"autocast": "float16"}})
        # An infinity: all ranks skip the step, and the scale changes where it is dynamic.
        before = {name: p.detach().clone() for name, p in _held(training.model)}
        (scalers[0].scale(training.losses(9)[0]) * float("inf")).backward()
        scalers[0].step(training.optimizers[0])
        scalers[0].update()
        find.that(all(p.equal(before[name]) for name, p in _held(training.model)), "a step with infinities")
        expected = context.case.parameters["scale"] * (0.5 if config["amp.loss_scale"] == "dynamic" else 1.0)
        find.that(scalers[0].get_scale() == expected, f"scale {scalers[0].get_scale()} after an infinity")
        casts = [line for line in records if line.startswith("casts: ")]
        find.that(context.rank != 0 or any("float32 to float16" in line for line in casts), f"log: {casts}")
    finally:
        logging.getLogger("rannc_backend").removeHandler(handler)
        REGISTRY.defaults = None


def epl_sparse(context: Context) -> None:
    """A table with sparse=True: its gradient is dense or sparse as the item says, and that of one process."""
    config = _configured(context)
    find = context.findings
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, alone = Layers(sparse=True).double(), Layers().double()
    alone.load_state_dict(model.state_dict())
    own = {"stage_compiler": "eager", "partition_num": 1, "replica_num": context.case.world}
    compiled = torch.compile(model, backend="rannc", options=own)
    ids = torch.randint(
        0, WORDS, (sum(context.case.local_rows), LENGTH), generator=torch.Generator().manual_seed(1)
    )
    start, stop = context.interval
    try:
        loss = compiled(ids[start:stop].clone())
    finally:
        REGISTRY.defaults = None
    loss.backward()
    alone(ids).backward()
    expected = alone.table.weight.grad
    gradient = model.table.weight.grad
    assert expected is not None and gradient is not None, "no gradient"
    is_dense = bool(config["communication.sparse_as_dense"])
    find.that(gradient.is_sparse != is_dense, f"the gradient is {gradient.layout}")
    find.that(float((gradient.to_dense() - expected).abs().max()) <= EXACT, "the gradient differs")


def _held(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p.detach()) for name, p in model.named_parameters() if rannc_backend.is_held(p)]


def epl_io(context: Context) -> None:
    """Files of the ranks: all of them once, and as the items say what does not go round."""
    find, rank, world = context.findings, context.rank, context.case.world
    files = [f"part-{index}" for index in range(2 * world + 1)]
    try:
        epl.init(epl.Config())
        find.that(epl.slice_files(files) == files, "without slicing")
        epl.init(epl.Config({"io.slicing": True, "io.unbalanced_io_slicing": True}))
        find.that(epl.slice_files(files) == files[rank::world], "uneven")
        epl.init(epl.Config({"io.slicing": True, "io.drop_last_files": True}))
        find.that(epl.slice_files(files) == files[rank : 2 * world : world], "dropped")
        dataset = torch.arange(5 * world + 1)
        own = [batch.tolist() for batch in torch.utils.data.DataLoader(
            dataset, batch_sampler=rannc_backend.RankBatches(dataset, 2)
        )]  # fmt: skip
        find.that(len(own) == 3 and all(own), f"batches {own}")
    finally:
        REGISTRY.defaults = None
